"""Whether anything wrote to a tensor between two nodes of a graph that Dynamo has traced.

Names do not tell (``F.relu(h, inplace=True)``, custom ops, ``out=``): what takes the tensor's memory is run again on
the fake tensors, and the schemas of the ops that this comes down to say what is written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ..inductor.dynamo import run_on_fakes, storage_of, unrecorded_symbols
from .build import shown, value_of


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after `first` and before `last`, in the order in which they are run."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def first_writer(chain: list[fx.Node], operands: list[fx.Node]) -> fx.Node | None:
    """A node that may write to one of the operands of the last node of `chain` before the first one is run.

    The nodes of the chain itself do not.
    """
    values = [value_of(operand) for operand in operands]
    memory = {storage_of(value) for value in values}
    inputs = _storages(node for node in chain[0].graph.nodes if node.op == "placeholder")
    for node in between(chain[-1], chain[0]):
        if node in chain:
            continue
        taken, name = _storages(node.all_input_nodes), shown(node)
        # Inputs of the graph may be views of one another.
        looks_inplace = name.endswith("_") and not name.endswith("__")
        if (taken & memory and _changes(node, values)) or (looks_inplace and taken & inputs and memory & inputs):
            return node
    return None


def _storages(nodes: Any) -> set[int]:
    return {storage_of(value_of(node)) for node in nodes if isinstance(value_of(node), Tensor)}


def _changes(node: fx.Node, values: list[Any]) -> bool:
    """Whether a node writes to the memory of one of the tensors `values`: it is run on the fake ones, and watched.

    What cannot be run may.
    """
    if any(name in shown(node) for name in ("batch_norm", "instance_norm")):
        return True  # They write to running statistics, which their schemas do not say.
    from ..inductor.writes import Writes

    watch = Writes({storage_of(value) for value in values})
    try:
        fake_mode = values[0].fake_mode
        with unrecorded_symbols(fake_mode):
            run_on_fakes(node, fake_mode, watch)
    except Exception:
        return True
    return watch.seen
