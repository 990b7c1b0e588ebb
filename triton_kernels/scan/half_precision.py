"""Scans of float16 and bfloat16 with a shared gamma, a number from 1/2 to 1 in magnitude: long rows, and whole columns.

Everything is float32 here, 2^13 times finer than what is stored, and powers of gamma come from the host or from `exp2`.
The kernels for every form and dtype (lookback.py, columns.py) spend 24 and 16 instructions an element on
float64 powers, on gamma in two parts and on the recurrence step by step, these 13 and 10 to 13: on an H200 these types
wait for instructions, not for memory. A weight stays above 0 (`above_zero`), so that an infinity does not become a NaN.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from .lanes import last_lane, previous_lane
from .lookback import PUBLISHED, look_back_words, publish
from .problem import ScanProblem, Tile
from .register_groups import column_order, steps_of, tile_of
from .tile import backwards, in_groups, pack, positions, store_steps, unpack

SMALLEST_GAMMA = 0.5
LANES, VECTOR = 32, 8
# Float32's smallest number. What it makes of a finite carry, in place of 0, is at most 2^-21; of one below 2^16 it is
# less than the smallest half.
TINY = 2.0**-149
SMALLEST = tl.constexpr(TINY)


@triton.jit
def above_zero(weight):
    # As a number it would be a float64: float32's smallest number is not a normal one.
    return tl.maximum(weight, tl.full((), SMALLEST, tl.float32))


@triton.jit
def power(log_gamma, exponent):
    """|gamma| ** exponent; `log_gamma` is to base 2."""
    return above_zero(tl.exp2(exponent.to(tl.float32) * log_gamma))


@triton.jit
def opaque(tile):
    """`tile`: what is computed from it is computed anew. A register holds two such numbers, but one float32."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def steps_in_order(tile, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr):
    steps = unpack(tile, Q, J, V)
    if REVERSE:
        steps = backwards(steps, V)
    return steps


@triton.jit
def scan_weighted(total, weights, P: tl.constexpr, J: tl.constexpr, LEVELS: tl.constexpr):
    """Inclusive scan of (P, J) along J = 2 ** LEVELS. `weights`: of the distances 1, 2, 4 ... between lanes."""
    lane = tl.arange(0, J)[None, :] + tl.zeros((P, 1), tl.int32)
    for level in tl.static_range(LEVELS):
        source = tl.maximum(lane - (1 << level), 0)
        weight = tl.full((), weights[level], tl.float32)
        total = tl.where(lane >= (1 << level), weight * tl.gather(total, source, 1) + total, total)
    return total


@triton.jit
def look_back(word_ptr, tile, total, tile_log, initial, GROUP: tl.constexpr):
    """The carry into `tile` by the scheme and the words of lookback.py; publishes what `tile` adds.

    `tile_log`: of the weight of a whole tile, to base 2.
    """
    slot = tile % GROUP
    entry = tl.arange(0, GROUP)
    base = word_ptr + (tile // GROUP) * (GROUP + 1)
    if slot < GROUP - 1:
        publish(base + slot, total)
    # The word at index `slot` would be this tile's own: read there the prefix that ends the group before.
    before = entry == slot
    word = tl.where(before, base - 1, base + entry)
    wanted = (entry < slot) | (before & (tile >= GROUP))
    words = tl.load(word, mask=wanted, other=PUBLISHED, volatile=True)
    while tl.min((words >> 32).to(tl.int32), axis=0) == 0:
        words = tl.load(word, mask=wanted, other=PUBLISHED, volatile=True)
    totals = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    totals = tl.where(wanted, totals, tl.where(before, initial, 0.0))
    weights = power(tile_log, tl.maximum(tl.where(before, slot, slot - 1 - entry), 0))
    carry = tl.sum(totals * weights, axis=0)
    if slot == GROUP - 1:
        publish(base + GROUP, power(tile_log, slot * 0 + 1) * carry + total)
    return carry


@triton.jit
def words_of_tile(
    x_row, y_row, begin, segment, T, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr
):
    """A tile of a row that may begin, reversed end, inside a word of V steps: tiles are cut where that word is.

    Returns x's and y's first words, (Q, J * V) offsets from there, which of them exist, and whether all do.
    """
    n = tl.arange(0, J * V)[None, :]
    address = x_row.to(tl.int64)
    if REVERSE:
        before = ((V - (address // 2 + T) % V) % V).to(begin.dtype)
        end = T + before
        offset = -begin - (segment * J + n // V + 1) * V + n % V
        valid = (offset >= -end) & (offset < -before)
        x_word, y_word = x_row + end, y_row + end
    else:
        before = (address // 2 % V).to(begin.dtype)
        offset = begin + segment * (J * V) + n
        valid = (offset >= before) & (offset < T + before)
        x_word, y_word = x_row - before, y_row - before
    inside = (begin >= before) & (begin + Q * J * V <= T + before)
    return tl.multiple_of(x_word, 2 * V), tl.multiple_of(y_word, 2 * V), offset, valid, inside


@triton.jit(do_not_specialize=["tiles"])
def scan_half_rows(
    x_ptr, y_ptr, initial_ptr, words_ptr, gamma, log_gamma, lane_weights, segment_weights,
    T, rows, inner, tiles, words_row,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, initial_outer, initial_inner,
    Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, LEVELS_J: tl.constexpr,
    LEVELS_Q: tl.constexpr, INDEX: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    OPAQUE: tl.constexpr, DEPENDENT: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One program: one tile of Q segments of J groups of V steps of one row. `words_ptr` (rows, words_row), zeroed.

    DEPENDENT: see `look_back_words`.
    `lane_weights`, `segment_weights`: see `scan_weighted`.
    """
    TILE: tl.constexpr = Q * J * V
    row = tl.program_id(0) % rows
    tile = tl.program_id(0) // rows
    outer_index = (row // inner).to(tl.int64)
    inner_index = (row % inner).to(tl.int64)
    x_row = x_ptr + outer_index * x_outer + inner_index * x_inner
    y_row = y_ptr + outer_index * y_outer + inner_index * y_inner
    initial = tl.full((), 0.0, tl.float32)
    if HAS_INITIAL:
        initial = tl.load(initial_ptr + outer_index * initial_outer + inner_index * initial_inner).to(tl.float32)

    segment = tl.arange(0, Q)[:, None]
    begin = tile.to(INDEX) * TILE
    if LAYOUT == "words":
        x_word, y_word, offset, valid, inside = words_of_tile(x_row, y_row, begin, segment, T, Q, J, V, REVERSE)
        # Masks would have a word loaded step by step.
        if inside:
            loaded = tl.load(x_word + offset)
        else:
            loaded = tl.load(x_word + offset, mask=valid, other=0)
        loaded = tl.reshape(loaded, (Q, J, V))
    else:
        position, valid, _ = positions(begin, segment, segment >= 0, T, Q, J, V, REVERSE, LAYOUT)
        loaded = tl.reshape(tl.load(x_row + position[0] * x_time, mask=valid[0], other=0), (Q, J, V))
        if LAYOUT != "vectors":
            loaded = in_groups(loaded, (y_ptr, T < 0))
    steps = steps_in_order(loaded, Q, J, V, REVERSE)
    total = steps[0].to(tl.float32)
    for i in tl.static_range(1, V):
        total = gamma * total + steps[i].to(tl.float32)
    total = scan_weighted(total, lane_weights, Q, J, LEVELS_J)
    ends = tl.reshape(last_lane(total, Q, J), (1, Q))
    ends = scan_weighted(ends, segment_weights, 1, Q, LEVELS_Q)
    tile_total = tl.sum(tl.reshape(last_lane(ends, 1, Q), (1,)), axis=0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    word_ptr = words_ptr + row.to(tl.int64) * words_row
    carry = look_back(word_ptr, tile, tile_total, log_gamma * TILE, initial, GROUP)

    carries = previous_lane(ends, 0.0, 1, Q) + power(log_gamma * (J * V), tl.arange(0, Q)[None, :]) * carry
    lane_weight = power(log_gamma * V, tl.arange(0, J)[None, :])
    carry = previous_lane(total, 0.0, Q, J) + lane_weight * tl.reshape(carries, (Q, 1))
    if OPAQUE:
        steps = steps_in_order(opaque(loaded), Q, J, V, REVERSE)
    results = ()
    for i in tl.static_range(V):
        carry = gamma * carry + steps[i].to(tl.float32)
        results = results + (carry,)
    if LAYOUT == "words":
        if REVERSE:
            results = backwards(results, V)
        stored = tl.reshape(pack(results, Q, J, V).to(y_ptr.dtype.element_ty), (Q, J * V))
        if inside:
            tl.store(y_word + offset, stored)
        else:
            tl.store(y_word + offset, stored, mask=valid)
    else:
        store_steps(y_row, position, valid, y_time, results, Q, J, V, REVERSE, LAYOUT)


@triton.jit
def join(gate_0, value_0, carry_0, gate_1, value_1, carry_1):
    """`carry`: what a group adds its own total to, so that no second product of gates is needed."""
    joined = gate_1 * value_0
    return above_zero(gate_0 * gate_1), value_1 + joined, carry_1 + joined


@triton.jit
def load_columns(x_column, inside, index, T, x_time, INDEX: tl.constexpr, REVERSE: tl.constexpr):
    """The steps `index` (1, R), in scan order, of columns (P, 1)."""
    position = index
    if REVERSE:
        position = T - 1 - index
    return tl.load(x_column + position.to(INDEX) * x_time, mask=inside & (index < T), other=0)


@triton.jit
def scan_half_columns(
    x_ptr, y_ptr, initial_ptr, gamma, log_gamma, powers, T, inner,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, initial_outer, initial_inner,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr, INDEX: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program: P neighboring columns, R steps at a time, V successive ones of C columns a thread's. WHOLE: T <= R.

    `powers`: gamma ** (1 - V) to gamma ** 0.
    """
    J: tl.constexpr = R // V
    block = tl.program_id(0).to(tl.int64)
    blocks = (inner + P - 1) // P
    outer_index = block // blocks
    column = (block % blocks) * P + tl.arange(0, P)[:, None]
    # A thread would load 16 bytes of columns otherwise, and have fewer steps of each.
    column = tl.max_contiguous(tl.multiple_of(column, (C, 1)), (C, 1))
    inside = column < inner
    order = column_order(tl.arange(0, R)[None, :], V)
    group = tl.arange(0, J)[None, :]
    x_column = x_ptr + outer_index * x_outer + column * x_inner
    y_column = y_ptr + outer_index * y_outer + column * y_inner
    gate = tl.zeros((P, J), tl.float32) + power(log_gamma * V, tl.full((), 1, tl.int32))
    carry = tl.zeros((P, 1), tl.float32)
    if HAS_INITIAL:
        start = initial_ptr + outer_index * initial_outer + column * initial_inner
        carry = tl.load(start, mask=inside, other=0).to(tl.float32)
    ahead = load_columns(x_column, inside, order, T, x_time, INDEX, REVERSE)
    for begin in range(0, R if WHOLE else T, R):
        index = order.to(INDEX) + begin
        step = steps_of(ahead, V)
        if not WHOLE:
            ahead = load_columns(x_column, inside, index + R, T, x_time, INDEX, REVERSE)
        total = step[0].to(tl.float32)
        totals = (total,)
        for i in tl.static_range(1, V):
            total = gamma * total + step[i].to(tl.float32)
            totals = totals + (total,)
        _, ends, carried = tl.associative_scan((gate, total, tl.zeros((P, J), tl.float32)), 1, join)
        if HAS_INITIAL or not WHOLE:
            carried += power(log_gamma * V, group + 1) * carry
            last = tl.sum(tl.where(group == J - 1, ends, 0), axis=1, keep_dims=True)
            carry = power(log_gamma * R, tl.full((), 1, tl.int32)) * carry + last
        # Takes the carry into the layout of what is loaded, once: see `discounted_columns`.
        carried = tl.where(totals[0] != totals[0], totals[0], carried)
        results = ()
        for i in tl.static_range(V):
            results = results + (powers[i] * carried + totals[i],)
        position = index
        if REVERSE:
            position = T - 1 - index
        y = tile_of(results, V).to(y_ptr.dtype.element_ty)
        tl.store(y_column + position.to(INDEX) * y_time, y, mask=inside & (index < T))


@lru_cache
def powers_of(gamma: float, exponents: tuple[int, ...]) -> tuple[float, ...]:
    """As arguments of a kernel, where instructions read them without a load."""
    return tuple(math.copysign(max(abs(gamma**exponent), TINY), gamma**exponent) for exponent in exponents)


def covers(problem: ScanProblem) -> bool:
    """Whether these kernels are for it, gradients and the shape aside."""
    assert problem.y.tensor is not None
    plain = problem.gates.kind in ("sum", "scalar") and problem.reset.tensor is None
    return plain and problem.half_precision and SMALLEST_GAMMA <= abs(problem.gates.value) <= 1


def run_rows(problem: ScanProblem, steps: int, group: int) -> None:
    """Tiles of `steps`, at least 256, by look-back groups of `group` tiles; both powers of two.

    64 values a thread and 64 registers: eight programs of four warps on a multiprocessor, 128 KB on their way. On an
    H200 0.83 to 0.93 of a copy; 1e8 steps by 32 values a thread 0.60, with 80 registers 0.81. Rows of any alignment
    by words of memory: 96 registers, 64 would spill.
    """
    x, y, initial, layout = problem.x, problem.y, problem.initial, problem.layout
    assert x.tensor is not None
    tile = Tile(1, steps // (LANES * VECTOR), LANES, VECTOR, max(1, steps // (8 * LANES * VECTOR)))
    tiling = "words" if _share_words(problem) else problem.tiling
    tiles = triton.cdiv(layout.length + (VECTOR - 1 if tiling == "words" else 0), steps)
    words_row = tiles // group * (group + 1) + tiles % group
    words, options = look_back_words(x.tensor, layout.rows, words_row)
    gamma = problem.gates.value
    levels = tile.Q.bit_length() - 1
    scan_half_rows[(layout.rows * tiles,)](
        x.tensor, y.tensor, initial.tensor, words, gamma, math.log2(abs(gamma)),
        powers_of(gamma, tuple(VECTOR << level for level in range(5))),
        powers_of(gamma, tuple(VECTOR * LANES << level for level in range(max(1, levels)))),
        layout.length, layout.rows, problem.inner, tiles, words_row,
        x.outer, x.time, x.inner, y.outer, y.time, y.inner, initial.outer, initial.inner,
        tile.Q, tile.J, tile.V, group, 5, levels, problem.index_dtype(tile, x, y), problem.reverse,
        initial.tensor is not None, x.tensor.is_cuda and torch.version.hip is None, bool(options),
        tiling, num_warps=tile.num_warps, maxnreg={"vectors": 64, "words": 96}.get(tiling), **options,
    )  # fmt: skip


def _share_words(problem: ScanProblem) -> bool:
    """Whether every row of a result begins as far into a word of memory as that of the input, and from nothing."""
    x, y = problem.x, problem.y
    assert x.tensor is not None
    assert y.tensor is not None
    apart = (y.tensor.data_ptr() - x.tensor.data_ptr()) % (2 * VECTOR)
    strides = ((y.outer - x.outer) % VECTOR, (y.inner - x.inner) % VECTOR, x.time - 1, y.time - 1)
    return problem.tiling == "elements" and problem.initial.tensor is None and not (apart or any(strides))


def columns_tile(columns: int, steps: int, whole: bool) -> tuple[int, int, int]:
    """(V, C, warps) for programs that hold so many columns and steps.

    A thread has V steps of C columns and nothing else: another number of warps takes its values through shared memory.
    Where parts of columns follow one another it has twice as many, and the next part loads meanwhile. On an H200 0.82
    to 0.97 of a copy. A carry of less than 2^-100 may lose digits where gamma is near 1/2 (below 2^-126 on its way).
    """
    group, neighbors = (16, 8) if not whole else (32, 2) if steps > 256 else (16, 4)
    return group, neighbors, max(1, columns * steps // (LANES * group * neighbors))


def run_columns(problem: ScanProblem, block: Tile) -> None:
    x, y, initial, layout = problem.x, problem.y, problem.initial, problem.layout
    assert x.tensor is not None
    gamma = problem.gates.value
    whole = layout.length <= block.steps
    group, neighbors, warps = columns_tile(block.R, block.steps, whole)
    scan_half_columns[(layout.outer * triton.cdiv(layout.inner, block.R),)](
        x.tensor, y.tensor, initial.tensor, gamma, math.log2(abs(gamma)), powers_of(gamma, tuple(range(1 - group, 1))),
        layout.length, layout.inner,
        x.outer, x.time, x.inner, y.outer, y.time, y.inner, initial.outer, initial.inner,
        block.R, block.steps, group, neighbors, problem.index_dtype(block, x, y), problem.reverse,
        initial.tensor is not None, whole, num_warps=warps,
    )  # fmt: skip
