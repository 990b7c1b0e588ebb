"""`_temporal_difference_scan` made of differentiable operations: pointwise ones around one `discounted_cumsum`.

What autograd, forward mode and the transforms of torch.func differentiate, any number of times; and what compiled code
is made of where scans are part of generated kernels (see compile/scan_lowering.py): one kernel then, as no operation
reads a scan's result at another step. The symbols are those of reference/returns.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.returns import GradientsCall, NStepCall, TemporalDifferenceCall
from ...reference.scan import align_gates, has_step_gates
from .._common.autocast import widened
from ..scan.discounted_cumsum import discounted_cumsum

Rate = float | Tensor
_Call = TemporalDifferenceCall | NStepCall


class Discounts(NamedTuple):
    """gamma and lambda, and their product, for use beside rewards and for a scan."""

    gamma: Rate  # rewards' dtype, broadcasts against rewards
    product: Rate  # likewise
    gate: Rate  # as precise as it can be had: a number, one per row (float64), or one per step


class _Steps(NamedTuple):
    """What the temporal difference of a step is made of."""

    r: Tensor
    v: Tensor
    after: Tensor  # v', where it is known
    lacks_after: Tensor | None  # where v' counts as 0 (None: nowhere)
    gamma: Rate

    def difference(self) -> Tensor:
        return self.r + self.gamma * filled(self.after, self.lacks_after) - self.v

    def next_step(self, dim: int) -> _Steps:
        r, v, after, lacks_after, gamma = self
        lacks_after = None if lacks_after is None else next_step(lacks_after, dim)
        if isinstance(gamma, Tensor) and gamma.dim() == r.dim() and gamma.size(dim) != 1:
            gamma = next_step(gamma, dim)
        return _Steps(next_step(r, dim), next_step(v, dim), next_step(after, dim), lacks_after, gamma)


def formulas(call: TemporalDifferenceCall) -> tuple[Tensor, Tensor, Tensor]:
    """The op; arguments are validated already and `dim` is not negative."""
    rewards, dim, clip_rho, clip_c = call.rewards, call.dim, call.clip_rho, call.clip_c
    dtype = rewards.dtype
    r, v, rho = map(widened, (rewards, call.values, call.rhos))
    lacks_after, ends, after = _ends(call, r, v)
    discounts = discounts_of(call, r)
    if v is None or not call.has_own_values:
        targets = _lambda_returns(r, after, lacks_after, ends, discounts, dim)
        return _none(rewards), targets.to(dtype), _none(rewards)

    steps = _Steps(r, v, after, lacks_after, discounts.gamma)
    difference = steps.difference()
    delta = difference if rho is None else rho.clamp(max=clip_rho) * difference
    ratio = None if rho is None else rho.clamp(max=clip_c)
    pg_advantages = _none(rewards)
    if call.need_pg:
        # From the operands of the next step, not by shifting delta: a compiler keeps a result that two operations read
        # in memory, in a kernel of its own, when it is made of more than four tensors.
        next_delta = steps.next_step(dim).difference()
        if rho is not None:
            next_delta = next_step(rho, dim).clamp(max=clip_rho) * next_delta
        carried = _carried(next_delta, None if ratio is None else next_step(ratio, dim), ends, discounts, dim)
        advantages = delta + (carried if ratio is None else ratio * carried)
        pg = difference + carried
        pg_advantages = (pg if rho is None else rho.clamp(max=call.clip_pg) * pg).to(dtype)
    else:
        gate = discounts.gate if ratio is None else discounts.product * ratio
        advantages = discounted_cumsum(delta, gate, dim=dim, reset=ends)
    targets = (advantages + v).to(dtype) if call.need_targets else _none(rewards)
    return advantages.to(dtype) if call.need_advantages else _none(rewards), targets, pg_advantages


def n_step_formulas(call: NStepCall) -> Tensor:
    """Returns over n steps: with u_t the value of step t's own state, a scan of ``r_t + boot_t - u_t`` over a window of
    n steps, plus u. The values between cancel (lambda 1), or leave a share (1 - lambda) of each behind.
    """
    dim = call.dim
    r, v = widened(call.rewards), widened(call.values)
    lacks_after, ends, after = _ends(call, r, v)
    discounts = discounts_of(call, r)
    if v is None:
        # A state is the next one of the step before. An episode's first state is no next one, and its value cancels.
        v = step_before(filled(after, ends), dim)
    delta = _Steps(r, v, after, lacks_after, discounts.gamma).difference()
    targets: Tensor = discounted_cumsum(delta, discounts.gate, dim=dim, reset=ends, window=call.n) + v
    return targets.to(call.rewards.dtype)


def one_step_errors(call: TemporalDifferenceCall) -> Tensor:
    """``r_t + boot_t - v_t``, of a call with values."""
    r, v = widened(call.rewards), widened(call.values)
    lacks_after, _, after = _ends(call, r, v)
    return _Steps(r, v, after, lacks_after, discounts_of(call, r).gamma).difference()


def retrace_as_lambda_returns(call: TemporalDifferenceCall) -> TemporalDifferenceCall:
    """The lambda-returns that the Retrace targets of a call with rhos and next_values are.

    With the lambda of a step ``l_t = lambda_t·min(1, rho_{t+1})`` their mixture ``v'_t + l_t·(G_{t+1} - Q_{t+1})`` is
    ``(1 - l_t)·v'_t + l_t·G_{t+1}`` and ``l_t·(v'_t - Q_{t+1})``, which goes to the rewards. So no target contains the
    action value of its own step.
    """
    dim = call.dim
    r, q, after, rho = map(widened, (call.rewards, call.values, call.next_values, call.rhos))
    terminates = None if call.terminated is None else as_bool(call.terminated)
    truncates = None if call.truncated is None else as_bool(call.truncated)
    ends = or_last(either(terminates, truncates), r, dim)
    links = _times(next_step(rho.clamp(max=1.0), dim), call.trace_value if call.trace is None else call.trace, dim)
    factors = _times(links, call.gamma_value if call.gamma is None else call.gamma, dim)
    gain = factors.masked_fill(ends, 0.0) * (after - next_step(q, dim)).masked_fill(ends, 0.0)
    return call._replace(
        rewards=r + gain.to(r.dtype), values=None, next_values=after, terminated=terminates, truncated=truncates,
        trace=links, trace_value=1.0, rhos=None,
    )  # fmt: skip


def _times(factors: Tensor, rate: Rate, dim: int) -> Tensor:
    """``rate·factors``, with rate as gamma and lambda are given and factors one per step."""
    return factors * (align_gates(rate.to(factors.device), factors.dim(), dim) if isinstance(rate, Tensor) else rate)


def next_step(tensor: Tensor, dim: int) -> Tensor:
    """What is at the next step, 0 at the last one."""
    return _padded(tensor, dim, 1)


def step_before(tensor: Tensor, dim: int) -> Tensor:
    """What is at the step before, 0 at the first one."""
    return _padded(tensor, dim, 0)


def _padded(tensor: Tensor, dim: int, shift: int) -> Tensor:
    if tensor.size(dim) == 0:
        return tensor
    if hasattr(tensor, "device_mesh"):  # a DTensor: torch 2.11 cannot pad one on a mesh of several axes
        kept, none = tensor.narrow(dim, shift, tensor.size(dim) - 1), torch.zeros_like(tensor.narrow(dim, 0, 1))
        return torch.cat((kept, none) if shift else (none, kept), dim)
    # The last dimension comes first. Made from the number of dimensions, as dim may be a symbol under torch.compile.
    pads = [int(axis == dim and side == shift) for axis in reversed(range(tensor.dim())) for side in (0, 1)]
    return torch.nn.functional.pad(tensor.narrow(dim, shift, tensor.size(dim) - 1), pads)


def _ends(call: _Call, r: Tensor, v: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Where v' counts as 0, where an episode ends (None: nowhere), and v'. r and v are those of the call, widened."""
    after, last = widened(call.next_values), widened(call.bootstrap_value)
    ends, lacks_after = masks_of(call)
    return lacks_after, ends, next_values_of(r, v, last, call.dim) if after is None else after


def masks_of(call: _Call) -> tuple[Tensor | None, Tensor | None]:
    """Where an episode ends, and where v' counts as 0 (None: nowhere)."""
    terminates = None if call.terminated is None else as_bool(call.terminated)
    truncates = None if call.truncated is None else as_bool(call.truncated)
    ends = either(terminates, truncates)
    return ends, ends if call.next_values is None else terminates


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first | second


def filled(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return tensor if mask is None else tensor.masked_fill(mask, 0.0)


def _carried(
    next_delta: Tensor, next_ratio: Tensor | None, ends: Tensor | None, discounts: Discounts, dim: int
) -> Tensor:
    """What is carried to a step, ``gamma_t·lambda_t·A_{t+1}`` or 0, as a recurrence of its own.

    A and pg are made of it at their own step: no operation reads a scan's result of another one.
    """
    ends = or_last(ends, next_delta, dim)
    gate = discounts.gate if next_ratio is None else discounts.product * next_ratio
    return discounted_cumsum((discounts.product * next_delta).masked_fill(ends, 0.0), gate, dim=dim, reset=ends)


def _lambda_returns(
    r: Tensor, after: Tensor, lacks_after: Tensor | None, ends: Tensor | None, discounts: Discounts, dim: int
) -> Tensor:
    product = (torch.ones_like(r) * discounts.product).masked_fill(or_last(ends, r, dim), 0.0)
    weight = discounts.gamma - product
    # Only where it would show: the factor has a derivative at 0 too.
    is_unread = (weight == 0) & ~after.isfinite()
    if lacks_after is not None:
        is_unread = is_unread | lacks_after
    return discounted_cumsum(r + weight * after.masked_fill(is_unread, 0.0), discounts.gate, dim=dim, reset=ends)


def discounts_of(call: _Call | GradientsCall, r: Tensor) -> Discounts:
    gamma, gamma_value, trace, trace_value, dim = call.gamma, call.gamma_value, call.trace, call.trace_value, call.dim
    if gamma is None and trace is None:
        product = gamma_value * trace_value
        return Discounts(gamma_value, product, product)
    first = gamma_value if gamma is None else _rate(r, gamma, dim)
    second = trace_value if trace is None else _rate(r, trace, dim)
    ndim = r.dim()
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dim() != second.dim():
        first, second = align_gates(first, ndim, dim), align_gates(second, ndim, dim)
    gate = first * second
    return Discounts(_beside_rewards(first, r, dim), _beside_rewards(gate, r, dim), gate)


def _rate(r: Tensor, rate: Tensor, dim: int) -> Tensor:
    """Per step in rewards' dtype; per row in float64, as rounding errors multiply, and without a time of size 1."""
    rate = rate.to(r.device)
    if has_step_gates(rate, r.dim()):
        if rate.size(dim) != 1:
            return rate.to(r.dtype)
        rate = rate.squeeze(dim)
    return rate.double()


def _beside_rewards(rate: Rate, r: Tensor, dim: int) -> Rate:
    return align_gates(rate, r.dim(), dim).to(r.dtype) if isinstance(rate, Tensor) else rate


def next_values_of(r: Tensor, v: Tensor | None, last: Tensor | None, dim: int) -> Tensor:
    after = torch.zeros_like(r) if v is None else next_step(v, dim)
    if last is None:
        return after
    return torch.where(_is_last(r, dim), last.expand(r.shape[:dim] + r.shape[dim + 1 :]).unsqueeze(dim), after)


def _is_last(r: Tensor, dim: int) -> Tensor:
    if hasattr(r, "device_mesh"):  # a DTensor, which takes no plain tensor beside it
        steps = r.new_ones(r.size(dim), dtype=torch.int64).cumsum(0) - 1
    else:
        steps = torch.arange(r.size(dim), device=r.device)
    return (steps == r.size(dim) - 1).view([-1 if d == dim else 1 for d in range(r.dim())])


def or_last(ends: Tensor | None, r: Tensor, dim: int) -> Tensor:
    last = _is_last(r, dim)
    return last.expand(r.shape) if ends is None else ends | last


def as_bool(flag: Tensor) -> Tensor:
    return flag if flag.dtype == torch.bool else flag != 0


def _none(rewards: Tensor) -> Tensor:
    return rewards.new_empty(0)
