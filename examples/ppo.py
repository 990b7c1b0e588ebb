"""PPO on gymnasium's CartPole-v1 or Acrobot-v1; torch_dcs_ops.returns.gae is part of the compiled update.

Schulman et al., 2017, https://arxiv.org/abs/1707.06347, with details that Huang et al. found to matter (2022, "The 37
implementation details of PPO"). An update, advantages, losses, gradients, clipping and Adam, is one graph
(fullgraph=True), so the advantages are made of the values that the networks have at that moment.

A rollout is time-major, (T, B): T steps of B environments that run on across rollouts. gymnasium's vector environments
reset on the step *after* an episode's end (AutoresetMode.NEXT_STEP): what is observed after a step is its own next
state, also where the episode ended. So the values of all observations but the first are the `next_values` that gae
takes, and a truncated episode is bootstrapped as it should be. The row that only resets is no transition and has no
loss.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dcs_ops.returns import gae

GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP = 0.2
AVERAGED_EPISODES = 100


@dataclass(frozen=True)
class Task:
    """An environment, and the average return of 100 episodes from which on it counts as solved."""

    name: str
    solved: float
    lowest: float  # return of an episode that failed, the bottom of the plot
    highest: float
    vectorization_mode: str


TASKS = {
    "CartPole-v1": Task("CartPole-v1", 475.0, 0.0, 500.0, "vector_entry_point"),
    "Acrobot-v1": Task("Acrobot-v1", -100.0, -500.0, 0.0, "sync"),
}


@dataclass
class Rollout:
    """One rollout of T steps in B environments."""

    observations: Tensor  # (T + 1, B, features) float32, what the policy saw, and what came after the last step
    actions: Tensor  # (T, B) int64
    log_probs: Tensor  # (T, B) of the actions, when they were taken
    rewards: Tensor  # (T, B) float32, times 1 - gamma, so that values are around 1
    terminated: Tensor  # (T, B) bool
    truncated: Tensor  # (T, B) bool
    reset: Tensor  # (T, B) bool, rows that only reset an environment

    def of_environments(self, columns: Tensor) -> Rollout:
        return Rollout(*(getattr(self, field.name)[:, columns] for field in fields(self)))


class Networks(nn.Module):
    """Policy and value function, a small MLP each."""

    def __init__(self, features: int, actions: int, width: int = 64) -> None:
        super().__init__()

        def mlp(outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
            )

        self.policy, self.value = mlp(actions), mlp(1)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 2.0**0.5)
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.policy[-1].weight, 0.01)

    def forward(self, rollout: Rollout, entropy_weight: Tensor) -> Tensor:
        """PPO's loss over the rollout's real transitions."""
        values = self.value(rollout.observations).squeeze(-1)
        with torch.no_grad():
            advantages, returns = gae(
                rollout.rewards, values[:-1], next_values=values[1:], terminated=rollout.terminated,
                truncated=rollout.truncated, gamma=GAMMA, gae_lambda=GAE_LAMBDA,
            )  # fmt: skip
            weight = (~rollout.reset).to(returns.dtype)
            weight = weight / weight.sum()
            advantages = advantages - (weight * advantages).sum()
            advantages = advantages * ((weight * advantages.square()).sum() + 1e-8).rsqrt()
        log_probs = F.log_softmax(self.policy(rollout.observations[:-1]), dim=-1)
        ratio = (log_probs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1) - rollout.log_probs).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        errors = (returns - values[:-1]).square()
        return (weight * (errors - gain - entropy_weight * entropy)).sum()


class Learner:
    """The networks' parameters as one vector, Adam's moments of it, and the step that moves it."""

    def __init__(self, networks: Networks, *, compiled: bool) -> None:
        self.networks = networks.requires_grad_(False)
        self.shapes = {name: p.shape for name, p in networks.named_parameters()}
        self.vector = nn.utils.parameters_to_vector(networks.parameters())
        for parameter, view in zip(networks.parameters(), self.split(self.vector).values(), strict=True):
            parameter.data = view  # the policy that acts is the one that learns
        self.first, self.second = torch.zeros_like(self.vector), torch.zeros_like(self.vector)
        self.steps = torch.zeros(())
        self.step = torch.compile(self._step, fullgraph=True, dynamic=False) if compiled else self._step

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _step(self, rollout: Rollout, learning_rate: Tensor, entropy_weight: Tensor) -> Tensor:
        def loss_of(vector: Tensor) -> Tensor:
            return torch.func.functional_call(self.networks, self.split(vector), (rollout, entropy_weight))

        gradient, loss = torch.func.grad_and_value(loss_of)(self.vector)
        gradient = gradient * (0.5 / (gradient.square().sum().sqrt() + 1e-6)).clamp(max=1.0)
        self.steps.add_(1.0)
        first = self.first.lerp_(gradient, 0.1) / (1 - 0.9**self.steps)
        second = self.second.lerp_(gradient.square(), 0.001) / (1 - 0.999**self.steps)
        self.vector.sub_(learning_rate * first / (second.sqrt() + 1e-5))
        return loss


class Collector:
    """Steps B environments with the policy and keeps the return of every episode that ends."""

    def __init__(self, task: Task, environments: int, steps: int, seed: int) -> None:
        self.envs = gymnasium.make_vec(task.name, environments, vectorization_mode=task.vectorization_mode)
        assert self.envs.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP
        self.steps = steps
        self.observation, _ = self.envs.reset(seed=seed)
        self.reset = np.zeros(environments, dtype=bool)
        self.running_return = np.zeros(environments)
        self.episode_returns: list[float] = []
        self.episode_ends: list[int] = []  # environment steps taken when each of them ended
        self.taken = 0

    @torch.no_grad()
    def rollout(self, policy: nn.Module) -> Rollout:
        observations, actions, log_probs, rewards, ends, cuts, resets = ([] for _ in range(7))
        for _ in range(self.steps):
            observations.append(torch.as_tensor(self.observation, dtype=torch.float32))
            every = F.log_softmax(policy(observations[-1]), dim=-1)
            action = torch.multinomial(every.exp(), 1)
            actions.append(action.squeeze(-1))
            log_probs.append(every.gather(-1, action).squeeze(-1))
            resets.append(torch.from_numpy(self.reset))
            self.observation, reward, terminated, truncated, _ = self.envs.step(actions[-1].numpy())
            rewards.append(torch.as_tensor(reward, dtype=torch.float32) * (1 - GAMMA))
            ends.append(torch.as_tensor(terminated))
            cuts.append(torch.as_tensor(truncated))
            self.taken += len(reward)
            self.running_return += reward
            self.reset = terminated | truncated
            for index in np.flatnonzero(self.reset):
                self.episode_returns.append(float(self.running_return[index]))
                self.episode_ends.append(self.taken)
                self.running_return[index] = 0.0
        observations.append(torch.as_tensor(self.observation, dtype=torch.float32))
        lists = (observations, actions, log_probs, rewards, ends, cuts, resets)
        return Rollout(*(torch.stack(steps) for steps in lists))


@dataclass
class Result:
    """What a training run ends with."""

    task: Task
    episode_returns: list[float]
    episode_ends: list[int]
    updates: int
    environment_steps: int
    compile_seconds: float
    train_seconds: float

    @property
    def average(self) -> float:
        return float(np.mean(self.episode_returns[-AVERAGED_EPISODES:]))

    @property
    def solved(self) -> bool:
        return len(self.episode_returns) >= AVERAGED_EPISODES and self.average >= self.task.solved


def train(
    *,
    task: Task,
    seed: int = 0,
    rollouts: int = 400,
    seconds: float = 240.0,
    environments: int = 16,
    steps: int = 128,
    epochs: int = 4,
    minibatches: int = 4,
    learning_rate: float = 2.5e-3,
    entropy_weight: float = 0.01,
    compiled: bool = True,
    progress: bool = True,
) -> Result:
    """Train until the task is solved, for `rollouts` at most, or `seconds`, the compilation not counted."""
    from tqdm import tqdm

    torch.manual_seed(seed)
    collector = Collector(task, environments, steps, seed)
    features, actions = collector.envs.single_observation_space.shape[0], collector.envs.single_action_space.n
    learner = Learner(Networks(features, int(actions)), compiled=compiled)
    result = Result(task, collector.episode_returns, collector.episode_ends, 0, 0, 0.0, 0.0)

    def learn(fraction_done: float) -> None:
        rollout = collector.rollout(learner.networks.policy)
        rate, bonus = (torch.tensor(x * (1.0 - fraction_done)) for x in (learning_rate, entropy_weight))
        for _ in range(epochs):
            # Environments are shared out, not steps: each part is whole in time, as gae needs it.
            for columns in torch.randperm(environments).chunk(minibatches):
                learner.step(rollout.of_environments(columns), rate, bonus)
                result.updates += 1

    start = time.perf_counter()
    if progress:
        print("compiling the update ...", flush=True)
    learn(0.0)
    result.compile_seconds = time.perf_counter() - start
    start, done = time.perf_counter(), 1
    with tqdm(total=rollouts, initial=1, desc=f"PPO, {task.name}", unit="rollout", disable=not progress) as bar:
        while done < rollouts and not result.solved and (elapsed := time.perf_counter() - start) < seconds:
            learn(max(done / rollouts, elapsed / seconds))
            done += 1
            recent = f"{result.average:.0f}" if result.episode_returns else "none yet"
            bar.set_postfix_str(f"return {recent}", refresh=False)
            bar.update()
    result.train_seconds = time.perf_counter() - start
    result.environment_steps = collector.taken
    return result


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"PPO on {result.task.name}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_row(f"average return, last {AVERAGED_EPISODES} episodes", f"{result.average:.1f}")
    table.add_row("solved at", f"{result.task.solved:.0f} ({'reached' if result.solved else 'not reached'})")
    table.add_row("episodes / environment steps", f"{len(result.episode_returns)} / {result.environment_steps}")
    table.add_row("compiled updates, advantages in each", str(result.updates))
    table.add_row("first rollout and its updates, compilation included", f"{result.compile_seconds:.1f} s")
    table.add_row("training after it", f"{result.train_seconds:.1f} s")
    Console().print(table)


def plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    returns, at = np.asarray(result.episode_returns), np.asarray(result.episode_ends)
    window = min(AVERAGED_EPISODES, len(returns))
    mean = np.convolve(returns, np.full(window, 1.0 / window), mode="valid")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(at, returns, ".", color="tab:blue", alpha=0.25, markersize=3, label="episode")
    axes.plot(at[window - 1 :], mean, color="tab:blue", label=f"mean of {window} episodes")
    axes.axhline(result.task.solved, color="tab:gray", linewidth=0.8, linestyle="--", label="solved")
    axes.set(xlabel="environment steps", ylabel="return", title=f"PPO on {result.task.name}")
    axes.set_ylim(result.task.lowest - 20, result.task.highest + 20)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ppo", description="Train PPO on CartPole-v1 or Acrobot-v1.")
    parser.add_argument("--task", choices=sorted(TASKS), default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=400, help="rollouts to train on at most (default 400)")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop training after this long (default 240)")
    parser.add_argument("--output", type=Path, default=Path("learning_curve_ppo.png"), help="the learning curve's PNG")
    options = parser.parse_args(arguments)
    if options.rollouts < 1:
        parser.error(f"--rollouts must be at least 1, got {options.rollouts}")
    # As in reinforce_cartpole.py: a second thread gains nothing on tensors this small.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = train(task=TASKS[options.task], seed=options.seed, rollouts=options.rollouts, seconds=options.seconds)
    finally:
        torch.set_num_threads(threads)
    show(result)
    if result.episode_returns:
        plot(result, options.output)
        print(f"learning curve: {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
