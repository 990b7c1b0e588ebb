"""How tiles of R rows that follow one another in time hand on what they carry, while all of them run: in words.

The scheme of lookback.py, for gates of every kind, resets and every dtype: a word has 32 bits of a number and a flag
above them, so that no fence is needed; what takes more bits takes several words, each with its flag. A tile's slot in
its group of GROUP tiles has, for each of its rows, the total from a carry of 0, and with a gate a step the product of
the gates; the last slot of a group has the prefix that ends the group instead. A tile folds the slots before its own
in one fixed tree.
"""

import triton
import triton.language as tl

from .gamma import bounded_product, integer_power

WRITTEN = tl.constexpr(1 << 32)
CUT = tl.constexpr(1 << 33)


@triton.constexpr_function
def total_words(accumulate, narrow):
    """Words of a total: float32 is what a result of at most as many digits shows of it."""
    return 1 if accumulate == tl.float32 or narrow else 2


@triton.constexpr_function
def slot_words(gates, totals):
    return totals + (2 if gates == "step" else 0)


@triton.jit
def publish_number(word, number, inside, flags, WORDS: tl.constexpr, R: tl.constexpr):
    """A number for each row, in planes of R words."""
    if WORDS == 1:
        bits = number.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_xchg(word, bits | flags, mask=inside, sem="relaxed")
    else:
        bits = number.to(tl.int64, bitcast=True)
        tl.atomic_xchg(word, ((bits >> 32) & 0xFFFFFFFF) | flags, mask=inside, sem="relaxed")
        tl.atomic_xchg(word + R, (bits & 0xFFFFFFFF) | WRITTEN, mask=inside, sem="relaxed")


@triton.jit
def publish_slot(
    word, total, product, cut, inside, TOTALS: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, R: tl.constexpr
):
    """What a tile does to a carry, (R, 1) each."""
    flags = tl.full((R, 1), WRITTEN, tl.int64)
    if RESET:
        flags = tl.where(cut != 0, flags | CUT, flags)
    publish_number(word, total, inside, flags, TOTALS, R)
    if GATES == "step":
        publish_number(word + TOTALS * R, product, inside, WRITTEN, 2, R)


@triton.jit
def await_words(word, wanted):
    words = tl.load(word, mask=wanted, other=WRITTEN, volatile=True)
    while tl.min((words >> 32).to(tl.int32)) == 0:
        words = tl.load(word, mask=wanted, other=WRITTEN, volatile=True)
    return words


@triton.jit
def await_number(word, wanted, DTYPE: tl.constexpr, WORDS: tl.constexpr, R: tl.constexpr):
    """A number of DTYPE at each word, 0 where none is wanted; the first words, which have the flags."""
    words = await_words(word, wanted)
    if WORDS == 1:
        number = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True).to(DTYPE)
    else:
        low = await_words(word + R, wanted)
        number = ((words << 32) | (low & 0xFFFFFFFF)).to(DTYPE, bitcast=True)
    return tl.where(wanted, number, 0), words


@triton.jit
def join_slots(total_0, product_0, cut_0, total_1, product_1, cut_1):
    joined = total_1 + product_1 * total_0
    return tl.where(cut_1 != 0, total_1, joined), bounded_product(product_0, product_1), cut_0 | cut_1


@triton.jit
def carry_into_tile(
    words, tile, weight, start, inside, R: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    TOTALS: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The carry (R, 1) into `tile`; `start`: that into the first one. `words`: those of the rows' first slot (R, 1).

    `weight`: of a whole tile where a row has one gate. GROUP is 2 ** BITS.
    """
    SLOT: tl.constexpr = slot_words(GATES, TOTALS)
    place = tl.arange(0, GROUP)[None, :]
    slot = tile % GROUP
    # The place 0 is the prefix that ends the group before, or the start.
    before = tile - slot - 1 + place
    is_start = (place == 0) & (tile < GROUP)
    wanted = inside & (place <= slot) & (before >= 0)
    word = words + before.to(tl.int64) * (SLOT * R)
    total, flags = await_number(word, wanted, start.dtype, TOTALS, R)
    total = tl.where(is_start, start, total)
    if GATES == "sum" and not RESET:
        return tl.sum(total, axis=1, keep_dims=True)
    elif GATES == "scalar" and not RESET:
        total = total * integer_power(weight, tl.maximum(slot - place, 0), BITS, WIDE)
        return tl.sum(tl.where(place <= slot, total, 0), axis=1, keep_dims=True)
    else:
        is_slot = (place > 0) & (place <= slot)
        product = tl.zeros((R, GROUP), tl.float64) + 1.0
        if GATES == "step":
            of_slot, _ = await_number(word + TOTALS * R, wanted & is_slot, tl.float64, 2, R)
            product = tl.where(is_slot, of_slot, product)
        elif GATES != "sum":
            product = tl.where(is_slot, weight, product)
        cut = tl.zeros((R, GROUP), tl.int32)
        if RESET:
            cut = tl.where(is_slot & ((flags & CUT) != 0), 1, cut)
        total, _, _ = tl.associative_scan((total, product, cut), 1, join_slots)
        return tl.sum(tl.where(place == GROUP - 1, total, 0), axis=1, keep_dims=True)
