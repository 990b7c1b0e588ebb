"""The tails of filtered gradients on the GPU: groups of 32 rows share theirs, single rows keep their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cross_entropy_rows import capped
from .launch import WORD, on_device, units

WARPS = 4


@triton.jit
def probabilities(
    logits, bias, lse, scale, softcap, BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """p and p·s."""
    z = logits.to(tl.float32)
    if BIAS:
        z += bias
    if SCALED:
        z *= scale
    slope = 1.0
    if CAPPED:
        z, slope = capped(z, softcap, tl.float32)
    p = tl.exp(z - lse)
    sloped = p
    if CAPPED:
        sloped = p * slope
    return p, sloped


@triton.jit(do_not_specialize=["chunk_groups"])
def part_group(
    q_ptr, q_stride, single_ptr, single_stride, bounds_ptr, lse_ptr, valid_ptr, bias_ptr, alive_ptr, parts_ptr,
    chunk_groups, V, softcap, scale,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A block of columns of one group and of its single rows; parts (G + S, blocks): the sums of each."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    inside = index < V
    # A NaN's column is alive: none comes into a tail.
    tail = tl.load(alive_ptr + group // chunk_groups * V + index, mask=inside, other=1) == 0
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + index, mask=inside, other=0)
    q = q_ptr + group * (q_stride * UNIT) + index
    total = tl.where(tail, tl.load(q, mask=inside, other=0).to(tl.float32), 0.0)
    for number in range(tl.load(bounds_ptr + group), tl.load(bounds_ptr + group + 1)):
        place = single_ptr + number * (single_stride * UNIT) + index
        logits = tl.load(place, mask=inside, other=0)
        _, sloped = probabilities(logits, bias, tl.load(lse_ptr + number), scale, softcap, BIAS, SCALED, CAPPED)
        mine = tl.where(tail & (tl.load(valid_ptr + number) != 0), sloped, 0.0).to(logits.dtype)
        tl.store(place, mine, mask=inside)
        mine = mine.to(tl.float32)
        at = (tl.num_programs(1) + number) * tl.num_programs(0) + tl.program_id(0)
        tl.store(parts_ptr + at, tl.sum(mine, 0))
        total -= mine
    total = tl.maximum(total, 0.0).to(q_ptr.dtype.element_ty)
    tl.store(q, total, mask=inside)
    tl.store(parts_ptr + group * tl.num_programs(0) + tl.program_id(0), tl.sum(total.to(tl.float32), 0))


def share_tails(
    q: Tensor,
    single: Tensor,
    bounds: Tensor,
    lse: Tensor,
    valid: Tensor,
    alive: Tensor,
    chunk_groups: int,
    linear_bias: Tensor | None,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """(G + S,) float32: the sums of the tails that q (G, V) of groups, and `single` (S, V), logits of rows, become.

    A tail has the columns that are not alive (C, V) in the group's chunk, one in `chunk_groups` groups. The rows
    bounds[g]:bounds[g + 1] of `single` are of group g, whose q is without them then; lse and valid are theirs (S,).
    """
    groups, classes = q.shape
    block = WARPS * 32 * WORD // q.element_size()
    parts = q.new_empty((groups + single.size(0), triton.cdiv(classes, block)), dtype=torch.float32)
    if groups == 0:
        return parts.sum(1)
    q_stride, single_stride, unit = units(q.stride(0), single.stride(0))
    with on_device(q):
        part_group[(parts.size(1), groups)](
            q, q_stride, single, single_stride, bounds, lse, valid, lse if linear_bias is None else linear_bias,
            alive, parts, chunk_groups, classes, softcap if softcap > 0 else 1.0, logit_scale,
            UNIT=unit, BLOCK=block, BIAS=linear_bias is not None, SCALED=logit_scale != 1.0, CAPPED=softcap > 0,
            num_warps=WARPS,
        )  # fmt: skip
    return parts.sum(1)
