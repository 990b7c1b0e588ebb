"""What is carried on behind the head of a slice of time (distributed/scan/head.py): on a GPU or in the interpreter."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.sm_90 import compiled_for_sm_90
from support.subprocesses import run_in_the_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")


def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("triton_kernels.scan.slices")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernel runs in this process")
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@pytest.mark.skipif(not (INTERPRETED or GPU), reason="needs a GPU or the interpreter")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite_is_added(sign: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, kernels = "cuda" if GPU else "cpu", module(monkeypatch)
    for dim, shape in ((1, (3, 700)), (1, (2, 700, 5)), (0, (700, 3))):
        y = torch.randn(shape, device=device)
        carry = torch.ones(y.select(dim, 0).shape, device=device)
        expected = y.clone()
        kernels.add_what_is_not_finite_(y, 100, 550, carry, dim, sign, reverse)
        assert torch.equal(y, expected)
        carry.view(-1)[1] = torch.inf
        kernels.add_what_is_not_finite_(y, 100, 550, carry, dim, sign, reverse)
        k = torch.arange(550, device=device)
        factors = torch.where((549 - k if reverse else k) % 2 == 1, float(sign), 1.0)
        factors = factors.view([-1 if at == dim else 1 for at in range(y.dim())])
        infinite = carry.unsqueeze(dim).expand(expected.narrow(dim, 100, 550).shape)
        expected.narrow(dim, 100, 550).add_(torch.where(infinite == torch.inf, infinite * factors, 0))
        assert torch.equal(y, expected)


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize("reverse", [False, True])
def test_kernel_compiles_for_sm_90(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, constants = module(monkeypatch).add_rows, {"SIGN": -1, "REVERSE": reverse, "BLOCK": 1024}
    assert compiled_for_sm_90(kernel, constants, {"any_ptr": "*i32"}, number="i64").asm["ptx"]
