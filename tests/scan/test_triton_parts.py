"""Few rows or columns of many steps in parts of time, by two launches of the Triton kernels, against float64.

Runs where test_triton_kernels.py runs; there one test runs this file in the interpreter.
"""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_dcs_ops.reference.scan import ScanCall

from scan.triton_cases import DEVICE, FORMS, INTERPRETED, Case, on_device
from support.subprocesses import rare

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.each_value,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in the interpreter"),
]


@pytest.fixture
def taken(launchers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every problem in parts, how many it has: small tiles and programs, so that short columns have many.

    Reversed ones are folded by several warps.
    """
    parts = importlib.import_module(launchers.parts_of.__module__)
    counts: list[int] = []
    for name, value in {
        "THREADS": 64,
        "BUSY_PROGRAMS": 1,
        "MULTIPROCESSORS": 6,
        "STEPS": (4, 4),
        "LEAST_TILES": 2,
    }.items():
        monkeypatch.setattr(parts, name, value)

    def parts_of(*arguments: Any) -> Any:
        made = parts.parts_of(*arguments)
        counts.append(made.count)
        return made

    def small_tile(problem: Any) -> Any:
        columns, vector = 2 if problem.tiling == "columns" else 1, 16 // problem.y.tensor.element_size()
        return launchers.Tile(columns, 2, 8, vector, 4 if problem.reverse else 1)

    monkeypatch.setattr(launchers, "parts_of", parts_of)
    monkeypatch.setattr(launchers, "flat_tile", lambda *_: None)
    monkeypatch.setattr(launchers.half_precision, "covers", lambda _: False)
    monkeypatch.setattr(launchers._Problem, "column_block", lambda _: None)
    monkeypatch.setattr(launchers._Problem, "tile", small_tile)
    return counts


def check_parts(launchers: ModuleType, taken: list[int], case: Case, reverse: bool, shifted: bool = False) -> None:
    case.check(launchers, reverse, shifted)
    assert min(taken) > 2


# Steps that leave the last part, and its last tile, in part.
COLUMNS = [(1011, 1), (1011, 2), (901, 3), rare((603, 5)), (500, 7), (203, 17), rare((200, 33)), (103, 48), (3, 330, 4)]
ROWS = [(2, 700), (1, 640)]


@pytest.mark.each_pair
@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize(("reverse", "shifted", "started", "resets"), FORMS)
def test_columns(
    launchers: ModuleType, taken: list[int], shape: tuple[int, ...], gates: str, reverse: bool, shifted: bool,
    started: bool, resets: bool,
) -> None:  # fmt: skip
    case = Case(shape, len(shape) - 2, gates=gates, started=started, resets=resets)
    check_parts(launchers, taken, case, reverse, shifted)


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("resets", [False, True])
def test_rows(launchers: ModuleType, taken: list[int], shape: tuple[int, ...], gates: str, resets: bool) -> None:
    for reverse in (False, True):
        check_parts(launchers, taken, Case(shape, 1, gates=gates, started=not reverse, resets=resets), reverse)


@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("resets", [False, True])
def test_lanes_of_several_warps(launchers: ModuleType, gates: str, resets: bool) -> None:
    """Groups of a column in 64 lanes, here by look-back."""
    x = torch.empty((700, 3), device=DEVICE)
    problem = launchers._Problem(x, x, ScanCall(None, 0.5, 0, False, False, None, None, None))
    assert problem.tile().J == 64
    for reverse in (False, True):
        Case((700, 3), 0, gates=gates, started=reverse, resets=resets).check(launchers, reverse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(603, 2), (300, 17)])
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
def test_dtypes(
    launchers: ModuleType, taken: list[int], shape: tuple[int, ...], gates: str, dtype: torch.dtype
) -> None:  # fmt: skip
    for reverse in (False, True):
        check_parts(launchers, taken, Case(shape, 0, dtype, gates, started=reverse, resets=not reverse), reverse)


@pytest.mark.parametrize("shape", [(603, 3), (2, 600)])
def test_integers(launchers: ModuleType, taken: list[int], shape: tuple[int, ...]) -> None:
    dim = int(shape[0] == 2)
    # Past 2^53, where a float64 on the way would round.
    x = torch.randint(-(2**60), 2**60, shape, generator=torch.Generator().manual_seed(0)) // shape[dim]
    for reverse in (False, True):
        (moved,) = on_device(x)
        output = launchers.scan(moved, ScanCall(None, 1.0, dim, reverse, False, None, None, None)).cpu()
        expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
        assert torch.equal(output, expected)
    assert min(taken) > 2


@pytest.mark.parametrize("shape", [(903, 2), (300, 9), (2, 1000)])
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
def test_gradients(launchers: ModuleType, taken: list[int], shape: tuple[int, ...], gates: str) -> None:
    for reverse in (False, True):
        case = Case(shape, int(shape[0] == 2), gates=gates, started=reverse, resets=not reverse)
        case.check_backward(launchers, reverse)
    assert min(taken) > 2


@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("columns", [2, 9])
def test_what_is_not_finite(launchers: ModuleType, taken: list[int], gates: str, columns: int) -> None:
    """An infinity or a NaN stays in its column and goes on to the next reset, over all parts."""
    for reverse, resets in itertools.product((False, True), repeat=2):
        case = Case((200, columns), 0, gates=gates, value=0.99, started=True, resets=resets)
        case.x[70, 0], case.x[140, 0], case.x[93, 1] = float("inf"), float("nan"), float("-inf")
        case.check_non_finite(launchers, reverse)
        case.reset = None
        case.initial[0] = float("inf")
        case.check_non_finite(launchers, reverse)
    assert min(taken) > 2


@pytest.mark.parametrize("kind", ["row", "step"])
def test_gates_that_are_not_finite(launchers: ModuleType, taken: list[int], kind: str) -> None:
    """The first step has no carry: what a gate there would make of it, and of parts that are not there, is nothing."""
    case = Case((600, 3), 0, gates=kind)
    if kind == "row":
        case.gamma[0] = float("nan")
        case.gamma[1] = float("inf")
    else:
        case.gamma[0, 0], case.gamma[0, 1], case.gamma[300, 1] = float("inf"), float("nan"), float("inf")
    case.check_non_finite(launchers, False)
    assert min(taken) > 2


def test_products_that_leave_the_range(launchers: ModuleType, taken: list[int]) -> None:
    """Of a part, or of several: they are cut to the largest number, and 0 times it stays 0; below they come to 0."""
    for value, columns in ((3.0, 2), (-3.0, 1), (1e-30, 1), (0.0, 1)):
        for gates in ("scalar", "row", "step"):
            case = Case((1500, columns), 0, gates=gates, value=value)
            if case.gamma is not None:
                case.gamma.fill_(value)
            case.x.zero_()
            case.x[1490] = 1.0
            case.check(launchers, False)
            case.x[:3] = 1e-3 if abs(value) < 1 else 0.0
            case.check(launchers, False)
    assert min(taken) > 2


def test_gamma_is_not_rounded(launchers: ModuleType, taken: list[int]) -> None:
    x = torch.ones((3000, 2), device=DEVICE)
    output = launchers.scan(x, ScanCall(None, 0.999, 0, False, False, None, None, None)).cpu()
    expected = (1 - 0.999 ** torch.arange(1, 3001, dtype=torch.float64)) / (1 - 0.999)
    assert (output.double() - expected[:, None]).abs().max().item() <= 3e-4
    assert min(taken) > 2


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("shape", [(631556, 2), (300000, 3), (100000, 24), (3000000, 2)])  # in parts, by look-back
def test_the_same_bits_every_time(launchers: ModuleType, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE)
    call = ScanCall(None, 0.9999, 0, False, False, None, None, None)
    first = launchers.scan(x, call)
    for _ in range(30):
        assert torch.equal(launchers.scan(x, call), first)
