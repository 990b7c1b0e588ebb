"""The scan kernel for rows and for columns: a program takes R rows and takes time serially, a tile at a time.

R * Q segments of J groups of V steps make a tile, see tile.py: J <= 32 lanes make a segment, a row has Q segments in
the tile. A thread that scans its column serially: Q = J = 1. Of few long rows or columns a program takes one tile, and
the carry into it from the words of the tiles before (tile_words.py), or the tiles of a part of time, and the carry from
the totals of the parts before (parts.py).
"""

import triton
import triton.language as tl

from .gamma import integer_power, load_gamma, power_of_two_power, rates, split_gamma
from .lanes import join_carry, last_lane, previous_lane, scan_lanes
from .part_words import carry_into_part
from .tile import (
    as_loaded,
    gate_gradients,
    group_totals,
    load_steps,
    opaque,
    opaque_steps,
    positions,
    replay,
    store_steps,
    summed,
    widened,
    within,
)
from .tile_words import WRITTEN, carry_into_tile, publish_number, publish_slot, slot_words, total_words


@triton.jit
def rows_of_block(block, blocks, inner, R: tl.constexpr, Q: tl.constexpr, INDEX: tl.constexpr, LAYOUT: tl.constexpr):
    """(outer index, first inner index) of a program's R rows; of its R * Q parts (index among the rows, validity,
    segment); of its rows (number, validity); and the former two as `positions` lays out the addresses of a tile."""
    part = tl.arange(0, R * Q)[:, None]
    # A block never straddles two outer indices.
    across_inner = (inner + R - 1) // R
    if LAYOUT == "serial" or LAYOUT == "columns":
        outer_index = block // across_inner
        start = (block % across_inner) * R
    else:
        # Rows of strided steps are neighbors where `outer` goes on: programs that run at once share lines of memory.
        outer = blocks // across_inner
        outer_index = block % outer
        start = (block // outer) * R
    row_index = (part // Q).to(INDEX)
    row = start + tl.arange(0, R)[:, None]
    across = row_index
    if LAYOUT == "columns":
        across = tl.arange(0, R)[None, :].to(INDEX)
    return (
        outer_index, start, row_index, start + row_index < inner, part % Q, outer_index * inner + row, row < inner,
        across, start + across < inner,
    )  # fmt: skip


@triton.jit
def rows_at(pointer, outer_index, start, row_index, outer_stride, inner_stride):
    """Rows at the indices `row_index` behind the one at `start`, an offset that is computed once a program."""
    return pointer + (outer_index * outer_stride + start * inner_stride) + row_index * inner_stride


@triton.jit
def rows_of_operands(
    x_ptr, gamma_ptr, reset_ptr, outer_index, start, across, row_index,
    x_outer, x_inner, gamma_outer, gamma_inner, reset_outer, reset_inner,
    GATES: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """`rows_at` for what a scan reads: x, gamma and resets, or x again where there is none."""
    x_row = rows_at(x_ptr, outer_index, start, across, x_outer, x_inner)
    gamma_row = x_row
    if GATES == "step":
        gamma_row = rows_at(gamma_ptr, outer_index, start, across, gamma_outer, gamma_inner)
    elif GATES == "row":
        gamma_row = rows_at(gamma_ptr, outer_index, start, row_index, gamma_outer, gamma_inner)
    reset_row = x_row
    if RESET:
        reset_row = rows_at(reset_ptr, outer_index, start, across, reset_outer, reset_inner)
    return x_row, gamma_row, reset_row


@triton.jit
def gates_of_rows(
    gamma_row, gamma_bits, row_valid, lane, J: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gate of the rows, a tuple of one, with what is left of it; its powers over a group and up to each lane."""
    if GATES == "row":
        gamma = tl.load(gamma_row, mask=row_valid, other=0).to(tl.float64)
    elif GATES == "step":
        gamma = 0.0
    else:
        gamma = load_gamma(gamma_row, gamma_bits, GATES)
    gates = (gamma,)
    gate_rest = gamma
    weight = gamma
    lane_weight = gamma
    if GATES == "scalar" or GATES == "row":
        if ACC != tl.float64:  # noqa: SIM300
            gate, gate_rest = split_gamma(gamma)
            gates = (gate,)
        weight = power_of_two_power(gamma, V, WIDE)
        lane_weight = integer_power(weight, lane, 5 if J <= 32 else 10, WIDE)
    return gates, gate_rest, weight, lane_weight


@triton.jit
def carry_segments(
    total, product, cut, carry, R: tl.constexpr, Q: tl.constexpr, J: tl.constexpr, GATES: tl.constexpr,
    RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From scanned groups (R * Q, J) and the rows' carry (R, 1): the carry into each segment (R * Q, 1), the one out of
    the tile, and what the segments multiply and cut, (R, Q).

    What runs along a row is float64: in float32 a carry stalls where an addend is under half a unit in its last place,
    an error of 3e-2 after 10000 ones at gamma = 0.999.
    """
    P: tl.constexpr = R * Q
    # (P, 1) totals of the segments -> (R, Q).
    ends = tl.reshape(last_lane(total, P, J), (R, Q)).to(carry.dtype)
    end_cuts = ends
    if RESET:
        end_cuts = tl.reshape(last_lane(cut, P, J), (R, Q))
    end_products = product
    if GATES == "step":
        end_products = tl.reshape(last_lane(product, P, J), (R, Q))
    elif GATES == "row":
        end_products = tl.reshape(product, (R, Q))
    if Q == 1:
        segment_carry = carry
        carry = join_carry(ends, end_products, end_cuts, carry, GATES, RESET, WIDE)
    else:
        started = join_carry(ends, end_products, end_cuts, carry, GATES, RESET, WIDE)
        ends = tl.where(tl.arange(0, Q)[None, :] == 0, started, ends)
        ends, end_products, end_cuts = scan_lanes(ends, end_products, end_cuts, R, Q, GATES, RESET, WIDE)
        segment_carry = tl.reshape(previous_lane(ends, carry, R, Q), (P, 1))
        carry = last_lane(ends, R, Q)
    return segment_carry, carry, end_products, end_cuts


@triton.jit
def carry_groups(
    total, product, cut, segment_carry, lane_weight, P: tl.constexpr, J: tl.constexpr, ACC: tl.constexpr,
    GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The carry into each group (P, J) of the segments."""
    lane_total = previous_lane(total, 0, P, J)
    lane_cut = lane_total
    if GATES == "step":
        lane_weight = previous_lane(product, 1.0, P, J)
    if RESET:
        lane_cut = previous_lane(cut, 0, P, J)
    return join_carry(lane_total, lane_weight, lane_cut, segment_carry.to(ACC), GATES, RESET, WIDE)


@triton.jit
def gradients_of_tile(
    results, values, output_row, reset_row, row_start, position, valid, index, begin, group, output_time, reset_time, T,
    pin,
    P: tl.constexpr, J: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, RESET: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """`gate_gradients` of a tile's steps."""
    next_position = (position[0] - 1 if REVERSE else position[0] + 1,)
    next_valid = within(valid, index, 0, T - 1, LAYOUT)
    previous = load_steps(output_row, next_position, next_valid, output_time, 0, pin, P, J, V, REVERSE, LAYOUT)
    previous = widened(previous, ACC, V)
    own_resets = values
    if RESET:
        own_resets = load_steps(reset_row, position, valid, reset_time, 0, pin, P, J, V, REVERSE, LAYOUT)
    return gate_gradients(results, previous, row_start, own_resets, begin + group, T, V, HAS_INITIAL, RESET)


@triton.jit
def load_gates(
    gamma_row, reset_row, row_gates, values, position, valid, index, gamma_time, reset_time, T, pin,
    P: tl.constexpr, J: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr,
    REVERSE: tl.constexpr, SHIFTED: tl.constexpr, STARTED: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The gates of a tile's V steps, `row_gates` where the rows have one, and the resets with RESET."""
    # A gate that nothing can pass through is not read: shifted, there is none before the first step.
    LOWEST: tl.constexpr = 1 if SHIFTED or not STARTED else 0
    gate_valid = within(valid, index, LOWEST, T, LAYOUT)
    if SHIFTED:
        position = (position[0] + 1 if REVERSE else position[0] - 1,)
    gates = row_gates
    if GATES == "step":
        gates = load_steps(gamma_row, position, gate_valid, gamma_time, 0, pin, P, J, V, REVERSE, LAYOUT)
    resets = values
    if RESET:
        resets = load_steps(reset_row, position, gate_valid, reset_time, 0, pin, P, J, V, REVERSE, LAYOUT)
    return gates, resets


@triton.jit
def load_tile(
    x_row, gamma_row, reset_row, row_gates, gate_rest, weight, begin, segment, across_valid, T,
    x_time, gamma_time, reset_time, pin,
    P: tl.constexpr, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr,
    WIDE: tl.constexpr, REVERSE: tl.constexpr, SHIFTED: tl.constexpr, STARTED: tl.constexpr, RESET: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """A tile: its `positions`; its values, gates and resets; (total, product, cut) of its groups, scanned (P, J)."""
    position, valid, index = positions(begin, segment, across_valid, T, Q, J, V, REVERSE, LAYOUT)
    values = load_steps(x_row, position, valid, x_time, 0, pin, P, J, V, REVERSE, LAYOUT)
    gates, resets = load_gates(
        gamma_row, reset_row, row_gates, values, position, valid, index, gamma_time, reset_time, T, pin,
        P, J, V, ACC, GATES, RESET, REVERSE, SHIFTED, STARTED, LAYOUT,
    )  # fmt: skip
    RATES: tl.constexpr = rates(gamma_row.dtype, x_row.dtype, GATES)
    total, product, cut = group_totals(values, gates, gate_rest, resets, ACC, V, RATES, RESET)
    if GATES != "step":
        product = weight
    total, product, cut = scan_lanes(total, product, cut, P, J, GATES, RESET, WIDE)
    return position, valid, index, values, gates, resets, total, product, cut


@triton.jit
def tile_result(products, R: tl.constexpr, Q: tl.constexpr, GATES: tl.constexpr):
    """What the segments (R, Q) of a tile multiply in all, (R, 1) or a number."""
    if GATES == "step" or GATES == "row":
        return last_lane(products, R, Q)
    else:
        return products


@triton.jit
def look_back(
    words_ptr, block, tile, tiles, total, product, cut, start, inside, R: tl.constexpr, Q: tl.constexpr,
    J: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, NARROW: tl.constexpr, DEPENDENT: tl.constexpr,
    ACC: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`carry_segments` for a tile whose carry comes from the tiles before; hands on what those behind wait for."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    TOTALS: tl.constexpr = total_words(ACC, NARROW)
    SLOT: tl.constexpr = slot_words(GATES, TOTALS)
    words = words_ptr + block * tiles * (SLOT * R) + tl.arange(0, R)[:, None]
    own = words + tile.to(tl.int64) * (SLOT * R)
    _, own_total, products, cuts = carry_segments(
        total, product, cut, tl.zeros((R, 1), start.dtype), R, Q, J, GATES, RESET, WIDE
    )
    own_product = tile_result(products, R, Q, GATES)
    own_cut = last_lane(cuts, R, Q) if RESET else cuts
    is_last = tile % GROUP == GROUP - 1
    if not is_last:
        publish_slot(own, own_total, own_product, own_cut, inside, TOTALS, GATES, RESET, R)
    carry = carry_into_tile(words, tile, own_product, start, inside, R, GROUP, N, TOTALS, GATES, RESET, WIDE)
    segment_carry, carry, _, _ = carry_segments(total, product, cut, carry, R, Q, J, GATES, RESET, WIDE)
    if is_last:
        publish_number(own, carry, inside, WRITTEN, TOTALS, R)
    return segment_carry, carry


@triton.jit
def first_carry(
    initial_ptr, outer_index, start, row_index, inside, initial_outer, initial_inner, DTYPE: tl.constexpr,
    STARTED: tl.constexpr,
):  # fmt: skip
    """The carry into the first step of the rows at `row_index` behind `start`, as rows_at has them."""
    carry = tl.zeros(row_index.shape, DTYPE)
    if STARTED:
        initial_row = rows_at(initial_ptr, outer_index, start, row_index, initial_outer, initial_inner)
        carry = tl.load(initial_row, mask=inside, other=0).to(DTYPE)
    return carry


@triton.jit
def loaded_anew(valid, values, gates, V: tl.constexpr, GATES: tl.constexpr):
    """What a tile of serial columns has loaded, `opaque`."""
    if GATES == "step":
        gates = opaque_steps(gates, V)
    return (valid[0], opaque(valid[1])), opaque_steps(values, V), gates


@triton.jit
def store_row_sums(entry, sums, inside, R: tl.constexpr, Q: tl.constexpr):
    """What the R * Q parts (R * Q, 1) of R rows add to a row, at `entry` (R, 1)."""
    row_sum = tl.reshape(tl.sum(tl.reshape(sums, (R, Q)), axis=1), (R, 1))
    tl.store(entry, row_sum, mask=inside)


@triton.jit(do_not_specialize=["gamma_bits", "part_bits", "tiles", "share"])
def scan_tiles(
    x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, output_ptr, gamma_grad_ptr, words_ptr,
    gamma_bits: tl.int64, part_bits: tl.int64, T, inner, blocks, tiles, share,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, gamma_outer, gamma_time, gamma_inner,
    initial_outer, initial_inner, reset_outer, reset_time, reset_inner,
    output_outer, output_time, output_inner, grad_outer, grad_time, grad_inner,
    R: tl.constexpr, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, GATES: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr, HAS_INITIAL: tl.constexpr, RESET: tl.constexpr, GRADIENT: tl.constexpr,
    GROUP: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, DEPENDENT: tl.constexpr, OPAQUE: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """One program: `share` tiles of R rows: all; with LANES a part of them, by `words_ptr`, which `part_totals` wrote
    (parts.py); with GROUP one tile, by zeroed words for groups of GROUP tiles, of which a thread reads N.

    DEPENDENT: see `look_back_words`. OPAQUE: see `opaque`. GRADIENT: "none", "step" or "sum"; see `scan`. x, y, output:
    rows addressed by (outer, time, inner) strides in elements; gradients summed: (rows, programs of a row).
    """
    P: tl.constexpr = R * Q
    CARRY: tl.constexpr = tl.int64 if ACC == tl.int64 else tl.float64  # noqa: SIM300
    TILE: tl.constexpr = Q * J * V
    # The adjoint that makes a gradient starts from nothing: `initial` is the forward scan's, and only multiplied.
    STARTED: tl.constexpr = HAS_INITIAL and GRADIENT == "none"
    # The first tiles of all rows start before any second one.
    block = (tl.program_id(0) % blocks).to(tl.int64)
    part = tl.program_id(0) // blocks
    own_tile = part * share
    outer_index, start, row_index, row_valid, segment, row_id, rows_in, across, across_valid = rows_of_block(
        block, blocks, inner, R, Q, INDEX, LAYOUT
    )
    lane = tl.arange(0, J)[None, :]
    group = (segment * J + lane) * V

    pin = (y_ptr, T < 0)
    x_row, gamma_row, reset_row = rows_of_operands(
        x_ptr, gamma_ptr, reset_ptr, outer_index, start, across, row_index,
        x_outer, x_inner, gamma_outer, gamma_inner, reset_outer, reset_inner, GATES, RESET,
    )  # fmt: skip
    y_row = rows_at(y_ptr, outer_index, start, across, y_outer, y_inner)
    row_gates, gate_rest, weight, row_weight = gates_of_rows(
        gamma_row, gamma_bits, row_valid, lane, J, V, ACC, GATES, WIDE
    )
    own = tl.arange(0, R)[:, None].to(INDEX)
    carry = first_carry(initial_ptr, outer_index, start, own, rows_in, initial_outer, initial_inner, CARRY, STARTED)
    if LANES:
        carry = carry_into_part(
            words_ptr, block, blocks, part, part_bits, carry, rows_in, LANES, GATES, WIDE, STARTED, RESET, DEPENDENT
        )
    if GRADIENT != "none":
        output_row = rows_at(output_ptr, outer_index, start, across, output_outer, output_inner)
        gradient_sum = tl.zeros((P, 1), ACC)
        row_start = first_carry(
            initial_ptr, outer_index, start, row_index, row_valid, initial_outer, initial_inner, ACC, HAS_INITIAL
        )

    for further in range(1 if GROUP else tl.minimum(share, tiles - own_tile)):
        tile = own_tile + further
        begin = tile.to(INDEX) * TILE
        position, valid, index, values, gates, resets, total, product, cut = load_tile(
            x_row, gamma_row, reset_row, row_gates, gate_rest, weight, begin, segment, across_valid, T,
            x_time, gamma_time, reset_time, pin,
            P, Q, J, V, ACC, GATES, WIDE, REVERSE, SHIFTED, STARTED, RESET, LAYOUT,
        )  # fmt: skip
        if GROUP:
            NARROW: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth <= 32
            segment_carry, carry = look_back(
                words_ptr, block, tile, tiles, total, product, cut, carry, rows_in, R, Q, J, GROUP, N, NARROW,
                DEPENDENT, ACC, GATES, RESET, WIDE,
            )  # fmt: skip
        else:
            segment_carry, carry, _, _ = carry_segments(total, product, cut, carry, R, Q, J, GATES, RESET, WIDE)
        group_carry = carry_groups(total, product, cut, segment_carry, row_weight, P, J, ACC, GATES, RESET, WIDE)
        if LAYOUT == "serial" and J > 1:
            group_carry = as_loaded(group_carry, pin)
            if OPAQUE:
                valid, values, gates = loaded_anew(valid, values, gates, V, GATES)
        SELECT_FIRST: tl.constexpr = (GATES == "scalar" or GATES == "row") and not STARTED
        first = begin + group == 0
        RATES: tl.constexpr = rates(gamma_row.dtype, x_row.dtype, GATES)
        results = replay(values, gates, gate_rest, resets, group_carry, first, ACC, V, RATES, RESET, SELECT_FIRST)
        if LAYOUT == "serial" and J == 1:
            carry = results[V - 1].to(CARRY)
        store_steps(y_row, position, valid, y_time, results, P, J, V, REVERSE, LAYOUT)
        if GRADIENT != "none":
            products = gradients_of_tile(
                results, values, output_row, reset_row, row_start, position, valid, index, begin, group,
                output_time, reset_time, T, pin, P, J, V, ACC, REVERSE, HAS_INITIAL, RESET, LAYOUT,
            )  # fmt: skip
            if GRADIENT == "step":
                grad_row = rows_at(gamma_grad_ptr, outer_index, start, across, grad_outer, grad_inner)
                store_steps(grad_row, position, valid, grad_time, products, P, J, V, REVERSE, LAYOUT)
            else:
                gradient_sum += summed(products, P, V)

    if GRADIENT == "sum":
        entry = gamma_grad_ptr + row_id * (tl.num_programs(0) // blocks) + part
        store_row_sums(entry, gradient_sum, rows_in, R, Q)
