"""Filtered gradients (`grad_filter_eps`): of every chunk of rows only some columns of the logits' gradient are kept.

A column is kept where any row of the chunk gives it a probability above eps, or has it for its target; the rest of a
row's gradient, its tail, is shared by a group of rows (_lce_tails.py), but for the rows of the largest tails, which are
exact. The kept columns need the products of the exact gradient, on as many columns as there are; a tail is of rank one
a group. Rows of the filtered gradient have the sums of the exact one. Label smoothing's constant part is exact.

The steps on the logits are reference/filtered_gradients.py on a CPU, triton_kernels/filtered_gradients.py on a GPU.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import _native
from ..reference import filtered_gradients as reference
from ..reference.cross_entropy_rows import row_dtype
from ..reference.linear_cross_entropy import Needs, Options
from ._backends import launchers
from ._lce_gradients import Gradients, Upstream
from ._lce_ignored import ValidRows
from ._lce_plan import FilteredPlan
from ._lce_tails import Tails

# Of eps to 1/V. Of rows of independent normal logits, 16 is exceeded somewhere among a thousand rows in half of the
# columns, 8 in all of them: there the filter costs more than it saves.
LEAST_ODDS = 16


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
    return None if input.dtype == torch.float64 else launchers("filtered_gradients")


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
        self.steps, self.upstream, self.options, self.needs = steps, upstream, options, needs
        if linear_weight.is_cuda and linear_weight.stride(1) != 1:
            linear_weight = linear_weight.contiguous()  # once; the kernels read whole rows
        self.input, self.linear_weight, self.linear_bias = input, linear_weight, linear_bias
        (classes, features), wide = linear_weight.shape, row_dtype(input.dtype)
        self.valid = target != options.ignore_index
        self.target = torch.where(self.valid, target, 0)
        hit: Tensor | float = 1.0
        if weight is not None:
            hit = weight[self.target.clamp(0, classes - 1)]
        # What the row's losses have of z at the target, and at every column for each unit of its class weight.
        self.hit = torch.where(self.valid, hit, 0).to(wide) * (1 - options.label_smoothing)
        self.zero = self.hit.new_zeros(())  # a number makes one with every use
        self.spread = options.label_smoothing / classes
        per_row = (grad is not None and grad.numel() > 1 for grad in (upstream.loss, upstream.lse))
        self.has_zero_rows = weight is not None or any(per_row)

        self.grad_input = grad_input
        self.grad_bias = linear_weight.new_zeros(classes if needs.linear_bias else 0, dtype=wide)
        self.total = input.new_empty((classes, features) if needs.linear_weight else 0)
        self.rest = torch.empty_like(self.total) if plan.keeps_rest else None
        self.touched = linear_weight.new_zeros(classes, dtype=torch.uint8)

        self.tails = Tails(steps, plan, input, linear_weight, linear_bias, weight, options, needs)
        self.total_weight: Tensor | float = 0.0
        if options.label_smoothing > 0:
            self.total_weight = float(classes) if weight is None else weight.sum()

    def add(self, logits: Tensor, part: slice, lse: Tensor) -> None:
        """logits (n, V) of the rows `part` and their lse; the logits are overwritten."""
        if not self.tails.has_room(part):
            self._finish_segment(is_last=False)
            self.tails.begin(part)
        steps, options, chunk = self.steps, self.options, self.input[part]
        target, valid = self.target[part], self.valid[part]
        softcap, scale = options.softcap or 0.0, options.logit_scale
        a, h, evens = self._coefficients(part, lse)
        if self.has_zero_rows:
            # Rows without a gradient neither choose columns nor shape a tail; a NaN's way into their gradient is open.
            valid = valid & ((a != 0) | (h != 0) | lse.isnan())
        own = steps.target_gradient(logits, lse, target, valid, a, h, self.linear_bias, softcap, scale)
        place = self.tails.place(part)
        alive = steps.columns(
            logits, lse, valid, self.linear_bias, softcap, scale, options.grad_filter_eps, place, self.tails.group
        )
        alive, index, slot, kept = steps.keep(alive, target, valid, int(steps.MOST * logits.size(1)))
        mass = a * steps.gather_(
            logits, lse, target, valid, a, h, own, self.linear_bias, softcap, scale, alive, index, slot, kept
        )  # fmt: skip
        if self.needs.input:
            steps.input_gradient(logits, index, kept, self.linear_weight, self.grad_input[part])
        if self.needs.linear_weight:
            steps.add_weight_gradient(logits, index, kept, chunk, self.total, self.rest, self.touched)
            self.touched |= alive
        if self.needs.linear_bias:
            self.grad_bias += steps.column_sums(logits, index, kept)
        self.tails.add(alive, mass, lse, valid, evens, part)

    def result(self) -> Gradients:
        if self.tails.stop:
            self._finish_segment(is_last=True)
        else:
            self.total.zero_()
        return Gradients(self.grad_input, self.total, self.grad_bias)

    def _coefficients(self, part: slice, lse: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """a and h of the rows, and -e: what label smoothing adds to every column, times its class weight."""
        valid, hit, scale = self.valid[part], self.hit[part], self.options.logit_scale
        loss, grad_lse = (
            grad if grad is None or grad.numel() == 1 else grad[part]
            for grad in (self.upstream.loss, self.upstream.lse)
        )
        even = None
        a = h = hit
        if self.options.label_smoothing > 0:
            even = torch.full_like(hit, self.spread)
            a = hit + self.spread * self.total_weight
        if self.options.z_loss:
            a = a + 2 * self.options.z_loss * lse

        def scaled(values: Tensor, factor: float) -> Tensor:
            values = values if loss is None else values * loss
            return values if factor == 1 else values * factor

        is_one = a is h and grad_lse is None
        h = torch.where(valid, scaled(h, scale), self.zero)
        if is_one:
            return h, h, None
        a = scaled(a, 1)
        if grad_lse is not None:
            a = a + grad_lse
        a = torch.where(valid, a if scale == 1 else a * scale, self.zero)
        return a, h, None if even is None else torch.where(valid, scaled(even, -scale), self.zero)

    def _finish_segment(self, *, is_last: bool) -> None:
        q, sums = self.tails.multiply(self.grad_input, self.grad_bias)
        if self.needs.linear_weight:
            self.steps.finish_weight_gradient(
                q, sums, self.total, self.rest, self.touched, self.rest is not None and not is_last
            )
            self.touched.fill_(1)
