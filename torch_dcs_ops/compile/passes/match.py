"""Finds linear + cross-entropy in a graph that Dynamo has traced: `find` says what one loss is made of.

It is read from the loss backwards. What the loss takes as logits must come from a linear map by steps that leave every
row of logits whole (views, slices of rows, upcasts, numbers as factors, a bias, a softcap) or cut it to its first
classes, each used by the next one alone (`match_steps.py`).

Nothing is changed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ..inductor import dynamo
from ..inductor.dynamo import is_same
from .build import shown, value_of
from .findings import Reason
from .match_steps import COPIES, LINEAR_MAPS, LOG_SOFTMAX, ROW_STEPS, STEPS, TRANSPOSITIONS, RowStep, Steps
from .mutation import between, first_writer
from .nodes import (
    Refusal,
    are_numbers,
    arguments_of,
    check_sole_user,
    copied,
    is_tensor,
    name_of,
    order_after,
    source_of,
    specialized,
)

_LOSSES = (functional.cross_entropy, functional.nll_loss)
# A target that no gather takes, so that none is left out: torch.gather has no ignore_index.
_NEVER = torch.iinfo(torch.int64).min


@dataclass
class Match:
    """The arguments of `linear_cross_entropy`, as nodes and numbers, and what brings them into its form."""

    chain: list[fx.Node]  # of the loss, the steps and the linear map, each used by the one before it alone
    input: fx.Node
    linear_weight: fx.Node
    linear_bias: fx.Node | None
    target: fx.Node
    weight: fx.Node | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    linear_weight_is_transposed: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    classes: int | None = None  # the first classes alone, where logits are cut to them
    row_steps: list[RowStep] = field(default_factory=list)  # in the order of the model
    # Variables of the graph that multiply (False) or divide (True) the logits.
    variable_factors: list[tuple[fx.Node, bool]] = field(default_factory=list)
    is_gathered: bool = False  # log-probabilities (..., 1) of a target (..., 1), which are no loss yet

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
    """A call of F.cross_entropy or F.nll_loss, or a gather of log-probabilities."""
    return (node.op == "call_function" and node.target in _LOSSES) or (
        name_of(node) == "gather" and name_of(_input_of(node)) == "log_softmax"
    )


def logits_of(loss: fx.Node) -> Any:
    """The fake tensor that a loss takes for logits."""
    return value_of(_input_of(loss))


def place_of(node: fx.Node) -> str:
    """The line of the user's that a node comes from, or nothing."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    outside = [line for line in lines if line.startswith("File ") and "/torch/nn/" not in line]
    # Behind a graph break the rest of a function f is one of the name torch_dynamo_resume_in_f_at_n.
    return re.sub(r"\btorch_dynamo_resume_in_(\w+)_at_\d+$", r"\1", outside[-1]) if outside else ""


def find(loss: fx.Node) -> Match:
    """What a loss is made of. Raises Refusal."""
    steps = Steps()
    if name_of(loss) == "gather":
        logits, chain, target, options = _gathered(loss)
    else:
        target, options = _target_and_options(loss)
        of_log_softmax = loss.target is functional.nll_loss
        logits, chain = _before_log_softmax(loss, steps) if of_log_softmax else _classes_last(_input_of(loss), [loss])
        if len(chain) > 1 and not of_log_softmax and value_of(target).is_floating_point():
            raise Refusal("has class probabilities with the classes in another dimension than the last")
    chain += steps.follow(logits, chain[-1], LINEAR_MAPS, STEPS)
    input, linear_weight, linear_bias, is_transposed = _operands(chain[-1])
    if steps.bias is not None and linear_bias is not None:
        raise Refusal("takes logits with two biases")
    linear_bias = steps.bias or linear_bias
    _check_circumstances(chain, [input, linear_weight, linear_bias])
    # The numbers last, as a graph whose variable is taken for a constant is made for one value alone.
    softcap, logit_scale, variable_factors = steps.scale(place_of(loss))
    return Match(
        chain, input, linear_weight, linear_bias, target,
        **{name: specialized(option) for name, option in options.items()},
        linear_weight_is_transposed=is_transposed, softcap=softcap, logit_scale=logit_scale, classes=steps.classes,
        row_steps=steps.row_steps[::-1], variable_factors=variable_factors, is_gathered=name_of(loss) == "gather",
    )  # fmt: skip


def _input_of(loss: fx.Node) -> Any:
    return arguments_of(loss, "input").get("input")


def _target_and_options(loss: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = arguments_of(loss, *names)
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise Refusal("is called with size_average or reduce, deprecated in favor of reduction")
    if not is_tensor(arguments["target"]):
        raise Refusal("has a target that is not a tensor of the graph")
    options = {name: arguments[name] for name in names[2:] if arguments.get(name) is not None}
    return arguments["target"], options


def _classes_last(logits: Any, chain: list[fx.Node]) -> tuple[Any, list[fx.Node]]:
    """Logits before the transposition that the losses ask for beyond two dimensions, and the chain to there."""
    value = value_of(logits)
    if not isinstance(value, Tensor):
        raise Refusal("takes logits that are not a tensor of the graph")
    if value.dim() < 2:
        raise Refusal("is that of a single row")
    if value.dim() == 2:
        return logits, chain
    while name_of(logits) in COPIES:
        check_sole_user(logits, chain[-1])
        chain = [*chain, logits]
        logits = copied(logits)
    if name_of(logits) not in TRANSPOSITIONS:
        raise Refusal("takes logits of more than two dimensions that no transposition brought into its order")
    order = order_after(logits)
    if order != [0, len(order) - 1, *range(1, len(order) - 1)]:
        raise Refusal("takes logits whose dimensions are in another order than rows and classes")
    check_sole_user(logits, chain[-1])
    return source_of(logits), [*chain, logits]


def _before_log_softmax(loss: fx.Node, steps: Steps) -> tuple[Any, list[fx.Node]]:
    """The logits that F.nll_loss takes the log-softmax of, and the chain to there."""
    values, chain = _input_of(loss), [loss]
    if is_tensor(values) and value_of(values).dim() > 2 and name_of(values) == "log_softmax":
        # Over the second dimension, of logits that are transposed already.
        check_sole_user(values, loss)
        return _classes_last(_input_of_log_softmax(values, 1), [loss, values])
    values, chain = _classes_last(values, chain)
    chain += steps.follow(values, chain[-1], LOG_SOFTMAX, ROW_STEPS)
    if steps.classes is not None:
        raise Refusal("takes log-probabilities of the first classes alone")
    return _input_of_log_softmax(chain[-1], value_of(chain[-1]).dim() - 1), chain


def _gathered(loss: fx.Node) -> tuple[Any, list[fx.Node], fx.Node, dict[str, Any]]:
    """Logits, the chain to there, indices (..., 1) and options of ``log_softmax(logits).gather(-1, indices)``."""
    arguments = arguments_of(loss, "input", "dim", "index", "sparse_grad")
    log_probs, index = arguments["input"], arguments["index"]
    is_plain = not arguments.get("sparse_grad") and "out" not in arguments
    if not (is_plain and is_tensor(index) and isinstance(arguments["dim"], int)):
        raise Refusal("gathers in a form that is not known")
    check_sole_user(log_probs, loss)  # before the sizes, whose comparison is a guard
    before, taken = value_of(log_probs), value_of(index)
    last = before.dim() - 1
    # Indices may be fewer than rows. That dynamic sizes are equal is a guard of the graph then.
    sizes_are_same = before.dim() > 1 and all(
        bool(n == m) for n, m in zip(before.shape[:-1], taken.shape, strict=False)
    )
    if arguments["dim"] % before.dim() != last or not sizes_are_same or not is_same(taken.shape[-1], 1):
        raise Refusal("gathers something else than one class of every row")
    return (
        _input_of_log_softmax(log_probs, last),
        [loss, log_probs],
        index,
        {"reduction": "none", "ignore_index": _NEVER},
    )


def _input_of_log_softmax(node: fx.Node, dim: int) -> Any:
    names = (
        ("input", "dim", "_stacklevel", "dtype") if node.target is functional.log_softmax else ("input", "dim", "dtype")
    )
    arguments = arguments_of(node, *names)
    if (
        not isinstance(arguments.get("dim"), int)
        or arguments["dim"] % value_of(node).dim() != dim
        or "out" in arguments
    ):
        raise Refusal("takes log-probabilities over another dimension than that of the classes")
    before, after = value_of(arguments["input"]).dtype, value_of(node).dtype
    if after not in (before, torch.float32):
        raise Refusal(f"takes a log_softmax in {after}")
    return arguments["input"]


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool]:
    """input, linear_weight, linear_bias of a linear map, and whether its linear_weight is (D, V)."""
    name = name_of(linear)
    if name == "linear":
        arguments = arguments_of(linear, "input", "weight", "bias")
        input, weight, bias, is_transposed = arguments["input"], arguments["weight"], arguments.get("bias"), False
    elif name == "einsum":
        (input, weight, is_transposed), bias = _operands_of_einsum(linear), None
    elif linear.kwargs:
        raise Refusal(f"takes logits of {shown(linear)} with {', '.join(linear.kwargs)}")
    else:
        *biases, input, matrix = linear.args
        bias = biases[0] if biases else None
        weight, is_transposed = _transposed(matrix)
        if not is_transposed and isinstance(matrix, fx.Node) and first_writer([linear, matrix], [weight]) is not None:
            weight, is_transposed = matrix, True  # W.T was taken before W was given other strides
    values = [value_of(node) for node in (input, weight, bias) if node is not None]
    if not all(isinstance(value, Tensor) for value in values):
        raise Refusal("takes logits of a linear map of something else than tensors")
    if values[0].dim() < 2 or values[1].dim() != 2:
        raise Refusal("takes logits of a product that is not rows times one matrix")
    if bias is not None and values[2].dim() != 1:
        raise Refusal("takes logits plus something else than a bias of one entry a class")
    return input, weight, bias, is_transposed


def _operands_of_einsum(node: fx.Node) -> tuple[Any, Any, bool]:
    """input, linear_weight, and whether that is (D, V), of ``torch.einsum("bsd,vd->bsv", input, linear_weight)``."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    terms, _, result = str(equation).replace(" ", "").replace("...", "*").partition("->")
    names = terms.split(",")
    if len(names) == len(operands) == 2:
        for input, weight in ((0, 1), (1, 0)):
            rows, matrix = names[input], names[weight]
            lead, feature = rows[:-1], rows[-1:]
            classes = matrix.replace(feature, "")
            is_linear = lead and len(matrix) == 2 and len(classes) == 1 and classes != "*" and result == lead + classes
            if is_linear and len(set(lead + matrix)) == len(lead) + 2:
                is_transposed = matrix[0] == feature
                features = value_of(operands[weight]).shape[0 if is_transposed else 1]
                if is_same(value_of(operands[input]).shape[-1], features):
                    return operands[input], operands[weight], is_transposed
    raise Refusal(f"takes logits of the einsum {equation!r}, which is not rows times one matrix")


def _transposed(matrix: Any) -> tuple[Any, bool]:
    """(W, False) of a node W.T, and (M, True) of any other one."""
    if is_tensor(matrix) and value_of(matrix).dim() == 2:
        name, arguments = name_of(matrix), matrix.args[1:]
        if len(arguments) == 1 and isinstance(arguments[0], tuple | list):
            arguments = tuple(arguments[0])
        order = [dim % 2 for dim in arguments] if are_numbers(arguments) else []
        if (
            name == "t"
            or (name == "transpose" and order in ([0, 1], [1, 0]))
            or (name == "permute" and order == [1, 0])
        ):
            return matrix.args[0], False
        if matrix.op == "call_function" and matrix.target is getattr and arguments in (("T",), ("mT",)):
            return matrix.args[0], False
    return matrix, True


def _check_circumstances(chain: list[fx.Node], operands: list[fx.Node | None]) -> None:
    """The new op is run where the loss is: in the mode of the linear map, and with its operands as they were there."""
    loss, linear = chain[0], chain[-1]
    for node in between(linear, loss):
        if dynamo.sets_autograd_mode(node):
            raise Refusal("is recorded by autograd in another mode than its logits", Reason.MODE)
        if dynamo.is_of_functorch(node):
            raise Refusal("is within a transform of torch.func that its logits are not in", Reason.MODE)
    writer = first_writer(chain, [operand for operand in operands if operand is not None])
    if writer is not None:
        raise Refusal(f"follows `{shown(writer)}`, which may change what its logits were made of", Reason.CHANGED)
    if any(map(dynamo.differentiates_forward, loss.graph.nodes)):
        raise Refusal("is differentiated in forward mode", Reason.MODE)
