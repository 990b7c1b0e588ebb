"""Which packed rows are tiles of whole rows (flat_rows.py), and their launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from ..common.layout import Operand
from .flat_rows import scan_flat_rows
from .problem import ScanProblem

if TYPE_CHECKING:
    from torch import Tensor

# Rows of fewer steps, and fewer programs, are left to other kernels. A tile's share that has steps, at least; its
# segments, a warp each.
FEWEST_STEPS, FEWEST_PROGRAMS, LEAST_SHARE, SEGMENTS = 4, 160, 0.75, (4, 8)


class FlatTile(NamedTuple):
    rows: int
    segments: int
    steps: int  # of a thread
    vector: int


def flat_tile(problem: ScanProblem, output: Operand, grad: Operand, gradient: str) -> FlatTile | None:
    """The tile for rows that are short, many, and one behind the other, where it has as many programs as it takes.

    `output`, `grad`, `gradient`: of `run_flat_rows`.
    """
    x, layout, kind = problem.x.tensor, problem.layout, problem.gates.kind
    assert x is not None
    plain = kind != "step" and problem.reset.tensor is None and gradient == "none"
    if not problem.in_rows or layout.length < FEWEST_STEPS or (plain and problem.tiling == "vectors"):
        return None
    if not _lies_flat(problem, output, grad, gradient):
        return None
    vector = 16 // x.element_size()
    steps = 8 if x.element_size() == 8 or gradient != "none" else 16
    if kind == "row" or problem.initial.tensor is not None:
        # A group has steps of two rows at most.
        steps = min(steps, 1 << (layout.length.bit_length() - 1))
    while steps >= vector:
        tile = _fullest_tile(layout.length, vector, steps)
        if tile is not None and triton.cdiv(layout.rows, tile.rows) >= FEWEST_PROGRAMS:
            return tile
        steps //= 2
    return None


def _fullest_tile(length: int, vector: int, steps: int) -> FlatTile | None:
    """Of those that end at a vector's end, the one with the fewest lanes without steps; shorter ones before others."""
    whole = vector // math.gcd(vector, length)
    best: FlatTile | None = None
    for segments in SEGMENTS:
        rows = segments * 32 * steps // length // whole * whole
        if rows and (best is None or rows * best.segments > 1.05 * best.rows * segments):
            best = FlatTile(rows, segments, steps, vector)
    if best is None or best.rows * length < LEAST_SHARE * best.segments * 32 * steps:
        return None
    return best


def _lies_flat(problem: ScanProblem, output: Operand, grad: Operand, gradient: str) -> bool:
    """Whether the kernel can take the problem, whatever its rows' length."""
    gamma, gates, x = problem.gamma, problem.gates, problem.x.tensor
    assert x is not None
    of_steps = [problem.x, problem.y, problem.reset, output, grad] + [gamma] * (gates.kind == "step")
    of_rows = [problem.initial] + [gamma] * (gates.kind == "row")
    # A float64 gamma has digits, and a range, that a step's gate lacks.
    is_wide = gates.kind == "row" and gamma.tensor is not None and gamma.tensor.dtype == torch.float64
    if x.dtype == torch.int64 or (is_wide and x.dtype != torch.float64):
        return False
    return (
        not (problem.shifted and problem.initial.tensor is not None and gradient == "none")
        and all(_is_packed(operand, problem) for operand in of_steps)
        and all(_row_stride(operand, problem) is not None for operand in of_rows)
    )


def run_flat_rows(problem: ScanProblem, tile: FlatTile, output: Operand, grad: Operand, gradient: str) -> Tensor:
    """As `run_tiles` in launch.py."""
    x, y, gamma, initial, reset, layout = (
        problem.x, problem.y, problem.gamma, problem.initial, problem.reset, problem.layout,
    )  # fmt: skip
    kind = problem.gates.kind
    if kind == "scalar" and 0 < abs(problem.gates.value) <= 1:
        kind = "fading"
    starts = sum(1 << i for i in range(0, tile.steps, layout.length))
    sums = problem.new((layout.rows if gradient == "sum" else 0, 1), problem.accumulate_dtype)
    scan_flat_rows[(triton.cdiv(layout.rows, tile.rows),)](
        x.tensor, y.tensor, gamma.tensor, initial.tensor, reset.tensor, output.tensor,
        sums if gradient == "sum" else grad.tensor, problem.gates.bits, starts,
        layout.length, tile.rows * layout.length // tile.vector, layout.rows * layout.length,
        _row_stride(gamma, problem) if kind == "row" else 0, _row_stride(initial, problem),
        tile.segments, tile.steps, tile.vector, problem.accumulate, kind, problem.gates.wide,
        problem.reverse, problem.shifted, initial.tensor is not None, reset.tensor is not None,
        gradient, num_warps=tile.segments,
    )  # fmt: skip
    return sums


def _is_packed(operand: Operand, problem: ScanProblem) -> bool:
    """Whether rows lie one behind the other, from an aligned address on; no tensor does."""
    layout = problem.layout
    if operand.tensor is None:
        return True
    return (
        operand.tensor.data_ptr() % 16 == 0
        and operand.time == 1
        and (layout.inner == 1 or operand.inner == layout.length)
        and (layout.outer == 1 or operand.outer == layout.inner * layout.length)
    )


def _row_stride(operand: Operand, problem: ScanProblem) -> int | None:
    """From a row's value to the next one's, if all are as far apart."""
    layout = problem.layout
    if operand.tensor is None or layout.rows == 1:
        return 0
    if layout.inner == 1:
        return operand.outer
    return operand.inner if layout.outer == 1 or operand.outer == operand.inner * layout.inner else None
