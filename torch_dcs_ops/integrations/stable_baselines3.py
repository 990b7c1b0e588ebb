"""What stable-baselines3's rollout buffers compute, over torch_dcs_ops.returns, for all buffers or for one::

    from torch_dcs_ops.integrations import stable_baselines3

    stable_baselines3.enable()  # RolloutBuffer, DictRolloutBuffer and what else inherits the method

stable-baselines3 is imported by `enable()` alone; developed with 2.9.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..returns import gae
from ._libraries import checked

if TYPE_CHECKING:
    from ._libraries import Arrays

__all__ = ["compute_returns_and_advantage", "disable", "enable"]

_METHOD = "compute_returns_and_advantage"
_replaced: dict[type, Callable[..., Any]] = {}


def enable() -> None:
    """From here on every RolloutBuffer computes its returns by `compute_returns_and_advantage`; a second call does
    nothing. So do classes that inherit the method, DictRolloutBuffer and sb3-contrib's; one with its own keeps it.

    Raises:
        ImportError: stable-baselines3 is not installed.
        RuntimeError: RolloutBuffer's method is not there, or has other parameters.
    """
    if _replaced:
        return
    cls = importlib.import_module("stable_baselines3.common.buffers").RolloutBuffer
    original = checked("stable_baselines3", f"RolloutBuffer.{_METHOD}", vars(cls).get(_METHOD), _method)
    setattr(cls, _METHOD, _method)
    _replaced[cls] = original


def disable() -> None:
    """Gives RolloutBuffer its own method back; without `enable()` it does nothing."""
    for cls, original in _replaced.items():
        setattr(cls, _METHOD, original)
    _replaced.clear()


def _method(self: Any, last_values: Tensor, dones: Any) -> None:
    compute_returns_and_advantage(self, last_values, dones)


class Buffer(Protocol):
    """What is read and written of a RolloutBuffer."""

    rewards: Arrays
    values: Arrays
    episode_starts: Arrays
    advantages: Arrays
    returns: Arrays
    gamma: float
    gae_lambda: float


def compute_returns_and_advantage(buffer: Buffer, last_values: Tensor, dones: Arrays) -> None:
    """Fills ``buffer.advantages`` and ``buffer.returns`` from its rewards, values and episode_starts.

    Args:
        buffer: a RolloutBuffer, its arrays (buffer_size, n_envs). Of different dtypes they are promoted as torch does.
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
