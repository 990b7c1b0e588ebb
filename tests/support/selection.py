"""What `make test` leaves to `make test-all` of tests with many parameters: `slow`, `each_value` and `each_pair`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

# Of how many parameters every choice of values occurs in the default suite.
STRENGTHS = {"each_value": 1, "each_pair": 2}
BY_DEFAULT = "cuda" if torch.cuda.is_available() else "cpu"


def slow(*values: Any) -> Any:
    """A parameter set that is left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def for_gpus(test: Any) -> Any:
    """A test of sizes at which a GPU changes what it does: `slow` where there is none."""
    return test if torch.cuda.is_available() else pytest.mark.slow(test)


def leave_combinations_out(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what tests marked `each_value` or `each_pair` can do without; nothing that a GPU runs."""
    groups: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for item in items:
        strength = next((STRENGTHS[mark.name] for mark in item.iter_markers() if mark.name in STRENGTHS), None)
        call: Any = getattr(item, "callspec", None)
        if strength is None or call is None or call.params.get("device", BY_DEFAULT) == "cuda":
            continue
        if item.get_closest_marker("slow") is None:
            groups[item.nodeid.partition("[")[0], strength].append(item)
    for (_, strength), group in groups.items():
        kept = set(covering([choices(item, strength) for item in group]))
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def choices(item: Any, strength: int) -> set[Any]:
    """The values, or pairs of values, that a case has: one of every `parametrize` and of every fixture's parameters."""
    params = {name: id(value) for name, value in item.callspec.params.items() if name != "device"}
    groups = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [group.split(",") if isinstance(group, str) else group for group in groups]
    values = [tuple((name.strip(), params.pop(name.strip())) for name in group) for group in groups]
    values += [(parameter,) for parameter in params.items()]
    return set(combinations(values, min(strength, len(values))))


def covering(cases: list[set[Any]]) -> Iterator[int]:
    """The numbers of cases that together have what all have: the one that adds most, of equal ones the least alike."""
    missing, taken = set().union(*cases), Counter[Any]()
    while missing:
        number = max(range(len(cases)), key=lambda n: (len(cases[n] & missing), -sum(taken[c] for c in cases[n])))
        missing -= cases[number]
        taken.update(cases[number])
        yield number
