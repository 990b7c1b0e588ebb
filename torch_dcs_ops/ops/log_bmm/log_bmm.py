"""`dcs::log_bmm`: the matrix product of the log semiring, exact, at the speed of a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _registry
from .._common import autocast, flops
from .._common.autograd import below, tracked
from . import autograd, kernel_ops  # noqa: F401  (they register)
from .batch import as_matrices, public_flops, result_shape
from .validate import check_argument_types, check_operands

_OP = "log_bmm"
_op = _registry.log_bmm


def log_bmm(a: Tensor, b: Tensor) -> Tensor:
    """``out[..., i, j] = logsumexp_k(a[..., i, k] + b[..., k, j])``: a matrix product of numbers given by logarithms.

    Exact for every finite and -inf input, however far apart the terms are, in O(n²) memory: exponentials of the
    operands, each shifted by its row's or column's maximum, are multiplied as matrices, a bound on what underflowed is
    checked for every element of the result, and the elements that fail it are summed term by term.

    Args:
        a: (..., I, K), or (K,); float16, bfloat16, float32 or float64; any strides.
        b: (..., K, J), or (K,); a's dtype.

    Batch dimensions broadcast, and 1-D operands count as one row (a) or column (b) that the result does not have, as in
    :func:`torch.matmul`.

    Returns:
        (..., I, J), a's dtype, contiguous. Half-precision inputs are summed in float32. -inf where every term is -inf,
        and for K = 0; +inf and NaN as in torch.logsumexp.

    Differentiable any number of times, in both modes; a gradient is 0, not NaN, where a whole row or column is -inf.
    Works under torch.func, torch.compile, torch.export. Under autocast half-precision inputs are summed in, and give,
    float32. On GPUs torch.set_float32_matmul_precision applies: see docs/log_bmm.md for the errors.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device; the sentence names it.

    Example::

        >>> chain = torch.log_softmax(torch.randn(64, 5, 5), -1)   # 64 transitions between 5 states
        >>> while len(chain) > 1:                                  # their product, in log2(64) steps
        ...     chain = torch_dcs_ops.log_bmm(chain[::2], chain[1::2])
    """
    try:
        out: Tensor = _op(a, b)
    except (AttributeError, RuntimeError, TypeError):
        check_argument_types(_OP, a=a, b=b)
        raise
    return out


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    check_operands(_OP, a, b)
    precision = torch.get_float32_matmul_precision()
    with torch._C._AutoDispatchBelowAutograd():
        out: Tensor = _registry.log_bmm_kernel(*as_matrices(a, b), precision)[0]
        return out.view(result_shape(a, b))


def _fake(a: Tensor, b: Tensor) -> Tensor:
    check_operands(_OP, a, b)
    return a.new_empty(result_shape(a, b))


def _autograd(keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
    if not tracked(a, b):
        output: Tensor = below(_op, keyset, a, b)
        return output
    check_operands(_OP, a, b)
    out: Tensor = _registry.log_bmm_kernel(*as_matrices(a, b), torch.get_float32_matmul_precision())[0]
    return out.view(result_shape(a, b))


_registry.LIBRARY.impl("log_bmm", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::log_bmm", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("log_bmm", _autograd, "Autograd", with_keyset=True)
autocast.register("log_bmm", _op)
flops.register(torch.ops.dcs.log_bmm, public_flops)
