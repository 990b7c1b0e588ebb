"""`dcs::linear_log_probs`: log p(target) and the entropy of a linear layer's softmax, without holding the logits.

Both come out of the row pass of linear_cross_entropy, whose private ops and nodes of autograd these are. Several
targets a row, and further results, are the `full` overload's (id_ops.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Options
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import apply, below, tracked
from .._common.validate import dtype_name, fail
from . import frozen_head, saved_logits  # noqa: F401  (register)
from .arguments import apply_scale, check_argument_types, check_flags, class_indices, named
from .autograd import differentiable
from .compiled import keeps_logits
from .id_ops import IdsFunction
from .kernel_ops import gemm_flops
from .loss import autocast_operands
from .validate import check_call, normal_ignore_index

_OP = "linear_log_probs"
_op = _registry.linear_log_probs
_full_op = _registry.linear_log_probs_full


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Keywords(TypedDict, total=False):
        linear_bias: Tensor | None
        softcap: float | None
        logit_scale: float | Tensor
        ignore_index: int | None
        memory_budget: int | None
        logits_dtype: torch.dtype | None


@overload
def linear_log_probs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, need_entropy: Literal[True] = ...,
    return_lse: Literal[False] = ..., return_predictions: Literal[False] = ...,
    return_argmax_log_prob: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_log_probs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, need_entropy: Literal[False],
    return_lse: Literal[False] = ..., return_predictions: Literal[False] = ...,
    return_argmax_log_prob: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def linear_log_probs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, need_entropy: bool = ..., return_lse: bool = ...,
    return_predictions: bool = ..., return_argmax_log_prob: bool = ..., **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    need_entropy: bool = True,
    return_lse: bool = False,
    return_predictions: bool = False,
    return_argmax_log_prob: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of every target, and entropy, of the softmax over ``input·linear_weightᵀ + linear_bias``.

    What fine-tuning by reinforcement learning needs of a policy, and distillation of some classes of a teacher; all
    differentiable any number of times, in the memory of :func:`linear_cross_entropy`; its arguments and its transforms.
    The backward makes the logits a second time; not with one target a row, need_entropy=False and a gradient of input
    alone, as of adapters under a frozen head: then forward forms the gradient of every row beside, also compiled.

    Args:
        input: (..., D).
        linear_weight: (V, D), input's dtype.
        target: class indices, int64 (...), or (..., K) for K of them a row. Equal ones in a row add their gradients up.
        linear_bias: (V,), input's dtype.
        softcap: bounds the logits to (-softcap, softcap).
        logit_scale: a factor of the logits, before the softcap; 1 / temperature. A tensor of one element is
            differentiable.
        ignore_index: a target that is this has the log-probability 0 and no gradient; in a row of no other targets so
            have all results but predictions. None is -100.
        memory_budget: bytes of logits to hold at a time; see :func:`linear_cross_entropy`. None: also 2048 rows at
            least on a GPU. A compiled graph keeps all logits for its backward, and makes them once, where they have
            room in it.
        logits_dtype: torch.float32 for half-precision input: logits that are not rounded to input's dtype. Importance
            ratios are exp of a difference, and bfloat16 rounds a logit of 4 to 8 by up to 0.016.
        need_entropy: whether the entropy is made and returned.
        return_lse: also returns the logsumexp of every row's logits (differentiable).
        return_predictions: also returns the argmax of every row's logits, int64.
        return_argmax_log_prob: also returns the largest log-probability of every row (differentiable).

    Returns:
        A tuple (log_probs, entropy, lse, predictions, argmax_log_prob) of what was asked for; log_probs alone where
        that is all. log_probs has target's shape, the others input's leading shape; float32 for half-precision input,
        else input's dtype. Entropy is in nats, of the distribution that softcap and logit_scale make.

    Raises:
        IndexError: a target is out of range, on a CPU. On CUDA that is a device-side assertion.
        ValueError, TypeError: as of linear_cross_entropy.
        RuntimeError: an argument has a wrong dtype, shape, device or value; the sentence names it.

    Example::

        >>> log_probs, entropy = torch_dcs_ops.linear_log_probs(hidden, head, tokens, logit_scale=1 / temperature)
    """
    check_flags(
        _OP, need_entropy=need_entropy, return_lse=return_lse, return_predictions=return_predictions,
        return_argmax_log_prob=return_argmax_log_prob,
    )  # fmt: skip
    input, linear_bias, logit_scale = apply_scale(_OP, input, linear_bias, logit_scale)
    target = class_indices(target)
    keywords: dict[str, Any] = {
        "linear_bias": linear_bias,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "ignore_index": ignore_index,
        "memory_budget": memory_budget,
        "logits_dtype": logits_dtype,
    }
    finds_best = return_predictions or return_argmax_log_prob
    try:
        if need_entropy and not (return_lse or finds_best) and target.dim() != input.dim():
            two: tuple[Tensor, Tensor] = _op(input, linear_weight, target, **keywords)
            return two
        results = _full_op(
            input, linear_weight, target, **keywords, need_entropy=need_entropy, need_predictions=finds_best
        )
    except IndexError as error:
        raise named(_OP, error) from None
    except (AttributeError, RuntimeError, TypeError):
        tensors = {"input": input, "linear_weight": linear_weight, "target": target}
        check_argument_types(_OP, tensors, keywords)
        raise
    wanted = (True, need_entropy, return_lse, return_predictions, return_argmax_log_prob)
    asked = tuple(values for values, want in zip(results, wanted, strict=True) if want)
    return asked if len(asked) > 1 else asked[0]


def _options(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Options:
    """Those of a checked call."""
    options = Options(
        reduction="none", ignore_index=normal_ignore_index(ignore_index), softcap=softcap, logit_scale=logit_scale,
        memory_budget=memory_budget, logits_dtype=logits_dtype,
    )  # fmt: skip
    if target.dtype != torch.int64:
        fail(_OP, f"target must be int64 (class indices), got {dtype_name(target.dtype)}")
    check_call(_OP, input, linear_weight, target, linear_bias, None, options)
    return options


def _kernel(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    options = _options(input, linear_weight, target, linear_bias, **keywords)
    with torch._C._AutoDispatchBelowAutograd():
        loss, _, _, entropy, *_ = _registry.linear_cross_entropy_forward(
            input, linear_weight, target, linear_bias, None, *options, False, False, False, False, True
        )
        return 0 - loss, entropy


def _fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    _options(input, linear_weight, target, linear_bias, **keywords)
    log_probs = input.new_empty(input.shape[:-1], dtype=row_dtype(input.dtype))
    return log_probs, torch.empty_like(log_probs)


def _autograd(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    **keywords: Any,
) -> Any:
    if not tracked(input, linear_weight, linear_bias):
        return below(_op, keyset, input, linear_weight, target, linear_bias=linear_bias, **keywords)
    options = _options(input, linear_weight, target, linear_bias, **keywords)
    of_head = HeadOptions(*(getattr(options, name) for name in HeadOptions._fields))
    if keeps_logits(input, linear_weight, target, of_head):
        needs = {"need_entropy": True, "need_predictions": False}
        log_probs, entropy, *_ = apply(IdsFunction, keyset, input, linear_weight, linear_bias, target, of_head, needs)
        return log_probs, entropy
    loss, _, _, entropy = differentiable(keyset, input, linear_weight, target, linear_bias, None, options, False, True)
    return 0 - loss, entropy


_registry.LIBRARY.impl("linear_log_probs", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::linear_log_probs", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("linear_log_probs", _autograd, "Autograd", with_keyset=True)
autocast.register_cast("linear_log_probs", _op, autocast_operands)
flops.register(torch.ops.dcs.linear_log_probs, gemm_flops)
