"""How the ops become part of compiled models: ``torch.compile(model, backend="dcs")``, or `enable` for every model.

Both fuse linear + cross_entropy into `torch.ops.dcs.linear_cross_entropy` where a model has them, and this package's
scans into the kernels around them. Why a loss was left as it is says the logger ``torch_dcs_ops`` once; with
``TORCH_LOGS="+torch_dcs_ops"`` it shows the graphs before and after.
"""

from __future__ import annotations

import sys
from typing import Any

from ..ops.linear_cross_entropy import compiled as _compiled
from .inductor import tracing as _tracing

__all__ = ["disable", "enable", "is_enabled"]

# Ops import nothing of this folder.
_compiled.is_traced = _tracing.is_traced


def enable(*, minimum_logits: int | None = None, memory_budget: int | None = None) -> None:
    """Makes ``torch.compile`` with its ordinary backend do what ``backend="dcs"`` does, in this process.

    Functions that are compiled already are compiled again at their next call. Calling it again changes the options.

    Args:
        minimum_logits: a loss of fewer logits (rows times classes) is left to the compiler. None: 2**22.
        memory_budget: bytes of logits that a fused loss may hold at a time. None: that of
            :func:`torch_dcs_ops.linear_cross_entropy`, whose chunks do not grow with the rows. On CUDA a training step
            in bfloat16 keeps the gradient of all logits for its backward where the budget has room for them.

    Raises:
        ValueError: minimum_logits is not an integer >= 0, or memory_budget not one >= 1.
    """
    from .backend import hook_after
    from .inductor import configuration, support
    from .passes.linear_cross_entropy import MINIMUM_LOGITS

    earlier = configuration.pre_grad_passes()
    hook = hook_after(earlier, MINIMUM_LOGITS if minimum_logits is None else minimum_logits, memory_budget)
    if support.can_hook() and earlier != hook:
        configuration.set_pre_grad_passes(hook)


def disable() -> None:
    """Undoes `enable`. Functions that are compiled already are compiled again at their next call."""
    from .graph_pass import Hook
    from .inductor import configuration

    if is_enabled():
        rest: list[Any] = []
        for one in configuration.passes_of(configuration.pre_grad_passes()):
            rest += one.earlier if isinstance(one, Hook) else [one]
        configuration.set_pre_grad_passes(rest if len(rest) > 1 else rest[0] if rest else None)


def is_enabled() -> bool:
    """Whether `enable` is in force."""
    if "torch_dcs_ops.compile.graph_pass" not in sys.modules:
        return False  # and the compiler, whose import takes a while, need not be asked
    from .graph_pass import Hook
    from .inductor import configuration

    return any(isinstance(one, Hook) for one in configuration.passes_of(configuration.pre_grad_passes()))
