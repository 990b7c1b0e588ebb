"""The divergence of two heads of which there are only some classes; the meanings of the reference's functions.

A program takes a row of both: what these classes alone make of it, or, where what all classes make of it is
known, their part of the sums or their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import float_bits, on_device
from .kl_div import DIRECTIONS, LARGEST_BLOCK, LN_2, LOG2_E, THREADS, compare, head_bits, normalizers
from .rows import from_bits

if TYPE_CHECKING:
    from torch_dcs_ops.reference.linear_cross_entropy.kl_rows import KlRows

COLUMNS = 6


@triton.jit(
    do_not_specialize=[
        "valid_stride", "grad_stride", "scale_bits", "softcap_bits", "teacher_scale_bits", "teacher_softcap_bits",
        "beta_bits",
    ]
)  # fmt: skip
def kl_slices(
    logits_ptr, stride, teacher_ptr, teacher_stride, bias_ptr, teacher_bias_ptr, valid_ptr, valid_stride, grad_ptr,
    grad_stride, known_ptr, known_stride, found_ptr, found_stride, V, scale_bits: tl.int64, softcap_bits: tl.int64,
    teacher_scale_bits: tl.int64, teacher_softcap_bits: tl.int64, beta_bits: tl.int64,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TEACHER_BIAS: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, MASKED: tl.constexpr, DIRECTION: tl.constexpr, KNOWN: tl.constexpr,
    SUM: tl.constexpr, STUDENT: tl.constexpr, TEACHER: tl.constexpr,
):  # fmt: skip
    """KNOWN: the normalizers are read from known_ptr, else they are found and written; so are the sums with SUM."""
    index_of_row = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index_of_row * stride
    teacher_row = teacher_ptr + index_of_row * teacher_stride
    scale, softcap = from_bits(scale_bits).to(ACC), from_bits(softcap_bits).to(ACC)
    teacher_scale, teacher_softcap = from_bits(teacher_scale_bits).to(ACC), from_bits(teacher_softcap_bits).to(ACC)
    beta = from_bits(beta_bits).to(ACC)
    lanes = tl.arange(0, BLOCK)
    valid = index_of_row >= 0
    if MASKED:
        valid = tl.load(valid_ptr + index_of_row * valid_stride) != 0
    known = known_ptr + index_of_row
    found = found_ptr + index_of_row
    columns = tl.where(valid, V, 0)
    grad = tl.full((), 0.0, ACC)
    teacher_grad = grad
    mean = grad
    teacher_mean = grad
    # What is told of rows are natural logarithms; the passes have those of base 2.
    if KNOWN:
        largest = tl.load(known)
        log_total = tl.load(known + known_stride) * LOG2_E
        teacher_largest = tl.load(known + 2 * known_stride)
        teacher_log_total = tl.load(known + 3 * known_stride) * LOG2_E
        if STUDENT or TEACHER:
            mean = tl.load(known + 4 * known_stride) * LOG2_E
            teacher_mean = tl.load(known + 5 * known_stride) * LOG2_E
    else:
        largest, log_total, teacher_largest, teacher_log_total = normalizers(
            row, teacher_row, bias_ptr, teacher_bias_ptr, lanes, columns, V, scale, softcap, teacher_scale,
            teacher_softcap, BLOCK, ACC, BIAS, CAPPED, TEACHER_BIAS, TEACHER_CAPPED,
        )  # fmt: skip
        tl.store(found, largest)
        tl.store(found + found_stride, log_total * LN_2)
        tl.store(found + 2 * found_stride, teacher_largest)
        tl.store(found + 3 * found_stride, teacher_log_total * LN_2)
    if SUM or STUDENT or TEACHER:
        if STUDENT or TEACHER:
            columns = tl.zeros_like(columns) + V
            # As in kl_rows: a gradient is a weight times a difference of logarithms, or a difference of weights.
            grad = tl.load(grad_ptr + index_of_row * grad_stride)
            teacher_grad = grad
            if DIRECTION == 2:
                grad *= 1 - beta
                teacher_grad *= beta
            if DIRECTION != 0:
                grad *= LN_2
            if DIRECTION != 1:
                teacher_grad *= LN_2
        sums, teacher_sums = compare(
            row, teacher_row, row, bias_ptr, teacher_bias_ptr, lanes, columns, valid, V, scale, softcap, teacher_scale,
            teacher_softcap, largest, log_total, teacher_largest, teacher_log_total, beta, mean, teacher_mean, grad,
            teacher_grad, index_of_row, row, row, 0, 1, 0, 0, 0, 0, 0, BLOCK, ACC, BIAS, CAPPED, TEACHER_BIAS,
            TEACHER_CAPPED, DIRECTION, SUM, False, STUDENT, TEACHER, False, 1,
        )  # fmt: skip
        if SUM:
            tl.store(found + 4 * found_stride, sums * LN_2)
            tl.store(found + 5 * found_stride, teacher_sums * LN_2)


def statistics(call: KlRows) -> Tensor:
    found = call.grad.new_zeros((COLUMNS, call.student.logits.size(0)))
    _launch(call, None, found, sums=call.direction != "jsd", gradients=False)
    return found


def mixture_sums(call: KlRows, known: Tensor) -> Tensor:
    found = call.grad.new_zeros((COLUMNS, call.student.logits.size(0)))
    _launch(call, known, found, sums=True, gradients=False)
    return found[4:]


def gradients_(call: KlRows, known: Tensor) -> None:
    _launch(call, known, known, sums=False, gradients=True)


def _launch(call: KlRows, known: Tensor | None, found: Tensor, *, sums: bool, gradients: bool) -> None:
    student, teacher, grad, valid = call.student, call.teacher, call.grad, call.valid
    count, classes = student.logits.shape
    if count == 0:
        return
    is_double = grad.dtype == torch.float64
    block = min(triton.next_power_of_2(classes), LARGEST_BLOCK // 2 if is_double else LARGEST_BLOCK)
    given = found if known is None else known
    assert given.stride(1) == found.stride(1) == 1
    with on_device(grad):
        kl_slices[(count,)](
            student.logits, student.logits.stride(0), teacher.logits, teacher.logits.stride(0),
            # Where a flag says that there is none, any tensor stands for it.
            *(grad if head.linear_bias is None else head.linear_bias for head in (student, teacher)),
            grad if valid is None else valid.view(torch.uint8), 0 if valid is None else valid.stride(0),
            grad, 0 if grad.numel() == 1 else grad.stride(0), given, given.stride(0), found, found.stride(0), classes,
            *head_bits(student, call.temperature), *head_bits(teacher, call.temperature), float_bits(call.beta),
            BLOCK=block, ACC=tl.float64 if is_double else tl.float32,
            BIAS=student.linear_bias is not None, CAPPED=student.softcap is not None,
            TEACHER_BIAS=teacher.linear_bias is not None, TEACHER_CAPPED=teacher.softcap is not None,
            MASKED=valid is not None, DIRECTION=DIRECTIONS[call.direction], KNOWN=known is not None, SUM=sums,
            STUDENT=gradients and student.gradient, TEACHER=gradients and teacher.gradient,
            num_warps=max(1, min(THREADS, block // 8) // 32),
        )  # fmt: skip
