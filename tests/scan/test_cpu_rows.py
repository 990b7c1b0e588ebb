"""Rows, and few columns, on CPUs against a loop over time in float64: every kernel that takes them.

Rows that follow each other in memory are one sequence (flat) or go step by step, four at a time (interleaved); others
go eight abreast in lines, and so do chunks of a few; few columns have a kernel of their own. Where rows lie is drawn.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the library)
from torch_dcs_ops import _native

from scan.oracle import REAL_DTYPES, make, make_gamma
from scan.test_cpu_kernels import Case, assert_close, assert_matches_oracle, oracle
from scan.test_cpu_kernels import cases as every_case
from support.selection import slow
from support.subprocesses import environment

pytestmark = pytest.mark.skipif(not _native.CPU_LIBRARY.loaded, reason="the compiled CPU library is not loaded")

GAMMAS = ("number", "row", "step")
# Around a square's side, a vector's lanes, the lengths at which kernels take turns, and a batch of lines.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 71, 127, 129)
ROWS = (1, 3, 7, 8, 9, 15, 17, 65, 261)


def placed(draw: random.Random, shape: tuple[int, ...], fill: Tensor) -> Tensor:
    """`fill` somewhere in memory: packed, between rows that are longer, at an odd offset, or with time not adjacent: a
    dimension is between its steps, or a gap."""
    form = draw.choice(("packed", "packed", "padded", "offset", "across", "apart"))
    if form == "packed":
        return fill.clone()
    if form == "apart":
        return torch.zeros((*shape, draw.randint(2, 4)), dtype=fill.dtype)[..., -1].copy_(fill)
    if form == "across":
        return fill.movedim(-1, 0).contiguous().movedim(0, -1)
    padding = draw.randint(1, 9) if form == "padded" else 0
    wide = torch.zeros((*shape[:-1], shape[-1] + padding), dtype=fill.dtype)
    storage = torch.zeros(wide.numel() + 3, dtype=fill.dtype)[draw.randint(1, 3) :][: wide.numel()]
    view = storage.view(wide.shape)[..., : shape[-1]]
    return view.copy_(fill)


def drawn_cases(seed: str, dtype: torch.dtype, count: int, special: bool = False) -> Iterator[Case]:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def chance(shape: tuple[int, ...], share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    for _ in range(count):
        rows, length = draw.choice(ROWS), draw.choice(LENGTHS)
        shape: tuple[int, ...] = (rows, length) if draw.random() < 0.6 else (draw.choice((1, 2, 5, 9)), rows, length)
        values = normal(*shape)
        if special:
            values[chance(shape, 0.02)] = draw.choice((float("inf"), float("-inf"), float("nan"), -0.0))
        x = placed(draw, shape, values.to(dtype))
        kind = draw.choice(GAMMAS)
        gamma = None
        if kind == "row":
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            gamma = placed(draw, shape[:-1], (normal(*shape[:-1]) * 0.5).clamp(-1, 1).to(wide))
        elif kind == "step":
            gates = (normal(*shape) * 0.7).clamp(-1, 1)
            if special:
                gates[chance(shape, 0.05)] = 0.0
            gamma = placed(draw, shape, gates.to(dtype))
        reset = placed(draw, shape, chance(shape, 0.15)) if draw.random() < 0.4 else None
        initial = placed(draw, shape[:-1], normal(*shape[:-1]).to(dtype)) if draw.random() < 0.4 else None
        shifted = draw.random() < 0.25
        dim = -1
        if draw.random() < 0.25:  # few columns, or many
            x, dim = x.movedim(-1, -2), -2
            gamma = gamma.movedim(-1, -2) if kind == "step" and gamma is not None else gamma
            reset = None if reset is None else reset.movedim(-1, -2)
            if draw.random() < 0.7:
                x = x.contiguous()
        start = None if shifted else initial
        yield Case(x, gamma, draw.choice((0.9, -1.0, 1.0)), dim, draw.random() < 0.5, shifted, start, reset)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_rows_anywhere_match_float64(dtype: torch.dtype, seed: int) -> None:
    for case in drawn_cases(f"rows {seed}", dtype, 40):
        expected, total = oracle(case)
        assert_close(case.run(), expected, total, dtype, case.input.size(case.dim))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_gradients_of_rows_anywhere_match_float64(dtype: torch.dtype, seed: int) -> None:
    for case in drawn_cases(f"gradients {seed}", dtype, 30):
        if case.shifted:
            continue
        dim, length = case.dim, case.input.size(case.dim)
        output = case.run()
        grad = output.flip(dim)
        grad_input, grad_gamma = case.run_backward(grad, output)
        adjoint = Case(grad, case.gamma, case.gamma_value, dim, not case.reverse, True, None, case.reset)
        expected, total = oracle(adjoint)
        assert_close(grad_input, expected, total, dtype, length)
        saved = output.double()
        beyond = torch.zeros_like(saved.narrow(dim, 0, 1))
        if case.initial is not None:
            beyond = beyond + case.initial.double().unsqueeze(dim)
        inside = saved.narrow(dim, 1 if case.reverse else 0, length - 1)
        before = torch.cat((inside, beyond) if case.reverse else (beyond, inside), dim)
        terms, sizes = expected * before, total * before.abs()
        if case.reset is not None:
            terms, sizes = terms.masked_fill(case.reset, 0), sizes.masked_fill(case.reset, 0)
        if case.gamma is not None and case.gamma.dim() == case.input.dim():
            assert_close(grad_gamma, terms, sizes, dtype, length)
        else:
            summed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            assert_close(grad_gamma, terms.sum(dim), sizes.sum(dim), summed, length)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_special_values_reach_what_they_should_and_nothing_else(dtype: torch.dtype) -> None:
    """inf, NaN and -0 in inputs, and gates of 0: as the loop has them. gamma is -1: no power leaves the range."""
    for case in drawn_cases("special", dtype, 120, special=True):
        case.gamma_value = -1.0
        actual, (expected, _) = case.run().double(), oracle(case)
        assert torch.equal(actual.isnan(), expected.isnan()), case
        assert torch.equal(actual.isinf(), expected.isinf()), case
        assert torch.equal(actual[actual.isinf()], expected[expected.isinf()]), case


@pytest.mark.parametrize("kind", GAMMAS)
def test_the_first_step_of_a_row_is_its_input_in_bits(kind: str) -> None:
    """-0 stays -0 beside gates that are no numbers: nothing enters a row that begins without a carry."""
    for rows, length in itertools.product((3, 12, 300), (40, 200)):
        x = torch.full((rows, length), -0.0, dtype=torch.float32)
        gamma = None if kind == "number" else torch.ones(x.shape if kind == "step" else x.shape[:1])
        if kind == "step" and gamma is not None:
            gamma[:, 0] = float("nan")
        reset = torch.zeros(x.shape, dtype=torch.bool)
        assert torch.equal(Case(x, gamma, 1.0, reset=reset).run(), x)
        assert not bool(Case(x, gamma, 1.0, reset=reset).run()[:, 0].signbit().logical_not().any())


@pytest.mark.parametrize("kind", GAMMAS)
@pytest.mark.parametrize("length", [2, 5, 30, 40])
def test_a_row_has_the_same_bits_wherever_it_is(length: int, kind: str) -> None:
    """Interleaved rows and those abreast are summed step by step: among how many others shows in no bit."""
    x = torch.randn(64, length, dtype=torch.float64)
    gamma = None if kind == "number" else torch.rand(x.shape if kind == "step" else x.shape[:1], dtype=torch.float64)
    reset = torch.rand(x.shape) < 0.1
    for cut in (None, reset) if length > 16 else (None,):
        if kind == "number" and cut is None:
            continue  # by powers of gamma
        whole = Case(x, gamma, reset=cut).run()
        for begin, end in ((0, 9), (9, 20), (20, 64)):
            gates, cuts = (None if tensor is None else tensor[begin:end] for tensor in (gamma, cut))
            assert torch.equal(Case(x[begin:end], gates, reset=cuts).run(), whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_long_rows_with_a_gate_for_every_step_match_columns(dtype: torch.dtype) -> None:
    """More steps than go abreast; the columns' kernel, in float64, has the result."""
    length = 2**18 + 4099
    x, gamma = torch.randn(2, length).to(dtype), torch.rand(2, length).to(dtype)
    initial = torch.randn(2).to(dtype)

    def columns(rows: Tensor) -> Tensor:
        return rows.double().repeat(4, 1).T.contiguous()

    for reverse, shifted in itertools.product((False, True), (False, True)):
        start = None if shifted else initial
        wide = None if start is None else start.double().repeat(4)
        expected, total = (
            Case(columns(sign(x)), columns(gamma), 1.0, 0, reverse, shifted, None if wide is None else sign(wide)).run()
            for sign in (torch.positive, torch.abs)
        )
        actual = Case(x, gamma, 1.0, 1, reverse, shifted, start).run()
        assert_close(actual, expected[:, :2].T, total[:, :2].T, dtype, length)


@pytest.mark.parametrize("sizes", ["some", slow("every")])
def test_nothing_beyond_the_operands_is_touched(sizes: str) -> None:
    script = Path(__file__).with_name("guarded_rows.py")
    command = [sys.executable, str(script), sizes]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "untouched", (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("columns", [4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33])
def test_vector_edges_of_few_columns_match_float64(columns: int, kind: str) -> None:
    """In one to four vectors, the last of which overlaps the one before; carries stay in registers."""
    for dtype in REAL_DTYPES:
        for case in every_case((5, columns), 0, dtype, kind):
            if case.window is None:
                assert_matches_oracle(case)


@pytest.mark.parametrize("columns", [8, 32, 1 << 16])
def test_every_bfloat16_is_kept(columns: int) -> None:
    """A first step's value is stored as it is, but for NaNs, which stay NaNs."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 1, columns)
    x = torch.cat((every, torch.zeros_like(every)), 1)
    found = torch.ops.dcs._scan.default(x, None, 0.5, 1, False, True, None, None, None)[:, :1]
    number = ~every.isnan()
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found[number].view(torch.int16), every[number].view(torch.int16))


@pytest.mark.parametrize("kind", ["number", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(7, 40, 2), (5, 341, 3), (9, 700, 1), (3, 130, 5)], ids=str)
def test_short_runs_match_float64(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    """Time first, and a few padded elements last: neighbors in the result, in the input in runs with gaps between them;
    one block of them, two, and what is left beside whole ones."""
    x = make((*shape[:-1], shape[-1] + 3), dtype)[..., : shape[-1]]
    gamma = None if kind == "number" else make_gamma(kind, shape, 0, dtype, "cpu")
    for reverse, initial in itertools.product((False, True), (None, make(list(shape[1:]), dtype, seed=3))):
        assert_matches_oracle(Case(x, gamma, 0.9, 0, reverse, False, initial, None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(9, 3), (300, 2), (4096, 3), (9001, 2), (40_003, 7), (5, 60, 2), (70, 400, 3)], ids=str
)
def test_few_columns_with_gaps_have_the_bits_of_those_without(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Beside numbers that would show, and with an infinity, which sends the vectors' kernel back to its steps."""
    dim = len(shape) - 2
    rows = (*shape[:dim], shape[-1])
    for gap, reverse, is_finite in itertools.product((1, 2, 9), (False, True), (False, True)):
        wide = torch.full((*shape[:-1], shape[-1] + gap), float("nan"), dtype=dtype)
        x = wide[..., : shape[-1]]
        x.copy_(torch.randn(shape).to(dtype))
        if not is_finite:
            x[..., shape[dim] // 2, 1] = float("inf")
        gates, initial = torch.rand(shape).to(dtype), torch.randn(rows).to(dtype)
        reset = torch.rand(shape) < 0.1
        for gamma, cut, start in (
            (None, None, None),
            (None, None, initial),
            (gates, None, initial),
            (gates, reset, None),
        ):
            found, dense = (
                Case(each, gamma, 0.9, dim, reverse, initial=start, reset=cut).run() for each in (x, x.contiguous())
            )
            assert torch.equal(found.nan_to_num(), dense.nan_to_num())
            assert bool(found.isfinite().all()) == is_finite
