"""Rows whose target is `ignore_index` are left out: chunks are taken of the others, which are brought together.

They keep their order, and come before the ignored ones. On a CPU their number is read, and nothing is run for the rest.
On CUDA it is read too, behind the launch of a first product, of a quarter of the rows at most, which a plain GEMM makes
of whatever is there: the number is copied before that product, and so is there before it ends. Everything else is run
for as many rows as there are, as on a CPU, and where none is ignored nothing is copied or put back. The CPU waits for
what was queued before the call, and is ahead of the GPU by that product then, and by the whole call at its end.
A backward that makes the logits again takes what its forward has found out (`Learned`), and waits for nothing.

While a CUDA graph is captured, and where `torch.cuda.set_sync_debug_mode` asks for no synchronization, nothing may wait
for a number: it stays on the device, all rows are there, and `grouped_mm` with one group reads from it how many rows of
a chunk it multiplies, but in the first chunks, up to a quarter of the rows, which a plain GEMM takes. What grouped_mm
leaves out is not initialized, and nothing of it is kept. That costs copies whether or not any row is ignored: of
input's rows, as they are multiplied, and of its gradient. linear_weight's gradient is summed over all rows: grouped_mm
takes a tenth longer than a GEMM to sum over the rows.
Filtered gradients, whose groups of rows want all of them, are run that way always.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from ... import _native
from .._common.triton import launchers

_BLOCK_BYTES = 32 << 20  # of rows on their way back
LEAST_PRODUCT = 1 << 40  # N·V·D from which on the copies are small beside the GEMMs
_GROUPED_CAPABILITIES = (9, 10)  # of grouped_mm's kernel; elsewhere it is a loop that waits for the number
_ALIGNMENT = 16  # bytes, of the rows that it reads
_GROUPED_TILE = (128, 256)
_LEAST_FILLING = 0.85
_PLAIN_PART = 0.25  # of the rows, the first ones
_TILE_ROWS = 128


def compacts(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    need_predictions: bool,
    logits_dtype: torch.dtype | None = None,
) -> Literal["host", "device"] | None:
    """Where the number of valid rows is known if ignored rows are left out; None where they are not.

    Predictions are wanted of ignored rows too. On CUDA: bfloat16 on devices of compute capability 9 and 10, V and D
    multiples of 8 and a contiguous linear_weight, as grouped_mm reads 16 bytes at a time, N·V·D of 2**40 or more, and
    logits of input's dtype, which is what grouped_mm writes.
    """
    if need_predictions or target.is_floating_point():
        return None
    if input.device.type == "cpu":
        return "host"
    classes, features = linear_weight.shape
    if (
        input.device.type != "cuda"
        or torch.version.hip is not None
        or input.dtype != torch.bfloat16
        or logits_dtype not in (None, input.dtype)
        or target.numel() * classes * features < LEAST_PRODUCT
        or not hasattr(functional, "grouped_mm")
        or not _has_grouped_mm(input.device)
    ):
        return None
    words = _ALIGNMENT // input.dtype.itemsize
    aligned = classes % words == features % words == linear_weight.data_ptr() % _ALIGNMENT == 0
    return "device" if aligned and linear_weight.is_contiguous() else None


@functools.cache
def _has_grouped_mm(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_CAPABILITIES


class ValidRows:
    """The rows of input (N, D) as they are run; slices of it are copies, the last of which is kept.

    count: how many of all are valid, int32 (1,) on the device; None where a CPU knows it, or is to know it.
    """

    def __init__(
        self, input: Tensor, target: Tensor, ignore_index: int, where: Literal["host", "device"], waits: bool = False
    ) -> None:
        """target is (N,). waits: the number is read from the device by `settle`; all rows are there until then."""
        self.input, self.dtype = input, input.dtype
        self.count: Tensor | None = None
        self.number: _Number | None = None
        # A chunk is wanted by two or three products.
        self.last_rows: tuple[slice, Tensor] | None = None
        self.counts: tuple[int, int, Tensor] | None = None
        mover = _mover(input) if where == "device" else None
        if mover is not None:
            self.index, self.rank, self.valid, self.count = mover.order_rows(target, ignore_index)
            self._expect(waits)
            return
        self.valid = target != ignore_index
        through = self.valid.cumsum(0)
        self.rank = through - self.valid.to(through.dtype)
        if where == "host":
            self.index = self.valid.nonzero().squeeze(1)
            return
        self.count = through[-1:].to(torch.int32)
        every = torch.arange(self.valid.numel(), device=input.device)
        slot = torch.where(self.valid, self.rank, through[-1:] + every - self.rank)
        self.index = torch.empty_like(every).scatter_(0, slot, every)
        self._expect(waits)

    def _expect(self, waits: bool) -> None:
        if waits:
            assert self.count is not None
            self.number, self.count = _Number(self.count), None

    def rows_before_number(self, most: int) -> int:
        """How many rows, of `most`, the first product takes: all of them where no number is waited for."""
        if self.number is None or self.number.rows is not None:
            return most
        quarter = int(_PLAIN_PART * self.size(0))
        return min(most, max(quarter // _TILE_ROWS * _TILE_ROWS or quarter, 1))

    def settle(self, least: int) -> None:
        """Waits for the number of valid rows, if that is wanted: so many are there from now on, `least` at least."""
        if self.number is not None:
            self.number.read(least, self.index.numel())

    @property
    def is_every_row(self) -> bool:
        """Whether it is known that none is ignored."""
        return self.number is not None and self.number.is_total

    def of(self, input: Tensor) -> ValidRows:
        """The same rows of another input (N, D)."""
        other = copy.copy(self)
        other.input, other.dtype, other.last_rows = input, input.dtype, None
        return other

    def valid_rows_of(self, part: slice) -> Tensor:
        """How many valid rows a chunk has, int32 (1,) on the device."""
        assert self.count is not None
        # Of all chunks at once, as long as they have one size: three launches a call and not two a chunk.
        first, step, counts = self.counts or (0, 0, self.count)
        if step == 0 or (part.start - first) % step or not first <= part.start or part.stop - part.start > step:
            first, step = part.start, part.stop - part.start
            starts = torch.arange(first, self.size(0), step, dtype=torch.int32, device=self.count.device)
            counts = (self.count - starts).clamp_(0, step)
            self.counts = first, step, counts
        index = (part.start - first) // step
        return counts[index : index + 1]

    def size(self, dim: int) -> int:
        if dim != 0:
            return self.input.size(dim)
        known = None if self.number is None else self.number.rows
        return self.index.numel() if known is None else known

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        return self.input.new_empty(*size, dtype=dtype)

    def __getitem__(self, part: slice | Tensor) -> Tensor:
        """Rows by their number, or by a (n,) tensor of numbers."""
        if self.is_every_row and isinstance(part, slice):
            self.last_rows = None
            return self.input[part]
        if isinstance(part, Tensor) or part.stop is None:
            return self.input.index_select(0, self.index[: self.size(0)][part])
        if self.last_rows is None or self.last_rows[0] != part:
            self.last_rows = None  # before there is another
            self.last_rows = part, self.input.index_select(0, self.index[part])
        return self.last_rows[1]

    @overload
    def gather(self, values: None) -> None: ...

    @overload
    def gather(self, values: Tensor) -> Tensor: ...

    def gather(self, values: Tensor | None) -> Tensor | None:
        """The values of these rows; None, and one for all, as it is."""
        return values if values is None or values.size(0) != self.valid.size(0) else _take(values, self.index)

    def restore_(self, values: Tensor) -> None:
        """Puts values (N, ...), the first of them in the order of these rows, where they belong, and 0 in the others.

        From the last block to the first: rows come from before there, so none that is yet to be read is lost.
        """
        if self.is_every_row:
            return
        rows = values.size(0)
        step = max(_BLOCK_BYTES // max(values[:1].nbytes, 1), 1)
        mover = _mover(values)
        if mover is not None and values.dim() == 2 and values.stride(1) == 1:
            # Where no row is ignored nothing moves: 0.15 ms less than two copies of 8192 rows of 4096 on an H200.
            mover.restore_rows(values, self.rank, self.valid, step)
            return
        zero = values.new_zeros(())
        for stop in range(rows, 0, -step):
            part = slice(max(stop - step, 0), stop)
            valid = self.valid[part].view(-1, *(1,) * (values.dim() - 1))
            torch.where(valid, _take(values, self.rank[part]), zero, out=values[part])


class _Number:
    """How many rows are valid, on its way from the device.

    rows: how many are run, once it is known; is_total: whether it is known to be that of all rows.
    """

    def __init__(self, count: Tensor) -> None:
        self.rows: int | None = None
        self.is_total = False
        self.count = count
        self.arrival: torch.cuda.Event | None = None
        if count.is_cuda:
            self.count = count.to("cpu", non_blocking=True)  # in pinned memory
            self.arrival = torch.cuda.current_stream(count.device).record_event()

    def read(self, least: int, total: int) -> None:
        """`least` rows of `total` are run in any case."""
        if self.rows is None:
            if self.arrival is not None:
                self.arrival.synchronize()
            count = int(self.count)
            self.rows, self.is_total = max(count, least), count == total


class Learned:
    """Which rows an eager forward has run, and how many, for its backward of the same target.

    Not for one that is captured in a CUDA graph, which may be replayed for other targets.
    """

    def __init__(self) -> None:
        self._rows: ValidRows | None = None
        self._is_noted = False

    def note(self, rows: ValidRows | None) -> None:
        """rows: those whose number is known, or read while the call runs; None where none is ignored."""
        # Without the input, which would be kept alive.
        self._rows, self._is_noted = None if rows is None else rows.of(rows.input.new_empty((0, 0))), True

    def is_of_use(self, device: torch.device) -> bool:
        rows = self._rows
        if rows is None:
            return self._is_noted
        # Without a number it is a CPU's, which counts them at once.
        return rows.number is None or (rows.number.rows is not None and may_wait(device))

    def rows_of(self, input: Tensor) -> ValidRows | None:
        """Of the forward's input, as `valid_rows` has them."""
        return None if self._rows is None or self._rows.is_every_row else self._rows.of(input)


def may_wait(device: torch.device) -> bool:
    """Whether the CPU may wait for a number of the device's."""
    if device.type != "cuda":
        return False
    if torch.cuda.get_sync_debug_mode() != 0:
        return False
    if device.index == torch.cuda.current_device():
        return not torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def _mover(tensor: Tensor) -> ModuleType | None:
    """The kernels that move rows, where there are any."""
    return (
        launchers("linear_cross_entropy.compact_rows") if tensor.is_cuda and _native.CUDA.kind != "reference" else None
    )


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Rows of values by their number; of 8192 numbers on a GPU index_select takes 8 us, this 2."""
    return values[index] if values.dim() == 1 else values.index_select(0, index)


def row_count(input: Tensor | ValidRows, part: slice) -> Tensor | None:
    """How many rows of a chunk of input are valid: `offs` for grouped_mm; None where a GEMM takes all of them.

    It does in the first quarter of the rows on CUDA too. Wherever a quarter of the rows is valid, these are, and a GEMM
    is the faster one, by 2 to 5 % (1024 or 2048 rows on an H200, D = 4096 or 2304).
    """
    if isinstance(input, Tensor) or input.count is None or part.stop <= _PLAIN_PART * input.size(0):
        return None
    return input.valid_rows_of(part)


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def grouped_product_fills(rows: int, features: int, device: torch.device) -> bool:
    """Whether grouped_mm to (rows, features) keeps nearly all multiprocessors busy.

    It cuts the result into tiles of 128 by 256 and nothing else: 1024 rows of 2048 features are 64 tiles, half of what
    an H200 has room for, and take twice a GEMM's time. Then a GEMM over all rows, ignored ones too, is the better one.
    """
    blocks = multiprocessors(device)
    tiles = -(-rows // _GROUPED_TILE[0]) * -(-features // _GROUPED_TILE[1])
    return tiles >= _LEAST_FILLING * blocks * -(-tiles // blocks)


def valid_rows(
    input: Tensor, target: Tensor, ignore_index: int, where: Literal["host", "device"], settles: bool = False,
    learned: Learned | None = None,
) -> ValidRows | None:  # fmt: skip
    """The rows of input (N, D) with another target (N,) than `ignore_index`; None if that is known to be all.

    settles: whether the caller can go on with fewer rows than there were, once their number is known (`settle`).
    learned: by the forward of the same call, else by this one.
    """
    if learned is not None and learned.is_of_use(input.device):
        return learned.rows_of(input)
    rows = None
    if target.numel() > 0 and (where == "device" or not bool((target != ignore_index).all())):
        rows = ValidRows(input, target, ignore_index, where, settles and where == "device" and may_wait(input.device))
    if learned is not None and (rows is None or rows.count is None):
        learned.note(rows)
    return rows
