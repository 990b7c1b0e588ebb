"""The kernels of max_bmm and sample_bmm: a tile of (rows of a, columns of b), the terms one after the other."""

import triton
import triton.language as tl

from .product import elements_of, existing, tile_lines
from .tiles import ALL, exact_exp, is_finite, load_terms


@triton.jit(do_not_specialize=["M", "N", "K"])
def largest_term(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    values_ptr, indices_ptr, M, N, K,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """The first of the largest terms, or of the NaN; TERMS terms at a time, each of which keeps its own first."""
    batch, row, column = tile_lines(tl.program_id(0), M, N, ROWS, COLUMNS, BAND)
    term = tl.arange(0, TERMS)
    left_ptr += batch * left_batch + existing(row, M) * left_line
    right_ptr += batch * right_batch + existing(column, N) * right_line
    best = tl.full((ROWS, COLUMNS, TERMS), float("-inf"), ACC)
    best_at = tl.full((ROWS, COLUMNS, TERMS), 0, tl.int32)
    for start in range(0, K, TERMS):
        a = load_terms(left_ptr, start + term, K, left_term, ACC)
        b = load_terms(right_ptr, start + term, K, right_term, ACC)
        sums = a[:, None, :] + b[None, :, :]
        better = (sums > best) | ((sums != sums) & (best == best))
        best = tl.where(better, sums, best)
        best_at = tl.where(better, (start + term)[None, None, :], best_at)
    strange = best != best
    any_strange = tl.max(strange.to(tl.int32), 2) > 0
    value = tl.where(any_strange, float("nan"), tl.max(tl.where(strange, float("-inf"), best), 2))
    found = tl.where(any_strange[:, :, None], strange, best == value[:, :, None])
    index = tl.min(tl.where(found, best_at, K), 2)
    element, inside = elements_of(batch, row, column, M, N)
    tl.store(values_ptr + element, value.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(indices_ptr + element, index.to(tl.int64), mask=inside)


@triton.jit
def load_term(lines, k, stride, ACC: tl.constexpr):
    return tl.load(lines + (tl.full((), 0, tl.int64) + k) * stride).to(ACC)


# The uniforms' layout is not to be known: it would become the drawn indices', to which each running sum is converted.
@triton.jit(do_not_specialize=["M", "N", "K", "uniforms_row", "uniforms_column"])
def draw_term(
    left_ptr, left_batch, left_line, left_term, right_ptr, right_batch, right_line, right_term,
    uniforms_ptr, uniforms_batch, uniforms_row, uniforms_column, indices_ptr, M, N, K,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """The first term with which the sum of exp(term - maximum) exceeds uniform·total.

    The sums are made twice, term by term in the same order: the last one is the total to the bit, and a term that adds
    nothing never passes the threshold. Below the total the threshold is, u·total < total for a u below 1.
    """
    batch, row, column = tile_lines(tl.program_id(0), M, N, ROWS, COLUMNS, BAND)
    left_ptr += batch * left_batch + existing(row, M) * left_line
    right_ptr += batch * right_batch + existing(column, N) * right_line
    top = tl.full((ROWS, COLUMNS), float("-inf"), ACC)
    nothing = tl.full((ROWS, COLUMNS), -1, tl.int32)
    strange = nothing
    for k in range(K):
        a = load_term(left_ptr, k, left_term, ACC)
        b = load_term(right_ptr, k, right_term, ACC)
        sums = a[:, None] + b[None, :]
        top = tl.maximum(top, sums, propagate_nan=ALL)
        strange = tl.where((sums < float("inf")) | (strange >= 0), strange, k)
    base = tl.where(is_finite(top), top, 0.0)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for k in range(K):
        a = load_term(left_ptr, k, left_term, ACC)
        b = load_term(right_ptr, k, right_term, ACC)
        total += exact_exp(a[:, None], b[None, :], base, 0.0)
    element, inside = elements_of(batch, row, column, M, N)
    uniforms_ptr += batch * uniforms_batch + row.to(tl.int64)[:, None] * uniforms_row
    uniform = tl.load(uniforms_ptr + column.to(tl.int64)[None, :] * uniforms_column, mask=inside, other=0).to(ACC)
    threshold = uniform * total
    running = tl.full((ROWS, COLUMNS), 0.0, ACC)
    drawn = nothing
    for k in range(K):
        a = load_term(left_ptr, k, left_term, ACC)
        b = load_term(right_ptr, k, right_term, ACC)
        running += exact_exp(a[:, None], b[None, :], base, 0.0)
        drawn = tl.where((running > threshold) & (drawn < 0), k, drawn)
    drawn = tl.where(strange >= 0, strange, drawn)
    tl.store(indices_ptr + element, drawn.to(tl.int64), mask=inside)
