"""Rows of up to some thousand steps of contiguous time, one behind the other in memory: a tile is whole rows.

It is one range of memory and one sequence, whatever the rows' length, with a reset where a row begins. So its lanes but
the last ones have steps, and whole vectors come and go, as a tile has as many rows as end at one; the last tile, which
may not, has elements. A thread has V successive steps, A of them a vector.
"""

import triton
import triton.language as tl

from .gamma import discounted, rates
from .lanes import scan_lanes
from .tile import backwards, group_totals, pack, replay, unpack
from .tiles import carry_groups, carry_segments, gates_of_rows


@triton.jit
def vector_offsets(group, limit, m: tl.constexpr, V: tl.constexpr, A: tl.constexpr, REVERSE: tl.constexpr):
    """Where vector `m` of each group (Q, J) is in the tile, (Q, J, A), and which of its elements exist."""
    first = limit - (group + 1) * V if REVERSE else group * V
    offset = first[:, :, None] + (m * A + tl.arange(0, A))[None, None, :]
    if REVERSE:
        return offset, offset >= 0
    else:
        return offset, offset < limit


@triton.jit
def load_groups(
    at, group, limit, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, A: tl.constexpr, REVERSE: tl.constexpr
):
    """V tiles (Q, J) in scan order, of the `limit` elements from `at` on."""
    steps = ()
    for m in tl.static_range(V // A):
        offset, exists = vector_offsets(group, limit, m, V, A, REVERSE)
        steps = steps + unpack(tl.load(at + offset, mask=exists, other=0), Q, J, A)
    if REVERSE:
        steps = backwards(steps, V)
    return steps


@triton.jit
def store_groups(at, limit, steps, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr):
    """The inverse of `load_groups`, by way of shared memory: neighboring threads store neighboring vectors."""
    if REVERSE:
        steps = backwards(steps, V)
    tile = tl.reshape(pack(steps, Q, J, V), (Q * J * V,)).to(at.dtype.element_ty)
    n = tl.arange(0, Q * J * V)
    if REVERSE:
        offset = limit - (n // V + 1) * V + n % V
        tl.store(at + offset, tile, mask=offset >= 0)
    else:
        tl.store(at + n, tile, mask=n < limit)


@triton.jit
def steps_before(at, group, limit, own, V: tl.constexpr, REVERSE: tl.constexpr):
    """What the steps before V steps have, in the order of the scan, of which these have `own`."""
    place = limit - group * V if REVERSE else group * V - 1
    steps = (tl.load(at + place, mask=(place >= 0) & (place < limit), other=0),)
    for i in tl.static_range(V - 1):
        steps = steps + (own[i],)
    return steps


@triton.jit
def steps_behind(at, group, limit, own, V: tl.constexpr, REVERSE: tl.constexpr):
    """What the steps behind V steps have."""
    place = limit - (group + 1) * V - 1 if REVERSE else (group + 1) * V
    steps = ()
    for i in tl.static_range(V - 1):
        steps = steps + (own[i + 1],)
    return steps + (tl.load(at + place, mask=(place >= 0) & (place < limit), other=0),)


@triton.jit
def row_gates_of_steps(
    at, stride, row, rows, first_row, until, V: tl.constexpr, ACC: tl.constexpr, REVERSE: tl.constexpr
):
    """The gates of V steps, those from `until` on of the row behind `row`; no wider than ACC."""
    this = tl.load(at + row_number(row, rows, first_row, REVERSE) * stride, mask=row < rows, other=0)
    other = tl.load(at + row_number(row + 1, rows, first_row, REVERSE) * stride, mask=row + 1 < rows, other=0)
    if ACC == tl.float32:  # noqa: SIM300
        this, other = this.to(ACC), other.to(ACC)
    gates = ()
    for i in tl.static_range(V):
        gates = gates + (tl.where(i < until, this, other),)
    return gates


@triton.jit
def row_number(row, rows, first_row, REVERSE: tl.constexpr):
    """Of a tile's row in scan order."""
    if REVERSE:
        return first_row + (rows - 1 - row)
    else:
        return first_row + row


@triton.jit
def started(
    values, initial, gates, gate_rest, resets, until, V: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr,
    RESET: tl.constexpr,
):  # fmt: skip
    """V steps, to the one at `until` of which a row's initial value comes, unless it has a reset."""
    steps = ()
    for i in tl.static_range(V):
        value = values[i].to(ACC)
        takes = until == i
        if RESET:
            takes = takes & (resets[i] == 0)
        gate = gates[i if GATES == "step" else 0].to(ACC)
        steps = steps + (tl.where(takes, discounted(value, initial, gate, gate_rest, GATES), value),)
    return steps


@triton.jit
def gradients_of_rows(
    grads, output_at, initial_ptr, resets, group, limit, until_end, ends, row, rows, first_row, initial_row,
    Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, A: tl.constexpr, ACC: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Each step's ``grad_input[t] * y[prev(t)]``: the adjoint runs the other way, y[prev(t)] is a step further on.

    Bit i of `ends`: step i is its row's last one, which is multiplied with `initial`, or with nothing.
    """
    own = load_groups(output_at, group, limit, Q, J, V, A, REVERSE)
    previous = steps_behind(output_at, group, limit, own, V, REVERSE)
    initial = until_end
    if HAS_INITIAL:
        initial = tl.load(
            initial_ptr + row_number(row, rows, first_row, REVERSE) * initial_row,
            mask=(until_end < V) & (row < rows), other=0,
        ).to(ACC)  # fmt: skip
    products = ()
    for i in tl.static_range(V):
        is_end = (ends >> i) & 1 != 0
        product = tl.where(is_end, 0, grads[i] * previous[i].to(ACC))
        if HAS_INITIAL:
            product = tl.where(is_end, grads[i] * initial, product)
        if RESET:
            product = tl.where(resets[i] != 0, 0, product)
        products = products + (product,)
    return products


@triton.jit
def store_sums_of_rows(
    sums_ptr, products, starts, ends, row, rows, first_row, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    ACC: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Sums over the steps of each row, by another scan, which the rows' last steps have the results of."""
    one = products[0]  # for the gates, which a sum does not ask for
    total, product, cut = group_totals(products, (one,), one, starts, ACC, V, "sum", True)
    total, product, cut = scan_lanes(total, product, cut, Q, J, "sum", True, False)
    nothing = tl.zeros((1, 1), tl.float64)
    segment_carry, _, _, _ = carry_segments(total, product, cut, nothing, 1, Q, J, "sum", True, False)
    carry = carry_groups(total, product, cut, segment_carry, one, Q, J, ACC, "sum", True, False)
    sums = replay(products, (one,), one, starts, carry, False, ACC, V, "sum", True, False)
    for i in tl.static_range(V):
        if i > 0:
            row += starts[i]
        is_last = ((ends >> i) & 1 != 0) & (row < rows)
        tl.store(sums_ptr + row_number(row, rows, first_row, REVERSE), sums[i], mask=is_last)


@triton.jit
def scan_rows_of_tile(
    x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, output_ptr, gamma_grad_ptr, gamma_bits, start_bits, T, vectors,
    limit, gamma_row, initial_row,
    Q: tl.constexpr, V: tl.constexpr, A: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr, WIDE: tl.constexpr,
    REVERSE: tl.constexpr, SHIFTED: tl.constexpr, HAS_INITIAL: tl.constexpr, RESET: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The program's tile of `limit` elements, one after every so many `vectors`. ALIGNED: it has all of these."""
    J: tl.constexpr = 32
    KIND: tl.constexpr = "step" if GATES == "row" else GATES
    count = vectors * A
    if ALIGNED:
        limit = count
    base = tl.program_id(0).to(tl.int64) * count
    lane = tl.arange(0, J)[None, :]
    group = tl.arange(0, Q)[:, None] * J + lane

    row = group * V // T
    done = group * V - row * T
    until = tl.where(done == 0, 0, T - done)  # the row's next first step, from the group's on
    starts = start_bits << tl.minimum(until, 31)

    values = load_groups(x_ptr + base, group, limit, Q, J, V, A, REVERSE)
    rows = limit // T
    first_row = tl.program_id(0).to(tl.int64) * (count // T)
    NUMBER: tl.constexpr = "scalar" if GATES == "fading" else KIND
    gates, gate_rest, weight, lane_weight = gates_of_rows(x_ptr, gamma_bits, True, lane, J, V, ACC, NUMBER, WIDE)
    if GATES == "step":
        gates = load_groups(gamma_ptr + base, group, limit, Q, J, V, A, REVERSE)
        if SHIFTED:
            gates = steps_before(gamma_ptr + base, group, limit, gates, V, REVERSE)
    elif GATES == "row":
        gates = row_gates_of_steps(
            gamma_ptr, gamma_row, row, rows, first_row, tl.where(done == 0, V, until), V, ACC, REVERSE
        )
    RATES: tl.constexpr = rates(x_ptr.dtype, x_ptr.dtype, NUMBER)
    of_starts = ()
    for i in tl.static_range(V):
        of_starts = of_starts + ((starts >> i) & 1,)
    cuts = of_starts
    own_resets = of_starts
    if RESET:
        resets = load_groups(reset_ptr + base, group, limit, Q, J, V, A, REVERSE)
        own_resets = resets
        if SHIFTED:
            resets = steps_before(reset_ptr + base, group, limit, resets, V, REVERSE)
        cuts = ()
        for i in tl.static_range(V):
            cuts = cuts + (of_starts[i] | resets[i].to(tl.int32),)
    if HAS_INITIAL and GRADIENT == "none":
        start_row = tl.where(done == 0, row, row + 1)
        initial_at = initial_ptr + row_number(start_row, rows, first_row, REVERSE) * initial_row
        initial = tl.load(initial_at, mask=(until < V) & (start_row < rows), other=0).to(ACC)
        values = started(values, initial, gates, gate_rest, own_resets, until, V, ACC, RATES, RESET)

    total, product, cut = group_totals(values, gates, gate_rest, cuts, ACC, V, RATES, True)
    if KIND != "step":
        product = weight
    total, product, cut = scan_lanes(total, product, cut, Q, J, KIND, True, WIDE)
    nothing = tl.zeros((1, 1), tl.float64)
    segment_carry, _, _, _ = carry_segments(total, product, cut, nothing, 1, Q, J, KIND, True, WIDE)
    group_carry = carry_groups(total, product, cut, segment_carry, lane_weight, Q, J, ACC, KIND, True, WIDE)
    results = replay(values, gates, gate_rest, cuts, group_carry, False, ACC, V, RATES, True, False)
    store_groups(y_ptr + base, limit, results, Q, J, V, REVERSE)
    if GRADIENT != "none":
        until_end = T - 1 - done
        ends = start_bits << tl.minimum(until_end, 31)
        products = gradients_of_rows(
            results, output_ptr + base, initial_ptr, own_resets, group, limit, until_end, ends, row, rows, first_row,
            initial_row, Q, J, V, A, ACC, REVERSE, HAS_INITIAL, RESET,
        )  # fmt: skip
        if GRADIENT == "step":
            store_groups(gamma_grad_ptr + base, limit, products, Q, J, V, REVERSE)
        else:
            store_sums_of_rows(gamma_grad_ptr, products, of_starts, ends, row, rows, first_row, Q, J, V, ACC, REVERSE)


@triton.jit(do_not_specialize=["gamma_bits", "start_bits", "vectors", "total"])
def scan_flat_rows(
    x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, output_ptr, gamma_grad_ptr, gamma_bits: tl.int64, start_bits,
    T, vectors, total, gamma_row, initial_row,
    Q: tl.constexpr, V: tl.constexpr, A: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr, WIDE: tl.constexpr,
    REVERSE: tl.constexpr, SHIFTED: tl.constexpr, HAS_INITIAL: tl.constexpr, RESET: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """A program takes so many `vectors` of A elements, whole rows of T steps, of `total` elements.

    Q segments of 32 groups of V steps hold them. x, y, gamma of GATES "step", reset, output and gradients of GRADIENT
    "step" (tiles.py) are packed, from an aligned address on; those of "sum" are one a row. Bit i of `start_bits`: i is
    a multiple of T, up to V. Row r's gamma of "row", and its initial value, is at r times a stride; then V is at most
    T.
    """
    left = total - tl.program_id(0).to(tl.int64) * (vectors * A)
    if left >= vectors * A:
        scan_rows_of_tile(
            x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, output_ptr, gamma_grad_ptr, gamma_bits, start_bits, T,
            vectors, 0, gamma_row, initial_row, Q, V, A, ACC, GATES, WIDE, REVERSE, SHIFTED, HAS_INITIAL, RESET,
            GRADIENT, True,
        )  # fmt: skip
    else:
        scan_rows_of_tile(
            x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, output_ptr, gamma_grad_ptr, gamma_bits, start_bits, T,
            vectors, left.to(tl.int32), gamma_row, initial_row, Q, V, A, ACC, GATES, WIDE, REVERSE, SHIFTED,
            HAS_INITIAL, RESET, GRADIENT, False,
        )  # fmt: skip
