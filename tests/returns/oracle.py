"""What the tests of returns share: definitions written out in Python numbers, and inputs.

Nothing here calls torch_dcs_ops. Every function takes one environment's steps as lists and looks forward from a step,
where the kernels go backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLAGS = ("none", "terminated", "truncated", "both")


class Episode(NamedTuple):
    """One environment's steps. `after`: V of every step's next state, None where nothing is known of it."""

    rewards: Sequence[float]
    values: Sequence[float]
    after: Sequence[float | None]
    terminated: Sequence[bool]
    truncated: Sequence[bool]
    gamma: Sequence[float]
    trace: Sequence[float]
    rhos: Sequence[float]

    @property
    def length(self) -> int:
        return len(self.rewards)

    def bootstrap(self, t: int) -> float:
        value = self.after[t]
        return 0.0 if self.terminated[t] or value is None else self.gamma[t] * value

    def goes_on(self, t: int) -> bool:
        return t + 1 < self.length and not self.terminated[t] and not self.truncated[t]

    def steps_from(self, t: int) -> range:
        """t and the steps after it up to the end of the episode or of the data."""
        end = t
        while self.goes_on(end):
            end += 1
        return range(t, end + 1)


def discounted(e: Episode, t: int) -> float:
    steps = e.steps_from(t)
    weight = total = 0.0
    for k in steps:
        weight = 1.0 if k == t else weight * e.gamma[k - 1]
        total += weight * e.rewards[k]
    return total + weight * e.bootstrap(steps[-1])


def advantage(e: Episode, t: int, clip_c: float = 1.0) -> float:
    """V-trace's sum of temporal differences; with ratios of 1, GAE's."""
    weight, total = 1.0, 0.0
    for k in e.steps_from(t):
        difference = e.rewards[k] + e.bootstrap(k) - e.values[k]
        total += weight * min(1.1, e.rhos[k]) * difference
        weight *= e.gamma[k] * e.trace[k] * min(clip_c, e.rhos[k])
    return total


def target(e: Episode, t: int, clip_c: float = 1.0) -> float:
    return advantage(e, t, clip_c) + e.values[t]


def pg_advantage(e: Episode, t: int, clip_c: float = 1.0) -> float:
    carried = e.gamma[t] * e.trace[t] * advantage(e, t + 1, clip_c) if e.goes_on(t) else 0.0
    return min(1.3, e.rhos[t]) * (e.rewards[t] + e.bootstrap(t) - e.values[t] + carried)


def n_step(e: Episode, t: int, n: int) -> float:
    """lambda mixes every step's value with the return from there on."""
    if n == 1 or not e.goes_on(t):
        return e.rewards[t] + e.bootstrap(t)
    mixed = (1 - e.trace[t]) * (e.after[t] or 0.0) + e.trace[t] * n_step(e, t + 1, n - 1)
    return e.rewards[t] + e.gamma[t] * mixed


def lambda_return(e: Episode, t: int) -> float:
    return n_step(e, t, e.length)


def retrace(e: Episode, t: int) -> float:
    if not e.goes_on(t):
        return e.rewards[t] + e.bootstrap(t)
    c = e.trace[t] * min(1.0, e.rhos[t + 1])
    return e.rewards[t] + e.bootstrap(t) + e.gamma[t] * c * (retrace(e, t + 1) - e.values[t + 1])


def upgo(e: Episode, t: int) -> float:
    if not e.goes_on(t):
        return e.rewards[t] + e.bootstrap(t)
    went_well = e.rewards[t + 1] + e.bootstrap(t + 1) >= e.values[t + 1]
    after = e.after[t]
    assert after is not None
    return e.rewards[t] + e.gamma[t] * (upgo(e, t + 1) if went_well else after)


class Batch(NamedTuple):
    """Steps of many environments, time first, in float64 on the CPU."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    bootstrap_value: Tensor
    terminated: Tensor
    truncated: Tensor
    gamma: Tensor  # one per step, however few are given
    trace: Tensor
    rhos: Tensor

    def episode(self, convention: str, *index: int) -> Episode:
        """One environment under "next" (next_values), "bootstrap", or "neither" of them."""
        column = [tensor[(slice(None), *index)].tolist() for tensor in self if tensor.dim() == self.rewards.dim()]
        rewards, values, after, terminated, truncated, gamma, trace, rhos = column
        if convention != "next":
            last = float(self.bootstrap_value[index]) if convention == "bootstrap" else None
            after = [*values[1:], last] if convention == "bootstrap" else [None] * len(rewards)
            after = [None if cut else value for value, cut in zip(after, truncated, strict=True)]
        return Episode(rewards, values, after, terminated, truncated, gamma, trace, rhos)

    def loop(self, function: Callable[[Episode, int], float], convention: str) -> Tensor:
        """`function` of every step of every environment."""
        result = torch.empty_like(self.rewards)
        for index in itertools.product(*map(range, self.rewards.shape[1:])):
            episode = self.episode(convention, *index)
            for t in range(episode.length):
                result[(t, *index)] = function(episode, t)
        return result


def without_values(e: Episode) -> Episode:
    """For discounted returns with bootstrap_value, which know no values on the way."""
    return e._replace(after=[None] * (e.length - 1) + [e.after[-1]])


def every_pattern(length: int) -> Tensor:
    """(length, 4 ** length) indices into FLAGS: every way to plant them."""
    return torch.tensor(list(itertools.product(range(len(FLAGS)), repeat=length))).T


def make_batch(shape: Sequence[int], *, flags: Tensor | None = None, rates: str = "step", seed: int = 0) -> Batch:
    """Random steps, time first. rates: "number" (0.9 and 0.8), "row" (one an environment), "step"."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    shape = tuple(shape)
    if flags is None:
        flags = (uniform(*shape) * 12).long().clamp(max=3).roll(1, 0)
    kept = {"number": (1,) * len(shape), "row": (1, *shape[1:]), "step": shape}[rates]
    gamma = torch.full(kept, 0.9, dtype=torch.float64) if rates == "number" else uniform(*kept)
    trace = torch.full(kept, 0.8, dtype=torch.float64) if rates == "number" else uniform(*kept)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    last = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
    return Batch(
        draw[0], draw[1], draw[2], last, (flags == 1) | (flags == 3), (flags == 2) | (flags == 3),
        gamma.expand(shape), trace.expand(shape), draw[3].exp(),
    )  # fmt: skip


def arguments(batch: Batch, convention: str, device: str, *, rates: str = "step", time_dim: int = 0) -> dict[str, Any]:
    """The keywords that the functions of torch_dcs_ops.returns share; tensors with time at `time_dim`."""

    def placed(tensor: Tensor) -> Tensor:
        return tensor.movedim(0, time_dim).to(device)

    keywords: dict[str, Any] = {
        "terminated": placed(batch.terminated), "truncated": placed(batch.truncated), "time_dim": time_dim,
    }  # fmt: skip
    if convention == "next":
        keywords["next_values"] = placed(batch.next_values)
    if convention == "bootstrap":
        keywords["bootstrap_value"] = batch.bootstrap_value.to(device)
    if rates == "number":
        keywords |= {"gamma": float(batch.gamma.flatten()[0]), "lambda_": float(batch.trace.flatten()[0])}
    elif rates == "row":
        keywords |= {"gamma": batch.gamma[0].to(device), "lambda_": batch.trace[0].to(device)}
    else:
        keywords |= {"gamma": placed(batch.gamma), "lambda_": placed(batch.trace)}
    return keywords


def on_policy(batch: Batch) -> Batch:
    return batch._replace(rhos=torch.ones_like(batch.rewards))
