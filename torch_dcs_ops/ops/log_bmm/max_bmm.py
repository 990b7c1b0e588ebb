"""`dcs::max_bmm`: the matrix product of the (max, +) semiring, the step of Viterbi's algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from .._common import autocast, flops
from .._common.autograd import Node, apply, below, levels_below, primals, run_below, tracked
from . import kernel_ops  # noqa: F401  (it registers)
from .batch import as_matrices, public_flops, result_shape
from .validate import check_argument_types, check_not_empty, check_operands

_OP = "max_bmm"
_op = _registry.max_bmm


def max_bmm(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of ``max_k(a[..., i, k] + b[..., k, j])``, without holding the sums.

    Args:
        a: (..., I, K), or (K,); float16, bfloat16, float32 or float64; any strides.
        b: (..., K, J), or (K,); a's dtype.

    Shapes as in :func:`log_bmm`; K is at least 1.

    Returns:
        (values, indices), both (..., I, J) and contiguous: values in a's dtype, indices int64. As with
        :func:`torch.max`, of equal sums the first counts, and a NaN counts as the largest. Where every sum is -inf the
        index is 0. Half-precision inputs are added in float32 and rounded once.

    The values are differentiable any number of times, in both modes: the gradient goes to the terms that were chosen.
    Works under torch.func, torch.compile, torch.export. Under autocast half-precision inputs are added in, and give,
    float32.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device; the sentence names it.

    Example::

        >>> values, states = torch_dcs_ops.max_bmm(best_so_far, transitions)   # (B, 1, S), (S, S): states (B, 1, S)
    """
    try:
        values, indices = _op(a, b)
    except (AttributeError, RuntimeError, TypeError):
        check_argument_types(_OP, a=a, b=b)
        raise
    return values, indices


def _check(a: Tensor, b: Tensor) -> None:
    check_operands(_OP, a, b)
    check_not_empty(_OP, a)


def _kernel(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    _check(a, b)
    shape = result_shape(a, b)
    with torch._C._AutoDispatchBelowAutograd():
        values, indices = _registry.max_bmm_kernel(*as_matrices(a, b))
        return values.view(shape), indices.view(shape)


def _fake(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    _check(a, b)
    shape = result_shape(a, b)
    return a.new_empty(shape), a.new_empty(shape, dtype=torch.int64)


def _autograd(keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if not tracked(a, b):
        found: tuple[Tensor, Tensor] = below(_op, keyset, a, b)
        return found
    _check(a, b)
    shape = result_shape(a, b)
    a, b = as_matrices(a, b)
    values, indices = _registry.max_bmm_kernel(a, b)
    return values.view(shape), indices.view(shape)


class MaxBmmFunction(Node):
    """(values, indices). Saves the indices alone: the values are the sums of what they choose."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = run_below(_registry.max_bmm_kernel, keyset, a, b)
        ctx.set_materialize_grads(False)
        ctx.shapes = tuple(a.shape), tuple(b.shape)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.save_for_forward(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        (indices,) = ctx.saved_tensors
        shape_a, shape_b = ctx.shapes
        _, need_a, need_b = ctx.needs_input_grad
        return (
            None,
            _spread(grad, indices, shape_a, 2) if need_a else None,
            _spread(grad, indices, shape_b, 1) if need_b else None,
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, ta: Tensor | None, tb: Tensor | None) -> tuple[Any, Any]:
        with levels_below():
            (indices,) = primals(ctx.saved_tensors)
            parts = [t.gather(dim, indices) for t, dim in ((ta, 2), (tb, 1)) if t is not None]
            return sum(parts[1:], parts[0]), None


def _spread(grad: Tensor, indices: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """`grad` at the indices along `dim` of zeros, by operations that autograd knows.

    The sums are made in a fixed order where they can be: on the CPU that of scatter_add is, on CUDA that of index_put
    (both in eager mode).
    """
    zeros = grad.new_zeros(shape)
    if grad.device.type == "cpu":
        return zeros.scatter_add(dim, indices, grad)
    batches, rows, columns = indices.shape
    batch = torch.arange(batches, device=grad.device)[:, None, None]
    if dim == 2:
        elements = (batch, torch.arange(rows, device=grad.device)[:, None], indices)
    else:
        elements = (batch, indices, torch.arange(columns, device=grad.device))
    return zeros.index_put(elements, grad, accumulate=True)


def _private_autograd(keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor]
    found = apply(MaxBmmFunction, keyset, a, b) if tracked(a, b) else below(_registry.max_bmm_kernel, keyset, a, b)
    return found


_registry.LIBRARY.impl("max_bmm", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::max_bmm", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("max_bmm", _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl("_max_bmm", _private_autograd, "Autograd", with_keyset=True)
autocast.register("max_bmm", _op)
flops.register(torch.ops.dcs.max_bmm, public_flops)
