"""Returns with nothing around them stay a call of the library's kernel.

With pointwise producers or consumers `_temporal_difference_scan` is worth being part of their kernel: they move twice
its traffic otherwise. Alone, on an H200 (float32, fractions of a copy of the bytes, generated / the library's): 8192
rows of 2048 steps 0.72 / 0.83 for GAE and 0.64 / 0.91 for TD(lambda), 4096 of 65536 0.79 / 0.88 and 0.73 / 0.94, 1024
steps of 65536 columns 0.90 / 0.91 and 0.86 / 0.90 (V-trace 0.45 / 0.61). 32768 rows of 8 steps, where a launch is most
of it: 0.43 / 0.78, for V-trace 0.14 / 0.78, for TD(lambda) 0.51 / 0.83.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from .. import _registry
from ..ops.temporal_difference import STAYS_A_CALL
from ._build import hint, value_of

# Where the generated kernel is the faster one all the same.
WIDE_STEPS, WIDE_COLUMNS = 128, 32_768
LONG_ROW = 1024

# Positions of the two discounts; behind each is its number.
_DISCOUNTS = (6, 8)
_OPERANDS = (0, 1, 2, 3, 4, 5, 10)
_VIEWS = (
    operator.getitem, "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "detach", "movedim",
)  # fmt: skip


def mark_returns_alone(graph: fx.Graph) -> int:
    """Marks the calls that have nothing around them, and gives them their discounts as numbers; returns how many."""
    marked = []
    for node in graph.find_nodes(op="call_function", target=_registry.temporal_difference_scan):
        args = list(node.args)
        if any(_is_computed(args[place]) for place in _OPERANDS) or any(map(_computes, node.users)):
            continue
        if _generated_is_faster(args):
            continue
        numbers = [_number(args[place], args[place + 1]) for place in _DISCOUNTS]
        if None in numbers:
            # Another number would be another graph; and a tensor of one a row is read by a kernel for all cases.
            continue
        for place, number in zip(_DISCOUNTS, numbers, strict=True):
            args[place : place + 2] = (None, number)
        marked.append((node, tuple(args)))
    # Only now: an error on the way leaves the graph as it was.
    for node, numbered in marked:
        node.args = numbered
        node.meta[STAYS_A_CALL] = True
    # What made tensors of the numbers is dropped later, with other dead code: here a mutation would look dead too.
    return len(marked)


def _generated_is_faster(args: list[Any]) -> bool:
    """Many columns of few steps: 128 of 65536 columns 0.89 generated and 0.79 the library's for GAE, 0.84 and 0.70 for
    TD(lambda). Long rows of V-trace, which has a tensor more to hold in shared memory: 0.81 and 0.67 for 8192 of 2048
    steps, 0.83 and 0.69 for 4096 of 65536.
    """
    rewards, rhos, dim = value_of(args[0]), args[10], args[14]
    if rewards is None or not isinstance(dim, int):
        return False
    sizes = [hint(size) for size in rewards.shape]
    dim %= len(sizes)
    columns = math.prod(sizes[dim + 1 :])
    if rhos is not None:
        return columns == 1 and sizes[dim] >= LONG_ROW
    return sizes[dim] <= WIDE_STEPS and columns >= WIDE_COLUMNS


def _number(rate: Any, number: Any) -> float | None:
    """A discount that is written into the graph, as number_as_tensor writes it (ops/discounted_cumsum.py)."""
    if rate is None:
        return number if isinstance(number, float) else None
    if not isinstance(rate, fx.Node) or rate.target is not operator.mul or len(rate.args) != 2:
        return None
    ones, factor = rate.args
    is_one = isinstance(ones, fx.Node) and ones.target is torch.ones and ones.args == ((),)
    return factor if is_one and isinstance(factor, float) else None


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS


def _is_computed(node: Any) -> bool:
    """Whether a value is the result of an operation, seen through views."""
    if not isinstance(node, fx.Node) or node.op in ("placeholder", "get_attr"):
        return False
    return any(map(_is_computed, node.all_input_nodes)) if _is_view(node) else True


def _computes(node: fx.Node) -> bool:
    """Whether something other than the graph's caller reads a value."""
    if node.op == "output":
        return False
    return any(map(_computes, node.users)) if _is_view(node) else True
