"""The gradient of linear_weight, Σ over chunks of logits_gradientᵀ·input, summed the way the plan says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ._lce_plan import Accumulation

_SLICE_BYTES = 32 << 20


def make_accumulator(accumulation: Accumulation, linear_weight: Tensor, dtype: torch.dtype) -> WeightGradient:
    """`dtype` is the result's: linear_weight's own, or float32 for a float16 gradient that is not yet normalised."""
    kinds: dict[Accumulation, Callable[[Tensor, torch.dtype], WeightGradient]]
    kinds = {"direct": _Direct, "compact": _Direct, "pair": _Pair, "float32": _Float32}
    return kinds[accumulation](linear_weight, dtype)


class WeightGradient(ABC):
    """A (V, D) sum that nothing has been added to."""

    def __init__(self, linear_weight: Tensor, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = linear_weight.shape, linear_weight.device, dtype
        self.started = False

    def add(self, logits_gradient: Tensor, input: Tensor) -> None:
        """Adds logits_gradient (n, V) transposed times input (n, D)."""
        self._add(logits_gradient, input)
        self.started = True

    @abstractmethod
    def _add(self, logits_gradient: Tensor, input: Tensor) -> None: ...

    @abstractmethod
    def _sum(self) -> Tensor: ...

    def result(self) -> Tensor:
        if not self.started:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._sum()

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device=self.device)


class _Direct(WeightGradient):
    def __init__(self, linear_weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(linear_weight, dtype)
        self.total = self._empty(dtype)

    def _add(self, logits_gradient: Tensor, input: Tensor) -> None:
        if self.started:
            self.total.addmm_(logits_gradient.t(), input)
        else:
            torch.mm(logits_gradient.t(), input, out=self.total)

    def _sum(self) -> Tensor:
        return self.total


class _Float32(WeightGradient):
    def __init__(self, linear_weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(linear_weight, dtype)
        self.total = self._empty(torch.float32)

    def _add(self, logits_gradient: Tensor, input: Tensor) -> None:
        if input.device.type == "cuda":
            transposed = logits_gradient.t()
            if self.started:
                torch.addmm(self.total, transposed, input, out_dtype=torch.float32, out=self.total)
            else:
                torch.mm(transposed, input, out_dtype=torch.float32, out=self.total)
            return
        wide_input = input.float()
        for part in _slices(self.shape, logits_gradient.size(0)):
            product = _product(logits_gradient[:, part], wide_input)
            if self.started:
                self.total[part] += product
            else:
                self.total[part] = product

    def _sum(self) -> Tensor:
        return self.total.to(self.dtype)


class _Pair(WeightGradient):
    """The sum as hi + lo, both bfloat16, hi its rounding: half of float32's extra memory, 16 bits of mantissa."""

    def __init__(self, linear_weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(linear_weight, dtype)
        self.hi, self.lo = self._empty(dtype), self._empty(dtype)

    def _add(self, logits_gradient: Tensor, input: Tensor) -> None:
        if input.device.type != "cuda":
            input = input.float()
        for part in _slices(self.shape, logits_gradient.size(0)):
            hi, lo = self.hi[part], self.lo[part]
            total = _product(logits_gradient[:, part], input)
            if self.started:
                total.add_(lo).add_(hi)
            hi.copy_(total)
            lo.copy_(total.sub_(hi))

    def _sum(self) -> Tensor:
        return self.hi


def _product(logits_gradient: Tensor, input: Tensor) -> Tensor:
    """logits_gradientᵀ·input in float32."""
    if input.device.type == "cuda":
        return torch.mm(logits_gradient.t(), input, out_dtype=torch.float32)
    return torch.mm(logits_gradient.t().float(), input)


def _slices(shape: torch.Size, rows: int) -> list[slice]:
    """Parts of the vocabulary, so that a part's float32 products (and the widened factor) stay small."""
    classes, features = shape
    step = max(_SLICE_BYTES // (4 * max(features, rows, 1)), 1)
    return [slice(start, min(start + step, classes)) for start in range(0, classes, step)]
