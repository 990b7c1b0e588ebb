"""`dcs::_n_step_returns`, the private op of torch_dcs_ops.returns.n_step_returns.

Here: validation, the fake, the Python kernel, autograd, vmap, autocast and FLOPs. Its definition is in
reference/returns.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference import returns as reference
from ...reference.returns import NStepCall
from .._common import autocast, flops
from .._common.autograd import any_requires_grad, apply, below, tracked
from .._common.triton import TRITON_KEYS, launchers
from .._common.vmap import BATCHED
from .autograd import NStepFunction, takes
from .formulas import n_step_formulas
from .temporal_difference import batched
from .validate import check_n, check_returns

_OP = "_n_step_returns"
_op = _registry.n_step_returns


def _checked(args: tuple[Any, ...]) -> NStepCall:
    """The arguments, `dim` as a non-negative index."""
    call = NStepCall(*args)
    dim = check_returns(_OP, call)
    check_n(_OP, call.n)
    return call if dim == call.dim else call._replace(dim=dim)


def _reference(*args: Any) -> Tensor:
    return reference.n_step_returns(_checked(args))


def _triton(*args: Any) -> Tensor:
    module = launchers("returns.n_step")
    if module is None:
        return _reference(*args)
    targets: Tensor = module.n_step_returns(_checked(args))
    return targets


def _fake(*args: Any) -> Tensor:
    return torch.empty_like(_checked(args).rewards)


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
    if any_requires_grad(*args):
        call = _checked(args)
        if takes(call):
            recorded: Tensor = apply(NStepFunction, *call)
            return recorded
    if tracked(*args):
        return n_step_formulas(_checked(args))
    targets: Tensor = below(_op, keyset, *args)
    return targets


def _vmap(keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
    call = _checked(args)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        batch, call = batched(call)
        targets: Tensor = batch.wrap(_op(*call))
    return targets


def _flops_of(rewards_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # Counted as a scan is: the next value, and a product and a sum; a window's own steps are a matter of the kernel.
    return 4 * int(torch.Size(rewards_shape).numel())


_registry.LIBRARY.impl(_OP, _reference, "CompositeExplicitAutograd")
for _key in TRITON_KEYS:
    _registry.LIBRARY.impl(_OP, _triton, _key)
torch.library.register_fake(f"dcs::{_OP}", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_OP, _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl(_OP, _vmap, "FuncTorchBatched", with_keyset=True)
autocast.register(_OP, _op)
flops.register(torch.ops.dcs._n_step_returns, _flops_of)
