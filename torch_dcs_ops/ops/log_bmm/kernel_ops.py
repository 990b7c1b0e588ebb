"""The private ops of the log-semiring family, on a (B, I, K) and b (B, K, J): Python kernels, fakes and FLOPs.

Autograd is in autograd.py, vmap in batch.py. The compiled libraries register kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference import log_bmm as reference
from ...reference.log_bmm import sum_dtype
from .._common import flops
from .._common.triton import TRITON_KEYS, launchers
from .._common.validate import fail
from .validate import check_beside, check_matrices, check_not_empty, check_precision, check_uniforms


def _results_shape(a: Tensor, b: Tensor) -> tuple[int, int, int]:
    return a.size(0), a.size(1), b.size(2)


def _check_forward(a: Tensor, b: Tensor, precision: str) -> None:
    check_matrices("_log_bmm", a, b)
    check_precision("_log_bmm", precision)


def _check_backward(
    grad: Tensor, a: Tensor, b: Tensor, log_s: Tensor, precision: str, need_a: bool, need_b: bool
) -> None:
    op = "_log_bmm_backward"
    check_matrices(op, a, b)
    check_precision(op, precision)
    check_beside(op, "grad", grad, a, a.dtype, _results_shape(a, b))
    check_beside(op, "log_s", log_s, a, sum_dtype(a.dtype), _results_shape(a, b))


def _check_product(
    a: Tensor, b: Tensor, log_s: Tensor, x: Tensor | None, y: Tensor | None, z: Tensor | None, over: int
) -> None:
    op = "_log_bmm_product"
    check_matrices(op, a, b)
    if over not in (0, 1, 2):
        fail(op, f"over must be 0, 1 or 2, got {over}")
    check_beside(op, "log_s", log_s, a, sum_dtype(a.dtype), _results_shape(a, b))
    for name, operand, shape in (("x", x, a.shape), ("y", y, _results_shape(a, b)), ("z", z, b.shape)):
        if operand is not None:
            check_beside(op, name, operand, a, a.dtype, shape)


def _check_max(a: Tensor, b: Tensor) -> None:
    check_matrices("_max_bmm", a, b)
    check_not_empty("_max_bmm", a)


def _check_sample(a: Tensor, b: Tensor, uniforms: Tensor) -> None:
    check_matrices("_sample_bmm", a, b)
    check_uniforms("_sample_bmm", uniforms, a, _results_shape(a, b))


def _forward_fake(a: Tensor, b: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    shape = _results_shape(a, b)
    return a.new_empty(shape), a.new_empty(shape, dtype=sum_dtype(a.dtype))


def _backward_fake(
    grad: Tensor, a: Tensor, b: Tensor, log_s: Tensor, precision: str, need_a: bool, need_b: bool
) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape if need_a else 0), b.new_empty(b.shape if need_b else 0)


def _product_fake(
    a: Tensor, b: Tensor, log_s: Tensor, x: Tensor | None, y: Tensor | None, z: Tensor | None, over: int
) -> Tensor:
    return a.new_empty((b.shape, _results_shape(a, b), a.shape)[over])


def _max_fake(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    shape = _results_shape(a, b)
    return a.new_empty(shape), a.new_empty(shape, dtype=torch.int64)


def _sample_fake(a: Tensor, b: Tensor, uniforms: Tensor) -> Tensor:
    return a.new_empty(_results_shape(a, b), dtype=torch.int64)


def gemm_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """An addition and a multiplication a term: 2·B·I·K·J."""
    return 2 * int(torch.Size(a_shape).numel()) * int(b_shape[2])


def _backward_flops(grad_shape: Any, a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kw: Any) -> int:
    return (int(args[-2]) + int(args[-1])) * gemm_flops(a_shape, b_shape)


def _register(
    name: str,
    check: Callable[..., None],
    run: Callable[..., Any],
    launch: bool,
    make_fake: Callable[..., Any],
    formula: Callable[..., int],
) -> None:
    def kernel(*args: Any) -> Any:
        check(*args)
        return run(*args)

    def triton_kernel(*args: Any) -> Any:
        check(*args)
        module = launchers("log_bmm.launch")
        if module is not None:
            try:
                return getattr(module, run.__name__)(*args)
            except NotImplementedError:
                pass
        return run(*args)

    def fake(*args: Any) -> Any:
        check(*args)
        return make_fake(*args)

    _registry.LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if launch:
        for key in TRITON_KEYS:
            _registry.LIBRARY.impl(name, triton_kernel, key)
    torch.library.register_fake(f"dcs::{name}", fake, lib=_registry.LIBRARY)
    flops.register(getattr(torch.ops.dcs, name), formula)


_register("_log_bmm", _check_forward, reference.log_bmm, True, _forward_fake, gemm_flops)
_register("_log_bmm_backward", _check_backward, reference.log_bmm_backward, True, _backward_fake, _backward_flops)
_register("_log_bmm_product", _check_product, reference.log_bmm_product, False, _product_fake, gemm_flops)
_register("_max_bmm", _check_max, reference.max_bmm, True, _max_fake, gemm_flops)
_register("_sample_bmm", _check_sample, reference.sample_bmm, True, _sample_fake, gemm_flops)
