"""discounted_cumsum against the definition: every option, alone and combined, in every dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import torch_dcs_ops
from torch_dcs_ops import discounted_cumsum

from scan.oracle import DTYPES, LAYOUTS, REAL_DTYPES, assert_is_scan, make, make_gamma, make_reset
from support.selection import slow

DIRECTIONS = ("right", "left")
GAMMA_KINDS = ("number", "scalar", "row", "row1", "step", "time")


def options_for(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str, names: str) -> dict[str, Any]:
    """Arguments for a string of letters: i(nitial), r(eset), w(indow)."""
    rows = [size for axis, size in enumerate(shape) if axis != dim % len(shape)]
    options: dict[str, Any] = {"dim": dim}
    if "i" in names:
        options["initial"] = make(rows, dtype, device, seed=3)
    if "r" in names:
        options["reset"] = make_reset(shape, device)
    if "w" in names:
        options["window"] = 4
    return options


COMBINATIONS = ["".join(c) for n in range(4) for c in itertools.combinations("irw", n)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("names", COMBINATIONS)
@pytest.mark.parametrize("kind", GAMMA_KINDS)
@pytest.mark.each_pair
def test_every_combination_of_options(device: str, kind: str, names: str, direction: str) -> None:
    shape, dim = (3, 17, 2), 1
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        x = make(shape, dtype, device)
        gamma = make_gamma(kind, shape, dim, dtype, device)
        options = options_for(shape, dim, dtype, device, names)
        assert_is_scan(
            discounted_cumsum(x, gamma, direction=direction, **options), x, gamma, direction=direction, **options
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(100,), (5, 33), (33, 5), (2, 3, 20), (1, 300), (64, 3), (2, 2, 2, 9)], ids=str)
@pytest.mark.each_pair
def test_every_dtype_and_dim(device: str, shape: tuple[int, ...], dtype: torch.dtype, direction: str) -> None:
    x = make(shape, dtype, device)
    for dim in range(-len(shape), len(shape)):
        for kind in ("number", "row", "step"):
            gamma = make_gamma(kind, shape, dim, dtype, device)
            assert_is_scan(
                discounted_cumsum(x, gamma, dim=dim, direction=direction), x, gamma, dim=dim, direction=direction
            )


# The oracle of the longest ones takes longer than all others.
LENGTHS = [1, 2, 3, 31, 32, 33, 127, 128, 129, 1025]


@pytest.mark.parametrize("length", LENGTHS + [slow(length) for length in (1023, 1024, 4097)])
def test_lengths_around_powers_of_two(device: str, length: int) -> None:
    for shape, dim in (((2, length), 1), ((length, 3), 0)):
        x = make(shape, torch.float32, device)
        for gamma, direction in itertools.product((0.99, -0.5, 1.0), DIRECTIONS):
            options = {"dim": dim, "direction": direction}
            assert_is_scan(discounted_cumsum(x, gamma, **options), x, gamma, **options)


@pytest.mark.parametrize("gamma", [0.0, -0.0, -0.9, 1.0, -1.0, 1.5, -2.0, 1e-30, 1e-300, 3, 2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_real_gamma(device: str, gamma: float, direction: str) -> None:
    x = make((3, 40), torch.float64, device)
    for value in (gamma, torch.tensor(float(gamma), dtype=torch.float64, device=device)):
        assert_is_scan(discounted_cumsum(x, value, direction=direction), x, value, direction=direction)


def test_gamma_above_one_makes_no_nan_of_zeros(device: str) -> None:
    """Powers of gamma overflow where the recurrence only ever sees zeros."""
    for gamma, window in itertools.product((1e30, -1e30, 10.0), (None, 7, 400)):
        x = torch.zeros(2, 500, dtype=torch.float32, device=device)
        x[:, 490] = 0.0
        y = discounted_cumsum(x, gamma, window=window)
        assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("gamma_dtype", REAL_DTYPES, ids=str)
def test_gamma_of_any_real_dtype(device: str, dtype: torch.dtype, gamma_dtype: torch.dtype) -> None:
    shape = (4, 30)
    x = make(shape, dtype, device)
    for kind in ("scalar", "row", "row1", "step"):
        gamma = make_gamma(kind, shape, 1, gamma_dtype, device)
        assert_is_scan(discounted_cumsum(x, gamma), x, gamma)


@pytest.mark.parametrize("gamma_dtype", [*REAL_DTYPES, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_input_with_any_gamma(device: str, dtype: torch.dtype, gamma_dtype: torch.dtype) -> None:
    shape = (4, 30)
    x = make(shape, dtype, device)
    for kind in ("scalar", "row", "step"):
        gamma = make_gamma(kind, shape, 1, gamma_dtype, device)
        assert_is_scan(discounted_cumsum(x, gamma, window=9), x, gamma, window=9)
        assert_is_scan(discounted_cumsum(x, gamma), x, gamma)


def test_row_gamma_keeps_float64_precision(device: str) -> None:
    """Rounding gamma to float32 is the largest error of a long scan: it must not happen."""
    x = torch.ones(2, 10_000, device=device)
    exact = torch.tensor([0.999, 0.999], dtype=torch.float64, device=device)
    for gamma in (0.999, exact, exact[:, None], exact[0]):
        y = discounted_cumsum(x, gamma)
        expected = (1 - 0.999**10_000) / (1 - 0.999)
        assert abs(float(y[0, 0]) - expected) < 3e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_layout(device: str, layout: str, dim: int, direction: str) -> None:
    shape = (4, 9, 6)
    change = LAYOUTS[layout]
    x = change(make(shape, torch.float32, device))
    reset = change(make_reset(shape, device))
    for kind in ("row", "step"):
        gamma = change(make_gamma(kind, shape, dim, torch.float32, device))
        options: dict[str, Any] = options_for(shape, dim, torch.float32, device, "i")
        options |= {"direction": direction, "initial": change(options["initial"])}
        for extra in ({}, {"reset": reset}, {"reset": reset, "window": 3}):
            y = discounted_cumsum(x, gamma, **options, **extra)
            assert_is_scan(y, x, gamma, **options, **extra)
            assert y.stride() == torch.empty_like(x).stride()


def test_operands_broadcast(device: str) -> None:
    x = make((2, 3, 8), torch.float64, device)
    for gamma_shape in ((), (1,), (3,), (1, 3), (2, 1), (2, 3), (1, 1, 1), (1, 1, 8), (1, 3, 8), (2, 1, 8), (2, 3, 1)):
        gamma = torch.rand(gamma_shape, dtype=torch.float64).to(device)
        for initial_shape in ((), (1,), (3,), (2, 1), (2, 3)):
            initial = make(initial_shape, torch.float64, device)
            assert_is_scan(discounted_cumsum(x, gamma, initial=initial), x, gamma, initial=initial)


def test_zero_dimensional_input(device: str) -> None:
    x = torch.tensor(2.0, dtype=torch.float64, device=device)
    initial = torch.tensor(3.0, dtype=torch.float64, device=device)
    reset = torch.tensor(True, device=device)
    half = torch.tensor(0.5, dtype=torch.float64, device=device)
    for gamma in (0.5, half):
        for dim in (-1, 0):
            assert discounted_cumsum(x, gamma, dim=dim).item() == 2.0
            assert discounted_cumsum(x, gamma, dim=dim, initial=initial).item() == 3.5
            assert discounted_cumsum(x, gamma, dim=dim, initial=initial, reset=reset).item() == 2.0
            assert discounted_cumsum(x, gamma, dim=dim, initial=initial, window=1).item() == 2.0
            assert discounted_cumsum(x, gamma, dim=dim, initial=initial, window=2).item() == 3.5


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (3, 0, 2), (0, 4, 2)], ids=str)
@pytest.mark.parametrize("names", COMBINATIONS)
def test_empty_inputs(device: str, shape: tuple[int, ...], names: str) -> None:
    x = make(shape, torch.float32, device)
    for dim in range(len(shape)):
        options = options_for(shape, dim, torch.float32, device, names)
        for kind in GAMMA_KINDS:
            gamma = make_gamma(kind, shape, dim, torch.float32, device)
            for direction in DIRECTIONS:
                y = discounted_cumsum(x, gamma, direction=direction, **options)
                assert y.shape == x.shape
                assert y.dtype == x.dtype


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16, 19, 20, 21, 22, 1000, 2**40])
@pytest.mark.each_value
def test_windows_up_to_and_beyond_the_length(device: str, window: int, direction: str) -> None:
    shape = (3, 20)
    x = make(shape, torch.float64, device)
    for names in ("w", "iw", "rw", "irw"):
        options = options_for(shape, 1, torch.float64, device, names) | {"direction": direction, "window": window}
        for kind in ("number", "row", "step"):
            gamma = make_gamma(kind, shape, 1, torch.float64, device)
            assert_is_scan(discounted_cumsum(x, gamma, **options), x, gamma, **options)
            if window > 20:
                unlimited = discounted_cumsum(x, gamma, **(options | {"window": None}))
                torch.testing.assert_close(discounted_cumsum(x, gamma, **options), unlimited)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
def test_chunks_stream_through_initial(device: str, kind: str, direction: str) -> None:
    shape, chunk = (3, 24), 7
    x = make(shape, torch.float64, device)
    reset = make_reset(shape, device)
    gamma = make_gamma(kind, shape, 1, torch.float64, device)
    whole = discounted_cumsum(x, gamma, reset=reset, direction=direction)
    starts = list(range(0, shape[1], chunk))
    carry, segments = None, {}
    for start in reversed(starts) if direction == "right" else starts:
        part = slice(start, start + chunk)
        rates = gamma[:, part] if kind == "step" else gamma
        segments[start] = discounted_cumsum(x[:, part], rates, reset=reset[:, part], initial=carry, direction=direction)
        carry = segments[start][:, 0 if direction == "right" else -1]
    torch.testing.assert_close(torch.cat([segments[s] for s in starts], 1), whole, rtol=1e-13, atol=1e-13)


def test_left_and_right_mirror_each_other(device: str) -> None:
    x = make((3, 50), torch.float64, device)
    gamma = make_gamma("step", (3, 50), 1, torch.float64, device)
    left = discounted_cumsum(x, gamma, direction="left")
    right = discounted_cumsum(x.flip(1), gamma.flip(1), direction="right").flip(1)
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_names_of_the_seed_package(device: str) -> None:
    x = make((3, 10), torch.float32, device)
    for gamma in (0.9, torch.tensor([0.5, 0.9, 1.0], device=device)):
        assert torch.equal(
            torch_dcs_ops.discounted_cumsum_left(x, gamma), discounted_cumsum(x, gamma, direction="left")
        )
        assert torch.equal(torch_dcs_ops.discounted_cumsum_right(x, gamma), discounted_cumsum(x, gamma))


def test_published_examples_of_the_seed_package(device: str) -> None:
    """README of torch_discounted_cumsum 1.1.0: "Example" and "Up to K elements"."""
    ones = torch.ones(1, 8, device=device)
    returns = torch.tensor([[7.7255, 6.7935, 5.8520, 4.9010, 3.9404, 2.9701, 1.9900, 1.0000]], device=device)
    torch.testing.assert_close(torch_dcs_ops.discounted_cumsum_right(ones, 0.99), returns, rtol=0, atol=5e-5)
    torch.testing.assert_close(torch_dcs_ops.discounted_cumsum_left(ones, 0.99), returns.flip(1), rtol=0, atol=5e-5)
    two = torch.tensor([[1.99, 1.99, 1.99, 1.99, 1.99, 1.99, 1.99, 1.0]], device=device)
    torch.testing.assert_close(discounted_cumsum(ones, 0.99, window=2), two, rtol=0, atol=5e-5)
    # There the K-window is the difference of two full sums.
    full = torch_dcs_ops.discounted_cumsum_right(ones, 0.99)
    by_difference = full - 0.99**2 * torch.cat((full[:, 2:], full.new_zeros(1, 2)), 1)
    torch.testing.assert_close(discounted_cumsum(ones, 0.99, window=2), by_difference)


def test_long_scan_is_as_exact_as_the_issue_asks(device: str) -> None:
    """N = 10000, gamma = 0.999, ones: 3e-4 at most; the seed package's parallel algorithm makes 1.3e-2."""
    x = torch.ones(1, 10_000, device=device)
    exact = (1 - 0.999 ** torch.arange(1, 10_001, dtype=torch.float64)) / (1 - 0.999)
    for direction, expected in (("left", exact), ("right", exact.flip(0))):
        y = discounted_cumsum(x, 0.999, direction=direction).cpu().double()[0]
        assert float((y - expected).abs().max()) <= 3e-4
