"""The checks of `_temporal_difference_scan`. csrc/include/dcs/returns/ops.h says the same sentences in C++; a test
compares the two. Beside them what the functions of torch_dcs_ops.returns ask for themselves.

Exceptions are IndexError for the dimension of time and RuntimeError for everything else.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ...reference.returns import NStepCall, TemporalDifferenceCall
from .._common.validate import (
    FLOATING,
    check_dense,
    check_device,
    check_floating,
    check_integer,
    check_layouts,
    dtype_name,
    fail,
    known,
)
from ..scan.validate import broadcasts, without


def check_returns(
    op: str,
    call: TemporalDifferenceCall | NStepCall,
    *,
    values_name: str = "values",
    lambda_name: str = "lambda_",
) -> int:
    """Raises a sentence that names the wrong argument; returns `dim` as a non-negative index."""
    rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, _, trace, _ = call[:10]
    rhos, needs_values, dim = None, False, call.dim
    if isinstance(call, TemporalDifferenceCall):
        rhos, needs_values = call.rhos, call.rhos is not None or call.need_advantages or call.need_pg
    tensors = {values_name: values, "next_values": next_values, "terminated": terminated, "truncated": truncated,
               "rhos": rhos}  # fmt: skip
    check_layouts(op, rewards=rewards, bootstrap_value=bootstrap_value, gamma=gamma, **{lambda_name: trace}, **tensors)
    check_floating(op, "rewards", rewards)
    ndim = rewards.dim()
    if ndim == 0:
        fail(op, "rewards must have a dimension of time, got a 0-D tensor")
    if not -ndim <= dim < ndim:
        raise IndexError(f"{op}: time_dim must be in [{-ndim}, {ndim - 1}] for {ndim}-D rewards, got {dim}")
    dim %= ndim
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_like_rewards(op, name, tensor, rewards)
    if next_values is not None and bootstrap_value is not None:
        fail(op, "bootstrap_value must be None with next_values, got both")
    rows = without(rewards.shape, dim)
    if bootstrap_value is not None:
        _check_dtype(op, "bootstrap_value", bootstrap_value, rewards)
        check_device(op, "bootstrap_value", bootstrap_value, "rewards", rewards)
        if not broadcasts(bootstrap_value.shape, rows):
            fail(op, f"bootstrap_value must broadcast to rewards' shape without dim {dim}, {rows}, got "
                     f"{tuple(bootstrap_value.shape)}")  # fmt: skip
    for name, rate in (("gamma", gamma), (lambda_name, trace)):
        if rate is not None:
            _check_discount(op, name, rate, rewards, dim)
    if values is None and needs_values:
        fail(op, f"{values_name} must be given for all but lambda-returns, got None")
    return dim


def check_return_types(op: str, rewards: object, time_dim: object, **tensors: object) -> None:
    """What no schema says in a sentence."""
    if not isinstance(rewards, Tensor):
        raise TypeError(f"{op}: rewards must be a tensor, got {type(rewards).__name__}")
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(value).__name__}")
    check_dense(op, rewards=rewards, **tensors)
    check_integer(op, "time_dim", time_dim)


def check_mask(op: str, mask: Tensor, rewards: Tensor) -> None:
    check_layouts(op, mask=mask)
    _check_like_rewards(op, "mask", mask, rewards)


def check_one_bootstrap(op: str, next_values: Any, bootstrap_value: Any, needed: bool = True) -> None:
    if next_values is not None and bootstrap_value is not None:
        fail(op, "bootstrap_value must be None with next_values, got both")
    if needed and next_values is None and bootstrap_value is None:
        fail(op, "next_values or bootstrap_value must be given, got neither")


def as_n(op: str, n: Any) -> int:
    """The number of steps; any integer type but bool, NumPy's too."""
    if isinstance(n, torch.SymInt):
        return n  # type: ignore[return-value]
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise TypeError(f"{op}: n must be an integer, got {type(n).__name__}")
    number = int(n)
    if number >= 2**63:
        fail(op, f"n must be below 2**63, got {n}")
    return number


def check_n(op: str, n: Any) -> None:
    if known(n < 1):
        fail(op, f"n must be at least 1, got {n}")


def check_given(op: str, name: str, tensor: Any) -> None:
    if tensor is None:
        fail(op, f"{name} must be given, got None")


def check_values_given(op: str, values: Any, bootstrap_value: Any) -> None:
    if values is None and bootstrap_value is not None:
        fail(op, "values must be given with bootstrap_value, got None")


def _check_dtype(op: str, name: str, tensor: Tensor, rewards: Tensor) -> None:
    if tensor.dtype != rewards.dtype:
        fail(op, f"{name} must have rewards' dtype {dtype_name(rewards.dtype)}, got {dtype_name(tensor.dtype)}")


def _check_like_rewards(op: str, name: str, tensor: Tensor, rewards: Tensor) -> None:
    if name in ("terminated", "truncated", "mask"):
        if tensor.dtype not in (torch.bool, rewards.dtype):
            fail(op, f"{name} must be bool or have rewards' dtype {dtype_name(rewards.dtype)}, got "
                     f"{dtype_name(tensor.dtype)}")  # fmt: skip
    else:
        _check_dtype(op, name, tensor, rewards)
    check_device(op, name, tensor, "rewards", rewards)
    if tensor.dim() != rewards.dim() or any(known(a != b) for a, b in zip(tensor.shape, rewards.shape, strict=True)):
        fail(op, f"{name} must have rewards' shape {tuple(rewards.shape)}, got {tuple(tensor.shape)}")


def _check_discount(op: str, name: str, rate: Tensor, rewards: Tensor, dim: int) -> None:
    if rate.dtype not in FLOATING:
        fail(op, f"{name} must be a floating-point tensor, got {dtype_name(rate.dtype)}")
    if not (rate.dim() == 0 and rate.device.type == "cpu"):
        check_device(op, name, rate, "rewards", rewards)
    ndim = rewards.dim()
    if rate.dim() > ndim:
        fail(op, f"{name} must have at most rewards' number of dimensions ({ndim}), got {rate.dim()}")
    if rate.dim() == ndim:
        if not broadcasts(rate.shape, rewards.shape):
            fail(op, f"{name} must broadcast to rewards' shape {tuple(rewards.shape)}, got {tuple(rate.shape)}")
        return
    rows = without(rewards.shape, dim)
    if not broadcasts(rate.shape, rows):
        fail(op, f"{name} must broadcast to rewards' shape without dim {dim}, {rows}, to be per row, got "
                 f"{tuple(rate.shape)}; per step it needs rewards' number of dimensions ({ndim})")  # fmt: skip
