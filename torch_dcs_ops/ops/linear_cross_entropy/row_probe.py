"""Whether a caller's loss of rows makes each of them from that row alone: what it gives beside other rows is looked at.

A loss that mixes rows has another value and another gradient for some rows at a time, as it is called, than for all of
them. Nothing else would tell its caller.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.validate import fail
from .row_losses import OP, RowLoss, Statistics

PROBED_ROWS = 4
_SPREAD_ROWS = 4096  # over the chunks of a call
_TOLERANCE = 1e-3  # of the largest value: another number of rows may take another instruction
# For other values, of which no two kinds of rows have the same ones.
_SHIFTS = (0.3, 0.1, 0.5, 0.2)  # of the rows' statistics
_FACTORS = (1.0, 0.8, 0.6, 0.9)  # of their arguments: toward 0, so that probabilities and indices stay such
_SHOWN = (bool, str, enum.Enum, CodeType)  # as they are
_MOST_FACTS = 64  # of one object
_MOST_KEYS = 8  # of one code: what is made with another number in every step is looked at so many times
_looking = threading.RLock()
_probed: weakref.WeakKeyDictionary[CodeType, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


class _Rows(NamedTuple):
    """Some rows for a loss, contiguous as one row is: strides may take another instruction."""

    of: RowLoss
    statistics: Statistics
    weights: Tensor  # of the rows' losses in the sum that is differentiated

    @property
    def total(self) -> int:
        return self.statistics.log_probs.size(0)

    def at(self, indices: slice | Tensor) -> _Rows:
        def choose(values: Tensor) -> Tensor:
            return values[indices].detach().contiguous()

        log_probs, entropy = self.statistics
        statistics = Statistics(choose(log_probs), None if entropy is None else choose(entropy))
        return _Rows(self.of._replace(args=self.of.select(choose)), statistics, self.weights[indices])

    def loss(self) -> tuple[Tensor, list[Tensor]]:
        """The loss of every row, and the statistics that it is made of."""
        leaves = [value.detach().requires_grad_() for value in self.statistics if value is not None]
        args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in self.of.args)
        return self.of(Statistics(leaves[0], leaves[1] if len(leaves) > 1 else None), args), leaves


def check_rows_do_not_mix(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> None:
    """Refuses a loss whose value or gradient at a row is another one beside other rows, the first time that it comes.

    On a GPU the answer has to be waited for. Where it says nothing the next call looks again.
    """
    if may_look(of, statistics) and look(of, statistics, args):
        note_looked_at(of.loss_fn)


def may_look(of: RowLoss, statistics: Statistics) -> bool:
    return not (
        torch.is_inference_mode_enabled() or _is_probed(of.loss_fn) or _is_captured(statistics.log_probs)
    )  # fmt: skip


def look(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> bool:
    """Refuses a loss that mixes these rows; False if their gradients said nothing.

    A few are called one by one, from all over the rows, and then all at once. Where the gradients of those few are 0 or
    nan, which says nothing, they are the ones of the largest gradients.
    """
    rows = _rows(of, statistics, args)
    if rows.total < 2:
        return False
    step = (rows.total - 1) // (PROBED_ROWS - 1) or 1
    with _apart_from_the_caller(of.loss_fn):
        says = _look_at_few(rows.at(slice(0, (PROBED_ROWS - 1) * step + 1, step))) or _look_at_few(
            rows.at(_of_large_gradients(rows))
        )
        _look_at_all(rows)
    return says


def look_across(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> None:
    """Refuses a loss that mixes rows of several chunks, of which each may have one row of a sequence."""
    rows = _rows(of, statistics, args)
    few = min(rows.total, _SPREAD_ROWS)
    with _apart_from_the_caller(of.loss_fn):
        _look_at_all(rows.at(torch.arange(few, device=rows.weights.device) * rows.total // few))


def note_looked_at(loss_fn: Callable[..., Tensor]) -> None:
    key = _key_of(loss_fn)
    if key is not None:
        _probed.setdefault(key[0], set()).add(key[1])


@contextlib.contextmanager
def _apart_from_the_caller(loss_fn: Any) -> Iterator[None]:
    """Its hooks of saved tensors, as of activation checkpoints, and its search for nan are for its own graph. Functions
    that it has compiled run as they are written: compiled code rounds in another way for another number of rows. One
    thread at a time, as the stance is that of all."""
    # A stance imports the compiler, which takes more than a second.
    is_compiled = any(hasattr(one, "__wrapped__") for one in (_function_of(loss_fn), *_held_by(loss_fn)))
    with (
        _looking,
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        torch.autograd.set_detect_anomaly(False),
        torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext(),
    ):
        yield


def _rows(of: RowLoss, statistics: Statistics, args: tuple[Any, ...]) -> _Rows:
    indices = torch.arange(statistics.log_probs.size(0), device=statistics.log_probs.device)
    weights = 1 + (indices % PROBED_ROWS).to(statistics.log_probs.dtype)
    return _Rows(of._replace(args=args), statistics, weights).at(slice(None))


def _of_large_gradients(rows: _Rows) -> Tensor:
    """The indices of the rows with the largest ones."""
    every = _values_and_gradients(rows)[:, 1:].abs()
    most = every.nan_to_num(0.0, posinf=0.0).sum(1)
    return most.topk(min(PROBED_ROWS, most.size(0)))[1]


def _look_at_few(rows: _Rows) -> bool:
    """Refuses a loss that mixes them; whether their gradients could tell.

    They are looked at with other values too: beside equal rows, as the ratios of a policy to itself or the weights of
    one sequence are, a mean over rows is a row's own value.
    """

    def check(rows: _Rows) -> Tensor:
        together = _values_and_gradients(rows)
        alone = torch.cat([_values_and_gradients(rows.at(slice(index, index + 1))) for index in range(rows.total)])
        if bool(_differ(together, alone)):
            _refuse()
        return alone

    with _some_at_a_time(rows.total, 1):
        alone = check(rows)
    with contextlib.suppress(_Refused):
        check(_with_other_values(rows, torch.arange(rows.total, device=rows.weights.device)))
    return bool(((alone[:, 1:] != 0) & alone[:, 1:].isfinite()).any(1).sum() >= 2)


def _look_at_all(rows: _Rows) -> None:
    """Refuses a loss that mixes any two of them, with one wait.

    All are needed at once: a sequence's rows may be anywhere, a few rows may be of a sequence each, and a loss may mix
    in a rare case alone. A gradient of one row's loss at another one's statistics must be exactly 0. What is mixed
    without a gradient, as counts and detached ratios are, shows in half of the rows: those whose index has an odd
    number of zeros, which leaves out a part of any sequence, whatever its stride.
    """
    if rows.total < 2:
        return
    found = list(_gradients_of_others(rows))
    indices = torch.arange(rows.total)
    odd = (_zeros(indices, rows.total) & 1).bool()
    half = odd.nonzero().squeeze(1).to(rows.weights.device)
    with _some_at_a_time(rows.total, half.numel()):
        found.append(_differ(_values_and_gradients(rows)[half], _values_and_gradients(rows.at(half))))
    with contextlib.suppress(_Refused):
        others = _with_other_values(rows, odd.long().to(rows.weights.device))
        found.append(_differ(_values_and_gradients(others)[half], _values_and_gradients(others.at(half))))
    if bool(torch.stack(found).any()):
        _refuse()


def _gradients_of_others(rows: _Rows) -> Iterator[Tensor]:
    """0-D: whether the losses of some rows have a gradient at other rows' statistics.

    The loss is called anew for each split: a compiled one may give its graph's memory away.
    """
    for chosen in _splits(rows.total, rows.weights.device):
        with torch.enable_grad():
            loss, leaves = rows.loss()
            if not loss.requires_grad:
                return
            gradients = torch.autograd.grad(loss, leaves, chosen.to(loss.dtype), allow_unused=True)
        for gradient in gradients:
            if gradient is not None:
                yield (_is_something(gradient).view(rows.total, -1).any(1) & ~chosen).any()


def _is_something(gradient: Tensor) -> Tensor:
    """nan says nothing, nor does what it becomes."""
    return (gradient != 0) & gradient.isfinite()


def _splits(count: int, device: torch.device) -> Iterator[Tensor]:
    """Choices of rows: for any two rows, one has the first without the second, and one the second without the first.

    These are the bits of Berger's code: of a row's index, and of the number of zeros among these.
    """
    indices = torch.arange(count, device=device)
    bits = (count - 1).bit_length()
    for bit in range(bits):
        yield (indices >> bit & 1).bool()
    zeros = _zeros(indices, count)
    for bit in range(bits.bit_length()):
        yield (zeros >> bit & 1).bool()


def _zeros(indices: Tensor, count: int) -> Tensor:
    """How many of the bits are 0 that indices below `count` have."""
    bits = (count - 1).bit_length()
    zeros = torch.full_like(indices, bits)
    for bit in range(bits):
        zeros -= indices >> bit & 1
    return zeros


def _values_and_gradients(rows: _Rows) -> Tensor:
    """(n, ·): the loss of some rows and their statistics' gradients, of losses that are weighted."""
    with torch.enable_grad():
        loss, leaves = rows.loss()
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            found = torch.autograd.grad((loss * rows.weights).sum(), leaves, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    return torch.cat([value.detach().reshape(rows.total, -1) for value in (loss, *gradients)], 1)


def _differ(together: Tensor, apart: Tensor) -> Tensor:
    """0-D: whether rows give something else beside others."""
    if not together.numel():
        return torch.zeros((), dtype=torch.bool, device=together.device)
    largest = torch.maximum(together.abs(), apart.abs()).nan_to_num(posinf=0.0).amax(0)
    near = (together - apart).abs() <= _TOLERANCE * largest
    return ~(near | (together == apart) | (together.isnan() & apart.isnan())).all()


def _with_other_values(rows: _Rows, kinds: Tensor) -> _Rows:
    """No two of the four kinds are equal, in what is floating-point and not 0, and within the range of the rows' own.

    loss_fn may refuse these.
    """

    def column(values: tuple[float, ...], like: Tensor) -> Tensor:
        column = torch.tensor(values, dtype=like.dtype, device=like.device)[kinds]
        return column.view(-1, *(1,) * (like.dim() - 1))

    log_probs, entropy = rows.statistics
    statistics = Statistics(
        -_within(-log_probs, -log_probs + column(_SHIFTS, log_probs)),
        None if entropy is None else _within(entropy, entropy + column(_SHIFTS, entropy)),
    )
    args = tuple(
        arg * column(_FACTORS[index % 4 :] + _FACTORS[: index % 4], arg)
        if is_of_rows and arg.is_floating_point()
        else arg
        for index, (arg, is_of_rows) in enumerate(zip(rows.of.args, rows.of.of_rows, strict=True))
    )
    of = rows.of._replace(loss_fn=_refusing(rows.of.loss_fn), args=args)
    return rows._replace(of=of, statistics=statistics)


def _within(values: Tensor, larger: Tensor) -> Tensor:
    """No larger than the largest of `values`: a look-up by them, which has all of these, has no others."""
    largest = torch.where(values.isfinite(), values, -torch.inf).max()
    return torch.where(larger > largest, torch.maximum(values, largest), larger)


def _refuse() -> None:
    fail(OP, "loss_fn must give the loss of a row from that row alone, as it is called for some rows at a time, got a "
             "loss that changes with the other rows, or from one call to the next; what is of a sequence or a batch "
             "must come in row_args, or the loss be made of linear_log_probs' results")  # fmt: skip


@contextlib.contextmanager
def _some_at_a_time(count: int, fewer: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if str(error).startswith(OP):
            raise
        raise RuntimeError(f"{OP}: loss_fn must take some rows at a time, got an error for {count} of them or for "
                           f"{fewer}: {error}") from error  # fmt: skip


class _Refused(Exception):
    """By loss_fn itself, which may check what it is given."""


def _refusing(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def refusing(*args: Any) -> Tensor:
        try:
            return loss_fn(*args)
        except Exception as error:
            raise _Refused from error

    return refusing


def _key_of(loss_fn: Any) -> tuple[CodeType, tuple[Any, ...]] | None:
    """As what it has been looked at: its code, and what is known of what it was made with.

    Functions that are defined anew in every step, and methods, are other objects each time. None of what has no code.
    """
    function = _function_of(loss_fn)
    code = getattr(inspect.unwrap(function) if function is not None else None, "__code__", None)
    return None if code is None else (code, _facts(loss_fn, 3))


def _function_of(loss_fn: Any) -> Any:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, torch.nn.Module):
        return loss_fn.forward
    return loss_fn if isinstance(loss_fn, (FunctionType, MethodType)) else getattr(type(loss_fn), "__call__", None)  # noqa: B004


def _held_by(function: Any) -> list[Any]:
    """What is in a function's closure."""
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            held.append(cell.cell_contents)
    return held


def _facts(value: Any, depth: int, counts: bool = True) -> Any:
    """Flags, names, code and, where `counts`, whole numbers as they are; what holds others as those of the first few.

    None of other numbers and tensors, nor of whole numbers in containers and objects, which change from step to step.
    """
    if isinstance(value, _SHOWN) or (counts and isinstance(value, int)):
        return value
    if depth == 0 or value is None or isinstance(value, (Tensor, int, float, complex)):
        return None
    if isinstance(value, FunctionType):
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_held_by(value)]
        return value.__code__, *(_facts(one, depth - 1) for one in given)
    if isinstance(value, functools.partial):
        return tuple(_facts(one, depth - 1) for one in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, MethodType):
        return _facts(value.__func__, depth - 1), _facts(value.__self__, depth - 1)
    held = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", {})
    first = list(itertools.islice(held.values() if isinstance(held, dict) else held, _MOST_FACTS))
    if depth == 1:  # most of a large object is here: without a call for each
        return type(value), *(one for one in first if isinstance(one, _SHOWN))
    facts = (_facts(one, depth - 1, counts=False) for one in first)
    return type(value), *(fact for fact in facts if fact is not None)


def _is_probed(loss_fn: Callable[..., Tensor]) -> bool:
    key = _key_of(loss_fn)
    if key is None:
        return False
    found = _probed.get(key[0], ())
    return key[1] in found or len(found) >= _MOST_KEYS


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
