"""What becomes of the logits' gradient, one chunk after another: the exact gradients of input, linear_weight and
linear_bias, or itself, saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ... import _native
from ...reference.linear_cross_entropy.loss import Needs
from ...reference.linear_cross_entropy.rows import row_dtype
from . import alignment
from .plan import Plan, with_padding
from .valid_rows import ValidRows, grouped_product_fills, row_count
from .weight_gradient import make_accumulator


class Upstream(NamedTuple):
    """Gradients of the rows' losses, lse and entropies: (N,) or (1,) in the rows' dtype. None: 1 for loss, else 0."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None


class Gradients(NamedTuple):
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor


class SavedCall(NamedTuple):
    """What a backward has of a loss whose forward saved the gradient of the logits, (N, V)."""

    logits_gradient: Tensor
    grad_loss: Tensor
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    lacking: Tensor | None = None  # (1,), the factor that a float16 gradient of the logits lacks


class ExactGradients:
    """Takes the logits' gradient, which the row op has left in their place; `dtype` is that of the results.

    The gradient of float32 logits of half-precision operands is multiplied in their dtype, as a factor like any other.
    """

    def __init__(
        self,
        plan: Plan,
        input: Tensor | ValidRows,
        linear_weight: Tensor,
        grad_input: Tensor,
        needs: Needs,
        dtype: torch.dtype,
        word: int,
        weight_scale: float = 1.0,
    ) -> None:
        """input is (N, D); grad_input, where it is needed, has rows for all of these. word: see alignment.py.

        weight_scale: what linear_weight's gradient is multiplied by, if it is one product.
        """
        self.input, self.linear_weight, self.needs, self.dtype = input, linear_weight, needs, dtype
        self.grad_input, self.word = grad_input, word
        self.narrow: Tensor | None = None
        classes = linear_weight.size(0)
        self.grad_bias = linear_weight.new_zeros(classes if needs.linear_bias else 0, dtype=row_dtype(input.dtype))
        self.grad_weight = (
            make_accumulator(plan.accumulation, input, linear_weight, dtype, word, weight_scale)
            if needs.linear_weight
            else None
        )

    def slice_arguments(self, logits: Tensor, part: slice, can_write: bool | None = None) -> tuple[Any, ...]:
        """The row op's last arguments for the rows `part`; can_write: None is what that op can on this device."""
        if self.grad_weight is None or logits.dtype != self.input.dtype:
            return ()
        if can_write is None:
            can_write = logits.is_cuda and _native.CUDA.kind == "native"
        return self.grad_weight.slice_arguments(part, can_write)

    def add(
        self, logits: Tensor, part: slice, lse: Tensor | None = None, input_is_done: Callable[[], None] | None = None
    ) -> None:
        """logits (n, V) of the rows `part`; no chunk has more rows than the first. lse is not looked at.

        input_is_done is called between the products: it may begin something with grad_input that runs beside the last.
        """
        if self.needs.linear_bias:
            self.grad_bias += logits.sum(0, dtype=self.grad_bias.dtype)
        if not (self.needs.input or self.needs.linear_weight):
            return
        if logits.dtype != self.input.dtype:
            logits = self._narrowed(logits)
        if self.needs.input:
            count = row_count(self.input, part)
            if count is not None and grouped_product_fills(logits.size(0), self.linear_weight.size(1), logits.device):
                self.grad_input[part] = functional.grouped_mm(logits, self.linear_weight[None], offs=count)
            else:
                alignment.input_gradient_product(logits, self.linear_weight, self.word, self.grad_input[part])
        if input_is_done is not None:
            input_is_done()
        if self.grad_weight is not None:
            self.grad_weight.add(logits, part)

    def scale_rows(self, factors: Tensor) -> None:
        """Multiplies what every row has added by its factor (N,), after the last chunk.

        linear_weight's gradient must be one that is summed by `result` alone, and linear_bias's none.
        """
        if self.needs.input:
            grad_input = self.grad_input[: factors.size(0)]
            torch.mul(grad_input, factors.unsqueeze(1), out=grad_input)
        if self.grad_weight is not None:
            self.grad_weight.scale_rows(factors)

    def _narrowed(self, logits: Tensor) -> Tensor:
        """In the same memory for every chunk."""
        if self.narrow is None:
            room = self.input.new_empty((logits.size(0), logits.stride(0)))
            self.narrow = with_padding(room, logits.size(1))
        return self.narrow[: logits.size(0)].copy_(logits)

    def result(self) -> Gradients:
        grad_weight = self.grad_input.new_empty(0) if self.grad_weight is None else self.grad_weight.result()
        return Gradients(self.grad_input, grad_weight, self.grad_bias)


class SavedLogitsGradient:
    """The logits' gradient itself, (N, V); N is 1 at least."""

    def add(self, logits: Tensor, part: slice, lse: Tensor) -> None:
        """logits (N, V) of all rows."""
        self.gradient = logits

    def result(self) -> Tensor:
        return self.gradient
