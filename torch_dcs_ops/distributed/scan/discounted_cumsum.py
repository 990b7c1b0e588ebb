"""Discounted cumulative sums whose dimension of time is shared out among ranks.

A slice of time is its own scan from 0, plus the product of its gates so far times what is carried into it. So the ranks
tell each other two numbers a row, in float64: the y that a slice ends with, and the product of all its gates; with
`reset` a third, whether one cuts the slice (totals.py). One all-gather, and every rank folds them in the order of time.
Then the op runs, from what is carried in, or only the head of the slice's own scan is mended (head.py).

The backward is the same in the other direction: what a slice's carried-in y is worth is its first adjoint times its
first gate. The gradient of a slice's last y goes to its last step, and the op's own backward does the rest.

A rank may hold several segments of time; the first dimension of all tensors here counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from ... import _registry
from ...ops._common import autocast
from ...ops._common.validate import check_dense, check_flag, dtype_name, fail
from ...ops.scan.discounted_cumsum import as_number, number_as_tensor
from ...ops.scan.validate import check_argument_types, check_direction, check_scan
from ...reference.scan import ScanCall, has_step_gates
from ..common import Ranks, agreed, check_first_derivatives, check_not_differentiated_again, check_plain, ranks_of
from .head import mend_
from .totals import Totals, totals_of

_OP = "sequence_parallel_discounted_cumsum"


class Fold(NamedTuple):
    """The order in which segments of time follow each other, (rank, segment), in the direction of a scan."""

    order: tuple[tuple[int, int], ...]

    def carried(self, ends: Tensor, products: Tensor, cuts: Tensor | None, first: Tensor) -> tuple[Tensor, Tensor]:
        """(what is carried into every segment, what comes out behind the last) of tensors (ranks, segments, *rows)."""
        carry, into = first, {}
        for at in self.order:
            into[at] = carry
            passed = products[at] * carry
            if cuts is not None:
                passed = torch.where(cuts[at] != 0, 0, passed)
            carry = ends[at] + passed
        ranks, segments = ends.shape[:2]
        stacked = torch.stack([into[rank, segment] for rank in range(ranks) for segment in range(segments)])
        return stacked.view(ends.shape), carry


class Layout(NamedTuple):
    """How time is shared out."""

    ranks: Ranks
    segments: int  # of a rank: 1, or 2 where rank r holds the segments r and 2·ranks - 1 - r

    def fold(self, from_the_end: bool) -> Fold:
        count = self.ranks.size
        order = [(rank, 0) for rank in range(count)]
        if self.segments == 2:
            order += [(rank, 1) for rank in reversed(range(count))]
        return Fold(tuple(reversed(order)) if from_the_end else tuple(order))

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Segments in front: `dim` moves on by 1."""
        segments: Tensor = tensor.unflatten(dim, (self.segments, tensor.size(dim) // self.segments))
        return segments.movedim(dim, 0)

    def joined(self, tensor: Tensor, dim: int) -> Tensor:
        """Undoes `split`."""
        return tensor.movedim(0, dim).flatten(dim, dim + 1)


def layout_of(op: str, group: dist.ProcessGroup, zigzag: bool) -> Layout:
    return Layout(ranks_of(op, group), 2 if zigzag else 1)


class ScanSegments(NamedTuple):
    """A scan of a rank's segments of time, tensors with these in front."""

    gamma_value: float
    dim: int
    reverse: bool
    layout: Layout

    @property
    def first(self) -> int:
        """The step that a segment begins with, in the direction of the scan."""
        return -1 if self.reverse else 0

    @property
    def last(self) -> int:
        return 0 if self.reverse else -1

    def adjoint(self) -> ScanSegments:
        return self._replace(reverse=not self.reverse)

    def scan(
        self, x: Tensor, gamma: Tensor | None, initial: Tensor | None, reset: Tensor | None, shifted: bool = False
    ) -> Tensor:
        """Every segment by itself."""
        call = ScanCall(gamma, self.gamma_value, self.dim, self.reverse, shifted, initial, reset, window=None)
        y: Tensor = _registry.scan(x, *call)
        return y


def scan_of_slices(
    x: Tensor, gamma: Tensor | None, call: ScanSegments, initial: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(this rank's steps of the scan of all, what is carried into its segments, (segments, *rows), in x's dtype)."""
    totals, own = totals_of(x, gamma, call, reset, shifted=False, keep=True)
    first = totals.ends.new_zeros(()) if initial is None else initial.to(totals.ends.dtype)
    carry = _folded(totals, call, first)[0].to(x.dtype).contiguous()
    if own is None:
        return call.scan(x, gamma, carry, reset), carry
    mend_(own, gamma, call, carry, reset, shifted=False)
    return own, carry


def shifted_scan_of_slices(
    x: Tensor, gamma: Tensor | None, call: ScanSegments, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(this rank's steps of the shifted scan of all, what comes out behind the last step)."""
    totals, own = totals_of(x, gamma, call, reset, shifted=True, keep=True)
    carry, behind = _carried_into(totals, x, call)
    if own is None:
        return call.scan(with_carry(x, call, carry), gamma, None, reset, shifted=True), behind
    mend_(own, gamma, call, carry, reset, shifted=True)
    return own, behind


def carried_in_shifted(
    x: Tensor, gamma: Tensor | None, call: ScanSegments, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of a shifted scan, such as a scan's adjoint: (what is added to the first step of every segment, what comes out
    behind the last).

    A step hands on its y times its own gate.
    """
    totals, _ = totals_of(x, gamma, call, reset, shifted=True, keep=False)
    return _carried_into(totals, x, call)


def _carried_into(totals: Totals, x: Tensor, call: ScanSegments) -> tuple[Tensor, Tensor]:
    into, behind = _folded(totals, call, totals.ends.new_zeros(()))
    return into.to(x.dtype), behind


def _folded(totals: Totals, call: ScanSegments, first: Tensor) -> tuple[Tensor, Tensor]:
    """(what is carried into this rank's segments, what comes out behind the last of all), by one all-gather."""
    columns = [column for column in totals if column is not None]
    every = call.layout.ranks.gather(torch.stack(columns)).unbind(1)
    cuts = None if totals.cuts is None else every[2]
    fold = call.layout.fold(call.reverse)
    into, behind = fold.carried(every[0], every[1], cuts, first.expand(totals.products.shape[1:]))
    return into.select(0, call.layout.ranks.rank), behind


def with_carry(x: Tensor, call: ScanSegments, carry: Tensor) -> Tensor:
    """x for a shifted scan into which `carry` comes."""
    x = x.clone()
    if x.size(call.dim):
        x.select(call.dim, call.first).add_(carry)
    return x


class _SequenceParallelScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, initial: Tensor | None, reset: Tensor | None, call: ScanSegments
    ) -> Tensor:
        y, carry = scan_of_slices(x, gamma, call, initial, reset)
        ctx.call = call
        ctx.save_for_backward(gamma, initial, reset, y, carry)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        check_not_differentiated_again(_OP)
        gamma, initial, reset, y, carry = ctx.saved_tensors
        call: ScanSegments = ctx.call
        need_x, need_gamma, need_initial, _, _ = ctx.needs_input_grad
        adjoint, conj = call.adjoint(), conjugate(gamma)
        grad = grad.contiguous()
        grad_x, grad_gamma, grad_initial = None, None, None
        if need_gamma:
            back, behind = carried_in_shifted(grad, conj, adjoint, reset)
            upstream = with_carry(grad, adjoint, back)
            grad_x, of_gates = _registry.scan_gradients(
                upstream, y, gamma, call.gamma_value, call.dim, call.reverse, carry, reset
            )
            of_gates = of_gates if gamma.is_complex() or not of_gates.is_complex() else of_gates.real
            grad_gamma = of_gates.sum_to_size(gamma.shape)
            if not has_step_gates(gamma, y.dim()):
                grad_gamma = call.layout.ranks.total(grad_gamma)  # a gate of all steps is every rank's
            grad_gamma = grad_gamma.to(device=gamma.device, dtype=gamma.dtype)
        else:
            grad_x, behind = shifted_scan_of_slices(grad, conj, adjoint, reset)
        if need_initial:
            grad_initial = behind.sum_to_size(initial.shape).to(initial.dtype)
        return grad_x if need_x else None, grad_gamma, grad_initial, None, None


def conjugate(gamma: Tensor | None) -> Tensor | None:
    return gamma.conj_physical() if gamma is not None and gamma.is_complex() else gamma


def sequence_parallel_discounted_cumsum(
    input: Tensor,
    gamma: float | Tensor,
    *,
    group: dist.ProcessGroup,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: None = None,
    zigzag: bool = False,
) -> Tensor:
    """:func:`torch_dcs_ops.discounted_cumsum` along a dimension of which every rank of a group holds successive steps.

    All ranks call it alike. They exchange one all-gather of two numbers a row (three with reset), in float64, and the
    same again in backward; a gamma of all steps that needs a gradient takes an all-reduce more.

    Args:
        input: this rank's steps, (*batch, T_r, *batch) with T_r at `dim`: any number, 0 too, in the order of the ranks.
        gamma: a number; a tensor of fewer dimensions than input, the same on all ranks: one discount a row; or of
            input's number of dimensions with a size of T_r at `dim`: one for each of this rank's steps.
        group: a torch.distributed.ProcessGroup.
        direction: "right" or "left".
        initial: the y beyond the end where the scan of all ranks starts, the same on all of them.
        reset: bool, input's shape: where it is set, what is carried to that step is discarded.
        window: only None: a window would need its steps of the neighbor.
        zigzag: rank r of P holds the segments r and 2·P - 1 - r of 2·P, one behind the other and equally long, as
            torch's context parallelism shares out attention.

    Returns:
        This rank's steps of the result, a new tensor of input's shape and dtype.

    What is carried into a slice is rounded to input's dtype. A NaN or an infinity reaches every step of every rank that
    it is carried to. Differentiable once, in reverse mode, in input, gamma and initial. Works under
    torch.compile(fullgraph=True) and autocast.

    Raises:
        IndexError, RuntimeError, TypeError: an argument is wrong, or ranks disagree on shapes, dtypes or options: in
            the first eager call of its kind the sentence comes on all ranks.
    """
    rates = gamma if isinstance(gamma, Tensor) else None
    operands = {"input": input, "gamma": rates, "initial": initial, "reset": reset}

    def check() -> None:
        check_flag(_OP, "zigzag", zigzag)
        check_argument_types(_OP, input, gamma, dim, initial, reset, None)
        if window is not None:
            fail(_OP, f"window must be None where time is shared out, got {window}")
        check_direction(_OP, direction)
        if rates is None:
            as_number(gamma, _OP)
        at = check_scan(_OP, input, rates, dim, initial, reset, None)
        if input.dim() == 0:
            fail(_OP, "input must have a dimension of time, got a 0-D tensor")
        if rates is not None and has_step_gates(rates, input.dim()) and rates.size(at) != input.size(at):
            fail(_OP, f"gamma must have this rank's {input.size(at)} steps at dim {at}, got {rates.size(at)}")
        check_segments(_OP, input, at, zigzag)

    number = str(gamma) if rates is None else "a tensor"
    same = {"gamma": number, "dim": dim, "direction": direction, "zigzag": zigzag}
    check_same(_OP, group, operands, dim, same, check)
    x, first = autocast.autocast_operands(input, initial)
    return scanned(x, gamma, layout_of(_OP, group, zigzag), dim % input.dim(), direction, first, reset)


def scanned(
    x: Tensor,
    gamma: float | Tensor,
    layout: Layout,
    dim: int,
    direction: str,
    initial: Tensor | None,
    reset: Tensor | None,
) -> Tensor:
    """The scan of arguments that have been checked; `dim` is not negative."""
    if isinstance(gamma, Tensor) or is_compiling():
        rates = gamma if isinstance(gamma, Tensor) else number_as_tensor(gamma, x.device, _OP)
        number = 1.0
    else:
        rates, number = None, as_number(gamma, _OP)
    if rates is not None and has_step_gates(rates, x.dim()):
        rates = layout.split(rates.expand(x.shape), dim)
    y: Tensor = _SequenceParallelScan.apply(  # type: ignore[no-untyped-call]
        layout.split(x, dim), rates, initial, None if reset is None else layout.split(reset, dim),
        ScanSegments(number, dim + 1, direction == "right", layout),
    )  # fmt: skip
    return layout.joined(y, dim)


def check_segments(op: str, input: Tensor, dim: int, zigzag: bool) -> None:
    if zigzag and input.size(dim) % 2:
        fail(op, f"input must have an even number of steps with zigzag=True, got {input.size(dim)}")


def check_same(
    op: str, group: dist.ProcessGroup, operands: dict[str, Any], dim: Any, same: dict[str, Any], check: Any
) -> None:
    """That all ranks call alike, but for the number of their steps; `check` raises what is wrong here."""
    ranks_of(op, group)
    check_plain(op, **operands)

    def check_all() -> None:
        check_dense(op, **operands)
        check()
        check_first_derivatives(op)

    of = {name: t for name, t in operands.items() if isinstance(t, Tensor)}
    if is_compiling() or not of:
        check_all()
        return
    lead = next(iter(of.values()))
    at = dim % lead.dim() if isinstance(dim, int) and lead.dim() and -lead.dim() <= dim < lead.dim() else None
    asked: dict[str, Any] = {}
    for name, t in of.items():
        steps = at if t.dim() == lead.dim() else None
        asked[f"the dtype of {name}"] = dtype_name(t.dtype)
        sizes = () if t.is_nested else t.shape  # which `check_all` refuses
        asked[f"the shape of {name}"] = tuple("steps" if i == steps else size for i, size in enumerate(sizes))
    asked["gradients"] = (torch.is_grad_enabled(), *(t.requires_grad for t in of.values()))
    agreed(op, group, lead.device, {**asked, **same}, check_all)
