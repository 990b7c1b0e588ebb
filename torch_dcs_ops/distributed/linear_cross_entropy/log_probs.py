"""`vocab_parallel_linear_log_probs`: log-probabilities and entropy where the classes are shared out among ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops._common.validate import fail
from ...ops.linear_cross_entropy.arguments import check_argument_types, check_flags
from ...ops.linear_cross_entropy.validate import check_head, check_ids, check_numbers, normal_ignore_index
from ...reference.linear_cross_entropy.loss import Options
from .autograd import Settings, VocabParallel
from .loss import agreed_numbers, lowered_operands, one_class

_OP = "vocab_parallel_linear_log_probs"


def vocab_parallel_linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    first_class: int | None = None,
    classes: int | None = None,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
    reduce_dtype: torch.dtype | None = None,
    need_entropy: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`torch_dcs_ops.linear_log_probs` where every rank of a group holds successive rows of linear_weight.

    Args:
        target: class indices of all ranks' classes, int64 (...), or (..., K) for K of them a row.
        need_entropy: whether the entropy is made and returned.
        return_lse: also returns the logsumexp of every row's logits (differentiable).
        The others: see :func:`vocab_parallel_linear_cross_entropy`; softcap, logit_scale and ignore_index as of
            linear_log_probs.

    Returns:
        A tuple (log_probs, entropy, lse) of what was asked for, the same bits on every rank; log_probs alone where that
        is all. log_probs has target's shape, the others input's leading shape.

    One all-gather of K + 2 numbers a row, one more for the entropy. The backward makes the logits a second time and
    communicates input's gradient alone. Differentiable once, in reverse mode.

    Raises:
        IndexError, RuntimeError, ValueError, TypeError: as of vocab_parallel_linear_cross_entropy.
    """
    options = Options("none", normal_ignore_index(ignore_index), 0.0, softcap, logit_scale, 0.0, None, memory_budget)
    input, linear_weight, linear_bias = lowered_operands(input, linear_weight, linear_bias)
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias}

    def check() -> None:
        check_flags(_OP, sequence_parallel=sequence_parallel, return_lse=return_lse)
        check_argument_types(_OP, tensors, {**options._asdict(), **optional, "need_entropy": need_entropy})
        if isinstance(logit_scale, Tensor):
            fail(_OP, "logit_scale must be a number, got a tensor")
        check_head(_OP, input, one_class(linear_weight), one_class(linear_bias))
        check_ids(_OP, target, input)
        check_numbers(_OP, options)

    same = {**options._asdict(), "need_entropy": need_entropy}
    numbers = agreed_numbers(
        _OP, group, tensors, optional, options, (first_class, classes),
        (sequence_parallel, reduce_dtype), same, check,
    )  # fmt: skip
    settings = Settings(_OP, "log_probs", numbers, sequence_parallel, False, False, need_entropy, return_lse)
    _, log_probs, lse, _, entropy = VocabParallel.apply(  # type: ignore[no-untyped-call]
        input, linear_weight, linear_bias, target, None, settings
    )
    rows = [values for values, want in ((entropy, need_entropy), (lse, return_lse)) if want]
    return (log_probs, *rows) if rows else log_probs
