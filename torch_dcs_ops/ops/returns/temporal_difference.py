"""`dcs::_temporal_difference_scan`, the private op that torch_dcs_ops.returns is made of.

Here: validation, the fake, the Python kernel, autograd, vmap, autocast and FLOPs. Its definition is in
reference/returns.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta

from ... import _registry
from ...reference import returns as reference
from ...reference.returns import NStepCall, TemporalDifferenceCall
from .._common import autocast, flops
from .._common.autograd import any_requires_grad, apply, below, tracked
from .._common.triton import TRITON_KEYS, launchers
from .._common.vmap import BATCHED
from ..scan.vmap import ScanBatch
from .autograd import ReturnsFunction, takes
from .formulas import formulas
from .validate import check_returns

_OP = "_temporal_difference_scan"
_op = _registry.temporal_difference_scan
_DIM = TemporalDifferenceCall._fields.index("dim")
_Results = tuple[Tensor, Tensor, Tensor]
_Call = TypeVar("_Call", TemporalDifferenceCall, NStepCall)

# Whether a graph that is being traced becomes kernels that scans are part of: then it is given the formulas, to fuse
# with what is around them. Set by compile/scan_lowering.py, as nothing here imports anything there.
fuses_in_compiled_code: Callable[[Tensor, int], bool] | None = None
# The mark of a call in a graph that stays a call all the same (compile/passes/standalone_returns.py).
STAYS_A_CALL = "dcs_stays_a_call"


def _checked(args: tuple[Any, ...]) -> TemporalDifferenceCall:
    """The arguments, `dim` as a non-negative index."""
    call = TemporalDifferenceCall(*args)
    dim = check_returns(_OP, call)
    return call if dim == call.dim else call._replace(dim=dim)


def _reference(*args: Any) -> _Results:
    return reference.temporal_difference_scan(_checked(args))


def _triton(*args: Any) -> _Results:
    module = launchers("returns.temporal_difference")
    if module is None:
        return _reference(*args)
    results: _Results = module.temporal_difference_scan(_checked(args))
    return results


def _fake(*args: Any) -> _Results:
    call = _checked(args)
    rewards = call.rewards
    needs = (call.need_advantages, call.need_targets, call.need_pg)
    a, b, c = (torch.empty_like(rewards) if need else rewards.new_empty(0) for need in needs)
    return a, b, c


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    rewards, dim = args[0], args[_DIM]
    if any_requires_grad(*args):
        call = _checked(args)
        if takes(call):
            recorded: _Results = apply(ReturnsFunction, *call)
            return recorded
    if tracked(*args) or (
        fuses_in_compiled_code is not None and not _stays_a_call() and fuses_in_compiled_code(rewards, dim)
    ):
        return formulas(_checked(args))
    results: _Results = below(_op, keyset, *args)
    return results


def _stays_a_call() -> bool:
    return bool(get_current_meta().get(STAYS_A_CALL))


def batched(call: _Call) -> tuple[ScanBatch, _Call]:
    """A call with the batch in front of every tensor; `dim` is not negative."""
    ndim = call.rewards.dim()
    batch = ScanBatch(*(argument if isinstance(argument, Tensor) else None for argument in call))
    moved: dict[str, Any] = {}
    for index, name in enumerate(call._fields):
        if name == "bootstrap_value":
            moved[name] = batch.row(index, ndim)
        elif name in ("gamma", "trace"):
            moved[name] = batch.gamma(index, ndim)
        elif isinstance(call[index], Tensor):
            moved[name] = batch.full(index, ndim)
    return batch, call._replace(dim=call.dim + 1, **moved)


def _vmap(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    call = _checked(args)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        batch, call = batched(call)
        results = _op(*call)
        needs = (call.need_advantages, call.need_targets, call.need_pg)
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
