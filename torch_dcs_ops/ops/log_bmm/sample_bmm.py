"""`dcs::sample_bmm`: samples of the index that log_bmm sums over, such as a state of a chain given its neighbors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.log_bmm import sum_dtype
from .._common import autocast, flops
from .._common.autograd import below
from . import kernel_ops  # noqa: F401  (it registers)
from .batch import as_matrices, public_flops, result_shape
from .validate import check_argument_types, check_operands, check_shapes, check_uniforms

_OP = "sample_bmm"
_op = _registry.sample_bmm


def sample_bmm(a: Tensor, b: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """One k of every (i, j), with probability ``softmax_k(a[..., i, k] + b[..., k, j])``, without holding those.

    Args:
        a: (..., I, K), or (K,); float16, bfloat16, float32 or float64; any strides.
        b: (..., K, J), or (K,); a's dtype.
        generator: draws the uniform numbers, on a's device. Eager mode only; default: torch's.

    Shapes as in :func:`log_bmm`.

    Returns:
        (..., I, J), int64. A k of probability 0 is never drawn. -1 where every term is -inf (and for K = 0): there is
        nothing to draw. Where a term is NaN or +inf, the first such k.

    Inversion of the cumulative sum over k, in float32 for half-precision inputs. `torch.ops.dcs.sample_bmm(a, b,
    uniforms)` takes the uniform numbers instead, in [0, 1), of the result's shape, float64 for float64 operands and
    else float32: the same numbers give the same samples. Not differentiable.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device; the sentence names it.

    Example::

        >>> state = torch_dcs_ops.sample_bmm(forward[t], transitions)    # (1, S) and (S, S): (1, S)
    """
    check_argument_types(_OP, a=a, b=b)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{_OP}: generator must be a torch.Generator or None, got {type(generator).__name__}")
    # The op checks the rest, behind autocast.
    check_shapes(_OP, a, b)
    # The overload that takes a generator takes no symbolic sizes.
    options: dict[str, Any] = {} if generator is None else {"generator": generator}
    uniforms = torch.rand(result_shape(a, b), **options, dtype=sum_dtype(a.dtype), device=a.device)
    samples: Tensor = _op(a, b, uniforms)
    return samples


def _check(a: Tensor, b: Tensor, uniforms: Tensor) -> tuple[int, ...]:
    check_operands(_OP, a, b)
    shape = result_shape(a, b)
    check_uniforms(_OP, uniforms, a, shape)
    return shape


def _kernel(a: Tensor, b: Tensor, uniforms: Tensor) -> Tensor:
    shape = _check(a, b, uniforms)
    a, b = as_matrices(a, b)
    with torch._C._AutoDispatchBelowAutograd():
        samples: Tensor = _registry.sample_bmm_kernel(a, b, uniforms.reshape(a.size(0), a.size(1), b.size(2)))
        return samples.view(shape)


def _fake(a: Tensor, b: Tensor, uniforms: Tensor) -> Tensor:
    return a.new_empty(_check(a, b, uniforms), dtype=torch.int64)


def _autograd(op: Any) -> Any:
    """Integers have no derivative."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Tensor) -> Any:
        return below(op, keyset, *args)

    return kernel


_registry.LIBRARY.impl("sample_bmm", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::sample_bmm", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("sample_bmm", _autograd(_op), "Autograd", with_keyset=True)
_registry.LIBRARY.impl("_sample_bmm", _autograd(_registry.sample_bmm_kernel), "Autograd", with_keyset=True)
autocast.register("sample_bmm", _op)
flops.register(torch.ops.dcs.sample_bmm, public_flops)
