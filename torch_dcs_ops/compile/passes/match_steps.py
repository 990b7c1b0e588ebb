"""The steps between a linear map and the loss of its result, in a graph that Dynamo has traced.

Steps on whole rows commute with the linear map: they are done on its input instead, which is V/D times smaller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import fx

from ..inductor import dynamo
from ..inductor.dynamo import is_same
from .build import Builder, value_of
from .findings import Reason
from .nodes import (
    Refusal,
    arguments_of,
    check_sole_user,
    copied,
    is_tensor,
    name_of,
    order_after,
    source_of,
    specialized,
    through,
    two_operands,
)

# A step on rows, done on the input of the linear map.
RowStep = Callable[[Builder, fx.Node], fx.Node]

# With dynamic=True a softcap is a variable of the graph, and compiled for its value. A line of code may have so many;
# one that has more changes from call to call, and would be compiled anew for each value up to Dynamo's limit of 8.
SOFTCAPS_OF_A_LINE = 4
_softcaps: dict[str, set[tuple[float, ...]]] = {}


class Steps:
    """The steps between the linear map and the loss, the last one first."""

    def __init__(self) -> None:
        self.row_steps: list[RowStep] = []
        self.classes: int | None = None
        self.bias: fx.Node | None = None
        # Numbers that multiply or divide the logits: all of them, or what comes after a tanh and what before it.
        self.factors: list[tuple[Any, bool]] = []
        self.factors_after_tanh: list[tuple[Any, bool]] | None = None

    def follow(self, node: Any, user: fx.Node, ends: tuple[str, ...], steps: Mapping[str, Step]) -> list[fx.Node]:
        """The chain from `node`, which `user` uses, to an operation of the names `ends`."""
        chain = []
        while True:
            if not is_tensor(node):
                raise Refusal("takes logits that are not a tensor of the graph")
            check_sole_user(node, user)
            chain.append(node)
            name = name_of(node) or ""
            is_known = "out" not in node.kwargs
            if is_known and name in ends:
                return chain
            if not is_known or name not in steps:
                reason = Reason.OTHER_GRAPH if node.op == "placeholder" else Reason.FORM
                raise Refusal(f"takes logits that come {through(node)}, not from {NAMES_OF_ENDS[ends[0]]}", reason)
            user, node = node, steps[name](self, node)

    def scale(self, place: str) -> tuple[float | None, float, list[tuple[fx.Node, bool]]]:
        """softcap, logit_scale, and the variables of the graph that multiply (False) or divide (True) the logits.

        place: the line of code of the loss.
        """
        variable_factors: list[tuple[fx.Node, bool]] = []
        softcap = None
        if self.factors_after_tanh is None:
            variable_factors = [(n, division) for n, division in self.factors if isinstance(n, fx.Node)]
            factor = _product([(n, division) for n, division in self.factors if not isinstance(n, fx.Node)])
        else:
            # c·tanh(f·z) caps the logits c·f·z at c; a negative c is a positive one with -f.
            _check_few_values(place, [*self.factors_after_tanh, *self.factors])
            cap = _product(self.factors_after_tanh)
            softcap = abs(cap)
            factor = _product(self.factors) * cap
            if not 0 < softcap < math.inf:
                raise Refusal("takes logits that are a tanh times 0 or infinity")
        if not math.isfinite(factor):
            raise Refusal("takes logits times a number that is not finite")
        return softcap, factor, variable_factors

    def copy(self, node: fx.Node) -> fx.Node:
        return copied(node)

    def redistribute(self, node: fx.Node) -> fx.Node:
        """A DTensor's: the same logits elsewhere, and the op takes its operands wherever they are."""
        return source_of(node)

    def view(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        sizes = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes  # type: ignore[assignment]
        before, after = value_of(source), value_of(node)
        if before.dim() < 1 or after.dim() < 2 or not is_same(before.shape[-1], after.shape[-1]):
            raise Refusal("takes logits that are reshaped together with the dimension of the classes")
        if len(sizes) != value_of(node).dim():
            raise Refusal("takes logits that are viewed as another dtype")
        lead = tuple(sizes[:-1])
        self.row_steps.append(lambda build, rows: build.method("reshape", rows, *lead, build.size(rows, -1)))
        return source

    def flatten(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        rank = value_of(source).dim()
        arguments = arguments_of(node, "input", "start_dim", "end_dim")
        first, last = arguments.get("start_dim", 0) % rank, arguments.get("end_dim", -1) % rank
        if last == rank - 1 and first != last:
            raise Refusal("takes logits that are flattened together with the dimension of the classes")
        if first != last:
            self.row_steps.append(lambda build, rows: build.method("flatten", rows, first, last))
        return source

    def transpose(self, node: fx.Node) -> fx.Node:
        order = order_after(node)
        if order[-1] != len(order) - 1:
            raise Refusal("takes logits whose classes are moved to another dimension")
        self.row_steps.append(lambda build, rows: build.method("permute", rows, *order))
        return source_of(node)

    def squeeze(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        dims, rank = arguments_of(node, "input", "dim").get("dim"), value_of(source).dim()
        if not isinstance(dims, int | tuple | list):
            raise Refusal("takes logits that are squeezed of every dimension of size 1")
        if rank - 1 in [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]:
            raise Refusal("takes logits that are squeezed of the dimension of the classes")
        self.row_steps.append(lambda build, rows: build.method("squeeze", rows, dims))
        return source

    def unsqueeze(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        dim, rank = arguments_of(node, "input", "dim")["dim"], value_of(source).dim()
        if dim % (rank + 1) == rank:
            raise Refusal("takes logits that are followed by a dimension more than that of the classes")
        self.row_steps.append(lambda build, rows: build.method("unsqueeze", rows, dim % (rank + 1)))
        return source

    def getitem(self, node: fx.Node) -> fx.Node:
        source, index = node.args
        if not is_tensor(source):
            raise Refusal("takes logits that are one of several results of another operation")
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(isinstance(item, slice | int | EllipsisType) and not isinstance(item, bool) for item in items):
            raise Refusal("takes logits that are indexed by something else than slices and numbers")
        rank = value_of(source).dim()
        gap = items.index(...) if ... in items else len(items)
        whole = [slice(None)] * (rank - len(items) + (... in items))
        items[gap : gap + 1] = whole
        *rows, last = items
        if last != slice(None):
            self.cut(node, last)
        if any(item != slice(None) for item in rows):
            taken = (*rows, slice(None))
            self.row_steps.append(lambda build, values: build.function(operator.getitem, values, taken))
        return source  # type: ignore[return-value]

    def cut(self, node: fx.Node, classes: Any) -> None:
        if not isinstance(classes, slice) or classes.start not in (None, 0) or classes.step not in (None, 1):
            raise Refusal("takes logits of other classes than the first ones")
        if self.classes is not None:
            raise Refusal("takes logits that are cut twice")
        self.classes = value_of(node).shape[-1]
        if not isinstance(self.classes, int) or self.classes < 1:
            raise Refusal("takes logits that are cut to no certain number of classes")

    def mul(self, node: fx.Node) -> fx.Node:
        first, second = two_operands(node)
        source, number = (first, second) if is_tensor(first) else (second, first)
        return self._scale(source, number, False)

    def div(self, node: fx.Node) -> fx.Node:
        return self._scale(*two_operands(node), True)

    def _scale(self, source: Any, number: Any, is_division: bool) -> fx.Node:
        symbol = value_of(number)
        is_number = isinstance(number, int | float) or isinstance(symbol, torch.SymInt | torch.SymFloat)
        if not is_tensor(source) or not is_number:
            raise Refusal("takes logits that are scaled by something else than a number")
        if self.bias is not None:
            raise Refusal("takes logits that are scaled before their bias")
        self.factors.append((number, is_division))
        return source  # type: ignore[no-any-return]

    def tanh(self, node: fx.Node) -> fx.Node:
        if self.factors_after_tanh is not None:
            raise Refusal("takes logits that go through two tanh")
        if self.bias is not None:
            raise Refusal("takes logits with a bias after their tanh")
        self.factors_after_tanh, self.factors = self.factors, []
        return source_of(node)

    def add(self, node: fx.Node) -> fx.Node:
        first, second = two_operands(node)
        if not (is_tensor(first) and is_tensor(second)):
            raise Refusal("takes logits plus a number")
        source, bias = (first, second) if value_of(first).dim() > 1 else (second, first)
        if value_of(bias).dim() != 1 or not is_same(value_of(bias).shape[0], value_of(source).shape[-1]):
            raise Refusal("takes logits plus something else than a bias of one entry a class")
        if value_of(node).dtype not in (value_of(source).dtype, torch.float32):
            raise Refusal(f"takes logits that a bias converts to {value_of(node).dtype}")
        if self.bias is not None:
            raise Refusal("takes logits with two biases")
        self.bias = bias
        return source  # type: ignore[no-any-return]


Step = Callable[[Steps, fx.Node], fx.Node]
COPIES = ("contiguous", "clone", "float", "to", "type")
TRANSPOSITIONS = ("transpose", "permute", "movedim")
# Steps that keep rows whole, such as may follow a log_softmax too.
ROW_STEPS: dict[str, Step] = {
    **dict.fromkeys(COPIES, Steps.copy),
    **dict.fromkeys(TRANSPOSITIONS, Steps.transpose),
    "view": Steps.view,
    "reshape": Steps.view,
    "flatten": Steps.flatten,
    "squeeze": Steps.squeeze,
    "unsqueeze": Steps.unsqueeze,
    "getitem": Steps.getitem,
    "redistribute": Steps.redistribute,
}
STEPS: dict[str, Step] = {**ROW_STEPS, "mul": Steps.mul, "div": Steps.div, "tanh": Steps.tanh, "add": Steps.add}
LINEAR_MAPS = ("linear", "matmul", "addmm", "einsum")
LOG_SOFTMAX = ("log_softmax",)
NAMES_OF_ENDS = {"linear": "a linear map", "log_softmax": "log_softmax"}


def _check_few_values(place: str, factors: list[tuple[Any, bool]]) -> None:
    """That the numbers of a softcap are constants, or variables that seem to be."""
    variables = [value_of(factor) for factor, _ in factors if isinstance(factor, fx.Node)]
    if not variables:
        return
    values = tuple(float(dynamo.hint(variable)) for variable in variables)
    known = _softcaps.setdefault(place, set())
    if dynamo.numbers_are_constants() or (values not in known and len(known) == SOFTCAPS_OF_A_LINE):
        raise Refusal("takes logits with a softcap that changes from call to call")
    known.add(values)


def _product(factors: list[tuple[Any, bool]]) -> float:
    product = 1.0
    for factor, is_division in factors:
        number = specialized(factor)
        if is_division and number == 0:
            raise Refusal("takes logits that are divided by 0")
        product = product / number if is_division else product * number
    return product
