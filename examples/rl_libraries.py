"""Advantages of torchrl, stable-baselines3, tianshou, cleanrl's loop and gymnasium's rollouts by torch_dcs_ops.

One function a library: what is to be written, and the largest difference to what the library computes itself.
``python -m torch_dcs_ops.examples.rl_libraries`` runs those whose library is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from torch_dcs_ops import returns


def with_torchrl(steps: int = 64) -> float:
    """Every estimator and loss module of torchrl from here on; or its GAE alone."""
    from tensordict import TensorDict
    from torchrl.objectives.value import GAE

    from torch_dcs_ops.integrations import torchrl

    done = torch.rand(4, steps, 1) < 0.05
    after = {"state_value": torch.rand(4, steps, 1), "reward": torch.rand(4, steps, 1), "done": done}
    rollout = TensorDict({"state_value": torch.rand(4, steps, 1), "next": after}, batch_size=(4, steps))
    theirs = GAE(gamma=0.99, lmbda=0.95, value_network=None)(rollout.clone())["advantage"]

    torchrl.enable()
    every = GAE(gamma=0.99, lmbda=0.95, value_network=None)(rollout.clone())["advantage"]
    torchrl.disable()
    one = torchrl.GAE(gamma=0.99, lmbda=0.95, value_network=None)(rollout.clone())["advantage"]
    return max(float((ours - theirs).abs().max()) for ours in (every, one))


def with_stable_baselines3(steps: int = 64) -> float:
    """PPO on CartPole-v1, one rollout and its update: the largest difference of the policies' parameters."""
    from stable_baselines3 import PPO

    from torch_dcs_ops.integrations import stable_baselines3

    def parameters() -> Tensor:
        model = PPO("MlpPolicy", "CartPole-v1", n_steps=steps, batch_size=steps, n_epochs=1, seed=0, device="cpu")
        return nn.utils.parameters_to_vector(model.learn(steps).policy.parameters()).detach()

    theirs = parameters()
    stable_baselines3.enable()
    ours = parameters()
    stable_baselines3.disable()
    return float((ours - theirs).abs().max())


def with_tianshou(steps: int = 64) -> float:
    """compute_episodic_return, which tianshou's PPO, A2C, NPG, TRPO and REINFORCE call."""
    from tianshou.algorithm import Algorithm
    from tianshou.data import Batch, ReplayBuffer

    from torch_dcs_ops.integrations import tianshou

    buffer, generator = ReplayBuffer(steps), np.random.default_rng(0)
    for _ in range(steps):
        ends = generator.random(2) < 0.05
        buffer.add(
            Batch(obs=0, act=0, rew=generator.random(), terminated=ends[0], truncated=ends[1], obs_next=0, info={})
        )
    batch, indices = buffer.sample(0)
    values, next_values = generator.random((2, steps), np.float32)

    def advantages() -> np.ndarray:
        return Algorithm.compute_episodic_return(batch, buffer, indices, next_values, values)[1]

    theirs = advantages()
    tianshou.enable()
    ours = advantages()
    tianshou.disable()
    return float(abs(ours - theirs).max())


def with_cleanrl(steps: int = 64) -> float:
    """cleanrl's ppo.py: one line in the place of its loop over time."""
    from torch_dcs_ops.integrations.cleanrl import compute_advantages

    args = SimpleNamespace(num_steps=steps, gamma=0.99, gae_lambda=0.95)
    rewards, values, next_value = torch.rand(steps, 8), torch.rand(steps, 8), torch.rand(1, 8)
    dones, next_done = (torch.rand(steps, 8) < 0.05).float(), torch.zeros(8)

    advantages, _ = compute_advantages(rewards, values, dones, next_value, next_done, args.gamma, args.gae_lambda)

    carried, largest = torch.zeros(8), 0.0
    for t in reversed(range(steps)):
        goes_on = 1.0 - (next_done if t == steps - 1 else dones[t + 1])
        after = next_value[0] if t == steps - 1 else values[t + 1]
        carried = (
            rewards[t] + args.gamma * after * goes_on - values[t] + args.gamma * args.gae_lambda * goes_on * carried
        )
        largest = max(largest, float((advantages[t] - carried).abs().max()))
    return largest


def with_gymnasium(steps: int = 64) -> float:
    """A rollout of NumPy arrays whose environments reset on the step after an episode's end, gymnasium's default."""
    import gymnasium

    from torch_dcs_ops.integrations.gymnasium import next_step_mask

    envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    observation, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    observations, rewards, ends, cuts = [observation], [], [], []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        for rows, row in zip(
            (observations, rewards, ends, cuts), (observation, reward, terminated, truncated), strict=True
        ):
            rows.append(row.copy())
    envs.close()
    critic = nn.Linear(4, 1)
    values = critic(torch.from_numpy(np.stack(observations))).squeeze(-1).detach()
    rewards, terminated, truncated = (torch.from_numpy(np.stack(rows)) for rows in (rewards, ends, cuts))

    # float64 rewards beside float32 values: float64 advantages.
    advantages, _ = returns.gae(
        rewards, values[:-1], next_values=values[1:], terminated=terminated, truncated=truncated
    )
    mask = next_step_mask(terminated, truncated)

    carried, largest = torch.zeros(4), 0.0
    for t in reversed(range(steps)):
        delta = rewards[t] + 0.99 * values[t + 1] * ~terminated[t] - values[t]
        carried = delta + 0.99 * 0.95 * carried * ~(terminated[t] | truncated[t])
        largest = max(largest, float(((advantages[t] - carried).abs() * mask[t]).max()))
    return largest


EXAMPLES: dict[str, Callable[[], float]] = {
    "torchrl": with_torchrl,
    "stable_baselines3": with_stable_baselines3,
    "tianshou": with_tianshou,
    "cleanrl": with_cleanrl,
    "gymnasium": with_gymnasium,
}


def main() -> int:
    for name, example in EXAMPLES.items():
        if name == "cleanrl" or importlib.util.find_spec(name) is not None:
            print(f"{name:18} largest difference {example():.1e}")
        else:
            print(f"{name:18} is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
