"""The C++ CPU kernels through the private ops: every path of theirs, in bits where bits are promised.

The paths: rows along contiguous memory (SIMD within a row), columns side by side, rows abreast for everything else,
chunks of a few long rows, windows; each compiled for three instruction sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the library)
from torch_dcs_ops import _native

from scan.oracle import DTYPES, LAYOUTS, REAL_DTYPES, make, make_gamma, make_reset, wide_dtype
from support.subprocesses import run_with_instruction_set

pytestmark = pytest.mark.skipif(not _native.CPU_LIBRARY.loaded, reason="the compiled CPU library is not loaded")

KINDS = ("number", "scalar", "row", "row1", "step", "time")
CHUNK = 4096  # steps; kChunk in csrc/cpu/scan/kernels.h


@dataclass
class Case:
    """The arguments of `_scan`."""

    input: Tensor
    gamma: Tensor | None = None
    gamma_value: float = 0.9
    dim: int = -1
    reverse: bool = False
    shifted: bool = False
    initial: Tensor | None = None
    reset: Tensor | None = None
    window: int | None = None

    def run(self) -> Tensor:
        return torch.ops.dcs._scan.default(
            self.input, self.gamma, self.gamma_value, self.dim, self.reverse, self.shifted, self.initial, self.reset,
            self.window,
        )  # fmt: skip

    def run_backward(self, grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dcs._scan_gradients.default(
            grad, output, self.gamma, self.gamma_value, self.dim, self.reverse, self.initial, self.reset
        )


def gates_of(case: Case) -> Tensor:
    """The gate of every step, in input's shape, as wide as there is."""
    x, gamma = case.input, case.gamma
    if gamma is None:
        return torch.full(x.shape, case.gamma_value, dtype=torch.float64)
    wide = gamma.to(wide_dtype(gamma.dtype))
    if 0 < gamma.dim() < x.dim():
        rows = [size for axis, size in enumerate(x.shape) if axis != case.dim % x.dim()]
        wide = wide.expand(rows).unsqueeze(case.dim)
    return wide.expand(x.shape)


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    """The result in float64 or complex128, and the same sum over absolute values, which bounds what rounding can do."""
    dim = case.dim
    values = case.input.to(wide_dtype(case.input.dtype)).movedim(dim, 0)
    gates = gates_of(case).movedim(dim, 0)
    cuts = torch.zeros(values.shape, dtype=torch.bool) if case.reset is None else case.reset.movedim(dim, 0)
    if case.reverse:
        values, gates, cuts = values.flip(0), gates.flip(0), cuts.flip(0)
    if case.shifted:  # What belongs to the step before; its own first one is never used.
        gates, cuts = gates.roll(1, 0), cuts.roll(1, 0)
    start = None if case.initial is None else case.initial.to(values.dtype).expand(values.shape[1:])
    outputs, bounds = [], []
    for t in range(len(values)):
        begin = 0 if case.window is None else max(0, t - case.window + 1)
        if case.window is None and t:
            carry, bound = outputs[-1], bounds[-1]
        else:
            reached = begin == 0 and (case.window is None or t + 1 < case.window)
            carry = start if reached else None
            bound = None if carry is None else carry.abs()
            for s in range(begin, t):
                carry, bound = one_step(values, gates, cuts, s, carry, bound)
        y, bound = one_step(values, gates, cuts, t, carry, bound)
        outputs.append(y)
        bounds.append(bound)
    y, total = torch.stack(outputs), torch.stack(bounds)
    if case.reverse:
        y, total = y.flip(0), total.flip(0)
    return y.movedim(0, dim), total.movedim(0, dim)


def long_oracle(case: Case) -> tuple[Tensor, Tensor]:
    """`oracle` for a few long rows: repeated until there are too many rows to be cut into chunks, in double."""
    count = 40 // case.input.size(0) + 1
    dtype = wide_dtype(case.input.dtype)

    def repeated(tensor: Tensor | None, to: torch.dtype | None = None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.cat([tensor if to is None else tensor.to(to)] * count)

    gates = gates_of(case).to(dtype)
    wide = Case(
        torch.cat([case.input.to(dtype)] * count),
        torch.cat([gates] * count),
        dim=case.dim,
        reverse=case.reverse,
        shifted=case.shifted,
        initial=repeated(case.initial, dtype),
        reset=repeated(case.reset),
    )
    bound = Case(**{**vars(wide), "input": wide.input.abs(), "gamma": None if wide.gamma is None else wide.gamma.abs()})
    if wide.initial is not None:
        bound.initial = wide.initial.abs()
    rows = case.input.size(0)
    return wide.run()[:rows], bound.run()[:rows]


def one_step(
    values: Tensor, gates: Tensor, cuts: Tensor, t: int, carry: Tensor | None, bound: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = values[t]
    if carry is None or bound is None:
        return x, x.abs()
    y, total = x + gates[t] * carry, x.abs() + gates[t].abs() * bound
    return torch.where(cuts[t], x, y), torch.where(cuts[t], x.abs(), total)


def assert_close(actual: Tensor, expected: Tensor, total: Tensor, dtype: torch.dtype, steps: int) -> None:
    """One rounding to `dtype`, on top of a few in double for every step: the kernels sum in double."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    final = torch.finfo(dtype)
    in_double = 8 * (steps + 32) * torch.finfo(torch.float64).eps
    budget = final.eps * expected.abs() + in_double * total + final.smallest_normal * final.eps
    error = (actual.to(expected.dtype) - expected).abs()
    assert bool((error <= budget).all()), f"{(error - budget).max()} beyond the budget"


def assert_matches_oracle(case: Case) -> None:
    actual = case.run()
    expected, total = long_oracle(case) if case.input.size(case.dim) > CHUNK else oracle(case)
    assert actual.stride() == torch.empty_like(case.input).stride()
    assert_close(actual, expected, total, case.input.dtype, case.input.size(case.dim))


def cases(shape: tuple[int, ...], dim: int, dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """Every meeting of the options, in both directions."""
    x = make(shape, dtype)
    gamma = None if kind == "number" else make_gamma(kind, shape, dim, dtype, "cpu")
    rows = [size for axis, size in enumerate(shape) if axis != dim % len(shape)]
    initial, reset = make(rows, dtype, seed=3), make_reset(shape)
    for reverse, begin, cut, window in itertools.product(
        (False, True), (None, "initial", "shifted"), (None, reset), (None, 5)
    ):
        start = initial if begin == "initial" else None
        yield Case(x, gamma, 0.9, dim, reverse, begin == "shifted", start, cut, window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((5, 19), 1), ((9, 7), 0), ((2, 9, 3), 1)], ids=str)
@pytest.mark.each_pair
def test_paths_match_float64(shape: tuple[int, ...], dim: int, dtype: torch.dtype, kind: str) -> None:
    for case in cases(shape, dim, dtype, kind):
        assert_matches_oracle(case)


@pytest.mark.parametrize("length", [*range(1, 20), 31, 32, 33, 47, 48, 63, 64, 65])
def test_vector_edges_match_float64(length: int) -> None:
    for dtype, reverse in itertools.product(REAL_DTYPES, (False, True)):
        assert_matches_oracle(Case(make((3, length), dtype), None, -0.95, -1, reverse))
        # Columns: the compiler's vectors, and the loop for what is left over.
        assert_matches_oracle(Case(make((4, length), dtype), None, 0.95, 0, reverse))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float16], ids=str)
def test_layouts_match_float64(layout: str, dtype: torch.dtype) -> None:
    place = LAYOUTS[layout]
    shape = (4, 21, 6)
    for dim, kind, reverse in itertools.product(range(3), ("number", "row", "step"), (False, True)):
        gamma = None if kind == "number" else place(make_gamma(kind, shape, dim, dtype, "cpu"))
        rows = [size for axis, size in enumerate(shape) if axis != dim]
        for cut in (None, place(make_reset(shape))):
            start = place(make(rows, dtype, seed=3))
            assert_matches_oracle(Case(place(make(shape, dtype)), gamma, 0.9, dim, reverse, False, start, cut))


@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(1, 9 * CHUNK + 5), (3, 3 * CHUNK)])
@pytest.mark.each_pair
def test_chunks_match_float64(rows: int, length: int, dtype: torch.dtype, kind: str) -> None:
    x = make((rows, length), dtype)
    gamma = None if kind == "number" else make_gamma(kind, (rows, length), 1, dtype, "cpu")
    reset = torch.zeros(x.shape, dtype=torch.bool)
    reset[:, [1, CHUNK - 1, CHUNK, 2 * CHUNK + 7]] = True
    for reverse, cut in itertools.product((False, True), (None, reset)):
        assert_matches_oracle(Case(x, gamma, 0.9999, 1, reverse, False, make((rows,), dtype, seed=3), cut))
        assert_matches_oracle(Case(x, gamma, 0.9999, 1, reverse, True, None, cut))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((5, 19), 1), ((9, 7), 0), ((2, 9, 3), 1), ((1, 9 * CHUNK), 1)], ids=str)
@pytest.mark.each_pair
def test_backward_matches_float64(shape: tuple[int, ...], dim: int, dtype: torch.dtype, kind: str) -> None:
    if shape[-1] > CHUNK and (dtype not in (torch.float32, torch.complex64) or kind not in ("number", "row", "step")):
        pytest.skip("the long row is tested in two dtypes")
    grad = make(shape, dtype, seed=4)
    for case in (cases if shape[-1] <= CHUNK else long_cases)(shape, dim, dtype, kind):
        if case.shifted or case.window is not None:
            continue
        output = case.run()
        grad_input, grad_gamma = case.run_backward(grad, output)
        conjugate = None if case.gamma is None else case.gamma.conj()
        adjoint = Case(grad, conjugate, case.gamma_value, dim, not case.reverse, True, None, case.reset)
        expected, total = long_oracle(adjoint) if shape[dim] > CHUNK else oracle(adjoint)
        assert_close(grad_input, expected, total, dtype, shape[dim])

        saved = output.to(wide_dtype(dtype))
        beyond = torch.zeros_like(saved.narrow(dim, 0, 1))
        if case.initial is not None:
            beyond = beyond + case.initial.to(saved.dtype).unsqueeze(dim)
        length = shape[dim]
        inside = saved.narrow(dim, 1 if case.reverse else 0, length - 1)
        before = torch.cat((inside, beyond) if case.reverse else (beyond, inside), dim)
        terms, sizes = expected * before.conj(), total * before.abs()
        if case.reset is not None:
            terms, sizes = terms.masked_fill(case.reset, 0), sizes.masked_fill(case.reset, 0)
        if case.gamma is not None and case.gamma.dim() == len(shape):
            assert_close(grad_gamma, terms, sizes, dtype, length)
        else:
            summed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            rows, sizes = terms.sum(dim), sizes.sum(dim)
            if case.gamma is not None and not case.gamma.dim():
                # The sums of rows are rounded as well.
                sizes = (
                    sizes.sum() + torch.finfo(summed).eps / torch.finfo(torch.float64).eps * rows.abs().sum() / length
                )
                rows = rows.sum()
            assert_close(grad_gamma, rows, sizes, summed, length)


def long_cases(shape: tuple[int, ...], dim: int, dtype: torch.dtype, kind: str) -> Iterator[Case]:
    gamma = None if kind == "number" else make_gamma(kind, shape, dim, dtype, "cpu")
    reset = torch.zeros(shape, dtype=torch.bool)
    reset[:, [5, CHUNK, 3 * CHUNK - 1]] = True
    for cut in (None, reset):
        yield Case(make(shape, dtype), gamma, 0.9999, dim, True, False, make(shape[:1], dtype, seed=3), cut)


def test_integer_sums_wrap() -> None:
    x = torch.randint(-(2**62), 2**62, (3, 5 * CHUNK + 1))
    for dim, reverse in itertools.product((0, 1), (False, True)):
        expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
        assert torch.equal(torch.ops.dcs.cumsum(x, dim, reverse=reverse), expected)
    narrow = torch.full((300,), 100, dtype=torch.int8)
    assert torch.equal(torch.ops.dcs.cumsum(narrow, 0, dtype=torch.int8), narrow.cumsum(0, dtype=torch.int8))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


THREAD_CASES: dict[str, Any] = {
    "rows": ((300, 500), -1, {}),
    "rows abreast": ((300, 501), -1, {"reset": True}),
    "columns": ((200, 777), 0, {}),
    "few columns": ((30000, 5), 0, {}),
    "short rows": ((60_001, 3), -1, {"reset": True}),
    "three columns": ((70_001, 3), 0, {"reset": True}),
    "chunks": ((1, 200_003), -1, {}),
    "chunks abreast": ((2, 100_003), -1, {"reset": True}),
    "window": ((3, 50_000), -1, {"window": 777}),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("name", THREAD_CASES)
def test_bits_do_not_depend_on_threads(name: str, kind: str) -> None:
    shape, dim, options = THREAD_CASES[name]
    x = make(shape, torch.float32)
    gamma = None if kind == "number" else make_gamma(kind, shape, dim % 2, torch.float32, "cpu").abs().clamp(max=1)
    reset = make_reset(shape) if "reset" in options else None
    case = Case(x, gamma, 0.999, dim, True, False, None, reset, options.get("window"))
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        output = case.run()
        results.append((output, *(case.run_backward(x, output) if case.window is None else ())))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gamma", [2.0, 1e20, 1e200, -3.0])
def test_growing_gamma_makes_no_nan_of_zeros(gamma: float, reverse: bool) -> None:
    x = torch.zeros(2, 9 * CHUNK, dtype=torch.float64)
    last = 0 if reverse else -1
    x[1, last] = 1.5
    for given in (None, torch.full((2,), gamma, dtype=torch.float64), torch.full_like(x, gamma)):
        for cut in (None, torch.zeros(x.shape, dtype=torch.bool)):
            assert torch.equal(Case(x, given, gamma, -1, reverse, reset=cut).run(), x)
        # 2.0 ** 1100 is beyond float64 as well.
        assert torch.equal(Case(x, given, gamma, -1, reverse, window=1100).run(), x)


@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("shape", [(1, 9 * CHUNK), (3, 700), (200, 40)], ids=str)
def test_nan_reaches_what_it_should_and_nothing_else(shape: tuple[int, int], kind: str) -> None:
    x = make(shape, torch.float32)
    at, cut = shape[1] // 3, shape[1] // 2 + 11
    x[:, at] = float("nan")
    gamma = None if kind == "number" else torch.full(shape if kind == "step" else shape[:1], 0.5)
    steps = torch.arange(shape[1]).expand(shape)
    reset = steps == cut
    assert torch.equal(Case(x, gamma, 0.5).run().isnan(), steps >= at)
    assert torch.equal(Case(x, gamma, 0.5, reverse=True).run().isnan(), steps <= at)
    assert torch.equal(Case(x, gamma, 0.5, reset=reset).run().isnan(), (steps >= at) & (steps < cut))
    for window in (1, 7, 600):
        reached = (steps >= at) & (steps < at + window)
        assert torch.equal(Case(x, gamma, 0.5, window=window).run().isnan(), reached)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ((torch.ones(2, 3), 0.5), {"dim": 2}, IndexError, "dim must be in [-2, 1] for a 2-D input, got 2"),
        ((torch.tensor(1.0), 0.5), {"dim": 1}, IndexError, "dim must be in [-1, 0] for a 0-D input, got 1"),
        (
            (torch.ones(2, dtype=torch.int64), 0.5),
            {},
            RuntimeError,
            "input must be floating-point or complex, got int64",
        ),
        ((torch.ones(2), 0.5), {"direction": "up"}, RuntimeError, 'direction must be "left" or "right", got "up"'),
        ((torch.ones(2), 0.5), {"window": 0}, RuntimeError, "window must be at least 1, got 0"),
        (
            (torch.ones(4, 2), torch.ones(3)),
            {"dim": 1},
            RuntimeError,
            "gamma must broadcast to input's shape without dim 1, (4,), to give one discount a row, got (3,); "
            "a per-step gamma needs input's number of dimensions (2)",
        ),
        (
            (torch.ones(2), torch.ones(2, dtype=torch.complex64)),
            {},
            RuntimeError,
            "gamma must be real for a real input of dtype float32, got complex64",
        ),
        (
            (torch.ones(2, 2), 0.5),
            {"reset": torch.ones(2, 2)},
            RuntimeError,
            "reset must be bool, got float32",
        ),
        (
            (torch.ones(2, 2), 0.5),
            {"initial": torch.ones(3)},
            RuntimeError,
            "initial must broadcast to input's shape without dim 1, (2,), got (3,)",
        ),
    ],
)
def test_the_raw_op_refuses_bad_arguments(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with torch._C._AutoDispatchBelowAutograd(), pytest.raises(error) as raised:
        torch.ops.dcs.discounted_cumsum(*arguments, **options)
    assert str(raised.value).startswith(f"discounted_cumsum: {sentence}")


@pytest.mark.parametrize("isa", [pytest.param("default", marks=pytest.mark.slow), "avx2", "avx512"])
def test_every_instruction_set(isa: str) -> None:
    """With test_cpu_rows.py, in one process; of both, what takes every kernel: test-cpus runs them whole.

    The library reads TORCH_DCS_CPU_ISA at its first call; what the CPU lacks falls back: this passes anywhere.
    """
    rows = str(Path(__file__).with_name("test_cpu_rows.py"))
    others = " or layouts or (growing and 2.0) or special or ((chunks or anywhere) and float32)"
    selected = "vector_edges or every_bfloat16" + ("" if isa == "avx512" else others)
    run_with_instruction_set(isa, __file__, rows, "-k", selected)
