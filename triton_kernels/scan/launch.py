"""Launchers of the scan kernels: `scan` and `scan_gradients`, with the meaning of the private ops of the same names.

No autotuning at run time: tiles follow from the shape and the dtype, so that a call costs one launch and a result does
not depend on what ran before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import on_device
from ..common.layout import HALF_DTYPES, Gates, Operand
from . import half_precision
from .columns import scan_columns
from .flat_rows_launch import flat_tile, run_flat_rows
from .lookback import look_back_words, scan_lookback
from .parts import part_registers, parts_of, run_part_totals, takes_parts
from .problem import LONGEST_TILE, SECTOR, ScanProblem, Tile, turned
from .tiles import scan_tiles
from .window import scan_window

if TYPE_CHECKING:
    from torch_dcs_ops.reference.scan import ScanCall

# Programs that keep an H200 (132 SMs) busy: a smaller grid is cut in time as well.
BUSY_PROGRAMS = 264
# From so many programs on one that takes tile after tile leaves nothing idle.
ENOUGH_PROGRAMS = 528
# Tiles of one look-back group: a tile reads half of them on average (1 KB from L2, against a tile of 32 KB), and the
# serial chain is one link (about 1.5 us) a group: 48 links for 1e8 steps.
LOOKBACK_GROUP = 256
# So many warps leave most of the device idle: programs of more warps then, with fewer values a thread, down to 8.
FEW_WARPS = 2112
# Look-back groups of `scan_tiles`: at most so many words for a total of each row, so many groups a row where that
# allows them: a link of the chain takes longer there, a word costs as much as a few elements.
MOST_WORDS, GROUPS, GROUP_TILES = 2048, 6, (16, 32, 256)
# Rows up to this length look back by half tiles.
LONGEST_SMALL_TILES = 1 << 22
# Columns of at least so many steps are resident in programs; of longer ones so many at a time, at least and at most.
COLUMN_STEPS = (64, 128, 1024)
COLUMN_VALUES = 1 << 22


def scan(input: Tensor, call: ScanCall) -> Tensor:
    """``y[t] = x[t] + g[t]·y[prev(t)]``; with `shifted`, ``y[t] = x[t] + g[prev(t)]·y[prev(t)]``.

    `input` floating-point or int64 (then gamma is 1), any strides; the result has its dtype and shape, and the strides
    of ``torch.empty_like(input)``. Arguments are validated already. Raises NotImplementedError for complex numbers.
    """
    _refuse_complex(input, call.gamma)
    if input.dim() == 0:
        return scan(input.unsqueeze(0), _one_step(call)).squeeze(0)
    output = torch.empty_like(input)
    if output.numel() == 0:
        return output
    problem = _Problem(input, output, call)
    window, reach = call.window, problem.layout.length + (call.initial is not None)
    with on_device(input):
        if window is not None and window < reach:
            problem.run_window(window)
        else:
            problem.run(None, None, "none")
    return output


def scan_gradients(grad: Tensor, output: Tensor, call: ScanCall) -> tuple[Tensor, Tensor]:
    """Gradients of an unshifted `scan` without a window, from its `output` and the gradient of it, in one launch.

    Returns grad_input like `grad`, and ``grad_gamma[t] = grad_input[t]·output[prev(t)]``: for a gamma of every step
    elementwise in input's shape; else summed over time, in input's shape without `dim`, and for a 0-D gamma over all of
    it, float32 for a half input. The sums are made in a fixed order. Raises NotImplementedError for complex numbers.
    """
    gamma = call.gamma
    _refuse_complex(grad, gamma)
    if grad.dim() == 0:
        grad_input, sums = scan_gradients(grad.unsqueeze(0), output.unsqueeze(0), _one_step(call))
        return grad_input.squeeze(0), sums
    dim = call.dim % grad.dim()
    elementwise = gamma is not None and 0 < gamma.dim() == grad.dim()
    sum_dtype = torch.float32 if grad.dtype in HALF_DTYPES else grad.dtype
    if elementwise and gamma is not None and gamma.dtype == grad.dtype:
        sum_dtype = grad.dtype
    is_number = gamma is not None and not gamma.dim()
    rows = () if is_number else grad.shape[:dim] + grad.shape[dim + 1 :]
    grad_input = torch.empty_like(grad)
    grad_gamma = torch.empty_like(grad, dtype=sum_dtype) if elementwise else grad.new_zeros(rows, dtype=sum_dtype)
    if grad.numel() == 0:
        return grad_input, grad_gamma
    problem = _Problem(grad, grad_input, call._replace(reverse=not call.reverse, shifted=True))
    with on_device(grad):
        if elementwise:
            problem.run(output, grad_gamma, "step")
        else:
            sums = problem.run(output, None, "sum")
            grad_gamma = sums.sum() if is_number else problem.unfold_rows(sums, rows)
            grad_gamma = grad_gamma.to(sum_dtype)
    return grad_input, grad_gamma


def _one_step(call: ScanCall) -> ScanCall:
    """The call on a sequence of one step that stands for a call on a 0-D input."""
    return call._replace(dim=0, reset=None if call.reset is None else call.reset.unsqueeze(0))


def _refuse_complex(input: Tensor, gamma: Tensor | None) -> None:
    if input.is_complex() or (gamma is not None and gamma.is_complex()):
        raise NotImplementedError("the Triton scan kernels do not cover complex numbers")


class _Problem(ScanProblem):
    """Launches the kernel that suits its shape."""

    def registers(self, gradient: str, tile: Tile) -> int | None:
        """A cap on registers a thread, of which the compiler would take up to 255 unasked.

        A program waits for memory most of its time: 64 let 32 warps share an SM, 128 16 and 168 12, 255 eight. Plain
        scans keep within 64 without spilling. Programs of eight warps and more do within 128, others spill some (sm_90,
        up to a twentieth of their instructions).
        """
        plain = self.gates.kind in ("sum", "scalar") and self.reset.tensor is None and gradient == "none"
        narrow = self.accumulate is tl.float32 and not self.gates.wide
        if self.tiling == "serial" and not self.scans_alone and self.gates.kind != "step":
            return 80
        if plain and narrow and self.tiling == "vectors":
            return 64
        gated, resets = self.gates.kind in ("row", "step"), self.reset.tensor is not None
        if self.tiling == "serial" or (gradient != "none" and resets and tile.num_warps < 8):
            return None
        return 128 if tile.num_warps >= 8 or (gradient == "none" and not (gated and resets)) else 168

    def run(self, output: Tensor | None, grad_gamma: Tensor | None, gradient: str) -> Tensor:
        """Launches the scan; with gradient "sum" returns the (rows,) sums of gamma's gradient."""
        block = self.column_block() if gradient == "none" else None
        if block is not None:
            self.run_columns(block)
            return self.new((0, 1), self.accumulate_dtype)
        of_output, of_grad = self.layout.steps(output), self.layout.steps(grad_gamma)
        flat = flat_tile(self, of_output, of_grad, gradient)
        if flat is not None:
            return run_flat_rows(self, flat, of_output, of_grad, gradient)[:, 0]
        if self.in_rows:
            self.turn()
            of_output, of_grad = turned(of_output), turned(of_grad)
        long_rows = self.layout.length > LONGEST_TILE and self.in_rows
        if long_rows and gradient == "none" and half_precision.covers(self):
            share = 1 if self.layout.length > LONGEST_SMALL_TILES else 2
            half_precision.run_rows(self, 2 * LONGEST_TILE // share, LOOKBACK_GROUP // share)
            return self.new((0, 1), self.accumulate_dtype)
        one_pass = self.gates.kind != "step" and self.reset.tensor is None and self.accumulate is tl.float32
        if long_rows and one_pass and gradient != "step":
            partials = self.run_lookback(of_output, gradient)
        else:
            partials = self.run_tiles(of_output, of_grad, gradient)
        return partials[:, 0] if partials.size(1) == 1 else partials.sum(1)

    def tile(self) -> Tile:
        """The tile for this shape: 16 to 32 steps a thread, several rows a program where rows are short."""
        assert self.y.tensor is not None
        length, itemsize = self.layout.length, self.y.tensor.element_size()
        gated = self.gates.kind == "step" or self.reset.tensor is not None or itemsize == 8
        if self.tiling == "serial" and not self.scans_alone:
            return self._tile_of_groups(itemsize, gated)
        if self.tiling == "serial":
            steps = min(8 if gated else 32 if itemsize == 2 else 16, triton.next_power_of_2(length))
            # A thread with few steps has several columns: a program takes longer to begin than to load 1 KB.
            columns = min(128 * max(1, 8 // steps), triton.next_power_of_2(self.inner))
            while columns > 128 and self.blocks(columns) < 4 * ENOUGH_PROGRAMS:
                columns //= 2
            return Tile(columns, 1, 1, steps, max(1, min(4, columns // 32)))
        vector = min(16 // itemsize, triton.next_power_of_2(length))
        # Gates and their products take registers too: half as many steps.
        most = 2048 if gated else 4096
        if self.tiling == "columns":
            columns = self._columns_of_tile(128 // itemsize)
            steps = max(vector, min(most // columns, triton.next_power_of_2(length)))
            lanes = min(32, steps // vector)
            return Tile(columns, steps // (lanes * vector), lanes, vector, max(1, columns * steps // 512))
        lanes = min(32, triton.next_power_of_2(triton.cdiv(length, vector)))
        # A wait for the tiles before takes longer than a large tile, but where that spills (sm_90).
        plain = self.gates.kind in ("sum", "scalar") and self.reset.tensor is None
        fits = not gated or (self.blocks(1) < ENOUGH_PROGRAMS and (plain or itemsize < 8))
        single = LONGEST_TILE if fits else LONGEST_TILE // 2
        segments = triton.next_power_of_2(triton.cdiv(length, lanes * vector))
        if length > single:
            segments = most // (lanes * vector)
        steps = segments * lanes * vector
        # Every row of a program takes registers for its pointers: 16 steps a thread then, not 32.
        count = max(1, min(2048 // steps, triton.next_power_of_2(self.inner)))
        while count > 1 and self.layout.rows < count * BUSY_PROGRAMS and count * steps > 512:
            count //= 2
        warps = max(1, min(16, count * steps // (512 if gated or count > 1 else 1024)))
        tiles = triton.cdiv(length, steps)
        while tiles > 1 and warps < 16 and self.blocks(count) * tiles * warps < FEW_WARPS and steps >= 512 * warps:
            warps *= 2
        return Tile(count, segments, lanes, vector, warps)

    def _tile_of_groups(self, itemsize: int, gated: bool) -> Tile:
        """Neighboring columns, V successive steps of one a thread: all of the steps, where few programs can hold them.

        Else as many as 256 threads take, fewer where that gives no program to every half of a multiprocessor.
        """
        length, steps = self.layout.length, triton.next_power_of_2(self.layout.length)
        most = (32 if itemsize <= 4 else 16) // (2 if gated else 1)
        columns = self._columns_of_tile(SECTOR * 4)
        whole = columns
        while whole > SECTOR and (whole * steps > 512 * most or self.blocks(whole) < BUSY_PROGRAMS // 2):
            whole //= 2
        if whole * steps <= 512 * most and self.blocks(whole) >= BUSY_PROGRAMS // 8:
            # A multiprocessor runs one program of 512 threads at a time.
            threads = 512 if self.blocks(whole) <= BUSY_PROGRAMS // 2 else 256
            columns, group = whole, min(most, max(4, whole * steps // threads), steps)
            lanes = steps // group
        else:
            group, lanes = most, 256 // columns
            while group > 8 and self.blocks(columns) * triton.cdiv(length, group * lanes) < BUSY_PROGRAMS:
                group //= 2
        return Tile(columns, 1, lanes, group, max(1, columns * lanes // 32))

    def _columns_of_tile(self, most: int) -> int:
        """A power of two of at least a quarter of `most`: the largest that leaves less than a quarter idle, if any."""
        inner = self.inner
        columns = min(most, triton.next_power_of_2(inner))
        while columns > most // 4 and triton.cdiv(inner, columns) * columns > 1.25 * inner:
            columns //= 2
        return columns

    def run_tiles(self, output: Operand, grad: Operand, gradient: str, tile: Tile | None = None) -> Tensor:
        tile = tile or self.tile()
        x, y, gamma, initial, reset, layout = self.x, self.y, self.gamma, self.initial, self.reset, self.layout
        assert x.tensor is not None
        assert y.tensor is not None
        waits = self.blocks(tile.R) < ENOUGH_PROGRAMS and layout.length > tile.steps
        looks_back = waits and not takes_parts(self, tile)
        most_registers = self.registers(gradient, tile)
        share, count, group, each, lanes, bits, words, options = 0, 1, 0, 1, 0, 0, None, {}
        if waits and not looks_back:
            if self.tiling == "serial" and self.inner <= SECTOR // 2:
                self.transpose_tiles()
                tile = self.tile()
            most_registers = part_registers(self, gradient)
            tile, share, count, lanes, bits = parts_of(self, tile, most_registers)
            started = initial.tensor is not None and gradient == "none"
            words, options = run_part_totals(self, tile, share, count, started)
        blocks, tiles = self.blocks(tile.R), triton.cdiv(layout.length, tile.steps)
        if looks_back:
            share, count = 1, tiles
            group = _group_tiles(tiles, tile.R)
            each = max(1, group * tile.R // (32 * tile.num_warps))
            slot = (1 if y.tensor.element_size() <= 4 else 2) + (2 if self.gates.kind == "step" else 0)
            words, options = look_back_words(x.tensor, blocks * tile.R, tiles * slot)
        partials = self.new((layout.rows, count if gradient == "sum" else 1), self.accumulate_dtype)
        if gradient == "sum":
            grad = replace(grad, tensor=partials)
        scan_tiles[(blocks * count,)](
            x.tensor, y.tensor, gamma.tensor, initial.tensor, reset.tensor, output.tensor, grad.tensor, words,
            self.gates.bits, bits, layout.length, self.inner, blocks, tiles, share or tiles,
            x.outer, x.time, x.inner, y.outer, y.time, y.inner, gamma.outer, gamma.time, gamma.inner,
            initial.outer, initial.inner, reset.outer, reset.time, reset.inner,
            output.outer, output.time, output.inner, grad.outer, grad.time, grad.inner,
            tile.R, tile.Q, tile.J, tile.V,
            self.accumulate, self.index_dtype(tile, x, y, gamma, reset, output, grad), self.gates.kind, self.gates.wide,
            self.reverse, self.shifted, initial.tensor is not None, reset.tensor is not None, gradient,
            group, each, lanes, bool(options), x.tensor.is_cuda and torch.version.hip is None, self.tiling,
            num_warps=tile.num_warps, maxnreg=most_registers, **options,
        )  # fmt: skip
        return partials

    def run_lookback(self, output: Operand, gradient: str, tile: Tile | None = None) -> Tensor:
        tile = tile or self.lookback_tile()
        x, y, gamma, initial, layout = self.x, self.y, self.gamma, self.initial, self.layout
        assert x.tensor is not None
        tiles = triton.cdiv(layout.length, tile.steps)
        row_words = tiles // LOOKBACK_GROUP * (LOOKBACK_GROUP + 1) + tiles % LOOKBACK_GROUP
        words, options = look_back_words(x.tensor, layout.rows, row_words)
        partials = self.new((layout.rows, tiles if gradient == "sum" else 1), torch.float32)
        scan_lookback[(layout.rows * tiles,)](
            x.tensor, y.tensor, gamma.tensor, initial.tensor, output.tensor, partials, words,
            self.gates.bits, layout.length, layout.rows, self.inner, tiles, row_words,
            x.outer, x.time, x.inner, y.outer, y.time, y.inner, gamma.outer, gamma.inner,
            initial.outer, initial.inner, output.outer, output.time, output.inner,
            tile.Q, tile.J, tile.V, LOOKBACK_GROUP, self.index_dtype(tile, x, y, output), self.gates.kind,
            self.gates.wide, self.reverse, initial.tensor is not None, gradient, bool(options), self.tiling,
            num_warps=tile.num_warps, maxnreg=self.registers(gradient, tile), **options,
        )  # fmt: skip
        return partials

    def column_block(self) -> Tile | None:
        """What a program of `scan_columns` holds at a time, if that suits: whole columns, or parts of long ones.

        As many steps as keep COLUMN_VALUES on their way with a program for every 64 columns, down to 16 where the steps
        are many: fewer leave sectors of memory in part. 64 or 128 values a thread; 32 successive steps in float32, 16
        in half precision (half_precision.py has its own). On an H200 0.8 to 0.98 of a copy's speed.
        """
        known = self.gates.kind in ("sum", "scalar") and abs(self.gates.value) <= 1 and self.reset.tensor is None
        length, rows = self.layout.length, self.layout.rows
        if not (known and self.layout.inner >= SECTOR and self.widens and length >= COLUMN_STEPS[0]):
            return None
        half = self.half_precision
        _, middle, most = COLUMN_STEPS
        fitting = triton.next_power_of_2(triton.cdiv(COLUMN_VALUES, rows))
        steps = min(triton.next_power_of_2(length), max(middle, min(most, fitting)))
        wide = 128 if half_precision.covers(self) and steps < length else 64
        columns = min(wide, max(16, 32 * most // steps), triton.next_power_of_2(self.layout.inner))
        while columns > 16 and rows < columns * (2 * BUSY_PROGRAMS // 5):
            columns //= 2
        if rows < columns * (BUSY_PROGRAMS // (4 if length > steps and columns > 16 else 3)):
            return None
        # Half-precision elements loaded one by one, the next part's beside a part's: a third of a copy's speed.
        if half and length > steps and not self.columns_aligned:
            return None
        brief = steps <= middle
        values = 64 if brief and not half else 128
        group = 16 if brief or half else 32
        return Tile(columns, 1, steps // group, group, max(1, columns * steps // (32 * values)))

    def run_columns(self, block: Tile) -> None:
        if half_precision.covers(self):
            half_precision.run_columns(self, block)
            return
        x, y, initial, layout = self.x, self.y, self.initial, self.layout
        assert x.tensor is not None
        scan_columns[(layout.outer * triton.cdiv(layout.inner, block.R),)](
            x.tensor, y.tensor, initial.tensor, self.gates.bits, layout.length, layout.inner,
            x.outer, x.time, x.inner, y.outer, y.time, y.inner, initial.outer, initial.inner,
            block.R, block.steps, block.V, self.index_dtype(block, x, y), self.reverse, initial.tensor is not None,
            layout.length <= block.steps, num_warps=block.num_warps,
        )  # fmt: skip

    def lookback_tile(self) -> Tile:
        """Tiles of 4096 steps; twice that where rows are very long, half where all of them are few."""
        assert self.x.tensor is not None
        vector = 16 // self.x.tensor.element_size()
        large = self.layout.length > LONGEST_SMALL_TILES
        steps = LONGEST_TILE if large else LONGEST_TILE // 2
        warps = 8 if large else 4
        if self.layout.rows * triton.cdiv(self.layout.length, steps) * warps < FEW_WARPS // 2:
            steps, warps = steps // 2, 8
        return Tile(1, max(1, steps // (32 * vector)), 32, vector, warps)

    def run_window(self, window: int) -> None:
        x, y, gamma, initial, reset, layout = self.x, self.y, self.gamma, self.initial, self.reset, self.layout
        columns = min(64, triton.next_power_of_2(layout.inner))
        steps = min(512 // columns, triton.next_power_of_2(layout.length))
        grid = (layout.outer * triton.cdiv(layout.inner, columns) * triton.cdiv(layout.length, steps),)
        scan_window[grid](
            x.tensor, y.tensor, gamma.tensor, initial.tensor, reset.tensor,
            self.gates.bits, window, layout.length, layout.inner,
            x.outer, x.time, x.inner, y.outer, y.time, y.inner, gamma.outer, gamma.time, gamma.inner,
            initial.outer, initial.inner, reset.outer, reset.time, reset.inner,
            columns, steps, self.accumulate, self.gates.kind, self.reverse, self.shifted,
            initial.tensor is not None, reset.tensor is not None,
            num_warps=max(1, columns * steps // 128),
        )  # fmt: skip


def _group_tiles(tiles: int, rows: int) -> int:
    """Tiles of a look-back group of `scan_tiles`, a power of two, for a tile of `rows`."""
    few, least, most = GROUP_TILES
    if tiles <= few:
        return few
    wanted = max(1, tiles // GROUPS)
    return min(max(least, 1 << (wanted.bit_length() - 1)), most, MOST_WORDS // rows)


__all__ = ["Gates", "Tile", "scan", "scan_gradients"]
