"""Modules over the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ops.linear_cross_entropy.loss import linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer to `num_classes` logits and the cross entropy of them, as one op that never holds the logits.

    :class:`torch.nn.LinearCrossEntropyLoss` (torch >= 2.13), whose calls run unchanged and whose state dict loads, with
    the options of :func:`torch_dcs_ops.linear_cross_entropy`: those documented there are keywords here. `out_features`
    and `options` are torch's and taken only as () and None.

    Args:
        in_features: D, the last dimension of input.
        num_classes: V.
        bias: whether the linear layer has a bias.
        weight: (V,), a factor of every class; a buffer of the module.
        device, dtype: of the linear layer's parameters.

    Shapes: input (..., D); target (...) of class indices or (..., V) of class probabilities; the loss 0-D, or (...) for
    reduction "none".

    Example::

        >>> loss = torch_dcs_ops.nn.LinearCrossEntropyLoss(8, 100, shift=True)
        >>> loss(torch.randn(2, 5, 8), torch.randint(100, (2, 5))).backward()
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        shift: bool = False,
        grad_filter_eps: float | None = None,
        memory_budget: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        return_lse: bool = False,
        return_predictions: bool = False,
    ) -> None:
        super().__init__()
        if tuple(out_features) != ():
            raise RuntimeError(f"LinearCrossEntropyLoss: out_features must be (), got {tuple(out_features)}")
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"LinearCrossEntropyLoss: weight must have the shape ({num_classes},), one entry a class, got "
                f"{tuple(weight.shape)}"
            )
        self.num_classes = num_classes
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.keywords: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "options": options,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "shift": shift,
            "grad_filter_eps": grad_filter_eps,
            "memory_budget": memory_budget,
            "accumulate_dtype": accumulate_dtype,
            "return_lse": return_lse,
            "return_predictions": return_predictions,
        }

    def forward(self, input: Tensor, target: Tensor) -> Any:
        return linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight, **self.keywords
        )

    def extra_repr(self) -> str:
        keywords = (f"{name}={value!r}" for name, value in self.keywords.items() if value not in (None, False))
        return ", ".join((f"num_classes={self.num_classes}", *keywords))
