"""The Triton kernel of `_temporal_difference_scan` against the reference, within test_kernels.py's budgets.

With a GPU it runs for real, and so do all of that file's CUDA tests. Without one it runs in Triton's interpreter, which
has to be chosen before triton is imported: in a process of its own that sets TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.returns import TemporalDifferenceCall

from returns import test_kernels, test_n_step
from returns.test_kernels import KINDS, Call, call, check
from support.selection import slow
from support.subprocesses import run_in_the_interpreter, run_tests

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_in_the_interpreter"
)
# Rows of several tiles (of 128 steps) and of one, columns of two blocks, rows that neither lie within a step nor have
# neighbors in time.
SHAPES = (((3, 300), 1), ((5, 7), 1), ((21, 140), 0), ((2, 19, 9), 1), ((40, 3), 0))


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernel runs in this process")
@pytest.mark.parametrize("marks", ["not slow", slow("slow")])
def test_in_the_interpreter(marks: str) -> None:
    """With those of test_n_step.py, in one process."""
    run_in_the_interpreter(__file__, test_n_step.__file__, "-k", "triton", "-m", marks)


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU")
def test_all_of_the_kernel_tests() -> None:
    run_tests(test_kernels.__file__, "-k", "cuda", TORCH_DCS_KERNELS="triton")


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of triton_kernels/returns/temporal_difference.py, with the op's arguments; `check` calls it."""
    module = importlib.import_module("torch_dcs_ops.triton_kernels.returns.temporal_difference")

    def launch(*args: Any) -> Any:
        return module.temporal_difference_scan(TemporalDifferenceCall(*args))

    monkeypatch.setattr(test_kernels, "OP", launch)
    return launch


@kernel_test
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], dim: int, kind: str) -> None:
    for next_values, flags in ((False, "bool"), (True, "float")):
        check(call(shape, dim, torch.float32, DEVICE, kind=kind, next_values=next_values, flags=flags))


@kernel_test
@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rates", ["number", "row", "step"])
def test_discounts_and_flags(rates: str, kind: str) -> None:
    for dim, (next_values, flags) in itertools.product((0, 1), ((False, "none"), (False, "float"), (True, "bool"))):
        check(call((17, 19), dim, torch.float32, DEVICE, kind=kind, rates=rates, next_values=next_values, flags=flags))


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    for dim in (0, 1):
        check(call((18, 40), dim, dtype, DEVICE, kind="vtrace", rates="row", flags="float"))


@kernel_test
@pytest.mark.parametrize("layout", ["permuted", "expanded", "strided", "sub_view"])
def test_layouts(layout: str) -> None:
    for dim in (0, 1, 2):
        check(call((5, 12, 11), dim, torch.float32, DEVICE, kind="vtrace", rates="step", layout=layout))


@kernel_test
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_not_finite_stays_within_its_episode(launcher: Any, dim: int, bad: float) -> None:
    """From step 30 back to the step after the end of an episode, 10, in its own column."""
    rewards = torch.ones(40, 9)
    rewards[30, 5] = bad
    ends = torch.zeros(40, 9, dtype=torch.bool)
    ends[9] = True
    operands = (t.movedim(0, dim).contiguous().to(DEVICE) for t in (rewards, torch.ones(40, 9), ends))
    reward, value, end = operands
    arguments: tuple[Tensor | float | None, ...] = (None, 0.9, None, 0.8, None, 1.0, 1.0, 1.0)
    advantages, _, _ = launcher(reward, value, None, None, end, None, *arguments, dim, True, False, False)
    reached = torch.zeros(40, 9, dtype=torch.bool)
    reached[10:31, 5] = True
    assert torch.equal(~advantages.isfinite().movedim(dim, 0).cpu(), reached)


@kernel_test
def test_only_what_is_needed(launcher: Any) -> None:
    c: Call = call((6, 9), 1, torch.float32, DEVICE, kind="vtrace")
    everything = launcher(*c.arguments())
    for needs in itertools.product((False, True), repeat=3):
        results = launcher(*c._replace(needs=needs).arguments())
        for result, wanted, need in zip(results, everything, needs, strict=True):
            assert torch.equal(result, wanted if need else wanted.new_empty(0))
    empty = call((0, 9), 1, torch.float32, DEVICE)
    assert all(result.shape == (0, 9) for result in launcher(*empty.arguments()))
