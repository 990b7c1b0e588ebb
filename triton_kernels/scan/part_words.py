"""How parts of time that are scanned side by side hand on what they carry: in words that an earlier launch has written.

A part has, for each of its rows, the total from a carry of 0 and, unless gamma is a number, the product of its gates,
each in 64 bits, and with resets whether one lies in it. Of a number the product is the same for all parts. A part folds
the words of those before it in one fixed tree.
"""

import triton
import triton.language as tl

from .gamma import bounded_product, integer_power
from .lanes import join_carry, last_lane, scan_lanes

# What a lane has at most joined by BITS bits of a count, and so many parts of it are loaded at a time.
BITS = tl.constexpr(8)
AT_ONCE = tl.constexpr(8)


@triton.constexpr_function
def words_of_row(gates, reset):
    return 1 + (gates == "row" or gates == "step") + bool(reset)


@triton.jit
def word_of_part(words_ptr, part, block, blocks, R: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr):
    """The first word of the R rows (R, 1) of a block, and how far it is to the next part and to the rows' next word."""
    plane = blocks * R + block * 0
    apart = plane * words_of_row(GATES, RESET)
    return words_ptr + part.to(tl.int64) * apart + block * R + tl.arange(0, R)[:, None], apart, plane


@triton.jit
def write_part(word, plane, total, product, cut, inside, GATES: tl.constexpr, RESET: tl.constexpr):
    """What a part does to a carry, (R, 1) each."""
    tl.store(word, total.to(tl.int64, bitcast=True), mask=inside)
    if GATES == "row" or GATES == "step":
        tl.store(word + plane, product.to(tl.int64, bitcast=True), mask=inside)
    if RESET:
        tl.store(word + (words_of_row(GATES, RESET) - 1) * plane, cut.to(tl.int64), mask=inside)


@triton.jit
def carry_into_part(
    words_ptr, block, blocks, part, part_bits, start, inside, LANES: tl.constexpr, GATES: tl.constexpr,
    WIDE: tl.constexpr, STARTED: tl.constexpr, RESET: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The carry (R, 1) into `part` of the R rows of `block`; `start`: that into the first one, if STARTED.

    `part_bits`: of the product of a part's gates, where gamma is a number. A lane folds successive parts, of which the
    last lane has the last; the first of all has no carry that its gates multiply. DEPENDENT: what writes the words may
    run yet.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    R: tl.constexpr = start.shape[0]
    word, apart, plane = word_of_part(words_ptr, part * 0, block, blocks, R, GATES, RESET)
    KIND: tl.constexpr = "step" if GATES == "row" else GATES
    CUTS: tl.constexpr = RESET or KIND == "step"
    LOWEST: tl.constexpr = -1 if STARTED else 0
    each = (part - LOWEST + LANES - 1) // LANES
    first = part - each * LANES + tl.arange(0, LANES)[None, :] * each
    weight = part_bits.to(tl.int64).to(tl.float64, bitcast=True)
    total = tl.zeros((R, LANES), start.dtype)
    product = tl.zeros((R, LANES), tl.float64) + 1.0
    cut = tl.zeros((R, LANES), tl.int32)
    for begin in range(0, each, AT_ONCE):
        totals, products, cuts = (), (), ()
        for i in tl.static_range(AT_ONCE):
            entry = first + (begin + i)
            wanted = inside & (entry >= 0) & (begin + i < each)
            at = word + entry.to(tl.int64) * apart
            totals = totals + (tl.load(at, mask=wanted, other=0),)
            if KIND == "step":
                products = products + (tl.load(at + plane, mask=wanted, other=0),)
            if RESET:
                cuts = cuts + (tl.load(at + (words_of_row(GATES, RESET) - 1) * plane, mask=wanted, other=0),)
        for i in tl.static_range(AT_ONCE):
            entry = first + (begin + i)
            is_part = (entry >= LOWEST) & (begin + i < each)
            own_total = totals[i].to(start.dtype, bitcast=True)
            if STARTED:
                own_total = tl.where(entry == -1, start, own_total)
            own_product = weight
            if KIND == "step":
                own_product = products[i].to(tl.float64, bitcast=True)
            own_cut = (entry == LOWEST).to(tl.int32) + tl.zeros((R, LANES), tl.int32)
            if RESET:
                own_cut = own_cut | cuts[i].to(tl.int32)
            joined = join_carry(own_total, own_product, own_cut, total, KIND, CUTS, WIDE)
            total = tl.where(is_part, joined, total)
            if KIND == "step":
                product = tl.where(is_part, bounded_product(product, own_product), product)
            if CUTS:
                cut = tl.where(is_part, cut | own_cut, cut)
    lane_product = product
    if KIND == "scalar":
        lane_product = integer_power(weight, each, BITS, WIDE)
    total, _, _ = scan_lanes(total, lane_product, cut, R, LANES, KIND, CUTS, WIDE)
    return last_lane(total, R, LANES)
