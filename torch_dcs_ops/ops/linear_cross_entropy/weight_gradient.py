"""The gradient of linear_weight, Σ over chunks of logits_gradientᵀ·input, summed the way the plan says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import alignment
from .plan import Accumulation, with_padding
from .valid_rows import ValidRows, multiprocessors

_WIDE_BYTES = 32 << 20  # of float32 copies, where a half-precision factor or result has to be converted
_SLICE_BYTES = 64 << 20  # of what a GEMM makes at a time: several waves on a GPU
_LEAST_SLICES = 8
_GEMM_TILE = (128, 256)  # of classes and features, on GPUs of compute capability 9 and 10
_ALIGNMENT = 64  # columns; rows of a slice then start where cuBLAS wants them, and can be copied as words


def make_accumulator(
    accumulation: Accumulation,
    input: Tensor | ValidRows,
    linear_weight: Tensor,
    dtype: torch.dtype,
    word: int = 1,
    scale: float = 1.0,
) -> WeightGradient:
    """`dtype` is the result's: linear_weight's own, or float32 for a float16 gradient that is not yet normalized.

    scale: of the only product of a "direct" plan, which is multiplied by it before it is rounded.
    """
    if accumulation == "direct":
        return _Direct(input, linear_weight, dtype, word, scale)
    kinds: dict[Accumulation, Callable[[Tensor | ValidRows, Tensor, torch.dtype, int], WeightGradient]]
    kinds = {"compact": _Direct, "shared": _Shared, "float32": _Float32}
    return kinds[accumulation](input, linear_weight, dtype, word)


class WeightGradient(ABC):
    """A (V, D) sum over chunks of the rows of `input` (N, D).

    `total` has rows for as many classes as whole words of `word` elements have; those behind the last class hold what
    lies between the rows of the logits' gradient, multiplied.
    """

    def __init__(self, input: Tensor | ValidRows, linear_weight: Tensor, dtype: torch.dtype, word: int) -> None:
        self.input, (self.classes, features) = input, linear_weight.shape
        rows = alignment.padded(self.classes, word)
        self.total = torch.empty((rows, features), dtype=dtype, device=linear_weight.device)
        self.started = False

    def add(self, logits_gradient: Tensor, part: slice) -> None:
        """Adds logits_gradient (n, V) transposed times the rows `part` of input."""
        self._add(alignment.widened(logits_gradient, self.total.size(0)), part)
        self.started = True

    def slice_arguments(self, part: slice, can_write: bool) -> tuple[Any, ...]:
        """The row op's last arguments, if it is to write the gradient of the rows `part` where this one keeps it.

        can_write: whether the kernel that makes it is one that does.
        """
        return ()

    def scale_rows(self, factors: Tensor) -> None:
        """Multiplies the part of every row by its factor (N,): where nothing is summed before `result`."""
        raise NotImplementedError

    @abstractmethod
    def _add(self, logits_gradient: Tensor, part: slice) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Makes `total` the sum."""

    def result(self) -> Tensor:
        """Once: what else was held is given back."""
        if self.started:
            self._finish()
        else:
            self.total.zero_()
        return self.total[: self.classes]


class _Direct(WeightGradient):
    """GEMMs that add to the result in its own dtype."""

    def __init__(
        self, input: Tensor | ValidRows, linear_weight: Tensor, dtype: torch.dtype, word: int, scale: float = 1.0
    ) -> None:
        super().__init__(input, linear_weight, dtype, word)
        self.scale = scale

    def _add(self, logits_gradient: Tensor, part: slice) -> None:
        left, right = logits_gradient.t(), self.input[part]
        if self.started:
            self.total.addmm_(left, right)
        elif self.scale == 1:
            torch.mm(left, right, out=self.total)
        else:
            torch.addmm(self.total, left, right, beta=0, alpha=self.scale, out=self.total)

    def _finish(self) -> None:
        """It has been all along."""


class _Float32(WeightGradient):
    """GEMMs that add to a float32 sum, which lies in the result's own memory as far as that goes.

    The memory of a half-precision result holds the float32 sum of the first V/2 classes, or of a few less so that the
    others' columns start where cuBLAS wants them (V = 50264: 1.43 ms a chunk of 2688 rows of 1536 on an H200 where it
    is cut at 25132, 0.66 at 25088); the other half of the sum is beside it. At the end the first half is narrowed in
    place: float32 row c, at byte 4·c·D, becomes the row at byte 2·c·D. Rows [c, 2·c) go to bytes [2·c·D, 4·c·D), which
    are those of float32 rows [c/2, c) and so narrowed before: one copy for each doubling. Only the very first rows
    would be written onto themselves, and take a detour.
    """

    def __init__(self, input: Tensor | ValidRows, linear_weight: Tensor, dtype: torch.dtype, word: int) -> None:
        super().__init__(input, linear_weight, dtype, word)
        classes, features = self.total.shape
        self.half = 0 if dtype == torch.float32 else classes // 2 // _ALIGNMENT * _ALIGNMENT
        self.sums = [self.total]
        if dtype != torch.float32:
            within = self.total.view(-1)[: 2 * self.half * features].view(torch.float32).view(self.half, features)
            self.sums = [within, self.total.new_empty((classes - self.half, features), dtype=torch.float32)]

    def _add(self, logits_gradient: Tensor, part: slice) -> None:
        first = 0
        for total in self.sums:
            _float32_product(
                total, logits_gradient[:, first : first + total.size(0)], self.input[part], accumulate=self.started
            )
            first += total.size(0)

    def _finish(self) -> None:
        sums, self.sums = self.sums, []
        if self.total.dtype == torch.float32:
            return
        within, beside = sums
        most = max(_SLICE_BYTES // (self.total.dtype.itemsize * self.total.size(1)), 1)
        done = min(most, -(-self.half // _LEAST_SLICES))
        if done:
            self.total[:done].copy_(within[:done].to(self.total.dtype))
        while done < self.half:
            end = min(2 * done, self.half)
            self.total[done:end].copy_(within[done:end])
            done = end
        self.total[self.half :].copy_(beside)


class _Slice(NamedTuple):
    """Classes [first, last) of the gradient of all logits.

    Columns [first, middle) are held `within` the memory of the result, the others `beside` it.
    """

    first: int
    middle: int
    last: int
    within: Tensor  # (N, middle - first)
    beside: Tensor  # (N, last - middle), its rows padded to a multiple of 16 bytes


class _Shared(WeightGradient):
    """One GEMM over all rows for every class, from the gradient of all logits, which the result's memory shares.

    The memory of D rows of logits is that of the result. A slice of w classes has w·D elements of the result; in as
    many fit the gradients of its first w·D/N classes, over all N rows, and the rest is beside it. They lie so many
    classes behind the place of the slice's own result. With all rows there, for one slice after another:

    1. the first classes' GEMM writes to their place in the result, which ends where their gradients begin;
    2. the other classes' GEMM writes to theirs, over those gradients, which have been used; the next slice's begin
       behind that.

    So nothing is copied. The last slice, of w·D/N classes at least, is beside the result altogether. Held at the most,
    in elements: max(N, D)·V, D times that slice's classes, and one chunk of logits.
    """

    def __init__(self, input: Tensor | ValidRows, linear_weight: Tensor, dtype: torch.dtype, word: int) -> None:
        super().__init__(input, linear_weight, dtype, word)
        rows, (classes, features) = input.size(0), linear_weight.shape
        # In elements of input's dtype, in which a float32 result has twice the room.
        row_room = features * dtype.itemsize // input.dtype.itemsize
        most = max(rows, row_room)
        # An eighth of the classes: small sums stay small as well.
        at_a_time = min(_SLICE_BYTES // (features * dtype.itemsize), -(-classes // _LEAST_SLICES) * row_room // most)
        if linear_weight.device.type == "cuda":
            at_a_time = in_whole_waves(at_a_time, features, multiprocessors(linear_weight.device))
        width = max(alignment.padded(at_a_time * most // row_room, _ALIGNMENT), _ALIGNMENT)
        inner = min(width, alignment.whole(width * row_room // max(rows, 1), _ALIGNMENT))
        count = max(-(-classes // width), 1)
        if count > 1 and classes - (count - 1) * width < inner:
            count -= 1
        start, full = inner * row_room, count - 1
        self.within = self.total.view(-1).view(input.dtype)[start : start + full * width * row_room]
        padding = 16 // input.dtype.itemsize
        rest, last = alignment.padded(width - inner, padding), alignment.padded(classes - full * width, padding)
        self.beside = input.new_empty(rows * (full * rest + last))
        self.slices = []
        for index in range(count):
            first, is_last = index * width, index == full
            middle = first if is_last else first + inner
            end = min(alignment.padded(classes, word), self.total.size(0)) if is_last else first + width
            offset, stride = rows * index * rest, last if is_last else rest
            within = self.within[index * width * row_room :][: rows * (middle - first)]
            beside = self.beside[offset : offset + rows * stride].view(rows, stride)
            self.slices.append(
                _Slice(first, middle, end, within.view(rows, middle - first), with_padding(beside, end - middle))
            )
        self.width, self.inner, self.is_written, self.rows = width, inner, False, rows
        self.factors: Tensor | None = None

    def slice_arguments(self, part: slice, can_write: bool) -> tuple[Any, ...]:
        # Beside writing the gradient, reading it again for a copy took 1 ms of 41 (8192 rows, 4096 features, 128256
        # classes on an H200).
        self.is_written = can_write
        if not can_write:
            return ()
        return self.within, self.beside, part.start, self.rows, self.width, self.inner, len(self.slices)

    def _add(self, logits_gradient: Tensor, part: slice) -> None:
        if self.is_written:
            return
        for of_classes in self.slices:
            _copy_words(of_classes.within[part], logits_gradient[:, of_classes.first : of_classes.middle])
            _copy_words(of_classes.beside[part], logits_gradient[:, of_classes.middle : of_classes.last])

    def scale_rows(self, factors: Tensor) -> None:
        self.factors = factors

    def _finish(self) -> None:
        slices, self.slices = self.slices, []
        del self.within, self.beside
        input = self.input[:]
        rows = slice(input.size(0))  # of which there were more before it was known how many are valid
        if self.factors is not None:
            input = torch.mul(input, self.factors.unsqueeze(1), out=torch.empty_like(input))
        for of_classes in slices:
            _product(self.total[of_classes.first : of_classes.middle], of_classes.within[rows], input)
            _product(self.total[of_classes.middle : of_classes.last], of_classes.beside[rows], input)


def _product(out: Tensor, logits_gradient: Tensor, input: Tensor) -> None:
    if out.size(0) == 0:
        return
    if out.dtype == input.dtype:
        torch.mm(logits_gradient.t(), input, out=out)
    else:
        _float32_product(out, logits_gradient, input, accumulate=False)


def in_whole_waves(classes: int, features: int, blocks: int) -> int:
    """About so many classes, the tiles of whose GEMM fill a GPU's multiprocessors, where it has more tiles than these.

    8192 classes of 4096 features are 7.76 waves of 132, 8448 are 8.
    """
    rows, columns = classes // _GEMM_TILE[0], -(-features // _GEMM_TILE[1])
    if rows * columns < blocks:
        return classes
    return round(rows * columns / blocks) * blocks // columns * _GEMM_TILE[0] or classes


def _copy_words(to: Tensor, source: Tensor) -> None:
    """A copy between strided half-precision matrices; four elements at a time, where they start and end at such."""
    words = 8 // to.element_size()
    if all(t.size(1) % words == t.stride(0) % words == t.storage_offset() % words == 0 for t in (to, source)):
        to, source = to.view(torch.int64), source.view(torch.int64)
    to.copy_(source)


def _float32_product(out: Tensor, logits_gradient: Tensor, input: Tensor, *, accumulate: bool) -> None:
    """out = (out +) logits_gradientᵀ·input, the products of half-precision numbers and all sums in float32."""
    if out.size(0) == 0:
        return
    if input.device.type == "cuda":
        if accumulate:
            torch.addmm(out, logits_gradient.t(), input, out_dtype=torch.float32, out=out)
        else:
            torch.mm(logits_gradient.t(), input, out_dtype=torch.float32, out=out)
        return
    input = input.float()
    step = max(_WIDE_BYTES // (4 * logits_gradient.size(0)), 1)
    for part in (slice(start, start + step) for start in range(0, out.size(0), step)):
        factor = logits_gradient[:, part].t().float()
        if accumulate:
            out[part].addmm_(factor, input)
        else:
            torch.mm(factor, input, out=out[part])
