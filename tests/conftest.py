from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device that there is: the suite grows by the CUDA cases where there is a GPU."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """For tests that compile: no graph of another test counts against the recompile limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
