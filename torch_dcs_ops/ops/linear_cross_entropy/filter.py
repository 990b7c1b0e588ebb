"""Filtered gradients (`grad_filter_eps`): of every chunk of rows only some columns of the logits' gradient are kept.

A column is kept where any row of the chunk gives it a probability above eps, or has it for its target; the rest of a
row's gradient, its tail (residual mass), is shared by a group of rows (filter_tails.py), but for the rows of the
largest tails, which are exact. The kept columns need the products of the exact gradient, on as many columns as there
are; a tail is of rank one per group. Rows of the filtered gradient have the sums of the exact one. Label smoothing's
constant part is exact.

The steps on the logits are reference/linear_cross_entropy/filter.py on a CPU and
triton_kernels/linear_cross_entropy/filter.py on a GPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _native
from ...reference.linear_cross_entropy import filter as reference
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common.triton import launchers
from .filter_tails import Tails
from .gradients import Gradients, Upstream
from .plan import FilteredPlan
from .valid_rows import ValidRows

# Of eps to 1/V. Of rows of independent normal logits, 16 is exceeded somewhere among a thousand rows in half of the
# columns, 8 in all of them: there the filter costs more than it saves.
LEAST_ODDS = 16
_NEVER = 2**31 - 1


def filter_steps(
    input: Tensor, classes: int, target: Tensor, upstream: Upstream, options: Options, needs: Needs
) -> ModuleType | None:
    """The module with the steps of the filtered gradient; None where the gradient is exact.

    That is, beside no `grad_filter_eps` or one of 0: one below 16/V, which leaves little out of flat rows; class
    probabilities, softcap together with label smoothing (which is then of full rank), a gradient of the entropy,
    float16, whose range does not hold the tails of large vocabularies, and on CUDA float64 or a missing triton.
    """
    eps = options.grad_filter_eps
    if not eps or eps * classes < LEAST_ODDS or input.dtype == torch.float16 or not any(needs):
        return None
    mixed = options.softcap is not None and options.label_smoothing > 0
    if mixed or target.is_floating_point() or upstream.entropy is not None:
        return None
    if input.device.type != "cuda" or _native.CUDA.kind == "reference":
        return reference
    return None if input.dtype == torch.float64 else launchers("linear_cross_entropy.filter")


class FilteredGradients:
    """Takes the logits of one chunk of rows after another, and makes the filtered gradients of all."""

    def __init__(
        self,
        steps: ModuleType,
        plan: FilteredPlan,
        input: Tensor | ValidRows,
        linear_weight: Tensor,
        grad_input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        linear_bias: Tensor | None,
        upstream: Upstream,
        options: Options,
        needs: Needs,
    ) -> None:
        """input (N, D) and target (N,); grad_input, where it is needed, with rows for all of these; weight and
        linear_bias in the rows' dtype.
        """
        self.steps, self.options, self.needs = steps, options, needs
        if linear_weight.is_cuda and linear_weight.stride(1) != 1:
            linear_weight = linear_weight.contiguous()  # once; the kernels read whole rows
        self.input, self.linear_weight, self.linear_bias = input, linear_weight, linear_bias
        (classes, features), wide = linear_weight.shape, row_dtype(input.dtype)
        # Rows that are left out come last, where they are there.
        self.valid, self.target = target != options.ignore_index, target
        self.coefficients = _coefficients(self.valid, target, weight, classes, upstream, options, wide)
        per_row = (grad is not None and grad.numel() > 1 for grad in (upstream.loss, upstream.lse))
        self.active: Tensor | None = None
        if weight is not None or any(per_row):
            a, h, of_lse, _ = self.coefficients
            self.active = (a != 0) | (h != 0)
            if of_lse is not None:
                self.active |= of_lse != 0

        self.grad_input = grad_input
        self.grad_bias = linear_weight.new_zeros(classes if needs.linear_bias else 0, dtype=wide)
        self.total = input.new_empty((classes, features) if needs.linear_weight else 0)
        self.rest = torch.empty_like(self.total) if plan.keeps_rest else None
        # The number of the first chunk that has written a row of the total; chunks are numbered through all segments.
        self.since = torch.full((classes,), _NEVER, dtype=torch.int32, device=linear_weight.device)
        self.number = 0
        self.tails = Tails(steps, plan, input, linear_weight, linear_bias, weight, options, needs)
        self.buffers = steps.new_buffers(self.since, classes)

    def add(self, logits: Tensor, part: slice, lse: Tensor) -> None:
        """logits (n, V) of the rows `part` and their lse; the logits are overwritten."""
        if not self.tails.has_room(part):
            if self.number:
                self._finish_segment(is_last=False)
            self.tails.begin(part, self.target, self.valid if self.active is None else self.active)
        steps, options = self.steps, self.options
        target, valid = self.target[part], self.valid[part]
        softcap, scale = options.softcap or 0.0, options.logit_scale
        a, h = self.coefficients.a[part], self.coefficients.h[part]
        if self.coefficients.of_lse is not None:
            a = torch.where(valid, torch.addcmul(a, self.coefficients.of_lse[part], lse), a)
        if self.active is not None:
            # Rows without a gradient neither choose columns nor shape a tail; a NaN's way into their gradient is open.
            valid = self.active[part] | (valid & lse.isnan())
        chunk = reference.Chunk(logits, lse, target, valid, a, h, self.linear_bias, softcap, scale)
        own = steps.target_gradient(chunk)
        q, alive, mass = self.tails.results_of(part)
        steps.columns(
            logits, lse, valid, self.linear_bias, softcap, scale, options.grad_filter_eps, q, self.tails.group, alive
        )
        most = int(steps.MOST * logits.size(1))
        index, slot, kept = steps.keep(alive, self.since, self.number, most, self.buffers)
        steps.gather_(chunk, own, alive, index, slot, kept, mass)
        if self.needs.input:
            steps.input_gradient(logits, index, kept, self.linear_weight, self.grad_input[part])
        if self.needs.linear_weight:
            steps.add_weight_gradient(
                logits, index, kept, self.input[part], self.total, self.rest, self.since, self.number
            )
        if self.needs.linear_bias:
            self.grad_bias += steps.column_sums(logits, index, kept)
        self.number += 1
        self.tails.add(lse, valid, part)

    def result(self) -> Gradients:
        if self.number:
            self._finish_segment(is_last=True)
        else:
            self.total.zero_()
        return Gradients(self.grad_input, self.total, self.grad_bias)

    def _finish_segment(self, *, is_last: bool) -> None:
        q, sums = self.tails.multiply(self.grad_input, self.grad_bias, self.coefficients.evens)
        if self.needs.linear_weight:
            keep_rest = self.rest is not None and not is_last
            self.steps.finish_weight_gradient(q, sums, self.total, self.rest, self.since, self.number, keep_rest)
            if not is_last:
                self.since.zero_()  # all of it is written


class _Coefficients(NamedTuple):
    """Of the rows (N,), 0 in those that are not valid: the logits' gradient is a·p·s - h·[target]·s - e·w·s.

    a lacks of_lse·lse, where there is one (z_loss); w are the class weights. evens, with label smoothing: -e.
    """

    a: Tensor
    h: Tensor
    of_lse: Tensor | None
    evens: Tensor | None


def _coefficients(
    valid: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    upstream: Upstream,
    options: Options,
    dtype: torch.dtype,
) -> _Coefficients:
    scale, smoothing, zero = (
        options.logit_scale,
        options.label_smoothing,
        torch.zeros((), dtype=dtype, device=valid.device),
    )

    def of_rows(values: Tensor | float, factor: float) -> Tensor:
        """Of what a row's loss has for each unit."""
        values = values * factor if isinstance(values, float) or factor != 1 else values
        if upstream.loss is not None:
            values = upstream.loss if isinstance(values, float) and values == 1 else upstream.loss * values
        return torch.where(valid, values, zero)

    # What the row's loss has of z at the target, and at every column for each unit of its class weight.
    hit: Tensor | float = 1.0 if weight is None else weight[target.clamp(0, classes - 1)]
    hit = hit if smoothing == 0 else hit * (1 - smoothing)
    h = of_rows(hit, scale)
    a, of_lse, evens = h, None, None
    if smoothing > 0:
        spread = smoothing / classes
        a = of_rows(hit + spread * (float(classes) if weight is None else weight.sum()), scale)
        evens = of_rows(spread, -scale)
    if upstream.lse is not None:
        a = a + torch.where(valid, upstream.lse if scale == 1 else upstream.lse * scale, zero)
    if options.z_loss:
        of_lse = of_rows(2 * options.z_loss, scale)
    return _Coefficients(a, h, of_lse, evens)
