"""softmax along any dimension, and its gradient: `softmax`, `softmax_backward`.

A program takes a tile of lines. Where it holds their whole length (32768 elements), they are read and written once;
longer ones are read twice, a block at a time, the sum raised to each new maximum by one factor (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018, algorithm 3). A tensor is (outer, length, inner), contiguous: without
inner dimensions a tile is (lines, steps), else (steps, columns), so that neighbors in memory are neighbors in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common.launch import on_device

LARGEST_TILE = 32768  # elements of a line that a program holds; 65536 spill
LOOP_TILE = 8192  # elements of a block of a longer line
COLUMN_TILE = 16384  # elements of a tile of columns
COLUMNS = 32  # of it, at most


@triton.jit
def lines_of_tile(length, inner, outer, LINES: tl.constexpr, AXIS: tl.constexpr):
    """Where the program's lines begin, and which of them exist; in the shape that broadcasts against a tile."""
    lanes = tl.arange(0, LINES)
    program = tl.program_id(0).to(tl.int64)
    # One return: Triton wants all of a function's to be of one type.
    if AXIS == 1:
        line = program * LINES + lanes
        begin, exists = (line * length)[:, None], (line < outer)[:, None]
    else:
        tiles = tl.cdiv(inner, LINES)
        column = program % tiles * LINES + lanes
        begin, exists = (program // tiles * length * inner + column)[None, :], (column < inner)[None, :]
    return begin, exists


@triton.jit
def steps_of_tile(start, inner, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """The steps of a tile, and how far they are from the begin of their line."""
    step = start + tl.arange(0, STEPS)
    if AXIS == 1:
        step = step[None, :]
        distance = step
    else:
        step = step[:, None]
        distance = step.to(tl.int64) * inner
    return step, distance


@triton.jit
def largest(x, LOWEST: tl.constexpr, AXIS: tl.constexpr):
    # At least the lowest finite number: -inf beside it is a power of 0, not NaN. A NaN is dropped, the sum has it.
    return tl.maximum(tl.max(x, AXIS, keep_dims=True), LOWEST)


@triton.jit
def softmax_resident(
    input_ptr, output_ptr, length, inner, outer,
    LINES: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    begin, exists = lines_of_tile(length, inner, outer, LINES, AXIS)
    step, distance = steps_of_tile(0, inner, STEPS, AXIS)
    inside = exists & (step < length)
    x = tl.load(input_ptr + begin + distance, mask=inside, other=float("-inf")).to(ACC)
    powers = tl.exp(x - largest(x, LOWEST, AXIS))
    y = powers / tl.sum(powers, AXIS, keep_dims=True)
    tl.store(output_ptr + begin + distance, y.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_resident(
    grad_ptr, saved_ptr, output_ptr, length, inner, outer,
    LINES: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    begin, exists = lines_of_tile(length, inner, outer, LINES, AXIS)
    step, distance = steps_of_tile(0, inner, STEPS, AXIS)
    inside = exists & (step < length)
    g = tl.load(grad_ptr + begin + distance, mask=inside, other=0).to(ACC)
    y = tl.load(saved_ptr + begin + distance, mask=inside, other=0).to(ACC)
    result = (g - tl.sum(g * y, AXIS, keep_dims=True)) * y
    tl.store(output_ptr + begin + distance, result.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_looped(
    input_ptr, output_ptr, length, inner, outer,
    LINES: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    begin, exists = lines_of_tile(length, inner, outer, LINES, AXIS)
    if AXIS == 1:
        top = tl.full((LINES, 1), LOWEST, ACC)
        total = tl.zeros((LINES, 1), ACC)
    else:
        top = tl.full((1, LINES), LOWEST, ACC)
        total = tl.zeros((1, LINES), ACC)
    for start in range(0, length, STEPS):
        step, distance = steps_of_tile(start, inner, STEPS, AXIS)
        x = tl.load(input_ptr + begin + distance, mask=exists & (step < length), other=float("-inf")).to(ACC)
        raised = tl.maximum(top, largest(x, LOWEST, AXIS))
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(x - raised), AXIS, keep_dims=True)
        top = raised
    for start in range(0, length, STEPS):
        step, distance = steps_of_tile(start, inner, STEPS, AXIS)
        inside = exists & (step < length)
        x = tl.load(input_ptr + begin + distance, mask=inside, other=float("-inf")).to(ACC)
        y = tl.exp(x - top) / total
        tl.store(output_ptr + begin + distance, y.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_looped(
    grad_ptr, saved_ptr, output_ptr, length, inner, outer,
    LINES: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    begin, exists = lines_of_tile(length, inner, outer, LINES, AXIS)
    if AXIS == 1:
        total = tl.zeros((LINES, 1), ACC)
    else:
        total = tl.zeros((1, LINES), ACC)
    for start in range(0, length, STEPS):
        step, distance = steps_of_tile(start, inner, STEPS, AXIS)
        inside = exists & (step < length)
        g = tl.load(grad_ptr + begin + distance, mask=inside, other=0).to(ACC)
        y = tl.load(saved_ptr + begin + distance, mask=inside, other=0).to(ACC)
        total += tl.sum(g * y, AXIS, keep_dims=True)
    for start in range(0, length, STEPS):
        step, distance = steps_of_tile(start, inner, STEPS, AXIS)
        inside = exists & (step < length)
        g = tl.load(grad_ptr + begin + distance, mask=inside, other=0).to(ACC)
        y = tl.load(saved_ptr + begin + distance, mask=inside, other=0).to(ACC)
        result = (g - total) * y
        tl.store(output_ptr + begin + distance, result.to(output_ptr.dtype.element_ty), mask=inside)


def softmax(input: Tensor, dim: int) -> Tensor:
    """The meaning of ``dcs::softmax``; `dim` is not negative."""
    output = torch.empty_like(input)
    if output.numel():
        _launch(softmax_resident, softmax_looped, output, dim, _in_layout_of(output, input))
    return output


def softmax_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """The meaning of ``dcs::_softmax_backward``; `dim` is not negative."""
    grad_input = torch.empty_like(output)
    if grad_input.numel():
        operands = (_in_layout_of(grad_input, grad), _in_layout_of(grad_input, output))
        _launch(softmax_backward_resident, softmax_backward_looped, grad_input, dim, *operands)
    return grad_input


def _in_layout_of(result: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, with the strides of `result`, which has no holes."""
    strides = zip(tensor.shape, tensor.stride(), result.stride(), strict=True)
    if all(size == 1 or own == other for size, own, other in strides):
        return tensor
    return torch.empty_like(result).copy_(tensor)


def _launch(
    resident: triton.JITFunction, looped: triton.JITFunction, result: Tensor, dim: int, *operands: Tensor
) -> None:
    has_line = result.dim() > 0 and result.size(dim) > 1
    length, inner = (result.size(dim), result.stride(dim)) if has_line else (1, 1)
    outer = result.numel() // (length * inner)
    steps = triton.next_power_of_2(length)
    if inner == 1:
        axis, holds = 1, steps <= LARGEST_TILE
        steps = steps if holds else LOOP_TILE
        lines = max(1, min(2048 // steps, triton.next_power_of_2(outer)))
        programs = triton.cdiv(outer, lines)
    else:
        axis, lines = 0, min(triton.next_power_of_2(inner), COLUMNS)
        holds = steps * lines <= COLUMN_TILE
        steps = steps if holds else COLUMN_TILE // (4 * lines)
        programs = outer * triton.cdiv(inner, lines)
    wide = result.dtype == torch.float64
    with on_device(result):
        (resident if holds else looped)[(programs,)](
            *operands, result, length, inner, outer, LINES=lines, STEPS=steps, AXIS=axis,
            ACC=tl.float64 if wide else tl.float32, LOWEST=torch.finfo(torch.float64 if wide else torch.float32).min,
            num_warps=max(1, min(32 if holds else 16, lines * steps // 512)),
        )  # fmt: skip
