from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from compile.generated_code import lowered_scans  # noqa: F401  (the fixture `kernels`)
from support.selection import leave_combinations_out

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import triton_interpreter

    triton_interpreter.install()

if not torch.cuda.is_available():
    # Of the processes that it starts to compile Triton kernels, each imports torch; there are no such kernels here.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# pytest adds its handlers to loggers that do not propagate, and to this one, once it has any, torch.compile writes all
# that it does: a tenth of the time of tests that compile.
logging.getLogger("torch.__trace").propagate = True

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay until the end: a quarter of the time of collection was the search for garbage in them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # Graphs and traces are hundreds of thousands of objects that stay for a test.
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest's own takes out what -m does not select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: begun last, one would run alone beside an idle worker."""
    leave_combinations_out(items)
    items.sort(key=lambda item: not item.name.startswith("test_in_the_interpreter"))


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
