"""Linear cross entropy by chunks of rows: a GEMM to logits, the row op in place, GEMMs to the gradients.

The same eager operations on every device. Nothing waits for the GPU while a call is captured in a CUDA graph, and else
one thing, the number of rows that are not ignored, behind the launch of a first product (valid_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ... import _registry
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from . import alignment
from .filter import FilteredGradients, filter_steps
from .gradients import ExactGradients, Gradients, SavedLogitsGradient, Upstream
from .mean import MeanFactors, divisor_of, factors_of, mean_of
from .plan import FilteredPlan, Plan, make_filtered_plan, make_plan, single_chunk, with_padding
from .valid_rows import Learned, ValidRows, compacts, row_count, valid_rows


class Rows(NamedTuple):
    """Results of every row; (0,) where they were not asked for."""

    loss: Tensor
    lse: Tensor
    predictions: Tensor
    entropy: Tensor


def forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs | None,
    need_predictions: bool,
    need_entropy: bool,
    learned: Learned | None = None,
) -> tuple[Rows, Gradients | Tensor, Tensor]:
    """Results with input's leading shape (the loss reduced), and the gradients of a reduced loss.

    needs None: the gradient of the logits (N, V), of which they are made, instead.

    float16 has no room for 1/N: its gradients are float32 sums, or the logits' times a power of 2, and the third result
    is the factor (1,) that they lack. Else it has no elements.
    """
    _check_targets(target, options, linear_weight.size(0))
    is_half = input.dtype == torch.float16
    late = is_half and (needs is None or any(needs))
    factors: MeanFactors | None = None

    def upstream() -> Upstream:
        nonlocal factors
        factors = factors_of(linear_weight, target, weight, options, is_boosted=late)
        return Upstream(loss=factors.loss)

    rows, gradients = _run(
        input, linear_weight, target, linear_bias, weight, options, needs, upstream, need_predictions, need_entropy,
        torch.float32 if is_half else input.dtype, learned,
    )  # fmt: skip
    wanted = (True, True, need_predictions, need_entropy)
    lead = input.shape[:-1]
    # A copy, not a view: users may change what they get in place.
    if len(lead) != 1:
        rows = Rows(*(values.view(lead).clone() if want else values for values, want in zip(rows, wanted, strict=True)))
    assert factors is not None
    if options.reduction != "none":
        rows = rows._replace(loss=mean_of(rows.loss, factors.divisor))
    return rows, gradients, factors.lacking


def backward(
    upstream: Upstream,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs,
    learned: Learned | None = None,
) -> Gradients:
    """Gradients in the operands' dtypes; `upstream.loss` has the shape of the loss. learned: by the forward."""
    _check_targets(target, options, linear_weight.size(0))
    dtype = row_dtype(input.dtype)
    loss, lse, entropy = (None if grad is None else grad.reshape(-1).to(dtype) for grad in upstream)
    if loss is None:
        loss = input.new_zeros(1, dtype=dtype)
    else:
        divisor = divisor_of(target, weight, options, dtype)
        loss = loss if divisor is None else loss / divisor
    _, gradients = _run(
        input, linear_weight, target, linear_bias, weight, options, needs, Upstream(loss, lse, entropy), False, False,
        input.dtype, learned,
    )  # fmt: skip
    assert isinstance(gradients, Gradients)
    if linear_bias is not None:
        gradients = gradients._replace(linear_bias=gradients.linear_bias.to(linear_bias.dtype))
    return gradients


def _check_targets(target: Tensor, options: Options, classes: int) -> None:
    # On CUDA the row op asserts it on the device.
    if target.device.type == "cpu" and not target.is_floating_point():
        check_target_range(target, options.ignore_index, classes)


def _run(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs | None,
    upstream: Upstream | Callable[[], Upstream],
    need_predictions: bool,
    need_entropy: bool,
    gradient_dtype: torch.dtype,
    learned: Learned | None,
) -> tuple[Rows, Gradients | Tensor]:
    """Every row's results, flat, and the gradients of input (in its shape), linear_weight and linear_bias.

    upstream: of the loss alone where it is a function, which is called behind the launch of a first product.
    needs None: the gradient of the logits (N, V) instead, of all rows at a time.
    """
    shape, features = input.shape, linear_weight.size(1)
    input, linear_weight = alignment.operands(input.reshape(shape[:-1].numel(), features), linear_weight)
    rows, found = _run_rows(
        input, linear_weight, target, linear_bias, weight, options, needs, upstream, need_predictions, need_entropy,
        gradient_dtype, learned,
    )  # fmt: skip
    del input, linear_weight
    if isinstance(found, Gradients) and needs is not None:
        if needs.linear_weight:
            found = found._replace(linear_weight=found.linear_weight[:, :features].contiguous())
        if needs.input:
            found = found._replace(input=found.input[:, :features].contiguous().view(shape))
    return rows, found


def _run_rows(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs | None,
    upstream: Upstream | Callable[[], Upstream],
    need_predictions: bool,
    need_entropy: bool,
    gradient_dtype: torch.dtype,
    learned: Learned | None,
) -> tuple[Rows, Gradients | Tensor]:
    """`_run` for input (N, D), of which gradients have the shape."""
    (total, features), classes = input.shape, linear_weight.size(0)
    dtype, word = row_dtype(input.dtype), alignment.word(total, linear_weight)
    by_class = target.is_floating_point()
    target = target.reshape(-1, classes) if by_class else target.reshape(-1)
    linear_bias = None if linear_bias is None else linear_bias.to(dtype).contiguous()
    weight = None if weight is None else weight.to(dtype).contiguous()
    keeps, needs = needs is None, needs or Needs()
    given = upstream if isinstance(upstream, Upstream) else Upstream()
    steps = None if keeps else filter_steps(input, classes, target, given, options, needs)
    where = None if keeps else compacts(input, linear_weight, target, need_predictions, options.logits_dtype)
    settles = steps is None
    chosen = None
    if where is not None:
        chosen = valid_rows(input, target, options.ignore_index, where, settles, learned if settles else None)
    operand: Tensor | ValidRows = input if chosen is None else chosen
    count = operand.size(0)
    limits = options.memory_budget, options.accumulate_dtype
    plan: Plan | FilteredPlan
    gradients: ExactGradients | FilteredGradients | SavedLogitsGradient
    if keeps:
        plan = single_chunk(count, classes, input.dtype)
    elif steps is None:
        plan = make_plan(
            count, features, classes, input.dtype, gradient_dtype, input.device.type, needs.linear_weight, *limits,
            is_forward=not any(needs), logits_dtype=options.logits_dtype, is_fast=given.entropy is not None,
        )  # fmt: skip
    else:
        plan = make_filtered_plan(count, classes, input.dtype, input.device.type, *limits)
    make_logits = Logits(plan, operand, linear_weight, word, options.logits_dtype).begin()
    upstream = upstream if isinstance(upstream, Upstream) else upstream()
    if chosen is not None:
        target, upstream = chosen.gather(target), Upstream(*(chosen.gather(grad) for grad in upstream))
    grad_input = input.new_empty((total, features) if needs.input else 0, dtype=gradient_dtype)
    if keeps:
        gradients = SavedLogitsGradient()
    elif isinstance(plan, Plan):
        gradients = ExactGradients(plan, operand, linear_weight, grad_input, needs, gradient_dtype, word)
    else:
        assert steps is not None
        gradients = FilteredGradients(
            steps, plan, operand, linear_weight, grad_input, target, weight, linear_bias, upstream, options, needs
        )
    of_chunks: list[tuple[Tensor, ...]] = []
    for part, logits in make_logits.chunks():
        results = _registry.cross_entropy_rows_(
            logits,
            target[part].to(dtype).contiguous() if by_class else target[part],
            linear_bias,
            weight,
            *(grad if grad is None or grad.numel() == 1 else grad[part] for grad in upstream),
            options.ignore_index,
            options.label_smoothing,
            options.softcap or 0.0,
            options.logit_scale,
            options.z_loss,
            keeps or (steps is None and any(needs)),
            need_predictions,
            need_entropy,
            *(gradients.slice_arguments(logits, part) if isinstance(gradients, ExactGradients) else ()),
        )
        of_chunks.append(results)
        gradients.add(logits, part, results[1])
        del logits
    del make_logits  # its memory is room for the sums' last steps
    rows = _joined(of_chunks, input, operand.size(0), need_predictions, need_entropy)
    found = gradients.result()
    if isinstance(found, Tensor):
        return rows, found
    if chosen is not None:
        for values in (*rows, found.input):
            chosen.restore_(values)
    return rows, found


def _joined(
    of_chunks: list[tuple[Tensor, ...]], input: Tensor, count: int, need_predictions: bool, need_entropy: bool
) -> Rows:
    """The results of every row of input, of which the first `count` have been run."""
    total, dtype = input.size(0), row_dtype(input.dtype)
    if len(of_chunks) == 1 and count == total:
        return Rows(*of_chunks[0])
    rows = Rows(
        input.new_empty(total, dtype=dtype),
        input.new_empty(total, dtype=dtype),
        input.new_empty(total if need_predictions else 0, dtype=torch.int64),
        input.new_empty(total if need_entropy else 0, dtype=dtype),
    )
    for whole, found in zip(rows, zip(*of_chunks, strict=True), strict=True) if of_chunks else ():
        if whole.numel():
            torch.cat(found, out=whole[:count])  # one launch, not one a chunk
    return rows


class Logits:
    """The logits of one chunk of rows after another, in the same memory; callers drop one before the next.

    `begin` launches a first product, which a GPU has to work on while the rest of a call is prepared.
    """

    def __init__(
        self,
        plan: Plan | FilteredPlan,
        input: Tensor | ValidRows,
        linear_weight: Tensor,
        word: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: None is input's; float32 where rows of other dtypes are not counted on the device."""
        self.input, self.linear_weight, self.word, self.rows = input, linear_weight, word, plan.rows
        self.begun = 0  # rows of the first chunk that are there
        classes = linear_weight.size(0)
        # grouped_mm makes its own result, of the same size; what takes turns with it does too, and gets that memory.
        self.buffer: Tensor | None = None
        if isinstance(input, Tensor) or input.count is None:
            self.buffer = with_padding(
                input.new_empty((min(plan.rows, input.size(0)), plan.stride), dtype=dtype or input.dtype), classes
            )

    def begin(self) -> Logits:
        """Before the first chunk, and where `chunks` or the parts that it yields follow. Itself."""
        rows = min(self.rows, self.input.size(0))
        if self.buffer is not None and rows > 0:
            self.begun = self.input.rows_before_number(rows) if isinstance(self.input, ValidRows) else rows
            self._product(slice(0, self.begun), self.buffer[: self.begun])
        return self

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of every chunk, and their logits."""
        if isinstance(self.input, ValidRows):
            self.input.settle(self.begun)
        for start in range(0, self.input.size(0), self.rows):
            part = slice(start, min(start + self.rows, self.input.size(0)))
            yield part, self(part)

    def __call__(self, part: slice) -> Tensor:
        count = row_count(self.input, part)
        if count is not None:
            return functional.grouped_mm(self.input[part], self.linear_weight.t()[None], offs=count)
        if self.buffer is None:
            return self._product(part, None)
        logits, begun, self.begun = self.buffer[: part.stop - part.start], self.begun, 0
        if begun < logits.size(0):
            self._product(slice(part.start + begun, part.stop), logits[begun:])
        return logits

    def _product(self, part: slice, out: Tensor | None) -> Tensor:
        return alignment.logits_product(self.input[part], self.linear_weight, self.word, out)
