"""log_bmm's backward kernels, each for the left operand: the right one's gradient is that of the transposed problem.

grad_a_ik = Σ_j g_ij·W_ijk of W = exp((a - R) + (b - C) - log_s) is E·(G·Fᵀ) with G = g·exp(-log_s) = g / S. That holds
while log_s > -64, where what underflows in E or F is below 2^-126·2^93 in W; a G of an element beyond is 0 and its
terms are added one by one, as are those of G > 1e30, whose sum might overflow. An element whose out is -inf has none.
"""

import triton
import triton.language as tl

from .product import existing, tile_lines
from .tiles import exact_exp, load_terms, product, scaled_exp, store_factor, two_sum

GROUP = tl.constexpr(32)  # successive rows that share a mark for each column
LEAST_LOG_S = tl.constexpr(-64.0)
LARGEST_G = tl.constexpr(1e30)
SCAN = tl.constexpr(128)  # marks that are read together


@triton.jit
def needs_terms(scaled, grad, log_s):
    """Whether terms have to be added one by one, of elements whose G, as stored, is `scaled`."""
    return (scaled == 0) & ((grad != 0) | (log_s != log_s)) & (log_s != float("-inf"))


@triton.jit(do_not_specialize=["M", "M_to", "N", "N_to"])
def scale_gradient(
    grad_ptr, grad_batch, grad_row, grad_column, log_s_ptr, log_s_batch, log_s_row, log_s_column,
    g_ptr, g_rest, marks_ptr, transposed_ptr, transposed_rest, transposed_marks_ptr, M, M_to, N, N_to,
    STORE: tl.constexpr, STORE_TRANSPOSED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """G (M, N_to) and Gᵀ (N, M_to), 0 beyond N and M; marks (groups of rows, N_to) of what needs_terms, likewise."""
    down, across = tl.cdiv(M, GROUP), tl.cdiv(N, GROUP)
    number = tl.program_id(0)
    batch = (number // (down * across)).to(tl.int64)
    group, group_across = number // across % down, number % across
    row = (group * GROUP + tl.arange(0, GROUP))[:, None]
    column = (group_across * GROUP + tl.arange(0, GROUP))[None, :]
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    inside = (row < M) & (column < N)
    grad_ptr += batch * grad_batch + wide_row * grad_row + wide_column * grad_column
    log_s_ptr += batch * log_s_batch + wide_row * log_s_row + wide_column * log_s_column
    grad = tl.load(grad_ptr, mask=inside, other=0).to(tl.float32)
    log_s = tl.load(log_s_ptr, mask=inside, other=float("-inf"))
    scaled = grad * scaled_exp(-log_s, 0.0, 0)
    # A NaN passes neither test.
    scaled = tl.where((log_s >= LEAST_LOG_S) & (tl.abs(scaled) <= LARGEST_G), scaled, 0.0)
    mark = needs_terms(scaled, grad, log_s).to(tl.int8)
    if STORE:
        store_factor(g_ptr + (batch * M + wide_row) * N_to + column, g_rest, scaled, row < M, PARTS)
        marks = marks_ptr + (batch * down + group) * N_to + group_across * GROUP + tl.arange(0, GROUP)
        tl.store(marks, tl.max(mark, 0))
    if STORE_TRANSPOSED:
        transposed = transposed_ptr + (batch * N + wide_column) * M_to + row
        store_factor(transposed, transposed_rest, scaled, column < N, PARTS)
        marks = transposed_marks_ptr + (batch * across + group_across) * M_to + group * GROUP + tl.arange(0, GROUP)
        tl.store(marks, tl.max(mark, 1))


@triton.jit
def exponent_shift(left_top, right_top, log_s):
    """R + C + log_s as high + low."""
    total, rest = two_sum(left_top, right_top)
    high, low = two_sum(total, log_s)
    return high, low + rest


@triton.jit
def add_marked(
    left_ptr, left_line, left_term, right_ptr, right_line, right_term, left_top_ptr, right_top_ptr, g_ptr, marks_ptr,
    grad_ptr, grad_row, grad_column, log_s_ptr, log_s_row, log_s_column, out_ptr, out_line, out_term, row, column,
    M, N, K, N_to,
):  # fmt: skip
    """Adds to a part of the gradient the terms of those elements of a group of rows that need it."""
    lanes = tl.arange(0, SCAN)
    found = tl.full((SCAN,), 0, tl.int32)
    for start in range(0, N, SCAN):
        found = found | tl.load(marks_ptr + start + lanes, mask=start + lanes < N_to, other=0).to(tl.int32)
    if tl.sum(found, 0) > 0:
        inside = (row < M)[:, None] & (column < K)[None, :]
        line, term = existing(row, M), existing(column, K)
        a = tl.load(left_ptr + line[:, None] * left_line + term[None, :] * left_term).to(tl.float32)
        left_top = tl.load(left_top_ptr + line)
        sums = tl.full((row.shape[0], column.shape[0]), 0.0, tl.float32)
        for j in range(N):
            if tl.load(marks_ptr + j) != 0:
                wide_j = tl.full((), 0, tl.int64) + j
                grad = tl.load(grad_ptr + line * grad_row + wide_j * grad_column).to(tl.float32)
                log_s = tl.load(log_s_ptr + line * log_s_row + wide_j * log_s_column)
                adds = needs_terms(tl.load(g_ptr + line * N_to + j), grad, log_s)
                high, low = exponent_shift(left_top, tl.load(right_top_ptr + j), log_s)
                b = tl.load(right_ptr + wide_j * right_line + term * right_term).to(tl.float32)
                weight = exact_exp(a, b[None, :], high[:, None], low[:, None])
                sums += tl.where(adds[:, None], grad[:, None] * weight, 0.0)
        pointers = out_ptr + row.to(tl.int64)[:, None] * out_line + column.to(tl.int64)[None, :] * out_term
        tl.store(pointers, tl.load(pointers, mask=inside, other=0) + sums, mask=inside)


@triton.jit(do_not_specialize=["M", "N", "K"])
def multiply_gradient(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    left_top_ptr, left_top_batch, right_top_ptr, right_top_batch, f_ptr, f_rest, f_batch, g_ptr, g_rest, marks_ptr,
    grad_ptr, grad_batch, grad_row, grad_column, log_s_ptr, log_s_batch, log_s_row, log_s_column,
    out_ptr, out_batch, out_line, out_term, M, N, K, N_to,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, PART_COLUMNS: tl.constexpr,
):  # fmt: skip
    """G (M, N_to) times F, given as (K, N_to), times E, and the terms of what is marked; `out_ptr` is of float32."""
    batch, row, column = tile_lines(tl.program_id(0), M, K, ROWS, COLUMNS, BAND)
    line, term = existing(row, M), existing(column, K)
    sums = product(
        g_ptr + (batch * M + line) * N_to, g_rest, f_ptr + batch * f_batch + term * N_to, f_rest, N_to,
        ROWS, COLUMNS, DEPTH, PARTS, STAGES,
    )  # fmt: skip
    left_ptr += batch * left_batch
    left_top_ptr += batch * left_top_batch
    a = tl.load(left_ptr + line[:, None] * left_line + term[None, :] * left_term).to(tl.float32)
    difference, rest = two_sum(a, -tl.load(left_top_ptr + line)[:, None])
    inside = (row < M)[:, None] & (column < K)[None, :]
    out_ptr += batch * out_batch
    offsets = row.to(tl.int64)[:, None] * out_line + column.to(tl.int64)[None, :] * out_term
    tl.store(out_ptr + offsets, sums * scaled_exp(difference, rest, 0), mask=inside)

    # By parts, for which the registers suffice: the products are read back, from behind a barrier.
    tl.debug_barrier()
    groups = tl.cdiv(M, GROUP)
    ACROSS: tl.constexpr = COLUMNS // PART_COLUMNS
    for part in range(ROWS // GROUP * ACROSS):
        first = tl.min(row, 0) + part // ACROSS * GROUP
        marks = marks_ptr + (batch * groups + tl.minimum(first // GROUP, groups - 1)) * N_to
        add_marked(
            left_ptr, left_line, left_term, right_ptr + batch * right_batch, right_line, right_term,
            left_top_ptr, right_top_ptr + batch * right_top_batch, g_ptr + batch * M * N_to, marks,
            grad_ptr + batch * grad_batch, grad_row, grad_column, log_s_ptr + batch * log_s_batch, log_s_row,
            log_s_column, out_ptr, out_line, out_term, first + tl.arange(0, GROUP),
            tl.min(column, 0) + part % ACROSS * PART_COLUMNS + tl.arange(0, PART_COLUMNS), M, N, K, N_to,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "K"])
def sum_gradient(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    left_top_ptr, left_top_batch, right_top_ptr, right_top_batch,
    grad_ptr, grad_batch, grad_row, grad_column, log_s_ptr, log_s_batch, log_s_row, log_s_column,
    out_ptr, out_batch, out_line, out_term, M, N, K,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Every gradient term by term."""
    batch, row, column = tile_lines(tl.program_id(0), M, K, ROWS, COLUMNS, BAND)
    lanes = tl.arange(0, TERMS)
    line, term = existing(row, M), existing(column, K)
    left_ptr += batch * left_batch + line[:, None] * left_line + term[None, :] * left_term
    right_ptr += batch * right_batch + term * right_term
    grad_ptr += batch * grad_batch + line * grad_row
    log_s_ptr += batch * log_s_batch + line * log_s_row
    right_top_ptr += batch * right_top_batch
    a = tl.load(left_ptr).to(ACC)
    left_top = tl.load(left_top_ptr + batch * left_top_batch + line)
    sums = tl.full((ROWS, COLUMNS, TERMS), 0.0, ACC)
    for start in range(0, N, TERMS):
        index = start + lanes
        b = load_terms(right_ptr, index, N, right_line, ACC)
        grad = load_terms(grad_ptr, index, N, grad_column, ACC)
        log_s = load_terms(log_s_ptr, index, N, log_s_column, ACC)
        right_top = tl.load(right_top_ptr + existing(index, N))
        high, low = exponent_shift(left_top[:, None], right_top[None, :], log_s)
        weight = exact_exp(a[:, :, None], b[None, :, :], high[:, None, :], low[:, None, :])
        sums += tl.where((log_s != float("-inf"))[:, None, :], grad[:, None, :] * weight, 0.0)
    out_ptr += row.to(tl.int64)[:, None] * out_line + column.to(tl.int64)[None, :] * out_term
    mask = (row < M)[:, None] & (column < K)[None, :]
    tl.store(out_ptr + batch * out_batch, tl.sum(sums, 2).to(out_ptr.dtype.element_ty), mask=mask)
