"""Generated kernels whose blocks hold whole columns: scans over the first dimension of few columns.

With a GPU the kernels run for real; without one they run in Triton's interpreter, in the process that
compile/test_scan_lowering.py starts, and are compiled for a GPU that is not there.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import cumsum, discounted_cumsum, returns

from compile.generated_code import (
    BLOCKS,
    DEVICE,
    INTERPRETED,
    InterpretedKernel,
    Kernels,
    compiled_for_a_gpu,
    lowering_test,
)
from scan.oracle import HALF, assert_is_scan, make, make_gamma, make_reset
from support.subprocesses import rare

pytest.importorskip("triton")
pytestmark = pytest.mark.each_value

# Just more than a tile of half as many steps, and a number of groups that leaves one of them in part.
LENGTHS = (65, 203)
COLUMNS = 7


def negated_scan(x: Tensor, gamma: Any, initial: Tensor | None, **options: Any) -> Tensor:
    return -discounted_cumsum(-x, gamma, dim=0, initial=None if initial is None else -initial, **options)


def check_scan(kernels: Kernels, x: Tensor, gamma: Any, *, initial: Tensor | None = None, **options: Any) -> None:
    result = torch.compile(negated_scan, fullgraph=True, dynamic=False)(x, gamma, initial, **options)
    assert_is_scan(result, x, gamma, dim=0, initial=initial, **options)
    assert_whole_columns(kernels)


def assert_whole_columns(kernels: Kernels) -> None:
    """One kernel, without a loop over time, in which every scan is one of columns."""
    assert len(kernels.names()) == 1, kernels.names()
    assert kernels.extern_ops() == []
    assert "register_groups.column_order(" in kernels.source
    assert "tl.range(" not in kernels.source


@lowering_test
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("direction", [pytest.param("left", marks=pytest.mark.slow), "right"])
@pytest.mark.parametrize("kind", ["number", "step"])
def test_gammas(kernels: Kernels, kind: str, direction: str, length: int) -> None:
    shape = (length, COLUMNS)
    gamma = make_gamma(kind, shape, 0, torch.float32, DEVICE)
    initial, reset = make((COLUMNS,), torch.float32, DEVICE, seed=3), make_reset(shape, DEVICE)
    check_scan(
        kernels, make(shape, torch.float32, DEVICE), gamma, direction=direction, initial=initial, reset=reset
    )  # fmt: skip


@lowering_test
@pytest.mark.parametrize("gamma", [rare(1.0), rare(0.0), -0.75, 0.999])
def test_numbers(kernels: Kernels, gamma: float) -> None:
    check_scan(kernels, make((128, COLUMNS), torch.float32, DEVICE), gamma)


@lowering_test
@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles the kernels of all tests")
def test_kernels_compile_for_a_gpu(kernels: Kernels) -> None:
    """The interpreter takes more than the compiler, such as a function that calls one of its arguments."""
    x = make((100, COLUMNS), torch.float32, DEVICE)
    gates = make_gamma("step", x.shape, 0, torch.float32, DEVICE)

    def function(x: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
        one = discounted_cumsum(x * 2, 0.9, dim=0, reset=x < -2)
        return one, discounted_cumsum(one, gates, dim=0, direction="left") * 2, cumsum(one * 2, 0)

    with mock.patch.object(InterpretedKernel, "run"):
        torch.compile(function, fullgraph=True, dynamic=False)(x, gates)
    for kind in ("register_groups.discounted_columns(", "_columns(", "register_groups.summed_columns("):
        assert kind in kernels.source
    compiled_for_a_gpu(kernels.source, XBLOCK=16, num_warps=4)


@lowering_test
@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="a GPU's compiler may be another version")
def test_carries_change_their_layout_once(kernels: Kernels) -> None:
    """Totals to the scan over groups and carries back, not a product with the carry for each of a thread's steps."""
    x, resets = make((1024, 32), torch.float32, DEVICE), make_reset((1024, 32), DEVICE)
    functions = (
        lambda x: discounted_cumsum(x * 2, 0.9, dim=0) * 0.5,
        lambda x: discounted_cumsum(x * 2, 0.9, dim=0, reset=resets) * 0.5,
        lambda x: cumsum(x * 2, 0, reverse=True) * 0.5,
    )
    sources = []
    for function in functions:
        kernels.clear()
        with mock.patch.object(InterpretedKernel, "run"):
            torch.compile(function, fullgraph=True, dynamic=False)(x)
        assert_whole_columns(kernels)
        sources.append(kernels.source)
    # With resets a group's product of gates is no constant.
    assert compiled_for_a_gpu("\n".join(sources), XBLOCK=16, num_warps=8) == [2, 3, 2]


@lowering_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["number", "step"])
def test_half_precision(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype in HALF:
        pytest.skip("Triton's interpreter cuts half-precision results off where the GPU rounds")
    check_scan(kernels, make((203, COLUMNS), dtype, DEVICE), make_gamma(kind, (203, COLUMNS), 0, dtype, DEVICE))


@lowering_test
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_cumsum(kernels: Kernels, dtype: torch.dtype, reverse: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return -cumsum(-x, 0, reverse=reverse)

    x = make((203, COLUMNS), torch.float32, DEVICE).mul(8).to(dtype)
    result = torch.compile(function, fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(result, function(x.double()), check_dtype=False, rtol=1e-6, atol=1e-4)
    if dtype == torch.float64:
        # Not one of columns: twice the registers.
        assert "register_groups" not in kernels.source or "column_order" not in kernels.source
    else:
        assert_whole_columns(kernels)


@lowering_test
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("kind", ["number", "step"])
def test_a_reset_drops_what_is_not_finite(kernels: Kernels, kind: str, direction: str) -> None:
    shape = (130, COLUMNS)
    x = make(shape, torch.float32, DEVICE)
    x[9, 0], x[64, 1], x[90, 2], x[0, 3], x[129, 4] = math.nan, math.inf, -math.inf, math.nan, math.inf
    reset = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    reset[3::41] = True
    check_scan(kernels, x, make_gamma(kind, shape, 0, torch.float32, DEVICE), direction=direction, reset=reset)


@lowering_test
def test_gates_that_are_not_finite(kernels: Kernels) -> None:
    shape = (130, COLUMNS)
    x, gamma = make(shape, torch.float32, DEVICE), make_gamma("step", shape, 0, torch.float32, DEVICE)
    gamma[9, 0], gamma[77, 1], gamma[0, 2], gamma[45, 3], gamma[4, 4] = math.nan, math.inf, math.nan, -math.inf, 0
    x[2, 4] = math.nan  # which a gate of 0 does not stop
    check_scan(kernels, x, gamma, direction="left", reset=make_reset(shape, DEVICE))


@lowering_test
def test_gamma_is_not_rounded_to_float32(kernels: Kernels) -> None:
    # The interpreter rounds products that the GPU does not, in fused multiply-adds.
    x = torch.ones((1024 if INTERPRETED else 2048, 2), device=DEVICE)
    result = torch.compile(negated_scan, fullgraph=True, dynamic=False)(x, 0.999, None)
    error = (result.double() - discounted_cumsum(x.double(), 0.999, dim=0)).abs().max()
    assert error <= 3e-4
    assert_whole_columns(kernels)


@lowering_test
@pytest.mark.parametrize("kind", ["number", "step"])
def test_gradients(kernels: Kernels, kind: str) -> None:
    shape = (203, COLUMNS)

    def function(x: Tensor, scale: Tensor, gamma: Any, reset: Tensor) -> Tensor:
        return (discounted_cumsum(x * scale, gamma, dim=0, reset=reset) * 2).sin().sum()

    x, scale = make(shape, torch.float32, DEVICE), make(shape, torch.float32, DEVICE, seed=5)
    gamma, reset = make_gamma(kind, shape, 0, torch.float32, DEVICE), make_reset(shape, DEVICE)
    leaves = [x, *([gamma] if isinstance(gamma, Tensor) else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = torch.compile(function, fullgraph=True, dynamic=False)(x, scale, gamma, reset)
    kernels.clear()
    gradients = torch.autograd.grad(loss, leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(
        function(wide[0], scale.double(), wide[1] if len(wide) > 1 else gamma, reset), wide
    )  # fmt: skip
    torch.testing.assert_close(gradients, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert_whole_columns(kernels)


@lowering_test
def test_gradients_of_returns(kernels: Kernels) -> None:
    """The product of two numbers reaches the backward as a number too."""

    def function(rewards: Tensor, values: Tensor, done: Tensor) -> Tensor:
        advantages, targets = returns.gae(
            rewards * 2, values, bootstrap_value=values[0], terminated=done, gamma=0.97, gae_lambda=0.9
        )
        return (advantages.sin() + targets).sum()

    shape = (100, COLUMNS)
    rewards, values = make(shape, torch.float32, DEVICE), make(shape, torch.float32, DEVICE, seed=5)
    done = make_reset(shape, DEVICE)
    loss = torch.compile(function, fullgraph=True, dynamic=False)(rewards.requires_grad_(), values, done)
    kernels.clear()
    (gradient,) = torch.autograd.grad(loss, rewards)
    (expected,) = torch.autograd.grad(function(rewards.double(), values.double(), done), rewards)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    assert_whole_columns(kernels)


@lowering_test
@pytest.mark.parametrize("gamma", [rare("two numbers"), "row", "above 1"])
def test_what_is_not_one_of_columns(kernels: Kernels, gamma: str) -> None:
    """Two discounts in one kernel, one per row, one whose powers may overflow: other kernels, the same results."""
    x = make((203, COLUMNS), torch.float32, DEVICE)
    rates = {"two numbers": 0.9, "row": make_gamma("row", x.shape, 0, x.dtype, DEVICE), "above 1": 1.01}[gamma]

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        second = 0.5 if gamma == "two numbers" else rates
        return discounted_cumsum(y, rates, dim=0) - 1, discounted_cumsum(y * 2, second, dim=0) * 2

    results = torch.compile(function, fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(results, function(x.double()), check_dtype=False, rtol=1e-4, atol=1e-4)
    assert "column_order" not in kernels.source or gamma == "two numbers"


@lowering_test
@pytest.mark.parametrize("gamma", ["number", pytest.param("step", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "companion", [torch.cumsum, rare(torch.cumprod), rare(torch.argmax), torch.sum], ids=lambda f: f.__name__
)
def test_beside_others(kernels: Kernels, companion: Any, gamma: str) -> None:
    """Scans of others are not in one kernel with whole columns, reductions may be."""
    x = make((100, COLUMNS), torch.float32, DEVICE).clamp(-1.2, 1.2)
    rates = make_gamma(gamma, x.shape, 0, x.dtype, DEVICE)

    def function(x: Tensor, rates: Any) -> tuple[Tensor, Tensor]:
        y = x * 0.75
        return discounted_cumsum(y, rates, dim=0, direction="left") - 1, companion(y, 0) * 2

    results = torch.compile(function, fullgraph=True, dynamic=False)(x, rates)
    wide_rates = rates.double() if isinstance(rates, Tensor) else rates
    torch.testing.assert_close(results, function(x.double(), wide_rates), check_dtype=False, rtol=1e-4, atol=1e-4)


@lowering_test
@pytest.mark.parametrize("shape", [(2049, 3), (64, 16)])
def test_many_steps_or_many_columns_are_not_whole(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    from torch_dcs_ops.compile.inductor import heuristics

    monkeypatch.setattr(heuristics, "MANY_COLUMNS", 16)
    if shape[0] > 2048:  # kernels of the operations around the scan alone: fewer programs for the interpreter
        monkeypatch.setitem(BLOCKS, "XBLOCK", 1024)
    x, gamma = make(shape, torch.float32, DEVICE), make_gamma("step", shape, 0, torch.float32, DEVICE)
    result = torch.compile(negated_scan, fullgraph=True, dynamic=False)(x, gamma, None)
    assert_is_scan(result, x, gamma, dim=0)
    assert "column_order" not in kernels.source
    assert bool(kernels.extern_ops()) == (shape[0] > 2048)


@lowering_test
@pytest.mark.parametrize(("others", "columns"), [(0, "one operand"), rare(3, "few operands"), (4, "many operands")])
def test_operands_decide_what_a_thread_takes(kernels: Kernels, others: int, columns: str) -> None:
    """How the kernel is written and what it is launched with are for the same number of operands."""
    from torch_dcs_ops.compile.inductor import heuristics

    def function(x: Tensor, added: list[Tensor]) -> Tensor:
        return discounted_cumsum(sum(added, x * 2), 0.9, dim=0) * 2

    x = make((100, COLUMNS), torch.float32, DEVICE)
    added = [make(x.shape, torch.float32, DEVICE, seed=5 + n) for n in range(others)]
    result = torch.compile(function, fullgraph=True, dynamic=False)(x, added)
    torch.testing.assert_close(result, function(x.double(), added), check_dtype=False, rtol=1e-5, atol=1e-5)
    assert_whole_columns(kernels)
    assert f"columns={columns!r}," in kernels.source
    assert f"column_order(r0_index, {heuristics.COLUMNS[columns].steps})" in kernels.source


@lowering_test
def test_dynamic_columns(kernels: Kernels) -> None:
    """The number of columns may be any; that of steps decides how the kernel is written."""
    compiled = torch.compile(negated_scan, fullgraph=True)
    for columns in (5, 9, 12):
        x = make((100, columns), torch.float32, DEVICE)
        torch._dynamo.mark_dynamic(x, 1)
        assert_is_scan(compiled(x, 0.9, None), x, 0.9, dim=0)
    assert_whole_columns(kernels)
