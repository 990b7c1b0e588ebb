"""Packed rows by the Triton kernel that takes them as one sequence: on a GPU or in the interpreter."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.scan import ScanCall

from scan.triton_cases import INTERPRETED, Case, on_device
from support.subprocesses import rare

pytest.importorskip("triton")
kernel_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_triton_kernels.py"
)


@pytest.fixture
def taken(launchers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The tiles that were launched; few rows are many here."""
    flat_rows = importlib.import_module(launchers.flat_tile.__module__)
    tiles: list[object] = []
    monkeypatch.setattr(flat_rows, "FEWEST_PROGRAMS", 1)

    def run(problem: Any, tile: object, *operands: Any) -> Tensor:
        tiles.append(tile)
        sums: Tensor = flat_rows.run_flat_rows(problem, tile, *operands)
        return sums

    monkeypatch.setattr(launchers, "run_flat_rows", run)
    return tiles


def as_gates(case: Case) -> None:
    """A gamma no wider than what a step's gate can have: others are left to other kernels."""
    if case.gamma is not None and case.x.dtype != torch.float64:
        case.gamma = case.gamma.float() if case.gamma.dtype == torch.float64 else case.gamma


# (reverse, shifted, started, resets)
FORMS = [(False, False, False, False), (True, False, True, True), (True, True, False, True)]
SHAPES = [(67, 45), (5, 23, 11), rare((1030, 4)), rare((29, 300)), rare((33, 128))]


@kernel_test
@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, rare(torch.float16), rare(torch.float64)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
def test_every_form(
    launchers: ModuleType, taken: list[object], shape: tuple[int, ...], gates: str, dtype: torch.dtype
) -> None:
    """Tiles of some rows, the last one not full."""
    length, vector = shape[-1], 16 // dtype.itemsize
    for reverse, shifted, started, resets in FORMS:
        case = Case(shape, len(shape) - 1, dtype, gates, started=started, resets=resets)
        as_gates(case)
        taken.clear()
        case.check(launchers, reverse, shifted)
        # Of rows shorter than a vector none has a number of its own; plain ones of whole vectors are tiles of rows.
        is_plain_vectors = length % 16 == 0 and not resets and gates != "step"
        is_too_short = length < vector and (gates == "row" or started)
        assert len(taken) == (0 if is_plain_vectors or is_too_short else 1)


@kernel_test
@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, rare(torch.float16), rare(torch.float64)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
def test_gradients(
    launchers: ModuleType, taken: list[object], shape: tuple[int, ...], gates: str, dtype: torch.dtype
) -> None:
    length, vector = shape[-1], 16 // dtype.itemsize
    for reverse, started in itertools.product((False, True), repeat=2):
        case = Case(shape, len(shape) - 1, dtype, gates, started=started, resets=reverse)
        as_gates(case)
        taken.clear()
        case.check_backward(launchers, reverse)
        assert len(taken) == (0 if length < vector and (gates == "row" or started) else 1)


@kernel_test
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gates", ["scalar", "row", "step"])
def test_what_is_not_finite(launchers: ModuleType, taken: list[object], gates: str, reverse: bool) -> None:
    """It is where the recurrence has it, and in no other row."""
    case = Case((67, 45), 1, torch.float32, gates, resets=True)
    case.x[3, 20], case.x[3, 25], case.x[66, 44] = float("inf"), float("-inf"), float("inf")
    case.x[40, 0] = float("nan")
    as_gates(case)
    if case.gamma is not None:
        case.gamma[11] = float("inf")
    case.check_non_finite(launchers, reverse)
    assert len(taken) == 1


@kernel_test
@pytest.mark.parametrize("value", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, rare(torch.bfloat16), rare(torch.float64)])
def test_an_infinity_stays_one(launchers: ModuleType, taken: list[object], dtype: torch.dtype, value: float) -> None:
    """Over more steps than there are powers of gamma above 0."""
    case = Case((8, 900), 1, dtype, value=value, resets=True)
    assert case.reset is not None
    case.x[:, 1], case.reset[:, 1:] = float("inf"), False
    (x, reset) = on_device(case.x, case.reset)
    y = launchers.scan(x, ScanCall(None, value, 1, False, False, None, reset, None))
    signs = torch.tensor([value]).sign() ** torch.arange(899)
    assert torch.equal(y[:, 1:].cpu(), (signs * float("inf")).to(dtype).expand(8, -1))
    assert len(taken) == 1


@kernel_test
def test_rows_that_it_leaves_to_others(launchers: ModuleType, taken: list[object]) -> None:
    """Padded ones, behind an address that is no vector's, and float64 gammas of narrower rows."""
    padded, behind, wide = Case((67, 48), 1), Case((68, 45), 1), Case((67, 45), 1, gates="row")
    padded.x = padded.x[:, :45]
    behind.x = behind.x.view(-1)[1:3016].view(67, 45)
    beyond = Case((67, 45), 1, torch.float16, gates="row")
    beyond.x, beyond.gamma = torch.zeros_like(beyond.x), torch.full((67,), 1e300, dtype=torch.float64)
    for case in (padded, behind, wide, beyond):
        case.check(launchers, False)
    assert not taken


def test_whole_rows_end_at_a_vector(launchers: ModuleType) -> None:
    """In every tile, of which most lanes have steps."""
    flat_rows = importlib.import_module(launchers.flat_tile.__module__)
    found = 0
    for dtype in (torch.float16, torch.float32, torch.float64):
        for length in range(4, 700):
            x = torch.empty((200_000 // length * 40, length), dtype=dtype, device="meta")
            call = ScanCall(None, 0.9, 1, False, False, None, x.bool(), None)
            none = launchers.Operand(None)
            tile = launchers.flat_tile(launchers._Problem(x, x, call), none, none, "none")
            if tile is None:
                continue
            found += 1
            room = 32 * tile.segments * tile.steps
            assert tile.vector == 16 // dtype.itemsize
            assert tile.rows * length % tile.vector == 0
            assert flat_rows.LEAST_SHARE * room <= tile.rows * length <= room
    assert found > 1000
