"""What the rules are made of: how one is registered, and how shards and DTensors become each other.

A rule is `torch.library.register_torch_dispatch` for DTensor: it comes before DTensor's own propagation, in eager mode,
under autograd and in what AOTAutograd traces, and sees tensor keywords too. The ops' autograd comes before: its nodes
hold DTensors, and the private ops that they call meet a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ... import _registry
from ...ops._common.validate import fail
from ..common import Ranks

Placements = tuple[Placement, ...]
Rule = Callable[[str, Any, dict[str, Any]], Any]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """`function(name, op, arguments by name)` is what the ops `names` do with DTensors."""

    def register(function: Rule) -> Rule:
        def dispatched(cls: Any, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            schema = op._schema.arguments
            bound = {argument.name: argument.default_value for argument in schema}
            bound |= dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
            return function(op._schema.name.removeprefix("dcs::").lstrip("_"), op, bound)

        for name in names:
            torch.library.register_torch_dispatch(f"dcs::{name}", DTensor, dispatched, lib=_registry.LIBRARY)
        return function

    return register


def call(op: Any, bound: dict[str, Any]) -> Any:
    """The op with arguments by name, those that its schema has by position."""
    schema = op._schema.arguments
    positional = [bound[argument.name] for argument in schema if not argument.kwarg_only]
    return op(*positional, **{argument.name: bound[argument.name] for argument in schema if argument.kwarg_only})


def _public(name: str) -> str:
    """The op that calls the private one."""
    return name.removesuffix("_forward").removesuffix("_backward")


def lead_of(name: str, bound: dict[str, Any], first: str) -> DTensor:
    """The operand whose mesh is the call's."""
    lead = bound[first]
    if not isinstance(lead, DTensor):
        fail(_public(name), f"{first} must be a DTensor like the other operands, got a plain tensor")
    return lead


def local(name: str, of: str, tensor: Tensor | None, mesh: Any, layout: Placements) -> Any:
    """The shard of an operand, in the layout that the op needs it in."""
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        if tensor.numel() == 1 and tensor.dim() == 0:  # the same everywhere, as DTensor's own ops take it
            return tensor
        fail(_public(name), f"{of} must be a DTensor like the other operands, got a plain tensor")
    if tensor.device_mesh != mesh:
        fail(_public(name), f"{of} must be on the other operands' mesh {mesh}, got one on {tensor.device_mesh}")
    if tensor.placements != layout:
        return _redistributed(tensor, mesh, layout).to_local()
    return tensor.to_local()


def _redistributed(tensor: Any, mesh: Any, layout: Placements) -> Any:
    tensor = tensor.detach()  # rules run below autograd, and what they redistribute is no part of its graph
    if tensor.dtype != torch.bool:
        return tensor.redistribute(mesh, layout)
    # Inductor makes int64 of a bool tensor that it pads for uneven shards.
    return tensor.to(torch.uint8).redistribute(mesh, layout).to(torch.bool)


def spread(shard: Tensor, mesh: Any, layout: Placements, shape: Sequence[int]) -> DTensor:
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(shard, mesh, layout, run_check=False, shape=torch.Size(shape), stride=stride)


def replicated(mesh: Any) -> Placements:
    return tuple(Replicate() for _ in range(mesh.ndim))


def empty(shard: Tensor, mesh: Any) -> DTensor:
    """A result that was not asked for."""
    return spread(shard, mesh, replicated(mesh), tuple(shard.shape))


def ranks_along(mesh: Any, axis: int) -> Ranks:
    return Ranks(mesh.get_group(axis).group_name, mesh.size(axis), mesh.get_local_rank(axis))


def summed(layout: Placements) -> Placements:
    """Of a sum over what `layout` shards."""
    return tuple(Partial() if isinstance(placement, Shard) else Replicate() for placement in layout)


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that is cut in the order of the ranks; what is strided or no shard has none, and is gathered."""
    return placement.dim if type(placement) is Shard else None
