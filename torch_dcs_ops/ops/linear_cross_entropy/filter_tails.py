"""The residual mass of the filtered columns, by segments of chunks: a row's tail is what the kept columns leave out.

A row's tail is m_i·q_g / Σ q_g: its own exact mass in the mean shape of its group of rows, 128 on a GPU and 32 on a
CPU. Of every segment, the rows of the largest masses, one in 32, make a group each instead: their tails are exact, and
the others' shape is without them. A group and a single row each take the products of one row of the exact gradient.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import row_dtype
from . import alignment
from .plan import FilteredPlan, with_padding
from .valid_rows import ValidRows

SEGMENT_ROWS = 8192  # whose tails are multiplied at a time
APART = 32  # one row in so many has an exact tail
_WIDE_BYTES = 32 << 20


class Tails:
    """Takes q, the kept columns and the masses of one chunk of rows after another, and multiplies a segment's tails.

    Chunks are multiples of groups, which never cross them; a segment is the chunks that fit into 8192 rows,
    one at least. Allocated for it: q of its groups and single rows in input's dtype, and the kept columns of chunks.
    """

    def __init__(
        self,
        steps: ModuleType,
        plan: FilteredPlan,
        input: Tensor | ValidRows,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        class_weight: Tensor | None,
        options: Options,
        needs: Needs,
    ) -> None:
        """input (N, D); linear_bias and class_weight (V,) in the rows' dtype."""
        self.steps, self.chunk, self.group = steps, plan.rows, plan.group_rows
        self.input, self.options, self.needs = input, options, needs
        self.linear_weight, self.linear_bias = linear_weight, linear_bias
        self.count, (classes, features) = input.size(0), linear_weight.shape
        self.word = alignment.word(self.count, linear_weight)
        self.segment = max(SEGMENT_ROWS // plan.rows, 1) * plan.rows
        held = min(self.segment, self.count)
        self.start = self.stop = 0
        # Label smoothing's group comes first: -e_i·w_j is of rank one, m = -e and q = w over all columns.
        self.extra = int(options.label_smoothing > 0)
        terms = self.extra + -(-held // self.group) + _apart(held)
        self.q = with_padding(input.new_empty(terms, plan.stride), classes)
        self.sums = input.new_empty((terms, features) if needs.linear_weight else 0)
        self.alive = linear_weight.new_empty((-(-held // plan.rows), classes), dtype=torch.uint8)
        self.mass = input.new_empty(held, dtype=row_dtype(input.dtype))
        self.lse: list[Tensor] = []
        self.valid: list[Tensor] = []
        if self.extra:
            self.q[0] = 1 if class_weight is None else class_weight

    def has_room(self, part: slice) -> bool:
        """For the rows of another chunk in this segment, which has begun."""
        return bool(self.stop and part.stop - self.start <= self.segment)

    def begin(self, part: slice, target: Tensor, valid: Tensor) -> None:
        """The chunk `part` is the first of a segment; target and valid are those of all rows."""
        self.start = part.start
        rows = slice(self.start, min(self.start + self.segment, self.count))
        self.alive.zero_()
        self.steps.mark_targets(self.alive, target[rows], valid[rows], self.chunk)

    def results_of(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Where q of a chunk's groups, its columns that are alive and its rows' masses belong.

        The columns of the targets are alive already.
        """
        first, last = part.start - self.start, part.stop - self.start
        group = self.extra + first // self.group
        q = self.q[group : group - (first - last) // self.group]
        return q, self.alive[first // self.chunk], self.mass[first:last]

    def add(self, lse: Tensor, valid: Tensor, part: slice) -> None:
        """Of a chunk whose results are stored; `valid`: the rows that q is summed over."""
        self.stop = part.stop
        self.lse.append(lse)
        self.valid.append(valid)

    def multiply(self, grad_input: Tensor, grad_bias: Tensor, evens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the segment's tails to both; (q, sums), whose product qᵀ·sums is their part of linear_weight's.

        evens (N,), with label smoothing: -e_i of all rows.
        """
        count, options = self.stop - self.start, self.options
        groups, apart = -(-count // self.group), _apart(count)
        first, middle, last = self.extra, self.extra + groups, self.extra + groups + apart
        q, sums, mass = self.q[:last], self.sums[:last], self.mass[:count]
        lse, valid = (values[0] if len(values) == 1 else torch.cat(values) for values in (self.lse, self.valid))
        self.lse, self.valid = [], []
        chosen = self.steps.choose_rows(mass, lse, valid, self.group, apart, APART or 1)
        if apart:
            alignment.logits_product(self.input[chosen.rows + self.start], self.linear_weight, self.word, q[middle:])
        parts = self.steps.share_tails(
            q[first:middle], q[middle:], chosen, self.alive, -(-self.chunk // self.group), self.linear_bias,
            options.softcap or 0.0, options.logit_scale,
        )  # fmt: skip
        source, index = (self.input, None) if isinstance(self.input, Tensor) else (self.input.input, self.input.index)
        factors, single = self.steps.weigh_tails(
            mass, parts, chosen, self.group, source, index, self.start,
            sums[first:] if self.needs.linear_weight else None,
        )  # fmt: skip
        if evens is not None:
            evens = evens[self.start : self.stop]
        if self.needs.input:
            table = self._times_weight(q)
            out = grad_input[self.start : self.stop]
            self.steps.add_tails(out, factors, single, chosen.slot, evens, table, self.group)
        if evens is not None and self.needs.linear_weight:
            sums[0] = self._sum_of_input(evens)
        if self.needs.linear_bias:
            padded = torch.nn.functional.pad(factors, (0, groups * self.group - count))
            masses = [padded.view(-1, self.group).sum(1), single]
            if evens is not None:
                masses.insert(0, evens.sum(0, keepdim=True))
            grad_bias += _wide_product(_halves(torch.cat(masses), q.dtype), q).sum(0)
        return q, sums

    def _times_weight(self, q: Tensor) -> Tensor:
        if self.word == 1:
            return _wide_product(q, self.linear_weight)
        out = q.new_empty((q.size(0), self.linear_weight.size(1)), dtype=row_dtype(q.dtype))
        alignment.input_gradient_product(q, self.linear_weight, self.word, out)
        return out

    def _sum_of_input(self, evens: Tensor) -> Tensor:
        """Σ evens_i·input_i over the segment's rows, by chunks: where rows are left out, slices are copies."""
        total = evens.new_zeros(self.linear_weight.size(1))
        for start in range(self.start, self.stop, self.chunk):
            part = slice(start, min(start + self.chunk, self.stop))
            halves = _halves(evens[part.start - self.start : part.stop - self.start], self.q.dtype)
            total += _wide_product(halves, self.input[part]).sum(0)
        return total


def _apart(rows: int) -> int:
    """How many rows of a segment have an exact tail."""
    return -(-rows // APART) if APART else 0


def _halves(values: Tensor, dtype: torch.dtype) -> Tensor:
    """(2, n) numbers of `dtype` whose sums are the float32 values, or (1, n) where one of them is enough."""
    high = values.to(dtype)
    if dtype == values.dtype:
        return high.unsqueeze(0)
    return torch.stack((high, (values - high).to(dtype)))


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left (m, k) times right (k, n), half-precision numbers with a float32 result."""
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
