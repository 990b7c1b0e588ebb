"""Rows that predict the target of some steps later: the arguments and results of a shifted call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.loss import Options, shifted_target

Results = tuple[Tensor, ...]


def shifted(
    shift: int, input: Tensor, target: Tensor, options: Options, run: Callable[[Tensor, Tensor], Results]
) -> Results:
    """`run(input, target)` on the steps that have a target; its results are the loss and values of every row."""
    if not shift:
        return run(input, target)
    if target.is_floating_point():
        return run(input[..., :-shift, :], target[..., shift:, :])
    # No step is cut out of input, which would copy it: the last ones are ignored.
    loss, *rows = run(input, shifted_target(target, shift, options.ignore_index))
    first = [_without_last(values, shift) for values in rows]
    return (_without_last(loss, shift) if options.reduction == "none" else loss, *first)


def targets(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """The targets that a shifted call counts."""
    if not shift:
        return target
    return target[..., shift:, :] if target.is_floating_point() else shifted_target(target, shift, ignore_index)


def _without_last(values: Tensor, steps: int) -> Tensor:
    # Not contiguous(), which under export would ask whether the sizes make a copy unnecessary.
    return values[..., :-steps].clone(memory_format=torch.contiguous_format)
