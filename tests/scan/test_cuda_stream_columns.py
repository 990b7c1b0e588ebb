"""Long scans of few columns, of which blocks take tiles of one contiguous range in turn: the longest ones of two and
three columns, and those with gaps between steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.cuda_checks import drawn
from support.cuda_graphs import captured
from support.launched_kernels import has_132_multiprocessors, launched_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# (outer, steps, columns): one outer row of all blocks, of columns that warps have to themselves, and in pairs; outer
# rows that some blocks share; more outer rows than blocks.
SHAPES = (
    (1, 6_000_001, 2), (1, 1_500_000, 7), (1, 800_003, 13), (3, 1_200_001, 3), (20, 100_003, 12), (260, 24_900, 3),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(y: Tensor, expected: Tensor, what: object = None) -> None:
    """Within the last digit of a half and 1e-6 of a column's largest value; of float64, whose steps each round what
    is as large, on both sides, eight times the square root of their number."""
    eps = torch.finfo(y.dtype).eps
    eps = 8 * y.size(1) ** 0.5 * eps if y.dtype == torch.float64 else 1e-6 + (eps if eps > 1e-6 else 0.0)
    error = ((y.double().cpu() - expected).abs() / expected.abs().amax(1, keepdim=True).clamp_min(1e-3)).max()
    assert error <= eps, f"{what}: {error}"


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype, direction: str) -> None:
    x = drawn(shape, dtype)
    # Of more than 1 not in float64: what powers of it, on a CPU too, take of its last digits grows with the steps.
    beyond = () if dtype == torch.float64 else (1.0000001,)
    for gamma in (0.99, 1.0, -0.97, 0.0, 1e-30, *beyond):
        y = discounted_cumsum(x, gamma, dim=1, direction=direction)
        check(y, discounted_cumsum(x.double().cpu(), gamma, dim=1, direction=direction), gamma)
        assert torch.equal(discounted_cumsum(x, gamma, dim=1, direction=direction), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("padding", "offset"), [(0, 0), (0, 1), (1, 0), (3, 5)])
def test_any_memory(shape: tuple[int, int, int], dtype: torch.dtype, padding: int, offset: int) -> None:
    """Gammas and initial values of a column; addresses that are not aligned and gaps, which wide steps may not have."""
    x = drawn(shape, dtype, padding, offset)
    rows = (shape[0], shape[2])
    gamma = torch.rand(rows, device="cuda", dtype=torch.float64) * 0.2 + 0.8
    initial = torch.randn(rows, device="cuda").to(dtype)
    for direction in ("left", "right"):
        y = discounted_cumsum(x, gamma, dim=1, direction=direction, initial=initial)
        wide = (operand.double().cpu() for operand in (x, gamma, initial))
        exact, exact_gamma, exact_initial = wide
        expected = discounted_cumsum(exact, exact_gamma, dim=1, direction=direction, initial=exact_initial)
        check(y, expected, direction)
        y = discounted_cumsum(x, 0.999, dim=1, direction=direction)
        check(y, discounted_cumsum(exact, 0.999, dim=1, direction=direction), direction)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("shape", [(1, 6_000_001, 2), (1, 800_003, 13), (3, 1_200_001, 3)], ids=str)
def test_what_is_not_finite(shape: tuple[int, int, int], direction: str) -> None:
    """An infinity or a NaN goes on to the end of its column, and to no other."""
    steps, dtype = shape[1], torch.bfloat16 if shape[2] > 8 else torch.float32
    for at in (0, 1, 4000, steps // 2, steps - 1):
        for value in (float("inf"), float("-inf"), float("nan")):
            x = drawn(shape, dtype, padding=1)
            x[-1, at, 1] = value
            y = discounted_cumsum(x, 0.9, dim=1, direction=direction)
            behind = slice(at, None) if direction == "left" else slice(0, at + 1)
            expected = torch.zeros_like(y, dtype=torch.bool)
            expected[-1, behind, 1] = True
            assert torch.equal(~y.isfinite(), expected), (at, value)
            assert y[-1, behind, 1].isnan().all() if value != value else bool((y[-1, behind, 1] == value).all())


def test_no_carry_enters_the_first_step() -> None:
    """A gamma that is no number there would make a NaN of a carry of 0; and a -0 stays one."""
    x = drawn((1, 1_500_000, 7), torch.float32, padding=1)
    x[:, 0] = -0.0
    gamma = torch.full((1, 7), 0.5, device="cuda")
    gamma[0, 3] = float("inf")
    y = discounted_cumsum(x, gamma, dim=1, direction="left")
    assert torch.equal(y[:, 0].view(torch.int32), x[:, 0].contiguous().view(torch.int32))
    assert y[:, :, :3].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1_500_000, 7), (3, 1_200_001, 3)], ids=str)
def test_gradients(shape: tuple[int, int, int]) -> None:
    """The backward of a number gamma is a scan of the same kind the other way."""
    x = drawn(shape, torch.float32, padding=1).requires_grad_()
    gradient = torch.randn(shape, device="cuda")
    discounted_cumsum(x, 0.98, dim=1).backward(gradient)
    assert x.grad is not None
    check(x.grad, discounted_cumsum(gradient.double().cpu(), 0.98, dim=1, direction="left"))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 1_500_000, 7), torch.float32), ((20, 100_003, 12), torch.bfloat16)], ids=str
)
def test_graphs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Replays have one tag: their words are told apart by the number of the launch."""
    x = drawn(shape, dtype, padding=1)
    graph, (result,) = captured(lambda: [cumsum(x, 1)])
    for _ in range(3):
        x.normal_()
        graph.replay()
        check(result, x.double().cpu().cumsum(1))


@pytest.mark.skipif(not has_132_multiprocessors(), reason="plans are known for 132 multiprocessors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What the tests above launch."""
    x, kernel = drawn(shape, dtype), {"stream_columns_kernel": 1}
    is_dense = shape[2] <= 3
    assert (launched_kernels(partial(discounted_cumsum, x, 0.99, dim=1)) == kernel) == is_dense
    if shape[2] * dtype.itemsize > 32:
        return
    rows = (shape[0], shape[2])
    x, initial = drawn(shape, dtype, padding=1), torch.randn(rows, device="cuda").to(dtype)
    gamma = torch.rand(rows, device="cuda") if shape[0] < 132 else 0.99
    assert launched_kernels(partial(discounted_cumsum, x, gamma, dim=1, initial=initial)) == kernel


@pytest.mark.skipif(not has_132_multiprocessors(), reason="plans are known for 132 multiprocessors")
def test_wide_gaps_are_copied_away() -> None:
    """For which tiles would have no room."""
    x = drawn((1, 857_142, 7), torch.float32, padding=57)
    launched = launched_kernels(partial(discounted_cumsum, x, 0.99, dim=1))
    assert launched.pop("resident_columns_kernel") == 1
    assert sum(launched.values()) == 1
    check(discounted_cumsum(x, 0.99, dim=1), discounted_cumsum(x.double().cpu(), 0.99, dim=1))


def test_two_streams() -> None:
    """Launches whose blocks all run at once, on streams of their own."""
    xs = [drawn((1, 1_500_000, 7), torch.float32, padding=1) for _ in range(2)]
    expected = [x.double().cpu().cumsum(1) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results: list[Tensor] = []
    for _ in range(10):
        results = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(cumsum(x, 1))
    torch.cuda.synchronize()
    for y, exact in zip(results, expected, strict=True):
        check(y, exact)
