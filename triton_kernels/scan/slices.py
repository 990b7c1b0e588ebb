"""What goes on beyond the head of a slice of time: distributed/scan/head.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import device_of, on_device

BLOCK = 1024
PROGRAMS = 8  # for every multiprocessor


@triton.jit
def add_rows(
    any_ptr, y_ptr, carry_ptr, elements, slice_elements, first, steps, inner,
    SIGN: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (outer, ., inner) += carry (outer, inner)·SIGN**k, in the k-th of the `steps` from `first` on."""
    if tl.load(any_ptr) != 0:
        lanes = tl.arange(0, BLOCK).to(tl.int64)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < elements:
            index = start + lanes
            is_inside = index < elements
            outer = index // (steps * inner)
            rest = index % (steps * inner)
            step = rest // inner
            offset = outer * slice_elements + first + rest
            carry = tl.load(carry_ptr + outer * inner + rest % inner, mask=is_inside, other=0.0)
            k = steps - 1 - step if REVERSE else step
            if SIGN < 0:
                carry = tl.where(k % 2 == 1, -carry, carry)
            is_number = (carry - carry) == 0
            y = tl.load(y_ptr + offset, mask=is_inside & (is_number == 0), other=0.0)
            tl.store(y_ptr + offset, y + carry, mask=is_inside & (is_number == 0))
            start += tl.num_programs(0).to(tl.int64) * BLOCK


def add_what_is_not_finite_(
    y: Tensor, start: int, steps: int, carry: Tensor, dim: int, sign: int, reverse: bool
) -> None:
    """To the `steps` from `start` on of a contiguous y; carry has y's shape without `dim`, and nothing waits for it."""
    inner = y.stride(dim)
    outer = y.numel() // max(inner * y.size(dim), 1)
    elements = outer * steps * inner
    if elements == 0:
        return
    is_any = carry.isfinite().logical_not().any().to(torch.int32)
    grid = min(triton.cdiv(elements, BLOCK), PROGRAMS * device_of(y).multiprocessors)
    with on_device(y):
        add_rows[(grid,)](
            is_any, y, carry.contiguous(), elements, y.size(dim) * inner, start * inner, steps, inner, SIGN=sign,
            REVERSE=reverse, BLOCK=BLOCK,
        )  # fmt: skip
