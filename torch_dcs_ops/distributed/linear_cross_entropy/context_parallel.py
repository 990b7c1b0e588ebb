"""Targets of a batch whose time is shared out among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops._common.validate import check_dense, check_integer, dtype_name, fail
from ...ops.linear_cross_entropy.arguments import check_keyword_types
from ...ops.linear_cross_entropy.validate import normal_ignore_index
from ...reference.linear_cross_entropy.loss import shifted_target

_OP = "context_parallel_targets"


def context_parallel_targets(
    labels: Tensor, *, ignore_index: int | None = -100, shift: int = 1
) -> tuple[Tensor, Tensor]:
    """(targets, count) of whole sequences of labels, before context parallelism shares them out.

    Afterwards a rank has neither the label behind its last step nor, where time is dealt out in segments, the steps in
    their order: `shift=True` would be wrong. And as ranks have unlike numbers of ignored labels, the mean of the ranks'
    means is no mean: divide their sums by `count`.

    Args:
        labels: int64 (..., T), all steps of each sequence.
        shift: how many steps on the label is that a step predicts.

    Returns:
        targets, of labels' shape, `ignore_index` at the last `shift` steps; and how many of them are not ignored, 0-D.

    Example::

        >>> targets, count = torch_dcs_ops.distributed.context_parallel_targets(tokens)
        >>> with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
        ...     loss = linear_cross_entropy(model(tokens), head, targets, reduction="sum") / count  # this rank's part
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{_OP}: labels must be a tensor, got {type(labels).__name__}")
    if labels.dtype != torch.int64:
        fail(_OP, f"labels must be int64, got {dtype_name(labels.dtype)}")
    check_dense(_OP, labels=labels)
    check_keyword_types(_OP, {"ignore_index": ignore_index})
    check_integer(_OP, "shift", shift)
    if labels.dim() == 0 or not 0 <= shift <= labels.size(-1):
        fail(_OP, f"labels must have at least {shift} steps for shift={shift}, got the shape {tuple(labels.shape)}")
    ignored = normal_ignore_index(ignore_index)
    targets = shifted_target(labels, shift, ignored)
    return targets, (targets != ignored).sum()
