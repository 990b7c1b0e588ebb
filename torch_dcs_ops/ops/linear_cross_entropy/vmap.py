"""vmap of linear_cross_entropy and linear_log_probs.

Where only input and the targets have the batch, its rows are rows like all others: one call on all of them, reduced a
sample at a time. Where linear_weight or something else of the head has it, the samples go one after the other, as
every one of them fills the device and its logits' memory is meant to stay bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.loss import normalizer, zeroed_if_empty
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common.vmap import BATCHED, Batch
from .shift import targets
from .validate import normal_ignore_index


def _one_by_one(batch: Batch, call: Callable[..., Any]) -> Any:
    results = [call(*batch.samples(index)) for index in range(batch.size)]
    if isinstance(results[0], Tensor):
        return batch.wrap(torch.stack(results))
    return tuple(batch.wrap(torch.stack(parts)) for parts in zip(*results, strict=True))


def _front(op: Any) -> Callable[..., Any]:
    """The kernel of a public op, whose tensors are input, linear_weight, target, linear_bias and weight."""

    def kernel(
        keyset: Any,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        **options: Any,
    ) -> Any:
        def call(x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> Any:
            classes = {} if op is _registry.linear_log_probs else {"weight": class_weight}
            return op(x, w, y, linear_bias=bias, **classes, **options)

        batch = Batch(input, linear_weight, target, linear_bias, weight)
        with torch._C._ExcludeDispatchKeyGuard(BATCHED):
            if not batch.is_batched:
                return call(input, linear_weight, target, linear_bias, weight)
            if any(batch.has_batch(index) for index in (1, 3, 4)) or not _is_valid(input, target, options):
                return _one_by_one(batch, call)
            x, y = (_front_of(batch, index) for index in (0, 2))
            reduction = options.pop("reduction", "mean")
            if op is not _registry.linear_log_probs:
                options["reduction"] = "none"
            results = call(x, linear_weight, y, linear_bias, weight)
            results = (results,) if isinstance(results, Tensor) else tuple(results)
            if op is not _registry.linear_log_probs and reduction != "none":
                results = (_reduced(results[0], y, weight, reduction, options), *results[1:])
            wrapped = tuple(map(batch.wrap, results))
            return wrapped[0] if op is _registry.linear_cross_entropy else wrapped

    return kernel


def _is_valid(input: Tensor, target: Tensor, options: dict[str, Any]) -> bool:
    """Whether a batch in front would be taken for what it is; if not, a sample's own call raises the sentence."""
    logical = input.dim() - 1 + target.is_floating_point()
    shift = options.get("shift", 0)
    return target.dim() == logical and input.dim() >= 1 + bool(shift) and shift >= 0 and options.get("reduction") in (
        None, "none", "mean", "sum"
    )  # fmt: skip


def _front_of(batch: Batch, index: int) -> Tensor:
    operand = batch.operands[index]
    assert operand is not None
    return operand.front(batch.size)


def _reduced(loss: Tensor, target: Tensor, weight: Tensor | None, reduction: str, options: dict[str, Any]) -> Tensor:
    total = loss.flatten(1).sum(1) if loss.dim() > 1 else loss
    if reduction == "sum":
        return total
    ignore_index = normal_ignore_index(options.get("ignore_index", -100))
    target = targets(target, options.get("shift", 0), ignore_index)
    mean = total / normalizer(target, weight, ignore_index, row_dtype(loss.dtype), keep_dims=1)
    return zeroed_if_empty(mean, target, ignore_index, keep_dims=1) if options.get("zero_if_empty", False) else mean


def _rows(op: Any, is_ids: bool) -> Callable[..., Any]:
    """The kernel of an op all of whose results are of rows; its third argument is a tensor only with `is_ids`."""

    def kernel(keyset: Any, input: Tensor, linear_weight: Tensor, third: Any, *, linear_bias: Tensor | None = None,
               **options: Any) -> Any:  # fmt: skip
        def call(x: Tensor, w: Tensor, y: Any, bias: Tensor | None) -> Any:
            return op(x, w, y if is_ids else third, linear_bias=bias, **options)

        batch = Batch(input, linear_weight, third if is_ids else None, linear_bias)
        with torch._C._ExcludeDispatchKeyGuard(BATCHED):
            if not batch.is_batched:
                return call(input, linear_weight, third, linear_bias)
            is_valid = input.dim() >= 1 and (not is_ids or third.dim() in (input.dim() - 1, input.dim()))
            if batch.has_batch(1) or batch.has_batch(3) or not is_valid:
                return _one_by_one(batch, call)
            ids = _front_of(batch, 2) if is_ids else None
            results = call(_front_of(batch, 0), linear_weight, ids, linear_bias)
            return tuple(map(batch.wrap, _with_batch(results, batch)))

    return kernel


def _with_batch(results: tuple[Tensor, ...], batch: Batch) -> list[Tensor]:
    """Results of rows; one that is not needed has no elements, for every sample."""
    return [values if values.shape[:1] == (batch.size,) else values.new_empty((batch.size, 0)) for values in results]


def _private(op: Any, tensors: int) -> Callable[..., Any]:
    """The kernel of an op whose first arguments are so many tensors."""

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        batch, rest = Batch(*args[:tensors]), args[tensors:]
        with torch._C._ExcludeDispatchKeyGuard(BATCHED):
            if not batch.is_batched:
                return op(*args, **options)
            return _one_by_one(batch, lambda *sample: op(*sample, *rest, **options))

    return kernel


for _name, _kernel in (
    ("linear_cross_entropy", _front(_registry.linear_cross_entropy)),
    ("linear_cross_entropy.aux", _front(_registry.linear_cross_entropy_aux)),
    ("linear_log_probs", _front(_registry.linear_log_probs)),
    ("linear_log_probs.full", _rows(_registry.linear_log_probs_full, True)),
    ("linear_top_k", _rows(_registry.linear_top_k, False)),
    ("_linear_log_probs_backward", _private(_registry.linear_log_probs_backward, 7)),
    ("linear_kl_div", _private(_registry.linear_kl_div, 7)),
    ("linear_kl_div.reduced", _private(_registry.linear_kl_div_reduced, 7)),
    ("_linear_kl_div_backward", _private(_registry.linear_kl_div_backward, 8)),
    ("_linear_cross_entropy_forward", _private(_registry.linear_cross_entropy_forward, 5)),
    ("_linear_cross_entropy_backward", _private(_registry.linear_cross_entropy_backward, 8)),
):
    _registry.LIBRARY.impl(_name, _kernel, "FuncTorchBatched", with_keyset=True)
