"""What the benchmarks of returns run: this package's functions, and GAE as others write it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dcs_ops import returns

from scan.peers import associative_scan

GAMMA, LAMBDA = 0.99, 0.95


@dataclass(frozen=True)
class Rollout:
    """Steps of many environments with time at `dim`; an episode ends with one step in a hundred."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor | None
    bootstrap_value: Tensor
    done: Tensor
    rhos: Tensor | None
    dim: int


def rollout(shape: tuple[int, int], dim: int, device: str, *, rhos: bool = False, next_values: bool = False) -> Rollout:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    return Rollout(
        normal(*shape), normal(*shape), normal(*shape) if next_values else None, normal(shape[1 - dim]),
        torch.rand(shape, device=device) < 0.01, normal(*shape).exp_() if rhos else None, dim,
    )  # fmt: skip


def gae(x: Rollout) -> Any:
    return returns.gae(
        x.rewards, x.values, bootstrap_value=x.bootstrap_value, terminated=x.done, gamma=GAMMA, gae_lambda=LAMBDA,
        time_dim=x.dim,
    )  # fmt: skip


def vtrace(x: Rollout) -> Any:
    assert x.rhos is not None
    return returns.vtrace(
        x.rewards, x.values, x.rhos, bootstrap_value=x.bootstrap_value, terminated=x.done, gamma=GAMMA, lambda_=LAMBDA,
        time_dim=x.dim,
    )  # fmt: skip


def td_lambda(x: Rollout) -> Any:
    return returns.td_lambda_returns(
        x.rewards, next_values=x.next_values, terminated=x.done, gamma=GAMMA, lambda_=LAMBDA, time_dim=x.dim
    )


def n_step(x: Rollout) -> Any:
    return returns.n_step_returns(
        x.rewards, x.values, n=5, bootstrap_value=x.bootstrap_value, terminated=x.done, gamma=GAMMA, time_dim=x.dim
    )


@dataclass(frozen=True)
class Kind:
    """`bytes`: what a step reads and writes in float32, done being bool."""

    name: str
    function: Callable[[Rollout], Any]
    bytes: int
    options: dict[str, bool]


KINDS = (
    Kind("gae", gae, 17, {}),
    Kind("vtrace", vtrace, 21, {"rhos": True}),
    Kind("td_lambda", td_lambda, 13, {"next_values": True}),
    Kind("n_step", n_step, 13, {}),
)


def loop(x: Rollout) -> tuple[Tensor, Tensor]:
    """cleanrl's and stable-baselines3's way: a step after the other."""
    steps, values = x.rewards.movedim(x.dim, 0), x.values.movedim(x.dim, 0)
    goes_on = (~x.done.movedim(x.dim, 0)).to(steps.dtype)
    advantages = torch.empty_like(x.rewards)
    by_step = advantages.movedim(x.dim, 0)
    carry, after = torch.zeros_like(x.bootstrap_value), x.bootstrap_value
    for t in reversed(range(len(steps))):
        delta = steps[t] + GAMMA * after * goes_on[t] - values[t]
        carry = delta + GAMMA * LAMBDA * goes_on[t] * carry
        by_step[t] = carry
        after = values[t]
    return advantages, advantages + x.values


def by_recurrence(recurrence: Callable[..., Tensor]) -> Callable[[Rollout], Any]:
    """Temporal differences, and a recurrence over them that others have."""

    def compute(x: Rollout) -> tuple[Tensor, Tensor]:
        length = x.rewards.size(x.dim)
        after = torch.cat((x.values.narrow(x.dim, 1, length - 1), x.bootstrap_value.unsqueeze(x.dim)), x.dim)
        deltas = x.rewards + GAMMA * after * (~x.done) - x.values
        advantages = recurrence(GAMMA * LAMBDA * (~x.done), deltas, x.dim, True)
        return advantages, advantages + x.values

    return compute


def torchrl_gae(x: Rollout) -> Callable[[], Any] | None:
    """torchrl's vectorized form, on its own layout (batch, T, 1); None where it is not installed."""
    if importlib.util.find_spec("torchrl") is None:
        return None
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def placed(tensor: Tensor) -> Tensor:
        return tensor.movedim(x.dim, -1).unsqueeze(-1)

    length = x.rewards.size(x.dim)
    after = torch.cat((x.values.narrow(x.dim, 1, length - 1), x.bootstrap_value.unsqueeze(x.dim)), x.dim)
    arguments = [placed(tensor) for tensor in (x.values, after, x.rewards, x.done)]
    return lambda: vec_generalized_advantage_estimate(GAMMA, LAMBDA, *arguments)


def peers(x: Rollout, *, compiled: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """GAE by others."""
    if x.rewards.size(x.dim) <= 2048:
        yield "Python loop", lambda: loop(x)
        vectorized = torchrl_gae(x)
        if vectorized is not None:
            yield "torchrl vec_gae", vectorized
    if compiled and x.rewards.numel() <= 1 << 26:
        torch._dynamo.reset()
        function = torch.compile(by_recurrence(associative_scan), dynamic=False)
        yield "compiled associative_scan", lambda: function(x)
