"""Temporal differences, their discounted sums and what reinforcement learning makes of them, in plain PyTorch.

`dcs::_temporal_difference_scan`, one step after the other along `dim`, from the last one back:

    end_t    = terminated_t or truncated_t (bool, or numbers 0 and 1; any number but 0 counts as set): nothing is
               carried over from step t + 1
    v'_t     = next_values_t; without next_values: values_{t+1}, at the last step bootstrap_value (None: 0), and 0
               where truncated_t, as values_{t+1} is the next episode's
    boot_t   = gamma_t·v'_t, and 0 where terminated_t, whatever v'_t is
    delta_t  = min(clip_rho, rho_t)·(r_t + boot_t - v_t)
    c_t      = gamma_t·lambda_t·min(clip_c, rho_t)
    A_t      = delta_t + c_t·A_{t+1}, and delta_t where end_t and at the last step      (advantages)
    target_t = A_t + v_t
    pg_t     = min(clip_pg, rho_t)·(r_t + boot_t - v_t + gamma_t·lambda_t·A_{t+1}), the product with A_{t+1} left out
               where end_t and at the last step

With rho 1 this is generalized advantage estimation (Schulman et al., 2016, https://arxiv.org/abs/1506.02438, equation
16), else V-trace (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561, section 4.1; lambda enters its
policy-gradient advantage as in rlax: the next state is worth v'_t + lambda_t·A_{t+1}).

Without `values` there is no A, rhos is None and only the targets can be asked for. They are the lambda-returns (Sutton
and Barto, 2nd edition, equation 12.18), and so they are formed wherever targets alone are asked for of values without
next_values and rhos: there A_t + v_t is the same sum, but v_t in it is not, and it must not show (NaN, or so large that
the others are lost)

    target_t = r_t + (gamma_t - c_t)·v'_t + c_t·target_{t+1}, and r_t + boot_t where end_t and at the last step

with v'_t as above, or (without next_values and values) 0, at the last step bootstrap_value, and 0 where truncated_t. A
v'_t whose factor is 0 (lambda 1) is not read.

`dcs::_n_step_returns`: with v' as there (without next_values: of values_{t+1}),

    G[1]_t = r_t + gamma_t·v'_t, without v' where terminated_t
    G[n]_t = G[1]_t where end_t and at the last step, else
             r_t + gamma_t·((1 - lambda_t)·v'_t + lambda_t·G[n-1]_{t+1})

With lambda 1 this is the n-step return (Sutton and Barto, 2nd edition, section 7.1). A v'_t or G[n-1]_{t+1} whose
factor is 0 is not read.

gamma and trace (lambda): the number where the tensor is None; a tensor with rewards' number of dimensions broadcasts
against rewards (one per step), one with fewer against rewards' shape without dim (one per row). A minimum with a NaN
rho is NaN; without rhos every ratio is 1, and no bound is read. A NaN or an infinity reaches every step that the
recurrence carries it to.

Everything is computed in float64 and rounded once at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .scan import wide_gates


class TemporalDifferenceCall(NamedTuple):
    """The arguments of `_temporal_difference_scan`, in the order of its schema."""

    rewards: Tensor
    values: Tensor | None = None
    next_values: Tensor | None = None
    bootstrap_value: Tensor | None = None
    terminated: Tensor | None = None
    truncated: Tensor | None = None
    gamma: Tensor | None = None
    gamma_value: float = 1.0
    trace: Tensor | None = None
    trace_value: float = 1.0
    rhos: Tensor | None = None
    clip_rho: float = 1.0
    clip_c: float = 1.0
    clip_pg: float = 1.0
    dim: int = 0
    need_advantages: bool = False
    need_targets: bool = False
    need_pg: bool = False

    @property
    def has_own_values(self) -> bool:
        """Whether a step's own value is part of its results: not where values are those of next states alone."""
        return self.values is not None and (
            self.next_values is not None or self.rhos is not None or self.need_advantages or self.need_pg
        )


class NStepCall(NamedTuple):
    """The arguments of `_n_step_returns`, in the order of its schema."""

    rewards: Tensor
    values: Tensor | None = None
    next_values: Tensor | None = None
    bootstrap_value: Tensor | None = None
    terminated: Tensor | None = None
    truncated: Tensor | None = None
    gamma: Tensor | None = None
    gamma_value: float = 1.0
    trace: Tensor | None = None
    trace_value: float = 1.0
    dim: int = 0
    n: int = 1


class GradientsCall(NamedTuple):
    """The arguments of `_returns_gradients`, in the order of its schema (ops/returns/gradients.py has its formulas)."""

    of_advantages: Tensor | None
    of_targets: Tensor | None
    of_pg: Tensor | None
    ends: Tensor | None  # bool: nothing is carried to the step
    lacks_after: Tensor | None  # bool: the value of the next state is not read
    gamma: Tensor | None
    gamma_value: float
    trace: Tensor | None
    trace_value: float
    rhos: Tensor | None
    clip_rho: float
    clip_c: float
    clip_pg: float
    dim: int
    n: int | None
    has_own_values: bool
    has_next_values: bool
    need_rewards: bool
    need_values: bool
    need_next_values: bool
    need_bootstrap_value: bool


def temporal_difference_scan(call: TemporalDifferenceCall) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, targets, pg_advantages), of the shape (0,) where not needed. Arguments are validated already."""
    rewards, values, next_values, bootstrap_value, terminated, truncated = call[:6]
    dim, rhos = call.dim, call.rhos
    length = rewards.size(dim)
    r = _steps(rewards, dim)
    zeros = torch.zeros(rewards.shape[:dim] + rewards.shape[dim + 1 :], dtype=torch.float64, device=rewards.device)
    no = torch.zeros_like(zeros, dtype=torch.bool)
    v = None if values is None else _steps(values, dim)
    following = None if next_values is None else _steps(next_values, dim)
    last = zeros if bootstrap_value is None else bootstrap_value.to(torch.float64)
    terminates = [no] * length if terminated is None else (terminated != 0).unbind(dim)
    truncates = [no] * length if truncated is None else (truncated != 0).unbind(dim)
    gammas = _rates(rewards, call.gamma, call.gamma_value, dim)
    traces = _rates(rewards, call.trace, call.trace_value, dim)
    rho = None if rhos is None else _steps(rhos, dim)
    clips = (call.clip_rho, call.clip_c, call.clip_pg)

    advantages, targets, pg_advantages = [zeros] * length, [zeros] * length, [zeros] * length
    carry = zeros
    for t in reversed(range(length)):
        is_last = t == length - 1
        ends = terminates[t] | truncates[t]
        if following is not None:
            after = following[t]
        else:
            after = last if is_last else zeros if v is None else v[t + 1]
            after = torch.where(truncates[t], 0.0, after)
        rate = gammas[t] * traces[t]
        if not call.has_own_values or v is None:
            weight = gammas[t] if is_last else torch.where(ends, gammas[t], gammas[t] - rate)
            own = r[t] + torch.where(terminates[t] | (weight == 0), 0.0, weight * after)
            targets[t] = carry = own if is_last else torch.where(ends, own, own + rate * carry)
            continue
        difference = r[t] + torch.where(terminates[t], 0.0, gammas[t] * after) - v[t]
        ratios = [1.0] * 3 if rho is None else [torch.where(rho[t] > c, c, rho[t]) for c in clips]
        delta = ratios[0] * difference
        pg_advantages[t] = ratios[2] * (
            difference if is_last else torch.where(ends, difference, difference + rate * carry)
        )
        carry = delta if is_last else torch.where(ends, delta, delta + rate * ratios[1] * carry)
        advantages[t], targets[t] = carry, carry + v[t]
    needs = (call.need_advantages, call.need_targets, call.need_pg)
    results = zip((advantages, targets, pg_advantages), needs, strict=True)
    a, b, c = (_stack(steps, rewards, dim) if need else rewards.new_empty(0) for steps, need in results)
    return a, b, c


def n_step_returns(call: NStepCall) -> Tensor:
    """G[n] of every step; min(n, steps) passes over the data. Arguments are validated already."""
    rewards, values, next_values, bootstrap_value, terminated, truncated = call[:6]
    dim = call.dim
    length = rewards.size(dim)
    if rewards.numel() == 0:
        return torch.empty_like(rewards)
    r = rewards.to(torch.float64)
    no = torch.zeros_like(rewards, dtype=torch.bool)
    terminates, truncates = (no if flag is None else flag != 0 for flag in (terminated, truncated))
    if next_values is not None:
        after = next_values.to(torch.float64)
    else:
        rows = rewards.shape[:dim] + rewards.shape[dim + 1 :]
        last = r.new_zeros(rows) if bootstrap_value is None else bootstrap_value.to(torch.float64).expand(rows)
        following = torch.zeros_like(r) if values is None else values.to(torch.float64)
        after = torch.cat((following.narrow(dim, 1, length - 1), last.unsqueeze(dim)), dim)
        after = after.masked_fill(truncates, 0.0)
    gammas = wide_gates(rewards, call.gamma, call.gamma_value, dim)
    rates = gammas * wide_gates(rewards, call.trace, call.trace_value, dim)
    ends = (terminates | truncates).index_fill(dim, torch.tensor([length - 1], device=rewards.device), True)

    def plus_after(factors: Tensor) -> Tensor:
        return r + torch.where(terminates | (factors == 0), 0.0, factors * after)

    own, mixed = plus_after(gammas), plus_after(gammas - rates)
    targets = own
    for _ in range(min(call.n, length) - 1):
        targets = torch.where(ends | (rates == 0), own, mixed + rates * targets.roll(-1, dim))
    output = torch.empty_like(rewards)
    return output.copy_(targets)


def _steps(tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
    return tensor.to(torch.float64).unbind(dim)


def _rates(rewards: Tensor, rate: Tensor | None, number: float, dim: int) -> tuple[Tensor, ...]:
    return wide_gates(rewards, rate, number, dim).expand(rewards.shape).unbind(dim)


def _stack(steps: list[Tensor], like: Tensor, dim: int) -> Tensor:
    output = torch.empty_like(like)
    return output.copy_(torch.stack(steps, dim)) if steps else output
