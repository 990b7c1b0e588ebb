"""From the public ops' shapes, torch.matmul's, to the (B, I, K) and (B, K, J) of the private ops, and vmap of them all:
one more batch dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from .._common.validate import known
from .._common.vmap import BATCHED, Batch, Operand
from .validate import check_operands, check_uniforms


def result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Of checked operands, as torch.matmul has it."""
    return _result_shape(a.shape, b.shape)


def _result_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    lead = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    return (*lead, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def public_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """An addition and a multiplication a term: 2·I·K·J of every pair of matrices."""
    return 2 * math.prod(_result_shape(a_shape, b_shape)) * int(a_shape[-1])


def as_matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Checked operands as (B, I, K) and (B, K, J): views where the memory allows, a repeated batch of stride 0 among
    them. A batch of matrices times a single one is one tall matrix times it."""
    a = a.unsqueeze(0) if a.dim() == 1 else a
    b = b.unsqueeze(1) if b.dim() == 1 else b
    if b.dim() == 2 and _is_tall(a):
        return a.reshape(1, math.prod(a.shape[:-1]), a.size(-1)), b.unsqueeze(0)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(lead)
    return (
        a.expand(*lead, *a.shape[-2:]).reshape(count, *a.shape[-2:]),
        b.expand(*lead, *b.shape[-2:]).reshape(count, *b.shape[-2:]),
    )


def _is_tall(a: Tensor) -> bool:
    """Whether a's rows follow one another at one stride, through all batches."""
    return all(known(a.stride(dim) == a.stride(dim + 1) * a.size(dim + 1)) for dim in range(a.dim() - 2))


def _matrix(operand: Operand, vector: int | None, dims: int) -> Tensor:
    """An operand of a public op with at least `dims` dimensions behind the batch, if it has a batch; a vector has got
    the dimension that it lacks."""
    tensor = operand.tensor if operand.position is None else operand.tensor.movedim(operand.position, 0)
    tensor = tensor if vector is None else tensor.unsqueeze(vector)
    if operand.position is None:
        return tensor
    return tensor.reshape(tensor.size(0), *(1,) * (dims + 1 - tensor.dim()), *tensor.shape[1:])


def _public_vmap(name: str, op: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, a: Tensor, b: Tensor, *rest: Tensor) -> Any:
        check_operands(name, a, b)
        shape = result_shape(a, b)
        if rest:
            check_uniforms(name, rest[0], a, shape)
        vector_a, vector_b = -2 if a.dim() == 1 else None, -1 if b.dim() == 1 else None
        dims = max(a.dim(), b.dim(), 2)
        batch = Batch(a, b, *rest)
        with torch._C._ExcludeDispatchKeyGuard(BATCHED):
            if not batch.is_batched:
                return op(a, b, *rest)
            first, second, *others = batch.operands
            assert first is not None
            assert second is not None
            if not (batch.has_batch(0) or batch.has_batch(1)):
                first = Operand(first.front(batch.size), 0)
            args = [_matrix(first, vector_a, dims), _matrix(second, vector_b, dims)]
            for other in others:
                assert other is not None
                uniforms = other.front(batch.size)
                uniforms = uniforms if vector_b is None else uniforms.unsqueeze(vector_b)
                args.append(uniforms if vector_a is None else uniforms.unsqueeze(vector_a))
            results = op(*args)
            if isinstance(results, Tensor):
                return batch.wrap(results.reshape(batch.size, *shape))
            return tuple(batch.wrap(result.reshape(batch.size, *shape)) for result in results)

    return kernel


def _private_vmap(op: Any) -> Callable[..., Any]:
    """The batch becomes part of the one that there is."""

    def kernel(keyset: Any, *args: Any) -> Any:
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]
        matrices = args[tensors[0]].size(0)
        batch = Batch(*(args[index] for index in tensors))
        with torch._C._ExcludeDispatchKeyGuard(BATCHED):
            if not batch.is_batched:
                return op(*args)
            folded = list(args)
            for index, operand in zip(tensors, batch.operands, strict=True):
                assert operand is not None
                folded[index] = operand.front(batch.size).flatten(0, 1)

            def wrap(result: Tensor) -> Tensor:
                # A result that was not needed has the shape (0,).
                whole = (batch.size, matrices, *result.shape[1:]) if result.dim() == 3 else (batch.size, 0)
                return batch.wrap(result.reshape(whole))

            results = op(*folded)
            return wrap(results) if isinstance(results, Tensor) else tuple(map(wrap, results))

    return kernel


for _name, _op in (
    ("log_bmm", _registry.log_bmm),
    ("max_bmm", _registry.max_bmm),
    ("sample_bmm", _registry.sample_bmm),
):
    _registry.LIBRARY.impl(_name, _public_vmap(_name, _op), "FuncTorchBatched", with_keyset=True)
for _name, _op in (
    ("_log_bmm", _registry.log_bmm_kernel),
    ("_log_bmm_backward", _registry.log_bmm_backward),
    ("_log_bmm_product", _registry.log_bmm_product),
    ("_max_bmm", _registry.max_bmm_kernel),
    ("_sample_bmm", _registry.sample_bmm_kernel),
):
    _registry.LIBRARY.impl(_name, _private_vmap(_op), "FuncTorchBatched", with_keyset=True)
