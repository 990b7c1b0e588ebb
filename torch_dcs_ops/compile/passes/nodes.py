"""What a node of a graph that Dynamo has traced is: its operation by one name, its arguments by theirs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from .build import shown, value_of
from .findings import Reason

_FUNCTIONS: dict[Any, str] = {
    torch.reshape: "reshape", torch.flatten: "flatten", torch.clone: "clone", operator.getitem: "getitem",
    operator.mul: "mul", operator.imul: "mul", torch.mul: "mul", torch.multiply: "mul", operator.truediv: "div",
    operator.itruediv: "div", torch.div: "div", torch.divide: "div", torch.true_divide: "div", operator.add: "add",
    torch.add: "add", torch.tanh: "tanh", functional.tanh: "tanh", operator.matmul: "matmul", torch.matmul: "matmul",
    torch.mm: "matmul", torch.addmm: "addmm", functional.linear: "linear", torch.einsum: "einsum", torch.t: "t",
    torch.transpose: "transpose", torch.swapaxes: "transpose", torch.swapdims: "transpose", torch.permute: "permute",
    torch.movedim: "movedim", torch.squeeze: "squeeze", torch.unsqueeze: "unsqueeze", torch.gather: "gather",
    functional.log_softmax: "log_softmax", torch.log_softmax: "log_softmax",
}  # fmt: skip
_METHODS = {name: name for name in ("view", "reshape", "flatten", "contiguous", "clone", "float", "to", "type", "tanh")}
_METHODS |= {name: name for name in ("mul", "div", "add", "t", "transpose", "permute", "movedim", "matmul")}
_METHODS |= {name: name for name in ("squeeze", "unsqueeze", "gather", "log_softmax", "redistribute")}
_METHODS |= {"multiply": "mul", "divide": "div", "true_divide": "div", "mm": "matmul", "swapaxes": "transpose",
             "swapdims": "transpose", "mul_": "mul", "div_": "div"}  # fmt: skip


class Refusal(Exception):
    """Why a loss is left as it is: a clause about the loss, and what kind of reason that is."""

    def __init__(self, clause: str, reason: Reason = Reason.FORM) -> None:
        super().__init__(clause)
        self.reason = reason


def name_of(node: Any) -> str | None:
    """One name for an operation, whether a function or a method; None for those that nothing here is about."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        # In torch 2.11 a DTensor's redistribute is a function that Dynamo makes for each call.
        is_redistribute = getattr(node.target, "__name__", None) == "prim_redistribute"
        return "redistribute" if is_redistribute else _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def arguments_of(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; `names` are those of the positional ones."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def two_operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or node.kwargs:
        raise Refusal(f"takes logits that come through `{shown(node)}` with further arguments")
    return node.args[0], node.args[1]


def source_of(node: fx.Node) -> fx.Node:
    """The tensor that a call with one tensor for its first argument is made of."""
    source = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(source, fx.Node):
        raise Refusal(f"takes logits that come {through(node)} in a form that is not known")
    return source


def through(node: fx.Node) -> str:
    return "as they are into the graph" if node.op == "placeholder" else f"through `{shown(node)}`"


def are_numbers(values: Any) -> bool:
    return all(isinstance(value, int) or (isinstance(value, tuple | list) and are_numbers(value)) for value in values)


def is_tensor(node: Any) -> bool:
    return isinstance(value_of(node), Tensor)


def specialized(number: Any) -> Any:
    """A number, and that of a variable of the graph, which is then for this value alone.

    With dynamic=True every number of a module is a variable; otherwise it is one because it has changed.
    """
    value = value_of(number)
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else number


def copied(node: fx.Node) -> fx.Node:
    """What a copy or an upcast is made of."""
    source = source_of(node)
    before, after = value_of(source), value_of(node)
    if after.device != before.device:
        raise Refusal("takes logits that are moved to another device")
    if after.dtype != before.dtype and (after.dtype != torch.float32 or before.dtype == torch.float64):
        raise Refusal(f"takes logits that are converted from {before.dtype} to {after.dtype}")
    return source


def order_after(node: fx.Node) -> list[int]:
    """For every dimension of a transposition's result the one that it was."""
    rank = value_of(source_of(node)).dim()
    # Every dimension of this one has a size of its own, which shows where it goes.
    sizes = torch.empty(tuple(range(rank)), device="meta")
    if node.kwargs or not are_numbers(node.args[1:]):
        raise Refusal(f"takes logits that come {through(node)} in a form that is not known")
    return list(getattr(sizes, str(name_of(node)))(*node.args[1:]).shape)


def check_sole_user(node: fx.Node, user: fx.Node) -> None:
    others = [other for other in node.users if other is not user]
    if any(other.op == "output" for other in others):
        raise Refusal(
            "takes logits that the compiled function also returns, so that they have to be made anyway", Reason.RETURNED
        )
    if others:
        clause = f"takes logits that `{shown(others[0])}` uses too, so that they have to be made anyway"
        raise Refusal(clause, Reason.USED)
