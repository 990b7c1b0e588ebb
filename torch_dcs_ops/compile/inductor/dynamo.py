"""What passes take from the graphs that Dynamo traces: fake tensors, symbols, and the functions it writes into them.

Names are looked up when they are used, behind `support.supports("passes")`; a pass that fails leaves a graph as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

# What a node of Dynamo's stands for; in AOTAutograd's graphs, which `lacks_values` tells from these, it is "val".
VALUE = "example_value"


def lacks_values(graph: fx.Graph) -> bool:
    """Whether the nodes of a graph do not say what they stand for, by any name that is known."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return bool(calls) and not any(VALUE in node.meta or "val" in node.meta for node in calls)


def fake_mode_of(values: list[Any]) -> Any:
    """The mode that made the fake tensors, or the shards of DTensors, among some values."""
    shards = (getattr(value, "_local_tensor", value) for value in values)
    fakes = (value for value in shards if isinstance(value, torch._subclasses.FakeTensor))
    return next((fake.fake_mode for fake in fakes), None)


def run_on_fakes(node: fx.Node, fake_mode: Any, watch: AbstractContextManager[Any] | None = None) -> Any:
    """The result of a node's call, on the fake tensors of its operands; `watch` is a mode that sees its ops."""
    from torch._dispatch.python import enable_python_dispatcher

    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta[VALUE])
    # The Python dispatcher: C++ decompositions such as matmul's do not take symbolic sizes.
    with torch.no_grad(), enable_python_dispatcher(), fake_mode, watch or nullcontext():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function" and callable(node.target):
            return node.target(*args, **kwargs)
        raise NotImplementedError(f"a node of the kind {node.op}")


def unrecorded_symbols(fake_mode: Any) -> AbstractContextManager[Any]:
    """Sizes that a call makes up, such as that of `nonzero`, are none of the graph's within it."""
    context: AbstractContextManager[Any] = nullcontext()
    return fake_mode.shape_env.ignore_fresh_unbacked_symbols() if fake_mode.shape_env else context


def storage_of(value: Tensor) -> int:
    """Says of two tensors whether they are views of one."""
    identity: int = value.untyped_storage()._cdata
    return identity


def hint(number: Any) -> Any:
    """A number of the graph, or what a variable of it was for the example inputs (None: not known)."""
    return number if isinstance(number, int | float) else number.node.hint


def is_same(size: Any, other: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == other))


def numbers_are_constants() -> bool:
    """Whether Dynamo takes a number for a constant until it has seen another one."""
    from torch._dynamo import config

    return bool(config.assume_static_by_default)


def sets_autograd_mode(node: fx.Node) -> bool:
    is_inference = _name(node) in ("_enter_inference_mode", "_exit_inference_mode")
    return is_inference or node.target is torch._C._set_grad_enabled


def is_of_functorch(node: fx.Node) -> bool:
    return "functorch" in str(getattr(node.target, "__module__", ""))


def differentiates_forward(node: fx.Node) -> bool:
    return _name(node) in ("_jvp_increment_nesting", "_make_dual")


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def autocast_functions() -> tuple[Any, Any]:
    """What a graph enters and leaves autocast by."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    return _enter_autocast, _exit_autocast
