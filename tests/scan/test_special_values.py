"""NaN, inf, resets, aliasing, determinism."""

from __future__ import annotations

import math

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.oracle import LAYOUTS, assert_is_scan, make, make_gamma, make_reset

DIRECTIONS = ("right", "left")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("gamma", [0.9, 0.0, 1e-20, 1.0, -0.5])
def test_nothing_that_is_not_finite_gets_lost(device: str, gamma: float, direction: str, bad: float) -> None:
    """At every position; gamma = 0 multiplies (0·nan = nan), and small powers of gamma hide nothing."""
    length = 70
    for shape, dim in (((length, length), 1), ((length, length), 0)):
        x = make(shape, torch.float32, device)
        x.fill_diagonal_(bad)  # every position once, each in a row of its own
        y = discounted_cumsum(x, gamma, dim=dim, direction=direction)
        assert_is_scan(y, x, gamma, dim=dim, direction=direction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nan_reaches_the_far_end_of_a_long_row(device: str, direction: str, dtype: torch.dtype) -> None:
    """0.5**20000 is 0 in every dtype: the NaN must arrive all the same."""
    x = torch.ones(2, 20_000, dtype=dtype, device=device)
    x[0, -1 if direction == "right" else 0] = math.nan
    y = discounted_cumsum(x, 0.5, direction=direction)
    assert bool(y[0].isnan().all())
    assert bool(y[1].isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.each_value
def test_a_reset_discards_nan(device: str, direction: str, bad: float) -> None:
    """Selected away, not multiplied by 0: in the input, in the gates, in initial; at every position."""
    length = 20
    for position in range(length):
        reset = torch.zeros(1, length, dtype=torch.bool, device=device)
        reset[0, position] = True
        last = length - 1 if direction == "right" else 0
        x = make((1, length), torch.float64, device)
        x[0, last] = bad
        gates = torch.full((1, length), 0.9, dtype=torch.float64, device=device)
        initial = torch.tensor([bad], dtype=torch.float64, device=device)
        for window in (None, 6, 50):
            options = {"reset": reset, "direction": direction, "window": window}
            assert_is_scan(discounted_cumsum(x, 0.9, **options), x, 0.9, **options)
            assert_is_scan(
                discounted_cumsum(x, gates, initial=initial, **options), x, gates, initial=initial, **options
            )
            broken = gates.clone()
            broken[0, position] = bad
            clean = make((1, length), torch.float64, device)
            assert_is_scan(discounted_cumsum(clean, broken, **options), clean, broken, **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("window", [1, 2, 7, 16])
def test_a_window_ends_what_is_not_finite(device: str, window: int, direction: str, bad: float) -> None:
    length = 40
    x = make((length, length), torch.float32, device)
    x.fill_diagonal_(bad)
    y = discounted_cumsum(x, 0.5, window=window, direction=direction)
    assert_is_scan(y, x, 0.5, window=window, direction=direction)
    steps = torch.arange(length, device=device)
    distance = (steps[:, None] - steps[None, :]) * (1 if direction == "right" else -1)
    assert torch.equal(~y.isfinite(), (distance >= 0) & (distance < window))


def test_infinities_of_both_signs_make_nan(device: str) -> None:
    x = torch.zeros(1, 6, device=device)
    x[0, 4], x[0, 2] = math.inf, -math.inf
    y = discounted_cumsum(x, 1.0)
    assert y[0, 3].item() == math.inf
    assert bool(y[0, :3].isnan().all())
    assert y[0, 5].item() == 0


@pytest.mark.parametrize("kind", ["number", "step"])
@pytest.mark.parametrize("gamma", [0.5, -0.5, 1e-20, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinity_outlasts_powers_that_vanish(dtype: torch.dtype, gamma: float, kind: str) -> None:
    """On a CPU, whose threads share a long row in chunks: over one of them 0.5 leaves float64's range."""
    x = make((1, 60_000), dtype, "cpu")
    x[0, 0] = math.inf
    gates = torch.full_like(x, gamma) if kind == "step" else gamma
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        y = discounted_cumsum(x, gates, direction="left")
    finally:
        torch.set_num_threads(threads)
    if gamma == 0:
        assert bool(y[0, 1:].isnan().all())
    else:
        assert bool((y[0, ::2] == math.inf).all())
        assert bool((y[0, 1::2] == math.copysign(math.inf, gamma)).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("shape", [(2, 40), (3, 16), (2, 4096), (2, 40_000)])
def test_the_first_gate_of_a_row_is_not_used(device: str, shape: tuple[int, int], bad: float, direction: str) -> None:
    x = torch.ones(shape, device=device)
    gates = torch.full(shape, 0.5, device=device)
    expected = discounted_cumsum(x, 0.5, direction=direction)
    gates[:, 0 if direction == "left" else -1] = bad
    torch.testing.assert_close(discounted_cumsum(x, gates, direction=direction), expected)


@pytest.mark.parametrize("at", [127, 255, 1023])
def test_a_carry_that_cancels_stays_finite(device: str, at: int) -> None:
    """y is 1 and then 0; the segments of a scan that start behind it exceed float32 by themselves."""
    x = torch.zeros(1, 4096, device=device)
    x[0, at], x[0, at + 1] = 1, -2
    expected = torch.zeros_like(x)
    expected[0, at] = 1
    assert torch.equal(discounted_cumsum(x, 2.0, direction="left"), expected)


def test_gamma_that_is_not_finite(device: str) -> None:
    x = torch.ones(2, 5, dtype=torch.float64, device=device)
    for bad in (math.nan, math.inf):
        gates = torch.full((2, 5), 0.5, dtype=torch.float64, device=device)
        gates[0, 2] = bad
        assert_is_scan(discounted_cumsum(x, gates), x, gates)
        row = torch.tensor([bad, 0.5], dtype=torch.float64, device=device)
        assert_is_scan(discounted_cumsum(x, row), x, row)
        assert_is_scan(discounted_cumsum(x, bad), x, bad)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reset_everywhere_and_nowhere(device: str, direction: str) -> None:
    x = make((3, 30), torch.float32, device)
    everywhere = torch.ones_like(x, dtype=torch.bool)
    initial = make((3,), torch.float32, device)
    for window in (None, 4):
        options = {"direction": direction, "window": window, "initial": initial}
        assert torch.equal(discounted_cumsum(x, 0.9, reset=everywhere, **options), x)
        y = discounted_cumsum(x, 0.9, reset=~everywhere, **options)
        torch.testing.assert_close(y, discounted_cumsum(x, 0.9, **options))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_reset_at_every_position(device: str, direction: str) -> None:
    length = 33
    x = make((length, length), torch.float64, device)
    reset = torch.eye(length, dtype=torch.bool, device=device)
    for initial in (None, make((length,), torch.float64, device)):
        for window in (None, 5):
            options = {"direction": direction, "initial": initial, "reset": reset, "window": window}
            assert_is_scan(discounted_cumsum(x, 0.9, **options), x, 0.9, **options)


def test_overflow_is_infinite_where_the_recurrence_overflows(device: str) -> None:
    x = torch.full((1, 40), 6e4, dtype=torch.float16, device=device)
    y = discounted_cumsum(x, 1.0)
    assert bool(y[0, :-1].isinf().all())
    assert y[0, -1].item() == x[0, -1].item()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1), (3, 8), ()], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_never_aliases_an_argument(device: str, layout: str, shape: tuple[int, ...]) -> None:
    x = LAYOUTS[layout](make(shape, torch.float32, device))
    rows = shape[:-1]
    initial = make(rows, torch.float32, device)
    for y in (
        discounted_cumsum(x, 0.9),
        discounted_cumsum(x, 0.0),
        discounted_cumsum(x, 0.9, window=1),
        discounted_cumsum(x, 0.9, initial=initial),
        discounted_cumsum(x, torch.tensor(0.9, device=device)),
        cumsum(x),
        cumsum(x, dtype=torch.float64),
    ):
        assert y is not x
        if x.numel():
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert y.untyped_storage().data_ptr() != initial.untyped_storage().data_ptr()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bitwise_equal_over_runs_and_threads(device: str, direction: str) -> None:
    threads = torch.get_num_threads()
    # From 32768 values on a CPU's threads share them: rows, columns, and parts of a long row.
    for shape, dim in (((1, 40000), 1), ((70, 600), 1), ((600, 70), 0)):
        x = make(shape, torch.float32, device)
        gamma = make_gamma("step", shape, dim, torch.float32, device)
        for rates in (0.99, gamma):
            first = discounted_cumsum(x, rates, dim=dim, direction=direction)
            try:
                for count in (1, 2, 3, threads):
                    torch.set_num_threads(count)
                    for _ in range(25):
                        assert torch.equal(discounted_cumsum(x, rates, dim=dim, direction=direction), first)
            finally:
                torch.set_num_threads(threads)


def test_deterministic_algorithms_flag(device: str) -> None:
    x = make((4, 200), torch.float32, device).requires_grad_()
    gamma = torch.rand(4, device=device, requires_grad=True)
    plain = torch.autograd.grad(discounted_cumsum(x, gamma).sum(), (x, gamma))
    torch.use_deterministic_algorithms(True)
    try:
        strict = torch.autograd.grad(discounted_cumsum(x, gamma).sum(), (x, gamma))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, strict, strict=True))


def test_conjugate_and_negative_views(device: str) -> None:
    """Lazy bits on a view are the values' business, not the kernels'."""
    x = make((3, 8), torch.complex128, device)
    gamma = make_gamma("row", (3, 8), 1, torch.complex128, device)
    torch.testing.assert_close(discounted_cumsum(x.conj(), gamma.conj()), discounted_cumsum(x, gamma).conj())
    imaginary = x.conj().imag
    torch.testing.assert_close(discounted_cumsum(imaginary, 0.9), discounted_cumsum(-x.imag, 0.9))


def test_inputs_stay_as_they_are(device: str) -> None:
    shape = (3, 20)
    x, initial, reset = make(shape, torch.float32, device), make((3,), torch.float32, device), make_reset(shape, device)
    gamma = make_gamma("step", shape, 1, torch.float32, device)
    before = [t.clone() for t in (x, initial, reset, gamma)]
    discounted_cumsum(x, gamma, initial=initial, reset=reset, window=4)
    assert all(torch.equal(a, b) for a, b in zip((x, initial, reset, gamma), before, strict=True))
