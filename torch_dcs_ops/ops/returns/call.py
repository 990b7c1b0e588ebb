"""What the functions of torch_dcs_ops.returns share: their numbers, autocast, and the way to the fused op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from ... import _registry
from ...reference.returns import NStepCall, TemporalDifferenceCall
from .._common.autocast import widened
from .._common.validate import fail
from ..scan.discounted_cumsum import as_number, number_as_tensor
from .validate import check_return_types, check_returns

_scan = _registry.temporal_difference_scan
_n_step = _registry.n_step_returns
_below_autograd = torch._C._AutoDispatchBelowAutograd
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast_enabled = torch._C._is_any_autocast_enabled
_PLAIN = (Tensor, Parameter)
# rewards, values, next_values, bootstrap_value, terminated, truncated
Operands = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# gamma, gamma_value, trace, trace_value
Discounts = tuple[Tensor | None, float, Tensor | None, float]


def threshold(value: Any, op: str, name: str) -> float:
    if isinstance(value, Tensor):
        fail(op, f"{name} must be a real number, got a tensor")
    if value is None:
        fail(op, f"{name} must be a real number (math.inf does not clip), got NoneType")
    number = as_number(value, op, name)
    if isinstance(number, float) and number != number:
        fail(op, f"{name} must be a number to compare with, got nan")
    return number


def autocast_operands(rewards: Tensor, *tensors: Any) -> tuple[Any, ...]:
    """What autocast makes of the operands, for functions that are more than the fused op."""
    if not torch.is_autocast_enabled(rewards.device.type):
        return rewards, *tensors
    return tuple(map(widened, (rewards, *tensors)))


def discount(op: str, name: str, rate: Any, rewards: Any, check: bool) -> tuple[Tensor | None, float]:
    """A discount as a tensor or as a number; while a graph is traced always as a tensor."""
    if isinstance(rate, Tensor):
        return rate, 1.0
    number = rate if type(rate) is float else as_number(rate, op, name)
    if check and not 0.0 <= number <= 1.0:
        raise ValueError(f"{op}: {name} must be in [0, 1] unless check_discounts=False, got {rate}")
    if is_compiling():
        return number_as_tensor(rate, rewards.device, op, name), 1.0
    return None, number


def discounts(op: str, gamma: Any, lambda_: Any, rewards: Any, check: bool, lambda_name: str = "lambda_") -> Discounts:
    """Both discounts as the ops take them: gamma, gamma_value, trace, trace_value."""
    return (*discount(op, "gamma", gamma, rewards, check), *discount(op, lambda_name, lambda_, rewards, check))


def fused_returns(
    op: str,
    operands: Operands,
    discounts: Discounts,
    ratios: tuple[Tensor | None, float, float, float],
    time_dim: int,
    needs: tuple[bool, bool, bool],
    lambda_name: str = "lambda_",
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused op. It checks its arguments itself; only what it refuses is looked at again, for a sentence of `op`.

    `ratios` are rhos, clip_rho, clip_c and clip_pg. Plain tuples, not a TemporalDifferenceCall: to make one takes 0.4
    us, 4 % of an eager call.
    """
    args = (*operands, *discounts, *ratios, time_dim, *needs)
    results: tuple[Tensor, Tensor, Tensor]
    try:
        results = _run(_scan, args, *operands, discounts[0], discounts[2], ratios[0])
    except (IndexError, RuntimeError, TypeError):
        if not is_compiling():
            _explain(op, TemporalDifferenceCall(*args), lambda_name)
        raise
    return results


def fused_n_step_returns(op: str, operands: Operands, discounts: Discounts, time_dim: int, n: int) -> Tensor:
    """The same for returns over n steps."""
    args = (*operands, *discounts, time_dim, n)
    targets: Tensor
    try:
        targets = _run(_n_step, args, *operands, discounts[0], discounts[2])
    except (IndexError, RuntimeError, TypeError):
        if not is_compiling():
            _explain(op, NStepCall(*args), "lambda_")
        raise
    return targets


def _run(fused: Any, args: tuple[Any, ...], *tensors: Any) -> Any:
    """`fused(*args)`, whose tensors these are."""
    if is_compiling() or _is_observed(*tensors):
        return fused(*args)
    # Nothing to record: past the Python kernel at the Autograd key.
    with _below_autograd():
        return fused(*args)


def _explain(op: str, call: TemporalDifferenceCall | NStepCall, lambda_name: str) -> None:
    """Raises what `op` has to say of a call that was refused, if anything."""
    names = ("values", "next_values", "bootstrap_value", "terminated", "truncated", "rhos")
    check_return_types(op, call.rewards, call.dim, **{name: getattr(call, name, None) for name in names})
    check_returns(op, call, lambda_name=lambda_name)


def _is_observed(*operands: Any) -> bool:
    """Whether autograd, a mode, a subclass or a transform is to see the call."""
    if _dispatch_modes() or _functorch_active() or forward_ad._current_level >= 0 or _autocast_enabled():
        return True
    records = torch.is_grad_enabled()
    for operand in operands:
        if operand is not None and (type(operand) not in _PLAIN or (records and operand.requires_grad)):
            return True
    return False
