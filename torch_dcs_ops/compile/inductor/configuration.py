"""Inductor as a backend: its options, its pre-grad passes, and what of these its cache keys hold."""

from __future__ import annotations

import functools
import logging
import sys
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import probes

logger = logging.getLogger("torch_dcs_ops")

if TYPE_CHECKING or not probes.missing("backend"):
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
else:
    CustomGraphPass = ABC


def passes_of(value: Any) -> tuple[Any, ...]:
    """The passes in a value of Inductor's configuration: none, one or several."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def pre_grad_passes() -> Any:
    """What stands in Inductor's configuration; None where that has not been imported, which takes a while."""
    config = sys.modules.get("torch._inductor.config")
    return getattr(config, "pre_grad_custom_pass", None)


def set_pre_grad_passes(passes: Any) -> None:
    from torch._inductor import config

    config.pre_grad_custom_pass = passes
    torch.compiler.reset()


def backend(mode: str | None, options: dict[str, Any], pre_grad_passes: Any) -> Any:
    """What compiles a graph as TorchInductor does, with other pre-grad passes than the configuration's."""
    compiler = torch._TorchCompileInductorWrapper(mode, options, None)
    compiler.config["pre_grad_custom_pass"] = pre_grad_passes
    return compiler


@functools.cache
def after_each_graph(listener: Callable[[Any], None]) -> None:
    """Calls `listener`, from here on, with each graph that torch.compile's ordinary backend has compiled with the
    configuration's pre-grad passes, or found in its cache. Where torch has no place for that: never."""
    if probes.missing("listening"):
        return
    wrapper: Any = torch._TorchCompileInductorWrapper
    compiles = wrapper.__call__

    @functools.wraps(compiles)
    def compiles_and_tells(self: Any, model_: Any, inputs_: Any, **keywords: Any) -> Any:
        compiled = compiles(self, model_, inputs_, **keywords)
        if "pre_grad_custom_pass" not in self.config:
            listener(model_)
        return compiled

    wrapper.__call__ = compiles_and_tells


def plain_backend(mode: str | None, options: dict[str, Any]) -> Any:
    """`backend` by public names alone; it compiles at the first call."""
    return lambda graph_module, example_inputs: torch.compile(graph_module, mode=mode, options=options or None)


def reset() -> None:
    """Part of torch.compiler.reset(), as for TorchInductor under its own name."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if hasattr(trees, "reset_cudagraph_trees"):
        trees.reset_cudagraph_trees()


def lowers_scans() -> bool:
    """Whether the graph being compiled asked for the lowerings, by a pre-grad pass with `dcs_scan_lowering` set.

    That pass is part of the key of Inductor's cache of graphs, so what is compiled with and without never mixes. Where
    it is not (a pass before it has no uuid, or torch is told to run them before it looks into the cache), there are
    none.
    """
    from torch._inductor import config

    passes = passes_of(config.pre_grad_custom_pass)
    if not any(getattr(graph_pass, "dcs_scan_lowering", False) for graph_pass in passes):
        return False
    is_in_the_key = getattr(config, "pre_grad_pass_timing", "late") != "early"
    if is_in_the_key and all(hasattr(graph_pass, "uuid") and graph_pass.uuid() is not None for graph_pass in passes):
        return True
    say_that_the_key_lacks_them()
    return False


@functools.cache
def say_that_the_key_lacks_them() -> None:
    logger.warning(
        "scans do not fuse with other operations: a pre-grad pass without a uuid, or pre_grad_pass_timing='early', "
        "keeps the pass that asks for it out of the compiler's cache keys"
    )
