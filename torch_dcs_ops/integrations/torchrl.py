"""Functions with the argument lists of torchrl.objectives.value.functional, over torch_dcs_ops.returns.

torchrl is not imported. Its `next_state_value` is the value before a reset, its `done` is terminated or truncated; time
is the last dimension but one unless time_dim says otherwise.
"""

from __future__ import annotations

from torch import Tensor

from ..returns import gae, td_lambda_returns

__all__ = ["vec_generalized_advantage_estimate", "vec_td_lambda_return_estimate"]


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
    """Advantages and value targets; all tensors (*batch, T, *features), without `terminated` every end is one."""
    return gae(
        reward, state_value, next_values=next_state_value, terminated=done if terminated is None else terminated,
        truncated=done, gamma=gamma, gae_lambda=lmbda, time_dim=time_dim, check_discounts=False,
    )  # fmt: skip


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
    """Lambda-returns. A gamma tensor is each step's own: `rolling_gamma` False, one for all that follow, fails."""
    if rolling_gamma is False:
        raise NotImplementedError("vec_td_lambda_return_estimate: rolling_gamma must be None or True, got False")
    return td_lambda_returns(
        reward, next_values=next_state_value, terminated=done if terminated is None else terminated, truncated=done,
        gamma=gamma, lambda_=lmbda, time_dim=time_dim, check_discounts=False,
    )  # fmt: skip
