"""Scans of tiles (P, J) over their lanes, whose entries are what groups of steps do to a carry.

By doubling (Hillis and Steele, "Data parallel algorithms", 1986), with powers of gamma made in float64 where gamma is
one number a row. The exchange is `tl.gather` and not `tl.associative_scan`: the latter shuffles the products of the
gates too, rounds them anew at every level, and costs six times as many shuffles for a reversed scan. Compiled for sm_90
a gather within a warp is one shuffle; from J > 32 lanes it would be J * J / 1024, so that these are scanned by warps.
"""

import triton
import triton.language as tl

from .gamma import bounded_product, integer_power, weighted

WARP = tl.constexpr(32)


@triton.jit
def scan_lanes(
    total, product, cut, P: tl.constexpr, J: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr
):
    """Inclusive scan of (P, J) group totals along J.

    `product`: for "step" the product of each group's gates, (P, J) float64, scanned too; for "scalar" and "row" the
    weight of a whole group, a number or (P, J) or (P, 1). `cut` (P, J) int32, with RESET: whether a group has a reset.
    """
    if J > WARP:
        total, weight, cut = scan_warps(total, product, cut, P, J, GATES, RESET, WIDE)
    else:
        total, weight, cut = scan_warp(total, product, cut, P, J, GATES, RESET, WIDE)
    return total, weight, cut


@triton.jit
def scan_warps(
    total, product, cut, P: tl.constexpr, J: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr
):
    """`scan_lanes` of more lanes than a warp has."""
    Q: tl.constexpr = J // WARP
    total = tl.reshape(total, (P * Q, WARP))
    if RESET:
        cut = tl.reshape(cut, (P * Q, WARP))
    lane_product = product
    if GATES == "row":
        OF_GROUPS: tl.constexpr = product.shape[1] == J
        product = tl.reshape(tl.zeros((P, J), tl.float64) + product, (P * Q, WARP))
    if GATES == "step":
        product = tl.reshape(product, (P * Q, WARP))
    elif GATES != "sum":
        lane_product = integer_power(product, tl.arange(0, WARP)[None, :] + 1, 6, WIDE)
    total, product, cut = scan_warp(total, product, cut, P * Q, WARP, GATES, RESET, WIDE)
    end_product = product
    end_cut = cut
    if GATES == "step":
        lane_product = product
    if GATES == "step" or GATES == "row":
        end_product = tl.reshape(last_lane(product, P * Q, WARP), (P, Q))
    if RESET:
        end_cut = tl.reshape(last_lane(cut, P * Q, WARP), (P, Q))
    ends = tl.reshape(last_lane(total, P * Q, WARP), (P, Q))
    ends, end_product, end_cut = scan_warp(ends, end_product, end_cut, P, Q, GATES, RESET, WIDE)
    before = tl.reshape(previous_lane(ends, 0, P, Q), (P * Q, 1))
    total = tl.reshape(join_carry(total, lane_product, cut, before, GATES, RESET, WIDE), (P, J))
    weight = end_product
    if GATES == "step":
        before = tl.reshape(previous_lane(end_product, 1.0, P, Q), (P * Q, 1))
        weight = tl.reshape(bounded_product(product, before), (P, J))
    elif GATES == "row":
        weight = last_lane(end_product, P, Q)
        if OF_GROUPS:
            weight += tl.zeros((P, J), tl.float64)
    if RESET:
        cut = tl.reshape(cut | tl.reshape(previous_lane(end_cut, 0, P, Q), (P * Q, 1)), (P, J))
    return total, weight, cut


@triton.jit
def scan_warp(
    total, product, cut, P: tl.constexpr, J: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr
):
    """`scan_lanes` of the lanes of a warp."""
    lane = tl.arange(0, J)[None, :] + tl.zeros((P, 1), tl.int32)
    weight = product
    for level in tl.static_range(5):
        if (1 << level) < J:
            source = tl.maximum(lane - (1 << level), 0)
            inside = lane >= (1 << level)
            joined = weighted(total, weight, tl.gather(total, source, 1), GATES, WIDE)
            if RESET:
                joined = tl.where(cut != 0, total, joined)
                cut = tl.where(inside, cut | tl.gather(cut, source, 1), cut)
            total = tl.where(inside, joined, total)
            if GATES == "step":
                weight = tl.where(inside, bounded_product(weight, tl.gather(weight, source, 1)), weight)
            elif GATES != "sum":
                if WIDE:
                    weight = bounded_product(weight, weight)
                else:
                    weight = weight * weight
    return total, weight, cut


@triton.jit
def previous_lane(tile, first, P: tl.constexpr, J: tl.constexpr):
    """An inclusive scan along J made exclusive, with `first` in lane 0."""
    if J == 1:
        return tl.zeros((P, 1), tile.dtype) + first
    elif J > WARP:
        Q: tl.constexpr = J // WARP
        tile = tl.reshape(tile, (P * Q, WARP))
        ends = tl.reshape(last_lane(tile, P * Q, WARP), (P, Q))
        first = tl.reshape(previous_lane(ends, first, P, Q), (P * Q, 1))
        return tl.reshape(previous_lane(tile, first, P * Q, WARP), (P, J))
    else:
        lane = tl.arange(0, J)[None, :] + tl.zeros((P, 1), tl.int32)
        return tl.where(lane == 0, first, tl.gather(tile, tl.maximum(lane - 1, 0), 1))


@triton.jit
def last_lane(tile, P: tl.constexpr, J: tl.constexpr):
    """(P, J) -> (P, 1), the last column."""
    if J == 1:
        return tile
    elif J > WARP:
        Q: tl.constexpr = J // WARP
        ends = last_lane(tl.reshape(tile, (P * Q, WARP)), P * Q, WARP)
        return last_lane(tl.reshape(ends, (P, Q)), P, Q)
    else:
        return tl.gather(tile, tl.full((P, 1), J - 1, tl.int32), 1)


@triton.jit
def join_carry(total, weight, cut, carry, GATES: tl.constexpr, RESET: tl.constexpr, WIDE: tl.constexpr):
    """``total + weight * carry``, or total where a reset lies between."""
    joined = weighted(total, weight, carry, GATES, WIDE)
    if RESET:
        joined = tl.where(cut != 0, total, joined)
    return joined
