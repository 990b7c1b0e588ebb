"""Softmax cross entropy of rows of logits, and the logits' gradient in their place, in plain PyTorch.

With u = logit_scale·(logits + bias), z = softcap·tanh(u / softcap) (z = u without softcap), p = softmax(z) and
lse = logsumexp(z), row i has

    loss_i    = (1 - s)·w_t·(lse - z_t) + s/V·Σ_j w_j·(lse - z_j) + z_loss·lse²     (target t, label smoothing s)
    loss_i    = Σ_j w_j·q_j·(lse - z_j) + z_loss·lse²                               (class probabilities, q smoothed)
    entropy_i = -Σ_j p_j·log p_j

and d/dz_j of Σ_i grad_loss_i·loss_i + grad_lse_i·lse_i + grad_entropy_i·entropy_i is, in one form for all options,

    p_j·(A + B·log p_j) + C·[j = t] - E·w_j        (class probabilities: - grad_loss·w_j·q_j for the last two)

with B = -grad_entropy. At the target the terms of `C` and `p_t` meet in expm1(z_t - lse) = p_t - 1, before anything is
rounded to the logits' dtype. Everything is relative to the row's maximum, so a common offset of all logits loses
nothing but what the lse itself, an output, cannot hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 19


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of every row's results, for logits of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowsCall(NamedTuple):
    """The arguments of `_cross_entropy_rows_` that every kernel takes, in the order of its schema."""

    logits: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    grad_loss: Tensor | None = None
    grad_lse: Tensor | None = None
    grad_entropy: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    z_loss: float = 0.0
    gradient: bool = False
    predictions: bool = False
    entropy: bool = False


def cross_entropy_rows_(call: RowsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, predictions, entropy) of the rows of `logits` (n, V), any stride between rows.

    `target` holds class indices, int64 (n,), or class probabilities, (n, V) in the rows' dtype (`row_dtype`);
    `linear_bias` and `weight` are (V,) in the rows' dtype; the grads (n,) or (1,) in it, None for 1 (grad_loss) and 0.
    A row whose target is `ignore_index` has the results and the gradient 0; its prediction is the argmax all the same.
    A target out of range is an IndexError on a CPU before anything is written, a device-side assertion on CUDA.
    Arguments are validated already. Works on blocks of rows, so that its own memory stays small.
    """
    logits, target = call.logits, call.target
    rows, classes = logits.shape
    dtype = row_dtype(logits.dtype)
    if not target.is_floating_point():
        check_target_range(target, call.ignore_index, classes)
    loss, lse = logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)
    argmax = logits.new_empty(rows if call.predictions else 0, dtype=torch.int64)
    entropies = logits.new_empty(rows if call.entropy else 0, dtype=dtype)
    block = max(1, _BLOCK_ELEMENTS // max(classes, 1))
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        values = _Rows(call._replace(logits=logits[part], target=target[part]))
        loss[part], lse[part] = values.loss, values.lse
        if call.predictions:
            argmax[part] = values.z.argmax(1)
        if call.entropy:
            entropies[part] = values.entropy
        if call.gradient:
            upstream = (call.grad_loss, call.grad_lse, call.grad_entropy)
            logits[part] = values.gradient(*(_narrow(grad, part) for grad in upstream))
    return loss, lse, argmax, entropies


def check_target_range(target: Tensor, ignore_index: int, classes: int, op: str = "linear_cross_entropy") -> None:
    """IndexError for a class index out of range; on CUDA a device-side assertion, which does not wait for the GPU."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type == "cpu":
        if bool(wrong.any()):
            raise IndexError(
                f"{op}: target must be in [0, {classes - 1}] or ignore_index ({ignore_index}), "
                f"got {int(target[wrong][0])}"
            )
    elif target.device.type == "cuda":
        torch._assert_async(~wrong.any())


def _narrow(grad: Tensor | None, part: slice) -> Tensor | None:
    if grad is None:
        return None
    return (grad if grad.numel() == 1 else grad[part]).reshape(-1, 1)


class _Rows:
    """A block of rows in the rows' dtype."""

    def __init__(self, call: RowsCall) -> None:
        logits, target, linear_bias, weight = call[:4]
        ignore_index, label_smoothing, softcap, logit_scale, z_loss = call[7:12]
        dtype, classes = row_dtype(logits.dtype), logits.size(1)
        z = logits.to(dtype)
        if linear_bias is not None:
            z = z + linear_bias
        if logit_scale != 1.0:
            z = z * logit_scale
        # dz/dlogits
        self.slope: Tensor | float = logit_scale
        if softcap > 0:
            squashed = torch.tanh(z / softcap)
            z = squashed * softcap
            self.slope = (1 - squashed * squashed) * logit_scale
        self.z, self.weight, self.z_loss = z, weight, z_loss
        top = z.amax(1, keepdim=True)
        shifted = z - top
        log_sum = shifted.exp().sum(1, keepdim=True).log()
        self.log_p = shifted - log_sum
        lse = top + log_sum
        self.smoothing = label_smoothing / classes
        total_weight: Tensor | float = float(classes) if weight is None else weight.sum()
        if target.is_floating_point():
            self.targets = None
            self.valid = torch.ones_like(lse, dtype=torch.bool)
            self.q = target if label_smoothing == 0 else target * (1 - label_smoothing) + self.smoothing
            self.q = self.q if weight is None else self.q * weight
            loss = -(self.q * self.log_p).sum(1, keepdim=True)
            self.mass: Tensor | float = self.q.sum(1, keepdim=True)
        else:
            self.valid = (target != ignore_index).unsqueeze(1)
            self.targets = torch.where(self.valid, target.unsqueeze(1), 0).clamp(0, classes - 1)
            self.hit = (1.0 if weight is None else weight[self.targets]) * (1 - label_smoothing)
            loss = self.hit * -self.log_p.gather(1, self.targets)
            self.mass = 0.0
            if label_smoothing:
                weighted = self.log_p if weight is None else self.log_p * weight
                loss = loss - self.smoothing * weighted.sum(1, keepdim=True)
                self.mass = self.smoothing * total_weight
        self.raw_lse = lse
        if z_loss:
            loss = loss + z_loss * lse * lse
        self.loss = torch.where(self.valid, loss, 0).squeeze(1)
        self.lse = torch.where(self.valid, lse, 0).squeeze(1)

    @property
    def _plogp(self) -> Tensor:
        """p·log p, 0 where p is 0."""
        return torch.where(self.log_p == -torch.inf, 0, self.log_p.exp() * self.log_p)

    @property
    def entropy(self) -> Tensor:
        return torch.where(self.valid.squeeze(1), -self._plogp.sum(1), 0)

    def gradient(self, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
        p = self.log_p.exp()
        scale: Tensor | float = 1.0 if grad_loss is None else grad_loss
        factor = scale * self.mass
        if self.z_loss:
            factor = factor + scale * (2 * self.z_loss) * self.raw_lse
        if grad_lse is not None:
            factor = factor + grad_lse
        if grad_entropy is not None:
            plogp = self._plogp
            out = p * (factor + grad_entropy * plogp.sum(1, keepdim=True)) - grad_entropy * plogp
        else:
            out = p * factor
        if self.targets is None:
            out = out - scale * self.q
        else:
            if self.smoothing:
                out = out - scale * self.smoothing * (1.0 if self.weight is None else self.weight)
            hit = scale * self.hit
            others = out.gather(1, self.targets)
            at_target = others + hit * torch.expm1(self.log_p.gather(1, self.targets))
            out = (out + hit * p).scatter(1, self.targets, at_target)
        return torch.where(self.valid, out * self.slope, 0)
