"""The Triton kernels against the plain recurrence in float64.

With a GPU they run for real. Without one they run in Triton's interpreter, which has to be chosen before triton is
imported: then one test runs this file in a process of its own that sets TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.scan import ScanCall

from scan.triton_cases import DEVICE, FORMS, INTERPRETED, Case, on_device
from support.subprocesses import rare, run_in_the_interpreter

pytest.importorskip("triton")
pytestmark = pytest.mark.each_value

kernel_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_in_the_interpreter"
)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    """With test_triton_flat_rows.py, test_triton_parts.py and test_triton_totals.py, in one process."""
    others = (str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in ("flat_rows", "parts", "totals"))
    run_in_the_interpreter(__file__, *others, "-m", marks)


# Shapes, and the least sizes from which on columns are tiles, and are scanned serially, where others than shipped.
TILINGS = {
    "vectors": ((3, 144), 1, {}),
    "elements": ((3, 130), 1, {}),
    "rows of strided steps": ((5, 7, 3), 1, {}),
    "columns": ((2, 19, 2), 1, {"LEAST_COLUMN_TILE": 1}),
    "serial": ((2, 19, 9), 1, {"SERIAL_COLUMNS": 1}),
    "groups, serial": ((2, 19, 9), 1, {"LEAST_COLUMN_TILE": 1}),
}


@pytest.fixture(params=[rare(name) if " " in name else name for name in TILINGS])
def tiling(
    request: pytest.FixtureRequest, launchers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[int, ...], int]:
    """A shape and a dimension that the launchers tile in a certain way."""
    shape, dim, least = TILINGS[request.param]
    for name, value in least.items():
        monkeypatch.setattr(importlib.import_module(launchers.ScanProblem.__module__), name, value)
    x = torch.empty(shape, device=DEVICE)
    problem = launchers.ScanProblem(x, x, ScanCall(None, 0.5, dim, False, False, None, None, None))
    assert problem.tiling == request.param.split()[-1].replace("steps", "elements")
    return shape, dim


@kernel_test
@pytest.mark.parametrize("gates", ["scalar", "row", "sum"])
def test_long_rows_of_more_segments_than_lanes(
    launchers: ModuleType, monkeypatch: pytest.MonkeyPatch, gates: str
) -> None:  # fmt: skip
    """As rows of more than 4 million steps of float32 have."""
    tiles = []

    def tile(_: Any) -> Any:
        tiles.append(launchers.Tile(1, 64, 32, 4, 8))
        return tiles[-1]

    monkeypatch.setattr(launchers._Problem, "lookback_tile", tile)
    for reverse in (False, True):
        Case((2, 20_000), 1, gates=gates, started=reverse).check(launchers, reverse)
    assert len(tiles) == 2


@kernel_test
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("length", [4000, rare(4432)])
def test_rows_of_float64_in_more_segments_than_lanes(launchers: ModuleType, length: int, gates: str) -> None:
    """64 of 64 steps in a tile."""
    for resets in (False, True):
        case = Case((2, length), 1, torch.float64, gates, 0.999, started=not resets, resets=resets)
        case.check(launchers, resets)
        case.check_backward(launchers, resets)


@kernel_test
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.each_pair
@pytest.mark.parametrize(("reverse", "shifted", "started", "resets"), FORMS)
def test_every_form(
    launchers: ModuleType, tiling: tuple[tuple[int, ...], int], reverse: bool, shifted: bool, started: bool,
    resets: bool, gates: str,
) -> None:  # fmt: skip
    Case(*tiling, gates=gates, started=started, resets=resets).check(launchers, reverse, shifted)


@kernel_test
@pytest.mark.parametrize("gates", ["row", "step"])
def test_backward_of_every_tiling(launchers: ModuleType, tiling: tuple[tuple[int, ...], int], gates: str) -> None:
    for reverse in (False, True):
        Case(*tiling, gates=gates, started=True, resets=reverse).check_backward(launchers, reverse)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((3, 300), 1), ((70, 20), 0), ((40,), 0), ((1, 1), 0), ((4, 1), 1)])
@pytest.mark.parametrize("gates", ["scalar", "row", "step"])
def test_every_dtype(launchers: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], dim: int, gates: str) -> None:
    for reverse in (False, True):
        Case(shape, dim, dtype, gates, started=reverse, resets=not reverse).check(launchers, reverse)


@pytest.fixture(params=["small tiles"] if INTERPRETED else ["small tiles", "as shipped"])
def long(request: pytest.FixtureRequest, launchers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """A length that is long: small tiles take short rows through the paths that only long ones take."""
    if request.param == "small tiles":
        monkeypatch.setattr(launchers, "LONGEST_TILE", 256)
        monkeypatch.setattr(launchers, "LOOKBACK_GROUP", 4)
        monkeypatch.setattr(launchers, "GROUP_TILES", (2, 4, 4))
        monkeypatch.setattr(launchers, "BUSY_PROGRAMS", 16)
        return 1100
    return 20000


@kernel_test
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("started", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dim", [0, 1])
def test_long_rows(launchers: ModuleType, long: int, dim: int, started: bool, reverse: bool, gates: str) -> None:
    shape = (2, long) if dim else (long, 9)
    for resets in (False, True):
        case = Case(shape, dim, gates=gates, value=0.999, started=started, resets=resets)
        case.check(launchers, reverse)
        case.check_backward(launchers, reverse)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [-0.7, *(pytest.param(value, marks=pytest.mark.slow) for value in (0.999, 0.0, 1.0))])
@pytest.mark.parametrize("shape", [(2, 70, 9), (257, 16), pytest.param((300, 80), marks=pytest.mark.slow)])
def test_whole_columns(
    launchers: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], value: float, dtype: torch.dtype
) -> None:
    """Whole columns, and long ones in parts of 128 steps."""
    monkeypatch.setattr(launchers, "BUSY_PROGRAMS", 4)
    monkeypatch.setattr(launchers, "COLUMN_STEPS", (64, 64, 128))
    taken: list[object] = []
    run_columns = launchers._Problem.run_columns
    monkeypatch.setattr(
        launchers._Problem, "run_columns", lambda self, block: (taken.append(block), run_columns(self, block))
    )
    for reverse in (False, True):
        case = Case(shape, len(shape) - 2, dtype, "sum" if value == 1 else "scalar", value, started=reverse)
        case.check(launchers, reverse)
    case.x.select(case.dim, 40)[..., 0] = float("inf")
    case.check_non_finite(launchers, True)
    assert len(taken) == 3


@kernel_test
@pytest.mark.parametrize(
    ("value", "large", "dtype"),
    [
        (0.99, True, torch.bfloat16),
        (-0.9, False, torch.float16),
        *(
            rare(*form)
            for form in ((0.99, False, torch.float16), (0.5, True, torch.float16), (1.0, False, torch.bfloat16))
        ),
    ],
)
def test_long_rows_in_half_precision(
    launchers: ModuleType, long: int, monkeypatch: pytest.MonkeyPatch, value: float, dtype: torch.dtype, large: bool
) -> None:
    """One number as gamma: kernels of their own, whose weights stay above 0."""
    if large:
        monkeypatch.setattr(launchers, "LONGEST_SMALL_TILES", 512)
    taken: list[object] = []
    run_rows = launchers.half_precision.run_rows
    monkeypatch.setattr(
        launchers.half_precision, "run_rows", lambda *arguments: (taken.append(arguments), run_rows(*arguments))
    )
    for reverse, length in ((False, long), (True, long - 3)):
        case = Case((2, length), 1, dtype, "sum" if value == 1 else "scalar", value, started=reverse)
        case.check(launchers, reverse)
        case.x = case.x.repeat_interleave(2, dim=1)[:, ::2]
        case.check(launchers, reverse)
        case.x[1, 300] = float("inf")
        case.check_non_finite(launchers, reverse)
        if value > 0:
            (x,) = on_device(case.x)
            after = launchers.scan(x, ScanCall(None, value, 1, reverse, False, None, None, None))[1]
            assert (after[:301] if reverse else after[300:]).isposinf().all()
    assert len(taken) == (8 if value > 0 else 6)


ROWS, COLUMNS, INNER = ((3, 50), 1), ((50, 12), 0), ((2, 17, 3), 1)
BACKWARD = [(*layout, torch.float32) for layout in (ROWS, COLUMNS, INNER)]
BACKWARD += [(*COLUMNS, torch.float64), (*ROWS, torch.bfloat16)]
# The dtype decides what is loaded and stored, the layout which way: float32 is in all of them.
BACKWARD += [rare(*ROWS, torch.float64), rare(*COLUMNS, torch.bfloat16)]
BACKWARD += [rare(*INNER, dtype) for dtype in (torch.float64, torch.bfloat16)]


# (reverse, started, resets): every pair of values of two of them, and all.
OPTIONS = {"pairs": [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]}
OPTIONS["all"] = list(itertools.product((False, True), repeat=3))


@kernel_test
@pytest.mark.parametrize(("shape", "dim", "dtype"), BACKWARD)
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize("options", ["pairs", rare("all")])
def test_backward(
    launchers: ModuleType, shape: tuple[int, ...], dim: int, gates: str, dtype: torch.dtype, options: str
) -> None:
    for reverse, started, resets in OPTIONS[options]:
        Case(shape, dim, dtype, gates, started=started, resets=resets).check_backward(launchers, reverse)


@kernel_test
@pytest.mark.parametrize("window", [1, rare(2), 5, 19, 20, 21, rare(100)])
@pytest.mark.parametrize("gates", ["scalar", "row", "step", "sum"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 20), 1), ((20, 12), 0)])
def test_window(launchers: ModuleType, shape: tuple[int, ...], dim: int, gates: str, window: int) -> None:
    for reverse, shifted, started, resets in [(0, 0, 0, 0), (1, 0, 1, 1), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 0)]:
        case = Case(shape, dim, gates=gates, started=bool(started), resets=bool(resets))
        case.check(launchers, bool(reverse), bool(shifted), window)


def strided_views() -> Iterator[Tensor]:
    sizes = (3, 4, 3, 7) if INTERPRETED else (4, 6, 5, 7)
    base = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    yield base.permute(2, 0, 3, 1)
    yield base[:, ::2, 1:, ::3]
    yield base.expand(3, *sizes)[1:]
    yield base[:, :, :1].expand(-1, -1, 9, -1)
    yield base.transpose(0, 3)[1:]
    yield base.flatten()[::3]
    yield base[:1, :, :1]


@kernel_test
@pytest.mark.parametrize("view", [0, rare(1), 2, 3, rare(4), 5, rare(6)])
@pytest.mark.parametrize("gates", ["scalar", "row", "step"])
def test_strides(launchers: ModuleType, monkeypatch: pytest.MonkeyPatch, view: int, gates: str) -> None:
    if INTERPRETED:  # the tilings of the larger views
        monkeypatch.setattr(importlib.import_module(launchers.ScanProblem.__module__), "LEAST_COLUMN_TILE", 256)
    x = list(strided_views())[view]
    for dim in range(x.dim()):
        case = Case(tuple(x.shape), dim, gates=gates, started=True, resets=True)
        case.x = x
        if gates == "step":
            assert case.gamma is not None
            case.gamma = case.gamma.select(-1, 0).unsqueeze(-1).expand(x.shape)
        case.check(launchers, True)


@kernel_test
def test_no_dimensions_and_no_elements(launchers: ModuleType) -> None:
    x, gamma = on_device(torch.tensor(2.0), torch.tensor(0.5, dtype=torch.float64))
    initial, reset = on_device(torch.tensor(3.0), torch.tensor(True))
    assert launchers.scan(x, ScanCall(gamma, 0.0, 0, False, False, initial, None, None)).item() == 3.5
    assert launchers.scan(x, ScanCall(gamma, 0.0, -1, False, False, initial, reset, None)).item() == 2.0
    grad_input, grad_gamma = launchers.scan_gradients(x, x, ScanCall(gamma, 0.0, 0, False, False, initial, None, None))
    assert (grad_input.item(), grad_gamma.item()) == (2.0, 6.0)
    for shape, dim in (((0, 3), 0), ((0, 3), 1), ((3, 0), 1)):
        empty = torch.empty(shape, device=DEVICE)
        assert launchers.scan(empty, ScanCall(None, 0.5, dim, True, False, None, None, None)).shape == shape
        grad_input, sums = launchers.scan_gradients(
            empty, empty, ScanCall(None, 0.5, dim, True, False, None, None, None)
        )
        assert grad_input.shape == shape
        assert sums.tolist() == torch.zeros(shape).sum(dim).tolist()


@kernel_test
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(("shape", "dim"), [((3, 50), 1), ((50, 9), 0), ((1, 9000), 1)])
def test_integer_sums(launchers: ModuleType, shape: tuple[int, ...], dim: int) -> None:
    # Past 2^53, where a float64 on the way would round.
    x = torch.randint(-(2**60), 2**60, shape, generator=torch.Generator().manual_seed(0)) // shape[dim]
    (moved,) = on_device(x)
    assert torch.equal(
        launchers.scan(moved, ScanCall(None, 1.0, dim, False, False, None, None, None)).cpu(), x.cumsum(dim)
    )
    right = launchers.scan(moved, ScanCall(None, 1.0, dim, True, False, None, None, None)).cpu()
    assert torch.equal(right, x.flip(dim).cumsum(dim).flip(dim))


@kernel_test
def test_complex_is_left_to_the_reference(launchers: ModuleType) -> None:
    with pytest.raises(NotImplementedError):
        launchers.scan(torch.zeros(3, dtype=torch.complex64), ScanCall(None, 0.5, 0, False, False, None, None, None))


def every_gate(value: float, shape: tuple[int, int]) -> Iterator[Tensor | None]:
    """The same gamma as a number, per row and per step."""
    yield from on_device(None, torch.full(shape[:1], value), torch.full(shape, value))


@kernel_test
@pytest.mark.parametrize("length", [300, rare(9000)])
def test_nan_and_inf_are_not_lost(launchers: ModuleType, length: int) -> None:
    x = torch.randn(1, length, device=DEVICE)
    x[0, 40], x[0, 90] = float("inf"), float("nan")
    reset = torch.zeros(1, length, dtype=torch.bool, device=DEVICE)
    reset[0, 200] = True
    for gamma in every_gate(0.5, (1, length)):
        output = launchers.scan(x, ScanCall(gamma, 0.5, 1, False, False, None, None, None))
        assert output[0, :40].isfinite().all()
        assert not output[0, 40:].isfinite().any()
        output = launchers.scan(x, ScanCall(gamma, 0.5, 1, False, False, None, reset, None))
        assert not output[0, 40:200].isfinite().any()
        assert output[0, 200:].isfinite().all()


@kernel_test
def test_no_nan_from_powers_that_overflow(launchers: ModuleType) -> None:
    x = torch.zeros(1, 4000, device=DEVICE)
    x[0, 3990] = 1.0
    expected = 3.0 ** torch.arange(10, dtype=torch.float64)
    for gamma in every_gate(3.0, (1, 4000)):
        output = launchers.scan(x, ScanCall(gamma, 3.0, 1, False, False, None, None, None)).cpu()
        assert not output[0, :3990].any()
        torch.testing.assert_close(output[0, 3990:].double(), expected, rtol=1e-6, atol=0)
    # 2^200 is beyond float32, 1e-35 * 2^200 is not.
    x = torch.zeros(1, 201, device=DEVICE)
    x[0, 0] = 1e-35
    for gamma in every_gate(2.0, (1, 201)):
        output = launchers.scan(x, ScanCall(gamma, 2.0, 1, False, False, None, None, None)).cpu()
        assert output[0, -1].item() == pytest.approx(1e-35 * 2.0**200, rel=1e-6)


@kernel_test
def test_gamma_zero_multiplies(launchers: ModuleType) -> None:
    x = torch.randn(2, 300, device=DEVICE)
    x[0, 5] = float("inf")
    for gamma in every_gate(0.0, (2, 300)):
        output = launchers.scan(x, ScanCall(gamma, 0.0, 1, False, False, None, None, None))
        assert torch.equal(output[1], x[1])
        assert torch.equal(output[0, :6], x[0, :6])
        assert output[0, 6:].isnan().all()


@kernel_test
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("shape", [(1, 10000), rare((10000, 1)), rare((10000, 16))])
def test_gamma_is_not_rounded_to_float32(launchers: ModuleType, shape: tuple[int, int]) -> None:
    # The published algorithm is off by 1.3e-2 here, by 1.0e-2 after the 3000 steps that the interpreter has time for.
    if INTERPRETED:
        shape = (min(shape[0], 3000), min(shape[1], 3000))
    dim = int(shape[0] == 1)
    ones = torch.ones(shape, device=DEVICE)
    for reverse in (False, True):
        output = (
            launchers.scan(ones, ScanCall(None, 0.999, dim, reverse, False, None, None, None)).cpu().movedim(dim, 0)
        )
        expected = (1 - 0.999 ** torch.arange(1, len(output) + 1, dtype=torch.float64)) / (1 - 0.999)
        expected = expected.flip(0) if reverse else expected
        assert (output.double() - expected[:, None]).abs().max().item() <= 3e-4


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize(("shape", "dim"), [((1, 10_000_000), 1), ((16, 1_048_576), 1), ((1_048_576, 16), 0)])
def test_the_same_bits_every_time(launchers: ModuleType, shape: tuple[int, int], dim: int) -> None:
    x = torch.randn(shape, device=DEVICE)
    first = launchers.scan(x, ScanCall(None, 0.9999, dim, False, False, None, None, None))
    for _ in range(30):
        assert torch.equal(launchers.scan(x, ScanCall(None, 0.9999, dim, False, False, None, None, None)), first)
