"""`torch.compile(model, backend="dcs")`: TorchInductor with this package's pass and lowerings."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import torch
from torch import fx

from .graph_pass import Hook, passes_of
from .passes.linear_cross_entropy import MINIMUM_LOGITS

log = logging.getLogger("torch_dcs_ops.compile")

_MINIMUM_LOGITS = "dcs.minimum_logits"


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
            (default 2**22).

    Raises:
        RuntimeError: an option that TorchInductor does not know.
        ValueError: minimum_logits is not an integer >= 0.
    """
    return _compiler(mode, options)(graph_module, example_inputs)


def _compiler(mode: str | None, options: dict[str, Any] | None) -> Any:
    options = dict(options or {})
    minimum_logits = options.pop(_MINIMUM_LOGITS, MINIMUM_LOGITS)
    earlier = options.pop("pre_grad_custom_pass", torch._inductor.config.pre_grad_custom_pass)
    compiler = torch._TorchCompileInductorWrapper(mode, options, None)
    compiler.config["pre_grad_custom_pass"] = hook_after(earlier, minimum_logits)
    return compiler


def hook_after(earlier: Any, minimum_logits: int) -> Hook:
    """The hook to be put in the place of `earlier`, pre-grad passes of others."""
    hook = Hook(tuple(p for p in passes_of(earlier) if not isinstance(p, Hook)), minimum_logits)
    _install_lowerings()
    return hook


@functools.cache
def _install_lowerings() -> None:
    try:
        from .scan_lowering import install
    except (ImportError, AttributeError) as error:
        # What the module takes from torch is not there: a version that it was not written for.
        log.warning("scans do not fuse with other operations under torch %s: %s", torch.__version__, error)
    else:
        install()


def _reset() -> None:
    """Part of torch.compiler.reset(), as for TorchInductor under its own name."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


dcs.reset = _reset  # type: ignore[attr-defined]
