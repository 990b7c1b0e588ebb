"""log_bmm's forward kernels: logsumexp as a product of shifted exponentials, and term by term.

With R_i and C_j the maxima of a's rows and b's columns, out = R + C + log S of S = E·F, E = exp(a - R), F = exp(b - C),
one exp for every 1 / n of a term and no cancellation. What S lacks are terms that underflow, and how much these are is
bounded: an element whose S is 2^24 times that bound is certified, the others are summed term by term.
"""

import triton
import triton.language as tl

from ..common.tiles import tile_at
from .tiles import (
    ALL,
    last_maximum,
    line_shifts,
    log_parts,
    logsumexp_tile,
    product,
    scaled_exp,
    shift_of,
    store_factor,
    two_sum,
)

# Of a line. A line that has no finite term holds HAS_MASKED too.
HAS_MASKED = tl.constexpr(1)  # -inf is among its terms: its powers have a floor
ALL_MASKED = tl.constexpr(2)
SPECIAL = tl.constexpr(4)  # NaN or inf is
FLOOR = tl.constexpr(2.0**-60)


@triton.jit
def prepare_lines(
    number, x_ptr, x_batch, x_line, x_term, top_ptr, kind_ptr, power_ptr, power_rest, power_batch, power_line,
    power_term, lines, lines_to, K, terms_to, offset, ACC: tl.constexpr, STORE: tl.constexpr, FLOORED: tl.constexpr,
    PARTS: tl.constexpr, LINES: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(lines_to, LINES)
    batch = (number // blocks).to(tl.int64)
    line = number % blocks * LINES + tl.arange(0, LINES)
    inside = line < lines
    term = tl.arange(0, TERMS)
    x_lines = x_ptr + batch * x_batch + line.to(tl.int64)[:, None] * x_line
    top = tl.full((LINES, TERMS), float("-inf"), ACC)
    masked = tl.full((LINES, TERMS), 0, tl.int32)
    for start in range(0, K, TERMS):
        valid = inside[:, None] & (start + term < K)[None, :]
        x = tl.load(x_lines + (start + term).to(tl.int64)[None, :] * x_term, mask=valid, other=0).to(ACC)
        top = tl.where(valid, tl.maximum(top, x, propagate_nan=ALL), top)
        masked = masked | (x == float("-inf")).to(tl.int32)
    largest = last_maximum(top, 1)
    shift = shift_of(largest)
    has_masked = tl.max(masked, 1) > 0
    tl.store(top_ptr + batch * lines + line, shift, mask=inside)
    if STORE:
        kind = tl.where(has_masked, HAS_MASKED, 0) + tl.where(largest == float("-inf"), ALL_MASKED, 0)
        kind += tl.where(largest < float("inf"), 0, SPECIAL)
        tl.store(kind_ptr + batch * lines + line, kind.to(tl.int8), mask=inside)
        power_lines = power_ptr + batch * power_batch + line.to(tl.int64)[:, None] * power_line
        for start in range(0, terms_to, TERMS):
            valid = inside[:, None] & (start + term < K)[None, :]
            wide_term = (start + term).to(tl.int64)[None, :]
            x = tl.load(x_lines + wide_term * x_term, mask=valid, other=float("-inf")).to(tl.float32)
            difference, rest = two_sum(x, -shift[:, None])
            power = scaled_exp(difference, rest, offset)
            if FLOORED:
                low = has_masked[:, None] & (x > float("-inf")) & (power < FLOOR)
                power = tl.where(low, FLOOR, power)
            written = (line < lines_to)[:, None] & (start + term < terms_to)[None, :]
            store_factor(power_lines + wide_term * power_term, power_rest, power, written, PARTS)


@triton.jit(do_not_specialize=["M", "N", "K", "offset", "left_blocks"])
def prepare(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    left_top_ptr, left_kind_ptr, e_ptr, e_rest, e_batch, e_line, e_term,
    right_top_ptr, right_kind_ptr, f_ptr, f_rest, f_batch, f_line, f_term,
    M, M_to, N, N_to, K, K_to, offset, left_blocks,
    ACC: tl.constexpr, STORE_E: tl.constexpr, STORE_F: tl.constexpr, FLOORED: tl.constexpr, PARTS: tl.constexpr,
    LINES: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """R, C and what the lines hold; E and F times 2^offset, FLOORED at 2^-60 where a line with -inf holds another.

    For K terms and M (N) lines K_to and M_to (N_to) powers are written, 0 for those that are not there.
    """
    number = tl.program_id(0)
    if number < left_blocks:
        prepare_lines(
            number, left_ptr, left_batch, left_line, left_term, left_top_ptr, left_kind_ptr, e_ptr, e_rest, e_batch,
            e_line, e_term, M, M_to, K, K_to, offset, ACC, STORE_E, FLOORED, PARTS, LINES, TERMS,
        )  # fmt: skip
    else:
        prepare_lines(
            number - left_blocks, right_ptr, right_batch, right_line, right_term, right_top_ptr, right_kind_ptr, f_ptr,
            f_rest, f_batch, f_line, f_term, N, N_to, K, K_to, offset, ACC, STORE_F, FLOORED, PARTS, LINES, TERMS,
        )  # fmt: skip


@triton.jit
def tile_lines(number, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """(batch, rows, columns) of a program's tile."""
    tiles_down = tl.cdiv(M, ROWS)
    tiles_across = tl.cdiv(N, COLUMNS)
    tiles = tiles_down * tiles_across
    down, across = tile_at(number % tiles, tiles_down, tiles_across, BAND)
    return (number // tiles).to(tl.int64), down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def existing(line, lines):
    """Lines beyond the last read the last one, and are not stored."""
    return tl.minimum(line, lines - 1).to(tl.int64)


@triton.jit
def elements_of(batch, row, column, M, N):
    """Where the elements of a tile lie in a contiguous (B, M, N), and whether they are there."""
    element = (batch * M + row)[:, None] * N + column[None, :]
    return element, (row < M)[:, None] & (column < N)[None, :]


@triton.jit
def store_certified(
    sums, left_top_ptr, left_kind_ptr, right_top_ptr, right_kind_ptr, out_ptr, log_s_ptr, batch, row, first, M, N,
    offset, least, least_floored, COLUMNS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Stores what a tile of S·2^(2·offset) gives, log_s NaN where it is not certified; the number of these by row.

    By slices of the columns from `first` on, for which the registers suffice.
    """
    if SLICES > 1:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.reshape(sums, (sums.shape[0], 2, HALF)).permute(0, 2, 1).split()
        return store_certified(
            left, left_top_ptr, left_kind_ptr, right_top_ptr, right_kind_ptr, out_ptr, log_s_ptr, batch, row, first,
            M, N, offset, least, least_floored, HALF, SLICES // 2,
        ) + store_certified(
            right, left_top_ptr, left_kind_ptr, right_top_ptr, right_kind_ptr, out_ptr, log_s_ptr, batch, row,
            first + HALF, M, N, offset, least, least_floored, HALF, SLICES // 2,
        )  # fmt: skip
    else:
        column = first + tl.arange(0, COLUMNS)
        left_line, right_line = existing(row, M), existing(column, N)
        left_kind = tl.load(left_kind_ptr + left_line)[:, None]
        right_kind = tl.load(right_kind_ptr + right_line)[None, :]
        either = left_kind | right_kind
        # Nothing is certified to be -inf that only underflowed: with the floor in both lines no product does.
        disjoint = (sums == 0) & (((either & ALL_MASKED) | (left_kind & right_kind & HAS_MASKED)) != 0)
        enough = sums >= tl.where((either & HAS_MASKED) != 0, least_floored, least)
        certified = (disjoint | enough) & ((either & SPECIAL) == 0)
        high, low = two_sum(tl.load(left_top_ptr + left_line)[:, None], tl.load(right_top_ptr + right_line)[None, :])
        log_high, log_low = log_parts(sums, 2 * offset)
        total, rest = two_sum(high, log_high)
        out = tl.where(sums == 0, float("-inf"), total + (rest + (low + log_low)))
        log_s = tl.where(out == float("-inf"), out, log_high + log_low)
        element, inside = elements_of(batch, row, column, M, N)
        tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(log_s_ptr + element, tl.where(certified, log_s, float("nan")), mask=inside)
        return tl.sum((inside & (certified == 0)).to(tl.int32), 1)


@triton.jit(do_not_specialize=["M", "N", "K", "offset"])
def multiply(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    left_top_ptr, left_kind_ptr, left_top_batch, e_ptr, e_rest, e_batch,
    right_top_ptr, right_kind_ptr, right_top_batch, f_ptr, f_rest, f_batch,
    out_ptr, log_s_ptr, M, N, K, K_to, offset, least, least_floored,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, PART_ROWS: tl.constexpr, PART_COLUMNS: tl.constexpr,
):  # fmt: skip
    """E (M, K_to) times Fᵀ (N, K_to); `least`: what S·2^(2·offset) has to reach to be certified."""
    batch, row, column = tile_lines(tl.program_id(0), M, N, ROWS, COLUMNS, BAND)
    sums = product(
        e_ptr + batch * e_batch + existing(row, M) * K_to, e_rest,
        f_ptr + batch * f_batch + existing(column, N) * K_to, f_rest, K_to, ROWS, COLUMNS, DEPTH, PARTS, STAGES,
    )  # fmt: skip
    missing = store_certified(
        sums, left_top_ptr + batch * left_top_batch, left_kind_ptr + batch * left_top_batch,
        right_top_ptr + batch * right_top_batch, right_kind_ptr + batch * right_top_batch,
        out_ptr, log_s_ptr, batch, row, tl.min(column, 0), M, N, offset, least, least_floored, COLUMNS, COLUMNS // 32,
    )  # fmt: skip
    if tl.sum(missing, 0) > 0:
        # By parts, for which the registers suffice: what is missing is read back, from behind a barrier.
        tl.debug_barrier()
        ACROSS: tl.constexpr = COLUMNS // PART_COLUMNS
        for part in range(ROWS // PART_ROWS * ACROSS):
            part_row = tl.min(row, 0) + part // ACROSS * PART_ROWS + tl.arange(0, PART_ROWS)
            part_column = tl.min(column, 0) + part % ACROSS * PART_COLUMNS + tl.arange(0, PART_COLUMNS)
            element, inside = elements_of(batch, part_row, part_column, M, N)
            stored = tl.load(log_s_ptr + element, mask=inside, other=0)
            wanted = stored != stored
            if tl.sum(tl.sum(wanted.to(tl.int32), 1), 0) > 0:
                line, line_right = existing(part_row, M), existing(part_column, N)
                out, log_s = logsumexp_tile(
                    left_ptr + batch * left_batch + line * left_line, left_term,
                    tl.load(left_top_ptr + batch * left_top_batch + line),
                    right_ptr + batch * right_batch + line_right * right_line, right_term,
                    tl.load(right_top_ptr + batch * right_top_batch + line_right), K, tl.float32, 1,
                )  # fmt: skip
                tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=wanted)
                tl.store(log_s_ptr + element, log_s, mask=wanted)


@triton.jit(do_not_specialize=["M", "N", "K"])
def sum_terms(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    out_ptr, log_s_ptr, M, N, K,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Every element term by term."""
    batch, row, column = tile_lines(tl.program_id(0), M, N, ROWS, COLUMNS, BAND)
    left = left_ptr + batch * left_batch + existing(row, M) * left_line
    right = right_ptr + batch * right_batch + existing(column, N) * right_line
    out, log_s = logsumexp_tile(
        left, left_term, line_shifts(left, left_term, K, ACC, 16),
        right, right_term, line_shifts(right, right_term, K, ACC, 16), K, ACC, TERMS,
    )  # fmt: skip
    element, inside = elements_of(batch, row, column, M, N)
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(log_s_ptr + element, log_s, mask=inside)
