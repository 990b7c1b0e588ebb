"""DTensors of random shapes and layouts, on many ranks in one process and on a few real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distributed.team import Team
from support.subprocesses import environment

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (4, range(4)),
        pytest.param(4, range(4, 12), marks=pytest.mark.slow),
        *(
            pytest.param(ranks, range(first, first + 625), marks=pytest.mark.slow)
            for ranks in (2, 3, 4, 6)
            for first in range(100, 2600, 625)
        ),
    ],
)
def test_on_many_ranks_in_one_process(ranks: int, seeds: range) -> None:
    """Ten thousand in all, with `slow`."""
    command = [sys.executable, "distributed/layout_cases.py", *map(str, (ranks, seeds.start, seeds.stop))]
    done = subprocess.run(
        command, cwd=TESTS, env=environment(PYTHONPATH=str(TESTS), OMP_NUM_THREADS="1"), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def check(team: Team, seeds: range) -> None:
    from distributed import layout_cases

    for first in range(seeds.start, seeds.stop, 10):
        for found in team.run(layout_cases.on_a_rank, first, first + 10):
            assert found == []


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 20), marks=pytest.mark.slow)])
def test_on_two_ranks(two: Team, seeds: range) -> None:
    """Shared-out vocabularies and time too."""
    check(two, seeds)


@pytest.mark.slow
def test_on_two_and_four_ranks(two: Team, four: Team) -> None:
    check(two, range(1000, 1300))
    check(four, range(2000, 2300))
