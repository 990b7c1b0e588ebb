"""How the ops become part of compiled models: ``torch.compile(model, backend="dcs")``, or `enable` for every model.

Both fuse linear + cross_entropy into `torch.ops.dcs.linear_cross_entropy` where a model has them, and this package's
scans into the kernels around them. Why a loss was left as it is says the logger ``torch_dcs_ops`` once; with
``TORCH_LOGS="+torch_dcs_ops"`` it shows the graphs before and after.
"""

from __future__ import annotations

from typing import Any

__all__ = ["disable", "enable", "is_enabled"]


def enable(*, minimum_logits: int | None = None) -> None:
    """Makes ``torch.compile`` with its ordinary backend do what ``backend="dcs"`` does, in this process.

    Functions that are compiled already are compiled again at their next call. Calling it again changes the options.

    Args:
        minimum_logits: a loss of fewer logits (rows times classes) is left to the compiler. None: 2**22.

    Raises:
        ValueError: minimum_logits is not an integer >= 0.
    """
    from torch._inductor import config

    from .backend import hook_after
    from .passes.linear_cross_entropy import MINIMUM_LOGITS

    hook = hook_after(config.pre_grad_custom_pass, MINIMUM_LOGITS if minimum_logits is None else minimum_logits)
    if config.pre_grad_custom_pass != hook:
        _use(hook)


def disable() -> None:
    """Undoes `enable`. Functions that are compiled already are compiled again at their next call."""
    from torch._inductor import config

    from .graph_pass import Hook, passes_of

    if is_enabled():
        rest: list[Any] = []
        for one in passes_of(config.pre_grad_custom_pass):
            rest += one.earlier if isinstance(one, Hook) else [one]
        _use(rest if len(rest) > 1 else rest[0] if rest else None)


def is_enabled() -> bool:
    """Whether `enable` is in force."""
    from torch._inductor import config

    from .graph_pass import Hook, passes_of

    return any(isinstance(one, Hook) for one in passes_of(config.pre_grad_custom_pass))


def _use(passes: Any) -> None:
    import torch
    from torch._inductor import config

    config.pre_grad_custom_pass = passes
    torch.compiler.reset()
