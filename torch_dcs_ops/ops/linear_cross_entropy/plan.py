"""How many rows of logits are held at a time, and how linear_weight's gradient is summed over those chunks.

The memory of a call, beyond its results, is the logits' buffer (rows · V elements of input's dtype: the gradient of
the logits takes their place) and what the sum over the chunks needs. `memory_budget` is the size of that buffer in
bytes; as many rows as fit into it are taken at a time, one at least. The default is 256 MiB on a GPU, and 1024 rows if
those take more; 32 MiB and 64 rows on a CPU. A GEMM over fewer rows runs below a GPU's speed. The compact sum, which
needs nothing beside the result and reads and writes it with every chunk, has twice that, and on a GPU 2048 rows if D is
as much, so that the logits take no more than the result. So many rows has a forward without gradients on a GPU, which
holds nothing else, and so have log-probabilities, policies and divergences, for the sake of time: 2 to 5 % of a call
that finds the GPU idle (V = 131072, D = 4096, an H200); each of a divergence's two heads has its own. The float32 sum
does so in four bytes an element, which with 1024 rows is a quarter of all GEMMs' time. On a GPU its chunks have up to
2·D rows, but no more than, with the half of the sum beside the result (as much as D rows of logits), make 6144; and
three quarters of that where there are more than four of them, as input's gradient is large then too: for D = 4096 0.13
GiB less, for 1 to 3 % of the GEMMs' time.

How linear_weight's gradient (V·D elements) is summed, where it is needed:

========  ====================================================================================  ======================
direct    one GEMM (a single chunk), or GEMMs that add to the result (float32 and float64)      nothing
shared    half: the gradient of all logits is kept by slices of the vocabulary, partly in the   2·V·max(N - D, 0)
          result's own memory; one GEMM over all rows, a single rounding                        bytes, and for a slice
                                                                                                64 MiB, or up to twice
                                                                                                or 1 + N/D times that
float32   half: GEMMs that add to a float32 sum, half of which is in the result's memory.       2·V·D bytes
          float16 because 1/N and sums over rows leave its range: in forward the result itself  (nothing)
          is float32, until the gradient of the loss is known
compact   bfloat16, by name: GEMMs that add to the bfloat16 result, rounded after every chunk   nothing
========  ====================================================================================  ======================

Logits that are float32 by name, of half-precision operands, take four bytes each in that buffer, and two more for their
gradient, which is multiplied in the operands' dtype; chunks are of as many rows fewer.

Where ignored rows are left out (valid_rows.py), the rows are the valid ones on a CPU, and all of them on CUDA.

A budget of rows that covers all of them is a single chunk. Beyond it, what a half-precision gradient costs beside its
GEMMs is traffic: "shared" copies the gradient of the logits once (4 bytes an element of N·V; 2 on a GPU, whose row
kernel writes it twice); "float32" reads and writes a float32 sum with every chunk (8 bytes an element of V·D), which
for chunks of R rows at N = 2·D is 2·D/R times as much. So "shared" is taken as long as it needs
at most a tenth more memory, which is up to about 2.2·D rows. Where no budget is given, a single chunk of up to a
quarter more bytes than these saves that copy too.

A filtered gradient (`grad_filter_eps`) has chunks of a multiple of 32 rows, 32 at least whatever the budget says, and
on a GPU of 128 rows if so many fit: these are the groups that share their tails. Its products add to the rows of a
chunk's kept columns in the result. Where that would round a half-precision result more than once, over several chunks
and without the compact plan's name, the rest that its rounding leaves out is kept beside it in its own dtype: 2·V·D
bytes. Beyond the logits it holds, for every group and for every 32 rows of a segment, V elements of input's dtype and D
of them for linear_weight's gradient; a segment is the chunks that fit into 8192 rows, one at least. A CPU copies what a
chunk keeps of linear_weight.

A graph that is compiled with its backward saves the gradient of all logits for it instead, where `memory_budget` has
room for them (`prefers_saved_gradient`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Accumulation = Literal["direct", "shared", "float32", "compact"]

_DEFAULT_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_DEFAULT_ROWS = {"cpu": 64, "cuda": 1024}
_COMPACT_TIMES = 2
_SUMMED_ROWS = 6144  # on a GPU: 1.5 GiB at 128256 classes
_MANY_CHUNKS = 4
_ROW_ALIGNMENT = 16  # bytes: cuBLAS takes its fast kernels for rows that start at multiples of it
_TILE_ROWS = 128
_LARGE_ROWS = 2048  # of a chunk on a GPU whose GEMMs have no larger sums beside it
# Sharing by 128 rows errs by 15 % more than by 32, which exact tails for more rows make up for at less cost on a GPU.
_GROUP_ROWS = {"cpu": 32, "cuda": 128}
_LEAST_GROUP_ROWS = 32
_MOST_FILTERED_ROWS = 1 << 20  # groups of them are a dimension of a grid
_SHARED_BYTES = 1.1  # times those of "float32": worth its traffic
_SINGLE_BYTES = 1.25  # times those of the other two: worth no copy


class Plan(NamedTuple):
    """`rows` of logits at a time, `stride` elements from one to the next."""

    rows: int
    stride: int
    accumulation: Accumulation


class FilteredPlan(NamedTuple):
    """`rows` and `stride` as in `Plan`; `keeps_rest`: whether what linear_weight's gradient loses is kept beside it.

    `group_rows`: so many successive rows share their tails; chunks are multiples of it, but for a single one.
    """

    rows: int
    stride: int
    keeps_rest: bool
    group_rows: int


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
    is_forward: bool = False,
    logits_dtype: torch.dtype | None = None,
    is_fast: bool = False,
) -> Plan:
    """The plan for (rows, features) input and (classes, features) linear_weight, both of `dtype`.

    `gradient_dtype` is float32 where a float16 gradient is wanted before it is normalized, else `dtype`;
    `is_forward`: no gradient is wanted; `logits_dtype`: None is `dtype`; `is_fast`: a GPU's chunks are as a forward's
    in any case, how they are summed is as without.
    """
    stride = _stride(classes, dtype)
    times_bytes = _bytes_of_logits(dtype, logits_dtype, is_forward) // dtype.itemsize
    single: Accumulation = "direct" if gradient_dtype == dtype else "float32"
    accumulation = _accumulation(dtype, accumulate_dtype) if need_weight_grad else "direct"
    times, least = 1, 0
    if accumulation == "compact":
        times, least = _COMPACT_TIMES, min(_LARGE_ROWS, features)
    elif is_forward:
        least = _LARGE_ROWS
    fitting = _rows_within(memory_budget, stride * dtype.itemsize * times_bytes, device_type, times, least)
    if rows <= fitting:
        return Plan(max(rows, 1), stride, single)
    chunk = _even_chunks(rows, fitting)
    if accumulation == "float32":
        # In rows of logits, each as much as 1/D of a half-precision result.
        result = features * gradient_dtype.itemsize // dtype.itemsize
        held = chunk * times_bytes
        shared, summed = max(rows, result) + held, 2 * features + held
        if memory_budget is None and rows * times_bytes + result <= _SINGLE_BYTES * min(shared, summed):
            return Plan(rows, stride, single)
        if shared <= _SHARED_BYTES * summed:
            accumulation = "shared"
        elif memory_budget is None and device_type != "cpu":
            summed = min(_SUMMED_ROWS - features, 2 * features)
            if rows > _MANY_CHUNKS * summed:
                summed = summed * 3 // 4
            fitting = max(fitting, summed // times_bytes // _TILE_ROWS * _TILE_ROWS)
            if rows <= fitting:
                return Plan(rows, stride, single)
            chunk = _even_chunks(rows, fitting)
    if is_fast and memory_budget is None and device_type != "cpu" and fitting < _LARGE_ROWS // times_bytes:
        fitting = _LARGE_ROWS // times_bytes
        if rows <= fitting:
            return Plan(rows, stride, single)
        chunk = _even_chunks(rows, fitting)
    return Plan(chunk, stride, accumulation)


def _bytes_of_logits(dtype: torch.dtype, logits_dtype: torch.dtype | None, is_forward: bool) -> int:
    """Each, where they are of another dtype than the operands with their gradient in the operands' beside them."""
    if logits_dtype in (None, dtype):
        return dtype.itemsize
    return logits_dtype.itemsize + (0 if is_forward else dtype.itemsize)


def single_chunk(rows: int, classes: int, dtype: torch.dtype) -> Plan:
    """All rows at a time."""
    return Plan(max(rows, 1), _stride(classes, dtype), "direct")


def prefers_saved_gradient(rows: int, features: int, plan: Plan) -> bool:
    """Whether a compiled graph with room for all logits saves their gradient for its backward.

    That is where `plan`, made without a budget, would add to a float32 sum, and hold as much with a chunk of logits,
    the result included. The gradient of the logits stays until the backward, in which the compiler may form
    linear_weight's last, when what the layers hold is free again; several losses whose backward is one hold that many.
    """
    return plan.accumulation == "float32" and rows <= 2 * features + plan.rows


def make_filtered_plan(
    rows: int,
    classes: int,
    dtype: torch.dtype,
    device_type: str,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
) -> FilteredPlan:
    """`make_plan` for a filtered gradient."""
    stride = _stride(classes, dtype)
    fitting = _rows_within(memory_budget, stride * dtype.itemsize, device_type)
    group = _GROUP_ROWS[device_type if device_type in _GROUP_ROWS else "cuda"]
    if fitting < group:
        group = _LEAST_GROUP_ROWS
    fitting = min(max(fitting // group * group, group), _MOST_FILTERED_ROWS)
    if rows <= fitting:
        return FilteredPlan(max(rows, 1), stride, False, group)
    is_lossy = _accumulation(dtype, accumulate_dtype) == "float32"
    return FilteredPlan(_even_chunks(rows, fitting, group), stride, is_lossy, group)


def with_padding(room: Tensor, columns: int) -> Tensor:
    """The first columns of uninitialized `room`, whose rows are longer than that for the sake of alignment.

    On a CPU the rest is set to 0: with AMX, products of bfloat16 (oneDNN in torch 2.13) take what lies between an
    operand's rows times 0, and a NaN there would become one of the result.
    """
    if not room.is_cuda and room.size(1) > columns:
        room[:, columns:] = 0
    return room[:, :columns]


def _stride(classes: int, dtype: torch.dtype) -> int:
    elements = _ROW_ALIGNMENT // dtype.itemsize
    return -(-classes // elements) * elements


def _rows_within(
    memory_budget: int | None, row_bytes: int, device_type: str, times: int = 1, least_on_gpu: int = 0
) -> int:
    """`times`: of the default."""
    if memory_budget is not None:
        fitting = max(memory_budget // row_bytes, 1)
    else:
        device_type = device_type if device_type in _DEFAULT_BYTES else "cuda"
        least = _DEFAULT_ROWS[device_type] if device_type == "cpu" else max(_DEFAULT_ROWS[device_type], least_on_gpu)
        fitting = max(times * _DEFAULT_BYTES[device_type] // row_bytes, least)
    return fitting // _TILE_ROWS * _TILE_ROWS if fitting > _TILE_ROWS else fitting


def _even_chunks(rows: int, fitting: int, multiple: int = 1) -> int:
    """As few chunks as with `fitting` rows each, but none much shorter than the others."""
    chunks = -(-rows // fitting)
    even = -(-rows // chunks)
    multiple = _TILE_ROWS if fitting % _TILE_ROWS == 0 else multiple
    return -(-even // multiple) * multiple


def _accumulation(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> Accumulation:
    if dtype not in (torch.float16, torch.bfloat16):
        return "direct"
    return "compact" if dtype == accumulate_dtype == torch.bfloat16 else "float32"
