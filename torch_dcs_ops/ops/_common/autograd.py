"""What every op's kernel at the Autograd key needs, and no op of its own.

`torch.library.register_autograd` is not used: its forward mode is silently zero, torch.func.grad raises through it,
and it is the slowest way in. Every op has a Python kernel at the Autograd key instead. Under torch.func that kernel is
called once a level, as aten's own are, so a `Node` below it only ever serves a single level.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, func
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import Parameter

_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast_enabled = torch._C._is_any_autocast_enabled
# Tensors that are what their memory says.
PLAIN = (Tensor, Parameter)
_unpack_dual = torch._VF._unpack_dual
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_dispatch_keys = torch._C._dispatch_keys
_PLAIN_KEYS = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
        for name in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView")
    ),
)
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


class Node(_SingleLevelFunction):
    """What the ops' nodes in autograd's graph are.

    Not a torch.autograd.Function: its `apply` takes another way under torch.func, and is slower.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
        """What compiled autograd knows a backward by, as of a torch.autograd.Function; the rest are guards."""
        return (ctx._autograd_function_id,)


def in_forward_mode() -> bool:
    """Whether a level of forward mode is open; torch.func.jvp in a graph that is being compiled opens one unseen."""
    return forward_ad._current_level >= 0 or (
        _functorch_active() and peek_interpreter_stack().key() == TransformType.Jvp
    )


def any_requires_grad(*values: Any) -> bool:
    """Whether reverse mode has something to record of a call with these arguments."""
    return _is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def is_plain_call(*values: Any) -> bool:
    """Whether this is an eager call of real tensors, whose values can be looked at."""
    if torch.compiler.is_compiling() or _functorch_active() or in_forward_mode():
        return False
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS):
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(type(t) in PLAIN and t.device.type != "meta" for t in tensors)


def is_direct_call(*values: Any) -> bool:
    """Whether nobody would see that an op's kernel is called in Python, and not by the dispatcher."""
    if not is_plain_call(*values) or torch._C._len_torch_dispatch_stack():
        return False
    # Others are not what their memory says: those of `is_grads_batched` are many, and others have a sign beside it.
    return not any(isinstance(value, Tensor) and _dispatch_keys(value).raw_repr() & ~_PLAIN_KEYS for value in values)


def watched(input: Tensor) -> bool:
    """Whether somebody looks on: modes and subclasses are shown an op, not what it calls. Not to be traced."""
    return (
        type(input) not in PLAIN
        or _dispatch_modes() > 0
        or _functorch_active()
        or forward_ad._current_level >= 0
        or _autocast_enabled()
    )


def is_quiet_backward(grad: Tensor) -> bool:
    """Whether a backward given `grad` may call kernels past the Autograd key: it is neither traced nor recorded."""
    return not (torch.compiler.is_compiling() or _is_grad_enabled() or watched(grad))


def past_autograd(grad: Tensor) -> Any:
    """What a backward given `grad` calls ops in."""
    return torch._C._AutoDispatchBelowAutograd() if is_quiet_backward(grad) else contextlib.nullcontext()


def tracked(*values: Any) -> bool:
    """Whether autograd has anything to record of a call with these arguments, in either mode."""
    return any_requires_grad(*values) or in_forward_mode()


def apply(function: Any, *args: Any) -> Any:
    """`function.apply` of a Node, at the level of autograd that runs."""
    if not _functorch_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def run_below(op: Any, keyset: torch._C.DispatchKeySet | None, *args: Any, **kwargs: Any) -> Any:
    """What a Node's forward calls `op` by."""
    if not _functorch_active():
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)
    assert keyset is not None
    # The levels further down record what they need themselves.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below(op, keyset, *args, **kwargs)


def levels_below() -> Any:
    """What a jvp runs its operations in: forward mode is off in it, and the levels further down need it."""
    return forward_ad._set_fwd_grad_enabled(_functorch_active() or forward_ad._is_fwd_grad_enabled())


def primals(tensors: tuple[Tensor | None, ...]) -> Any:
    """The tensors that a jvp computes with, rid of its own level's tangents."""
    if not _functorch_active():
        return tensors
    return [None if tensor is None else _unpack_dual(tensor, level=0)[0] for tensor in tensors]


def below(op: Any, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Calls `op` with the keys that come after autograd."""
    return op._handle.redispatch_boxed(keyset & _AFTER_AUTOGRAD, *args, **kwargs)


def boxed(op: Any) -> Callable[..., Any]:
    """`op` without what `torch.ops` looks for first: `__torch_function__` and torch.jit.trace, 1.5 us."""
    return functools.partial(torch._C._dispatch_call_boxed, op._handle)


def pull_back(
    ctx: Any,
    operands: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    gradients_of: Callable[[Sequence[Tensor | None], tuple[bool, ...]], Sequence[Tensor]],
) -> list[Tensor | None]:
    """The backward of a Node whose results are gradients: from their cotangents those of its `operands`.

    The operands are the node's arguments after the first, and `ctx.needs` says which results are gradients.
    `gradients_of(operands, needs)` forms all of them, differentiably; only those with a cotangent are needed.
    """
    given = tuple(need and cotangent is not None for cotangent, need in zip(cotangents, ctx.needs, strict=True))
    wanted = [index for index, need in enumerate(ctx.needs_input_grad[1 : 1 + len(operands)]) if need]
    found: list[Tensor | None] = [None] * len(operands)
    if any(given) and wanted:

        def gradients(values: dict[int, Tensor]) -> tuple[Tensor, ...]:
            every = gradients_of([values.get(index, operand) for index, operand in enumerate(operands)], given)
            return tuple(gradient for gradient, has in zip(every, given, strict=True) if has)

        pullback = func.vjp(gradients, {index: operands[index] for index in wanted})[1]
        (by_index,) = pullback(tuple(c for c, has in zip(cotangents, given, strict=True) if has))
        for index in wanted:
            found[index] = by_index[index]
    return found
