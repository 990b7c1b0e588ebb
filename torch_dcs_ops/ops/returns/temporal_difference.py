"""`dcs::_temporal_difference_scan`, the private op that torch_dcs_ops.returns is made of.

Here: validation, the fake, the Python kernel, autograd, vmap, autocast and FLOPs. Its definition is in
reference/returns.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta

from ... import _registry
from ...reference import returns as reference
from .._common import autocast, flops
from .._common.autograd import below, tracked
from .._common.triton import TRITON_KEYS, launchers
from .._common.vmap import BATCHED
from ..scan.vmap import ScanBatch
from .formulas import formulas
from .validate import check_returns

_OP = "_temporal_difference_scan"
_op = _registry.temporal_difference_scan
_Results = tuple[Tensor, Tensor, Tensor]

# Whether a graph that is being traced becomes kernels that scans are part of: then it is given the formulas, to fuse
# with what is around them. Set by compile/scan_lowering.py, as nothing here imports anything there.
fuses_in_compiled_code: Callable[[Tensor, int], bool] | None = None
# The mark of a call in a graph that stays a call all the same (compile/passes/standalone_returns.py).
STAYS_A_CALL = "dcs_stays_a_call"


def _check(
    rewards: Tensor,
    values: Tensor | None,
    next_values: Tensor | None,
    bootstrap_value: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    gamma: Tensor | None,
    gamma_value: float,
    trace: Tensor | None,
    trace_value: float,
    rhos: Tensor | None,
    clip_rho: float,
    clip_c: float,
    clip_pg: float,
    dim: int,
    need_advantages: bool,
    need_targets: bool,
    need_pg: bool,
) -> int:
    return check_returns(
        _OP, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, trace, rhos, dim,
        need_advantages or need_pg,
    )  # fmt: skip


def _with_dim(args: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*args[:14], dim, *args[15:])


def _reference(*args: Any) -> _Results:
    return reference.temporal_difference_scan(*_with_dim(args, _check(*args)))


def _triton(*args: Any) -> _Results:
    module = launchers("returns.temporal_difference")
    if module is None:
        return _reference(*args)
    results: _Results = module.temporal_difference_scan(*_with_dim(args, _check(*args)))
    return results


def _fake(*args: Any) -> _Results:
    _check(*args)
    rewards, needs = args[0], args[15:]
    a, b, c = (torch.empty_like(rewards) if need else rewards.new_empty(0) for need in needs)
    return a, b, c


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    rewards, dim = args[0], args[14]
    if tracked(*args) or (
        fuses_in_compiled_code is not None and not _stays_a_call() and fuses_in_compiled_code(rewards, dim)
    ):
        return formulas(*_with_dim(args, _check(*args)))
    results: _Results = below(_op, keyset, *args)
    return results


def _stays_a_call() -> bool:
    return bool(get_current_meta().get(STAYS_A_CALL))


# Positions of operands of rewards' shape, of one entry a row, and of discounts.
_FULL = (0, 1, 2, 4, 5, 10)
_ROW = (3,)
_DISCOUNTS = (6, 8)


def batched_operands(args: tuple[Any, ...]) -> tuple[ScanBatch, list[Any]]:
    """The arguments up to rhos, or to the ones before, with the batch in front of every tensor."""
    ndim = args[0].dim()
    batch = ScanBatch(*[arg if isinstance(arg, Tensor) else None for arg in args])
    operands = list(args)
    for places, placed in ((_FULL, batch.full), (_ROW, batch.row), (_DISCOUNTS, batch.gamma)):
        for index in places:
            if index < len(args):
                operands[index] = placed(index, ndim)
    return batch, operands


def _vmap(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    dim = _check(*args)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        batch, operands = batched_operands(args[:11])
        results = _op(*operands, *args[11:14], dim + 1, *args[15:])
        needs = args[15:]
        a, b, c = (
            batch.wrap(result if need else result.new_empty(batch.size, 0))
            for result, need in zip(results, needs, strict=True)
        )
    return a, b, c


def _flops_of(rewards_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The difference is a product and two sums, the scan a product and a sum; targets are a sum more.
    return 6 * int(torch.Size(rewards_shape).numel())


_registry.LIBRARY.impl(_OP, _reference, "CompositeExplicitAutograd")
for _key in TRITON_KEYS:
    _registry.LIBRARY.impl(_OP, _triton, _key)
torch.library.register_fake(f"dcs::{_OP}", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_OP, _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl(_OP, _vmap, "FuncTorchBatched", with_keyset=True)
autocast.register(_OP, _op)
flops.register(torch.ops.dcs._temporal_difference_scan, _flops_of)
