"""tianshou's advantages over torch_dcs_ops.returns, without a function that numba compiles first.

`enable()` puts `gae` in the place of the private function that compute_episodic_return calls: its arguments, what it
makes of a buffer's unfinished episodes and its results stay tianshou's. `disable()` takes it out again.

tianshou is imported by `enable()` alone: 2.0 or later, or 1.x; developed with 2.0.1.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import returns
from ._libraries import as_tensor, checked, like, version

if TYPE_CHECKING:
    from ._libraries import Array, Arrays

__all__ = ["disable", "enable", "gae"]

_PATCHED = (("tianshou.algorithm.algorithm_base", "_gae"), ("tianshou.policy.base", "_gae_return"))  # 2.x, 1.x
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}


def gae(v_s: Arrays, v_s_: Arrays, rew: Array, end_flag: Arrays, gamma: float, gae_lambda: float) -> Array:
    """Advantages of steps that lie one behind the other, (T,), in float64 as tianshou's.

    Args:
        v_s, v_s_: values of the states and of the next ones, these 0 where an episode terminated.
        rew, end_flag: rewards, and whether an episode ended with the step; NumPy arrays or tensors, as the values.

    Returns:
        what `rew` is, a NumPy array or a tensor.
    """
    values, next_values, rewards = (as_tensor(array).to(torch.float64) for array in (v_s, v_s_, rew))
    advantages, _ = returns.gae(
        rewards, values, next_values=next_values, terminated=None, truncated=as_tensor(end_flag) != 0, gamma=gamma,
        gae_lambda=gae_lambda, check_discounts=False,
    )  # fmt: skip
    return like(advantages, rew)


def enable() -> None:
    """From here on compute_episodic_return of every tianshou algorithm takes `gae`; a second call does nothing.

    Raises:
        ImportError: tianshou is not installed.
        RuntimeError: the function that it replaces is not there, or has other parameters.
    """
    if _replaced:
        return
    importlib.import_module("tianshou")
    for module_name, name in _PATCHED:
        if importlib.util.find_spec(module_name.rpartition(".")[0]) is not None:
            module = importlib.import_module(module_name)
            original = checked("tianshou", name, getattr(module, name, None), gae)
            setattr(module, name, gae)
            _replaced[module_name, name] = original
            return
    raise RuntimeError(f"tianshou.enable: tianshou must have one of {_PATCHED}, got version {version('tianshou')}")


def disable() -> None:
    """Gives tianshou its own function back; without `enable()` it does nothing."""
    for (module_name, name), original in _replaced.items():
        setattr(importlib.import_module(module_name), name, original)
    _replaced.clear()
