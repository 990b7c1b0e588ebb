"""`dcs::linear_kl_div`: the divergence of every row of two linear heads, without holding the logits of either."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.kl_div import NAMES
from .._common.autograd import is_plain_call
from .arguments import apply_scale, check_argument_types, check_flags, class_indices
from .kl_ops import OP
from .kl_reduced import Reduction, reduced
from .validate import check_reduction, normal_ignore_index


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | Tensor = 1.0,
    zero_if_empty: bool = False,
    memory_budget: int | None = None,
) -> Tensor:
    """The divergence of a student's and a teacher's head over the whole vocabulary, without the logits in memory.

    With p the student's softmax of ``input·linear_weightᵀ / temperature``, q the teacher's, a row's loss is

    * "forward": KL(q ‖ p) = Σ q·(log q - log p), what distillation by F.kl_div minimizes;
    * "reverse": KL(p ‖ q) = Σ p·(log p - log q);
    * "jsd": beta·KL(q ‖ m) + (1 - beta)·KL(p ‖ m) with m = beta·q + (1 - beta)·p.

    Both heads' logits are made for some rows at a time; a mean or a sum, also compiled, forms its gradients from them;
    a loss per row, float16 and torch.func make them again in the backward. Everything behind them is float32 (float64
    for a float64 student).

    Args:
        input: (..., D), the student's hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, D), input's dtype.
        teacher_input: (..., E), the teacher's, of the same leading shape; of any of these dtypes.
        teacher_weight: (V, E), teacher_input's dtype.
        direction: "forward", "reverse" or "jsd".
        beta: the teacher's share of the mixture, between 0 and 1; of "jsd" alone.
        temperature: divides both heads' logits, behind the softcap. The loss is not multiplied by its square.
        target: int64 (...); rows where it is `ignore_index` have the loss 0 and no gradient. None: there are none.
        ignore_index: None is -100.
        reduction: "mean" over the rows that are not ignored, "sum", or "none" for a loss per row.
        linear_bias, teacher_bias: (V,), in the dtypes of input and teacher_input.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: of each head, as of :func:`linear_cross_entropy`.
        zero_if_empty: a mean over no row is 0 instead of nan.
        memory_budget: bytes of both heads' logits to hold at a time. None: for each as in linear_log_probs.

    Returns:
        float32 for a half-precision student, else of input's dtype; 0-D, or input's leading shape for "none".
        Differentiable any number of times in both heads' operands, of which only those are formed that are needed: a
        teacher without gradients costs the GEMM of its logits.

    Raises:
        ValueError: direction or reduction is none of these, or leading shapes differ.
        TypeError, RuntimeError: an argument has a wrong type; a wrong dtype, shape, device or value.

    Example::

        >>> loss = torch_dcs_ops.linear_kl_div(hidden, head, teacher_hidden, teacher_head, target=labels)
    """
    check_reduction(OP, reduction)
    check_flags(OP, zero_if_empty=zero_if_empty)
    input, linear_bias, logit_scale = apply_scale(OP, input, linear_bias, logit_scale)
    teacher_input, teacher_bias, teacher_logit_scale = apply_scale(
        OP, teacher_input, teacher_bias, teacher_logit_scale, "teacher_logit_scale"
    )
    keywords: dict[str, Any] = {
        "direction": direction, "beta": beta, "temperature": temperature, "softcap": softcap,
        "logit_scale": logit_scale, "teacher_softcap": teacher_softcap, "teacher_logit_scale": teacher_logit_scale,
        "ignore_index": ignore_index, "memory_budget": memory_budget,
    }  # fmt: skip
    target = None if target is None else class_indices(target)
    optional = {"linear_bias": linear_bias, "teacher_bias": teacher_bias, "target": target}
    operands = (input, linear_weight, teacher_input, teacher_weight, linear_bias, teacher_bias)
    how = Reduction(reduction, zero_if_empty)
    try:
        # Everywhere else, as under torch.func, it is a composition.
        if reduction != "none" and (torch.compiler.is_compiling() or is_plain_call(*operands, target)):
            loss: Tensor = _registry.linear_kl_div_reduced(
                *operands, target, **keywords, reduction=reduction, zero_if_empty=zero_if_empty
            )
            return loss
        rows: Tensor = _registry.linear_kl_div(*operands, target, **keywords)
    except (AttributeError, RuntimeError, TypeError):
        tensors = dict(zip(NAMES[:4], operands[:4], strict=True))
        check_argument_types(OP, tensors, {**optional, **keywords})
        raise
    return reduced(rows, target, how, normal_ignore_index(ignore_index))
