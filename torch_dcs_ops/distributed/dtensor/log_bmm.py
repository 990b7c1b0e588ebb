"""log_bmm, max_bmm and their gradients: matrices of a batch, rows of a or columns of b may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from .rules import Placements, call, empty, lead_of, local, rule, sharded_dim, spread

# The dimensions of operands: b, the batch, i and j those of the result, k what is summed over.
_DIMS = {"a": "bik", "b": "bkj", "grad": "bij", "log_s": "bij", "x": "bik", "y": "bij", "z": "bkj"}
_OF_SUM = ("bkj", "bij", "bik")  # of _log_bmm_product, by what it sums over
_SHARDED = "bij"


def _results(op: Any, bound: dict[str, Any]) -> tuple[str, ...]:
    return {
        "dcs::_log_bmm": ("bij", "bij"),
        "dcs::_max_bmm": ("bij", "bij"),
        "dcs::_log_bmm_backward": ("bik", "bkj"),
    }.get(op._schema.name) or (_OF_SUM[bound["over"]],)


@rule("_log_bmm", "_max_bmm", "_log_bmm_backward", "_log_bmm_product")
def matrices(name: str, op: Any, bound: dict[str, Any]) -> Any:
    mesh = lead_of(name, bound, "a").device_mesh
    tensors = {of: lead_of(name, bound, of) for of, value in bound.items() if isinstance(value, Tensor)}
    letters: list[str | None] = []
    for axis in range(mesh.ndim):
        dims = [(of, sharded_dim(value.placements[axis])) for of, value in tensors.items()]
        wanted = [_DIMS[of][dim] for of, dim in dims if dim is not None]
        letters.append(next((letter for letter in wanted if letter in _SHARDED), None))
        if letters[-1] in letters[:-1]:
            letters[-1] = None  # one axis of the mesh a dimension
    sizes = {letter: size for of, value in tensors.items() for letter, size in zip(_DIMS[of], value.shape, strict=True)}

    def layout(dims: str, other: Any) -> Placements:
        return tuple(
            Replicate() if letter is None else Shard(dims.index(letter)) if letter in dims else other
            for letter in letters
        )

    shards = {of: local(name, of, value, mesh, layout(_DIMS[of], Replicate())) for of, value in tensors.items()}
    found_results = call(op, {**bound, **shards})
    several = isinstance(found_results, tuple)
    results = [
        spread(shard, mesh, layout(dims, Partial()), [sizes[letter] for letter in dims])
        if shard.dim() == 3
        else empty(shard, mesh)
        for shard, dims in zip(found_results if several else (found_results,), _results(op, bound), strict=True)
    ]
    return tuple(results) if several else results[0]


@rule("log_bmm", "max_bmm")
def made_of_private_ones(name: str, op: Any, bound: dict[str, Any]) -> Any:
    """A call that nothing differentiates: the op's own kernel, which calls the private op."""
    lead_of(name, bound, "a")
    lead_of(name, bound, "b")
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *bound.values())
