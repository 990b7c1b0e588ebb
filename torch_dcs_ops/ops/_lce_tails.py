"""The tails of filtered gradients: what is left of the rows beside the kept columns, a segment of chunks at a time.

A row's tail is m_i·q_g / Σ q_g: its own exact mass in the mean shape of its group of rows, 128 on a GPU and 32 on a
CPU. Of every segment, the rows of the largest masses, one in 32, make a group each instead: their tails are exact, and
the others' shape is without them. A group and a single row each take the products of one row of the exact gradient.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.cross_entropy_rows import row_dtype
from ..reference.linear_cross_entropy import Needs, Options
from ._lce_ignored import ValidRows
from ._lce_plan import FilteredPlan

SEGMENT_ROWS = 8192  # whose tails are multiplied at a time
APART = 32  # one row in so many has an exact tail
_WIDE_BYTES = 32 << 20
_SMALLEST_SUM = 1e-30  # of q: its inverse is finite, and the tails of less weigh nothing


class _Part(NamedTuple):
    """What a chunk leaves: its kept columns (V,), and of its rows (n,) the masses, lse, validity and -e_i."""

    alive: Tensor
    mass: Tensor
    lse: Tensor
    valid: Tensor
    evens: Tensor | None


class Tails:
    """Takes q, the kept columns and the masses of one chunk of rows after another, and multiplies a segment's tails.

    Chunks are multiples of groups, which never cross them; a segment is the chunks that fit into 8192 rows,
    one at least. Held for it: q of its groups and of its single rows in input's dtype, and the kept columns of chunks.
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
        count, (classes, features) = input.size(0), linear_weight.shape
        self.segment = max(SEGMENT_ROWS // plan.rows, 1) * plan.rows
        held = min(self.segment, count)
        self.start = self.stop = 0
        # Label smoothing's group comes first: -e_i·w_j is of rank one, m = -e and q = w over all columns.
        self.extra = int(options.label_smoothing > 0)
        terms = self.extra + -(-held // self.group) + _apart(held)
        self.q = input.new_empty(terms, plan.stride)[:, :classes]
        self.sums = input.new_empty((terms, features) if needs.linear_weight else 0)
        self.parts: list[_Part] = []
        if self.extra:
            self.q[0] = 1 if class_weight is None else class_weight

    def has_room(self, part: slice) -> bool:
        """For the rows of another chunk in this segment."""
        return bool(part.stop - self.start <= self.segment)

    def begin(self, part: slice) -> None:
        """The chunk `part` is the first of a segment."""
        self.start = part.start

    def place(self, part: slice) -> Tensor:
        """Where q of the groups of a chunk belongs."""
        first = self.extra + (part.start - self.start) // self.group
        return self.q[first : first - (part.start - part.stop) // self.group]

    def add(self, alive: Tensor, mass: Tensor, lse: Tensor, valid: Tensor, evens: Tensor | None, part: slice) -> None:
        """Of a chunk whose q is in its place; `valid`: the rows that q is summed over; evens (n,): -e_i."""
        self.stop = part.stop
        self.parts.append(_Part(alive, mass, lse, valid, evens))

    def multiply(self, grad_input: Tensor, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the segment's tails to both; (q, sums), whose product qᵀ·sums is their part of linear_weight's."""
        count = self.stop - self.start
        groups, apart = -(-count // self.group), _apart(count)
        rows, own, factors, single = self._share(count, groups, apart)
        evens = torch.cat([part.evens for part in self.parts if part.evens is not None]) if self.extra else None
        self.parts.clear()
        bounds = (self.extra, self.extra + groups, self.extra + groups + apart)
        q, sums = self.q[: bounds[2]], self.sums[: bounds[2]]
        if self.needs.input:
            table = _wide_product(q, self.linear_weight)
            out = grad_input[self.start : self.stop]
            _add_by_group(self.group, out, factors, table[bounds[0] : bounds[1]])
            if apart:
                exact = out.index_select(0, rows).to(table.dtype).addcmul_(single.unsqueeze(1), table[bounds[1] :])
                out.index_copy_(0, rows, exact.to(out.dtype))
            if evens is not None:
                out.addcmul_(evens.unsqueeze(1), table[:1])
        if self.needs.linear_weight:
            self._multiply_input(factors, own, single, evens, sums, bounds)
        if self.needs.linear_bias:
            masses = single.new_zeros(bounds[2])
            padded = torch.nn.functional.pad(factors, (0, groups * self.group - count))
            torch.sum(padded.view(-1, self.group), 1, out=masses[bounds[0] : bounds[1]])
            masses[bounds[1] :] = single
            if evens is not None:
                torch.sum(evens, 0, keepdim=True, out=masses[:1])
            grad_bias += _wide_product(_halves(masses, q.dtype), q).sum(0)
        return q, sums

    def _share(self, count: int, groups: int, apart: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The single rows (S,), their input (S, D), the factors (n,) of every row's group, 0 for these, and (S,) those
        of their own q."""
        mass, lse, valid = (
            torch.cat([getattr(part, name) for part in self.parts]) for name in ("mass", "lse", "valid")
        )
        alive, options = torch.stack([part.alive for part in self.parts]), self.options
        # In their order, so that those of a group are neighbours. Equal masses are taken from the front. Rows that have
        # no gradient do not count: with or without them the same rows are chosen.
        rows, rank = mass.abs().sort(descending=True, stable=True).indices[:apart].sort()
        chosen = rank * APART < valid.sum()
        bounds = torch.searchsorted(rows, torch.arange(0, self.group * groups + 1, self.group, device=rows.device))
        q = self.q[self.extra : self.extra + groups]
        single = self.q[self.extra + groups : self.extra + groups + apart]
        own = self.input[rows + self.start]
        if apart:
            torch.mm(own, self.linear_weight.t(), out=single)
        totals = self.steps.share_tails(
            q, single, bounds, lse.index_select(0, rows), valid.index_select(0, rows) & chosen, alive,
            -(-self.chunk // self.group), self.linear_bias, options.softcap or 0.0, options.logit_scale,
        )  # fmt: skip
        inverse = torch.where(totals <= _SMALLEST_SUM, 0, totals.reciprocal())
        factors = mass * inverse[:groups].unsqueeze(1).expand(-1, self.group).reshape(-1)[:count]
        factors.index_copy_(0, rows, torch.where(chosen, 0, factors.index_select(0, rows)))
        return rows, own, factors, mass.index_select(0, rows) * inverse[groups:]

    def _multiply_input(
        self,
        factors: Tensor,
        own: Tensor,
        single: Tensor,
        evens: Tensor | None,
        sums: Tensor,
        bounds: tuple[int, int, int],
    ) -> None:
        grouped = sums[bounds[0] : bounds[1]]
        for start in range(0, factors.numel(), self.chunk):
            part = slice(start, min(start + self.chunk, factors.numel()))
            input = self.input[slice(self.start + part.start, self.start + part.stop)]
            first = start // self.group
            of_chunk = grouped[first : first - (part.start - part.stop) // self.group]
            _group_products(self.group, factors[part].to(input.dtype), input, of_chunk)
        if own.size(0):
            sums[bounds[1] :] = own * single.unsqueeze(1)
        if evens is not None:
            sums[0] = _wide_product(_halves(evens, sums.dtype), self.input[self.start : self.stop]).sum(0)


def _apart(rows: int) -> int:
    """How many rows of a segment have an exact tail."""
    return -(-rows // APART) if APART else 0


def _group_products(group: int, factors: Tensor, input: Tensor, out: Tensor) -> None:
    """out (n / group, D) = Σ over each group of rows of factors (n,) times input (n, D)."""
    full = factors.numel() // group
    rows = full * group
    if full:
        torch.bmm(
            factors[:rows].view(full, 1, group),
            input[:rows].unflatten(0, (full, group)),
            out=out[:full].unsqueeze(1),
        )
    if full < out.size(0):
        torch.mm(factors[rows:].unsqueeze(0), input[rows:], out=out[full:])


def _add_by_group(group: int, out: Tensor, factors: Tensor, table: Tensor) -> None:
    """out (n, D) += factors (n,) times every group's row of table (n / group, D)."""
    full = factors.numel() // group
    rows = full * group
    if full:
        grouped = out[:rows].unflatten(0, (full, group))
        each, shared = factors[:rows].view(full, group, 1), table[:full].unsqueeze(1)
        if out.is_cuda:  # where a product with mixed dtypes is slow
            grouped.addcmul_(each.to(out.dtype), shared.to(out.dtype))
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
