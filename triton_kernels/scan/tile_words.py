"""How tiles of R rows that follow one another in time hand on what they carry, while all of them run: in words.

The scheme of lookback.py, for gates of every kind, resets and every dtype: a word has 32 bits of a number and a flag
above them, so that no fence is needed; what takes more bits takes several words, each with its flag. A tile's slot in
its group of GROUP tiles has, for each of its rows, the total from a carry of 0, and with a gate a step the product of
the gates; the last slot of a group has the prefix that ends the group instead. A tile folds the slots before its own
in one fixed tree.
"""

import triton
import triton.language as tl

from .gamma import bounded_product

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
def await_words(word, low, high, N: tl.constexpr, APART: tl.constexpr):
    """N words (R, W) once all that are wanted are written: from `low`, 0 or 1, to `high`."""
    words = ()
    for i in tl.static_range(N):
        wanted = (low == 0) & (high > 0) if i == 0 else high > i
        words = words + (tl.load(word + i * APART, mask=wanted, other=WRITTEN, volatile=True),)
    while tl.min(flags_of(words, N)) == 0:
        words = load_missing(words, word, N, APART)
    if N == 1:
        # Fewer words than threads: several threads have one, each as it was when that thread asked, and the minimum is
        # of one of them. Now that all are written the others get them, too.
        words = load_missing(words, word, N, APART)
    return words


@triton.jit
def load_missing(words, word, N: tl.constexpr, APART: tl.constexpr):
    """Those of N words, APART of them from one to the next, that were not written yet: programs that wait for a word
    would keep others from writing theirs beside it if they read all of them again."""
    loaded = ()
    for i in tl.static_range(N):
        missing = (words[i] >> 32) == 0
        loaded = loaded + (tl.load(word + i * APART, mask=missing, other=words[i], volatile=True),)
    return loaded


@triton.jit
def flags_of(words, N: tl.constexpr):
    """The flags that all have."""
    flags = words[0]
    for i in tl.static_range(1, N):
        flags = flags & words[i]
    return (flags >> 32).to(tl.int32)


@triton.jit
def numbers_of(words, lows, DTYPE: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr):
    numbers = ()
    for i in tl.static_range(N):
        if WORDS == 1:
            number = (words[i] & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True).to(DTYPE)
        else:
            number = ((words[i] << 32) | (lows[i] & 0xFFFFFFFF)).to(DTYPE, bitcast=True)
        numbers = numbers + (number,)
    return numbers


@triton.jit
def join_slots(
    total_0, product_0, cut_0, total_1, product_1, cut_1, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr
):
    if GATES == "sum":
        total = total_1 + total_0
        product = product_0
    else:
        total = total_1 + product_1 * total_0
        product = bounded_product(product_0, product_1) if WIDE else product_0 * product_1
    if RESET:
        return tl.where(cut_1 != 0, total_1, total), product, cut_0 | cut_1
    else:
        return total, product, cut_0


@triton.jit
def join_any(total_0, product_0, cut_0, total_1, product_1, cut_1):
    return join_slots(total_0, product_0, cut_0, total_1, product_1, cut_1, "step", True, True)


@triton.jit
def carry_into_tile(
    words, tile, weight, start, inside, R: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
    TOTALS: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The carry (R, 1) into `tile`; `start`: that into the first one. `words`: those of the rows' first slot (R, 1).

    `weight`: of a whole tile where a row has one gate. A thread has N successive slots of a group.
    """
    APART: tl.constexpr = slot_words(GATES, TOTALS) * R
    slot = tile % GROUP
    # Entry 0 is the prefix that ends the group before, or the start.
    entry = tl.arange(0, GROUP // N)[None, :] * N
    low = tl.where((entry == 0) & (tile < GROUP), 1, 0)
    high = tl.where(inside, slot + 1 - entry, 0)
    word = words + (tile - slot - 1 + entry).to(tl.int64) * APART
    loaded = await_words(word, low, high, N, APART)
    lows = loaded
    if TOTALS == 2:
        lows = await_words(word + R, low, high, N, APART)
    totals = numbers_of(loaded, lows, start.dtype, TOTALS, N)
    products = totals
    if GATES == "step":
        low = tl.where(entry == 0, 1, 0)
        most = await_words(word + TOTALS * R, low, high, N, APART)
        least = await_words(word + (TOTALS + 1) * R, low, high, N, APART)
        products = numbers_of(most, least, tl.float64, 2, N)
    total = tl.where(high > 0, totals[0], 0)
    total = tl.where((entry == 0) & (tile < GROUP), start, total)
    product = tl.zeros(total.shape, tl.float64) + 1.0
    cut = tl.zeros(total.shape, tl.int32)
    for i in tl.static_range(N):
        is_slot = (high > 0) & (entry > 0) if i == 0 else high > i
        own_product = tl.full((), 1.0, tl.float64)
        if GATES != "sum":
            own_product = tl.where(is_slot, products[i] if GATES == "step" else weight, 1.0)
        own_cut = cut
        if RESET:
            own_cut = tl.where(is_slot & ((loaded[i] & CUT) != 0), 1, 0)
        if i == 0:
            product, cut = product * own_product, own_cut
        else:
            own_total = tl.where(is_slot, totals[i], 0)
            total, product, cut = join_slots(total, product, cut, own_total, own_product, own_cut, GATES, RESET, WIDE)
    # Triton 3.6 compiles what follows a return, too, unless it is another branch.
    if (GROUP > N and GATES == "sum") and not RESET:
        return tl.sum(total, axis=1, keep_dims=True)
    else:
        if GROUP > N:
            total, _, _ = tl.associative_scan((total, product, cut), 1, join_any)
        is_last = tl.arange(0, GROUP // N)[None, :] == GROUP // N - 1
        return tl.sum(tl.where(is_last, total, 0), axis=1, keep_dims=True)
