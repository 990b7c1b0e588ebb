"""Scans of a number gamma along a strided time, in words of columns: time of a block, of a cluster of blocks, of
clusters that look back. Half precision from any address on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.cuda_checks import drawn
from support.cuda_graphs import captured
from support.launched_kernels import has_132_multiprocessors, launched_kernels

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there is no CUDA device that has clusters",
)

# (outer, steps, columns): a block, a cluster, some clusters, many groups of them; two and four spans of a block.
SHAPES = ((1, 200, 14_001), (1, 1500, 1511), (3, 9001, 301), (1, 120_001, 64), (2, 3001, 9050), (1, 500, 40_001))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(y: Tensor, x: Tensor, gamma: float, direction: str, initial: Tensor | None = None) -> None:
    """Within the last digit of a half and 1e-6 of a column's largest value, by the recurrence in float64."""
    expected = discounted_cumsum(
        x.double(), gamma, dim=1, direction=direction, initial=None if initial is None else initial.double()
    )
    eps = torch.finfo(y.dtype).eps
    eps = 1e-6 + (eps if eps > 1e-6 else 0.0)
    error = ((y.double() - expected).abs() / expected.abs().amax(1, keepdim=True).clamp_min(1e-3)).max()
    assert error <= eps, f"{gamma}: {error}"


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype, direction: str) -> None:
    x = drawn(shape, dtype)
    for gamma in (0.99, 1.0, -0.97, 0.0, 1e-30):
        y = discounted_cumsum(x, gamma, dim=1, direction=direction)
        check(y, x, gamma, direction)
        assert torch.equal(discounted_cumsum(x, gamma, dim=1, direction=direction), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("padding", "offset"), [(0, 1), (1, 0), (2, 3), (3, 5)])
def test_any_memory(shape: tuple[int, int, int], dtype: torch.dtype, padding: int, offset: int) -> None:
    """Initial values; addresses that are not aligned and gaps; memory beside the input is not read."""
    outer, steps, columns = shape
    pitch = columns + padding
    memory = torch.full((outer * steps * pitch + offset + 8,), float("nan"), device="cuda", dtype=dtype)
    x = memory[offset : offset + outer * steps * pitch].view(outer, steps, pitch)[..., :columns]
    x.normal_()
    initial = torch.randn(outer, columns, device="cuda").to(dtype)
    for direction in ("left", "right"):
        y = discounted_cumsum(x, 0.999, dim=1, direction=direction, initial=initial)
        check(y, x, 0.999, direction, initial)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("shape", [(1, 1500, 1511), (3, 9001, 301), (1, 120_001, 64)], ids=str)
def test_what_is_not_finite(shape: tuple[int, int, int], direction: str) -> None:
    """An infinity or a NaN goes on to the end of its column, and to no other."""
    steps, columns = shape[1:]
    for dtype in (torch.float32, torch.bfloat16):
        for at in (0, 1, steps // 2, steps - 1):
            for value in (float("inf"), float("-inf"), float("nan")):
                x = drawn(shape, dtype, padding=1)
                column = columns // 2
                x[-1, at, column] = value
                y = discounted_cumsum(x, 0.5, dim=1, direction=direction)
                behind = slice(at, None) if direction == "left" else slice(0, at + 1)
                expected = torch.zeros_like(y, dtype=torch.bool)
                expected[-1, behind, column] = True
                assert torch.equal(~y.isfinite(), expected), (at, value)
                reached = y[-1, behind, column]
                assert reached.isnan().all() if value != value else bool((reached == value).all())


@pytest.mark.parametrize("gamma", [0.5, 1.0, -0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_carry_enters_the_first_step(dtype: torch.dtype, gamma: float) -> None:
    """A -0 stays one."""
    x = drawn((1, 1500, 1511), dtype)
    x[:, 0] = -0.0
    y = discounted_cumsum(x, gamma, dim=1, direction="left")
    assert torch.equal(y[:, 0], x[:, 0])
    assert torch.signbit(y[:, 0]).all()


@pytest.mark.parametrize("shape", [(1, 1500, 1511), (3, 9001, 301)], ids=str)
def test_gradients(shape: tuple[int, int, int]) -> None:
    """The backward of a number gamma is a scan of the same kind the other way."""
    x = drawn(shape, torch.float32, padding=1).requires_grad_()
    gradient = torch.randn(shape, device="cuda")
    discounted_cumsum(x, 0.98, dim=1).backward(gradient)
    assert x.grad is not None
    check(x.grad, gradient, 0.98, "left")


@pytest.mark.parametrize(("shape", "dtype"), [((3, 9001, 301), torch.float32), ((1, 120_001, 64), torch.bfloat16)])
def test_graphs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Replays have one tag: words are cleared before, or told apart by the number of the launch."""
    x = drawn(shape, dtype)
    graph, (result,) = captured(lambda: [cumsum(x, 1)])
    for _ in range(3):
        x.normal_()
        graph.replay()
        check(result, x, 1.0, "left")


def test_two_streams() -> None:
    """Clusters that wait for each other share the GPU with those of another scan."""
    x = [drawn((1, 120_001, 64), torch.bfloat16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for stream, operand, kept in zip(streams, x, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(discounted_cumsum(operand, 0.99, dim=1, direction="left"))
    torch.cuda.synchronize()
    for operand, kept in zip(x, results, strict=True):
        check(kept[0], operand, 0.99, "left")
        assert all(torch.equal(kept[0], other) for other in kept)


@pytest.mark.skipif(not has_132_multiprocessors(), reason="plans are known for 132 multiprocessors")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What the tests above launch."""
    x, kernel = drawn(shape, dtype), {"lookback_columns_kernel": 1}
    assert launched_kernels(partial(discounted_cumsum, x, 0.99, dim=1)) == kernel
