"""Reversed scans along the rows of a tile, for rows that lie in memory step by step, by the ascending scan of Triton.

A tile has groups of V successive steps, which a thread loads as one vector. For a reversed scan the groups come in the
opposite order, and the steps of a group in their own (`mirrored`), so that a load stays a vector; `turned` then puts
the steps of every group into the order of the scan, and back, within a thread's registers. A reversed
`tl.associative_scan` takes two more exchanges between lanes for every element, and an index that descends makes every
load a single number.
"""

import triton
import triton.language as tl

from .tile import backwards, pack, unpack


@triton.jit
def mirrored(index, length, V: tl.constexpr):
    """The steps at the places `index` of a tile: groups from the last one, each ascending.

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
