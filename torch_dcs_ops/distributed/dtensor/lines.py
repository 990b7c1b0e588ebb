"""Scans, softmax and returns: lines along one dimension are independent, and any sharding of the others stays.

Where the dimension of a scan itself is sharded, its time is shared out (distributed/scan.py); that of softmax and of
returns is gathered.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .rules import Layout, call, empty, is_shard, lead_of, local, rule, spread, summed


def _without(layout: Layout, dim: int) -> Layout:
    return tuple(p if is_shard(p) and p.dim != dim else Replicate() for p in layout)


def _moved(layout: Layout, shape: tuple[int, ...], ndim: int, dim: int) -> Layout:
    """Of an operand that broadcasts against input, or with fewer dimensions against input without `dim`."""
    found = []
    for placement in layout:
        position = -1
        if isinstance(placement, Shard):
            position = placement.dim
            if len(shape) < ndim:
                position -= (placement.dim > dim) + (ndim - 1 - len(shape))
        is_there = 0 <= position < len(shape) and shape[position] != 1
        found.append(Shard(position) if is_there else Replicate())
    return tuple(found)


def _shards(name: str, bound: dict[str, Any], lead: DTensor, dim: int) -> tuple[Layout, dict[str, Any]]:
    """The layout of what has input's shape, and every operand's shard."""
    mesh, ndim = lead.device_mesh, lead.dim()
    tensors = {of: value for of, value in bound.items() if isinstance(value, Tensor)}
    # Of all operands of input's shape: a replicated gradient beside a sharded output is cut, not the output gathered.
    whole = [_without(t.placements, dim) for t in tensors.values() if isinstance(t, DTensor) and t.dim() == ndim]
    layout = tuple(next((p for p in axis if isinstance(p, Shard)), axis[0]) for axis in zip(*whole, strict=True))
    seen: set[int] = set()
    unique: list[Any] = []
    for placement in layout:
        again = isinstance(placement, Shard) and placement.dim in seen
        unique.append(Replicate() if again else placement)
        seen |= {placement.dim} if isinstance(placement, Shard) else set()
    layout = tuple(unique)
    shards = {of: local(name, of, t, mesh, _moved(layout, tuple(t.shape), ndim, dim)) for of, t in tensors.items()}
    return layout, shards


@rule(
    *("_scan", "_scan_gradients", "discounted_cumsum", "discounted_cumsum.Tensor", "cumsum"),
    *("softmax", "_softmax_backward"),
)
def along_a_dimension(name: str, op: Any, bound: dict[str, Any]) -> Any:
    lead = lead_of(name, bound, next(iter(bound)))
    ndim, shape, mesh = lead.dim(), tuple(lead.shape), lead.device_mesh
    dim = bound["dim"] % max(ndim, 1)
    layout, shards = _shards(name, bound, lead, dim)
    found = call(op, {**bound, **shards})
    if isinstance(found, Tensor):
        return spread(found.contiguous(), mesh, layout, shape)
    grad_input, grad_gamma = (result.contiguous() for result in found)
    gamma, rows = bound["gamma"], shape[:dim] + shape[dim + 1 :]
    if gamma is not None and 0 < gamma.dim() == ndim:
        of_gamma = spread(grad_gamma, mesh, layout, shape)
    elif gamma is not None and gamma.dim() == 0:
        of_gamma = spread(grad_gamma, mesh, summed(layout), ())
    else:
        of_gamma = spread(grad_gamma, mesh, _moved(layout, rows, ndim, dim), rows)
    return spread(grad_input, mesh, layout, shape), of_gamma


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
