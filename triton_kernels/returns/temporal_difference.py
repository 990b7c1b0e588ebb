"""The temporal difference scan: `temporal_difference_scan`, with the meaning of the private op of that name.

A program takes R rows (columns, if time-major) and goes over time from the last step back, a tile of J groups of V
steps at a time (tile.py): differences step by step, a scan over the groups, then the recurrence again from each group's
carry. All of it is in float64, as in the reference: an addend that float32 would lose counts over many steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import float_bits, on_device
from ..common.layout import Layout
from ..scan.gamma import load_gamma
from ..scan.lanes import last_lane, previous_lane, scan_lanes
from ..scan.tile import group_totals, load_steps, positions, store_steps, within
from .rollout import Rollout, row_rate_of

if TYPE_CHECKING:
    from torch_dcs_ops.reference.returns import TemporalDifferenceCall

# Below 8 neighbors a row of them is less than a 32-byte sector (see scan.py).
NEIGHBORS = 8


@triton.jit
def clipped(rho, most):
    """A minimum that keeps a NaN."""
    return tl.where(rho > most, most, rho)


@triton.jit
def rates_of(
    row, position, valid, stride_time, row_rate, P: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    GATES: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """gamma, or the trace, of V steps, in float64."""
    if GATES == "step":
        steps = load_steps(row, position, valid, stride_time, 0, None, P, J, V, True, LAYOUT)
        rates = ()
        for i in tl.static_range(V):
            rates = rates + (steps[i].to(tl.float64),)
        return rates
    else:
        rates = ()
        for _ in tl.static_range(V):
            rates = rates + (row_rate,)
        return rates


@triton.jit
def differences_of(
    rewards, values, following, terminates, truncates, rhos, gammas, traces, bootstrap, first, segment,
    clip_rho, clip_c, R: tl.constexpr, J: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, AHEAD: tl.constexpr,
    NEXT: tl.constexpr, TERMINATED: tl.constexpr, TRUNCATED: tl.constexpr, RHOS: tl.constexpr,
):  # fmt: skip
    """Of V steps: the temporal differences, these times the clipped rho, the gates between steps and where they cut.

    `first`: the index of each group's first step, in scan order.
    """
    differences = ()
    deltas = ()
    gates = ()
    cuts = ()
    for i in tl.static_range(V):
        last = (first + i + segment) == 0
        terminal = last & False
        truncation = last & False
        if TERMINATED:
            terminal = terminates[i] != 0
        if TRUNCATED:
            truncation = truncates[i] != 0
        cut = last | terminal | truncation
        after = tl.zeros((R, J), tl.float64)
        if NEXT or VALUES or AHEAD:
            after = following[i].to(tl.float64)
        if not NEXT:
            after = tl.where(last, bootstrap, after)
            after = tl.where(truncation, 0.0, after)
        weight = gammas[i]
        gate = gammas[i] * traces[i]
        drops = terminal
        if not VALUES:
            weight = tl.where(cut, weight, weight - gate)
            drops = drops | (weight == 0)
        difference = rewards[i].to(tl.float64) + tl.where(drops, 0.0, weight * after)
        if VALUES:
            difference = difference - values[i].to(tl.float64)
        delta = difference
        if RHOS:
            rho = rhos[i].to(tl.float64)
            delta = clipped(rho, clip_rho) * difference
            gate = gate * clipped(rho, clip_c)
        differences = differences + (difference,)
        deltas = deltas + (delta,)
        gates = gates + (gate + tl.zeros((R, J), tl.float64),)
        cuts = cuts + (cut.to(tl.int32),)
    return differences, deltas, gates, cuts


@triton.jit
def carries_of(deltas, gates, cuts, carry, R: tl.constexpr, J: tl.constexpr, V: tl.constexpr):
    """The advantage that enters each group of V steps, from the one that enters the tile, and that which leaves it."""
    total, product, any_cut = group_totals(deltas, gates, 0.0, cuts, tl.float64, V, "step", True)
    total, product, any_cut = scan_lanes(total, product, any_cut, R, J, "step", True, True)
    before = previous_lane(total, 0.0, R, J)
    weight_before = previous_lane(product, 1.0, R, J)
    cut_before = previous_lane(any_cut, 0, R, J)
    advantage = tl.where(cut_before != 0, before, before + weight_before * carry)
    last_total = last_lane(total, R, J)
    carry = tl.where(last_lane(any_cut, R, J) != 0, last_total, last_total + last_lane(product, R, J) * carry)
    return advantage, carry


@triton.jit
def advantages_of(
    advantage, differences, deltas, gates, cuts, values, rhos, gammas, traces, clip_pg,
    V: tl.constexpr, VALUES: tl.constexpr, RHOS: tl.constexpr, PG: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """The recurrence over V steps from the advantage that enters them: (advantages, targets, pg_advantages)."""
    advantages = ()
    targets = ()
    pg_advantages = ()
    for i in tl.static_range(V):
        if PG:
            pg = tl.where(cuts[i] != 0, differences[i], differences[i] + gammas[i] * traces[i] * advantage)
            if RHOS:
                pg = clipped(rhos[i].to(tl.float64), clip_pg) * pg
            pg_advantages = pg_advantages + (pg.to(RESULT),)
        advantage = tl.where(cuts[i] != 0, deltas[i], deltas[i] + gates[i] * advantage)
        advantages = advantages + (advantage.to(RESULT),)
        target = advantage
        if VALUES:
            target = advantage + values[i].to(tl.float64)
        targets = targets + (target.to(RESULT),)
    return advantages, targets, pg_advantages


@triton.jit(do_not_specialize=["gamma_bits", "trace_bits", "clip_rho_bits", "clip_c_bits", "clip_pg_bits"])
def scan_differences(
    reward_ptr, value_ptr, next_ptr, bootstrap_ptr, terminated_ptr, truncated_ptr, gamma_ptr, trace_ptr, rho_ptr,
    advantage_ptr, target_ptr, pg_ptr,
    gamma_bits: tl.int64, trace_bits: tl.int64, clip_rho_bits: tl.int64, clip_c_bits: tl.int64, clip_pg_bits: tl.int64,
    T, rows, inner,
    reward_outer, reward_time, reward_inner, value_outer, value_time, value_inner, next_outer, next_time, next_inner,
    bootstrap_outer, bootstrap_inner, terminated_outer, terminated_time, terminated_inner,
    truncated_outer, truncated_time, truncated_inner, gamma_outer, gamma_time, gamma_inner,
    trace_outer, trace_time, trace_inner, rho_outer, rho_time, rho_inner,
    advantage_outer, advantage_time, advantage_inner, target_outer, target_time, target_inner,
    pg_outer, pg_time, pg_inner,
    R: tl.constexpr, J: tl.constexpr, V: tl.constexpr, INDEX: tl.constexpr, LAYOUT: tl.constexpr,
    VALUES: tl.constexpr, AHEAD: tl.constexpr, NEXT: tl.constexpr, BOOTSTRAP: tl.constexpr, TERMINATED: tl.constexpr,
    TRUNCATED: tl.constexpr, GAMMA: tl.constexpr, TRACE: tl.constexpr, RHOS: tl.constexpr,
    ADVANTAGES: tl.constexpr, TARGETS: tl.constexpr, PG: tl.constexpr,
):  # fmt: skip
    """One program: R rows. Operands are addressed by (outer, time, inner) strides in elements; GAMMA, TRACE: tile.py's
    gates. VALUES: every step's own are read; AHEAD: those of the next states alone."""
    TILE: tl.constexpr = J * V
    # Not from float64 to bfloat16 in one: the interpreter does not know how.
    RESULT: tl.constexpr = tl.float32 if reward_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.float64
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    row_valid = row < rows
    outer = row // inner
    within_outer = row % inner
    segment = tl.zeros((R, 1), tl.int32)
    group = tl.arange(0, J)[None, :] * V

    reward_row = reward_ptr + outer * reward_outer + within_outer * reward_inner
    value_row = value_ptr + outer * value_outer + within_outer * value_inner
    next_row = next_ptr + outer * next_outer + within_outer * next_inner
    terminated_row = terminated_ptr + outer * terminated_outer + within_outer * terminated_inner
    truncated_row = truncated_ptr + outer * truncated_outer + within_outer * truncated_inner
    gamma_row = gamma_ptr + outer * gamma_outer + within_outer * gamma_inner
    trace_row = trace_ptr + outer * trace_outer + within_outer * trace_inner
    rho_row = rho_ptr + outer * rho_outer + within_outer * rho_inner
    row_gamma = row_rate_of(gamma_row, gamma_bits, row_valid, GAMMA)
    row_trace = row_rate_of(trace_row, trace_bits, row_valid, TRACE)
    bootstrap = tl.zeros((R, 1), tl.float64)
    if BOOTSTRAP:
        bootstrap_row = bootstrap_ptr + outer * bootstrap_outer + within_outer * bootstrap_inner
        bootstrap = tl.load(bootstrap_row, mask=row_valid, other=0).to(tl.float64)
    clip_rho = load_gamma(reward_row, clip_rho_bits, "scalar")
    clip_c = load_gamma(reward_row, clip_c_bits, "scalar")
    clip_pg = load_gamma(reward_row, clip_pg_bits, "scalar")

    carry = tl.zeros((R, 1), tl.float64)
    begin = tl.full((), 0, INDEX)
    for _ in range((T + TILE - 1) // TILE):
        position, valid, index = positions(begin, segment, row_valid, T, 1, J, V, True, LAYOUT)
        rewards = load_steps(reward_row, position, valid, reward_time, 0, None, R, J, V, True, LAYOUT)
        values = rewards
        following = rewards
        if VALUES:
            values = load_steps(value_row, position, valid, value_time, 0, None, R, J, V, True, LAYOUT)
        if NEXT:
            following = load_steps(next_row, position, valid, next_time, 0, None, R, J, V, True, LAYOUT)
        elif VALUES or AHEAD:
            there = (position[0] + 1,)
            exists = within(valid, index, 1, T, LAYOUT)
            following = load_steps(value_row, there, exists, value_time, 0, None, R, J, V, True, LAYOUT)
        terminates = rewards
        truncates = rewards
        if TERMINATED:
            terminates = load_steps(terminated_row, position, valid, terminated_time, 0, None, R, J, V, True, LAYOUT)
        if TRUNCATED:
            truncates = load_steps(truncated_row, position, valid, truncated_time, 0, None, R, J, V, True, LAYOUT)
        rhos = rewards
        if RHOS:
            rhos = load_steps(rho_row, position, valid, rho_time, 0, None, R, J, V, True, LAYOUT)
        gammas = rates_of(gamma_row, position, valid, gamma_time, row_gamma, R, J, V, GAMMA, LAYOUT)
        traces = rates_of(trace_row, position, valid, trace_time, row_trace, R, J, V, TRACE, LAYOUT)

        differences, deltas, gates, cuts = differences_of(
            rewards, values, following, terminates, truncates, rhos, gammas, traces, bootstrap, begin + group,
            segment, clip_rho, clip_c, R, J, V, VALUES, AHEAD, NEXT, TERMINATED, TRUNCATED, RHOS,
        )  # fmt: skip

        advantage, carry = carries_of(deltas, gates, cuts, carry, R, J, V)
        advantages, targets, pg_advantages = advantages_of(
            advantage, differences, deltas, gates, cuts, values, rhos, gammas, traces, clip_pg, V, VALUES, RHOS, PG,
            RESULT,
        )  # fmt: skip
        if ADVANTAGES:
            advantage_row = advantage_ptr + outer * advantage_outer + within_outer * advantage_inner
            store_steps(advantage_row, position, valid, advantage_time, advantages, R, J, V, True, LAYOUT)
        if TARGETS:
            target_row = target_ptr + outer * target_outer + within_outer * target_inner
            store_steps(target_row, position, valid, target_time, targets, R, J, V, True, LAYOUT)
        if PG:
            pg_row = pg_ptr + outer * pg_outer + within_outer * pg_inner
            store_steps(pg_row, position, valid, pg_time, pg_advantages, R, J, V, True, LAYOUT)
        begin += TILE


def temporal_difference_scan(call: TemporalDifferenceCall) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, targets, pg_advantages) like `rewards`, of the shape (0,) where not needed, in one launch.

    The meaning of ``dcs::_temporal_difference_scan`` (reference/returns.py), whose arguments are validated already; any
    strides, float16 to float64.
    """
    rewards, rhos = call.rewards, call.rhos
    needs = (call.need_advantages, call.need_targets, call.need_pg)
    outputs = [torch.empty_like(rewards) if need else rewards.new_empty(0) for need in needs]
    if rewards.numel() == 0 or not any(needs):
        return outputs[0], outputs[1], outputs[2]
    layout = Layout(outputs[needs.index(True)], call.dim)
    rollout = Rollout(layout, call)
    rollout.constants |= {
        "VALUES": call.has_own_values,
        "AHEAD": call.values is not None and not call.has_own_values,
    }
    results = [layout.steps(output if need else None) for output, need in zip(outputs, needs, strict=True)]
    others = [layout.steps(rhos), *results]
    timed = [*rollout.full, *rollout.ends, *rollout.discounts, *others]
    time_major = layout.inner >= NEIGHBORS
    vector = min(16 // rewards.element_size(), 4)
    lanes = 1 if time_major else min(32, triton.next_power_of_2(triton.cdiv(layout.length, vector)))
    steps = min(4 if time_major else vector, triton.next_power_of_2(layout.length))
    # A thread a column, or four warps' worth of lanes.
    most = 128 // lanes
    program_rows = min(most, triton.next_power_of_2(layout.rows))
    reach = max(abs(operand.time) for operand in timed) * (layout.length + 2 * lanes * steps)
    with on_device(rewards):
        scan_differences[(triton.cdiv(layout.rows, program_rows),)](
            *rollout.pointers(*others), rollout.gammas.bits, rollout.traces.bits,
            float_bits(call.clip_rho), float_bits(call.clip_c), float_bits(call.clip_pg),
            layout.length, layout.rows, layout.inner, *rollout.strides(*others),
            R=program_rows, J=lanes, V=steps, INDEX=tl.int32 if reach < 2**31 else tl.int64,
            LAYOUT="serial" if time_major else "vectors",
            RHOS=rhos is not None, ADVANTAGES=needs[0], TARGETS=needs[1], PG=needs[2], **rollout.constants,
            num_warps=max(1, program_rows * lanes // 32),
        )  # fmt: skip
    return outputs[0], outputs[1], outputs[2]
