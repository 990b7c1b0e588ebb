"""The divergence of rows of two heads' logits, and its gradients in the logits' place, in plain PyTorch.

With g a row's gradient, the gradients of the student's and of the teacher's z / temperature are

    forward     g·(p - q)                       g·q·(log q - log p - divergence)
    reverse     g·p·(log p - log q - divergence)    g·(q - p)
    jsd         g·(1 - beta)·p·(log p - log m - sum p·(log p - log m)), and so the teacher's with beta and q
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kl_div import divergence, log_mixture

_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}  # of logits in the rows' dtype at a time


class HeadRows(NamedTuple):
    """One head's logits (n, V) and what they go through; `gradient`: whether theirs takes their place.

    saved_slices: where a kernel writes it a second time, (within, beside, first row, rows, width, inner, slices) of the
    slices of linear_weight's gradient; none here.
    """

    logits: Tensor
    linear_bias: Tensor | None  # in the rows' dtype
    softcap: float | None
    logit_scale: float
    gradient: bool
    saved_slices: tuple[Any, ...] = ()


class KlRows(NamedTuple):
    """A call. Rows' results are of the dtype of `grad`."""

    student: HeadRows
    teacher: HeadRows
    grad: Tensor  # of the rows' divergences, (n,) or (1,), in the rows' dtype
    valid: Tensor | None  # (n,): the other rows have the divergence 0 and no gradient; None: all are
    direction: str
    beta: float
    temperature: float


def kl_rows_(call: KlRows) -> Tensor:
    """The rows' divergences."""
    rows = call.grad.new_empty(call.student.logits.size(0))
    for block, of_block in blocks(call):
        rows[block] = _block(of_block)
    return rows


def blocks(call: KlRows) -> Iterator[tuple[slice, KlRows]]:
    """Some rows at a time."""
    count, classes = call.student.logits.shape
    step = max(_BLOCK_ELEMENTS.get(call.grad.device.type, _BLOCK_ELEMENTS["cuda"]) // max(classes, 1), 1)
    for block in (slice(start, min(start + step, count)) for start in range(0, count, step)):
        student, teacher = (head._replace(logits=head.logits[block]) for head in (call.student, call.teacher))
        grad = call.grad if call.grad.numel() == 1 else call.grad[block]
        valid = None if call.valid is None else call.valid[block]
        yield block, call._replace(student=student, teacher=teacher, grad=grad, valid=valid)


def values_of(head: HeadRows, dtype: torch.dtype) -> Tensor:
    z = head.logits.to(dtype)
    if head.linear_bias is not None:
        z = z + head.linear_bias
    if head.logit_scale != 1:
        z = z * head.logit_scale
    return z if head.softcap is None else torch.tanh(z / head.softcap) * head.softcap


def _slope(head: HeadRows, z: Tensor) -> Tensor | float:
    """dz / dlogits."""
    return head.logit_scale if head.softcap is None else head.logit_scale * (1 - (z / head.softcap).square())


def _block(call: KlRows) -> Tensor:
    z = [values_of(head, call.grad.dtype) for head in (call.student, call.teacher)]
    log_p, log_q = ((values / call.temperature).log_softmax(-1) for values in z)
    rows = divergence(log_p, log_q, call.direction, call.beta)
    write_gradients_(call, z, log_p, log_q)
    return rows if call.valid is None else torch.where(call.valid, rows, 0)


def write_gradients_(
    call: KlRows, z: list[Tensor], log_p: Tensor, log_q: Tensor, means: tuple[Tensor, Tensor] | None = None
) -> None:
    """means: sum p·(log p - ·) and sum q·(log q - ·) of every row; None: over these classes."""
    heads, log_m = (call.student, call.teacher), None
    if call.direction == "jsd" and any(head.gradient for head in heads):
        log_m = log_mixture(log_p, log_q, call.beta)
    grad = call.grad.unsqueeze(1) / call.temperature
    sides = ((log_p, log_q, "forward", 1 - call.beta), (log_q, log_p, "reverse", call.beta))
    for index, (head, values, (own, other, plain, share)) in enumerate(zip(heads, z, sides, strict=True)):
        if not head.gradient:
            continue
        p = own.exp()
        if call.direction == plain:
            found = p - other.exp()
        else:
            # p·(log p - log of the other, less its mean)
            found = torch.where(own == -torch.inf, 0, own - (other if log_m is None else log_m))
            mean = (p * found).sum(-1, keepdim=True) if means is None else means[index].unsqueeze(1)
            found = p * (found - mean)
            found = found if log_m is None else found * share
        found = found * grad * _slope(head, values)
        head.logits.copy_(found if call.valid is None else torch.where(call.valid.unsqueeze(1), found, 0))
