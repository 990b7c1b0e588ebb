"""A loss of rows that a caller writes in plain PyTorch: its arguments, its gradients, and what it may not do."""

from __future__ import annotations

import contextlib
import functools
import numbers
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.validate import check_dense, check_device, dtype_name, fail, known

_OP = "linear_policy_loss"
_FOR_ALL_ROWS = (int, float, torch.SymInt, torch.SymFloat, numbers.Real, type(None))
PROBED_ROWS = 4
_PROBE_TOLERANCE = 1e-3  # of the largest value: another number of rows may take another instruction
_SHIFTS = (0.3, 0.1, 0.5, 0.2)  # of the probed rows' statistics
_FACTORS = (1.0, 0.8, 0.6, 0.9)  # of their arguments: towards 0, so that probabilities and places stay such
_probed: weakref.WeakSet[Any] = weakref.WeakSet()
# Whether the gradient of a loss with this code has had one of the entropy in it.
_entropic: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_probed_methods: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


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
            raise TypeError(f"{_OP}: loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.dim() != 1 or known(loss.size(0) != count):
            raise ValueError(f"{_OP}: loss_fn must return a loss for every row, of the shape ({count},), got "
                             f"{tuple(loss.shape)}")  # fmt: skip
        if not loss.is_floating_point():
            fail(_OP, f"loss_fn must return a floating-point tensor, got {dtype_name(loss.dtype)}")
        return loss.to(statistics.log_probs.dtype)


def row_loss(loss_fn: Callable[..., Tensor], row_args: tuple[Any, ...], input: Tensor) -> RowLoss:
    """With arguments of rows (..., *) flat, (N, *); in the leading dimensions a size of 1 is for all."""
    if not callable(loss_fn):
        raise TypeError(f"{_OP}: loss_fn must be a function of (log_probs, entropy, *row_args), got "
                        f"{type(loss_fn).__name__}")  # fmt: skip
    args, of_rows = [], []
    for index, arg in enumerate(row_args):
        name = f"row_args[{index}]"
        if not isinstance(arg, (Tensor, *_FOR_ALL_ROWS)):
            raise TypeError(f"{_OP}: {name} must be a tensor, a number or None, got {type(arg).__name__}")
        args.append(_flat_rows(name, arg, input) if isinstance(arg, Tensor) and arg.dim() else arg)
        of_rows.append(isinstance(arg, Tensor) and arg.dim() > 0)
    return RowLoss(loss_fn, tuple(args), tuple(of_rows))


def _flat_rows(name: str, arg: Tensor, input: Tensor) -> Tensor:
    check_dense(_OP, **{name: arg})
    check_device(_OP, name, arg, "input", input)
    lead = input.shape[:-1]
    count = len(lead)
    sizes = arg.shape[:count]
    if len(sizes) < count or any(known(a != b) and known(a != 1) for a, b in zip(sizes, lead, strict=True)):
        raise ValueError(f"{_OP}: {name} must have input's leading shape {tuple(lead)}, or 1 in it, and any dimensions "
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
            fail(_OP, "loss_fn must have tensors that require a gradient from row_args, got one of the shape "
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


def check_rows_do_not_mix(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> None:
    """Refuses a loss whose value or gradient at a row is another one beside other rows.

    A few rows are looked at, once for every function, as on a GPU the answer has to be waited for. Where the gradients
    of those from all over the chunk are 0 or nan, which says nothing, these are the ones of its largest gradients; if
    that says nothing either, the next call looks again. They are looked at with other values too: beside equal rows, as
    the ratios of a policy to itself or the weights of one sequence are, a mean over rows is a row's own value.
    """
    count = statistics.log_probs.size(0)
    if count < 2 or torch.is_inference_mode_enabled() or _is_probed(of.loss_fn) or _is_captured(statistics.log_probs):
        return
    step = (count - 1) // (PROBED_ROWS - 1) or 1
    if _says_anything(of, statistics, args, slice(0, (PROBED_ROWS - 1) * step + 1, step)) or _says_anything(
        of, statistics, args, _of_large_gradients(of, statistics, args)
    ):
        with contextlib.suppress(TypeError):
            functions, function = _place_of(of.loss_fn)
            functions.add(function)


def _of_large_gradients(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> Tensor:
    """The places of the rows with the largest ones."""
    every = _values_and_gradients(of, statistics, args, slice(None), 1)[:, 1:].abs()
    most = every.nan_to_num(0.0, posinf=0.0).sum(1)
    return most.topk(min(PROBED_ROWS, most.size(0)))[1]


def _says_anything(of: RowLoss, statistics: Statistics, args: tuple[Any, ...], few: slice | Tensor) -> bool:
    """Refuses a loss that mixes the rows `few`; whether their gradients could tell."""
    count = len(statistics.log_probs)
    log_probs, entropy = statistics
    statistics = Statistics(log_probs[few].detach(), None if entropy is None else entropy[few].detach())
    # Contiguous, as one row is: strides may take another instruction.
    args = of._replace(args=args).select(lambda arg: arg[few].detach().contiguous())
    try:
        apart = _check_apart(of, statistics, args)
    except RuntimeError as error:
        if str(error).startswith(_OP):
            raise
        raise RuntimeError(f"{_OP}: loss_fn must take some rows at a time, got an error for {count} of them or for "
                           f"one: {error}") from error  # fmt: skip
    others = _other_values(of, statistics, args)
    with contextlib.suppress(_Refused):
        _check_apart(of._replace(loss_fn=_refusing(of.loss_fn)), *others)
    return bool(((apart[:, 1:] != 0) & apart[:, 1:].isfinite()).any(1).sum() >= 2)


def _check_apart(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> Tensor:
    """What every row gives alone, if they do not give something else together."""
    count = statistics.log_probs.size(0)
    together = _values_and_gradients(of, statistics, args, slice(0, count), 1)
    apart = torch.cat([
        _values_and_gradients(of, statistics, args, slice(place, place + 1), 1 + place) for place in range(count)
    ])  # fmt: skip
    largest = torch.maximum(together.abs(), apart.abs()).nan_to_num(posinf=0.0).amax(0)
    near = (together - apart).abs() <= _PROBE_TOLERANCE * largest
    if not bool((near | (together == apart) | (together.isnan() & apart.isnan())).all()):
        fail(_OP, "loss_fn must give the loss of a row from that row alone, as it is called for some rows at a time, "
                  "got a loss that changes with the other rows, or from one call to the next")  # fmt: skip
    return apart


def _other_values(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> tuple[Statistics, tuple[Any, ...]]:
    """Rows of which no two are equal, in what is floating-point and not 0."""

    def column(values: tuple[float, ...], like: Tensor) -> Tensor:
        column = torch.tensor(values[: like.size(0)], dtype=like.dtype, device=like.device)
        return column.view(-1, *(1,) * (like.dim() - 1))

    log_probs, entropy = statistics
    statistics = Statistics(
        log_probs - column(_SHIFTS, log_probs), None if entropy is None else entropy + column(_SHIFTS, entropy)
    )
    others = [
        arg * column(_FACTORS[place % 4 :] + _FACTORS[: place % 4], arg)
        if is_of_rows and arg.is_floating_point()
        else arg
        for place, (arg, is_of_rows) in enumerate(zip(args, of.of_rows, strict=True))
    ]
    return statistics, tuple(others)


class _Refused(Exception):
    """By loss_fn itself, which may check what it is given."""


def _refusing(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def refusing(*args: Any) -> Tensor:
        try:
            return loss_fn(*args)
        except Exception as error:
            raise _Refused from error

    return refusing


def _values_and_gradients(
    of: RowLoss, statistics: Statistics, args: tuple[Any, ...], part: slice, first: int
) -> Tensor:
    """(n, ·): the loss of some rows and their statistics' gradients, of losses weighted by their place."""
    with torch.enable_grad():
        leaves = [value[part].contiguous().detach().requires_grad_() for value in statistics if value is not None]
        of_part = of._replace(args=args).part(part)
        rows = of(
            Statistics(leaves[0], leaves[1] if len(leaves) > 1 else None), tuple(_leaf(a, False) for a in of_part)
        )
        weights = torch.arange(first, first + rows.size(0), dtype=rows.dtype, device=rows.device)
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if rows.requires_grad:
            found = torch.autograd.grad((rows * weights).sum(), leaves, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    return torch.cat([value.detach().reshape(rows.size(0), -1) for value in (rows, *gradients)], 1)


def _place_of(loss_fn: Callable[..., Tensor]) -> tuple[weakref.WeakSet[Any], Any]:
    """Where it is noted that it has been looked at. A method is another object whenever it is asked for."""
    if isinstance(loss_fn, MethodType):
        return _probed_methods.setdefault(loss_fn.__self__, weakref.WeakSet()), loss_fn.__func__
    return _probed, loss_fn


def _is_probed(loss_fn: Callable[..., Tensor]) -> bool:
    try:
        functions, function = _place_of(loss_fn)
        return function in functions
    except TypeError:  # not hashable
        return False


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
