"""What the launchers of the scan kernels know of a scan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.layout import HALF_DTYPES, Layout, Operand, read_gates

if TYPE_CHECKING:
    from torch_dcs_ops.reference.scan import ScanCall

# A row of at most this length is one tile; longer ones look back.
LONGEST_TILE = 8192
# Columns, a thread each, that cover the memory's latency; neighbors of them that fill a sector of memory.
SERIAL_COLUMNS = 65536
SECTOR, SECTOR_BYTES = 8, 32
LEAST_COLUMN_TILE = 1024
# Bytes of a step of columns that tiles are transposed for: a load of columns fetches few elements of them then.
NARROW_COLUMNS = 8


@dataclass(frozen=True)
class Tile:
    """R rows (columns, if time-major) by Q segments of J groups of V steps; see tiles.py."""

    R: int
    Q: int
    J: int
    V: int
    num_warps: int

    @property
    def steps(self) -> int:
        return self.Q * self.J * self.V


class ScanProblem:
    """One scan with its operands folded into (outer, time, inner)."""

    def __init__(self, input: Tensor, output: Tensor, call: ScanCall) -> None:
        gamma, gamma_value, dim, self.reverse, self.shifted, initial, reset, _ = call
        dim %= output.dim()
        self.gates = read_gates(gamma, gamma_value, input, dim)
        self.layout = Layout(output, dim)
        self.x = self.layout.steps(input)
        self.y = self.layout.steps(output)
        step_gates = self.gates.kind == "step"
        self.gamma = (self.layout.steps if step_gates else self.layout.row_values)(self.gates.tensor)
        rows = input.shape[:dim] + input.shape[dim + 1 :]
        self.initial = self.layout.row_values(None if initial is None else initial.expand(rows))
        self.reset = self.layout.steps(None if reset is None else reset.view(torch.uint8))
        self.accumulate = {torch.float64: tl.float64, torch.int64: tl.int64}.get(input.dtype, tl.float32)
        self.tiling = self._tiling()
        self.turned = False
        self.outer, self.inner = self.layout.outer, self.layout.inner
        if input.dtype == torch.float32 and self.tiling == "serial":
            # Many steps of a column run one after the other in a thread: a float32 carry would stall (see scan_tiles).
            self.accumulate = tl.float64

    def _tiling(self) -> str:
        """How tiles lie in memory, the LAYOUT of tile.py."""
        inner, length = self.layout.inner, self.layout.length
        # A program that takes few steps of few columns has too little to do: these are rows then, of strided steps.
        large = length * inner >= LEAST_COLUMN_TILE
        assert self.y.tensor is not None
        wide = inner * self.y.tensor.element_size() > NARROW_COLUMNS
        if (large and wide) or (inner >= SECTOR and self.layout.rows >= SERIAL_COLUMNS):
            return "serial"
        if inner > 1 and large:
            return "columns"
        steps = (self.x, self.y, *((self.gamma,) if self.gates.kind == "step" else ()))
        return "vectors" if length % 16 == 0 and all(map(_is_aligned, steps)) else "elements"

    @property
    def scans_alone(self) -> bool:
        """Whether a thread takes all steps of its column."""
        return self.tiling == "serial" and self.layout.inner >= SECTOR and self.layout.rows >= SERIAL_COLUMNS

    @property
    def columns_aligned(self) -> bool:
        """Whether Triton sees that neighbors of a step of x and y are whole vectors."""
        turned = (replace(operand, time=operand.inner, inner=operand.time) for operand in (self.x, self.y))
        return all(map(_is_aligned, turned))

    @property
    def in_rows(self) -> bool:
        return self.tiling in ("vectors", "elements")

    def turn(self) -> None:
        """Rows in time: lets the inner dimension, of which programs take neighbors, be the one of many rows."""
        self.turned = True
        self.outer, self.inner = self.inner, self.outer
        self.x, self.y, self.gamma, self.initial, self.reset = map(
            turned, (self.x, self.y, self.gamma, self.initial, self.reset)
        )

    def transpose_tiles(self) -> None:
        """Columns that neighboring threads would take are tiles that are transposed then, as narrower ones are."""
        self.tiling = "columns"
        if self.accumulate is tl.float64 and self.widens:
            self.accumulate = tl.float32

    def blocks(self, columns: int) -> int:
        return self.outer * int(triton.cdiv(self.inner, columns))

    def unfold_rows(self, values: Tensor, shape: torch.Size) -> Tensor:
        """(rows,) in the order of the kernels -> `shape`, output's shape without `dim`."""
        if self.turned:
            values = values.view(self.outer, self.inner).t().reshape(-1)
        return self.layout.unfold_rows(values, shape)

    @property
    def half_precision(self) -> bool:
        return self.y.tensor is not None and self.y.tensor.dtype in HALF_DTYPES

    @property
    def widens(self) -> bool:
        """Whether the kernels compute in a wider dtype than they load."""
        return self.y.tensor is not None and self.y.tensor.dtype in (*HALF_DTYPES, torch.float32)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self.x.tensor is not None
        return torch.empty(shape, dtype=dtype, device=self.x.tensor.device)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return {tl.float64: torch.float64, tl.int64: torch.int64, tl.float32: torch.float32}[self.accumulate]

    def index_dtype(self, tile: Tile, *operands: Operand) -> tl.dtype:
        """int32 positions where no rows of a tile reach 2^31 elements, two tiles past their end included.

        int64 takes twice the registers: half-precision rows of any alignment spill 387 times for 2 with 96 (sm_90).
        """
        reach = max(abs(operand.time) for operand in operands) * (self.layout.length + 2 * tile.steps)
        across = max(abs(operand.inner) for operand in (*operands, self.initial)) * tile.R
        return tl.int32 if reach + across < 2**31 else tl.int64


def turned(operand: Operand) -> Operand:
    return replace(operand, outer=operand.inner, inner=operand.outer)


def _is_aligned(operand: Operand) -> bool:
    """Whether Triton sees that groups of steps of every row are whole vectors: it looks for multiples of 16."""
    tensor = operand.tensor
    assert tensor is not None
    return operand.time == 1 and not (operand.outer % 16 or operand.inner % 16 or tensor.data_ptr() % 16)
