"""`torch.compile(model, backend="dcs")`: TorchInductor with this package's pass and lowerings."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from .graph_pass import Hook, say_what_is_cached
from .inductor import configuration, support
from .passes.linear_cross_entropy import MINIMUM_LOGITS

_MINIMUM_LOGITS = "dcs.minimum_logits"
_MEMORY_BUDGET = "dcs.memory_budget"


def dcs(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """The compiler behind ``torch.compile(model, backend="dcs")``, which is how to call it.

    It is TorchInductor, with `mode` and `options` as it takes them, where in addition

    * linear + cross_entropy becomes `torch.ops.dcs.linear_cross_entropy`, so that no logits are held;
    * on CUDA the scans of this package become part of the kernels around them.

    Args:
        graph_module, example_inputs: what torch.compile hands to a backend.
        mode: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
        options: TorchInductor's, and ``"dcs.minimum_logits"``: a loss of fewer logits is left to the compiler
            (default 2**22); ``"dcs.memory_budget"``: bytes of logits that a fused loss may hold, as of `enable`.

    Raises:
        RuntimeError: an option that TorchInductor does not know.
        ValueError: minimum_logits is not an integer >= 0, or memory_budget not one >= 1.
    """
    options = dict(options or {})
    minimum_logits = options.pop(_MINIMUM_LOGITS, MINIMUM_LOGITS)
    memory_budget = options.pop(_MEMORY_BUDGET, None)
    if not support.can_hook():
        return configuration.plain_backend(mode, options)(graph_module, example_inputs)
    earlier = options.pop("pre_grad_custom_pass", configuration.pre_grad_passes())
    hook = hook_after(earlier, minimum_logits, memory_budget)
    compiled = configuration.backend(mode, options, hook)(graph_module, example_inputs)
    say_what_is_cached(graph_module, hook)
    return compiled


def hook_after(earlier: Any, minimum_logits: int, memory_budget: int | None) -> Hook:
    """The hook to be put in the place of `earlier`, pre-grad passes of others."""
    others = (one for one in configuration.passes_of(earlier) if not isinstance(one, Hook))
    hook = Hook(tuple(others), minimum_logits, memory_budget)
    _install_lowerings()
    return hook


def enabled_hook() -> Hook | None:
    """That of `enable`, where it is in force."""
    passes = configuration.passes_of(configuration.pre_grad_passes())
    return next((one for one in passes if isinstance(one, Hook)), None)


def tell_of_cached_graphs(graph_module: fx.GraphModule) -> None:
    """What `enable` has done to each graph, where it comes from the compiler's cache."""
    hook = enabled_hook()
    if hook is not None:
        say_what_is_cached(graph_module, hook)


@functools.cache
def _install_lowerings() -> None:
    if support.supports("scans"):
        from .scan_lowering import install

        install()


dcs.reset = configuration.reset  # type: ignore[attr-defined]
