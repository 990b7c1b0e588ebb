"""A graph whose scans cannot be generated is compiled once more, with calls of the ops.

What a version of torch changes without a trace in names and parameters shows while a graph is compiled: an error in a
lowering or in the code generator, source of a form that is not known, a kernel that Triton does not compile. None of it
ends the user's compilation, and all of it is seen here, around the compilation of one graph. Nothing in this folder
that is wrapped around Inductor's own does anything outside of it, so graphs without scans know nothing of this package.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._inductor.compile_fx import _InProcessFxCompile

from . import configuration, support

_generates: ContextVar[bool] = ContextVar("_generates", default=False)


def generates_scans() -> bool:
    """Whether a graph is being compiled whose scans become generated kernels."""
    return _generates.get()


def wrap_compilation(ops: Collection[Any]) -> None:
    """Has every graph with a call of one of `ops` compiled as the docstring of this module says."""
    compile_graph: Callable[..., Any] = _InProcessFxCompile.codegen_and_compile

    @functools.wraps(compile_graph)
    def codegen_and_compile(self: Any, gm: Any, example_inputs: Any, inputs_to_check: Any, graph_kwargs: Any) -> Any:
        if not _calls(gm, ops) or not configuration.lowers_scans():
            with _generating(False):
                return compile_graph(self, gm, example_inputs, inputs_to_check, graph_kwargs)
        restore = _saved(gm)
        try:
            with _generating(True):
                return compile_graph(self, gm, example_inputs, inputs_to_check, graph_kwargs)
        except Exception as error:
            reason = error
        restore()
        with _generating(False):
            result = compile_graph(self, gm, example_inputs, inputs_to_check, graph_kwargs)
        # Only now: what fails this way too has another reason, which is the user's to see.
        support.failed("scans", reason)
        return result

    _InProcessFxCompile.codegen_and_compile = codegen_and_compile  # type: ignore[method-assign]


@contextlib.contextmanager
def _generating(value: bool) -> Iterator[None]:
    token = _generates.set(value)
    try:
        yield
    finally:
        _generates.reset(token)


def _graph_modules(gm: Any) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _calls(gm: Any, ops: Collection[Any]) -> bool:
    nodes = (node for module in _graph_modules(gm) for node in module.graph.nodes)
    return any(node.op == "call_function" and node.target in ops for node in nodes)


def _saved(gm: Any) -> Callable[[], None]:
    """Returns what gives a graph module, and those within it, the graphs that they have now."""
    saved = [(module, copy.deepcopy(module.graph), dict(module.named_children())) for module in _graph_modules(gm)]

    def restore() -> None:
        for module, graph, children in saved:
            for name, child in children.items():
                setattr(module, name, child)
            module.graph = graph
            module.recompile()

    return restore
