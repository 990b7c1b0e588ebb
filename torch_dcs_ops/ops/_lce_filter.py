"""Filtered gradients (`grad_filter_eps`): of every chunk of rows only some columns of the logits' gradient are kept.

A column is kept where any row of the chunk gives it a probability above eps, or has it for its target; the rest of a
row's gradient, its tail, is replaced by m_i·q_g / Σ q_g: the row's own exact tail mass in the mean shape of its group
of 32 rows. The kept columns need the products of the exact gradient, on as many columns as there are; a tail is of rank
one a group, so that all tails need 1/32 of the exact products. Rows of the filtered gradient have the sums of the exact
one. Label smoothing's -e_i·w_j is exact, and one more group: m = -e, q = w over all columns.

The steps on the logits are reference/filtered_gradients.py on a CPU, triton_kernels/filtered_gradients.py on a GPU.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import _native
from ..reference import filtered_gradients as reference
from ..reference.cross_entropy_rows import row_dtype
from ..reference.filtered_gradients import GROUP_ROWS
from ..reference.linear_cross_entropy import Needs, Options
from ._backends import launchers
from ._lce_gradients import Gradients, Upstream
from ._lce_ignored import ValidRows
from ._lce_plan import FilteredPlan

# Of eps to 1/V. Of rows of independent normal logits, 16 is exceeded somewhere among a thousand rows in half of the
# columns, 8 in all of them: there the filter costs more than it saves.
LEAST_ODDS = 16
SEGMENT_ROWS = 8192  # whose tails are multiplied at a time: 256 groups
_WIDE_BYTES = 32 << 20
_SMALLEST_SUM = 1e-30  # of q: its inverse is finite, and the tails of less weigh nothing


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
    """Takes the logits of one chunk of rows after another, and makes the filtered gradients of all.

    Chunks are multiples of 32 rows, so that groups never cross them. Tails are summed over a segment of chunks: q and
    the sums Σ m_i·x_i / Σ q of its groups are held until then, in input's dtype.
    """

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
        count, (classes, features), wide = input.size(0), linear_weight.shape, row_dtype(input.dtype)
        self.valid = target != options.ignore_index
        self.target = torch.where(self.valid, target, 0)
        hit: Tensor | float = 1.0
        if weight is not None:
            hit = weight[self.target.clamp(0, classes - 1)]
        # What the row's losses have of z at the target, and at every column for each unit of its class weight.
        self.hit = torch.where(self.valid, hit, 0).to(wide) * (1 - options.label_smoothing)
        self.spread = options.label_smoothing / classes
        per_row = (grad is not None and grad.numel() > 1 for grad in (upstream.loss, upstream.lse))
        self.has_zero_rows = weight is not None or any(per_row)

        self.grad_input = grad_input
        self.grad_bias = linear_weight.new_zeros(classes if needs.linear_bias else 0, dtype=wide)
        self.total = input.new_empty((classes, features) if needs.linear_weight else 0)
        self.rest = torch.empty_like(self.total) if plan.keeps_rest else None
        self.touched = linear_weight.new_zeros(classes, dtype=torch.uint8)

        # Label smoothing's group comes first.
        self.extra = int(options.label_smoothing > 0)
        self.segment = max(SEGMENT_ROWS // plan.rows, 1) * plan.rows
        self.start = self.stop = 0
        held = min(self.segment, count)
        groups = self.extra + -(-held // GROUP_ROWS)
        self.q = input.new_empty(groups, plan.stride)[:, :classes]
        self.sums = input.new_empty((groups, features) if needs.linear_weight else 0)
        self.masses = linear_weight.new_zeros(groups, dtype=wide)
        self.factors = input.new_empty(held, dtype=wide)
        self.evens = input.new_empty(held if self.extra else 0, dtype=wide)
        if self.extra:
            self.total_weight: Tensor | float = float(classes) if weight is None else weight.sum()
            self.q[0] = 1 if weight is None else weight

    def add(self, logits: Tensor, part: slice, lse: Tensor) -> None:
        """logits (n, V) of the rows `part` and their lse; the logits are overwritten."""
        if part.stop - self.start > self.segment:
            self._finish_segment(is_last=False)
            self.start = part.start
        self.stop = part.stop
        steps, options, chunk = self.steps, self.options, self.input[part]
        target, valid = self.target[part], self.valid[part]
        softcap, scale = options.softcap or 0.0, options.logit_scale
        a, h = self._coefficients(part, lse)
        if self.has_zero_rows:
            # Rows without a gradient neither choose columns nor shape a tail; a NaN's way into their gradient is open.
            valid = valid & ((a != 0) | (h != 0) | lse.isnan())
        own = steps.target_gradient(logits, lse, target, valid, a, h, self.linear_bias, softcap, scale)
        alive, q = steps.columns(logits, lse, valid, self.linear_bias, softcap, scale, options.grad_filter_eps)
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
        self._add_tail(q, alive, mass, chunk, part)

    def result(self) -> Gradients:
        if self.stop:
            self._finish_segment(is_last=True)
        else:
            self.total.zero_()
        return Gradients(self.grad_input, self.total, self.grad_bias)

    def _coefficients(self, part: slice, lse: Tensor) -> tuple[Tensor, Tensor]:
        """a and h of the rows, and in `evens` what label smoothing takes from every column."""
        valid, hit, scale = self.valid[part], self.hit[part], self.options.logit_scale
        loss, grad_lse = (
            grad if grad is None or grad.numel() == 1 else grad[part]
            for grad in (self.upstream.loss, self.upstream.lse)
        )
        a = hit + self.spread * self.total_weight if self.extra else hit
        if self.options.z_loss:
            a = a + 2 * self.options.z_loss * lse
        h, even = hit, torch.full_like(hit, self.spread)
        if loss is not None:
            a, h, even = a * loss, h * loss, even * loss
        if grad_lse is not None:
            a = a + grad_lse
        if self.extra:
            self.evens[self._place(part)] = torch.where(valid, even * -scale, 0)
        return torch.where(valid, a * scale, 0), torch.where(valid, h * scale, 0)

    def _place(self, part: slice) -> slice:
        """Rows within their segment."""
        return slice(part.start - self.start, part.stop - self.start)

    def _add_tail(self, q: Tensor, alive: Tensor, mass: Tensor, chunk: Tensor, part: slice) -> None:
        place = self._place(part)
        first = self.extra + place.start // GROUP_ROWS
        groups = slice(first, first + q.size(0))
        tails = self.q[groups]
        torch.where(alive.bool(), q.new_zeros(()), q, out=tails)
        total = tails.sum(1, dtype=mass.dtype)
        inverse = torch.where(total <= _SMALLEST_SUM, 0, total.reciprocal())
        rows = mass.numel()
        factors = mass * inverse.unsqueeze(1).expand(-1, GROUP_ROWS).reshape(-1)[:rows]
        self.factors[place] = factors
        if self.needs.linear_weight:
            _group_products(factors.to(chunk.dtype), chunk, self.sums[groups])
        if self.needs.linear_bias:
            padded = torch.nn.functional.pad(factors, (0, q.size(0) * GROUP_ROWS - rows))
            torch.sum(padded.view(-1, GROUP_ROWS), 1, out=self.masses[groups])

    def _finish_segment(self, *, is_last: bool) -> None:
        rows = slice(self.start, self.stop)
        count = self.stop - self.start
        groups = self.extra + -(-count // GROUP_ROWS)
        q = self.q[:groups]
        evens = self.evens[:count]
        if self.needs.input:
            table = _wide_product(q, self.linear_weight)
            _add_by_group(self.grad_input[rows], self.factors[:count], table[self.extra :])
            if self.extra:
                self.grad_input[rows].addcmul_(evens.unsqueeze(1), table[:1])
        if self.needs.linear_weight:
            if self.extra:
                self.sums[0] = _wide_product(_halves(evens, q.dtype), self.input[rows]).sum(0)
            self.steps.finish_weight_gradient(
                q, self.sums[:groups], self.total, self.rest, self.touched, self.rest is not None and not is_last
            )
            self.touched.fill_(1)
        if self.needs.linear_bias:
            if self.extra:
                torch.sum(evens, 0, keepdim=True, out=self.masses[:1])
            self.grad_bias += _wide_product(_halves(self.masses[:groups], q.dtype), q).sum(0)


def _group_products(factors: Tensor, input: Tensor, out: Tensor) -> None:
    """out (n / 32, D) = Σ over each group of 32 rows of factors (n,) times input (n, D)."""
    full = factors.numel() // GROUP_ROWS
    rows = full * GROUP_ROWS
    if full:
        torch.bmm(
            factors[:rows].view(full, 1, GROUP_ROWS),
            input[:rows].unflatten(0, (full, GROUP_ROWS)),
            out=out[:full].unsqueeze(1),
        )
    if full < out.size(0):
        torch.mm(factors[rows:].unsqueeze(0), input[rows:], out=out[full:])


def _add_by_group(out: Tensor, factors: Tensor, table: Tensor) -> None:
    """out (n, D) += factors (n,) times every group's row of table (n / 32, D)."""
    full = factors.numel() // GROUP_ROWS
    rows = full * GROUP_ROWS
    if full:
        grouped = out[:rows].unflatten(0, (full, GROUP_ROWS))
        each, shared = factors[:rows].view(full, GROUP_ROWS, 1), table[:full].unsqueeze(1)
        if out.is_cuda:  # where a product with mixed dtypes is slow
            grouped.baddbmm_(each.to(out.dtype), shared.to(out.dtype))
        else:
            grouped.addcmul_(each, shared)
    if full < table.size(0):
        out[rows:].addcmul_(factors[rows:].unsqueeze(1), table[full:])


def _halves(values: Tensor, dtype: torch.dtype) -> Tensor:
    """(2, n) numbers of `dtype` whose sums are the float32 values, or (1, n) where one of them is enough."""
    high = values.to(dtype)
    if dtype == values.dtype:
        return high.unsqueeze(0)
    return torch.stack((high, (values - high).to(dtype)))


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left (m, k) times right (k, n), half numbers with a float32 result."""
    wide = row_dtype(left.dtype)
    if left.dtype == wide:
        return torch.mm(left, right)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=wide)
    out = left.new_zeros((left.size(0), right.size(1)), dtype=wide)
    step = max(_WIDE_BYTES // (wide.itemsize * max(right.size(1), 1)), 1)
    for start in range(0, left.size(1), step):
        part = slice(start, start + step)
        out.addmm_(left[:, part].to(wide), right[part].to(wide))
    return out
