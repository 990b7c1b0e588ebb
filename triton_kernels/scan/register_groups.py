"""Reversed scans along the rows of a tile, for rows that lie in memory step by step, by the ascending scan of Triton.

A tile has groups of V successive steps, which a thread loads as one vector. For a reversed scan the groups come in the
opposite order, and the steps of a group in their own (`mirrored`), so that a load stays a vector; `turned` then puts
the steps of every group into the order of the scan, and back, within a thread's registers. A reversed
`tl.associative_scan` takes two more exchanges between lanes for every element, and an index that descends makes every
load a single number.

And scans along whole columns, for rows whose steps lie apart in memory: a thread takes successive steps of two columns
(`column_order`), scans them in its registers, and only the totals of such groups are scanned over threads.
"""

import triton
import triton.language as tl

from .gamma import discounted, power_of_two_power, split_gamma
from .tile import backwards, pack, unpack


@triton.jit
def mirrored(index, length, V: tl.constexpr):
    """The steps at the indices `index` of a tile: groups from the last one, each ascending.

    `length` is a multiple of V.
    """
    return length - (index // V + 1) * V + index % V


@triton.jit
def turned(tile, V: tl.constexpr):
    """A tile (P, J * V) with the steps of every group in the opposite order."""
    P: tl.constexpr = tile.shape[0]
    J: tl.constexpr = tile.shape[1] // V
    steps = backwards(unpack(tl.reshape(tile, (P, J, V)), P, J, V), V)
    return tl.reshape(pack(steps, P, J, V), (P, J * V))


@triton.jit
def column_order(index, V: tl.constexpr):
    """The step, in scan order, at each index `index` (1, R) of a tile whose columns are whole.

    Indices of a tile go to a thread's lane and warp first and to its registers last: index g * (R / V) + j has step g
    of group j, so that a thread has all steps of its groups.
    """
    J: tl.constexpr = index.shape[1] // V
    return index % J * V + index // J


@triton.jit
def steps_of(tile, V: tl.constexpr):
    """A tile (P, R) in `column_order` -> V tiles (P, R / V), one for each step of the groups."""
    P: tl.constexpr = tile.shape[0]
    J: tl.constexpr = tile.shape[1] // V
    return unpack(tl.permute(tl.reshape(tile, (P, V, J)), (0, 2, 1)), P, J, V)


@triton.jit
def tile_of(steps, V: tl.constexpr):
    """The inverse of `steps_of`."""
    P: tl.constexpr = steps[0].shape[0]
    J: tl.constexpr = steps[0].shape[1]
    return tl.reshape(tl.permute(pack(steps, P, J, V), (0, 2, 1)), (P, V * J))


@triton.jit
def _join(gate_0, value_0, gate_1, value_1):
    return gate_0 * gate_1, tl.where(gate_1 != gate_1, value_1, value_1 + gate_1 * value_0)


@triton.jit
def _join_exclusive(gate_0, value_0, gate_before_0, value_before_0, gate_1, value_1, gate_before_1, value_before_1):
    gate, value = _join(gate_0, value_0, gate_1, value_1)
    gate_before, value_before = _join(gate_0, value_0, gate_before_1, value_before_1)
    return gate, value, gate_before, value_before


@triton.jit
def discounted_columns(gates, values, gamma, V: tl.constexpr):
    """The recurrence over whole columns with a shared gamma: a tile (P, R) in `column_order`, of the dtype of `values`.

    gamma: a number of at most 1 in magnitude, taken as float64. A gate of NaN is a reset. A group's sums from a carry
    of zero are float32, and every step adds its power of gamma times the carry; what is carried from group to group is
    float64. Where the recurrence runs on from the carry, rounded at every step, the error for gamma = 0.999 and ones is
    three times that.
    """
    P: tl.constexpr = values.shape[0]
    J: tl.constexpr = values.shape[1] // V
    gate = steps_of(gates, V)
    value = steps_of(values, V)
    gamma = tl.full((), gamma, tl.float64)
    nearest, rest = split_gamma(gamma)
    total = value[0].to(tl.float32)
    cut = gate[0] != gate[0]
    totals = (total,)
    for i in tl.static_range(1, V):
        reset = gate[i] != gate[i]
        cut = cut | reset
        step = value[i].to(tl.float32)
        total = tl.where(reset, step, discounted(step, total, nearest, rest, "scalar"))
        totals = totals + (total,)
    product = tl.where(cut, float("nan"), power_of_two_power(gamma, V, False))
    one = tl.full((P, J), 1, tl.float64)
    zero = tl.full((P, J), 0, tl.float64)
    _, _, _, carried = tl.associative_scan((product, total.to(tl.float64), one, zero), 1, _join_exclusive)
    # A first step of NaN makes NaNs of all up to the next reset, whatever is carried to it: the carry may be one too. A
    # value that was loaded thus decides, and the compiler takes the carry into the layout of what is loaded, once. It
    # leaves the carry in the scan's layout otherwise, and takes each of the V products with it through shared memory.
    carry = tl.where(totals[0] != totals[0], totals[0], carried.to(tl.float32))
    # An infinite carry times a rest of the other sign, or a power that is 0 in float32, would make a NaN of it: what is
    # not finite meets powers of gamma's sign instead.
    finite_carry = tl.where(carry - carry == 0, carry, 0)
    other_carry = tl.where(carry - carry == 0, 0, carry)
    sign = tl.where(gamma > 0, 1.0, tl.where(gamma < 0, -1.0, 0.0))
    power = gamma
    sign_power = sign
    results = ()
    for i in tl.static_range(V):
        finite_carry = tl.where(gate[i] != gate[i], 0, finite_carry)
        other_carry = tl.where(gate[i] != gate[i], 0, other_carry)
        nearest = power.to(tl.float32)
        rest = (power - nearest.to(tl.float64)).to(tl.float32)
        carried_here = nearest * finite_carry + (rest * finite_carry + sign_power * other_carry)
        results = results + (totals[i] + carried_here,)
        power *= gamma
        sign_power *= sign
    return tile_of(results, V).to(values.dtype)


@triton.jit
def summed_columns(values, V: tl.constexpr):
    """The sums over whole columns: a tile (P, R) in `column_order`."""
    P: tl.constexpr = values.shape[0]
    J: tl.constexpr = values.shape[1] // V
    value = steps_of(values, V)
    total = value[0]
    for i in tl.static_range(1, V):
        total += value[i]
    _, carry = tl.associative_scan((total, tl.full((P, J), 0, values.dtype)), 1, _add_exclusive)
    results = ()
    for i in tl.static_range(V):
        carry += value[i]
        results = results + (carry,)
    return tile_of(results, V)


@triton.jit
def _add_exclusive(total_0, before_0, total_1, before_1):
    return total_0 + total_1, total_0 + before_1
