"""`dcs::_vocab_parallel_forward` and `_backward`: rows whose classes are shared out, by chunks; kernels and fakes.

A forward that forms gradients exchanges the statistics of one chunk at a time, while its logits are there: they are on
their way while the next chunk's logits are made. Any other one exchanges those of all rows at once. A backward knows
them already. The number of rows of a chunk is that of the ranks' mean share of the classes, so that it is the same on
all of them. Each op is one opaque call for a compiler, which so cannot order the collectives of one rank unlike
another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...ops._common import autocast
from ...ops.linear_cross_entropy import alignment
from ...ops.linear_cross_entropy.chunks import Logits
from ...ops.linear_cross_entropy.gradients import ExactGradients, Gradients
from ...ops.linear_cross_entropy.half_range import boosted, half_boost
from ...ops.linear_cross_entropy.ids import IGNORED, Call
from ...ops.linear_cross_entropy.kernel_ops import forward_gradient_dtype
from ...ops.linear_cross_entropy.plan import Plan, make_plan
from ...ops.linear_cross_entropy.valid_rows import ValidRows, valid_rows
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from ..common import Ranks
from .input_sums import InputSum, rows_of_sum
from .rows import Own, RowUpstream, Slice, Statistics, Wanted, columns_of_slice, combined, to_gradient_
from .targets import check_targets


class Numbers(NamedTuple):
    """What is no tensor in the ops, in their schemas' order."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    z_loss: float
    memory_budget: int | None
    accumulate_dtype: torch.dtype | None
    grad_input_dtype: torch.dtype
    input_sum: str  # see input_sums.py
    first_class: int
    classes: int
    group: str
    ranks: int
    rank: int
    need_input_grad: bool
    need_weight_grad: bool
    need_bias_grad: bool

    @property
    def needs(self) -> Needs:
        return Needs(self.need_input_grad, self.need_weight_grad, self.need_bias_grad)

    def needing(self, needs: Sequence[bool]) -> Numbers:
        """With the gradients of input, linear_weight and linear_bias that are needed."""
        return Numbers(*self[:-3], *needs)

    @property
    def team(self) -> Ranks:
        return Ranks(self.group, self.ranks, self.rank)


_COUNT = len(Numbers._fields)
_BUFFERS = 2  # of logits: one chunk's are made while the other's statistics are on their way
STATISTICS = ("lse", "delta", "weight", "entropy", "own_entropy")  # the rows of `statistics` (5, N)


class _Upstream(NamedTuple):
    """Gradients, flat, in the rows' dtype; loss (1,) or (N,), log_probs (N, K), the others (N,)."""

    loss: Tensor | None
    log_probs: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class _Rows:
    """The rows of one call: all of them, or on a CPU those that count."""

    def __init__(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
        weight_sum: Tensor | None, numbers: Numbers, keeps_all: bool,
    ) -> None:  # fmt: skip
        dtype, ignored = row_dtype(input.dtype), numbers.ignore_index
        check_target_range(target, ignored, numbers.classes)
        self.numbers, self.total, self.features = numbers, input.size(0), input.size(1)
        self.slice = Slice(numbers.first_class, linear_weight.size(0), numbers.classes,
                           None if weight is None else weight.to(dtype).contiguous())  # fmt: skip
        if weight is None:
            self.weight_sum: Tensor | float = float(numbers.classes)
        else:
            self.weight_sum = 0.0 if weight_sum is None else weight_sum
        operands = alignment.operands(input, linear_weight) if self.slice.size else (input, linear_weight)
        bias = None if linear_bias is None else linear_bias.to(dtype).contiguous()
        options = HeadOptions(numbers.softcap, numbers.logit_scale, IGNORED, numbers.memory_budget)
        self.call = Call(*operands, bias, options)
        self.chosen: ValidRows | None = None
        if input.device.type == "cpu" and not keeps_all:
            first = torch.where((target != ignored).any(1), ignored + 1, ignored)
            self.chosen = valid_rows(self.call.input, first, ignored, "host")
        self.operand = self.call.input if self.chosen is None else self.chosen
        self.target = target if self.chosen is None else self.chosen.gather(target)
        self.count = self.operand.size(0)

    def plan(self, gradient_dtype: torch.dtype, buffers: int = 1) -> Plan:
        """With so many chunks at a time within memory_budget."""
        numbers, weight, budget = self.numbers, self.call.linear_weight, self.numbers.memory_budget

        def of(classes: int) -> Plan:
            return make_plan(
                self.count, weight.size(1), max(classes, 1), weight.dtype, gradient_dtype, weight.device.type,
                numbers.need_weight_grad, None if budget is None else max(budget // buffers, 1),
                numbers.accumulate_dtype, is_forward=not any(numbers.needs),
            )  # fmt: skip

        # Of the mean share on all ranks; only the room for a row is that of this slice.
        return of(-(-numbers.classes // numbers.ranks))._replace(stride=of(self.slice.size).stride)

    def chunks(self, plan: Plan) -> list[slice]:
        return [slice(start, min(start + plan.rows, self.count)) for start in range(0, self.count, plan.rows)]

    def logits(self, plan: Plan) -> Logits | None:
        if self.slice.size == 0:
            return None
        word = alignment.word(self.call.input.size(0), self.call.linear_weight)
        return Logits(plan, self.operand, self.call.linear_weight, word)

    def gradients(self, plan: Plan, dtype: torch.dtype) -> ExactGradients | None:
        needs, weight = self.numbers.needs, self.call.linear_weight
        if self.slice.size == 0 or not any(needs):
            return None
        shape = self.call.input.shape if needs.input else (0, 0)
        grad_input = self.call.input.new_empty(shape, dtype=self.numbers.grad_input_dtype)
        return ExactGradients(plan, self.operand, weight, grad_input, needs, dtype, alignment.word(self.total, weight))

    def upstream(self, part: slice, given: _Upstream, whole: Statistics, of: Tensor) -> RowUpstream:
        """Of the rows `part`, whose targets are `of`."""
        numbers, counts = self.numbers, of != self.numbers.ignore_index
        zero = whole.lse.new_zeros(())
        valid = counts.any(1)
        rest, hit, even = zero.expand_as(whole.lse), zero.expand(of.shape), None
        if given.lse is not None:
            rest = given.lse[part]
        if given.log_probs is not None:
            hit = torch.where(counts, -given.log_probs[part], zero)
        if given.loss is not None:
            loss = given.loss if given.loss.numel() == 1 else given.loss[part]
            hit = hit + torch.where(counts, (loss * whole.weight * (1 - numbers.label_smoothing)).unsqueeze(1), zero)
            if numbers.z_loss:
                rest = rest + 2 * numbers.z_loss * loss * whole.lse
            if numbers.label_smoothing:
                even = torch.where(valid, loss * (numbers.label_smoothing / numbers.classes), zero)
                rest = rest + even * self.weight_sum
        entropy = None if given.entropy is None else torch.where(valid, given.entropy[part], zero)
        return RowUpstream(hit, torch.where(valid, rest, zero), entropy, even)

    def losses(self, of: Statistics) -> Tensor:
        """Of rows that count."""
        numbers = self.numbers
        loss = -of.log_probs[:, 0] * of.weight * (1 - numbers.label_smoothing)
        if numbers.label_smoothing:
            loss = loss + numbers.label_smoothing / numbers.classes * of.spread
        return loss + numbers.z_loss * of.lse.square() if numbers.z_loss else loss

    def restored(self, values: Tensor) -> Tensor:
        """Values of the rows that were run as those of all rows, 0 for the others."""
        if self.chosen is None:
            return values
        whole = values.new_empty((self.total, *values.shape[1:]))
        whole[: self.count] = values
        self.chosen.restore_(whole)
        return whole

    def input_sum(self, found: ExactGradients | None, dtype: torch.dtype, factor: Tensor | None) -> InputSum:
        """Of input's gradient, (total, D); `factor`: what it lacks."""
        numbers, features = self.numbers, self.features

        def part() -> Tensor:
            if found is None:
                return self.call.linear_weight.new_zeros((self.total, features), dtype=numbers.grad_input_dtype)
            if self.chosen is not None:
                self.chosen.restore_(found.grad_input)
            grad_input = found.grad_input[:, :features].contiguous()
            return grad_input if factor is None else grad_input.mul_(factor)

        return InputSum(part, numbers.team, numbers.input_sum, dtype)

    def begins(self, part: slice, input_sum: InputSum) -> Callable[[], None] | None:
        """What to do once input's gradient has the rows `part`."""
        return input_sum.begin if self.numbers.needs.input and part.stop == self.count else None

    def finished(
        self, found: ExactGradients | None, dtype: torch.dtype, factor: Tensor | None, input_sum: InputSum
    ) -> Gradients:
        """The gradients of all rows, in the operands' shapes."""
        needs, weight, features = self.numbers.needs, self.call.linear_weight, self.features
        empty = weight.new_empty((0, features), dtype=self.numbers.grad_input_dtype)
        if found is None:
            grad_weight = weight.new_zeros((self.slice.size if needs.linear_weight else 0, features), dtype=dtype)
            grad_bias = weight.new_zeros(0, dtype=row_dtype(weight.dtype))
        else:
            _, grad_weight, grad_bias = found.result()
            if not needs.linear_weight:
                grad_weight = weight.new_empty((0, features), dtype=dtype)
            grad_weight = grad_weight[:, :features].contiguous()
            if factor is not None:
                grad_weight, grad_bias = grad_weight.mul_(factor), grad_bias.mul_(factor)
        return Gradients(input_sum.result() if needs.input else empty, grad_weight, grad_bias)


def _forward(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    weight_sum: Tensor | None, scale: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    numbers, (need_predictions, need_entropy) = Numbers(*rest[:_COUNT]), rest[_COUNT:]
    with torch._C._AutoDispatchBelowAutograd():
        check_targets(target, numbers.ignore_index, numbers.classes, numbers.team)
        rows = _Rows(input, linear_weight, target, linear_bias, weight, weight_sum, numbers, need_predictions)
        wanted = Wanted(numbers.label_smoothing > 0, need_entropy, need_predictions)
        dtype, forms_gradients = forward_gradient_dtype(input.dtype), any(numbers.needs)
        plan = rows.plan(dtype)
        buffers = _BUFFERS if forms_gradients and numbers.ranks > 1 and plan.rows < rows.count else 1
        if buffers > 1:
            plan = rows.plan(dtype, buffers)
        make_logits = [rows.logits(plan) for _ in range(buffers)]
        gradients = rows.gradients(plan, dtype)
        given, factor = _Upstream(scale if scale is not None else input.new_ones(1, dtype=row_dtype(input.dtype)),
                                  None, None, None), None  # fmt: skip
        if forms_gradients and input.dtype == torch.float16 and gradients is not None:
            given, factor = _boosted(given, rows, scale)
        input_sum = rows.input_sum(gradients, dtype, factor)
        every: list[tuple[Statistics, Own]] = []
        columns: list[Tensor] = []
        begun: _Begun | None = None
        for index, part in enumerate(rows.chunks(plan)):
            make, of = make_logits[index % len(make_logits)], rows.target[part]
            logits = None if make is None else make(part)
            mine = columns_of_slice(rows.call, logits, of, numbers.ignore_index, rows.slice, wanted)
            if not forms_gradients:
                columns.append(mine)
                continue
            next_one = _Begun(part, logits, numbers.team.gathering(mine))
            if begun is not None:
                every.append(_end(begun, rows, gradients, given, wanted, input_sum))
            begun = next_one
            if buffers == 1:
                every.append(_end(begun, rows, gradients, given, wanted, input_sum))
                begun = None
            del logits, next_one
        if begun is not None:
            every.append(_end(begun, rows, gradients, given, wanted, input_sum))
        del make_logits, begun
        if not every:
            joined = torch.cat(columns, 1) if columns else _no_columns(rows, target, wanted)
            gathered = numbers.team.gather(joined)
            every.append(combined(gathered, rows.target, numbers.ignore_index, wanted, numbers.team))
        return *_results(rows, every, need_entropy), *rows.finished(gradients, dtype, factor, input_sum)


class _Begun(NamedTuple):
    """A chunk whose statistics are on their way."""

    part: slice
    logits: Tensor | None
    gathered: Callable[[], Tensor]


def _end(
    begun: _Begun, rows: _Rows, gradients: ExactGradients | None, given: _Upstream, wanted: Wanted, input_sum: InputSum
) -> tuple[Statistics, Own]:
    """Of a chunk: its logits' gradient, and what that adds to the others. The ranks' sum begins with the last one."""
    part, logits, gathered = begun
    numbers, of = rows.numbers, rows.target[part]
    whole, own = combined(gathered(), of, numbers.ignore_index, wanted, numbers.team)
    if logits is not None and gradients is not None:
        upstream = rows.upstream(part, given, whole, of)
        to_gradient_(rows.call, logits, of, numbers.ignore_index, rows.slice, upstream, whole, own)
        gradients.add(logits, part, whole.lse, rows.begins(part, input_sum))
    return whole, own


def _no_columns(rows: _Rows, target: Tensor, wanted: Wanted) -> Tensor:
    return columns_of_slice(rows.call, None, target[:0], rows.numbers.ignore_index, rows.slice, wanted)


def _boosted(given: _Upstream, rows: _Rows, scale: Tensor | None) -> tuple[_Upstream, Tensor]:
    """float16 has no room for 1/N: see ops/linear_cross_entropy/half_range.py."""
    numbers = rows.numbers
    options = Options("sum", numbers.ignore_index, numbers.label_smoothing, numbers.softcap, numbers.logit_scale,
                      numbers.z_loss)  # fmt: skip
    boost = half_boost(rows.call.linear_weight, rows.target, rows.slice.weight, options)
    loss, factor = boosted(scale, boost)
    return given._replace(loss=loss), factor


def _results(rows: _Rows, every: list[tuple[Statistics, Own]], need_entropy: bool) -> tuple[Tensor, ...]:
    whole = Statistics(*(torch.cat(values) for values in zip(*(of for of, _ in every), strict=True)))
    own = Own(*(torch.cat(values) for values in zip(*(of for _, of in every), strict=True)))
    counts = rows.target != rows.numbers.ignore_index
    valid = counts.any(1)
    loss, log_probs = torch.where(valid, rows.losses(whole), 0), torch.where(counts, whole.log_probs, 0)
    statistics = torch.zeros((len(STATISTICS), loss.numel()), dtype=loss.dtype, device=loss.device)
    statistics[0], statistics[1], statistics[2] = torch.where(valid, whole.lse, 0), own.delta, whole.weight
    if need_entropy:
        statistics[3], statistics[4] = torch.where(valid, whole.entropy, 0), own.entropy
    if rows.chosen is not None:
        statistics = rows.restored(statistics.t().contiguous()).t().contiguous()
    return rows.restored(loss), rows.restored(log_probs), whole.predictions, statistics


def _backward(
    grad_loss: Tensor | None, grad_log_probs: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None,
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    weight_sum: Tensor | None, statistics: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    numbers = Numbers(*rest)
    with torch._C._AutoDispatchBelowAutograd():
        rows = _Rows(input, linear_weight, target, linear_bias, weight, weight_sum, numbers, False)
        given = _Upstream(grad_loss, grad_log_probs, grad_lse, grad_entropy)
        if rows.chosen is not None:
            # A gradient of one row is as long as that for all rows is.
            given = _Upstream(*(g if g is None or g.size(0) != rows.total else rows.chosen.gather(g) for g in given))
            statistics = rows.chosen.gather(statistics.t()).t()
        lse, delta, of_target, entropy, own_entropy = statistics.unbind(0)
        plan = rows.plan(input.dtype)
        make_logits, gradients = rows.logits(plan), rows.gradients(plan, input.dtype)
        input_sum = rows.input_sum(gradients, input.dtype, None)
        for part in rows.chunks(plan) if make_logits is not None and gradients is not None else ():
            assert make_logits is not None
            assert gradients is not None
            logits, of = make_logits(part), rows.target[part]
            none = lse.new_empty(0)
            whole = Statistics(lse[part], none, of_target[part], entropy[part], none, none)
            own = Own(delta[part], own_entropy[part])
            upstream = rows.upstream(part, given, whole, of)
            to_gradient_(rows.call, logits, of, numbers.ignore_index, rows.slice, upstream, whole, own)
            gradients.add(logits, part, whole.lse, rows.begins(part, input_sum))
            del logits
        return tuple(rows.finished(gradients, input.dtype, None, input_sum))


def _forward_fake(input: Tensor, linear_weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    numbers, (need_predictions, _) = Numbers(*rest[4 : 4 + _COUNT]), rest[4 + _COUNT :]
    n, dtype = input.size(0), row_dtype(input.dtype)
    return (
        input.new_empty(n, dtype=dtype),
        input.new_empty(target.shape, dtype=dtype),
        input.new_empty(n if need_predictions else 0, dtype=torch.int64),
        input.new_empty((len(STATISTICS), n), dtype=dtype),
        *_gradients_fake(input, linear_weight, numbers, forward_gradient_dtype(input.dtype)),
    )


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    input, linear_weight = args[4:6]
    return _gradients_fake(input, linear_weight, Numbers(*args[11:]), input.dtype)


def _gradients_fake(input: Tensor, linear_weight: Tensor, numbers: Numbers, dtype: torch.dtype) -> tuple[Tensor, ...]:
    (n, features), count, needs = input.shape, linear_weight.size(0), numbers.needs
    rows = rows_of_sum(n, numbers.team, numbers.input_sum) if needs.input else 0
    of_input = dtype if numbers.input_sum and needs.input else numbers.grad_input_dtype
    return (
        input.new_empty((rows, features), dtype=of_input),
        input.new_empty((count if needs.linear_weight else 0, features), dtype=dtype),
        input.new_empty(count if needs.linear_bias else 0, dtype=row_dtype(input.dtype)),
    )


for _name, _kernel, _fake in (
    ("_vocab_parallel_forward", _forward, _forward_fake),
    ("_vocab_parallel_backward", _backward, _backward_fake),
):
    _registry.LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _fake, lib=_registry.LIBRARY)
    # The products here are of the dtypes that the caller has chosen.
    autocast.register_cast(_name, getattr(torch.ops.dcs, _name).default, lambda args, keywords: (args, keywords))
