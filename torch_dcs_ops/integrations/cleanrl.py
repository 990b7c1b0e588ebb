"""The loop over time of cleanrl's ppo.py as one call; cleanrl's files are scripts, there is nothing to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..returns import gae
from ._libraries import as_tensor, like

if TYPE_CHECKING:
    from ._libraries import Array, Arrays

__all__ = ["compute_advantages"]


def compute_advantages(
    rewards: Array,
    values: Arrays,
    dones: Arrays,
    next_value: Arrays,
    next_done: Arrays,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
) -> tuple[Array, Array]:
    """Advantages and returns of cleanrl's arrays, (num_steps, num_envs): tensors or NumPy arrays, as `rewards` is.

    ``dones[t]`` says that the observation of step t is the first of an episode, so that one ended with step t - 1, and
    `next_done` the same of the observation after the last step. `next_value` is its value, (1, num_envs) or
    (num_envs,). As there, an episode that ended is not bootstrapped, terminated or truncated. Different dtypes are
    promoted as torch does it.
    """
    r, v, starts, after = map(as_tensor, (rewards, values, dones, next_value))
    ends = torch.cat((starts[1:] != 0, as_tensor(next_done).to(starts.device).view(1, -1) != 0))
    advantages, returns = gae(
        r, v, bootstrap_value=after.reshape(-1), terminated=ends, gamma=gamma, gae_lambda=gae_lambda
    )
    return like(advantages, rewards), like(returns, rewards)
