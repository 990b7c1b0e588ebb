"""What stable-baselines3's rollout buffer computes, over torch_dcs_ops.returns; stable-baselines3 is not imported.

As a method of the buffer, for one or for all::

    from stable_baselines3.common.buffers import RolloutBuffer
    from torch_dcs_ops.integrations.stable_baselines3 import compute_returns_and_advantage

    RolloutBuffer.compute_returns_and_advantage = compute_returns_and_advantage
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..returns import gae

__all__ = ["compute_returns_and_advantage"]


def compute_returns_and_advantage(buffer: Any, last_values: Tensor, dones: Any) -> None:
    """Fills ``buffer.advantages`` and ``buffer.returns`` from its rewards, values and episode_starts.

    Args:
        buffer: a RolloutBuffer, its arrays (buffer_size, n_envs).
        last_values: V of the observations after the last step, n_envs values.
        dones: whether an episode ended with the last step, (n_envs,).

    An episode that starts with a step ended with the step before, whatever the reason: stable-baselines3 adds the value
    of a truncated episode's last observation to its last reward.
    """
    rewards, values, starts = (
        torch.as_tensor(array) for array in (buffer.rewards, buffer.values, buffer.episode_starts)
    )
    ends = torch.cat((starts[1:], torch.as_tensor(dones)[None].to(starts.dtype))) != 0
    advantages, returns = gae(
        rewards, values, bootstrap_value=last_values.detach().cpu().flatten().to(rewards.dtype), terminated=ends,
        gamma=buffer.gamma, gae_lambda=buffer.gae_lambda,
    )  # fmt: skip
    buffer.advantages, buffer.returns = advantages.numpy(), returns.numpy()
