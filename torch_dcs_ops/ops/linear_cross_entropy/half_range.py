"""float16 has a narrow range: a power of 2 that its gradients take between the logits and the float32 sums.

The logits' gradient of a mean is below float16's smallest number, 6e-8, for most classes; times 1024 it is not. Sums of
it are float32, and lose the factor there. It must not lead beyond 65504 either: what bounds the gradient is looked at,
on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.loss import Options
from ...reference.linear_cross_entropy.rows import row_dtype

_MOST_BOOST = 1024.0
_MOST_GRADIENT = 16384.0  # of the logits: a quarter of the range
_MOST_PRODUCT = 32768.0  # of the logits' gradient and linear_weight, where it is rounded to float16
_LARGEST = 65504.0
_HEADROOM = 32.0  # for upstream gradients
_LEAST_ROWS = 64  # of a mean: twice the headroom, so that products round finer than float16 gradients of 1/N
_BOUNDS = (2.0**-40, 2.0**40)


def fixed_boost(linear_weight: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> float | None:
    """The factor, where it does not depend on what tensors hold."""
    if weight is None and not target.is_floating_point() and linear_weight.device.type != "cpu":
        return _boost((1 + _of_z_loss(options)) * abs(options.logit_scale))
    return None


def half_boost(linear_weight: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The factor, float32 (1,)."""
    fixed = fixed_boost(linear_weight, target, weight, options)
    if fixed is not None:
        return linear_weight.new_full((1,), fixed, dtype=torch.float32)
    bound = _bounded((_row_bound(target, weight, options) + _of_z_loss(options)) * abs(options.logit_scale))
    boost = _MOST_GRADIENT / bound
    if linear_weight.device.type == "cpu":
        # input's gradient leaves the product in float16. Of a row of the logits' gradient the absolute values sum to
        # twice its bound at most.
        lowest, highest = torch.aminmax(linear_weight)
        boost = torch.minimum(boost, _MOST_PRODUCT / (2 * bound * _bounded(torch.maximum(-lowest, highest))))
    return torch.exp2(boost.clamp(max=_MOST_BOOST).log2().floor()).reshape(1)


def has_room_for_upstream(rows: int, target: Tensor, weight: Tensor | None, options: Options) -> bool:
    """Whether `room_for_upstream` fits: a plain mean of so many rows that products err less than in float16 alone."""
    is_plain = weight is None and not target.is_floating_point() and options.z_loss == 0
    return is_plain and options.reduction == "mean" and abs(options.logit_scale) <= 1 and rows >= _LEAST_ROWS


def room_for_upstream(rows: int) -> float:
    """What the logits' gradient of a mean is multiplied by, beside 1/N, before products of few rows: a power of 2.

    N/32 at most. In range stay upstream gradients of up to 2^20, as loss scaling makes them; 2^16 where 31 of 32 rows
    are ignored. Of 1 the rounding of small probabilities is N/32 times finer than in a float16 gradient of the mean.
    """
    return 2.0 ** math.floor(math.log2(rows)) / _HEADROOM


def boosted(scale: Tensor | None, boost: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows of a mean's `scale` (None: of a sum) are multiplied by in a gradient, and what it lacks then."""
    if scale is None:
        return boost, boost.reciprocal()
    # Over weights that sum to 0 it goes to valid rows alone, as in F.cross_entropy: ignored ones keep the 0.
    is_finite = scale.isfinite()
    return torch.where(is_finite, boost, scale), torch.where(is_finite, scale / boost, 1)


def _of_z_loss(options: Options) -> float:
    """What bounds the derivative of a row's z-loss: |lse| is at most the largest logit and the logarithm of V."""
    return 2 * options.z_loss * _LARGEST * max(abs(options.logit_scale), 1.0)


def _boost(bound: float) -> float:
    return 2.0 ** math.floor(math.log2(min(_MOST_BOOST, _MOST_GRADIENT / max(bound, _BOUNDS[0]))))


def _row_bound(target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """Of the gradient of a row's loss in z, but for z_loss; 0-D."""
    bound: Tensor
    if target.is_floating_point():
        masses = torch.linalg.vector_norm(target, 1, -1, dtype=row_dtype(target.dtype))
        bound = masses.amax() if masses.numel() else masses.new_zeros(())
        bound = bound * (1 - options.label_smoothing) + options.label_smoothing
    else:
        bound = torch.ones((), device=target.device)
    return bound if weight is None else bound * weight.abs().amax()


def _bounded(value: Tensor) -> Tensor:
    """A factor of a bound: NaN, which no factor helps, counts as 1."""
    return torch.nan_to_num(value.float(), nan=1.0).clamp(*_BOUNDS)
