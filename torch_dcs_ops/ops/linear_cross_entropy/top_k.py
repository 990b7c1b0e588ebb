"""The k most probable classes of a linear layer's softmax, without holding the logits; the op is in top_k_ops.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from . import top_k_ops  # noqa: F401  (registers)
from .arguments import apply_scale, check_argument_types

_OP = "linear_top_k"
_op = _registry.linear_top_k


def linear_top_k(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest log-probabilities of every row of a linear layer's softmax, and their classes.

    What a teacher hands to a student: :func:`linear_log_probs` at these classes is the student's. The logits are made
    for some rows at a time.

    Args:
        input: (..., D); float16, bfloat16, float32 or float64.
        linear_weight: (V, D), input's dtype.
        k: from 1 to V.
        linear_bias: (V,), input's dtype.
        softcap, logit_scale, memory_budget, logits_dtype: as of :func:`linear_log_probs`.

    Returns:
        (log_probs, indices), both (..., k), in descending order. log_probs are over all classes, differentiable any
        number of times, and float32 for half-precision input, else of input's dtype; indices are int64. Of equal
        logits any come first, as in torch.topk.

    Raises:
        TypeError, RuntimeError: an argument has a wrong type; a wrong dtype, shape, device or value.

    Example::

        >>> log_probs, indices = torch_dcs_ops.linear_top_k(hidden, head, 64)
    """
    input, linear_bias, logit_scale = apply_scale(_OP, input, linear_bias, logit_scale)
    keywords: dict[str, Any] = {
        "linear_bias": linear_bias,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "memory_budget": memory_budget,
        "logits_dtype": logits_dtype,
    }
    try:
        log_probs, indices = _op(input, linear_weight, k, **keywords)
    except (AttributeError, RuntimeError, TypeError):
        check_argument_types(_OP, {"input": input, "linear_weight": linear_weight}, {**keywords, "k": k})
        raise
    return log_probs, indices
