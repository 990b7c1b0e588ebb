"""A loss of rows by chunks: their logits, their statistics, the caller's loss and its gradient, the logits' gradient.

The statistics of a chunk are leaves of a small graph of autograd, whose gradients are all that the logits' gradient
needs. So the gradients of input and linear_weight form in the pass that has the logits: three products, none of them
twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from . import alignment, ids
from .gradients import ExactGradients, Gradients
from .ids import IGNORED, Call, IdUpstream
from .row_losses import PROBED_ROWS, RowGradients, RowLoss, Statistics, check_rows_do_not_mix, gradients_of_rows
from .valid_rows import ValidRows, compacts, valid_rows


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
    target = target.reshape(total, 1 if is_single else target.size(-1))
    check_target_range(target, options.ignore_index, linear_weight.size(0))
    target = torch.where(target == options.ignore_index, IGNORED, target)
    valid = (target != IGNORED).any(1)
    divisor = valid.sum().to(dtype) if wanted.is_mean else torch.ones((), dtype=dtype, device=input.device)
    rows = _Rows(total, target.size(1), of, wanted, input)
    call = ids.make_call(input, linear_weight, linear_bias, options._replace(ignore_index=IGNORED))
    chosen = _chosen(call, valid)
    operand: Tensor | ValidRows = call.input if chosen is None else chosen
    if chosen is not None:
        target, valid, of = chosen.gather(target), chosen.gather(valid), of._replace(args=of.select(chosen.gather))
    plan, chunks = ids.chunks_of(call, operand, needs.linear_weight, not any(needs))
    grad_input = call.input.new_empty(call.input.shape if needs.input else (0, 0))
    word = alignment.word(call.input.size(0), call.linear_weight)
    gradients = ExactGradients(plan, operand, call.linear_weight, grad_input, needs, input.dtype, word)
    first: list[Statistics] = []
    for part, logits in chunks:
        ids_of_part, args = target[part], of.part(part)
        _, log_probs, of_rows = ids.statistics(call, logits, ids_of_part, False, wanted.entropy)
        entropy = of_rows[3] if wanted.entropy else None
        statistics = Statistics(log_probs.squeeze(1) if is_single else log_probs, entropy)
        if part.start < PROBED_ROWS:
            first.append(statistics)
            if part.stop >= min(PROBED_ROWS, operand.size(0)):
                check_rows_do_not_mix(of, _joined(first), of.part(slice(part.stop)))
        found = gradients_of_rows(
            of, statistics, args, valid[part], divisor.reciprocal(), (any(needs), *wanted.needs_args)
        )
        rows.put(part, log_probs, entropy, found)
        if any(needs):
            # Several ids are put into the gradient behind the row op: it cannot leave it anywhere else.
            places = gradients.places(logits, part) if ids_of_part.size(1) == 1 else ()
            upstream = IdUpstream(found.log_probs, found.entropy, None)
            gradients.add(logits, part, ids.to_gradient_(call, logits, ids_of_part, upstream, places))
        del logits
    rows.restore(chosen)
    of_operands = ids.finished(gradients.result(), chosen, input, linear_weight, linear_bias, needs)
    loss = rows.loss.sum() / divisor
    return Results(loss, rows.log_probs, rows.entropy, of_operands, rows.args, bool(rows.is_constant))


def _chosen(call: Call, valid: Tensor) -> ValidRows | None:
    """Where rows of ignored ids are left out; the others first."""
    marked = torch.where(valid, IGNORED + 1, IGNORED)
    where = compacts(call.input, call.linear_weight, marked, False, call.options.logits_dtype)
    return None if where is None else valid_rows(call.input, marked, IGNORED, where)


def _joined(parts: list[Statistics]) -> Statistics:
    """The statistics of chunks, of which the first ones may have a row each."""
    if len(parts) == 1:
        return parts[0]
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Statistics(torch.cat([part.log_probs for part in parts]), torch.cat(entropies) if entropies else None)


class _Rows:
    """What is kept of every row."""

    def __init__(self, total: int, count: int, of: RowLoss, wanted: Wanted, input: Tensor) -> None:
        dtype = row_dtype(input.dtype)
        self.of_rows = of.of_rows
        self.loss = input.new_empty(total, dtype=dtype)
        self.log_probs = input.new_empty((total, count) if wanted.statistics else 0, dtype=dtype)
        self.entropy = input.new_empty(total if wanted.statistics and wanted.entropy else 0, dtype=dtype)
        # An argument that is for all rows is summed over chunks, which its own dtype may be too narrow for.
        self.args = [
            torch.zeros(arg.shape, dtype=torch.promote_types(arg.dtype, dtype), device=arg.device) if need else None
            for arg, need in zip(of.args, wanted.needs_args, strict=True)
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
                whole[part if is_of_rows else ...] += gradient

    def restore(self, chosen: ValidRows | None) -> None:
        if chosen is None:
            return
        of_rows = [values for values, is_of_rows in zip(self.args, self.of_rows, strict=True) if is_of_rows]
        for values in (self.loss, self.log_probs, self.entropy, *of_rows):
            if values is not None and values.numel():
                chosen.restore_(values)
