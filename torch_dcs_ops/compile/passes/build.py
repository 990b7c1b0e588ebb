"""New nodes of a graph that Dynamo has traced, each with the fake tensor that a traced one has."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..inductor import dynamo


def value_of(node: Any) -> Any:
    """The fake tensor that a node stands for."""
    return node.meta.get(dynamo.VALUE) if isinstance(node, fx.Node) else None


def hint(size: Any) -> int:
    """A size of the example inputs, 0 if not known; what it decides has to be right for all other sizes too."""
    return int(dynamo.hint(size) or 0)


def shown(node: fx.Node) -> str:
    """A node's operation by the name that a user knows it by."""
    if node.op in ("call_function", "call_method"):
        return str(getattr(node.target, "__name__", node.target))
    return node.op


class Builder:
    """Puts nodes before `anchor`, a call on tensors. `undo` takes them away again."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor
        self.nodes: list[fx.Node] = []
        self.fake_mode = dynamo.fake_mode_of([value_of(node) for node in anchor.all_input_nodes])

    def function(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._evaluated(self.statement("call_function", target, *args, **kwargs))

    def method(self, target: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._evaluated(self.statement("call_method", target, *args, **kwargs))

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """A number where the size is one, else a node."""
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self.method("size", node, dim)

    def undo(self) -> None:
        graph = self.anchor.graph
        while self.nodes:
            graph.erase_node(self.nodes.pop())

    def statement(self, op: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that is run for what it does and stands for no tensor."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.create_node(op, target, args, kwargs)
        self.nodes.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def _evaluated(self, node: fx.Node) -> fx.Node:
        node.meta[dynamo.VALUE] = dynamo.run_on_fakes(node, self.fake_mode)
        return node
