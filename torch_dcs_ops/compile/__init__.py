"""How the ops become part of compiled models: ``torch.compile(model, backend="dcs")``, or `enable` for every model.

Both fuse linear + cross_entropy into `torch.ops.dcs.linear_cross_entropy` where a model has them, and this package's
scans into the kernels around them. Why a loss was left as it is says the logger ``torch_dcs_ops`` once; with
``TORCH_LOGS="+torch_dcs_ops"`` it shows the graphs before and after.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.linear_cross_entropy import compiled as _compiled
from .inductor import tracing as _tracing

if TYPE_CHECKING:
    from .explanation import Explanation

__all__ = ["disable", "enable", "explain", "is_enabled"]

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
    from .backend import hook_after, tell_of_cached_graphs
    from .graph_pass import log
    from .inductor import configuration, support
    from .passes.linear_cross_entropy import MINIMUM_LOGITS

    earlier = configuration.pre_grad_passes()
    hook = hook_after(earlier, MINIMUM_LOGITS if minimum_logits is None else minimum_logits, memory_budget)
    if support.can_hook() and earlier != hook:
        configuration.set_pre_grad_passes(hook)
    if support.can_hook() and log.isEnabledFor(logging.INFO):
        configuration.after_each_graph(tell_of_cached_graphs)


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
    from .backend import enabled_hook

    return enabled_hook() is not None


def explain(
    function: Callable[..., object], *, minimum_logits: int | None = None, dynamic: bool | None = None
) -> Callable[..., Explanation]:
    """``explain(function)(*args, **kwargs)`` says what ``torch.compile(function, backend="dcs")`` makes of that call.

    The function is traced and run once, without the compiler's caches: every loss in its graphs is found, and reported
    as fused or as left alone, with the reason and the cure; so is every graph break. Nothing is generated, and what
    the function changes (its arguments, buffers) it changes as in any call. Functions that are compiled already are
    compiled again at their next call. Scans are reported as calls: whether one becomes part of a kernel on CUDA is
    decided while that is generated.

    Args:
        function: a function or module, compiled or not.
        minimum_logits: as in `enable`. None: what `enable` was given, where that is in force, else 2**22.
        dynamic: as in torch.compile.

    Returns:
        A function of the arguments that returns an `Explanation`: its `losses`, `breaks`, `graphs`, `calls` and
        `hindrance` are data, ``str()`` of it a report.

    Raises:
        TypeError: function cannot be called.
        ValueError: minimum_logits is not an integer >= 0.

    Example::

        >>> print(torch_dcs_ops.compile.explain(lambda **batch: model(**batch).loss)(input_ids=ids, labels=ids))
    """
    if not callable(function):
        raise TypeError(f"explain: function must be a function or a module, got {type(function).__name__}")
    from .backend import enabled_hook
    from .explanation import explanation_of
    from .graph_pass import Hook

    hook = (enabled_hook() or Hook()) if minimum_logits is None else Hook(minimum_logits=minimum_logits)
    return lambda *args, **kwargs: explanation_of(function, args, kwargs, hook.minimum_logits, dynamic)
