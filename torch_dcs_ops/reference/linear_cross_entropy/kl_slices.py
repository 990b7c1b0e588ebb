"""The divergence of two heads of which there are only some classes, in plain PyTorch; see kl_rows.py.

What several such slices make of the whole: distributed/linear_cross_entropy/kl_rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kl_div import log_mixture, relative_entropy
from .kl_rows import KlRows, blocks, values_of, write_gradients_

# What is known of a row: the largest z / temperature and the logarithm of the sum of powers relative to it, of student
# and teacher; then sum p·(log p - ·) and sum q·(log q - ·).
COLUMNS = 6
_SUMS = 4  # where these begin


def statistics(call: KlRows) -> Tensor:
    """(COLUMNS, n) of these classes alone; of the sums the one that `direction` has, and neither of "jsd"."""
    found = call.grad.new_zeros((COLUMNS, call.student.logits.size(0)))
    for block, of in blocks(call):
        logs = []
        for index, head in enumerate((of.student, of.teacher)):
            z = values_of(head, of.grad.dtype) / of.temperature
            # All of them may be -inf.
            top = z.amax(1).clamp(min=torch.finfo(z.dtype).min)
            z = z - top.unsqueeze(1)
            log_total = z.exp().sum(1).log()
            found[2 * index, block], found[2 * index + 1, block] = top, log_total
            logs.append(z - log_total.unsqueeze(1))
        if of.direction == "forward":
            found[_SUMS + 1, block] = relative_entropy(logs[1], logs[0])
        elif of.direction == "reverse":
            found[_SUMS, block] = relative_entropy(logs[0], logs[1])
    return found


def _log_shares(of: KlRows, known: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Both heads' z, and the logarithms of these classes' shares in the whole."""
    z = [values_of(head, of.grad.dtype) for head in (of.student, of.teacher)]
    normal = known[:_SUMS].unsqueeze(2).unbind(0)
    return z, [values / of.temperature - normal[2 * index] - normal[2 * index + 1] for index, values in enumerate(z)]


def mixture_sums(call: KlRows, known: Tensor) -> Tensor:
    """(2, n): these classes' part of both sums of "jsd", of what is known (4 or more, n) of all classes."""
    found = call.grad.new_zeros((COLUMNS - _SUMS, call.student.logits.size(0)))
    for block, of in blocks(call):
        _, (log_p, log_q) = _log_shares(of, known[:, block])
        log_m = log_mixture(log_p, log_q, of.beta)
        found[0, block], found[1, block] = relative_entropy(log_p, log_m), relative_entropy(log_q, log_m)
    return found


def gradients_(call: KlRows, known: Tensor) -> None:
    """The gradients of these classes in the logits' place, of what is known (COLUMNS, n) of all."""
    for block, of in blocks(call):
        z, (log_p, log_q) = _log_shares(of, known[:, block])
        write_gradients_(of, z, log_p, log_q, (known[_SUMS, block], known[_SUMS + 1, block]))
