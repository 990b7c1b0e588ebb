"""Returns over n steps: `n_step_returns`, with the meaning of the private op `_n_step_returns`.

A program takes a block of results, neighbors in memory, and goes through their windows from the last step back: n
reads of every step, all but the first of them from caches. In float64, as in the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import on_device
from ..common.layout import Layout
from .rollout import Rollout, row_rate_of

if TYPE_CHECKING:
    from torch_dcs_ops.reference.returns import NStepCall

BLOCK = 256


@triton.jit
def rate_at(row, offset, row_rate, valid, GATES: tl.constexpr):
    """gamma, or the trace, of a step, in float64."""
    if GATES == "step":
        return tl.load(row + offset, mask=valid, other=0).to(tl.float64)
    else:
        return row_rate


@triton.jit(do_not_specialize=["gamma_bits", "trace_bits", "n"])
def n_step(
    reward_ptr, value_ptr, next_ptr, bootstrap_ptr, terminated_ptr, truncated_ptr, gamma_ptr, trace_ptr, target_ptr,
    gamma_bits: tl.int64, trace_bits: tl.int64, n: tl.int64,
    T, outer_size, inner_size,
    reward_outer, reward_time, reward_inner, value_outer, value_time, value_inner, next_outer, next_time, next_inner,
    bootstrap_outer, bootstrap_inner, terminated_outer, terminated_time, terminated_inner,
    truncated_outer, truncated_time, truncated_inner, gamma_outer, gamma_time, gamma_inner,
    trace_outer, trace_time, trace_inner, target_outer, target_time, target_inner,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, NEXT: tl.constexpr, BOOTSTRAP: tl.constexpr, TERMINATED: tl.constexpr,
    TRUNCATED: tl.constexpr, GAMMA: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK results in the order (outer, time, inner). Strides are in elements; GAMMA, TRACE: tile.py's
    gates."""
    # Not from float64 to bfloat16 in one: the interpreter does not know how.
    RESULT: tl.constexpr = tl.float32 if reward_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.float64
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.zeros((), tl.int64) + T
    inside = index < steps * outer_size * inner_size
    inner = index % inner_size
    first = index // inner_size % steps
    outer = index // inner_size // steps
    reward_row = reward_ptr + outer * reward_outer + inner * reward_inner
    value_row = value_ptr + outer * value_outer + inner * value_inner
    next_row = next_ptr + outer * next_outer + inner * next_inner
    terminated_row = terminated_ptr + outer * terminated_outer + inner * terminated_inner
    truncated_row = truncated_ptr + outer * truncated_outer + inner * truncated_inner
    gamma_row = gamma_ptr + outer * gamma_outer + inner * gamma_inner
    trace_row = trace_ptr + outer * trace_outer + inner * trace_inner
    row_gamma = row_rate_of(gamma_row, gamma_bits, inside, GAMMA)
    row_trace = row_rate_of(trace_row, trace_bits, inside, TRACE)
    bootstrap = tl.zeros((BLOCK,), tl.float64)
    if BOOTSTRAP:
        bootstrap_row = bootstrap_ptr + outer * bootstrap_outer + inner * bootstrap_inner
        bootstrap = tl.load(bootstrap_row, mask=inside, other=0).to(tl.float64)

    result = tl.zeros((BLOCK,), tl.float64)
    back = n * 0
    while back < n:
        t = first + (n - 1 - back)
        valid = inside & (t < steps)
        last = t == steps - 1
        reward = tl.load(reward_row + t * reward_time, mask=valid, other=0).to(tl.float64)
        after = tl.zeros((BLOCK,), tl.float64)
        if NEXT:
            after = tl.load(next_row + t * next_time, mask=valid, other=0).to(tl.float64)
        elif VALUES:
            after = tl.load(value_row + (t + 1) * value_time, mask=valid & (t + 1 < steps), other=0).to(tl.float64)
        terminal = last & False
        truncation = last & False
        if TERMINATED:
            terminal = tl.load(terminated_row + t * terminated_time, mask=valid, other=0) != 0
        if TRUNCATED:
            truncation = tl.load(truncated_row + t * truncated_time, mask=valid, other=0) != 0
        if not NEXT:
            after = tl.where(last, bootstrap, after)
            after = tl.where(truncation, 0.0, after)
        gamma = rate_at(gamma_row, t * gamma_time, row_gamma, valid, GAMMA)
        rate = gamma * rate_at(trace_row, t * trace_time, row_trace, valid, TRACE)
        closes = (back == 0) | last | terminal | truncation | (rate == 0)
        weight = tl.where(closes, gamma, gamma - rate)
        own = reward + tl.where(terminal | (weight == 0), 0.0, weight * after)
        # Steps beyond the data are in no window.
        result = tl.where(valid, tl.where(closes, own, own + rate * result), result)
        back += 1
    target_row = target_ptr + outer * target_outer + inner * target_inner
    tl.store(target_row + first * target_time, result.to(RESULT).to(target_ptr.dtype.element_ty), mask=inside)


def n_step_returns(call: NStepCall) -> Tensor:
    """Targets like `rewards`, in one launch.

    The meaning of ``dcs::_n_step_returns`` (reference/returns.py), whose arguments are validated already; any strides,
    float16 to float64.
    """
    rewards = call.rewards
    targets = torch.empty_like(rewards)
    if rewards.numel() == 0:
        return targets
    layout = Layout(targets, call.dim)
    rollout = Rollout(layout, call)
    result = layout.steps(targets)
    with on_device(rewards):
        n_step[(triton.cdiv(rewards.numel(), BLOCK),)](
            *rollout.pointers(result), rollout.gammas.bits, rollout.traces.bits,
            min(call.n, layout.length), layout.length, layout.outer, layout.inner, *rollout.strides(result),
            BLOCK=BLOCK, **rollout.constants,
        )  # fmt: skip
    return targets
