"""An eager loss of few rows: forward saves the logits' gradient, and backward forms the others of it.

Gradients that are formed in forward are scaled in backward: linear_weight's (V, D) is read and written once more where
the gradient of the loss is not 1, as under a division by the number of accumulated steps. The logits' gradient (N, V)
of up to D rows is no larger, so it is saved and scaled instead. Every backward of a graph that is kept forms them anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import row_dtype
from . import alignment
from .gradients import ExactGradients, Gradients, SavedCall
from .half_range import has_room_for_upstream, room_for_upstream
from .plan import make_plan, single_chunk
from .scale import scaled
from .valid_rows import compacts


def saves_logits_gradient(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    needs: Needs,
    need_predictions: bool,
) -> bool:
    """Whether a reduced loss, called directly, saves the gradient of its logits for the backward.

    float16 needs products in float32, and a range that is known. Ignored rows that would be left out, and copies of
    linear_weight that both passes would make, are worth more.
    """
    rows, (classes, features) = input.shape[:-1].numel(), linear_weight.shape
    if not needs.linear_weight or not 0 < rows <= features:
        return False
    if input.dtype == torch.float16 and not (
        input.device.type == "cuda" and has_room_for_upstream(rows, target, weight, options)
    ):
        return False
    if options.grad_filter_eps or options.logits_dtype not in (None, input.dtype):
        return False
    plan = make_plan(
        rows, features, classes, input.dtype, input.dtype, input.device.type, True, options.memory_budget,
        options.accumulate_dtype,
    )  # fmt: skip
    is_smaller = rows * plan.stride <= classes * features
    if plan.rows < rows or not is_smaller or compacts(input, linear_weight, target, need_predictions) is not None:
        return False
    return not alignment.copies_weight(rows, linear_weight)


def gradients_of_saved(saved: SavedCall, needs: Needs, may_overwrite: bool) -> Gradients:
    """Those of input, linear_weight and linear_bias, in their dtypes. may_overwrite: the logits' gradient.

    It is scaled, and not what it is multiplied by, which may leave the range where these products do not. float16 keeps
    a power of 2 until the products have been summed in float32.
    """
    logits_gradient, factor, input, linear_weight, linear_bias, lacking = saved
    room, is_half = 1.0, lacking is not None
    if lacking is not None:
        room = room_for_upstream(logits_gradient.size(0))
    grad_bias = logits_gradient.new_empty(0)
    if linear_bias is not None and needs.linear_bias:
        grad_bias = scaled(
            logits_gradient.sum(0, dtype=row_dtype(input.dtype)), factor, linear_bias.dtype, False, lacking
        )
    rows, linear_weight = alignment.operands(input.reshape(-1, input.size(-1)), linear_weight)
    count, word = rows.size(0), alignment.word(rows.size(0), linear_weight)
    plan = single_chunk(count, linear_weight.size(0), input.dtype)
    # All has its memory before anything is overwritten: who runs out of it may call again.
    grad_input = input.new_empty(rows.shape if needs.input else 0)
    product = torch.empty_like(grad_input, dtype=torch.float32) if is_half else grad_input
    products = needs._replace(linear_bias=False)
    total = ExactGradients(plan, rows, linear_weight, product, products, input.dtype, word, 1 / room)
    whole = alignment.widened(logits_gradient, logits_gradient.stride(0))
    whole = scaled(whole, factor, whole.dtype, may_overwrite, lacking, room)
    total.add(whole[:, : logits_gradient.size(1)], slice(0, count))
    if is_half:
        _registry.scale(product, None, grad_input, None, 1 / room)
    if needs.input:
        grad_input = grad_input.view(input.shape)
    return Gradients(grad_input, total.result().linear_weight, grad_bias)
