"""The functions of integrations.torchrl; see there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..returns import discounted_returns, gae, td_lambda_returns

MODULE = "torchrl.objectives.value.functional"
replaced: dict[str, Callable[..., Any]] = {}  # torchrl's own functions, while ours are in their place


def _own(name: str) -> Callable[..., Any]:
    """torchrl's own function, replaced or not."""
    function: Callable[..., Any] = replaced.get(name) or getattr(importlib.import_module(MODULE), name)
    return function


def vec_generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets, of the dtype that the operands are promoted to, float32 at least."""
    _check_shapes("vec_generalized_advantage_estimate", reward, state_value=state_value,
                  next_state_value=next_state_value, done=done, terminated=terminated)  # fmt: skip
    rewards = _promoted(reward, state_value, next_state_value, gamma, lmbda)
    advantage, target = gae(
        rewards,
        state_value,
        next_values=_counting(next_state_value, done, terminated),
        terminated=None,
        truncated=_bool(done),
        gamma=_rate(gamma, rewards),
        gae_lambda=_rate(lmbda, rewards),
        time_dim=time_dim,
        check_discounts=False,
    )
    return _in_dtype(advantage, rewards.dtype), _in_dtype(target, rewards.dtype)


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Advantages, of next_state_value's dtype, and value targets."""
    advantage, target = vec_generalized_advantage_estimate(
        gamma, lmbda, state_value, next_state_value, reward, done, terminated, time_dim=time_dim
    )
    if advantage.dtype != next_state_value.dtype:
        advantage = advantage.to(next_state_value.dtype)
        target = advantage + state_value
    return advantage, target


def td0_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor | None = None,
    *,
    done: Tensor | None = None,
) -> Tensor:
    """One-step returns. `done` is the old name of `terminated`."""
    terminated = done if terminated is None else terminated
    if terminated is None:
        raise TypeError("td0_return_estimate: terminated must be given, got None")
    _check_shapes("td0_return_estimate", reward, next_state_value=next_state_value, terminated=terminated)
    rewards = _promoted(reward, next_state_value, gamma)
    return rewards + gamma * next_state_value.masked_fill(_bool(terminated), 0.0)


def td0_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
) -> Tensor:
    """One-step returns, less the values."""
    _check_shapes("td0_advantage_estimate", reward, state_value=state_value, done=done)
    return (
        td0_return_estimate(gamma, next_state_value, reward, done if terminated is None else terminated) - state_value
    )


def vec_td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Lambda-returns, of the dtype that the operands are promoted to, float32 at least; each step has its own gamma."""
    if rolling_gamma is not None and not rolling_gamma:
        returns: Tensor = _own("vec_td_lambda_return_estimate")(
            gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
        )
        return returns
    _check_shapes("vec_td_lambda_return_estimate", reward, next_state_value=next_state_value, done=done,
                  terminated=terminated)  # fmt: skip
    rewards = _promoted(reward, next_state_value, gamma, lmbda)
    targets = td_lambda_returns(
        rewards,
        next_values=_counting(next_state_value, done, terminated),
        terminated=None,
        truncated=_bool(done),
        gamma=_rate(gamma, rewards),
        lambda_=_rate(lmbda, rewards),
        time_dim=time_dim,
        check_discounts=False,
    )
    return _in_dtype(targets, rewards.dtype)


def td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Lambda-returns, of next_state_value's dtype."""
    arguments = (gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma)
    if rolling_gamma is not None and not rolling_gamma:
        returns: Tensor = _own("td_lambda_return_estimate")(*arguments, time_dim=time_dim)
        return returns
    return _in_dtype(vec_td_lambda_return_estimate(*arguments, time_dim=time_dim), next_state_value.dtype)


def td_lambda_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """`td_lambda_return_estimate` less the values."""
    _check_shapes("td_lambda_advantage_estimate", reward, state_value=state_value)
    arguments = (gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma)
    return td_lambda_return_estimate(*arguments, time_dim=time_dim) - state_value


def vec_td_lambda_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """`vec_td_lambda_return_estimate` less the values."""
    _check_shapes("vec_td_lambda_advantage_estimate", reward, state_value=state_value)
    arguments = (gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma)
    return vec_td_lambda_return_estimate(*arguments, time_dim=time_dim) - state_value


def td1_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Discounted returns, of next_state_value's dtype; nothing is carried across `terminated` either."""
    if rolling_gamma is not None and not rolling_gamma:
        rolling: Tensor = _own("td1_return_estimate")(
            gamma, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
        )
        return rolling
    _check_shapes("td1_return_estimate", reward, next_state_value=next_state_value, done=done, terminated=terminated)
    ends = done if terminated is None else terminated
    rewards = _promoted(reward, next_state_value, gamma)
    returns = discounted_returns(
        rewards,
        _rate(gamma, rewards),
        next_values=next_state_value,
        terminated=_bool(ends),
        truncated=_bool(done),
        time_dim=time_dim,
        check_discounts=False,
    )
    return _in_dtype(returns, next_state_value.dtype)


def vec_td1_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """`vec_td_lambda_return_estimate` with a lambda of 1."""
    arguments = (gamma, 1.0, next_state_value, reward, done, terminated, rolling_gamma)
    return vec_td_lambda_return_estimate(*arguments, time_dim=time_dim)


def td1_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """`td1_return_estimate` less the values."""
    _check_shapes("td1_advantage_estimate", reward, state_value=state_value)
    arguments = (gamma, next_state_value, reward, done, terminated, rolling_gamma)
    return td1_return_estimate(*arguments, time_dim=time_dim) - state_value


def vec_td1_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """`vec_td1_return_estimate` less the values."""
    _check_shapes("vec_td1_advantage_estimate", reward, state_value=state_value)
    arguments = (gamma, next_state_value, reward, done, terminated, rolling_gamma)
    return vec_td1_return_estimate(*arguments, time_dim=time_dim) - state_value


def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace's advantages and value targets; thresholds are numbers or tensors.

    The advantage of a step has the target of the next one where no episode ends, as torchrl's: :func:`returns.vtrace`
    makes it of next_values there, which are other numbers if they are not the values of the next step.
    """
    _check_shapes("vtrace_advantage_estimate", reward, log_pi=log_pi, log_mu=log_mu, state_value=state_value,
                  next_state_value=next_state_value, done=done, terminated=terminated)  # fmt: skip
    reward = _promoted(reward, state_value, next_state_value, gamma)
    gamma, ends = _rate(gamma, reward), _bool(done)
    rho = (log_pi - log_mu).exp()
    bounds = (bound.to(rho.device) if isinstance(bound, Tensor) else bound for bound in (rho_thresh, c_thresh))
    clipped_rho, clipped_c = (rho.clamp(max=bound) for bound in bounds)
    after = _counting(next_state_value, done, terminated)
    delta = clipped_rho * (reward + gamma * after - state_value)
    # What vs is above the values is a discounted sum of delta.
    above = discounted_returns(delta, gamma * clipped_c, terminated=ends, time_dim=time_dim, check_discounts=False)
    targets = above + state_value
    dim = time_dim % reward.dim()
    following = torch.cat((targets.narrow(dim, 1, targets.size(dim) - 1), after.narrow(dim, -1, 1)), dim)
    following = torch.where(ends, after, following)
    if terminated is not None:
        following = following.masked_fill(_bool(terminated), 0.0)
    return clipped_rho * (reward + gamma * following - state_value), targets


def _check_shapes(op: str, reward: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != reward.shape:
            raise RuntimeError(
                f"{op}: {name} must have reward's shape {tuple(reward.shape)}, got {tuple(tensor.shape)}"
            )


def _bool(flag: Tensor) -> Tensor:
    return flag if flag.dtype == torch.bool else flag != 0


def _counting(next_state_value: Tensor, done: Tensor, terminated: Tensor | None) -> Tensor:
    """The values of next states, 0 where they do not count. A terminated step that is not done is no end in torchrl."""
    return next_state_value.masked_fill(_bool(done if terminated is None else terminated), 0.0)


def _promoted(reward: Tensor, *others: Any) -> Tensor:
    """reward in the dtype that torch promotes it and the others to, but for numbers and 0-D tensors. Half precision
    becomes float32, which torchrl's flags times its discounts are.
    """
    dtypes = [other.dtype for other in (reward, *others) if isinstance(other, Tensor) and other.dim() > 0]
    return _in_dtype(reward, reduce(torch.promote_types, dtypes, torch.float32))


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _rate(rate: float | Tensor, value: Tensor) -> float | Tensor:
    """A tensor that broadcasts against value from the right, as torchrl's, in the form that returns take."""
    if not isinstance(rate, Tensor):
        return rate
    if not rate.is_floating_point():
        rate = rate.to(value.dtype)
    if rate.numel() == 1:
        return rate.reshape(())
    return rate.reshape((1,) * (value.dim() - rate.dim()) + rate.shape)


# By torchrl's names.
OURS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        generalized_advantage_estimate,
        vec_generalized_advantage_estimate,
        td0_advantage_estimate,
        td0_return_estimate,
        td1_return_estimate,
        vec_td1_return_estimate,
        td1_advantage_estimate,
        vec_td1_advantage_estimate,
        td_lambda_return_estimate,
        vec_td_lambda_return_estimate,
        td_lambda_advantage_estimate,
        vec_td_lambda_advantage_estimate,
        vtrace_advantage_estimate,
    )
}
