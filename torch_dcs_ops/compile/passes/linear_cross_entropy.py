"""Puts `dcs::linear_cross_entropy` where a model has a linear map and F.cross_entropy of its result.

The pass works on the graph that Dynamo has traced, before autograd sees it: later, views and casts have become too
many forms of the same thing. A loss that is not understood stays exactly as it is, and the log says why, once.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ... import _registry
from ..inductor import dynamo
from .build import Builder, hint, shown, value_of
from .findings import Finding, Reason, say
from .match import Match, find, is_loss, logits_of, place_of
from .nodes import Refusal

log = logging.getLogger("torch_dcs_ops.compile")

# Logits of fewer elements are left to the compiler: 16 MiB of float32 are no burden, and the op's own kernel launches
# would be no gain.
MINIMUM_LOGITS = 2**22
_LARGE_SIZE = 2048


def fuse_linear_cross_entropy(
    graph: fx.Graph, minimum_logits: int = MINIMUM_LOGITS, memory_budget: int | None = None
) -> list[Finding]:
    """Fuses every linear + cross-entropy of `graph`, in place, and returns what became of each loss.

    memory_budget is the op's argument.
    Never raises: what goes wrong is logged, and the graph is then what it was.
    """
    before = str(graph) if log.isEnabledFor(logging.DEBUG) else ""
    findings = [_attempt(node, minimum_logits, lambda match: _replace(match, memory_budget)) for node in _losses(graph)]
    say(findings)
    if any(finding.fused for finding in findings):
        log.debug("before:\n%s\nafter:\n%s", before, graph)
    return findings


def find_linear_cross_entropy(graph: fx.Graph, minimum_logits: int = MINIMUM_LOGITS) -> list[Finding]:
    """What `fuse_linear_cross_entropy` would do; nothing is logged, and the graph stays as it is."""
    return [_attempt(node, minimum_logits, _try_out) for node in _losses(graph)]


def _losses(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_loss(node) and isinstance(logits_of(node), Tensor)]


def _attempt(loss: fx.Node, minimum_logits: int, rewrite: Callable[[Match], None]) -> Finding:
    name, place = shown(loss), place_of(loss)
    try:
        _check_size(loss, minimum_logits)
        rewrite(find(loss))
    except Refusal as refusal:
        return Finding(name, place, refusal.reason, str(refusal))
    except Exception as error:
        log.debug("linear_cross_entropy", exc_info=True)
        return Finding(name, place, Reason.ERROR, f"could not be fused: {type(error).__name__}: {error}")
    return Finding(name, place)


def _check_size(loss: fx.Node, minimum: int) -> None:
    """That a loss is of so many logits, as far as that is known, that it is worth fusing."""
    count = math.prod(map(_large_hint, logits_of(loss).shape))
    if count < minimum:
        raise Refusal(
            f"takes {count} logits, fewer than {minimum} (minimum_logits), which are no burden", Reason.FEW_LOGITS
        )


def _large_hint(size: Any) -> int:
    """A size that may change counts as a large one: the graph is also for what comes after the first, small batch."""
    return size if isinstance(size, int) else max(hint(size), _LARGE_SIZE)


def _replace(match: Match, memory_budget: int | None) -> None:
    loss, build = match.loss, Builder(match.loss)
    try:
        result = _fused(match, build, memory_budget)
    except BaseException:
        build.undo()
        raise
    result.meta[dynamo.VALUE] = value_of(loss)
    loss.replace_all_uses_with(result)
    # Nothing else: a graph of Dynamo's has statements that are there for what they do to their operands.
    for node in match.chain:
        loss.graph.erase_node(node)


def _try_out(match: Match) -> None:
    build = Builder(match.loss)
    try:
        _fused(match, build)
    finally:
        build.undo()


def _fused(match: Match, build: Builder, memory_budget: int | None = None) -> fx.Node:
    def cast(node: fx.Node) -> fx.Node:
        # What autocast made of the linear map's operands.
        return node if value_of(node).dtype == match.dtype else build.method("to", node, match.dtype)

    weight = match.linear_weight
    if match.linear_weight_is_transposed:
        weight = build.method("t", weight)
    bias = match.linear_bias
    if match.classes is not None:
        weight = build.method("narrow", weight, 0, 0, match.classes)
        if bias is not None and value_of(bias).shape[0] != match.classes:
            bias = build.method("narrow", bias, 0, 0, match.classes)
    rows = match.input
    for step in match.row_steps:
        rows = step(build, rows)
    for factor, is_division in match.variable_factors:
        # As a number of the op it would be a constant.
        scale = operator.truediv if is_division else operator.mul
        rows = build.function(scale, rows, factor)
        bias = None if bias is None else build.function(scale, bias, factor)
    keywords: dict[str, Any] = {
        "linear_bias": None if bias is None else cast(bias),
        "weight": match.weight,
        "reduction": match.reduction,
        "ignore_index": match.ignore_index,
        "label_smoothing": match.label_smoothing,
        "softcap": match.softcap,
        "logit_scale": match.logit_scale,
        "memory_budget": memory_budget,
    }
    target = build.method("squeeze", match.target, -1) if match.is_gathered else match.target
    rows, weight = cast(rows), cast(weight)
    operands = rows, weight, _like_the_others(build, target, value_of(rows))
    device = value_of(match.loss).device.type
    if match.dtype != torch.float64 and _autocast_is_near(match.loss, device):
        # The operands are in the dtype of the linear map, which autocast at the loss may not be set to.
        enter_autocast, exit_autocast = dynamo.autocast_functions()
        entered = build.statement("call_function", enter_autocast, device, None, False, None)
        result = build.function(_registry.linear_cross_entropy, *operands, **keywords)
        build.statement("call_function", exit_autocast, entered)
    else:
        result = build.function(_registry.linear_cross_entropy, *operands, **keywords)
    if match.is_gathered:
        result = build.method("unsqueeze", build.method("neg", result), -1)
    wanted, found = value_of(match.loss), value_of(result)
    if found.dim() != wanted.dim():
        raise Refusal(f"has the shape {tuple(wanted.shape)}, where linear_cross_entropy has {tuple(found.shape)}")
    return result if found.dtype == wanted.dtype else build.method("to", result, wanted.dtype)


def _like_the_others(build: Builder, target: fx.Node, rows: Tensor) -> fx.Node:
    """loss_parallel takes a plain target beside DTensors for one that is the same on all ranks; the op takes none."""
    mesh = getattr(rows, "device_mesh", None)
    if mesh is None or hasattr(value_of(target), "device_mesh"):
        return target

    def replicated(target: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return build.function(replicated, target)


def _autocast_is_near(loss: fx.Node, device: str) -> bool:
    enter_autocast, _ = dynamo.autocast_functions()
    return torch.is_autocast_enabled(device) or any(node.target is enter_autocast for node in loss.graph.nodes)
