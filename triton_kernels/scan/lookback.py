"""Long rows in one pass: decoupled look-back with a fixed order of additions.

Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016, adds whatever mix of totals and
prefixes has been published when it looks, so its rounding depends on timing. Here a row's tiles form groups of GROUP; a
tile waits for the totals of all earlier tiles of its group and for the prefix that the last tile of the group before
published, and folds them in one fixed tree. gamma is one number a row, so that a total needs no product beside it, and
total and flag fit one 64-bit word: no fence is needed. A tile waits only for tiles of lower program number, which start
earlier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import device_of
from .gamma import integer_power, load_gamma, power_of_two_power, rates, split_gamma, weighted
from .lanes import last_lane, previous_lane, scan_lanes
from .tile import gate_gradients, group_totals, load_steps, positions, replay, store_steps, summed, widened, within

PUBLISHED = tl.constexpr(1 << 32)


def look_back_words(x: Tensor, rows: int, length: int) -> tuple[Tensor, dict[str, bool]]:
    """(rows, length) words, zeroed, and the options of the launch behind: it may begin while the zeroing ends.

    The kernel, then DEPENDENT, waits for the zeros before its first word: 0.5 us less on an H200. What was
    launched before the zeroing has ended when that begins, so that the kernel may read its inputs without waiting.
    """
    words = torch.zeros((rows, length), dtype=torch.int64, device=x.device)
    return words, {"launch_pdl": True} if device_of(x).dependent_launches else {}


@triton.jit
def publish(word_ptr, value):
    """Flag and float32 in one 64-bit word."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, bits | PUBLISHED, sem="relaxed")


@triton.jit
def look_back(word_ptr, tile, weight, initial, GATES: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr):
    """The carry into `tile`, float64. `weight`: gamma ** tile length. Words of a group: GROUP totals, then a prefix."""
    slot = tile % GROUP
    entry = tl.arange(0, GROUP)
    # The word at index `slot` would be this tile's own: read there the prefix that ends the group before.
    word = word_ptr + (tile // GROUP) * (GROUP + 1) + entry
    word = tl.where(entry == slot, word_ptr + (tile // GROUP) * (GROUP + 1) - 1, word)
    wanted = (entry < slot) | ((entry == slot) & (tile >= GROUP))
    words = tl.load(word, mask=wanted, other=PUBLISHED, volatile=True)
    while tl.min(words >> 32, axis=0) == 0:
        words = tl.load(word, mask=wanted, other=PUBLISHED, volatile=True)
    totals = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    totals = tl.where((entry == slot) & (tile < GROUP), initial.to(tl.float64), totals)
    if GATES == "sum":
        folded = totals
    else:
        exponent = tl.maximum(tl.where(entry == slot, slot, slot - 1 - entry), 0)
        folded = totals * integer_power(weight, exponent, 8, WIDE)
    return tl.sum(tl.where(entry <= slot, folded, 0.0), axis=0)


@triton.jit(do_not_specialize=["gamma_bits", "tiles"])
def scan_lookback(
    x_ptr, y_ptr, gamma_ptr, initial_ptr, output_ptr, gamma_grad_ptr, words_ptr,
    gamma_bits: tl.int64, T, rows, inner, tiles, words_row,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, gamma_outer, gamma_inner,
    initial_outer, initial_inner, output_outer, output_time, output_inner,
    Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    INDEX: tl.constexpr, GATES: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    GRADIENT: tl.constexpr, DEPENDENT: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One program: one tile of Q * J * V steps of one row, computed in float32.

    `words_ptr` (rows, words_row) int64, zeroed. GRADIENT "sum": (rows, tiles) partial sums of gamma's gradient.
    """
    TILE: tl.constexpr = Q * J * V
    STARTED: tl.constexpr = HAS_INITIAL and GRADIENT == "none"
    NUMBER: tl.constexpr = "scalar" if GATES == "row" else GATES  # a program has one row
    # All rows' first tiles start before any second one, so that many rows fill the device without waiting.
    row = tl.program_id(0) % rows
    tile = tl.program_id(0) // rows
    outer_index = (row // inner).to(tl.int64)
    inner_index = (row % inner).to(tl.int64)
    word_ptr = words_ptr + row.to(tl.int64) * words_row
    x_row = x_ptr + outer_index * x_outer + inner_index * x_inner
    y_row = y_ptr + outer_index * y_outer + inner_index * y_inner
    gamma_row = x_row
    if GATES == "row":
        gamma_row = gamma_ptr + outer_index * gamma_outer + inner_index * gamma_inner
    gamma = load_gamma(gamma_row, gamma_bits, GATES)
    gate, gate_rest = split_gamma(gamma)
    gates = (gate,)
    RATES: tl.constexpr = rates(gamma_row.dtype, x_row.dtype, GATES)
    row_start = gate * 0
    if HAS_INITIAL:
        row_initial = initial_ptr + outer_index * initial_outer + inner_index * initial_inner
        row_start = tl.load(row_initial).to(tl.float32)
    initial = tl.full((), 0.0, tl.float32)
    if STARTED:
        initial = row_start

    pin = (y_ptr, T < 0)
    segment = tl.arange(0, Q)[:, None]
    begin = tile.to(INDEX) * TILE
    position, valid, index = positions(begin, segment, segment >= 0, T, Q, J, V, REVERSE, LAYOUT)
    values = load_steps(x_row, position, valid, x_time, 0, pin, Q, J, V, REVERSE, LAYOUT)
    group_weight = power_of_two_power(gamma, V, WIDE)
    total, _, _ = group_totals(values, gates, gate_rest, values, tl.float32, V, RATES, False)
    total, segment_weight, _ = scan_lanes(total, group_weight, total, Q, J, NUMBER, False, WIDE)
    # Float64 along the row, as in scan_tiles.
    ends = tl.reshape(last_lane(total, Q, J), (1, Q)).to(tl.float64)
    ends, tile_weight, _ = scan_lanes(ends, segment_weight, ends, 1, Q, NUMBER, False, WIDE)
    tile_total = tl.sum(tl.reshape(last_lane(ends, 1, Q), (1,)), axis=0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    slot = tile % GROUP
    own_word = word_ptr + (tile // GROUP) * (GROUP + 1) + slot
    if slot < GROUP - 1:
        publish(own_word, tile_total.to(tl.float32))
    carry = look_back(word_ptr, tile, tile_weight, initial, GATES, WIDE, GROUP)
    if slot == GROUP - 1:
        if GATES == "sum":
            prefix = tile_total + carry
        else:
            prefix = tile_total + tile_weight * carry
        publish(own_word + 1, prefix.to(tl.float32))

    segment_index = tl.arange(0, Q)[None, :]
    carries = previous_lane(ends, 0.0, 1, Q)
    segment_powers = integer_power(segment_weight, segment_index, 8, WIDE)
    carries = weighted(carries, segment_powers, carry, GATES, True)
    lane = tl.arange(0, J)[None, :]
    lane_weight = integer_power(group_weight, lane, 5, WIDE)
    lane_total = previous_lane(total, 0.0, Q, J)
    group_carry = weighted(lane_total, lane_weight, tl.reshape(carries, (Q, 1)).to(tl.float32), GATES, WIDE)
    first = begin + (segment * J + lane) * V
    SELECT_FIRST: tl.constexpr = GATES != "sum" and not STARTED
    results = replay(
        values, gates, gate_rest, values, group_carry, first == 0, tl.float32, V, RATES, False, SELECT_FIRST
    )
    store_steps(y_row, position, valid, y_time, results, Q, J, V, REVERSE, LAYOUT)
    if GRADIENT == "sum":
        output_row = output_ptr + outer_index * output_outer + inner_index * output_inner
        next_valid = within(valid, index, 0, T - 1, LAYOUT)
        next_position = (position[0] - 1 if REVERSE else position[0] + 1,)
        previous = load_steps(output_row, next_position, next_valid, output_time, 0, pin, Q, J, V, REVERSE, LAYOUT)
        previous = widened(previous, tl.float32, V)
        products = gate_gradients(results, previous, row_start, values, first, T, V, HAS_INITIAL, False)
        partial = tl.sum(tl.reshape(summed(products, Q, V), (Q,)), axis=0)
        tl.store(gamma_grad_ptr + row.to(tl.int64) * tiles + tile, partial)
