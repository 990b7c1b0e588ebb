"""Retrace and upgoing returns: lambda-returns whose coefficients are formed of the operands first."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _registry
from ...reference.returns import TemporalDifferenceCall
from .._common.autocast import autocast_operands
from .._common.validate import check_dense
from .call import Operands, discount, promoted
from .formulas import next_step, one_step_errors, retrace_as_lambda_returns
from .packed import packed_operands
from .validate import check_given, check_one_bootstrap, check_return_types, check_returns

_scan = _registry.temporal_difference_scan


def retrace_returns(
    rewards: Tensor,
    q_values: Tensor,
    rhos: Tensor,
    *,
    next_values: Tensor,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Retrace targets of action values (Munos et al., 2016, https://arxiv.org/abs/1606.02647).

    ``G[t] = r[t] + gamma[t]·(V(s[t+1]) + lambda[t]·min(1, rho[t+1])·(G[t+1] - Q(s[t+1], a[t+1])))``: the ratio of the
    action that the next step took, and the discounts of the step itself, as everywhere here.

    Args: `q_values` are those of the actions that were taken, Q(s[t], a[t]); `next_values` the expectations of
        Q(s[t+1], ·) under the target policy; `rhos` the ratios pi(a|s) / mu(a|s); for the rest see
        :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape and device, and the dtype that the operands are promoted to.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "retrace_returns"
    check_given(op, "next_values", next_values)
    check_given(op, "rhos", rhos)
    check_dense(op, gamma=gamma, lambda_=lambda_)
    rate = discount(op, "gamma", gamma, rewards, check_discounts)
    trace = discount(op, "lambda_", lambda_, rewards, check_discounts)
    check_return_types(op, rewards, time_dim, q_values=q_values, next_values=next_values, rhos=rhos,
                       terminated=terminated, truncated=truncated)  # fmt: skip
    rewards, q_values, next_values, terminated, truncated, rhos = autocast_operands(
        rewards, q_values, next_values, terminated, truncated, rhos
    )
    operands: Operands = (rewards, q_values, next_values, None, terminated, truncated)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim, "q_values")
    operands, ratios, _ = promoted(operands, rhos)
    call = TemporalDifferenceCall(*operands, *rate, *trace, ratios, dim=time_dim, need_targets=True)
    call = call._replace(dim=check_returns(op, call, values_name="q_values"))
    targets: Tensor = _scan(*retrace_as_lambda_returns(call))[1]
    return targets.to(call.rewards.dtype)


def upgo_returns(
    rewards: Tensor,
    values: Tensor,
    *,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Upgoing returns (Vinyals et al., 2019, AlphaStar, https://doi.org/10.1038/s41586-019-1724-z).

    Lambda-returns whose lambda is 1 where the step after did not disappoint, ``r[t+1] + gamma·V(s[t+2]) >= V(s[t+1])``,
    and 0 where it did.

    Args: see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape and device, and the dtype that the operands are promoted to.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "upgo_returns"
    check_one_bootstrap(op, next_values, bootstrap_value)
    check_dense(op, gamma=gamma)
    rate = discount(op, "gamma", gamma, rewards, check_discounts)
    check_return_types(op, rewards, time_dim, values=values, next_values=next_values, bootstrap_value=bootstrap_value,
                       terminated=terminated, truncated=truncated)  # fmt: skip
    check_given(op, "values", values)
    rewards, values, next_values, bootstrap_value, terminated, truncated = autocast_operands(
        rewards, values, next_values, bootstrap_value, terminated, truncated
    )
    operands: Operands = (rewards, values, next_values, bootstrap_value, terminated, truncated)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
    operands, _, _ = promoted(operands, None, time_dim)
    call = TemporalDifferenceCall(*operands, *rate, dim=time_dim, need_targets=True)
    call = call._replace(dim=check_returns(op, call))
    with torch.no_grad():
        links = next_step((one_step_errors(call) >= 0).to(call.rewards.dtype), call.dim)
    values_read = None if call.next_values is not None else call.values
    targets: Tensor = _scan(*call._replace(values=values_read, trace=links, trace_value=1.0))[1]
    return targets
