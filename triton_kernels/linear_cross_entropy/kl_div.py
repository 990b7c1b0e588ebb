"""The divergence of rows of two heads' logits, and its gradients in the logits' place: `kl_rows_`.

A program takes a row of both. One pass over their blocks finds the normalizers of both softmaxes, another the
divergence from the log-probabilities, as differences of those lose nothing to what the heads' logits have in common.
A gradient that is p - q is written in that pass too; one that needs the row's divergence, in a third. That of "jsd"
finds the logarithms of the second pass in the place of the teacher's logits, if nobody wants a gradient there.

Powers and logarithms are of base 2, which is what a GPU has: exp takes five instructions an element, exp2 one, and log
25. Sums of log2 become natural ones where they leave.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import float_bits, on_device
from .rows import from_bits
from .values import load_values

if TYPE_CHECKING:
    from torch_dcs_ops.reference.linear_cross_entropy.kl_rows import HeadRows, KlRows

# Elements of a block: 16 of each head a thread, 89 registers, and so five programs on a multiprocessor of an H200.
LARGEST_BLOCK = 2048
THREADS = 128
VECTOR = 8  # elements of a half-precision vector, to whose multiples rows of slices are padded
DIRECTIONS = {"forward": 0, "reverse": 1, "jsd": 2}
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
LEAST_KEPT = tl.constexpr(-60000.0)  # of a logarithm in float16, whose power is 0 long before


@triton.jit
def log2_of(x, ACC: tl.constexpr):
    """log2 of x > 0 that is not denormal: to 5e-8 in float32, to 1e-7 of the result beside 1."""
    if ACC == tl.float64:  # noqa: SIM300
        found = tl.log2(x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        # x = 2**k·(1 + f) with 1 + f from sqrt(1/2) to sqrt(2).
        raised = (bits - 0x3F3504F3) & -0x800000
        f = (bits - raised).to(tl.float32, bitcast=True) - 1
        # The minimax polynomial of log2(1 + f) / f, weighted by f.
        tail = 0.12542646876413022 * f - 0.210289271442838
        tail = tail * f + 0.21736604334365373
        tail = tail * f - 0.2385212727096978
        tail = tail * f + 0.28765873111291995
        tail = tail * f - 0.3607211329703906
        tail = tail * f + 0.4809224235334642
        tail = tail * f - 0.7213471289631657
        tail = tail * f + 1.442694870112999
        found = tail * f + (raised >> 23).to(tl.float32)
    return found


@triton.jit
def raised_by(z, largest, totals):
    """The largest value so far with a block z, and the lanes' sums of exp(z - largest)."""
    block_largest = tl.max(z, 0)
    # A NaN does not count: the sum of powers has it.
    raised = tl.where(block_largest > largest, block_largest, largest)
    shrink = tl.exp2((largest - raised) * LOG2_E)
    return raised, totals * shrink + tl.exp2((z - raised) * LOG2_E)


@triton.jit
def normalizers(
    row, teacher_row, bias_ptr, teacher_bias_ptr, lanes, columns, V, scale, softcap, teacher_scale, teacher_softcap,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TEACHER_BIAS: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr,
):  # fmt: skip
    """Of both softmaxes the largest value, and log2 of the sum of powers relative to it."""
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    largest = tl.full((), LOWEST, ACC)
    teacher_largest = largest
    totals = tl.zeros((BLOCK,), ACC)
    teacher_totals = totals
    for start in range(0, columns, BLOCK):
        index = start + lanes
        z, _ = load_values(row, bias_ptr, index, V, scale, softcap, ACC, BIAS, True, CAPPED)
        teacher, _ = load_values(
            teacher_row, teacher_bias_ptr, index, V, teacher_scale, teacher_softcap, ACC, TEACHER_BIAS, True,
            TEACHER_CAPPED,
        )  # fmt: skip
        largest, totals = raised_by(z, largest, totals)
        teacher_largest, teacher_totals = raised_by(teacher, teacher_largest, teacher_totals)
    return largest, tl.log2(tl.sum(totals, 0)), teacher_largest, tl.log2(tl.sum(teacher_totals, 0))


@triton.jit
def log_ratios(log_p, log_q, beta, ACC: tl.constexpr, DIRECTION: tl.constexpr):
    """log2 p and log2 q less that of what each is compared with; 0 where that has no weight."""
    away = log_p - log_q
    of_p = away
    of_q = -away
    if DIRECTION == 2:
        # With e = 2**-|log2 p - log2 q|: the mixture relative to the larger one.
        of_smaller = tl.where(away > 0, beta, 1 - beta)
        of_larger = -log2_of(1 - of_smaller * (1 - tl.exp2(-tl.abs(away))), ACC)
        of_p = of_larger + tl.where(away > 0, 0.0, away)
        of_q = of_larger - tl.where(away > 0, away, 0.0)
    return tl.where(log_p == float("-inf"), 0.0, of_p), tl.where(log_q == float("-inf"), 0.0, of_q)


@triton.jit
def save(
    g, start, lanes, row, V, within_ptr, beside_ptr, last, width, apart, inner, rest, last_rest, saved_rows,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """A block of a row's gradient into the slices of linear_weight's, as SavedSlices in csrc/cuda has them."""
    index = start + lanes
    # No block is wider than a slice.
    first = start // width
    slice_index = tl.minimum(first + tl.where(index >= (first + 1) * width, 1, 0), last)
    in_slice = index - slice_index * width
    own = tl.where(slice_index == last, 0, inner)
    row_of_rest = tl.where(slice_index == last, last_rest, rest)
    is_within = tl.max_constancy(in_slice < own, VECTOR)
    inside = index < V
    slice_index = slice_index.to(tl.int64)
    # Whole vectors lie in one slice, and on one side of it.
    at = tl.max_contiguous(tl.multiple_of(slice_index * apart + row * own + in_slice, VECTOR), VECTOR)
    tl.store(within_ptr + at, g, mask=inside & is_within)
    at = slice_index * saved_rows * rest + row * row_of_rest + (in_slice - own)
    at = tl.max_contiguous(tl.multiple_of(at, VECTOR), VECTOR)
    tl.store(beside_ptr + at, g, mask=inside & (is_within == 0))


@triton.jit
def write_row(
    g, grad, slope, valid, start, lanes, row, V, saved_row, within_ptr, beside_ptr, last, width, apart, inner,
    rest, last_rest, saved_rows, SAVED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A block of the student's gradient g, times what it is multiplied by, to where it is stored."""
    g = tl.where(valid, g * grad * slope, 0.0).to(row.dtype.element_ty)
    tl.store(row + start + lanes, g, mask=start + lanes < V)
    if SAVED:
        save(
            g, start, lanes, saved_row, V, within_ptr, beside_ptr, last, width, apart, inner, rest, last_rest,
            saved_rows, VECTOR,
        )  # fmt: skip


@triton.jit
def compare(
    row, teacher_row, kept_row, bias_ptr, teacher_bias_ptr, lanes, columns, valid, V, scale, softcap, teacher_scale,
    teacher_softcap, largest, log_total, teacher_largest, teacher_log_total, beta, mean, teacher_mean, grad,
    teacher_grad, saved_row, within_ptr, beside_ptr, last, width, apart, inner, rest, last_rest, saved_rows,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TEACHER_BIAS: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, DIRECTION: tl.constexpr, SUM: tl.constexpr, KEPT: tl.constexpr,
    STUDENT: tl.constexpr, TEACHER: tl.constexpr, SAVED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """sum p·(log2 p - ·) and sum q·(log2 q - ·), of which DIRECTION has one or both; the gradients that are asked for.

    KEPT: leaves p's logarithms in the place of the teacher's logits.
    """
    sums = tl.zeros((BLOCK,), ACC)
    teacher_sums = sums
    for start in range(0, columns, BLOCK):
        index = start + lanes
        z, slope = load_values(row, bias_ptr, index, V, scale, softcap, ACC, BIAS, True, CAPPED)
        teacher, teacher_slope = load_values(
            teacher_row, teacher_bias_ptr, index, V, teacher_scale, teacher_softcap, ACC, TEACHER_BIAS, True,
            TEACHER_CAPPED,
        )  # fmt: skip
        log_p = (z - largest) * LOG2_E - log_total
        log_q = (teacher - teacher_largest) * LOG2_E - teacher_log_total
        p = tl.exp2(log_p)
        q = tl.exp2(log_q)
        of_p, of_q = log_ratios(log_p, log_q, beta, ACC, DIRECTION)
        if SUM:
            if DIRECTION != 0:
                sums += p * of_p
            if DIRECTION != 1:
                teacher_sums += q * of_q
        if KEPT:
            kept = tl.where(of_p < LEAST_KEPT, LEAST_KEPT, of_p)
            tl.store(kept_row + index, kept.to(kept_row.dtype.element_ty), mask=index < V)
        if STUDENT:
            g = p - q
            if DIRECTION != 0:
                g = p * (of_p - mean)
            write_row(
                g, grad, slope, valid, start, lanes, row, V, saved_row, within_ptr, beside_ptr, last, width, apart,
                inner, rest, last_rest, saved_rows, SAVED, VECTOR,
            )  # fmt: skip
        if TEACHER:
            g = q - p
            if DIRECTION != 1:
                g = q * (of_q - teacher_mean)
            g = tl.where(valid, g * teacher_grad * teacher_slope, 0.0)
            tl.store(teacher_row + index, g.to(teacher_row.dtype.element_ty), mask=index < V)
    return tl.sum(sums, 0), tl.sum(teacher_sums, 0)


@triton.jit
def weigh(
    row, kept_row, bias_ptr, lanes, valid, V, scale, softcap, largest, log_total, mean, grad, saved_row, within_ptr,
    beside_ptr, last, width, apart, inner, rest, last_rest, saved_rows, BLOCK: tl.constexpr,
    ACC: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, SAVED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The student's gradient from the logarithms that `compare` has kept."""
    for start in range(0, V, BLOCK):
        index = start + lanes
        z, slope = load_values(row, bias_ptr, index, V, scale, softcap, ACC, BIAS, True, CAPPED)
        p = tl.exp2((z - largest) * LOG2_E - log_total)
        g = p * (tl.load(kept_row + index, mask=index < V, other=0).to(ACC) - mean)
        write_row(
            g, grad, slope, valid, start, lanes, row, V, saved_row, within_ptr, beside_ptr, last, width, apart, inner,
            rest, last_rest, saved_rows, SAVED, VECTOR,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "valid_stride", "grad_stride", "scale_bits", "softcap_bits", "teacher_scale_bits", "teacher_softcap_bits",
        "beta_bits", "first_row", "last", "last_rest",
    ]
)  # fmt: skip
def kl_rows(
    logits_ptr, stride, teacher_ptr, teacher_stride, kept_ptr, bias_ptr, teacher_bias_ptr, valid_ptr, valid_stride,
    grad_ptr, grad_stride, rows_ptr, V, scale_bits: tl.int64, softcap_bits: tl.int64, teacher_scale_bits: tl.int64,
    teacher_softcap_bits: tl.int64, beta_bits: tl.int64,
    within_ptr, beside_ptr, first_row, saved_rows, last, width, apart, inner, rest, last_rest,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr, CAPPED: tl.constexpr, TEACHER_BIAS: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, MASKED: tl.constexpr, DIRECTION: tl.constexpr, STUDENT: tl.constexpr,
    TEACHER: tl.constexpr, KEPT: tl.constexpr, SAVED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    GRADIENT: tl.constexpr = STUDENT or TEACHER
    NEEDS_SUMS: tl.constexpr = (STUDENT and DIRECTION != 0) or (TEACHER and DIRECTION != 1)
    index_of_row = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index_of_row * stride
    teacher_row = teacher_ptr + index_of_row * teacher_stride
    kept_row = kept_ptr + index_of_row * teacher_stride
    scale, softcap = from_bits(scale_bits).to(ACC), from_bits(softcap_bits).to(ACC)
    teacher_scale, teacher_softcap = from_bits(teacher_scale_bits).to(ACC), from_bits(teacher_softcap_bits).to(ACC)
    beta = from_bits(beta_bits).to(ACC)
    lanes = tl.arange(0, BLOCK)
    saved_row = first_row + index_of_row
    valid = index_of_row >= 0
    if MASKED:
        valid = tl.load(valid_ptr + index_of_row * valid_stride) != 0
    # Of an ignored row nothing is read but what its gradient of 0 is written over.
    columns = tl.where(valid, V, 0)
    largest, log_total, teacher_largest, teacher_log_total = normalizers(
        row, teacher_row, bias_ptr, teacher_bias_ptr, lanes, columns, V, scale, softcap, teacher_scale,
        teacher_softcap, BLOCK, ACC, BIAS, CAPPED, TEACHER_BIAS, TEACHER_CAPPED,
    )  # fmt: skip
    zero = tl.full((), 0.0, ACC)
    mean = zero
    teacher_mean = zero
    if NEEDS_SUMS or not GRADIENT:
        mean, teacher_mean = compare(
            row, teacher_row, kept_row, bias_ptr, teacher_bias_ptr, lanes, columns, valid, V, scale, softcap,
            teacher_scale, teacher_softcap, largest, log_total, teacher_largest, teacher_log_total, beta, zero, zero,
            zero, zero, saved_row, within_ptr, beside_ptr, last, width, apart, inner, rest, last_rest,
            saved_rows, BLOCK, ACC, BIAS, CAPPED, TEACHER_BIAS, TEACHER_CAPPED, DIRECTION, True, KEPT, False, False,
            False, VECTOR,
        )  # fmt: skip
    if GRADIENT:
        # A gradient is a weight times a difference of logarithms, or a difference of weights.
        grad = tl.load(grad_ptr + index_of_row * grad_stride)
        teacher_grad = grad
        if DIRECTION == 2:
            grad *= 1 - beta
            teacher_grad *= beta
        if DIRECTION != 0:
            grad *= LN_2
        if DIRECTION != 1:
            teacher_grad *= LN_2
        if KEPT:
            weigh(
                row, kept_row, bias_ptr, lanes, valid, V, scale, softcap, largest, log_total, mean, grad, saved_row,
                within_ptr, beside_ptr, last, width, apart, inner, rest, last_rest, saved_rows, BLOCK, ACC,
                BIAS, CAPPED, SAVED, VECTOR,
            )  # fmt: skip
        else:
            sums, teacher_sums = compare(
                row, teacher_row, kept_row, bias_ptr, teacher_bias_ptr, lanes, V, valid, V, scale, softcap,
                teacher_scale, teacher_softcap, largest, log_total, teacher_largest, teacher_log_total, beta, mean,
                teacher_mean, grad, teacher_grad, saved_row, within_ptr, beside_ptr, last, width, apart, inner,
                rest, last_rest, saved_rows, BLOCK, ACC, BIAS, CAPPED, TEACHER_BIAS, TEACHER_CAPPED, DIRECTION,
                not NEEDS_SUMS, False, STUDENT, TEACHER, SAVED, VECTOR,
            )  # fmt: skip
            if not NEEDS_SUMS:
                mean = sums
                teacher_mean = teacher_sums
    divergence = teacher_mean
    if DIRECTION == 1:
        divergence = mean
    if DIRECTION == 2:
        divergence = beta * teacher_mean + (1 - beta) * mean
    tl.store(rows_ptr + index_of_row, tl.where(valid, divergence * LN_2, 0.0))


def kl_rows_(call: KlRows) -> Tensor:
    """The rows' divergences; the meaning of `kl_rows_` of the reference. Biases are contiguous.

    A teacher's logits whose gradient nobody wants are no more what they were, behind a student's gradient of "jsd".
    """
    student, teacher, grad, valid = call.student, call.teacher, call.grad, call.valid
    count, classes = student.logits.shape
    rows = grad.new_empty(count)
    if count == 0:
        return rows
    is_double = grad.dtype == torch.float64
    block = min(triton.next_power_of_2(classes), LARGEST_BLOCK // 2 if is_double else LARGEST_BLOCK)
    is_saved = len(student.saved_slices) > 0
    if is_saved:
        width = student.saved_slices[4]
        block = min(block, 1 << (width.bit_length() - 1))
    with on_device(rows):
        kl_rows[(count,)](
            student.logits, student.logits.stride(0), teacher.logits, teacher.logits.stride(0),
            # float16 has more digits for logarithms than a gradient in bfloat16.
            teacher.logits.view(torch.float16) if teacher.logits.itemsize == 2 else teacher.logits,
            # Where a flag says that there is none, any tensor stands for it.
            *(grad if head.linear_bias is None else head.linear_bias for head in (student, teacher)),
            grad if valid is None else valid.view(torch.uint8), 0 if valid is None else valid.stride(0),
            grad, 0 if grad.numel() == 1 else grad.stride(0), rows, classes,
            *head_bits(student, call.temperature), *head_bits(teacher, call.temperature), float_bits(call.beta),
            *(_saved(student.saved_slices, classes) if is_saved else (student.logits, student.logits, *(0,) * 8)),
            BLOCK=block, ACC=tl.float64 if is_double else tl.float32,
            BIAS=student.linear_bias is not None, CAPPED=student.softcap is not None,
            TEACHER_BIAS=teacher.linear_bias is not None, TEACHER_CAPPED=teacher.softcap is not None,
            MASKED=valid is not None, DIRECTION=DIRECTIONS[call.direction], STUDENT=student.gradient,
            TEACHER=teacher.gradient, KEPT=_keeps(call), SAVED=is_saved, VECTOR=math.gcd(classes, VECTOR),
            num_warps=max(1, min(THREADS, block // 8) // 32),
        )  # fmt: skip
    return rows


def _keeps(call: KlRows) -> bool:
    """Whether the student's last pass finds logarithms in the teacher's logits, which have digits enough for them."""
    student, teacher = call.student, call.teacher
    has_digits = student.logits.dtype == torch.bfloat16 or teacher.logits.itemsize >= max(student.logits.itemsize, 4)
    return call.direction == "jsd" and student.gradient and not teacher.gradient and has_digits


def head_bits(head: HeadRows, temperature: float) -> tuple[int, int]:
    """Scale and softcap of z / temperature, which has the form of z."""
    return float_bits(head.logit_scale / temperature), float_bits((head.softcap or 1.0) / temperature)


def _saved(saved_slices: tuple[Any, ...], classes: int) -> tuple[Any, ...]:
    """The kernel's arguments for the slices of linear_weight's gradient."""
    within, beside, first_row, saved_rows, width, inner, slices = saved_slices
    last = slices - 1
    rest, last_rest = (-(-count // VECTOR) * VECTOR for count in (width - inner, classes - last * width))
    return (
        within,
        beside,
        first_row,
        saved_rows,
        last,
        width,
        within.numel() // max(last, 1),
        inner,
        rest,
        last_rest,
    )
