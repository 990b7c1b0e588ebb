"""What the kernels of the log semiring share: exact differences of sums, powers and logarithms by their exponent.

An operand is a matrix of lines: a (M, K) is the left one, bᵀ (N, K) the right one, and a_ik + b_kj the terms of (i, j).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# log 2 in two parts, of which n times the first is exact (Cody and Waite).
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440054690583e-4)
LEAST_EXPONENT = tl.constexpr(-126)  # of a normal float32
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def two_sum(x, y):
    """x + y = total + rest without an error (Knuth, "The Art of Computer Programming", vol. 2, 4.2.2).

    rest is 1e38 where there is none, beside an infinite total that it leaves alone.
    """
    total = x + y
    part = total - x
    rest = (x - (total - part)) + (y - part)
    return total, tl.where(rest != rest, 1e38, rest)


@triton.jit
def exact_exp(a, b, high, low):
    """exp(a + b - (high + low)); the difference has one rounding, however large the two are."""
    total, rest = two_sum(a, b)
    return tl.exp((total - high) + (rest - low))


@triton.jit
def scaled_exp(x, rest, offset):
    """exp(x + rest)·2^offset in float32 to 2 ulp; 0 below 2^-126, and for a NaN.

    Multiplied into the argument, the offset and log2 e would cost 2^-24 of |x| each: the power of two is put together.
    """
    n = tl.floor(x * LOG2_E + 0.5)
    remainder = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, x)) + rest
    exponent = n + offset
    inside = exponent >= LEAST_EXPONENT
    exponent = tl.where(inside, tl.where(exponent > 127, 127.0, exponent), 0.0).to(tl.int32)
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(inside, tl.exp(remainder) * power, 0.0)


@triton.jit
def log_parts(x, offset):
    """log(x·2^-offset) of normal float32 numbers as (multiple of log 2, small rest)."""
    bits = x.to(tl.int32, bitcast=True)
    n = (bits >> 23) - 127
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    upper = fraction > 1.4142135
    fraction = tl.where(upper, fraction * 0.5, fraction)
    n = (tl.where(upper, n + 1, n) - offset).to(tl.float32)
    return n * LN2_HIGH, n * LN2_LOW + tl.log(fraction)


@triton.jit
def rounded_to_tf32(x):
    """Half away from zero: tensor cores cut the lower bits off, a bias of -6e-4."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def store_factor(factor_ptr, rest_after, factor, mask, PARTS: tl.constexpr):
    """A factor of a product, of float32, of TF32, or of two TF32 numbers, the other `rest_after` the first."""
    if PARTS == 0:
        tl.store(factor_ptr, factor, mask=mask)
    else:
        rounded = rounded_to_tf32(factor)
        tl.store(factor_ptr, rounded, mask=mask)
        if PARTS == 2:
            tl.store(factor_ptr + rest_after, rounded_to_tf32(factor - rounded), mask=mask)


@triton.jit
def product(
    left, left_rest, right, right_rest, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) of left times rightᵀ; `left` and `right`: of every line the first of `length` factors.

    Of two parts the three largest products are taken ("tf32x3": Triton's own splits what it has loaded, which keeps
    wgmma waiting). They are added up by steps: a tensor core's sums are cut off, 4e-6 over 1024 terms.
    """
    term = tl.arange(0, DEPTH)[None, :]
    PRECISION: tl.constexpr = "ieee" if PARTS == 0 else "tf32"
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in tl.range(0, length, DEPTH, num_stages=STAGES):
        x = tl.load(left[:, None] + (start + term))
        y = tl.trans(tl.load(right[:, None] + (start + term)))
        if PARTS == 2:
            x_rest = tl.load(left[:, None] + left_rest + (start + term))
            y_rest = tl.trans(tl.load(right[:, None] + right_rest + (start + term)))
            step = tl.dot(x_rest, y, input_precision=PRECISION)
            step = tl.dot(x, y_rest, step, input_precision=PRECISION)
            sums += tl.dot(x, y, step, input_precision=PRECISION)
        else:
            sums = tl.dot(x, y, sums, input_precision=PRECISION)
    return sums


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def load_terms(lines, index, K, stride, ACC: tl.constexpr):
    """(lines, terms) of the terms `index`, -inf beyond the last; a single one is not beyond it."""
    pointers = lines[:, None] + index.to(tl.int64)[None, :] * stride
    if index.shape[0] == 1:
        return tl.load(pointers).to(ACC)
    else:
        return tl.load(pointers, mask=(index < K)[None, :], other=float("-inf")).to(ACC)


@triton.jit
def last_maximum(x, AXIS: tl.constexpr):
    """Over an axis; a NaN wins."""
    strange = tl.max((x != x).to(tl.int32), AXIS) > 0
    return tl.where(strange, float("nan"), tl.max(x, AXIS))


@triton.jit
def shift_of(maximum):
    """R or C: where nothing but -inf is, 0."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def line_shifts(lines, stride, K, ACC: tl.constexpr, TERMS: tl.constexpr):
    """R or C of the lines whose first terms `lines` points to."""
    top = tl.full((lines.shape[0], TERMS), float("-inf"), ACC)
    for start in range(0, K, TERMS):
        top = tl.maximum(top, load_terms(lines, start + tl.arange(0, TERMS), K, stride, ACC), propagate_nan=ALL)
    return shift_of(last_maximum(top, 1))


@triton.jit
def logsumexp_tile(
    left, left_term, left_shift, right, right_term, right_shift, K, ACC: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """(out, log_s) in ACC of a tile, TERMS terms at a time; `left`, `right` point to the first term of every line.

    Two passes over the terms, for the maximum and the sum, cost an exp and 14 other instructions a term. One pass would
    cost as many selections, or a second exp. What is summed are exact differences: at 1e6 a + b is rounded by 6e-2, too
    much for log_s, which is of a size with the spread; and (a - R) + (b - C) is too coarse for an out far below R + C.
    """
    term = tl.arange(0, TERMS)
    tile_top = tl.full((left.shape[0], right.shape[0], TERMS), float("-inf"), ACC)
    for start in range(0, K, TERMS):
        a = load_terms(left, start + term, K, left_term, ACC)
        b = load_terms(right, start + term, K, right_term, ACC)
        tile_top = tl.maximum(tile_top, a[:, None, :] + b[None, :, :], propagate_nan=ALL)
    top = last_maximum(tile_top, 2)
    finite = is_finite(top)
    base = tl.where(finite, top, 0.0)
    sums = tl.full((left.shape[0], right.shape[0], TERMS), 0.0, ACC)
    for start in range(0, K, TERMS):
        a = load_terms(left, start + term, K, left_term, ACC)
        b = load_terms(right, start + term, K, right_term, ACC)
        sums += exact_exp(a[:, None, :], b[None, :, :], base[:, :, None], 0.0)
    log_total = tl.log(tl.where(finite, tl.sum(sums, 2), 1.0))
    # A NaN, inf or -inf among the maxima is the result.
    out = top + log_total
    high, low = two_sum(left_shift[:, None], right_shift[None, :])
    gap, rest = two_sum(top, -high)
    log_s = tl.where(finite, gap + ((rest - low) + log_total), out - high)
    return out, tl.where(out == float("-inf"), out, log_s)
