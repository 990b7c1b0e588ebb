"""The loop over time of cleanrl's ppo.py as one call; cleanrl's files are scripts, there is nothing to import."""

from __future__ import annotations

import torch
from torch import Tensor

from ..returns import gae

__all__ = ["compute_advantages"]


def compute_advantages(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    next_value: Tensor,
    next_done: Tensor,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of cleanrl's arrays, (num_steps, num_envs).

    ``dones[t]`` says that the observation of step t is the first of an episode, so that one ended with step t - 1, and
    `next_done` the same of the observation after the last step. `next_value` is its value, (1, num_envs) or
    (num_envs,). As there, an episode that ended is not bootstrapped, terminated or truncated.
    """
    ends = torch.cat((dones[1:], next_done.view(1, -1).to(dones.dtype))) != 0
    return gae(
        rewards, values, bootstrap_value=next_value.reshape(-1), terminated=ends, gamma=gamma, gae_lambda=gae_lambda
    )
