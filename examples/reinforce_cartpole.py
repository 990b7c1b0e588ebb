"""REINFORCE with a learned baseline on gymnasium's CartPole-v1; torch.ops.dcs.discounted_cumsum forms the returns.

The returns, the policy loss and the baseline's loss are one compiled step: `Learner.loss` is traced whole
(fullgraph=True), and `backward()` runs the backward graph that torch.compile made with it.

A rollout is time-major, (T, B): T steps of B environments that run on across rollouts, each episode cut off where the
rollout ends. gymnasium's vector CartPole resets on the step *after* an episode's end (AutoresetMode.NEXT_STEP): that
step ignores its action, and its observation going in is the old episode's last one. Such a row is no transition, so it
is masked out of the loss; it serves to end the episode in the scan. `reset` there discards what the next episode would
carry into it, and its "reward" is the baseline's value of that last observation where the episode was truncated at 500
steps (it would have gone on), 0 where the pole fell. The rollout's own end enters the same way, as `initial`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_dcs_ops  # noqa: F401  (registers torch.ops.dcs)

GAMMA = 0.99
AVERAGED_EPISODES = 20


@dataclass
class Rollout:
    """One rollout of T steps in B environments; every tensor starts with the dimensions (T, B)."""

    observations: Tensor  # (T, B, 4) float32, what the policy saw
    actions: Tensor  # int64
    rewards: Tensor  # float32
    reset: Tensor  # bool, rows that only reset an environment
    was_truncated: Tensor  # bool, reset rows whose episode ended at the time limit
    last_observation: Tensor  # (B, 4), after the last step
    last_terminated: Tensor  # (B,) bool, the last step ended the episode by a fall


def bootstrapped_returns(rollout: Rollout, values: Tensor, last_value: Tensor) -> Tensor:
    """Discounted returns (T, B), times 1 - gamma so that they lie in [0, 1], the baseline's scale.

    `values` (T, B) and `last_value` (B,) are the baseline's estimates; they stand for what truncated episodes and those
    that the rollout's end cuts off would have gone on to earn.
    """
    rewards = torch.where(rollout.reset, values * rollout.was_truncated, rollout.rewards * (1 - GAMMA))
    initial = torch.where(rollout.last_terminated, 0.0, last_value)
    return torch.ops.dcs.discounted_cumsum(
        rewards, GAMMA, dim=0, direction="right", initial=initial, reset=rollout.reset
    )


class Learner(nn.Module):
    """Policy and baseline, one small MLP each."""

    def __init__(self, observation_size: int = 4, actions: int = 2, width: int = 64) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(observation_size, width), nn.Tanh(), nn.Linear(width, actions))
        self.baseline = nn.Sequential(nn.Linear(observation_size, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, rollout: Rollout, entropy_weight: Tensor) -> Tensor:
        """Policy loss + baseline loss - entropy bonus over the rollout's real transitions."""
        values = self.baseline(rollout.observations).squeeze(-1)
        last_value = self.baseline(rollout.last_observation).squeeze(-1)
        with torch.no_grad():
            returns = bootstrapped_returns(rollout, values, last_value)
            weight = (~rollout.reset).to(returns.dtype)
            weight = weight / weight.sum()
            advantage = returns - values
            mean = (weight * advantage).sum()
            advantage = (advantage - mean) * ((weight * (advantage - mean).square()).sum() + 1e-8).rsqrt()
        log_probs = F.log_softmax(self.policy(rollout.observations), dim=-1)
        chosen = log_probs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        policy_loss = -(weight * (advantage * chosen + entropy_weight * entropy)).sum()
        baseline_loss = (weight * (returns - values).square()).sum()
        return policy_loss + baseline_loss


class Collector:
    """Steps B environments with the policy and keeps the return of every episode that ends."""

    def __init__(self, environments: int, steps: int, seed: int) -> None:
        self.envs = gymnasium.make_vec("CartPole-v1", environments, vectorization_mode="vector_entry_point")
        assert self.envs.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP
        self.steps = steps
        self.observation, _ = self.envs.reset(seed=seed)
        self.reset = np.zeros(environments, dtype=bool)
        self.truncated = np.zeros(environments, dtype=bool)
        self.running_return = np.zeros(environments)
        self.episode_returns: list[float] = []

    @torch.no_grad()
    def rollout(self, policy: nn.Module) -> Rollout:
        observations, actions, rewards, resets, truncations = [], [], [], [], []
        for _ in range(self.steps):
            logits = policy(torch.from_numpy(self.observation))
            action = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
            observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            observations.append(self.observation)
            actions.append(action)
            rewards.append(reward)
            resets.append(self.reset)
            truncations.append(self.truncated)
            self.running_return += reward
            self.observation, self.reset, self.truncated = observation, terminated | truncated, truncated & ~terminated
            for index in np.flatnonzero(self.reset):
                self.episode_returns.append(float(self.running_return[index]))
                self.running_return[index] = 0.0
        return Rollout(
            observations=torch.from_numpy(np.stack(observations)),
            actions=torch.stack(actions),
            rewards=torch.from_numpy(np.stack(rewards)),
            reset=torch.from_numpy(np.stack(resets)),
            was_truncated=torch.from_numpy(np.stack(truncations)),
            last_observation=torch.from_numpy(self.observation),
            last_terminated=torch.from_numpy(terminated),
        )


@dataclass
class Result:
    """What a training run ends with."""

    episode_returns: list[float]
    updates: int
    environment_steps: int
    compile_seconds: float
    train_seconds: float
    op_microseconds: float
    loop_microseconds: float

    @property
    def before(self) -> float:
        return float(np.mean(self.episode_returns[:AVERAGED_EPISODES]))

    @property
    def after(self) -> float:
        return float(np.mean(self.episode_returns[-AVERAGED_EPISODES:]))


def python_loop_returns(rewards: Tensor, reset: Tensor, initial: Tensor) -> Tensor:
    """What the op replaces: one step of the recurrence at a time, all environments at once."""
    returns = torch.empty_like(rewards)
    carry = initial
    for t in range(rewards.shape[0] - 1, -1, -1):
        carry = rewards[t] + GAMMA * carry.masked_fill(reset[t], 0.0)
        returns[t] = carry
    return returns


def median_microseconds(function: Callable[[], Tensor], seconds: float = 0.3) -> float:
    function()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def time_returns(rollout: Rollout) -> tuple[float, float]:
    """Microseconds of the op and of the Python loop on the rewards of one real rollout, checked against each other."""
    rewards, reset = rollout.rewards, rollout.reset
    initial = torch.zeros(rewards.shape[1])

    def op() -> Tensor:
        return torch.ops.dcs.discounted_cumsum(rewards, GAMMA, dim=0, direction="right", initial=initial, reset=reset)

    def loop() -> Tensor:
        return python_loop_returns(rewards, reset, initial)

    torch.testing.assert_close(op(), loop(), rtol=1e-5, atol=1e-4)
    return median_microseconds(op), median_microseconds(loop)


def train(
    *,
    seed: int = 0,
    updates: int = 400,
    seconds: float = 75.0,
    environments: int = 16,
    steps: int = 128,
    learning_rate: float = 4e-3,
    compiled: bool = True,
    progress: bool = True,
) -> Result:
    """Train for `updates` rollouts, or until `seconds` have gone into it, the compilation not counted."""
    from tqdm import tqdm

    torch.manual_seed(seed)
    learner = Learner()
    optimizer = torch.optim.Adam(learner.parameters(), lr=learning_rate)
    collector = Collector(environments, steps, seed)
    loss_of = torch.compile(learner.loss, fullgraph=True, dynamic=False) if compiled else learner.loss

    def update(fraction_done: float) -> Rollout:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1.0 - 0.9 * fraction_done)
        rollout = collector.rollout(learner.policy)
        optimizer.zero_grad()
        loss_of(rollout, torch.tensor(0.01 * (1.0 - fraction_done))).backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 0.5)
        optimizer.step()
        return rollout

    start = time.perf_counter()
    if progress:
        print("compiling the training step ...", flush=True)
    rollout = update(0.0)
    compile_seconds = time.perf_counter() - start

    start = time.perf_counter()
    done = 1
    with tqdm(total=updates, initial=1, desc="REINFORCE", unit="update", mininterval=0.5, disable=not progress) as bar:
        while done < updates and (elapsed := time.perf_counter() - start) < seconds:
            rollout = update(max(done / updates, elapsed / seconds))
            done += 1
            recent = np.mean(collector.episode_returns[-AVERAGED_EPISODES:])
            bar.set_postfix_str(f"return {recent:.0f}", refresh=False)
            bar.update()
    train_seconds = time.perf_counter() - start
    op_microseconds, loop_microseconds = time_returns(rollout)
    return Result(
        collector.episode_returns,
        done,
        done * environments * steps,
        compile_seconds,
        train_seconds,
        op_microseconds,
        loop_microseconds,
    )


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="REINFORCE on CartPole-v1")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_row(f"average return, first {AVERAGED_EPISODES} episodes", f"{result.before:.1f}")
    table.add_row(f"average return, last {AVERAGED_EPISODES} episodes", f"{result.after:.1f}")
    table.add_row("episodes / environment steps", f"{len(result.episode_returns)} / {result.environment_steps}")
    table.add_row("updates", str(result.updates))
    table.add_row("first update, compilation included", f"{result.compile_seconds:.1f} s")
    table.add_row("training after it", f"{result.train_seconds:.1f} s")
    table.add_section()
    table.add_row("returns of one rollout, torch.ops.dcs.discounted_cumsum", f"{result.op_microseconds:.1f} µs")
    table.add_row("returns of one rollout, Python loop", f"{result.loop_microseconds:.1f} µs")
    table.add_row("ratio", f"{result.loop_microseconds / result.op_microseconds:.1f}")
    Console().print(table)


def plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    returns = np.asarray(result.episode_returns)
    window = min(AVERAGED_EPISODES, len(returns))
    mean = np.convolve(returns, np.full(window, 1.0 / window), mode="valid")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(returns, color="tab:blue", alpha=0.25, linewidth=0.8, label="episode")
    axes.plot(np.arange(window - 1, len(returns)), mean, color="tab:blue", label=f"mean of {window} episodes")
    axes.set(xlabel="episode", ylabel="return", title="REINFORCE on CartPole-v1", ylim=(0, 520))
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="reinforce_cartpole", description="Train REINFORCE on CartPole-v1.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=400, help="rollouts to train on (default 400)")
    parser.add_argument("--seconds", type=float, default=70.0, help="stop training after this long (default 70)")
    parser.add_argument("--output", type=Path, default=Path("learning_curve.png"), help="the learning curve's PNG file")
    options = parser.parse_args(arguments)
    if options.updates < 1:
        parser.error(f"--updates must be at least 1, got {options.updates}")
    # The tensors are a few thousand elements: a second thread gains nothing and its barriers cost a second an update on
    # a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = train(seed=options.seed, updates=options.updates, seconds=options.seconds)
    finally:
        torch.set_num_threads(threads)
    show(result)
    plot(result, options.output)
    print(f"learning curve: {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
