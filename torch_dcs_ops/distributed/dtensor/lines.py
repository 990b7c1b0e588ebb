"""Scans, softmax and returns: lines along one dimension are independent, and any sharding of the others stays.

Where the dimension of a scan itself is sharded, its time is shared out (distributed/scan); that of softmax and of
returns is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ... import _registry
from ...ops.scan.validate import check_direction
from ..common import Ranks
from ..scan.discounted_cumsum import (
    Layout,
    ScanSegments,
    carried_in_shifted,
    conjugate,
    scan_of_slices,
    shifted_scan_of_slices,
    with_carry,
)  # fmt: skip
from .rules import Placements, call, empty, lead_of, local, ranks_along, rule, sharded_dim, spread, summed


def _without(layout: Placements, dim: int) -> Placements:
    return tuple(p if sharded_dim(p) not in (None, dim) else Replicate() for p in layout)


def _moved(layout: Placements, shape: tuple[int, ...], of: tuple[int, ...], dim: int) -> Placements:
    """Of an operand that broadcasts against the shape `of`, or with fewer dimensions against that without `dim`."""
    ndim = len(of)
    found = []
    for placement in layout:
        position, cut = -1, 0
        if isinstance(placement, Shard):
            position = cut = placement.dim
            if len(shape) < ndim and position == dim:
                position = -1
            elif len(shape) < ndim:
                position -= (cut > dim) + (ndim - 1 - len(shape))
        # One entry beside several broadcasts, and is not cut; beside one it is: most ranks have none of either.
        is_there = position >= 0 and shape[position] == of[cut]
        found.append(Shard(position) if is_there else Replicate())
    return tuple(found)


def _shards(
    name: str, bound: dict[str, Any], lead: DTensor, dim: int, time: int | None = None
) -> tuple[Placements, dict[str, Any]]:
    """The layout of what has input's shape, and every operand's shard; `time`: the axis of the mesh that shards it."""
    mesh, ndim = lead.device_mesh, lead.dim()
    tensors = {of: value for of, value in bound.items() if isinstance(value, Tensor)}
    # Of all operands of input's shape: a replicated gradient beside a sharded output is cut, not the output gathered.
    whole = [_without(t.placements, dim) for t in tensors.values() if isinstance(t, DTensor) and t.dim() == ndim]
    layout = tuple(next((p for p in axis if isinstance(p, Shard)), axis[0]) for axis in zip(*whole, strict=True))
    if time is not None:
        layout = (*layout[:time], Shard(dim), *layout[time + 1 :])
    shape = tuple(lead.shape)
    shards = {of: local(name, of, t, mesh, _moved(layout, tuple(t.shape), shape, dim)) for of, t in tensors.items()}
    return layout, shards


@rule("softmax", "_softmax_backward")
def along_a_dimension(name: str, op: Any, bound: dict[str, Any]) -> Any:
    lead = lead_of(name, bound, next(iter(bound)))
    layout, shards = _shards(name, bound, lead, bound["dim"] % max(lead.dim(), 1))
    return spread(call(op, {**bound, **shards}).contiguous(), lead.device_mesh, layout, tuple(lead.shape))


@rule("_scan", "_scan_gradients", "discounted_cumsum", "discounted_cumsum.Tensor", "cumsum")
def scans(name: str, op: Any, bound: dict[str, Any]) -> Any:
    lead = lead_of(name, bound, next(iter(bound)))
    ndim, shape, mesh = lead.dim(), tuple(lead.shape), lead.device_mesh
    dim = bound["dim"] % max(ndim, 1)
    time = None if _gathers_time(bound, lead) else _axis_of_time(bound, dim, ndim)
    layout, shards = _shards(name, bound, lead, dim, time)
    found = call(op, {**bound, **shards}) if time is None else _shared(bound, shards, dim, ranks_along(mesh, time))
    if isinstance(found, Tensor):
        return spread(found.contiguous(), mesh, layout, shape)
    grad_input, grad_gamma = (result.contiguous() for result in found)
    gamma, rows = bound["gamma"], shape[:dim] + shape[dim + 1 :]
    if gamma is not None and 0 < gamma.dim() == ndim:
        of_gamma = spread(grad_gamma, mesh, layout, shape)
    elif gamma is not None and gamma.dim() == 0:
        of_gamma = spread(grad_gamma, mesh, summed(layout), ())
    else:
        moved = list(_moved(layout, rows, shape, dim))
        if time is not None:
            moved[time] = Partial()
        of_gamma = spread(grad_gamma, mesh, tuple(moved), rows)
    return spread(grad_input, mesh, layout, shape), of_gamma


def _gathers_time(bound: dict[str, Any], lead: DTensor) -> bool:
    """A window would need its steps of the neighbor, and carries are float64: no int64, no complex number."""
    return bound.get("window") is not None or not (bound.get("dtype") or lead.dtype).is_floating_point


def _axis_of_time(bound: dict[str, Any], dim: int, ndim: int) -> int | None:
    """The first axis of the mesh on which an operand of input's shape is sharded along `dim`."""
    for value in bound.values():
        if isinstance(value, DTensor) and value.dim() == ndim:
            for axis, placement in enumerate(value.placements):
                if sharded_dim(placement) == dim and value.size(dim) > 1:
                    return axis
    return None


def _shared(bound: dict[str, Any], shards: dict[str, Any], dim: int, ranks: Ranks) -> Any:
    """A scan of shards, or its gradients, whose time is shared out."""
    layout = Layout(ranks, 1)
    lead = bound["grad"] if "grad" in bound else bound["input"]
    x = shards["grad"] if "grad" in bound else shards["input"]
    x = x if bound.get("dtype") is None else x.to(bound["dtype"])
    gamma, value = shards.get("gamma"), bound.get("gamma_value", 1.0)
    if isinstance(bound.get("gamma"), float):
        gamma, value = None, bound["gamma"]
    if gamma is not None and 0 < gamma.dim() == lead.dim():
        gamma = layout.split(gamma.expand(x.shape), dim)
    reverse = bound["reverse"] if "reverse" in bound else check_direction("discounted_cumsum", bound["direction"])
    segments, parts = ScanSegments(value, dim + 1, reverse, layout), layout.split(x, dim)
    initial, reset = shards.get("initial"), shards.get("reset")
    reset = None if reset is None else layout.split(reset, dim)
    if "grad" not in bound:
        if bound.get("shifted"):
            return shifted_scan_of_slices(parts, gamma, segments, reset)[0].squeeze(0)
        return scan_of_slices(parts, gamma, segments, initial, reset)[0].squeeze(0)
    output, adjoint, steps = layout.split(shards["output"], dim), segments.adjoint(), x.size(dim)
    carry, _ = carried_in_shifted(parts, conjugate(gamma), adjoint, reset)
    # The y before every segment: the last one of the segment before that has any.
    last = output.select(dim + 1, segments.last) if steps else output.sum(dim + 1)
    ends, marks = ranks.gather(torch.stack((last, torch.full_like(last, float(steps > 0))))).unbind(1)
    start = last.new_zeros(()) if initial is None else initial
    before, _ = layout.fold(reverse).carried(ends, torch.ones_like(ends), marks, start.expand(last.shape[1:]))
    grad_input, grad_gamma = _registry.scan_gradients(
        with_carry(parts, adjoint, carry), output, gamma, value, dim + 1, reverse,
        before.select(0, ranks.rank).contiguous(), reset,
    )  # fmt: skip
    return grad_input.squeeze(0), grad_gamma if grad_gamma.dim() == 0 else grad_gamma.squeeze(0)


@rule("_temporal_difference_scan", "_n_step_returns")
def returns(name: str, op: Any, bound: dict[str, Any]) -> Any:
    lead = lead_of(name, bound, "rewards")
    layout, shards = _shards(name, bound, lead, bound["dim"] % max(lead.dim(), 1))
    found = call(op, {**bound, **shards})
    shape, mesh = tuple(lead.shape), lead.device_mesh
    if isinstance(found, Tensor):
        return spread(found.contiguous(), mesh, layout, shape)
    needs = [bound[f"need_{result}"] for result in ("advantages", "targets", "pg")]
    return tuple(
        spread(shard.contiguous(), mesh, layout, shape) if need else empty(shard, mesh)
        for shard, need in zip(found, needs, strict=True)
    )
