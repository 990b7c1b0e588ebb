"""A mean of the rows' losses: what it divides by, and what the logits' gradient is multiplied by.

On CUDA one launch makes the factors, and one the mean, of up to `_MOST_ROWS` rows, by a single block. Torch's
operations, which all others take, are six launches of some 2 us, and fifteen for float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _native, _registry
from ...reference.linear_cross_entropy.loss import Options, normalizer
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common.validate import dtype_name, fail
from .half_range import boosted, fixed_boost, half_boost

_MOST_ROWS = 1 << 16


class MeanFactors(NamedTuple):
    """What a mean divides by (None: a sum), what the logits' gradient is multiplied by, (1,) or None for 1, and what it
    lacks then: (1,), or (0,) if nothing.
    """

    divisor: Tensor | None
    loss: Tensor | None
    lacking: Tensor


def factors_of(
    linear_weight: Tensor, target: Tensor, weight: Tensor | None, options: Options, *, is_boosted: bool
) -> MeanFactors:
    """Of a mean or a sum; is_boosted: the logits' gradient is float16 and takes a power of 2 (half_range.py)."""
    dtype = row_dtype(linear_weight.dtype)
    nothing = linear_weight.new_empty(0, dtype=dtype)
    boost = fixed_boost(linear_weight, target, weight, options) if is_boosted else 0.0
    by_class = target.is_floating_point()  # class probabilities are more than a value a row; their number is known
    if options.reduction == "mean" and boost is not None and not by_class and _is_one_launch(target):
        factors = linear_weight.new_empty(3, dtype=dtype)
        weight = None if weight is None else weight.to(dtype).contiguous()
        _registry.mean_factors(target.reshape(-1).contiguous(), weight, options.ignore_index, boost, factors)
        return MeanFactors(factors[0], factors[1:2], factors[2:] if is_boosted else nothing)
    divisor = divisor_of(target, weight, options, dtype)
    scale = None if divisor is None else divisor.reshape(1).reciprocal()
    if not is_boosted:
        return MeanFactors(divisor, scale, nothing)
    return MeanFactors(divisor, *boosted(scale, half_boost(linear_weight, target, weight, options)))


def divisor_of(target: Tensor, weight: Tensor | None, options: Options, dtype: torch.dtype) -> Tensor | None:
    """Of a mean, 0-D; None of others."""
    return normalizer(target, weight, options.ignore_index, dtype) if options.reduction == "mean" else None


def mean_of(loss: Tensor, divisor: Tensor | None) -> Tensor:
    """0-D, of the rows' losses."""
    if divisor is None:
        return loss.sum()
    if not (loss.is_contiguous() and _is_one_launch(loss)):
        return loss.sum() / divisor
    mean = loss.new_empty(())
    _registry.mean(loss, divisor, mean)
    return mean


def _is_one_launch(rows: Tensor) -> bool:
    """Of a value a row."""
    is_wide = rows.dtype in (torch.int64, torch.float32, torch.float64)
    return rows.is_cuda and is_wide and rows.numel() <= _MOST_ROWS and _native.CUDA.kind == "native"


def _check_factors(target: Tensor, weight: Tensor | None, factors: Tensor) -> None:
    if target.dtype != torch.int64 or not target.is_contiguous():
        fail("_mean_factors", f"target must be contiguous int64, got {dtype_name(target.dtype)}")
    if factors.shape != (3,) or factors.dtype not in (torch.float32, torch.float64):
        fail("_mean_factors", f"factors must be three floats or doubles, got {tuple(factors.shape)} of "
                              f"{dtype_name(factors.dtype)}")  # fmt: skip
    if weight is not None and (weight.dtype != factors.dtype or not weight.is_contiguous()):
        fail("_mean_factors", f"weight must be contiguous {dtype_name(factors.dtype)}, got {dtype_name(weight.dtype)}")


def _factors_reference(target: Tensor, weight: Tensor | None, ignore_index: int, boost: float, factors: Tensor) -> None:
    _check_factors(target, weight, factors)
    divisor = normalizer(target, weight, ignore_index, factors.dtype)
    scale = divisor.reciprocal()
    ones = torch.ones_like(scale)
    loss, lacking = boosted(scale, boost * ones) if boost else (scale, ones)
    torch.stack((divisor, loss, lacking * ones), out=factors)


def _factors_fake(target: Tensor, weight: Tensor | None, ignore_index: int, boost: float, factors: Tensor) -> None:
    _check_factors(target, weight, factors)


def _check_mean(values: Tensor, divisor: Tensor, mean: Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64) or not values.is_contiguous():
        fail("_mean", f"values must be contiguous floats or doubles, got {dtype_name(values.dtype)}")
    if any(tensor.numel() != 1 or tensor.dtype != values.dtype for tensor in (divisor, mean)):
        found = " and ".join(f"{tuple(t.shape)} of {dtype_name(t.dtype)}" for t in (divisor, mean))
        fail("_mean", f"divisor and mean must be one {dtype_name(values.dtype)} each, got {found}")


def _mean_reference(values: Tensor, divisor: Tensor, mean: Tensor) -> None:
    _check_mean(values, divisor, mean)
    mean.copy_((values.sum() / divisor).view(mean.shape))


def _mean_fake(values: Tensor, divisor: Tensor, mean: Tensor) -> None:
    _check_mean(values, divisor, mean)


_registry.LIBRARY.impl("_mean_factors", _factors_reference, "CompositeExplicitAutograd")
_registry.LIBRARY.impl("_mean", _mean_reference, "CompositeExplicitAutograd")
torch.library.register_fake("dcs::_mean_factors", _factors_fake, lib=_registry.LIBRARY)
torch.library.register_fake("dcs::_mean", _mean_fake, lib=_registry.LIBRARY)
