from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from distributed.backends import BACKENDS
from distributed.team import Team

if not dist.is_available():
    collect_ignore_glob = ["test_*.py"]  # a torch that was built without torch.distributed


@pytest.fixture(scope="session")
def team_of() -> Iterator[Callable[[int, str], Team]]:
    """Teams that stay for all tests; one that was stopped, as a test found it dead or stuck, is started again."""
    teams: dict[tuple[int, str], Team] = {}
    with contextlib.ExitStack() as ends:

        def get(ranks: int, backend: str) -> Team:
            team = teams.get((ranks, backend))
            if team is None or team.is_stopped:
                team = teams[ranks, backend] = ends.enter_context(Team(ranks, backend=backend))
            return team

        yield get


@pytest.fixture(params=BACKENDS)
def two(request: pytest.FixtureRequest, team_of: Callable[[int, str], Team]) -> Team:
    return team_of(2, request.param)


@pytest.fixture
def four(team_of: Callable[[int, str], Team]) -> Team:
    return team_of(4, "gloo")
