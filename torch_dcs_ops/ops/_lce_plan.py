"""How many rows of logits are held at a time, and how linear_weight's gradient is summed over those chunks.

The memory of a call, beyond its results, is the logits' buffer (rows · V elements of input's dtype: the gradient of
the logits takes their place) and what the sum over the chunks needs. `memory_budget` is the size of that buffer in
bytes; as many rows as fit into it are taken at a time, one at least. The default is 256 MiB on a GPU, and 1024 rows if
those take more; 32 MiB and 64 rows on a CPU. A GEMM over fewer rows runs below a GPU's speed.

The sum over chunks, where linear_weight needs a gradient:

========  ====================================================================================  =====================
direct    one GEMM (a single chunk), or GEMMs that add to the result (float32 and float64)      nothing
pair      bfloat16: the sum is kept as hi + lo, hi in the result: 16 bits of mantissa           2·V·D bytes
float32   float16, or by name: a float32 sum. float16 because 1/N and sums over rows leave      4·V·D bytes
          its range: the sum stays float32 until the gradient of the loss is known
compact   bfloat16, by name: GEMMs that add to the bfloat16 result, rounded after every chunk   nothing
========  ====================================================================================  =====================

A pair and a chunk of `rows` take as much as full logits of rows + D rows. So where there are no more rows than that,
and full logits do not exceed the budget and the pair together, all rows are one chunk, which is faster and as accurate.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Accumulation = Literal["direct", "pair", "float32", "compact"]

_DEFAULT_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_DEFAULT_ROWS = {"cpu": 64, "cuda": 1024}
_ROW_ALIGNMENT = 16  # bytes: cuBLAS takes its fast kernels for rows that start at multiples of it
_TILE_ROWS = 128


class Plan(NamedTuple):
    """`rows` of logits at a time, `stride` elements from one to the next."""

    rows: int
    stride: int
    accumulation: Accumulation


def make_plan(
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device_type: str,
    need_weight_grad: bool,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan for (rows, features) input and (classes, features) linear_weight, both of `dtype`.

    `gradient_dtype` is float32 where a float16 gradient is wanted before it is normalised, else `dtype`.
    """
    elements = _ROW_ALIGNMENT // dtype.itemsize
    stride = -(-classes // elements) * elements
    fitting = _rows_within(memory_budget, stride * dtype.itemsize, device_type)
    accumulation = _accumulation(dtype, accumulate_dtype) if need_weight_grad else "direct"
    if accumulation == "pair" and rows <= fitting + features:
        fitting = rows
    if rows <= fitting:
        return Plan(max(rows, 1), stride, "direct" if gradient_dtype == dtype else "float32")
    return Plan(_even_chunks(rows, fitting), stride, accumulation)


def _rows_within(memory_budget: int | None, row_bytes: int, device_type: str) -> int:
    if memory_budget is not None:
        fitting = max(memory_budget // row_bytes, 1)
    else:
        device_type = device_type if device_type in _DEFAULT_BYTES else "cuda"
        fitting = max(_DEFAULT_BYTES[device_type] // row_bytes, _DEFAULT_ROWS[device_type])
    return fitting // _TILE_ROWS * _TILE_ROWS if fitting > _TILE_ROWS else fitting


def _even_chunks(rows: int, fitting: int) -> int:
    """As few chunks as with `fitting` rows each, but none much shorter than the others."""
    chunks = -(-rows // fitting)
    even = -(-rows // chunks)
    if fitting % _TILE_ROWS == 0:
        even = -(-even // _TILE_ROWS) * _TILE_ROWS
    return even


def _accumulation(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> Accumulation:
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate_dtype == torch.float32):
        return "float32"
    if dtype == torch.bfloat16:
        return "compact" if accumulate_dtype == torch.bfloat16 else "pair"
    return "direct"
