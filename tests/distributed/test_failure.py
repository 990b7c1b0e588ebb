"""A dead or late rank ends in an error on the others within the group's timeout: nobody hangs."""

from __future__ import annotations

import time

import pytest

from distributed import failure_cases
from distributed.backends import BACKENDS
from distributed.team import Team

TIMEOUT = 5.0
ENDS_WITHIN = {"gloo": 4 * TIMEOUT, "nccl": 60.0}  # NCCL's watchdog collects what to say before it ends a process


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("what", "happens"),
    [
        ("loss", "killed"),
        pytest.param("scan", "killed", marks=pytest.mark.slow),
        pytest.param("loss", "late", marks=pytest.mark.slow),
        pytest.param("scan", "late", marks=pytest.mark.slow),
    ],
)
def test_nobody_waits_for_ever(what: str, happens: str, backend: str) -> None:
    with Team(2, collectives_in=TIMEOUT, backend=backend) as team:
        start = time.monotonic()
        ((returned, said),) = team.answer_of_the_others(
            1, 1.5 * ENDS_WITHIN[backend], failure_cases.without_one, what, happens
        )
        assert not returned
        assert said[0] in ("RuntimeError", "DistBackendError", "DistNetworkError", "AcceleratorError", "ended"), said
        assert backend == "nccl" or said[0] != "ended"
        # A busy machine takes some seconds of its own.
        assert time.monotonic() - start < ENDS_WITHIN[backend]
