"""Slices of any sizes, of classes and of time, drawn by hypothesis, against one process."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed import test_kl_div, test_loss, test_scan
from distributed.loss_cases import Case
from distributed.team import Team

SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(sum)
FEW = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REDUCTIONS = st.sampled_from(["none", "mean", "sum"])


@FEW
@given(sizes=SIZES, rows=st.integers(0, 20), reduction=REDUCTIONS, budget=st.sampled_from([None, 1, 200]))
def test_classes(two: Team, sizes: list[int], rows: int, reduction: str, budget: int | None) -> None:
    options: dict[str, Any] = {"reduction": reduction, "memory_budget": budget}
    case: Case = {"sizes": sizes, "lead": (rows,), "bias": True}
    test_loss.check(two, [{**case, "options": options}])


@FEW
@given(sizes=SIZES, rows=st.integers(0, 20), direction=st.sampled_from(["forward", "reverse", "jsd"]))
def test_classes_of_two_heads(two: Team, sizes: list[int], rows: int, direction: str) -> None:
    options = {"direction": direction, "reduction": "sum", "memory_budget": 500}
    test_kl_div.check(two, [{"sizes": sizes, "lead": (rows,), "options": options}])


@FEW
@given(sizes=SIZES, gamma=st.sampled_from(["number", "row", "step"]), direction=st.sampled_from(["left", "right"]))
def test_steps(two: Team, sizes: list[int], gamma: str, direction: str) -> None:
    case = {"sizes": sizes, "gamma": gamma, "direction": direction, "initial": True, "reset": True}
    test_scan.check(two, [case])
