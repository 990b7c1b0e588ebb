"""The operands of the returns' kernels, folded into (outer, time, inner) strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.layout import Layout, Operand, read_gates
from ..scan.gamma import load_gamma


@triton.jit
def row_rate_of(row, bits, valid, GATES: tl.constexpr):
    """gamma, or the trace, of the rows in float64; 1 where every step has its own."""
    ones = tl.full(valid.shape, 1.0, tl.float64)
    if GATES == "row":
        return tl.load(row, mask=valid, other=0).to(tl.float64)
    elif GATES == "step":
        return ones
    else:
        return ones * load_gamma(row, bits, "scalar")


if TYPE_CHECKING:
    from torch_dcs_ops.reference.returns import NStepCall, TemporalDifferenceCall


def strides(*operands: Operand) -> list[int]:
    return [stride for operand in operands for stride in (operand.outer, operand.time, operand.inner)]


class Rollout:
    """What all of them read, in the layout of their result: values, ends of episodes and discounts."""

    def __init__(self, layout: Layout, call: TemporalDifferenceCall | NStepCall) -> None:
        rewards, values, next_values, bootstrap_value, terminated, truncated = call[:6]
        dim = call.dim
        self.rewards, self.layout = rewards, layout
        self.gammas = read_gates(call.gamma, call.gamma_value, rewards, dim)
        self.traces = read_gates(call.trace, call.trace_value, rewards, dim)
        rows = rewards.shape[:dim] + rewards.shape[dim + 1 :]
        self.bootstrap = layout.row_values(None if bootstrap_value is None else bootstrap_value.expand(rows))
        self.full = [layout.steps(tensor) for tensor in (rewards, values, next_values)]
        self.ends = [self._flags(terminated), self._flags(truncated)]
        self.discounts = [
            layout.steps(gates.tensor) if gates.kind == "step" else layout.row_values(gates.tensor)
            for gates in (self.gammas, self.traces)
        ]
        given = (values, next_values, bootstrap_value, terminated, truncated)
        names = ("VALUES", "NEXT", "BOOTSTRAP", "TERMINATED", "TRUNCATED")
        self.constants: dict[str, Any] = {name: t is not None for name, t in zip(names, given, strict=True)}
        self.constants |= {"GAMMA": self.gammas.kind, "TRACE": self.traces.kind}

    def _flags(self, tensor: Tensor | None) -> Operand:
        return self.layout.steps(
            tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.bool else tensor
        )

    def pointers(self, *others: Operand) -> list[Tensor]:
        """Of its operands, then of these; where a flag says that there is none, any tensor stands for it."""
        operands = (*self.full, self.bootstrap, *self.ends, *self.discounts, *others)
        return [self.rewards if operand.tensor is None else operand.tensor for operand in operands]

    def strides(self, *others: Operand) -> list[int]:
        """In the order of `pointers`; bootstrap_value has none along time."""
        rest = strides(*self.ends, *self.discounts, *others)
        return [*strides(*self.full), self.bootstrap.outer, self.bootstrap.inner, *rest]
