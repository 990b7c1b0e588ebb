"""Finds linear + cross-entropy in a graph that Dynamo has traced: `find` says what one loss is made of.

It is read from the loss backwards. What the loss takes as logits must come from a linear map by steps that leave every
row of logits whole (views, slices of rows, upcasts, numbers as factors, a bias, a softcap) or cut it to its first
classes, each used by the next one alone. Steps on whole rows commute with the linear map: they are done on its input
instead, which is V/D times smaller.

Nothing is changed here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from ._build import Builder, shown, value_of
from ._writes import between, first_writer

# A step on rows, done on the input of the linear map.
RowStep = Callable[[Builder, fx.Node], fx.Node]

_FUNCTIONS: dict[Any, str] = {
    torch.reshape: "reshape", torch.flatten: "flatten", torch.clone: "clone", operator.getitem: "getitem",
    operator.mul: "mul", operator.imul: "mul", torch.mul: "mul", torch.multiply: "mul", operator.truediv: "div",
    operator.itruediv: "div", torch.div: "div", torch.divide: "div", torch.true_divide: "div", operator.add: "add",
    torch.add: "add", torch.tanh: "tanh", functional.tanh: "tanh", operator.matmul: "matmul", torch.matmul: "matmul",
    torch.mm: "matmul", torch.addmm: "addmm", torch._C._nn.linear: "linear", torch.t: "t",
    torch.transpose: "transpose", torch.swapaxes: "transpose", torch.swapdims: "transpose", torch.permute: "permute",
    torch.movedim: "movedim",
}  # fmt: skip
_METHODS = {name: name for name in ("view", "reshape", "flatten", "contiguous", "clone", "float", "to", "type", "tanh")}
_METHODS |= {name: name for name in ("mul", "div", "add", "t", "transpose", "permute", "movedim", "matmul")}
_METHODS |= {"multiply": "mul", "divide": "div", "true_divide": "div", "mm": "matmul", "swapaxes": "transpose",
             "swapdims": "transpose", "mul_": "mul", "div_": "div"}  # fmt: skip
# With the names of their positional arguments.
_LOG_SOFTMAX: dict[Any, tuple[str, ...]] = {
    functional.log_softmax: ("input", "dim", "_stacklevel", "dtype"),
    torch.log_softmax: ("input", "dim", "dtype"),
    "log_softmax": ("input", "dim", "dtype"),
}
_LINEAR_MAPS = ("linear", "matmul", "addmm")
_INFERENCE_MODES = ("_enter_inference_mode", "_exit_inference_mode")
_FORWARD_MODE = ("_jvp_increment_nesting", "_make_dual")
_COPIES = ("contiguous", "clone", "float", "to", "type")


class Refusal(Exception):
    """Why a loss is left as it is: a clause about the loss."""


@dataclass
class Match:
    """The arguments of `linear_cross_entropy`, as nodes and numbers, and what brings them into its form."""

    chain: list[fx.Node]  # of the loss, the steps and the linear map, each used by the one before it alone
    input: fx.Node
    linear_weight: fx.Node
    linear_bias: fx.Node | None
    target: fx.Node
    weight: fx.Node | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    linear_weight_is_transposed: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    classes: int | None = None  # the first classes alone, where logits are cut to them
    row_steps: list[RowStep] = field(default_factory=list)  # in the order of the model
    # Variables of the graph that multiply (False) or divide (True) the logits.
    variable_factors: list[tuple[fx.Node, bool]] = field(default_factory=list)

    @property
    def loss(self) -> fx.Node:
        return self.chain[0]

    @property
    def linear(self) -> fx.Node:
        return self.chain[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the linear map: under autocast not that of its operands."""
        dtype: torch.dtype = value_of(self.linear).dtype
        return dtype


def is_loss(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (functional.cross_entropy, functional.nll_loss)


def logits_of(loss: fx.Node) -> Any:
    """The fake tensor that a loss takes for logits."""
    return value_of(_arguments(loss, "input").get("input"))


def place_of(node: fx.Node) -> str:
    """The line of the user's that a node comes from, or nothing."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    outside = [line for line in lines if line.startswith("File ") and "/torch/nn/" not in line]
    return outside[-1] if outside else ""


def find(loss: fx.Node) -> Match:
    """What `loss`, a call of F.cross_entropy, or of F.nll_loss of F.log_softmax, is made of. Raises Refusal."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = _arguments(loss, *names)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise Refusal("is called with size_average or reduce, deprecated in favour of reduction")
    target, weight = arguments["target"], arguments.get("weight")
    if not isinstance(value_of(target), Tensor):
        raise Refusal("has a target that is not a tensor of the graph")
    of_log_softmax = loss.target is functional.nll_loss
    logits, chain = (_before_log_softmax if of_log_softmax else _classes_last)(arguments["input"], loss)
    if len(chain) > 1 and value_of(target).is_floating_point() and not of_log_softmax:
        raise Refusal("has class probabilities with the classes in another dimension than the last")
    steps = _Steps()
    chain += steps.walk(logits, chain[-1])
    input, linear_weight, linear_bias, is_transposed = _operands(chain[-1])
    _check_circumstances(chain, [input, linear_weight, linear_bias or steps.bias])
    # The numbers last, as a graph whose variable is taken for a constant is made for one value alone.
    reduction = arguments.get("reduction", "mean")
    ignore_index, label_smoothing = arguments.get("ignore_index", -100), arguments.get("label_smoothing", 0.0)
    match = Match(
        chain, input, linear_weight, linear_bias, target, weight, _specialised(ignore_index),
        reduction, _specialised(label_smoothing),
    )  # fmt: skip
    match.linear_weight_is_transposed = is_transposed
    steps.describe(match)
    return match


class _Steps:
    """The steps between the linear map and the loss, the last one first."""

    def __init__(self) -> None:
        self.row_steps: list[RowStep] = []
        self.classes: int | None = None
        self.bias: fx.Node | None = None
        # Numbers that multiply or divide the logits: all of them, or what comes after a tanh and what before it.
        self.factors: list[tuple[Any, bool]] = []
        self.factors_after_tanh: list[tuple[Any, bool]] | None = None

    def walk(self, node: Any, user: fx.Node) -> list[fx.Node]:
        """The chain from `node`, which `user` uses, to the linear map."""
        chain = []
        while True:
            if not isinstance(node, fx.Node) or not isinstance(value_of(node), Tensor):
                raise Refusal("takes logits that are not a tensor of the graph")
            _check_sole_user(node, user)
            chain.append(node)
            name = _name(node)
            if name in _LINEAR_MAPS:
                return chain
            step = _STEPS.get(name or "")
            if step is None:
                raise Refusal(f"takes logits that come {_through(node)}, not from a linear map")
            user, node = node, step(self, node)

    def describe(self, match: Match) -> None:
        if self.bias is not None and match.linear_bias is not None:
            raise Refusal("takes logits with two biases")
        match.linear_bias = self.bias or match.linear_bias
        match.row_steps = self.row_steps[::-1]
        match.classes = self.classes
        if self.factors_after_tanh is None:
            match.variable_factors = [(n, division) for n, division in self.factors if isinstance(n, fx.Node)]
            factor = _product([(n, division) for n, division in self.factors if not isinstance(n, fx.Node)])
        else:
            # c·tanh(f·z) caps the logits c·f·z at c; a negative c is a positive one with -f.
            cap = _product(self.factors_after_tanh)
            match.softcap = abs(cap)
            factor = _product(self.factors) * cap
            if not 0 < match.softcap < math.inf:
                raise Refusal("takes logits that are a tanh times 0 or infinity")
        match.logit_scale = factor
        if not math.isfinite(match.logit_scale):
            raise Refusal("takes logits times a number that is not finite")

    def copy(self, node: fx.Node) -> fx.Node:
        return _copied(node)

    def view(self, node: fx.Node) -> fx.Node:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        sizes = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes  # type: ignore[assignment]
        _check_classes_stay_last(source, node)
        if len(sizes) != value_of(node).dim():
            raise Refusal("takes logits that are viewed as another dtype")
        lead = tuple(sizes[:-1])
        self.row_steps.append(lambda build, rows: build.method("reshape", rows, *lead, build.size(rows, -1)))
        return source

    def flatten(self, node: fx.Node) -> fx.Node:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        rank = value_of(source).dim()
        arguments = _arguments(node, "input", "start_dim", "end_dim")
        first, last = arguments.get("start_dim", 0) % rank, arguments.get("end_dim", -1) % rank
        if last == rank - 1 and first != last:
            raise Refusal("takes logits that are flattened together with the dimension of the classes")
        if first != last:
            self.row_steps.append(lambda build, rows: build.method("flatten", rows, first, last))
        return source

    def getitem(self, node: fx.Node) -> fx.Node:
        source, index = node.args
        if not isinstance(value_of(source), Tensor):
            raise Refusal("takes logits that are one of several results of another operation")
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(isinstance(item, slice | int | EllipsisType) and not isinstance(item, bool) for item in items):
            raise Refusal("takes logits that are indexed by something else than slices and numbers")
        rank = value_of(source).dim()
        place = items.index(...) if ... in items else len(items)
        whole = [slice(None)] * (rank - len(items) + (... in items))
        items[place : place + 1] = whole
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
        first, second = _two_operands(node)
        source, number = (first, second) if isinstance(value_of(first), Tensor) else (second, first)
        return self._scale(source, number, False)

    def div(self, node: fx.Node) -> fx.Node:
        return self._scale(*_two_operands(node), True)

    def _scale(self, source: Any, number: Any, is_division: bool) -> fx.Node:
        symbol = value_of(number)
        is_number = isinstance(number, int | float) or isinstance(symbol, torch.SymInt | torch.SymFloat)
        if not isinstance(value_of(source), Tensor) or not is_number:
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
        return node.args[0]  # type: ignore[return-value]

    def add(self, node: fx.Node) -> fx.Node:
        first, second = _two_operands(node)
        if not (isinstance(value_of(first), Tensor) and isinstance(value_of(second), Tensor)):
            raise Refusal("takes logits plus a number")
        source, bias = (first, second) if value_of(first).dim() > 1 else (second, first)
        if value_of(bias).dim() != 1 or not _same(value_of(bias).shape[0], value_of(source).shape[-1]):
            raise Refusal("takes logits plus something else than a bias of one entry a class")
        if self.bias is not None:
            raise Refusal("takes logits with two biases")
        self.bias = bias
        return source  # type: ignore[no-any-return]


_STEPS: dict[str, Callable[[_Steps, fx.Node], fx.Node]] = {
    **dict.fromkeys(_COPIES, _Steps.copy),
    "view": _Steps.view,
    "reshape": _Steps.view,
    "flatten": _Steps.flatten,
    "getitem": _Steps.getitem,
    "mul": _Steps.mul,
    "div": _Steps.div,
    "tanh": _Steps.tanh,
    "add": _Steps.add,
}


def _copied(node: fx.Node) -> fx.Node:
    """What a copy or an upcast is made of."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    before, after = value_of(source), value_of(node)
    if after.device != before.device:
        raise Refusal("takes logits that are moved to another device")
    if after.dtype != before.dtype and (after.dtype != torch.float32 or before.dtype == torch.float64):
        raise Refusal(f"takes logits that are converted from {before.dtype} to {after.dtype}")
    return source


def _product(factors: list[tuple[Any, bool]]) -> float:
    product = 1.0
    for factor, is_division in factors:
        if isinstance(factor, fx.Node) and torch._dynamo.config.assume_static_by_default:
            raise Refusal("takes logits with a softcap that changes from call to call")
        number = _specialised(factor)
        if is_division and number == 0:
            raise Refusal("takes logits that are divided by 0")
        product = product / number if is_division else product * number
    return product


def _name(node: fx.Node) -> str | None:
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def _through(node: fx.Node) -> str:
    return "as they are into the graph" if node.op == "placeholder" else f"through `{shown(node)}`"


def _classes_last(logits: Any, loss: fx.Node) -> tuple[Any, list[fx.Node]]:
    """Logits before the transposition that F.cross_entropy asks for beyond two dimensions, and the chain to there."""
    value = value_of(logits)
    if not isinstance(value, Tensor):
        raise Refusal("takes logits that are not a tensor of the graph")
    if value.dim() < 2:
        raise Refusal("is that of a single row")
    chain = [loss]
    if value.dim() == 2:
        return logits, chain
    while _name(logits) in _COPIES:
        _check_sole_user(logits, chain[-1])
        chain.append(logits)
        logits = _copied(logits)
    name = _name(logits)
    if name not in ("transpose", "permute", "movedim") or logits.kwargs or not _are_numbers(logits.args[1:]):
        raise Refusal("takes logits of more than two dimensions that no transposition brought into its order")
    # Every dimension of this one has a size of its own, which shows where it goes.
    sizes = torch.empty(tuple(range(2, value.dim() + 2)), device="meta")
    moved = getattr(sizes, name)(*logits.args[1:])
    if tuple(moved.shape) != (sizes.shape[0], sizes.shape[-1], *sizes.shape[1:-1]):
        raise Refusal("takes logits whose dimensions are in another order than rows and classes")
    _check_sole_user(logits, chain[-1])
    return logits.args[0], [*chain, logits]


def _before_log_softmax(values: Any, loss: fx.Node) -> tuple[Any, list[fx.Node]]:
    """The logits that F.nll_loss takes the log-softmax of, and the chain to there."""
    if not isinstance(values, fx.Node) or values.target not in _LOG_SOFTMAX:
        raise Refusal("takes something else than log-probabilities made by log_softmax")
    arguments = _arguments(values, *_LOG_SOFTMAX[values.target])
    if value_of(values).dim() != 2 or arguments.get("dim") not in (1, -1):
        raise Refusal("takes log-probabilities that are not (rows, classes)")
    before, after = value_of(arguments["input"]).dtype, value_of(values).dtype
    if after not in (before, torch.float32):
        raise Refusal(f"takes a log_softmax in {after}")
    _check_sole_user(values, loss)
    return arguments["input"], [loss, values]


def _are_numbers(values: Any) -> bool:
    return all(isinstance(value, int) or (isinstance(value, tuple | list) and _are_numbers(value)) for value in values)


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool]:
    """input, linear_weight, linear_bias of a linear map, and whether its linear_weight is (D, V)."""
    name = _name(linear)
    if name == "linear":
        arguments = _arguments(linear, "input", "weight", "bias")
        input, weight, bias, is_transposed = arguments["input"], arguments["weight"], arguments.get("bias"), False
    elif linear.kwargs:
        raise Refusal(f"takes logits of {shown(linear)} with {', '.join(linear.kwargs)}")
    else:
        *biases, input, matrix = linear.args
        bias = biases[0] if biases else None
        weight, is_transposed = _transposed(matrix)
    values = [value_of(node) for node in (input, weight, bias) if node is not None]
    if not all(isinstance(value, Tensor) for value in values):
        raise Refusal("takes logits of a linear map of something else than tensors")
    if values[0].dim() < 2 or values[1].dim() != 2:
        raise Refusal("takes logits of a product that is not rows times one matrix")
    if bias is not None and values[2].dim() != 1:
        raise Refusal("takes logits plus something else than a bias of one entry a class")
    return input, weight, bias, is_transposed


def _transposed(matrix: Any) -> tuple[Any, bool]:
    """(W, False) of a node W.T, and (M, True) of any other one."""
    if isinstance(value_of(matrix), Tensor) and value_of(matrix).dim() == 2:
        name, arguments = _name(matrix), matrix.args[1:]
        if len(arguments) == 1 and isinstance(arguments[0], tuple | list):
            arguments = tuple(arguments[0])
        order = [dim % 2 for dim in arguments] if _are_numbers(arguments) else []
        if (
            name == "t"
            or (name == "transpose" and order in ([0, 1], [1, 0]))
            or (name == "permute" and order == [1, 0])
        ):
            return matrix.args[0], False
        if matrix.op == "call_function" and matrix.target is getattr and arguments in (("T",), ("mT",)):
            return matrix.args[0], False
    return matrix, True


def _two_operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or node.kwargs:
        raise Refusal(f"takes logits that come through `{shown(node)}` with further arguments")
    return node.args[0], node.args[1]


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; `names` are those of the positional ones."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _specialised(number: Any) -> Any:
    """A number, and that of a variable of the graph, which is then for this value alone.

    With dynamic=True every number of a module is a variable; otherwise it is one because it has changed.
    """
    value = value_of(number)
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else number


def _same(size: Any, other: Any) -> bool:
    return bool(statically_known_true(size == other))


def _check_classes_stay_last(source: fx.Node, node: fx.Node) -> None:
    before, after = value_of(source), value_of(node)
    if before.dim() < 1 or after.dim() < 2 or not _same(before.shape[-1], after.shape[-1]):
        raise Refusal("takes logits that are reshaped together with the dimension of the classes")


def _check_sole_user(node: fx.Node, user: fx.Node) -> None:
    others = [other for other in node.users if other is not user]
    if any(other.op == "output" for other in others):
        raise Refusal("takes logits that the compiled function also returns, so that they have to be made anyway")
    if others:
        raise Refusal(f"takes logits that `{shown(others[0])}` uses too, so that they have to be made anyway")


def _check_circumstances(chain: list[fx.Node], operands: list[fx.Node | None]) -> None:
    """The new op is run where the loss is: in the mode of the linear map, and with its operands as they were there."""
    loss, linear = chain[0], chain[-1]
    for node in between(linear, loss):
        if node.target is torch._C._set_grad_enabled or shown(node) in _INFERENCE_MODES:
            raise Refusal("is recorded by autograd in another mode than its logits")
        if "functorch" in str(getattr(node.target, "__module__", "")):
            raise Refusal("is within a transform of torch.func that its logits are not in")
    writer = first_writer(chain, [operand for operand in operands if operand is not None])
    if writer is not None:
        raise Refusal(f"follows `{shown(writer)}`, which may change what its logits were made of")
    if any(shown(node) in _FORWARD_MODE for node in loss.graph.nodes):
        raise Refusal("is differentiated in forward mode")
