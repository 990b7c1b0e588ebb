from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from distributed.backends import BACKENDS
from distributed.team import Team

if not dist.is_available():
    collect_ignore_glob = ["test_*.py"]  # a torch that was built without torch.distributed


@pytest.fixture(scope="session", params=BACKENDS)
def two(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(2, backend=request.param) as team:
        yield team


@pytest.fixture(scope="session")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team
