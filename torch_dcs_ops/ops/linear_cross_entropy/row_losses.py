"""A loss of rows that a caller writes in plain PyTorch: its arguments, its gradients, and what it may not do."""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.validate import check_dense, check_device, dtype_name, fail, known

OP = "linear_policy_loss"
_FOR_ALL_ROWS = (int, float, torch.SymInt, torch.SymFloat, numbers.Real, type(None))
# Whether the gradient of a loss with this code has had one of the entropy in it.
_entropic: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


class Statistics(NamedTuple):
    """What a loss sees of some rows' logits, in the rows' dtype: log-probabilities (n,) or (n, K), entropy (n,)."""

    log_probs: Tensor
    entropy: Tensor | None


class RowLoss(NamedTuple):
    """`loss_fn` with its arguments: tensors of N rows where `of_rows` says so, else what is for all rows."""

    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    of_rows: tuple[bool, ...]

    def select(self, choose: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """The arguments of some rows."""
        return tuple(
            choose(arg) if is_of_rows else arg for arg, is_of_rows in zip(self.args, self.of_rows, strict=True)
        )

    def part(self, part: slice) -> tuple[Any, ...]:
        return self.select(lambda arg: arg[part])

    def __call__(self, statistics: Statistics, args: tuple[Any, ...]) -> Tensor:
        """The loss of every row (n,), in their dtype."""
        loss = self.loss_fn(*statistics, *args)
        count = statistics.log_probs.size(0)
        if not isinstance(loss, Tensor):
            raise TypeError(f"{OP}: loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.dim() != 1 or known(loss.size(0) != count):
            raise ValueError(f"{OP}: loss_fn must return a loss for every row, of the shape ({count},), got "
                             f"{tuple(loss.shape)}")  # fmt: skip
        if not loss.is_floating_point():
            fail(OP, f"loss_fn must return a floating-point tensor, got {dtype_name(loss.dtype)}")
        return loss.to(statistics.log_probs.dtype)


def row_loss(loss_fn: Callable[..., Tensor], row_args: tuple[Any, ...], input: Tensor) -> RowLoss:
    """With arguments of rows (..., *) flat, (N, *); in the leading dimensions a size of 1 is for all."""
    if not callable(loss_fn):
        raise TypeError(f"{OP}: loss_fn must be a function of (log_probs, entropy, *row_args), got "
                        f"{type(loss_fn).__name__}")  # fmt: skip
    args, of_rows = [], []
    for index, arg in enumerate(row_args):
        name = f"row_args[{index}]"
        if not isinstance(arg, (Tensor, *_FOR_ALL_ROWS)):
            raise TypeError(f"{OP}: {name} must be a tensor, a number or None, got {type(arg).__name__}")
        args.append(_flat_rows(name, arg, input) if isinstance(arg, Tensor) and arg.dim() else arg)
        of_rows.append(isinstance(arg, Tensor) and arg.dim() > 0)
    return RowLoss(loss_fn, tuple(args), tuple(of_rows))


def _flat_rows(name: str, arg: Tensor, input: Tensor) -> Tensor:
    check_dense(OP, **{name: arg})
    check_device(OP, name, arg, "input", input)
    lead = input.shape[:-1]
    count = len(lead)
    sizes = arg.shape[:count]
    if len(sizes) < count or any(known(a != b) and known(a != 1) for a, b in zip(sizes, lead, strict=True)):
        raise ValueError(f"{OP}: {name} must have input's leading shape {tuple(lead)}, or 1 in it, and any dimensions "
                         f"behind it, got {tuple(arg.shape)}")  # fmt: skip
    return flat(arg.expand(*lead, *arg.shape[count:]), count)


def flat(tensor: Tensor, dims: int) -> Tensor:
    """The first `dims` dimensions as one."""
    return tensor.flatten(0, dims - 1) if dims else tensor.unsqueeze(0)


class RowGradients(NamedTuple):
    """The losses of some rows (n,), and the gradients of their weighted sum; None: 0.

    Rows of weight 0 may have anything where it is a row's alone: callers select.
    """

    loss: Tensor
    is_constant: bool  # without a gradient at all
    log_probs: Tensor | None
    entropy: Tensor | None
    args: list[Tensor | None]


def gradients_of_rows(
    of: RowLoss, statistics: Statistics, args: tuple[Any, ...], weights: Tensor, needs: tuple[bool, ...]
) -> RowGradients:
    """`weights` (n,) of the rows' losses; `needs`: of the statistics, then of each argument.

    A loss is some launches for every operation of its caller's, so that what is done here for the sake of rows that
    are ignored is one multiplication by 0.
    """
    with torch.enable_grad():
        leaves = [_leaf(value, needs[0]) for value in statistics]
        args = tuple(_leaf(arg, need) for arg, need in zip(args, needs[1:], strict=True))
        rows = of(Statistics(leaves[0], leaves[1]), args)
        found: list[Tensor | None] = [None] * (2 + len(args))
        every = (*leaves, *args)
        wanted = [index for index, value in enumerate(every) if _requires_grad(value)]
        if rows.requires_grad:
            _check_sources(rows, [every[index] for index in wanted])
            gradients = torch.autograd.grad(rows, [every[index] for index in wanted], weights, allow_unused=True)
            for index, gradient in zip(wanted, gradients, strict=True):
                found[index] = gradient
    return RowGradients(rows.detach(), not rows.requires_grad, found[0], found[1], found[2:])


def where_rows(valid: Tensor, values: Tensor) -> Tensor:
    """values (n, ...), and 0 in rows that are not valid."""
    return torch.where(valid.view(-1, *(1,) * (values.dim() - 1)), values, 0)


def _leaf(value: Any, need: bool) -> Any:
    return value.detach().requires_grad_(need) if isinstance(value, Tensor) else value


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _check_sources(rows: Tensor, leaves: list[Tensor]) -> None:
    """Refuses a loss with a tensor in its closure whose gradient would be lost."""
    ours = {id(leaf) for leaf in leaves}
    seen: set[Any] = set()
    todo: list[Any] = [torch.autograd.graph.get_gradient_edge(rows).node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if variable is not None and id(variable) not in ours:
            fail(OP, "loss_fn must have tensors that require a gradient from row_args, got one of the shape "
                      f"{tuple(variable.shape)} by another way")  # fmt: skip
        todo.extend(parent for parent, _ in node.next_functions)


def uses_entropy(loss_fn: Callable[..., Tensor]) -> bool | None:
    """Whether its gradient has had one of the entropy in it; None: nobody has seen it yet."""
    code = _code_of(loss_fn)
    return None if code is None else _entropic.get(code)


def note_use_of_entropy(loss_fn: Callable[..., Tensor], uses: bool) -> None:
    """One that has done so once may do so again."""
    code = _code_of(loss_fn)
    if code is not None:
        _entropic[code] = uses or _entropic.get(code, False)


def _code_of(loss_fn: Any) -> Any:
    """What closures of one function, made anew for every step, have in common; None of an object that is called."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__code__", None)
