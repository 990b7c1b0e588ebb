"""What the functions of torch_dcs_ops.returns share: their numbers, autocast, and the way to the fused op."""

from __future__ import annotations

import numbers
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import _registry
from ...reference.returns import NStepCall, TemporalDifferenceCall
from .._common.autograd import PLAIN, watched
from .._common.validate import FLOATING, check_dense, check_integer, fail
from ..scan.discounted_cumsum import as_number, number_as_tensor
from .validate import check_return_types, check_returns

_scan = _registry.temporal_difference_scan
_n_step = _registry.n_step_returns
_below_autograd = torch._C._AutoDispatchBelowAutograd
# rewards, values, next_values, bootstrap_value, terminated, truncated
Operands = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
ON_POLICY = (None, 1.0, 1.0, 1.0)  # no importance ratios, and bounds that nothing reads


def threshold(value: Any, op: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):
        kind = "a tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: {name} must be a real number (math.inf does not clip), got {kind}")
    number = as_number(value, op, name)
    if isinstance(number, float) and number != number:
        fail(op, f"{name} must be a number to compare with, got nan")
    return number


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


def promoted(
    operands: Operands, rhos: Tensor | None = None, time_dim: Any = None
) -> tuple[Operands, Tensor | None, bool]:
    """Operands and ratios of one dtype, by torch's promotion, and bootstrap_value without a time of size 1, as the ops
    take them; whether that changed anything. `time_dim` None leaves bootstrap_value its shape. What is of no dtype that
    the ops know is left to their checks.
    """
    rewards, values, next_values, last, terminated, truncated = operands
    floats = [tensor for tensor in (rewards, values, next_values, last, rhos) if isinstance(tensor, Tensor)]
    if not isinstance(rewards, Tensor) or any(tensor.dtype not in FLOATING for tensor in floats):
        return operands, rhos, False
    # As everywhere in torch a 0-D tensor, the bootstrap_value of one environment, follows the others.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats if tensor.dim() > 0), rewards.dtype)
    if last is not None and _has_time_of_one(last, rewards, time_dim):
        last = last.squeeze(time_dim)

    def cast(tensor: Any) -> Any:
        # Only where it differs: a graph would have a node for it, and no longer a call with nothing around it.
        return tensor.to(dtype) if isinstance(tensor, Tensor) and tensor.dtype != dtype else tensor

    def flag(tensor: Any) -> Any:
        differs = isinstance(tensor, Tensor) and tensor.dtype in FLOATING and tensor.dtype != dtype
        return tensor != 0 if differs else tensor

    fitting = (*map(cast, (rewards, values, next_values, last)), flag(terminated), flag(truncated))
    ratios = cast(rhos)
    changed = any(new is not old for new, old in zip((*fitting, ratios), (*operands, rhos), strict=True))
    return fitting, ratios, changed


def _has_time_of_one(last: object, rewards: Tensor, time_dim: Any) -> bool:
    ndim = rewards.dim()
    if not isinstance(last, Tensor) or last.dim() != ndim or not isinstance(time_dim, int):
        return False
    return -ndim <= time_dim < ndim and last.size(time_dim) == 1


def fused_returns(
    op: str,
    operands: Operands,
    rates: tuple[Any, Any],
    ratios: tuple[Tensor | None, float, float, float],
    time_dim: int,
    needs: tuple[bool, bool, bool],
    check_discounts: bool,
    lambda_name: str = "lambda_",
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused op. It checks its arguments itself; only what it refuses is looked at again, to promote it or for a
    sentence of `op`.

    `rates` are gamma and lambda, `ratios` rhos, clip_rho, clip_c and clip_pg. Plain tuples, not a
    TemporalDifferenceCall: to make one takes 0.4 us, 4 % of an eager call.
    """
    if type(time_dim) is not int:
        check_integer(op, "time_dim", time_dim)
    gamma, gamma_value = discount(op, "gamma", rates[0], operands[0], check_discounts)
    trace, trace_value = discount(op, lambda_name, rates[1], operands[0], check_discounts)
    if is_compiling():
        operands, rhos, _ = promoted(operands, ratios[0], time_dim)
        ratios = (rhos, *ratios[1:])
    args = (*operands, gamma, gamma_value, trace, trace_value, *ratios, time_dim, *needs)
    results: tuple[Tensor, Tensor, Tensor]
    try:
        if is_compiling() or _is_observed(*operands, gamma, trace, ratios[0]):
            results = _scan(*args)
        else:
            # Nothing to record: past the Python kernel at the Autograd key.
            with _below_autograd():
                results = _scan(*args)
    except (IndexError, RuntimeError, TypeError):
        if is_compiling():
            raise
        operands, rhos, changed = promoted(operands, ratios[0], time_dim)
        if changed:
            ratios = (rhos, *ratios[1:])
            return fused_returns(op, operands, rates, ratios, time_dim, needs, check_discounts, lambda_name)
        _explain(op, TemporalDifferenceCall(*args), lambda_name)
        raise
    return results


def fused_n_step_returns(
    op: str,
    operands: Operands,
    rates: tuple[Any, Any],
    time_dim: int,
    n: int,
    check_discounts: bool,
) -> Tensor:
    """The same for returns over n steps."""
    if type(time_dim) is not int:
        check_integer(op, "time_dim", time_dim)
    gamma, gamma_value = discount(op, "gamma", rates[0], operands[0], check_discounts)
    trace, trace_value = discount(op, "lambda_", rates[1], operands[0], check_discounts)
    if is_compiling():
        operands, _, _ = promoted(operands, None, time_dim)
    args = (*operands, gamma, gamma_value, trace, trace_value, time_dim, n)
    targets: Tensor
    try:
        if is_compiling() or _is_observed(*operands, gamma, trace):
            targets = _n_step(*args)
        else:
            with _below_autograd():
                targets = _n_step(*args)
    except (IndexError, RuntimeError, TypeError):
        if is_compiling():
            raise
        operands, _, changed = promoted(operands, None, time_dim)
        if changed:
            return fused_n_step_returns(op, operands, rates, time_dim, n, check_discounts)
        _explain(op, NStepCall(*args), "lambda_")
        raise
    return targets


def _explain(op: str, call: TemporalDifferenceCall | NStepCall, lambda_name: str) -> None:
    """Raises what `op` has to say of a call that was refused, if anything."""
    names = ("values", "next_values", "bootstrap_value", "terminated", "truncated", "rhos")
    check_return_types(op, call.rewards, call.dim, **{name: getattr(call, name, None) for name in names})
    check_dense(op, gamma=call.gamma, **{lambda_name: call.trace})
    check_returns(op, call, lambda_name=lambda_name)


def _is_observed(*operands: Any) -> bool:
    """Whether autograd, a mode, a subclass or a transform is to see the call."""
    if watched(operands[0]):
        return True
    records = torch.is_grad_enabled()
    for operand in operands:
        if operand is not None and (type(operand) not in PLAIN or (records and operand.requires_grad)):
            return True
    return False
