"""Gives the ops discounts that are numbers of the graph as numbers.

What a user writes as a Python number is a 0-D tensor of the graph (ops/scan/discounted_cumsum.py), which another number
does not compile again. The backward is given that tensor as one that the forward has saved, and its kernels are written
without knowing the number: twice the registers for the scan of a column (1024 steps of 4096 columns on an H200: half
the speed). Where the graph holds the number itself, as Dynamo writes it until it has seen another one, it is compiled
for that number alone anyway.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ... import _registry

# What may take a discount: none of them writes to it, or gives it another name.
_RETURNS = (_registry.temporal_difference_scan, _registry.n_step_returns)
_READERS = (_registry.discounted_cumsum_tensor, *_RETURNS)

# Positions of the discounts of both of `_RETURNS`; behind each is its number.
_DISCOUNTS = (6, 8)


def give_numbers(graph: fx.Graph) -> int:
    """Gives scans and returns their discounts as numbers, in place, where the graph says them; returns to how many."""
    changes = []
    for node in graph.find_nodes(op="call_function", target=_registry.discounted_cumsum_tensor):
        number = number_of(node.args[1]) if len(node.args) == 2 else None
        if number is not None:
            changes.append((node, _registry.discounted_cumsum_number, (node.args[0], number)))
    for node in (node for op in _RETURNS for node in graph.find_nodes(op="call_function", target=op)):
        args = list(node.args)
        for index in _DISCOUNTS:
            number = number_of(args[index])
            if number is not None:
                args[index : index + 2] = (None, number)
        if args != list(node.args):
            changes.append((node, node.target, tuple(args)))
    # Only now: an error on the way leaves the graph as it was.
    for node, target, arguments in changes:
        node.target, node.args = target, arguments
    # What made tensors of the numbers is dropped later, with other dead code: here a mutation would look dead too.
    return len(changes)


def has_numbers(node: fx.Node) -> bool:
    """Whether a call of `_temporal_difference_scan` has numbers for discounts."""
    return all(node.args[index] is None and isinstance(node.args[index + 1], float) for index in _DISCOUNTS)


def number_of(rate: Any) -> float | None:
    """A number that the graph makes a discount of, as number_as_tensor makes it (ops/scan/discounted_cumsum.py).

    A user's own tensor may look like that, be rounded to another dtype, and be written to: then it is no such number.
    """
    if not isinstance(rate, fx.Node) or rate.target is not operator.mul or len(rate.args) != 2:
        return None
    ones, factor = rate.args
    if not (isinstance(ones, fx.Node) and isinstance(factor, float)):
        return None
    is_one = ones.target is torch.ones and ones.args == ((),) and ones.kwargs.get("dtype") == torch.float64
    is_read_alone = set(ones.users) == {rate} and all(user.target in _READERS for user in rate.users)
    return factor if is_one and is_read_alone else None
