"""What other ranks need of a slice of time, by kernels that only read: on a GPU or in the interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_dcs_ops.distributed.common import Ranks
from torch_dcs_ops.distributed.scan import totals as used
from torch_dcs_ops.distributed.scan.discounted_cumsum import (
    Layout,
    ScanSegments,
    scan_of_slices,
    shifted_scan_of_slices,
)
from torch_dcs_ops.distributed.scan.head import is_eager
from torch_dcs_ops.reference.scan import ScanCall

from scan.triton_cases import INTERPRETED, Case, expanded, on_device
from support.sm_90 import compiled_for_sm_90
from support.subprocesses import rare
from support.triton_modules import triton_module

triton = pytest.importorskip("triton")
GPU = torch.cuda.is_available()
kernel_test = pytest.mark.skipif(not (INTERPRETED or GPU), reason="no GPU: runs in test_triton_kernels.py")
SMALL = {"LANES": 4, "LINE": 16, "COLUMN_LANES": 16, "LANE_STEPS": 16, "BUSY_PROGRAMS": 1, "FOLD": 4}


@pytest.fixture
def shipped() -> Any:
    """triton_kernels/scan/totals.py, installed or from the checkout."""
    return triton_module("scan.totals")


@pytest.fixture
def kernels(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With blocks and folds so small that few steps take several of each."""
    for name, value in SMALL.items():
        monkeypatch.setattr(shipped, name, value)
    return shipped


@numpy.errstate(all="ignore")
def by_the_recurrence(
    x: Tensor, gates: Tensor, dim: int, reverse: bool, shifted: bool, reset: Tensor | None
) -> list[Tensor]:
    """(what is handed on, product or 0 if cut, cut), step by step; a product that has left float64's range stays so."""
    values, rates = (t.double().movedim(dim, 0).numpy() for t in (x, gates))
    cuts = numpy.zeros(values.shape, bool) if reset is None else reset.movedim(dim, 0).numpy()
    steps = range(len(values))
    total, product = numpy.zeros(values.shape[1:]), numpy.ones(values.shape[1:])
    for count, t in enumerate(reversed(steps) if reverse else steps):
        if shifted:
            total = numpy.where(cuts[t], 0, rates[t] * (values[t] + total))
        else:
            total = numpy.where(cuts[t] | (count == 0), values[t], values[t] + rates[t] * total)
        product = product * rates[t]
    is_zero, is_odd = (rates == 0).any(0), ~numpy.isfinite(rates).all(0)
    largest = numpy.finfo(numpy.float64).max
    kept = numpy.where(product == 0, numpy.copysign(5e-324, product), numpy.clip(product, -largest, largest))
    kept = numpy.where(is_odd, product, numpy.where(is_zero, 0, kept))
    kept = numpy.where(cuts.any(0), 0, kept)
    return [torch.from_numpy(numpy.asarray(part, numpy.float64)) for part in (total, kept, cuts.any(0))]


def found_by(kernels: Any, case: Case, reverse: bool, shifted: bool) -> list[Tensor]:
    x, gamma, reset = on_device(case.x, case.gamma, case.reset)
    parts = kernels.totals(x, ScanCall(gamma, case.value, case.dim, reverse, shifted, None, reset, None))
    return [part.cpu() for part in parts]


def check(kernels: Any, case: Case, reverse: bool, shifted: bool) -> None:
    """Within a rounding a step, of the sum of the magnitudes and of the product."""
    gates = expanded(case.gamma, case.value, case.x, case.dim)
    total, product, cut = found_by(kernels, case, reverse, shifted)
    wanted = by_the_recurrence(case.x, gates, case.dim, reverse, shifted, case.reset)
    scale, _, _ = by_the_recurrence(case.x.abs(), gates.abs(), case.dim, reverse, shifted, case.reset)
    budget = case.x.size(case.dim) * 2.0**-52
    assert total.dtype == product.dtype == cut.dtype == torch.float64
    assert total.shape == product.shape == cut.shape == wanted[0].shape
    assert bool(((total - wanted[0]).abs() <= budget * scale).all())
    torch.testing.assert_close(product, wanted[1], rtol=budget, atol=5e-324)
    assert torch.equal(cut, wanted[2])
    assert all(map(torch.equal, (total, product, cut), found_by(kernels, case, reverse, shifted)))


SHAPES = {
    "aligned": ((3, 144), 1),
    "of any alignment": ((3, 131), 1),
    "short": ((2, 5), 1),
    "columns": ((2, 75, 11), 1),
    "few columns": ((70, 3), 0),
}


@kernel_test
@pytest.mark.each_value
@pytest.mark.parametrize(("reverse", "shifted"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize(("gates", "resets"), [("step", False), ("step", True), ("row", False), ("scalar", True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form(kernels: Any, shape: str, gates: str, resets: bool, reverse: bool, shifted: bool) -> None:
    check(kernels, Case(*SHAPES[shape], gates=gates, resets=resets), reverse, shifted)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(kernels: Any, dtype: torch.dtype) -> None:
    check(kernels, Case((1, 144), 1, dtype, "step", resets=True), True, False)
    check(kernels, Case((75, 3), 0, dtype, "step", resets=True), False, True)
    case = Case((1, 144), 1, dtype, "step")
    assert case.gamma is not None
    case.gamma = case.gamma.to(torch.float32)  # gates of another width than the steps
    check(kernels, case, True, False)


@kernel_test
@pytest.mark.parametrize(("shape", "dim"), [rare((2, 5000), 1), rare((700, 33), 0)])
def test_shipped_blocks(shipped: Any, shape: tuple[int, ...], dim: int) -> None:
    for gates, reverse in (("step", False), ("step", True), ("row", True)):
        check(shipped, Case(shape, dim, gates=gates), reverse, not reverse)


@kernel_test
def test_layouts(kernels: Any) -> None:
    """Time that lies slowest, fastest or in between, steps apart, rows of expanded gates."""
    case = Case((3, 2, 66), 2, gates="step", resets=True)
    assert case.gamma is not None
    for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
        back = [order.index(d) for d in range(3)]
        case.x, case.gamma = (t.permute(order).contiguous().permute(back) for t in (case.x, case.gamma))
        check(kernels, case, True, False)
    apart = Case((3, 260), 1, gates="step")
    assert apart.gamma is not None
    apart.x, apart.gamma = apart.x[:, ::2], apart.gamma[:1, 1::2]
    check(kernels, apart, True, True)
    case = Case((4, 2, 50), 2)
    case.gamma = torch.tensor([0.5, 1.25])
    check(kernels, case, False, False)
    case.gamma = torch.tensor(0.75, dtype=torch.float64)
    check(kernels, case, False, False)


@kernel_test
@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_nothing(kernels: Any, shape: tuple[int, int]) -> None:
    total, product, cut = found_by(kernels, Case(shape, 1, gates="step", resets=True), True, False)
    assert total.shape == (shape[0],)
    assert not total.any()
    assert bool((product == 1).all())
    assert not cut.any()


At = int | tuple[int, int]


def steps_at(at: At) -> int | slice:
    return slice(*at) if isinstance(at, tuple) else at


# Gates at some steps, the others are 0.75: what their product leaves, and what it is then.
PRODUCTS: list[tuple[dict[At, float], torch.dtype]] = [
    ({(0, 120): 1e-30}, torch.float32),  # under float64's range
    ({(0, 120): 1e-30, 7: -1e-30}, torch.float32),
    ({(20, 144): 1e30}, torch.float32),  # beyond it
    ({(20, 144): -1e30, 100: 1e30}, torch.float32),
    ({(0, 144): 1e-200}, torch.float64),
    ({(0, 144): 1e200}, torch.float64),
    ({70: 0.0}, torch.float32),
    ({(0, 60): 1e30, 70: 0.0}, torch.float32),
    ({(0, 120): 1e-30, 130: -0.0}, torch.float32),
    ({70: torch.inf}, torch.float32),
    ({70: -torch.inf, 9: torch.inf}, torch.float32),
    ({70: torch.inf, 100: 0.0}, torch.float32),
    ({70: 0.0, 100: torch.inf}, torch.float32),
    ({3: torch.inf, (20, 144): 1e-30}, torch.float32),
    ({70: torch.nan}, torch.float32),
    ({70: torch.nan, 5: 0.0}, torch.float32),
    ({70: torch.nan, (80, 144): 1e30}, torch.float32),
    ({(0, 30): 1e30, (100, 144): 1e-30}, torch.float32),  # the end that it comes to first
    ({(0, 40): 1e-30, (90, 144): 1e30}, torch.float32),
]
BOTH_ENDS = len(PRODUCTS) - 2


@kernel_test
@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_products_at_the_ends_of_the_range(kernels: Any, number: int) -> None:
    """As the recurrence's, and as those that are made without the kernel, where their order makes no difference."""
    put, dtype = PRODUCTS[number]
    gates = torch.full((1, 144), 0.75, dtype=dtype)
    for at, value in put.items():
        gates[0, steps_at(at)] = value
    case = Case((1, 144), 1, dtype)
    case.x, case.gamma = case.x.abs(), gates
    wanted = by_the_recurrence(case.x, gates, 1, False, False, None)
    total, product, _ = found_by(kernels, case, False, False)
    torch.testing.assert_close(product, wanted[1], rtol=144 * 2.0**-52, atol=5e-324, equal_nan=True)
    # A sum that has left the range of its dtype is no number worth comparing: only what is beyond it.
    is_finite = wanted[0].abs() < torch.finfo(dtype).max
    torch.testing.assert_close(total[is_finite], wanted[0][is_finite], rtol=144 * 2.0**-52, atol=0)
    assert not (total[~is_finite].abs() <= torch.finfo(dtype).max).any()
    made = used._products(case.x, gates, ScanSegments(1.0, 1, False, Layout(Ranks("", 1, 0), 1)))
    if number < BOTH_ENDS and not made.isnan().any():
        torch.testing.assert_close(product, made, rtol=144 * 2.0**-52, atol=5e-324)


# x at some steps, and gates at others, of rows of 0.75; which totals are finite is the recurrence's.
SPECIAL: list[tuple[dict[At, float], dict[At, float]]] = [
    ({5: torch.nan}, {}),
    ({143: -torch.inf}, {}),
    ({5: torch.inf}, {(10, 144): 1e-30}),  # 0 times inf would be a NaN
    ({5: torch.inf}, {70: 0.0}),
    ({5: torch.inf}, {70: -1.0}),
    ({}, {0: torch.inf}),  # into the first step nothing is carried
    ({}, {1: torch.inf}),
    ({}, {8: torch.inf, 100: 0.0}),
    ({5: torch.inf, 80: -torch.inf}, {}),
]


@kernel_test
@pytest.mark.parametrize("number", range(len(SPECIAL)))
def test_what_is_not_finite(kernels: Any, number: int) -> None:
    steps, put = SPECIAL[number]
    for shape, dim, cut, shifted in (((1, 144), 1, None, False), ((144, 2), 0, None, True), ((1, 144), 1, 120, True)):
        case = Case(shape, dim, gates="step")
        assert case.gamma is not None
        for tensor, values in ((case.x, steps), (case.gamma, put)):
            for at, value in values.items():
                tensor.movedim(dim, 0)[steps_at(at), ..., 0 if dim else slice(None)] = value
        if cut is not None:
            case.reset = torch.zeros(shape, dtype=torch.bool)
            case.reset[:, cut] = True
        total, _, _ = found_by(kernels, case, False, shifted)
        wanted, _, _ = by_the_recurrence(case.x, case.gamma, dim, False, shifted, case.reset)
        torch.testing.assert_close(total, wanted, rtol=1e-13, atol=1e-13, equal_nan=True)


@kernel_test
def test_zeros_stay_zeros_under_products_that_overflow(kernels: Any) -> None:
    case = Case((2, 144), 1, gates="step")
    case.x, case.gamma = torch.zeros(2, 144), torch.full((2, 144), 1e30)
    case.x[1, 143] = 3
    for reverse in (False, True):
        total, _, _ = found_by(kernels, case, reverse, False)
        assert total.tolist() == [0, torch.inf if reverse else 3]


@kernel_test
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_slices_are_scanned_once(kernels: Any, shifted: bool, reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of one process in two segments, zigzag, by totals and one scan: equal to the scan of all."""
    monkeypatch.setattr(used, "_LEAST_STEPS", 2)
    if not GPU:
        monkeypatch.setattr(used, "_kernels_for", lambda *_: kernels)
    case = Case((2, 100), 1, torch.float64, "step", resets=reset)
    layout = Layout(Ranks("", 1, 0), 2)
    x, gamma, cuts = on_device(case.x, case.gamma, case.reset)
    assert x is not None
    assert gamma is not None
    segments = ScanSegments(1.0, 2, not shifted, layout)
    split = [None if t is None else layout.split(t, 1) for t in (x, gamma, cuts)]
    scans: list[Any] = []
    scan = ScanSegments.scan
    monkeypatch.setattr(ScanSegments, "scan", lambda self, *of, **with_: scans.append(1) or scan(self, *of, **with_))
    if shifted:
        y, _ = shifted_scan_of_slices(split[0], split[1], segments, split[2])  # type: ignore[arg-type]
    else:
        y, _ = scan_of_slices(split[0], split[1], segments, None, split[2])  # type: ignore[arg-type]
    assert len(scans) == 1
    whole = scan(segments._replace(dim=1), x, gamma, None, cuts, shifted)
    torch.testing.assert_close(layout.joined(y, 1), whole, rtol=1e-13, atol=1e-13)


def test_only_plain_tensors_come_to_kernels() -> None:
    gamma = torch.nn.Parameter(torch.ones(2))
    assert is_eager(torch.ones(2), gamma)
    with FakeTensorMode() as mode:
        assert not is_eager(torch.ones(2))
    assert not is_eager(gamma, mode.from_tensor(torch.ones(2)))


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize(
    ("vector", "gates", "reverse", "kind"),
    [(4, "step", False, "fp32"), (4, "step", True, "fp32"), (8, "step", True, "bf16"), (1, "row", True, "fp32")],
)
def test_kernels_compile_for_sm_90(shipped: Any, vector: int, gates: str, reverse: bool, kind: str) -> None:
    steps = 2 * vector if vector > 1 else shipped.STEPS_AT_A_TIME
    lane = steps if vector > 1 else shipped.LANE_STEPS
    constants = {
        "P": 1 if vector > 1 else 32, "J": 128 if vector > 1 else 8, "V": steps, "VECTOR": vector, "LANE": lane,
        "GATES": gates, "REVERSE": reverse, "SHIFTED": reverse, "RESET": vector == 1,
    }  # fmt: skip
    kinds = {"x_ptr": f"*{kind}", "gamma_ptr": f"*{kind}", "reset_ptr": "*u8", "flags_ptr": "*i32"}
    units = dict.fromkeys(("x_time", "gamma_time", "groups", "inner"), 1) if vector > 1 else {"x_inner": 1}
    aligned = ("x_ptr", "gamma_ptr", "T", "x_outer", "gamma_outer")
    warps = constants["P"] * constants["J"] // 32
    code = compiled_for_sm_90(shipped.block_totals, constants | units, kinds, aligned=aligned, warps=warps)
    if vector > 1:
        # Vectors of 16 bytes, two of steps and two of gates; once more where something is not finite.
        assert code.asm["ptx"].count("ld.global.v4.b32") == 8
        assert "local" not in code.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize("final", [False, True])
def test_folds_compile_for_sm_90(shipped: Any, final: bool) -> None:
    kinds = {"flags_ptr": "*i32", "new_flags_ptr": "*fp64" if final else "*i32"}
    constants = {"P": 4, "J": 64, "FINAL": final}
    assert compiled_for_sm_90(shipped.fold_totals, constants, kinds).asm["ptx"]
