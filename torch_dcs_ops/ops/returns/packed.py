"""Returns of packed sequences (`cu_seqlens`): each ends as the data does, and bootstraps with a value of its own."""

from __future__ import annotations

from typing import Any

from ...reference.returns import TemporalDifferenceCall
from .._common.autocast import autocast_operands
from .._common.validate import known
from ..scan.packed import added_at, check_cu_seqlens, check_of_sequences, entries, first_steps
from .call import Operands, promoted
from .formulas import as_bool, next_step
from .validate import check_return_types, check_returns


def packed_operands(
    op: str, operands: Operands, cu_seqlens: Any, time_dim: int, values_name: str = "values"
) -> Operands:
    """Operands of one call by next_values, in which every sequence's last step is truncated."""
    rewards, values, next_values, bootstrap_value, terminated, truncated = operands
    check_return_types(op, rewards, time_dim, **{values_name: values}, next_values=next_values,
                       bootstrap_value=bootstrap_value, terminated=terminated, truncated=truncated)  # fmt: skip
    operands, _, _ = promoted(autocast_operands(*operands))
    rewards, values, next_values, bootstrap_value, terminated, truncated = operands
    call = TemporalDifferenceCall(
        rewards, values, next_values, None, terminated, truncated, dim=time_dim, need_targets=True
    )
    dim = check_returns(op, call, values_name=values_name)
    check_cu_seqlens(op, cu_seqlens, "rewards", rewards, dim)
    cut_off = None if truncated is None else as_bool(truncated)
    lasts = first_steps(cu_seqlens, rewards, dim, True)
    ends = lasts if cut_off is None else cut_off | lasts
    if next_values is None:
        next_values = rewards.new_zeros(()).expand(rewards.shape) if values is None else next_step(values, dim)
        next_values = next_values.masked_fill(ends, 0.0)
        if bootstrap_value is not None:
            check_of_sequences(op, "bootstrap_value", bootstrap_value, "rewards", rewards, dim, cu_seqlens)
            if not known(rewards.size(dim) == 0):
                at, used = entries(cu_seqlens, rewards, dim, True)
                if cut_off is not None:
                    used = used & ~cut_off.index_select(dim, at)
                next_values = added_at(next_values, dim, at, used, bootstrap_value)
    return rewards, values, next_values, None, terminated, ends
