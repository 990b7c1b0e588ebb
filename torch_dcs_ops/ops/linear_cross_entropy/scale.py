"""backward() of a reduced loss: the gradients that forward has formed, times the gradient of the loss.

Out of place this holds linear_weight's gradient twice. It is done in place where nobody can see the difference:
eagerly, with autograd about to free the graph, an upstream gradient that is no batch, and buffers that nobody else has
seen. Under torch.compile the compiler decides, by donated buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import _registry
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common.autograd import in_forward_mode
from .._common.validate import dtype_name, fail

_OP = "_scale"

_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_BLOCK_ELEMENTS = 1 << 20


def _eager() -> bool:
    return not (is_compiling() or _dispatch_modes() or _functorch_active())


def buffers_may_be_private() -> bool:
    """Whether what a forward saves now stays with it: not where hooks pack it or a mode looks at it."""
    return _eager() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def may_form_gradients(*operands: Tensor | None) -> bool:
    """Whether a forward may form gradients, eagerly or in a graph that is traced: not where levels lie above."""
    if in_forward_mode() or _functorch_active():
        return False
    return not any(hasattr(t, "device_mesh") for t in operands)  # a DTensor, whose rows a rank has a part of


def graph_is_being_freed() -> bool:
    """In a backward: whether nobody can run it again. Compiled autograd traces it, where nothing tells."""
    return not (is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())


def _is_batched(factor: Tensor) -> bool:
    # torch.autograd.grad(is_grads_batched=True) is a vmap of its own, which functorch knows nothing of.
    return not _eager() or type(factor) is not Tensor or torch._C._dispatch_keys(factor).has("Batched")


def scaled_rows(gradient: Tensor, factors: Tensor) -> Tensor:
    """The rows of a gradient (..., D) times their factors (...), in the gradient's dtype, rounded once."""
    factors = factors.unsqueeze(-1)
    if _is_batched(factors):
        return (gradient * factors).to(gradient.dtype)
    return torch.mul(gradient, factors, out=torch.empty_like(gradient))


def scaled(
    gradient: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    may_overwrite: bool,
    other: Tensor | None = None,
    number: float = 1.0,
) -> Tensor:
    """gradient·factor·other·number in `dtype`, rounded once; beside a half-precision gradient factors keep float32."""
    if _is_batched(factor):
        return (gradient * _broadcast(_product(factor, other, number), gradient)).to(dtype)
    in_place = may_overwrite and gradient.dtype == dtype
    output = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    _registry.scale(gradient, factor, output, other, number)
    return output


def _product(factor: Tensor, other: Tensor | None, number: float) -> Tensor:
    if other is not None:
        return factor * (other.view(()) * number)
    return factor if number == 1.0 else factor * number


def _broadcast(factor: Tensor, gradient: Tensor) -> Tensor:
    # A factor with dimensions takes part in the promotion; a 0-D one would be rounded to the gradient's dtype.
    return factor.reshape((1,) * gradient.dim())


def _check(input: Tensor, factor: Tensor | None, output: Tensor, other: Tensor | None) -> None:
    if output.shape != input.shape or not (input.is_contiguous() and output.is_contiguous()):
        fail(_OP, f"input and output must be contiguous and of one size, got {tuple(input.shape)} and "
                  f"{tuple(output.shape)}")  # fmt: skip
    dtype = row_dtype(input.dtype)
    for name, one in (("factor", factor), ("other", other)):
        if one is not None and (one.numel() != 1 or one.dtype != dtype):
            found = f"{dtype_name(one.dtype)} of the shape {tuple(one.shape)}"
            fail(_OP, f"{name} must be one {dtype_name(dtype)}, got {found}")


def _reference(
    input: Tensor, factor: Tensor | None, output: Tensor, other: Tensor | None = None, number: float = 1.0
) -> None:
    _check(input, factor, output, other)
    factor = _product(input.new_ones((), dtype=row_dtype(input.dtype)) if factor is None else factor, other, number)
    if output is input and factor.device.type == "cpu" and factor.item() == 1.0:
        return
    broadcast = _broadcast(factor, input)
    for source, result in zip(_blocks(input), _blocks(output), strict=True):
        torch.mul(source, broadcast, out=result)


def _fake(
    input: Tensor, factor: Tensor | None, output: Tensor, other: Tensor | None = None, number: float = 1.0
) -> None:
    _check(input, factor, output, other)


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """On a CPU an operation between dtypes makes a wide copy of its operands: small parts keep it small."""
    if tensor.device.type != "cpu" or tensor.dim() == 0 or tensor.numel() <= _BLOCK_ELEMENTS:
        return (tensor,)
    blocks: tuple[Tensor, ...] = tensor.view(-1, tensor.size(-1)).split(max(_BLOCK_ELEMENTS // tensor.size(-1), 1))
    return blocks


_registry.LIBRARY.impl("_scale", _reference, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::_scale", _fake, lib=_registry.LIBRARY)
