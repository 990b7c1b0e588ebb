"""Few rows or columns of many steps in two launches, of which no program waits for another one.

The first (`part_totals`) takes the totals of parts of time, the second (scan_tiles in tiles.py) scans the parts, each
from the carry that it folds of the totals before. Look-back (tile_words.py) is one launch and reads once, but its
chain takes 1.5 us for every group of tiles, and its programs are idle meanwhile.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.launch import device_of, float_bits
from .gamma import bounded_product
from .lanes import last_lane
from .part_words import word_of_part, words_of_row, write_part
from .problem import SECTOR, SECTOR_BYTES, Tile
from .tiles import carry_segments, gates_of_rows, load_tile, rows_of_block, rows_of_operands, tile_result

if TYPE_CHECKING:
    from torch import Tensor

    from .problem import ScanProblem

# Of an H200: its programs run all at once. And how many parts a lane of them folds at most.
MULTIPROCESSORS, REGISTERS, FOLDED = 132, 65536, 32
# Threads of a program, and the steps that one has of a column at most: plain ones, and with gates, resets or doubles.
THREADS, STEPS, LEAST_STEPS = 256, (16, 8), 4
# So many programs before a thread takes fewer steps than that.
BUSY_PROGRAMS = 264
# What takes parts: up to so many columns and elements, from so many tiles on. On an H200 51 random problems take 0.75
# of the time of look-back, 2 and 3 columns 0.62; 100 to 400 columns 1.13, more elements, which are read twice, 1.1.
MOST_COLUMNS, MOST_ELEMENTS, LEAST_TILES = 64, 2_000_000, 4


@triton.jit(do_not_specialize=["gamma_bits", "share"])
def part_totals(
    x_ptr, gamma_ptr, reset_ptr, words_ptr, pin_ptr, gamma_bits: tl.int64, T, inner, blocks, share,
    x_outer, x_time, x_inner, gamma_outer, gamma_time, gamma_inner, reset_outer, reset_time, reset_inner,
    R: tl.constexpr, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
    GATES: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr, SHIFTED: tl.constexpr, STARTED: tl.constexpr,
    RESET: tl.constexpr, DEPENDENT: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One program: of R rows, what `share` tiles in a row do to a carry. All of their steps exist but of the last part.

    Arguments as of `scan_tiles`; `pin_ptr`: aligned memory.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    P: tl.constexpr = R * Q
    CARRY: tl.constexpr = tl.int64 if ACC == tl.int64 else tl.float64  # noqa: SIM300
    block = (tl.program_id(0) % blocks).to(tl.int64)
    part = tl.program_id(0) // blocks
    outer_index, start, row_index, row_valid, segment, _, rows_in, across, across_valid = rows_of_block(
        block, blocks, inner, R, Q, INDEX, LAYOUT
    )
    x_row, gamma_row, reset_row = rows_of_operands(
        x_ptr, gamma_ptr, reset_ptr, outer_index, start, across, row_index,
        x_outer, x_inner, gamma_outer, gamma_inner, reset_outer, reset_inner, GATES, RESET,
    )  # fmt: skip
    lane = tl.arange(0, J)[None, :]
    row_gates, gate_rest, weight, _ = gates_of_rows(gamma_row, gamma_bits, row_valid, lane, J, V, ACC, GATES, WIDE)
    carry = tl.zeros((R, 1), CARRY)
    product = tl.zeros((R, 1), tl.float64) + 1.0
    cut = tl.zeros((R, 1), tl.int32)
    for further in range(share):
        begin = (part * share + further).to(INDEX) * (Q * J * V)
        tile = load_tile(
            x_row, gamma_row, reset_row, row_gates, gate_rest, weight, begin, segment, across_valid, T,
            x_time, gamma_time, reset_time, (pin_ptr, T < 0),
            P, Q, J, V, ACC, GATES, WIDE, REVERSE, SHIFTED, STARTED, RESET, LAYOUT,
        )  # fmt: skip
        joined = carry_segments(tile[6], tile[7], tile[8], carry, R, Q, J, GATES, RESET, WIDE)
        carry, products, cuts = joined[1], joined[2], joined[3]
        if GATES == "row" or GATES == "step":
            product = bounded_product(product, tile_result(products, R, Q, GATES))
        if RESET:
            cut = cut | last_lane(cuts, R, Q).to(tl.int32)
    word, _, plane = word_of_part(words_ptr, part, block, blocks, R, GATES, RESET)
    write_part(word, plane, carry, product, cut, rows_in, GATES, RESET)


class Parts(NamedTuple):
    """Of a problem's tiles: `count` parts of `share` tiles, which programs of so many `lanes` fold."""

    tile: Tile
    share: int
    count: int
    lanes: int
    bits: int  # of gamma to the power of a part's steps


def takes_parts(problem: ScanProblem, tile: Tile) -> bool:
    """Whether parts suit what would be such tiles by look-back."""
    rows, length = problem.layout.rows, problem.layout.length
    few = problem.inner <= MOST_COLUMNS and rows * length <= MOST_ELEMENTS and not problem.scans_alone
    return few and length > (LEAST_TILES - 1) * tile.steps


def parts_of(problem: ScanProblem, tile: Tile, registers: int) -> Parts:
    """As many parts as run at once with so many registers a thread, and are folded without delay.

    `tile`: that of look-back.
    """
    if problem.tiling == "serial":
        tile = _tile_of_columns(problem)
    blocks, tiles = problem.blocks(tile.R), triton.cdiv(problem.layout.length, tile.steps)
    lanes = max(2, 32 * tile.num_warps // tile.R)
    programs = MULTIPROCESSORS * (REGISTERS // (32 * tile.num_warps * registers))
    count = max(1, min(programs // blocks, FOLDED * lanes, tiles))
    share = triton.cdiv(tiles, count)
    weight = power(problem.gates.value, share * tile.steps) if problem.gates.kind == "scalar" else 1.0
    return Parts(tile, share, triton.cdiv(tiles, share), lanes, float_bits(weight))


def part_registers(problem: ScanProblem, gradient: str) -> int:
    """A cap on registers a thread of `scan_tiles`, of which 16 to 32 warps share an SM; few spill (sm_90)."""
    if gradient != "none":
        return 128 if problem.tiling == "columns" else 80
    gated = problem.gates.kind == "step" or problem.reset.tensor is not None
    if problem.tiling == "columns":
        return 96 if gated else 80
    return 64 if problem.accumulate is tl.float32 and not gated else 80


def _tile_of_columns(problem: ScanProblem) -> Tile:
    """Columns that fill a sector of memory: of more a program folds more totals of each part."""
    assert problem.y.tensor is not None
    itemsize = problem.y.tensor.element_size()
    gated = problem.gates.kind == "step" or problem.reset.tensor is not None or itemsize == 8
    columns = max(SECTOR, SECTOR_BYTES // itemsize)
    if problem.inner <= columns // 2 or triton.cdiv(problem.inner, columns) * columns > 1.25 * problem.inner:
        columns = max(SECTOR, columns // 2)
    lanes, steps = THREADS // columns, STEPS[gated]
    blocks, length = problem.blocks(columns), problem.layout.length
    while steps > LEAST_STEPS and blocks * triton.cdiv(length, lanes * steps) < BUSY_PROGRAMS:
        steps //= 2
    return Tile(columns, 1, lanes, steps, THREADS // 32)


def power(base: float, exponent: int) -> float:
    """Cut to the largest number, as `bounded_product` cuts it."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return sys.float_info.max if base > 0 or exponent % 2 == 0 else -sys.float_info.max


def run_part_totals(
    problem: ScanProblem, tile: Tile, share: int, count: int, started: bool
) -> tuple[Tensor, dict[str, bool]]:
    """The words for `scan_tiles` of parts, and the options of its launch: it may begin while this one ends."""
    x, gamma, reset = problem.x, problem.gamma, problem.reset
    assert x.tensor is not None
    blocks = problem.blocks(tile.R)
    per_row = words_of_row(problem.gates.kind, reset.tensor is not None)
    words = problem.new((max(1, count - 1), per_row, blocks * tile.R), torch.int64)
    dependent = device_of(x.tensor).dependent_launches
    if count > 1:
        part_totals[(blocks * (count - 1),)](
            x.tensor, gamma.tensor, reset.tensor, words, words,
            problem.gates.bits, problem.layout.length, problem.inner, blocks, share,
            x.outer, x.time, x.inner, gamma.outer, gamma.time, gamma.inner, reset.outer, reset.time, reset.inner,
            tile.R, tile.Q, tile.J, tile.V, problem.accumulate, problem.index_dtype(tile, x, gamma, reset),
            problem.gates.kind, problem.gates.wide, problem.reverse, problem.shifted, started,
            reset.tensor is not None, dependent, problem.tiling, num_warps=tile.num_warps,
        )  # fmt: skip
    return words, {"launch_pdl": True} if dependent else {}
