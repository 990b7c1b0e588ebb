"""Log-probabilities of several classes a row, and their gradients, by chunks of rows.

A row's logits z are seen at its ids, in its lse and its entropy alone. With a gradient g_k for the log-probability of
id k, the gradient of z is the row op's for an lse whose own gradient is g_lse - sum(g), and an entropy; plus g_k at
id k. The columns of the ids are formed apart, in the rows' dtype: there p - 1 is expm1(log p), and equal ids add up.
One id a row is the row op's target, which needs none of that.

Under a frozen linear_weight forward can form the gradient of one id's log-probability for an upstream gradient of 1
from the logits that it has: rows scale, so backward multiplies them, and the logits are made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from . import alignment
from .chunks import Logits
from .gradients import ExactGradients, Gradients
from .plan import Plan, make_plan, single_chunk, with_padding
from .valid_rows import Learned, ValidRows, compacts, valid_rows

IGNORED = -100  # a target of the row op
_PAIRS = 1 << 22  # of ids at a time


class IdUpstream(NamedTuple):
    """Gradients of the log-probabilities (N, K), the entropy and the lse (N,), in the rows' dtype; None: 0."""

    log_probs: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None


class IdResults(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    lse: Tensor
    predictions: Tensor
    best: Tensor  # the largest log-probability


class _Columns(NamedTuple):
    """The logits of a chunk's ids.

    Ignored ids stand for the row's reference, its id of the largest logit: log-probabilities are differences from that
    of the reference, which comes from the row op, and so lose nothing to a common offset of all logits.
    """

    ids: Tensor  # (n, K)
    z: Tensor  # (n, K) in the rows' dtype, scaled and bounded
    target: Tensor  # (n,): the reference, or IGNORED
    top: Tensor  # (n, 1): z of the reference

    def log_probs(self, loss: Tensor, z: Tensor | None = None) -> Tensor:
        """Of the logits z (n, ·) from the loss (n,) of `target`."""
        z = self.z if z is None else z
        return torch.where(z == self.top, 0, z - self.top) - loss.unsqueeze(1)


def values_at(logits: Tensor, index: Tensor, linear_bias: Tensor | None, options: HeadOptions) -> Tensor:
    """z at some classes (n, K)."""
    z = logits.gather(1, index).to(row_dtype(logits.dtype))
    if linear_bias is not None:
        z = z + linear_bias[index]
    if options.logit_scale != 1:
        z = z * options.logit_scale
    return z if options.softcap is None else torch.tanh(z / options.softcap) * options.softcap


def columns_of(logits: Tensor, ids: Tensor, linear_bias: Tensor | None, options: HeadOptions) -> _Columns:
    valid = ids != options.ignore_index
    index = torch.where(valid, ids, 0)
    z = values_at(logits, index, linear_bias, options)
    top_index = z.masked_fill(~valid, -torch.inf).argmax(1, keepdim=True)
    reference, top = index.gather(1, top_index), z.gather(1, top_index)
    target = torch.where(valid.any(1), reference.squeeze(1), IGNORED)
    return _Columns(torch.where(valid, index, reference), torch.where(valid, z, top), target, top)


class Call(NamedTuple):
    """The operands of one call, flat."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    options: HeadOptions

    def rows(self, logits: Tensor, target: Tensor, upstream: tuple[Tensor | None, ...], *rest: Any) -> list[Tensor]:
        """The row op for a chunk, with its arguments from `gradient` on: (loss, lse, predictions, entropy)."""
        softcap, logit_scale = self.options.softcap or 0.0, self.options.logit_scale
        numbers = (IGNORED, 0.0, softcap, logit_scale, 0.0)
        results: list[Tensor] = list(
            _registry.cross_entropy_rows_(logits, target, self.linear_bias, None, *upstream, *numbers, *rest)
        )
        return results


def make_call(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, options: HeadOptions) -> Call:
    rows, features = input.shape[:-1].numel(), linear_weight.size(1)
    operands = alignment.operands(input.reshape(rows, features), linear_weight)
    bias = None if linear_bias is None else linear_bias.to(row_dtype(input.dtype)).contiguous()
    return Call(*operands, bias, options)


def chunks_of(
    call: Call, operand: Tensor | ValidRows, needs_weight: bool, is_forward: bool, saved: Tensor | None = None
) -> tuple[Plan, Iterator[tuple[slice, Tensor]]]:
    """The plan, and the rows of one chunk after another with their logits, which lie in the same memory.

    A first product is launched at once, so that the GPU has something to do while the rest is prepared.
    saved: the logits of all rows, of which these are copies.
    """
    (classes, features), dtype = call.linear_weight.shape, call.input.dtype
    count, budget = operand.size(0), call.options.memory_budget
    plan = make_plan(
        count, features, classes, dtype, dtype, call.input.device.type, needs_weight, budget, is_forward=is_forward,
        logits_dtype=call.options.logits_dtype, is_fast=True,
    )  # fmt: skip
    if saved is not None:
        return plan, _copies(plan, saved)
    word = alignment.word(call.input.size(0), call.linear_weight)
    return plan, Logits(plan, operand, call.linear_weight, word, call.options.logits_dtype).begin().chunks()


def _copies(plan: Plan, saved: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Those of one chunk of rows after another, in the same memory."""
    count = saved.size(0)
    buffer = with_padding(saved.new_empty((min(plan.rows, count), plan.stride)), saved.size(1))
    for start in range(0, count, plan.rows):
        part = slice(start, min(start + plan.rows, count))
        yield part, buffer[: part.stop - part.start].copy_(saved[part])


def _all_rows(call: Call, saved: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """All rows as one chunk, whose logits go to `saved`."""
    (rows, _), (classes, _), dtype = call.input.shape, call.linear_weight.shape, call.options.logits_dtype
    plan = single_chunk(rows, classes, dtype or call.input.dtype)
    make_logits = Logits(plan, call.input, call.linear_weight, alignment.word(rows, call.linear_weight), dtype)
    saved.append(make_logits(slice(0, rows)))
    yield slice(0, rows), saved[0]


def flat_ids(ids: Tensor, linear_weight: Tensor, options: HeadOptions) -> tuple[Tensor, HeadOptions]:
    """ids (N, K) with IGNORED for ignored ones, and the options that say so."""
    ids = ids.reshape(ids.shape[:-1].numel(), ids.size(-1))
    # One a row is the row op's target, which asserts its range on CUDA: here that would be nine launches before a GEMM.
    if ids.size(1) > 1 or options.ignore_index != IGNORED or ids.device.type == "cpu":
        check_target_range(ids, options.ignore_index, linear_weight.size(0), "linear_log_probs")
    if options.ignore_index != IGNORED:
        ids = torch.where(ids == options.ignore_index, IGNORED, ids)
    return ids, options._replace(ignore_index=IGNORED)


def chosen_rows(call: Call, ids: Tensor, learned: Learned | None = None) -> ValidRows | None:
    """Where rows of ignored ids (N, K) are left out; the others first. learned: by the forward of the same call."""
    where = compacts(call.input, call.linear_weight, ids[:, 0], False, call.options.logits_dtype)
    if where is None:
        return None
    marked = ids[:, 0] if ids.size(1) == 1 else torch.where((ids != IGNORED).any(1), IGNORED + 1, IGNORED)
    return valid_rows(call.input, marked, IGNORED, where, settles=True, learned=learned)


def forward(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
    need_entropy: bool,
    need_predictions: bool,
    saved: list[Tensor] | None = None,
    learned: Learned | None = None,
) -> IdResults:
    """With input's leading shape; no elements where a result is not needed. saved: takes the logits of all rows."""
    lead, count = input.shape[:-1], ids.size(-1)
    ids, options = flat_ids(ids, linear_weight, options)
    call = make_call(input, linear_weight, linear_bias, options)
    chosen = None if need_predictions or saved is not None else chosen_rows(call, ids, learned)
    operand = call.input if chosen is None else chosen
    chunks = chunks_of(call, operand, False, True)[1] if saved is None else _all_rows(call, saved)
    ids = ids if chosen is None else chosen.gather(ids)
    total, dtype = call.input.size(0), row_dtype(input.dtype)
    results = IdResults(
        input.new_empty((total, count), dtype=dtype),
        input.new_empty(total if need_entropy else 0, dtype=dtype),
        input.new_empty(total, dtype=dtype),
        input.new_empty(total if need_predictions else 0, dtype=torch.int64),
        input.new_empty(total if need_predictions else 0, dtype=dtype),
    )
    for part, logits in chunks:
        columns, log_probs, (loss, lse, predictions, entropy) = statistics(
            call, logits, ids[part], need_predictions, need_entropy
        )
        results.log_probs[part] = log_probs
        results.lse[part] = lse
        if need_entropy:
            results.entropy[part] = entropy
        if need_predictions:
            assert columns is not None
            z = values_at(logits, predictions.unsqueeze(1), call.linear_bias, options)
            results.predictions[part] = predictions
            best = columns.log_probs(loss, z).squeeze(1)
            results.best[part] = torch.where(columns.target != IGNORED, best, 0)
        del logits
    if chosen is not None:
        for values in results[:3]:
            if values.numel():
                chosen.restore_(values)
    wanted = (True, need_entropy, True, need_predictions, need_predictions)
    shapes = ((*lead, count), lead, lead, lead, lead)
    return IdResults(
        *(values.view(shape) if want else values for values, shape, want in zip(results, shapes, wanted, strict=True))
    )


def forward_with_gradient(
    input: Tensor, linear_weight: Tensor, ids: Tensor, linear_bias: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(log_probs, lse, gradient of input where that of every log-probability is 1), for one id a row."""
    lead, dtype = input.shape[:-1], row_dtype(input.dtype)
    ids, options = flat_ids(ids, linear_weight, options)
    call = make_call(input, linear_weight, linear_bias, options)
    chosen = chosen_rows(call, ids)
    operand = call.input if chosen is None else chosen
    # As many rows as forward alone has, if their gradient lies in the logits' own memory.
    plan, chunks = chunks_of(call, operand, False, options.logits_dtype in (None, input.dtype))
    ids = ids if chosen is None else chosen.gather(ids)
    log_probs, lse = (input.new_empty(call.input.size(0), dtype=dtype) for _ in range(2))
    needs = Needs(input=True)
    word = alignment.word(call.input.size(0), call.linear_weight)
    grad_input = torch.empty_like(call.input, memory_format=torch.contiguous_format)
    gradients = ExactGradients(plan, operand, call.linear_weight, grad_input, needs, input.dtype, word)
    of_loss = input.new_full((1,), -1, dtype=dtype)
    for part, logits in chunks:
        rows = call.rows(logits, ids[part].squeeze(1), (of_loss, None, None), True, False, False)
        log_probs[part], lse[part] = 0 - rows[0], rows[1]
        gradients.add(logits, part, rows[1])
        del logits
    found = finished(gradients.result(), chosen, input, linear_weight, None, needs)
    if chosen is not None:
        for values in (log_probs, lse):
            chosen.restore_(values)
    return log_probs.view(*lead, 1), lse.view(lead), found.input


def statistics(
    call: Call, logits: Tensor, ids: Tensor, need_predictions: bool, need_entropy: bool
) -> tuple[_Columns | None, Tensor, list[Tensor]]:
    """The ids' columns, their log-probabilities (n, K), and the row op's results. Ignored ids are IGNORED."""
    if ids.size(1) == 1 and not need_predictions:
        rows = call.rows(logits, ids.squeeze(1), (None, None, None), False, False, need_entropy)
        return None, (0 - rows[0]).unsqueeze(1), rows
    columns = columns_of(logits, ids, call.linear_bias, call.options)
    rows = call.rows(logits, columns.target, (None, None, None), False, need_predictions, need_entropy)
    is_valid = ids != call.options.ignore_index
    return columns, torch.where(is_valid, columns.log_probs(rows[0]), 0), rows


def backward(
    upstream: IdUpstream,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
    needs: Needs,
    saved: Tensor | None = None,
    learned: Learned | None = None,
) -> Gradients:
    """Gradients in the operands' dtypes. saved: the logits of all rows, not made again. learned: by the forward."""
    dtype = row_dtype(input.dtype)
    ids, options = flat_ids(ids, linear_weight, options)
    call = make_call(input, linear_weight, linear_bias, options)
    if saved is not None:
        call = call._replace(options=options._replace(memory_budget=None))
    chosen = None if saved is not None else chosen_rows(call, ids, learned)
    operand: Tensor | ValidRows = call.input if chosen is None else chosen
    plan, chunks = chunks_of(call, operand, needs.linear_weight, False, saved)
    grad_ids, grad_entropy, grad_lse = (None if grad is None else grad.to(dtype) for grad in upstream)
    grad_ids = None if grad_ids is None else grad_ids.reshape(ids.shape)
    grad_entropy = None if grad_entropy is None else grad_entropy.reshape(-1)
    grad_lse = None if grad_lse is None else grad_lse.reshape(-1)
    if chosen is not None:
        ids = chosen.gather(ids)
        grad_ids, grad_entropy, grad_lse = (chosen.gather(grad) for grad in (grad_ids, grad_entropy, grad_lse))
    grad_input = call.input.new_empty(call.input.shape if needs.input else (0, 0))
    word = alignment.word(call.input.size(0), call.linear_weight)
    gradients = ExactGradients(plan, operand, call.linear_weight, grad_input, needs, input.dtype, word)
    parts = IdUpstream(grad_ids, grad_entropy, grad_lse)
    for part, logits in chunks:
        of_part = IdUpstream(*(None if grad is None else grad[part] for grad in parts))
        # Several ids are put into the gradient behind the row op: it cannot leave it anywhere else.
        saved_slices = gradients.slice_arguments(logits, part) if ids.size(1) == 1 else ()
        gradients.add(logits, part, to_gradient_(call, logits, ids[part], of_part, saved_slices))
        del logits
    return finished(gradients.result(), chosen, input, linear_weight, linear_bias, needs)


def finished(
    found: Gradients,
    chosen: ValidRows | None,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    needs: Needs,
) -> Gradients:
    """The gradients of all rows in the operands' shapes and dtypes, of those of the chosen ones."""
    features = linear_weight.size(1)
    if needs.input:
        if chosen is not None:
            chosen.restore_(found.input)
        found = found._replace(input=found.input[:, :features].contiguous().view(input.shape))
    else:
        found = found._replace(input=input.new_empty(0))
    if needs.linear_weight:
        found = found._replace(linear_weight=found.linear_weight[:, :features].contiguous())
    if linear_bias is not None:
        found = found._replace(linear_bias=found.linear_bias.to(linear_bias.dtype))
    return found


def to_gradient_(
    call: Call, logits: Tensor, ids: Tensor, upstream: IdUpstream, saved_slices: tuple[Any, ...] = ()
) -> Tensor:
    """Turns the logits of a chunk into their gradient; its lse. Ignored ids are IGNORED.

    saved_slices: see ExactGradients; of one id a row alone.
    """
    if ids.size(1) == 1:
        of_loss = logits.new_zeros(1, dtype=row_dtype(logits.dtype))
        if upstream.log_probs is not None:
            of_loss = -upstream.log_probs.reshape(-1)
        grads = (of_loss, upstream.lse, upstream.entropy)
        return call.rows(logits, ids.squeeze(1), grads, True, False, False, *saved_slices)[1]
    columns = columns_of(logits, ids, call.linear_bias, call.options)
    zero = columns.z.new_zeros(())
    g = None if upstream.log_probs is None else torch.where(ids != call.options.ignore_index, upstream.log_probs, zero)
    a = columns.z.new_zeros(logits.size(0)) if upstream.lse is None else upstream.lse
    a = a if g is None else a - g.sum(1)
    needs_entropy = upstream.entropy is not None
    loss, lse, _, entropy = call.rows(
        logits, columns.target, (zero.reshape(1), a, upstream.entropy), True, False, needs_entropy
    )
    if g is None:
        return lse
    log_p = columns.log_probs(loss)
    p = log_p.exp()
    sums = sums_of_equal_ids(columns.ids, g)
    value = p * (a.unsqueeze(1) + sums) - sums * torch.expm1(log_p)
    if upstream.entropy is not None:
        finite = log_p.masked_fill(log_p == -torch.inf, 0)
        value = value - upstream.entropy.unsqueeze(1) * p * (finite + entropy.unsqueeze(1))
    softcap, scale = call.options.softcap, call.options.logit_scale
    value = value * (scale if softcap is None else scale * (1 - (columns.z / softcap).square()))
    value = torch.where((columns.target != IGNORED).unsqueeze(1), value, 0)
    logits.scatter_(1, columns.ids, value.to(logits.dtype))
    return lse


def sums_of_equal_ids(index: Tensor, values: Tensor) -> Tensor:
    """(n, K): the sum of a row's values (n, K) that have the same index."""
    rows, count = index.shape
    if count == 1:
        return values
    step = max(_PAIRS // max(rows * count, 1), 1)
    sums = [
        torch.where(some.unsqueeze(2) == index.unsqueeze(1), values.unsqueeze(1), 0).sum(2)
        for some in index.split(step, 1)
    ]
    return torch.cat(sums, 1)
