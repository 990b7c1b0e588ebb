"""The order in which the programs of a matrix product take its tiles."""

import triton
import triton.language as tl


@triton.jit
def tile_at(number, tiles_down, tiles_across, BAND: tl.constexpr):
    """Row and column of a tile: column by column through BAND rows of tiles, then the next ones."""
    group = number // (BAND * tiles_across)
    height = min(tiles_down - group * BAND, BAND)
    within = number % (BAND * tiles_across)
    return group * BAND + within % height, within // height
