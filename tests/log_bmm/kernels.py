"""The implementations of the 3-D ops of log_bmm that tests run, and the check of one against float64."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the libraries)
from torch_dcs_ops import _native
from torch_dcs_ops.reference import log_bmm as reference

from log_bmm.oracle import (
    INF,
    exact,
    forward_budget,
    forward_error,
    gradient_budget,
    gradient_error,
    product,
    spread,
    sum_dtype,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
ROOT = Path(__file__).parents[2]
HAS_LAUNCHERS = importlib.util.find_spec("triton") is not None and (ROOT / "triton_kernels/log_bmm").is_dir()
KERNELS = (["triton-cpu"] if HAS_LAUNCHERS else []) if INTERPRETED else ["op-cpu", "reference-cpu"]
KERNELS += (["op-cuda"] + (["triton-cuda"] if HAS_LAUNCHERS else [])) if GPU and not INTERPRETED else []
SIZE = 20 if INTERPRETED else 64


class Kernel:
    """An implementation of the 3-D ops."""

    def __init__(self, name: str, module: Any) -> None:
        self.kind, self.device = name.split("-")
        self.is_reference = self.kind == "reference" or (self.kind == "op" and not _native.CPU_LIBRARY.loaded)
        ops = torch.ops.dcs
        self.forward = ops._log_bmm.default if self.kind == "op" else module.log_bmm
        self.backward = ops._log_bmm_backward.default if self.kind == "op" else module.log_bmm_backward
        self.largest = ops._max_bmm.default if self.kind == "op" else module.max_bmm
        self.sample = ops._sample_bmm.default if self.kind == "op" else module.sample_bmm
        self.product = reference.log_bmm_product if self.kind == "reference" else ops._log_bmm_product.default

    def on(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in tensors)


def check(kernel: Kernel, a: Tensor, b: Tensor, *, width: float | None = None) -> None:
    """Forward, both gradients together and alone, against float64."""
    a, b = kernel.on(a, b)
    expected = exact(a, b)
    dtype = a.dtype
    out, log_s = kernel.forward(a, b, "highest")
    assert (out.dtype, log_s.dtype) == (dtype, sum_dtype(dtype))
    assert out.shape == log_s.shape == expected.out.shape
    assert out.is_contiguous()
    assert log_s.is_contiguous()
    error = forward_error(out, expected.out)
    assert error <= forward_budget(dtype), f"forward: {error:.1e}"
    assert torch.equal(log_s.cpu() == -INF, expected.log_s == -INF)
    assert not log_s.isnan().any()

    (grad,) = kernel.on(torch.randn(out.shape).to(dtype))
    budget = gradient_budget(dtype, spread(a, b) if width is None else width)
    wanted = [product(expected.weights, None, grad, None, over) for over in (2, 0)]
    both = kernel.backward(grad, a, b, log_s, "highest", True, True)
    for name, gradient, right, like in zip("ab", both, wanted, (a, b), strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == like.shape
        assert gradient.is_contiguous()
        error = gradient_error(gradient, right)
        assert error <= budget, f"grad_{name}: {error:.1e} > {budget:.1e}"
    for needs in ((True, False), (False, True), (False, False)):
        for gradient, other, need in zip(
            kernel.backward(grad, a, b, log_s, "highest", *needs), both, needs, strict=True
        ):
            assert torch.equal(gradient, other) if need else gradient.shape == (0,)


SPECIAL = {
    "+inf": [(0, INF)],
    "NaN": [(0, torch.nan)],
    "+inf and NaN": [(0, INF), (1, torch.nan)],
    "+inf in a row of -inf": [(0, -INF), (slice(2, 3), INF)],
    "NaN in a row of -inf": [(0, -INF), (slice(2, 3), torch.nan)],
}


def plant(a: Tensor, b: Tensor, where: str, name: str) -> None:
    for place, value in SPECIAL[name]:
        if where != "b":
            a[0, 1, place if isinstance(place, slice) or value != -INF else slice(None)] = value
        if where != "a":
            b[0, place if isinstance(place, slice) or value != -INF else slice(None), 4] = value
