"""Scans and advantages of shared-out time against the same call in one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from distributed import scan_cases
from distributed.loss_cases import Case
from distributed.team import Team
from support.selection import slow

BUDGET = 1e-13  # float64: tens of steps, of gates around 1
CASES: list[Case] = [
    {"sizes": sizes, "gamma": gamma, "direction": direction, "initial": True, "reset": reset, "dim": dim}
    for sizes, gamma, (direction, dim), reset in itertools.product(
        ([5, 5], [1, 7], [0, 4], [4, 0]),
        ("number", "0-D", "row", "step"),
        (("left", 0), ("right", 1)),
        (False, True),
    )
] + [
    {"sizes": [6, 6], "gamma": "step", "zigzag": True, "reset": True, "initial": True},
    {"sizes": [6, 6], "gamma": "row", "zigzag": True, "direction": "left", "dim": 1},
    {"sizes": [4, 5], "gamma": "complex", "dtype": torch.complex128, "initial": True, "reset": True},
    {"sizes": [4, 5], "gamma": "number", "value": -1.1},
    {"sizes": [4, 5], "gamma": "number", "value": 1, "direction": "left"},
]


def check(team: Team, cases: list[Case], budget: float = BUDGET) -> None:
    for case, *found in zip(cases, *team.run(scan_cases.many, cases), strict=True):
        expected = scan_cases.in_one_process(case)
        for rank, results in enumerate(found):
            steps, dim = scan_cases.steps_of(case, rank), case.get("dim", 0)
            wanted = [t.index_select(dim, steps) if t.dim() == 2 else t for t in expected]
            for a, b in zip(results, wanted[: len(results)], strict=True):
                torch.testing.assert_close(a, b, rtol=budget, atol=budget)


def test_scans_are_those_of_one_process(two: Team) -> None:
    check(two, CASES)


@pytest.mark.slow
def test_scans_on_four_ranks(four: Team) -> None:
    cases = [{**case, "sizes": [case["sizes"][0], 2, *case["sizes"]]} for case in CASES if not case.get("zigzag")]
    check(four, cases)
    check(four, [{**case, "sizes": [6] * 4} for case in CASES if case.get("zigzag")])


def test_float32(two: Team) -> None:
    """What is carried is rounded once, beside the op's own rounding."""
    case: Case = {"sizes": [300, 300], "gamma": "number", "value": 0.99, "dtype": torch.float32, "grads": ("input",)}
    # Sums of 100 terms or so of size 1, within a few units of theirs.
    check(two, [case], 100 * 2.0**-24)


@pytest.mark.parametrize("gamma", [slow("number"), "step"])
def test_compiled(two: Team, gamma: str) -> None:
    check(two, [{"sizes": [3, 4], "gamma": gamma, "compiler": "aot_eager"}])


SPECIAL: list[Case] = [
    {"sizes": [4, 4], "put": [(6, torch.nan)]},
    {"sizes": [4, 4], "put": [(6, torch.inf)]},
    {"sizes": [4, 4], "put": [(6, torch.nan)], "cut": 5},  # a reset lets nothing through
    {"sizes": [4, 4], "put": [(1, -torch.inf)], "direction": "left"},
    {"sizes": [2000, 4], "put": [(2001, torch.inf)], "value": 0.5},  # 0.5**2000 is 0, and 0·inf would be nan
    {"sizes": [2001, 4], "put": [(2002, torch.inf)], "value": -0.5},
    {"sizes": [4, 4], "put": [(6, torch.inf)], "value": 0.0},  # a gate of 0 makes a nan of it
    {"sizes": [1100, 4], "put": [(slice(None), 0.0)], "value": 2.0},  # 2**1100 is inf, and inf·0 would be nan
    {"sizes": [2000, 4], "put": [(2001, torch.inf)], "gamma": "step"},
]


def check_special(two: Team, cases: list[Case]) -> None:
    for case in cases:
        expected = scan_cases.special({**case, "whole": True})
        for rank, found in enumerate(two.run(scan_cases.special, case)):
            wanted = expected[scan_cases.steps_of(case, rank)]
            torch.testing.assert_close(found, wanted, rtol=BUDGET, atol=BUDGET, equal_nan=True)


def test_what_is_no_number_is_carried_across_ranks(two: Team) -> None:
    check_special(two, SPECIAL)


LONG: list[Case] = [
    {"sizes": [9000, 9000], "gamma": gamma, "direction": direction, "dim": dim, "initial": True, **more}
    for (gamma, more), (direction, dim) in itertools.product(
        (
            ("number", {"reset": True, "grads": ("input", "initial")}),
            ("number", {"value": -0.5}),
            ("number", {"value": 1, "grads": ("input", "initial")}),
            ("0-D", {"grads": ("input",)}),
            ("row", {}),
            ("step", {"reset": True, "grads": ("input",)}),
            ("even", {"grads": ("input",)}),
        ),
        (("left", 0), ("right", 1)),
    )
]


def test_heads_of_long_slices_are_mended(two: Team) -> None:
    """Decaying, with resets, and where they do not decay: sums of 18000 terms, of about the root of that in size."""
    check(two, [case for case in LONG if case["gamma"] != "even" and case.get("value") != 1])
    check(two, [case for case in LONG if case["gamma"] == "even" or case.get("value") == 1], 18000**1.5 * 2.0**-52)
    check(two, [{"sizes": [18000, 18000], "zigzag": True, "gamma": "number", "value": 0.5}])


def test_what_is_mended_ends_where_the_discount_has_decayed(two: Team) -> None:
    if two.backend == "nccl":
        pytest.skip("on a GPU the host says how far the head reaches, without a look at it")
    case: Case = {"sizes": [40000, 40000], "direction": "left", "grads": ()}
    steps = [two.run(scan_cases.mended_steps, {**case, **of}) for of in ({"value": 0.9}, {"gamma": "step"})]
    # 0.9**n leaves float64 after some 7000 steps; nothing is carried into rank 0, and a block of 1024 shows it.
    assert steps[0][0] == 1024
    assert 7000 < steps[0][1] < 14000
    assert steps[1][1] < 8192


LONG_SPECIAL: list[Case] = [
    {"sizes": [9000, 4], "put": [(9001, value)], "value": gamma}
    for value in (torch.nan, torch.inf)
    for gamma in (0.5, -0.5, 0.0)
] + [
    {"sizes": [9000, 4], "put": [(9001, torch.inf)], "gamma": "step"},
    {"sizes": [9000, 4], "put": [(9001, torch.nan)], "gamma": "number", "cut": 3},
    {"sizes": [9000, 4], "put": [(9001, torch.inf)], "value": 0.5, "cut": 3},
    {"sizes": [4, 9000], "put": [(1, -torch.inf)], "direction": "left", "value": 0.5},
]


def test_what_is_no_number_is_carried_behind_the_head(two: Team) -> None:
    check_special(two, LONG_SPECIAL)


GAE: list[Case] = [
    {"sizes": [5, 3]},
    {"sizes": [5, 3], "truncated": True, "gamma": "step", "lambda": "row"},
    {"sizes": [1, 3], "truncated": True, "gamma": "row"},
    {"sizes": [0, 3], "truncated": True},
    {"sizes": [3, 0], "gamma": "step"},
    {"sizes": [5, 3], "next_values": True, "truncated": True},
    {"sizes": [6, 6], "zigzag": True, "truncated": True},
    {"sizes": [5, 3], "truncated": True, "compiler": "aot_eager"},
]


def test_advantages_are_those_of_one_process(two: Team) -> None:
    for case, *found in zip(GAE, *two.run(scan_cases.many_advantages, GAE), strict=True):
        expected = scan_cases.advantages(case, True)
        for rank, results in enumerate(found):
            steps = scan_cases.steps_of(case, rank)
            for a, b in zip(results, expected, strict=True):
                wanted = b.index_select(0, steps) if b.dim() == 2 else b
                torch.testing.assert_close(a, wanted, rtol=BUDGET, atol=BUDGET)


def test_a_slice_may_change_alone(two: Team) -> None:
    """What a group has seen does not depend on how many steps or classes a rank has."""
    check(two, [{"sizes": [3, 9]}, {"sizes": [3, 8]}, {"sizes": [2, 8]}])


DIFFERENCES = {
    "rows": "the shape of input must be the same on all ranks, got ('steps', 3) on rank 0 and ('steps', 4) on rank 1",
    "gamma": "gamma must be the same on all ranks, got 0.9 on rank 0 and 0.8 on rank 1",
    "direction": "direction must be the same on all ranks, got right on rank 0 and left on rank 1",
    "reset": "gradients must be the same on all ranks, got (True, False) on rank 0 and (True, False, False) on rank 1",
    "window": "window must be None where time is shared out, got 2",
    "odd": "input must have an even number of steps with zigzag=True, got 3",
}


def test_a_difference_is_the_same_sentence_on_all_ranks(two: Team) -> None:
    for difference, sentence in DIFFERENCES.items():
        for returned, answer in two.answers(scan_cases.differs, difference):
            assert not returned, difference
            assert answer[1].endswith(sentence), (difference, answer[1])
    check(two, CASES[:1])
