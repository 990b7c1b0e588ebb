"""Rows of half precision that all blocks together hold on the chip, in one round or several."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

from support.launched_kernels import has_132_multiprocessors, launched_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# For the 132 multiprocessors of an H200: one round, two, three and four; rows of up to 128 parts; with a last part that
# is not whole, of a few vectors; all multiprocessors; fewer rows in the last round.
SHAPES = (
    (16, 1_048_576), (16, 524_288), (16, 262_144), (12, 1_000_000), (100, 150_008), (6, 720_000), (1, 4_194_304),
    (3, 4_194_304), (64, 131_072), (32, 500_000), (15, 1_015_816), (11, 720_000),
)  # fmt: skip
HALF_PRECISION = (torch.bfloat16, torch.float16)
# Of a row's largest value: a lane goes through 56 steps in float, with gamma as a float, which is off by 2**-24 at
# most; so are the totals of the lanes before it, and the steps' own rounding comes to no more than one of the two.
IN_FLOAT = 3 * 56 * 2.0**-24


def check(x: torch.Tensor, gamma: float | torch.Tensor, direction: str) -> torch.Tensor:
    """Within the last digit of a half and what the steps in float are off."""
    y = discounted_cumsum(x, gamma, direction=direction)
    exact = gamma.double() if isinstance(gamma, torch.Tensor) else gamma
    expected = discounted_cumsum(x.double(), exact, direction=direction)
    budget = torch.finfo(x.dtype).eps * expected.abs() + IN_FLOAT * expected.abs().amax(-1, keepdim=True)
    beyond = ~((y - expected).abs() <= budget)
    assert not beyond.any(), f"gamma {gamma}: {beyond.sum()} values"
    return y


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Gammas whose powers fade within a vector, a warp, a block, and not at all; 1; beyond 1; and a tensor."""
    x = torch.randn(shape, device="cuda").to(dtype)
    for gamma in (0.99, 0.999, 1.0, 0.99999, -0.97, 0.3, 1e-30, 0.0, 1.0000002):
        check(x, gamma, direction)
    check(x, torch.tensor(0.99, device="cuda"), direction)
    check(x, torch.rand(shape[0], 1, device="cuda"), direction)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Gamma's gradient is the sum of input's gradient times the output, as it was rounded, one step before."""
    for value in (0.99, -0.97, 1.0, 1e-30):
        x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        gamma = torch.tensor(value, device="cuda", requires_grad=True)
        y = discounted_cumsum(x, gamma, direction=direction)
        upstream = torch.randn_like(x)
        grad_input, grad_gamma = torch.autograd.grad(y, (x, gamma), upstream)
        other = "right" if direction == "left" else "left"
        expected = discounted_cumsum(upstream.double(), float(gamma), direction=other)
        budget = torch.finfo(dtype).eps * expected.abs() + IN_FLOAT * expected.abs().amax(-1, keepdim=True)
        assert ((grad_input - expected).abs() <= budget).all(), value
        later, before = (slice(1, None), slice(None, -1)) if direction == "left" else (slice(None, -1), slice(1, None))
        terms = expected[:, later] * y.detach().double()[:, before]
        assert (grad_gamma - terms.sum()).abs() <= IN_FLOAT * terms.abs().sum(), value


def test_no_carry_enters_the_first_step() -> None:
    """What is saved for the step that a backward begins with has no part in the gradient of gamma."""
    x = torch.zeros(16, 1_048_576, device="cuda", dtype=torch.bfloat16)
    x[:, -1] = float("inf")
    x.requires_grad_()
    gamma = torch.tensor(0.5, device="cuda", requires_grad=True)
    (grad_gamma,) = torch.autograd.grad(discounted_cumsum(x, gamma, direction="left").sum(), gamma)
    assert grad_gamma == 0


def test_the_kernel_is_taken() -> None:
    if not has_132_multiprocessors():
        pytest.skip("the plan is that of a GPU of compute capability 9.0 with 132 multiprocessors")
    for shape in (*SHAPES, (15, 1_015_812), (20, 1_048_576), (16, 560_000)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        launched = launched_kernels(partial(discounted_cumsum, x, 0.99))
        assert ("resident_rows_kernel" in launched) == (shape in SHAPES), shape


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
@pytest.mark.parametrize("shape", [(16, 1_048_576), (16, 262_144), (12, 1_000_000), (11, 720_000)], ids=str)
def test_special_values(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """From where a row has it on, all is infinite, with the signs of gamma's powers, or a NaN; nothing else is."""
    length = shape[1]
    firsts = (0, 7, 1791, 1792, 2047, 32_767, 32_768, length // 2, length - 3, length - 1)
    step = torch.arange(length, device="cuda") if direction == "left" else torch.arange(length, device="cuda").flip(0)
    for value in (float("inf"), float("-inf"), float("nan")):
        x = torch.randn(shape, device="cuda").to(dtype)
        for row, at in enumerate(firsts):
            x[row, step == at] = value
        for gamma in (0.99, 0.5, -0.9, 1.0, 1e-20, -1e-4):
            y = discounted_cumsum(x, gamma, direction=direction)
            for row, at in enumerate(firsts):
                signs = torch.where((step - at) % 2 == 1, math.copysign(1.0, gamma), 1.0)
                expected = torch.where(step < at, 0.0, value * signs)
                got = torch.where(y[row].isfinite(), 0.0, y[row].float())
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert y[len(firsts) :].isfinite().all()


@pytest.mark.parametrize("direction", ["left", "right"])
def test_strided_and_unaligned_rows(direction: str) -> None:
    storage = torch.randn(16, 2, 700_032, device="cuda").to(torch.bfloat16)
    views = (storage[:, 0, :700_000], storage[:, 1, 8:700_008], storage[:, 0, 1:700_001], storage[:8].transpose(0, 1))
    for x in views:
        check(x, 0.99, direction)


@pytest.mark.parametrize("shape", [(16, 1_048_576), (16, 262_144), (12, 1_000_000)], ids=str)
def test_capture_and_replay(shape: tuple[int, int]) -> None:
    """A replay marks its totals as the launch that was captured did, and finds none of them."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    discounted_cumsum(x, 0.99)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = discounted_cumsum(x, 0.99)
        second = discounted_cumsum(first, 0.9, direction="right")
    for _ in range(20):
        x.normal_()
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, discounted_cumsum(x, 0.99))
        assert torch.equal(second, discounted_cumsum(first, 0.9, direction="right"))


def test_the_bits_are_the_same_on_two_streams_at_once() -> None:
    x = torch.randn(16, 1_048_576, device="cuda", dtype=torch.bfloat16)
    expected = [discounted_cumsum(x, 0.99, direction=direction) for direction in ("left", "right")]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(100):
        results = []
        for stream, direction in zip(streams, ("left", "right"), strict=True):
            with torch.cuda.stream(stream):
                results.append(discounted_cumsum(x, 0.99, direction=direction))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
