"""Every operand of a scan as rows in (outer, time, inner) strides, whatever the tensors' layouts are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .launch import float_bits

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Gates:
    """Where gamma comes from. kind: "sum" (gamma = 1), "scalar", "row" (one a row) or "step" (one a step)."""

    kind: str
    value: float
    tensor: Tensor | None

    @cached_property
    def bits(self) -> int:
        """Those of `value`."""
        return float_bits(self.value)

    @property
    def wide(self) -> bool:
        """Whether powers of gamma may exceed the range of float32 (or it is not known that they do not)."""
        return self.kind in ("row", "step") or abs(self.value) > 1.0


def read_gates(gamma: Tensor | None, gamma_value: float, input: Tensor, dim: int) -> Gates:
    """Classifies gamma. A number that is not finite becomes a tensor: only "row" and "step" carry inf and NaN about."""
    if gamma is not None and gamma.dim() == 0 and gamma.device.type == "cpu" and not _interpreted(input):
        gamma, gamma_value = None, float(gamma)
    if gamma is None:
        if gamma_value == 1.0:
            return Gates("sum", 1.0, None)
        if math.isfinite(gamma_value):
            return Gates("scalar", gamma_value, None)
        gamma = torch.full((), gamma_value, dtype=torch.float64, device=input.device)
    if 0 < gamma.dim() == input.dim():
        if gamma.size(dim) != 1:
            return Gates("step", 0.0, gamma.expand(input.shape))
        gamma = gamma.select(dim, 0)
    return Gates("row", 0.0, gamma.expand(input.shape[:dim] + input.shape[dim + 1 :]))


def _interpreted(input: Tensor) -> bool:
    # In the interpreter every tensor is on the CPU; there a gamma of no dimensions stands for one on the device.
    return input.device.type == "cpu"


@dataclass(frozen=True)
class Operand:
    """A tensor (kept alive here) and its strides in elements; `time` is 0 for one value a row."""

    tensor: Tensor | None
    outer: int = 0
    time: int = 0
    inner: int = 0


class Layout:
    """How the dimensions of `output` fold into (outer, time, inner), slowest first in its memory."""

    def __init__(self, output: Tensor, dim: int) -> None:
        others = [d for d in range(output.dim()) if d != dim]
        others.sort(key=lambda d: -output.stride(d))
        slower = [d for d in others if output.stride(d) >= output.stride(dim)]
        faster = [d for d in others if output.stride(d) < output.stride(dim)]
        self.dim = dim
        self.slower = len(slower)
        self.order = [*slower, dim, *faster]
        self.row_order = [d - (d > dim) for d in (*slower, *faster)]
        self.length = output.size(dim)
        self.outer = math.prod(output.size(d) for d in slower)
        self.inner = math.prod(output.size(d) for d in faster)

    @property
    def rows(self) -> int:
        return self.outer * self.inner

    def steps(self, tensor: Tensor | None) -> Operand:
        """Strides of a tensor of output's shape; one that does not fold is copied."""
        if tensor is None:
            return Operand(None)
        tensor = tensor.permute(self.order)
        shape, strides = tensor.shape, tensor.stride()
        outer = _fold(shape[: self.slower], strides[: self.slower])
        inner = _fold(shape[self.slower + 1 :], strides[self.slower + 1 :])
        if outer is None or inner is None:
            tensor = tensor.contiguous()
            return Operand(tensor, self.length * self.inner, self.inner, 1)
        return Operand(tensor, outer, strides[self.slower], inner)

    def row_values(self, tensor: Tensor | None) -> Operand:
        """Strides of a tensor of output's shape without `dim`."""
        if tensor is None:
            return Operand(None)
        tensor = tensor.permute(self.row_order)
        shape, strides = tensor.shape, tensor.stride()
        outer = _fold(shape[: self.slower], strides[: self.slower])
        inner = _fold(shape[self.slower :], strides[self.slower :])
        if outer is None or inner is None:
            return Operand(tensor.contiguous(), self.inner, 0, 1)
        return Operand(tensor, outer, 0, inner)

    def unfold_rows(self, values: Tensor, shape: torch.Size) -> Tensor:
        """(rows,) in the order of the kernels -> `shape`, output's shape without `dim`."""
        permuted = values.view([shape[d] for d in self.row_order])
        inverse = [self.row_order.index(d) for d in range(len(self.row_order))]
        return permuted.permute(inverse).contiguous()


def _fold(sizes: torch.Size, strides: tuple[int, ...]) -> int | None:
    """The stride of all these dimensions taken as one, or None where no stride steps through them in order."""
    folded, stride = 1, 0
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if folded == 1:
            folded, stride = size, step
        elif step == stride * folded:
            folded *= size
        else:
            return None
    return stride
