"""A loss of rows by chunks: their logits, their statistics, the caller's loss and its gradient, the logits' gradient.

The statistics of a chunk are leaves of a small graph of autograd, whose gradients are all that the logits' gradient
needs. So the gradients of input and linear_weight form in the pass that has the logits: three products, none of them
twice.

A loss of one id's log-probability, which makes nothing of the entropy's gradient, scales a row's gradient by a number.
Where linear_weight's gradient is summed over all rows at once, behind all chunks, or not wanted, one pass over the
logits makes both the log-probabilities and the gradients of each, and the loss is called once for all rows: its
gradients scale the rows of input's gradient, and of input, for linear_weight's. That leaves out a pass over the logits,
and all of the loss's launches but one chunk's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from . import alignment, ids
from .gradients import ExactGradients, Gradients
from .ids import IGNORED, Call, IdUpstream
from .plan import Plan
from .row_losses import (
    RowGradients,
    RowLoss,
    Statistics,
    gradients_of_rows,
    note_use_of_entropy,
    uses_entropy,
    where_rows,
)
from .row_probe import PROBED_ROWS, check_rows_do_not_mix, look, look_across, may_look, note_looked_at
from .valid_rows import ValidRows


class Wanted(NamedTuple):
    """What the result of a call is made of."""

    is_mean: bool
    entropy: bool
    statistics: bool  # of every row
    needs: Needs
    needs_args: tuple[bool, ...]


class Results(NamedTuple):
    """The reduced loss, the statistics of every row, flat, and the gradients of the loss; None: 0."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor
    gradients: Gradients
    args: list[Tensor | None]
    is_constant: bool


class _Problem(NamedTuple):
    """A call's rows, as they are run."""

    call: Call
    of: RowLoss
    target: Tensor  # (n, K)
    valid: Tensor
    operand: Tensor | ValidRows
    weights: Tensor  # of the rows' losses in the result
    is_single: bool  # whether a row has one id without a dimension of its own
    wanted: Wanted

    def statistics(self, log_probs: Tensor, entropy: Tensor | None) -> Statistics:
        """As loss_fn has them, of log_probs (n, K)."""
        return Statistics(log_probs.squeeze(1) if self.is_single else log_probs, entropy)

    def gradients_of(self, statistics: Statistics, part: slice) -> RowGradients:
        wanted = self.wanted
        needs = (any(wanted.needs), *wanted.needs_args)
        return gradients_of_rows(self.of, statistics, self.of.part(part), self.weights[part], needs)


def forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
    of: RowLoss,
    wanted: Wanted,
) -> Results:
    """target (...), or (..., K)."""
    needs, total, dtype = wanted.needs, input.shape[:-1].numel(), row_dtype(input.dtype)
    is_single = target.dim() < input.dim()
    target, options = ids.flat_ids(target.unsqueeze(-1) if is_single else target, linear_weight, options)
    call = ids.make_call(input, linear_weight, linear_bias, options)
    chosen = ids.chosen_rows(call, target)
    operand: Tensor | ValidRows = call.input if chosen is None else chosen
    chunks = ids.chunks_of(call, operand, needs.linear_weight, not any(needs))
    valid = target.squeeze(1) != IGNORED if target.size(1) == 1 else (target != IGNORED).any(1)
    divisor = valid.sum().to(dtype) if wanted.is_mean else torch.ones((), dtype=dtype, device=input.device)
    if chosen is not None:
        target, valid, of = chosen.gather(target), chosen.gather(valid), of._replace(args=of.select(chosen.gather))
    weights = torch.where(valid, divisor.reciprocal(), 0)
    problem = _Problem(call, of, target, valid, operand, weights, is_single, wanted)
    found = _run(problem, total, *chunks)
    if found is None:
        found = _run(problem, total, *ids.chunks_of(call, operand, needs.linear_weight, not any(needs)))
    assert found is not None
    rows, gradients = found
    rows.restore(chosen)
    of_operands = ids.finished(gradients, chosen, input, linear_weight, linear_bias, needs)
    loss = torch.where(valid, rows.loss[: valid.numel()], 0).sum() / divisor
    return Results(loss, rows.log_probs, rows.entropy, of_operands, rows.args, bool(rows.is_constant))


def _run(
    problem: _Problem, total: int, plan: Plan, chunks: Iterator[tuple[slice, Tensor]]
) -> tuple[_Rows, Gradients] | None:
    """The results of every row of `total`, those that were run first. None: the loss is none that scales rows."""
    call, operand, needs = problem.call, problem.operand, problem.wanted.needs
    grad_input = call.input.new_empty(call.input.shape if needs.input else (0, 0))
    word = alignment.word(call.input.size(0), call.linear_weight)
    gradients = ExactGradients(plan, operand, call.linear_weight, grad_input, needs, call.input.dtype, word)
    rows = _Rows(total, problem)
    run = _run_scaled if _scales_rows(problem, plan) else _run_chunks
    return (rows, gradients.result()) if run(problem, chunks, gradients, rows) else None


def _scales_rows(problem: _Problem, plan: Plan) -> bool:
    """Whether the loss's gradient is a factor of every row's, which linear_weight's can wait for."""
    needs = problem.wanted.needs
    if not any(needs) or needs.linear_bias or problem.target.size(1) != 1:
        return False
    if problem.wanted.entropy and uses_entropy(problem.of.loss_fn) is not False:
        return False
    return plan.accumulation == "shared" or not needs.linear_weight


def _run_chunks(
    problem: _Problem, chunks: Iterator[tuple[slice, Tensor]], gradients: ExactGradients, rows: _Rows
) -> bool:
    """The loss and its gradients for one chunk after another."""
    call, of, wanted = problem.call, problem.of, problem.wanted
    seen = _Seen(problem)
    is_entropic = False
    for part, logits in chunks:
        ids_of_part = problem.target[part]
        _, log_probs, of_rows = ids.statistics(call, logits, ids_of_part, False, wanted.entropy)
        entropy = of_rows[3] if wanted.entropy else None
        statistics = problem.statistics(log_probs, entropy)
        seen.add(statistics, part.stop)
        found = problem.gradients_of(statistics, part)
        rows.put(part, log_probs, entropy, found)
        is_entropic = is_entropic or found.entropy is not None
        if any(wanted.needs):
            # Several ids are put into the gradient behind the row op: it cannot leave it anywhere else.
            saved_slices = gradients.slice_arguments(logits, part) if ids_of_part.size(1) == 1 else ()
            upstream = IdUpstream(found.log_probs, found.entropy, None)
            gradients.add(logits, part, ids.to_gradient_(call, logits, ids_of_part, upstream, saved_slices))
        del logits
    seen.check_chunks()
    if any(wanted.needs) and wanted.entropy and problem.operand.size(0):
        note_use_of_entropy(of.loss_fn, is_entropic)
    return True


def _run_scaled(
    problem: _Problem, chunks: Iterator[tuple[slice, Tensor]], gradients: ExactGradients, rows: _Rows
) -> bool:
    """The loss for all rows, behind the gradients of their log-probabilities; False if there is more in its own."""
    call, of, wanted, total = problem.call, problem.of, problem.wanted, problem.operand.size(0)
    log_probs = problem.weights.new_empty((total, 1))
    entropy = problem.weights.new_empty(total) if wanted.entropy else None
    of_loss = problem.weights.new_full((1,), -1)
    for part, logits in chunks:
        saved_slices = gradients.slice_arguments(logits, part)
        of_rows = call.rows(
            logits, problem.target[part].squeeze(1), (of_loss, None, None), True, False, wanted.entropy, *saved_slices
        )
        torch.neg(of_rows[0].unsqueeze(1), out=log_probs[part])
        if entropy is not None:
            entropy[part] = of_rows[3]
        gradients.add(logits, part, of_rows[1])
        del logits
    count = problem.operand.size(0)  # known by now
    if count == 0:
        return True
    every = slice(0, count)
    log_probs, entropy = log_probs[every], None if entropy is None else entropy[every]
    statistics = problem.statistics(log_probs, entropy)
    check_rows_do_not_mix(of, statistics, of.part(every))
    found = problem.gradients_of(statistics, every)
    if found.entropy is not None:
        note_use_of_entropy(of.loss_fn, True)
        return False
    rows.put(every, log_probs, entropy, found)
    factors = torch.zeros_like(problem.weights[every])
    if found.log_probs is not None:
        factors = where_rows(problem.valid[every], found.log_probs.reshape(count))
    gradients.scale_rows(factors)
    return True


class _Seen:
    """The statistics of a call whose loss has not been looked at; of one that has, none."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.parts: list[Statistics] = []
        self.stop = self.looked_at = 0  # rows
        self.says = self.is_known = False

    def add(self, statistics: Statistics, stop: int) -> None:
        """Looks at the first chunk, or at as many as have a few rows."""
        of, total = self.problem.of, self.problem.operand.size(0)
        if self.stop == 0:
            self.is_known = not may_look(of, statistics)
        if self.is_known:
            return
        self.parts.append(statistics)
        self.stop = stop
        if not self.looked_at and stop >= min(PROBED_ROWS, total):
            self.says = look(of, _joined(self.parts), of.part(slice(stop)))
            self.looked_at = stop

    def check_chunks(self) -> None:
        of = self.problem.of
        if self.stop > self.looked_at:
            look_across(of, _joined(self.parts), of.part(slice(self.stop)))
        if self.says:
            note_looked_at(of.loss_fn)


def _joined(parts: list[Statistics]) -> Statistics:
    """The statistics of chunks."""
    if len(parts) == 1:
        return parts[0]
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Statistics(torch.cat([part.log_probs for part in parts]), torch.cat(entropies) if entropies else None)


class _Rows:
    """What is kept of every row."""

    def __init__(self, total: int, problem: _Problem) -> None:
        of, wanted, target = problem.of, problem.wanted, problem.target
        self.valid, self.of_rows, empty = problem.valid, of.of_rows, problem.weights.new_empty
        self.loss = empty(total)
        self.log_probs = empty((total, target.size(1)) if wanted.statistics else 0)
        self.entropy = empty(total if wanted.statistics and wanted.entropy else 0)
        # An argument that is for all rows is summed over chunks, which its own dtype may be too narrow for.
        self.args = [
            arg.new_zeros(
                (total, *arg.shape[1:]) if is_of_rows else arg.shape,
                dtype=torch.promote_types(arg.dtype, self.loss.dtype),
            )
            if need
            else None
            for arg, need, is_of_rows in zip(of.args, wanted.needs_args, of.of_rows, strict=True)
        ]
        self.is_constant: bool | None = None  # None: of no chunk yet

    def put(self, part: slice, log_probs: Tensor, entropy: Tensor | None, found: RowGradients) -> None:
        self.loss[part] = found.loss
        self.is_constant = found.is_constant and self.is_constant is not False
        if self.log_probs.numel():
            self.log_probs[part] = log_probs
        if entropy is not None and self.entropy.numel():
            self.entropy[part] = entropy
        for whole, gradient, is_of_rows in zip(self.args, found.args, self.of_rows, strict=True):
            if whole is not None and gradient is not None:
                if is_of_rows:
                    whole[part] = where_rows(self.valid[part], gradient)
                else:
                    whole += gradient

    def restore(self, chosen: ValidRows | None) -> None:
        if chosen is None:
            return
        of_rows = [values for values, is_of_rows in zip(self.args, self.of_rows, strict=True) if is_of_rows]
        for values in (self.log_probs, self.entropy, *of_rows):
            if values is not None and values.numel():
                chosen.restore_(values)
