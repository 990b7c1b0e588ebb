"""Logits that are not formed, and the losses that transformers computes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops.linear_cross_entropy.loss import linear_cross_entropy
from .head import linear_of, with_operands


class Seen:
    """The last loss's predictions and targets, where they are asked for."""

    def __init__(self) -> None:
        self.predictions: Tensor | None = None
        self.is_right: Tensor | None = None  # of the targets that count
        self.counts: Tensor | None = None

    def see(self, predictions: Tensor, target: Tensor, ignore_index: int) -> None:
        self.predictions = predictions.detach().view(target.shape)
        self.counts = target != ignore_index
        self.is_right = (self.predictions == target) & self.counts


class Settings(NamedTuple):
    """What `fused_loss` was asked for."""

    options: dict[str, Any]  # of linear_cross_entropy
    logits: str  # when there are any: "eval", while the model does not train, "train", then too, or "never"
    seen: Seen | None = None


class Logits:
    """Those of `head` on `hidden`, and what a forward does to them before it takes their loss.

    `steps` are (name, argument), in the forward's order: "times", "over", "plus", "softcapped", "float".
    """

    def __init__(
        self, settings: Settings, head: nn.Module, hidden: Tensor, steps: tuple[tuple[str, Any], ...] = ()
    ) -> None:
        self._settings = settings
        self._head = head
        self._hidden = hidden
        self._steps = steps

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], linear_of(self._head).weight.size(0)))

    def _and(self, name: str, argument: Any = None) -> Logits:
        return Logits(self._settings, self._head, self._hidden, (*self._steps, (name, argument)))

    def _of(self, hidden: Tensor) -> Logits:
        return Logits(self._settings, self._head, hidden, self._steps)

    def times(self, factor: Any) -> Logits:
        return self._and("times", factor)

    def over(self, divisor: Any) -> Logits:
        return self._and("over", divisor)

    def plus(self, bias: Tensor) -> Logits:
        return self._and("plus", bias)

    def softcapped(self, cap: float) -> Logits:
        return self._and("softcapped", cap)

    def float(self) -> Logits:
        return self._and("float")

    def contiguous(self) -> Logits:
        return self

    def rows(self) -> Logits:
        """As view(-1, classes)."""
        return self._of(self._hidden.flatten(0, -2))

    def __getitem__(self, index: Any) -> Logits:
        """Of an index that leaves the last dimension alone."""
        return self._of(self._hidden[index])

    def formed(self, training: bool) -> Tensor | None:
        """The logits where the caller gets them, else None."""
        if self._settings.logits == "never" or (training and self._settings.logits != "train"):
            return None
        logits: Tensor = self._head(self._hidden)
        for name, argument in self._steps:
            if name == "times":
                logits = logits * argument
            elif name == "over":
                logits = logits / argument
            elif name == "plus":
                logits = logits + argument.to(logits.device)
            elif name == "softcapped":
                logits = torch.tanh(logits / argument) * argument
            else:
                logits = logits.float()
        return logits

    def as_tuple(self, training: bool) -> tuple[Tensor, ...]:
        logits = self.formed(training)
        return () if logits is None else (logits,)

    def cross_entropy(self, target: Tensor, **keywords: Any) -> Tensor:
        """`functional.cross_entropy` of the rows of logits, float32 or wider."""
        softcap, scale, addend = None, 1.0, None
        for name, argument in self._steps:
            if name == "times":
                scale = scale * argument
            elif name == "over":
                scale = scale / argument
            elif name == "softcapped":
                softcap = float(argument)
            elif name == "plus":
                addend = argument.reshape(-1) / scale if addend is None else addend + argument.reshape(-1) / scale
        options, seen = self._settings.options, self._settings.seen

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if addend is not None:
                added = addend.to(hidden.device)
                bias = added if bias is None else bias + added
            if bias is not None:
                bias = bias.to(hidden.dtype)
            own = target.to(hidden.device)
            operands = (hidden.flatten(0, -2), weight, own.flatten())
            given = {"linear_bias": bias, "softcap": softcap, "logit_scale": scale, **options, **keywords}
            if seen is None:
                result: Tensor = linear_cross_entropy(*operands, **given)
            else:
                result, predictions = linear_cross_entropy(*operands, return_predictions=True, **given)
                seen.see(predictions, own, keywords.get("ignore_index", -100))
            return result

        return with_operands(self._head, self._hidden, loss)


def causal_loss(
    logits: Logits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers.loss.loss_utils.ForCausalLMLoss."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return masked_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_loss(
    logits: Logits, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100, **_: Any
) -> Tensor:
    """transformers.loss.loss_utils.ForMaskedLMLoss."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = logits.cross_entropy(labels, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    items = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    return loss / items


def criterion(module: nn.CrossEntropyLoss, logits: Logits, target: Tensor) -> Tensor:
    return cross_entropy(
        logits, target, weight=module.weight, ignore_index=module.ignore_index, reduction=module.reduction,
        label_smoothing=module.label_smoothing,
    )  # fmt: skip


def cross_entropy(
    input: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`functional.cross_entropy`; the label smoothing of `fused_loss` comes first."""
    smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
    return input.cross_entropy(target, weight=weight, ignore_index=ignore_index, reduction=reduction, **smoothing)
