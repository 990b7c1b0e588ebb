"""`dcs::max_bmm`: the matrix product of the (max, +) semiring, the step of Viterbi's algorithm."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _registry
from .._common import autocast, flops
from .._common.autograd import below, tracked
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


def _private_autograd(keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = below(_registry.max_bmm_kernel, keyset, a, b)
    if tracked(a, b):
        values = _chosen(a, b, indices)
    return values, indices


def _chosen(a: Tensor, b: Tensor, indices: Tensor) -> Tensor:
    """The sums at the indices, which is what the values are, by operations that autograd knows.

    The gradients' sums are made in a fixed order where they can be: on the CPU that of gather is, on CUDA that of
    indexing (both in eager mode).
    """
    if a.device.type == "cpu":
        return a.gather(2, indices) + b.gather(1, indices)
    batch = torch.arange(a.size(0), device=a.device)[:, None, None]
    row = torch.arange(a.size(1), device=a.device)[:, None]
    column = torch.arange(b.size(2), device=a.device)
    return a[batch, row, indices] + b[batch, indices, column]


_registry.LIBRARY.impl("max_bmm", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::max_bmm", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("max_bmm", _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl("_max_bmm", _private_autograd, "Autograd", with_keyset=True)
autocast.register("max_bmm", _op)
flops.register(torch.ops.dcs.max_bmm, public_flops)
