"""Small scans of a number gamma in float: columns and rows of a block, of a cluster, of blocks that share time."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Time and columns: a block a span, several blocks a multiprocessor, clusters, of so many steps a thread, and of more
# warps than two blocks leave room for; few columns, contiguous, whose time many blocks share.
COLUMNS = (
    (100, 300), (70, 5000), (256, 512), (478, 289), (1400, 82), (3000, 42), (6000, 16), (9000, 45), (12_000, 61),
    (3500, 2), (900, 13), (70_000, 2), (47_000, 9), (30_001, 21), (100_003, 3), (200_000, 7),
)  # fmt: skip
# Of a block, of clusters of few and many warps, and of more than one block for each multiprocessor.
ROWS = (
    (391, 874), (96, 1945), (60, 2049), (6, 17_563), (16, 9526), (35, 4165), (4, 59_723), (3, 52_816), (2, 117_403),
    (1, 40_001), (45, 7630),
)  # fmt: skip
GAMMAS = (0.97, 1.0, -1.0, -0.9, 0.0, 1e-30, 1e-50)


def check(x: torch.Tensor, gamma: float, dim: int, direction: str, initial: torch.Tensor | None = None) -> None:
    """Within the last digit of a half and 1e-6 of a line's largest value."""
    y = discounted_cumsum(x, gamma, dim=dim, direction=direction, initial=initial)
    first = None if initial is None else initial.double().cpu()
    expected = discounted_cumsum(x.double().cpu(), gamma, dim=dim, direction=direction, initial=first)
    error = ((y.double().cpu() - expected).abs() / expected.abs().amax(dim, keepdim=True)).max()
    eps = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    assert error <= eps + 1e-6, (tuple(x.shape), gamma, dim, direction, initial is not None, float(error))


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", COLUMNS, ids=str)
def test_columns(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Dense, between other columns, of every other one, and with an initial value."""
    steps, columns = shape
    x = torch.randn(steps, columns + 5, device="cuda").to(dtype)
    initial = torch.randn(columns, device="cuda").to(dtype)
    for gamma in GAMMAS:
        check(x[:, :columns].contiguous(), gamma, 0, direction)
    check(x[:, 3 : columns + 3], 0.99, 0, direction)
    check(x[:, ::2], 0.99, 0, direction)
    check(x[:, :columns].contiguous(), 0.99, 0, direction, initial)
    check(x[:, :columns], -0.99, 0, direction, initial)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_batches(dtype: torch.dtype, direction: str) -> None:
    for shape in ((14, 637, 16), (32, 2048, 10), (128, 700, 2), (9, 400, 33), (40, 90, 7)):
        x = torch.randn(shape, device="cuda").to(dtype)
        check(x, 0.97, 1, direction)
        check(x, 0.97, 1, direction, torch.randn(shape[0], shape[2], device="cuda").to(dtype))
        check(x.transpose(0, 1), 1.0, 0, direction)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Dense, from every place in a word of memory on, whose output begins elsewhere, and with an initial value."""
    rows, length = shape
    whole = torch.randn(rows * (length + 9) + 8, device="cuda").to(dtype)
    initial = torch.randn(rows, device="cuda").to(dtype)
    for gamma in GAMMAS:
        check(whole[: rows * length].view(shape), gamma, 1, direction)
    for start in range(8):
        check(whole[start : start + rows * length].view(shape), 0.99, 1, direction)
        check(whole[start:].as_strided(shape, (length + start, 1)), 0.99, 1, direction, initial)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((96, 1945), 1), ((4, 30_000), 1), ((1400, 82), 0), ((70_000, 3), 0)], ids=str
)
def test_steps_that_are_one_element(shape: tuple[int, int], dim: int, dtype: torch.dtype, direction: str) -> None:
    """Inputs, or a sum's gradient, that are expanded over time, or over lines too; one initial value for all lines."""
    one = torch.randn(1, 1, device="cuda").to(dtype)
    lines = torch.randn(shape[1 - dim], device="cuda").to(dtype).unsqueeze(dim)
    for x in (one, lines):
        check(x.expand(shape), 0.97, dim, direction)
        check(x.expand(shape), 0.97, dim, direction, one.view(1).expand(shape[1 - dim]))
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    (grad,) = torch.autograd.grad(discounted_cumsum(x, 0.97, dim=dim, direction=direction).sum(), x)
    other = "left" if direction == "right" else "right"
    exact = discounted_cumsum(torch.ones(shape, dtype=torch.float64), 0.97, dim=dim, direction=other)
    assert ((grad.double().cpu() - exact).abs() <= (torch.finfo(dtype).eps + 1e-6) * exact).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_inside_of_others(dtype: torch.dtype) -> None:
    """Time is contiguous, and not the last dimension."""
    for shape in ((4, 5, 3001), (2, 9, 31_408), (7, 11, 1500)):
        x = torch.randn(shape, device="cuda").to(dtype).transpose(1, 2)
        initial = torch.randn(shape[:2], device="cuda").to(dtype)
        for direction in ("left", "right"):
            check(x, 0.97, 1, direction)
            check(x, 0.97, 1, direction, initial)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((478, 289), 0), ((1400, 82), 0), ((70_000, 3), 0), ((16, 9527), 1), ((96, 1945), 1)], ids=str
)
def test_what_is_not_finite_stays_in_its_line(
    shape: tuple[int, int], dim: int, dtype: torch.dtype, direction: str
) -> None:
    """And is not lost where powers of gamma fade. Beside half precision a number gamma is float32: 1e-50 is 0."""
    for gamma in (0.9, 1e-4, 1e-50 if dtype == torch.float32 else 1e-30, 0.0, 1.0):
        x = torch.randn(shape, device="cuda").to(dtype).movedim(dim, 0)
        steps, lines = x.shape
        x[steps // 2, 0], x[3, lines // 2], x[-2, lines - 1] = float("inf"), float("nan"), float("-inf")
        x[7, lines // 3], x[steps // 3, lines // 3] = float("inf"), float("-inf")
        x = x.movedim(0, dim)
        y = discounted_cumsum(x, gamma, dim=dim, direction=direction).double().cpu()
        expected = discounted_cumsum(x.double().cpu(), gamma, dim=dim, direction=direction)
        for alike in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(alike(y), alike(expected)), (gamma, alike)


@pytest.mark.parametrize(("shape", "dim"), [((1400, 82), 0), ((70_000, 3), 0), ((4, 59_723), 1)], ids=str)
def test_replays_of_a_graph_and_two_streams(shape: tuple[int, int], dim: int) -> None:
    """Each call's blocks wait for what that call's blocks leave."""
    inputs = [torch.randn(shape, device="cuda") for _ in range(2)]
    expected = [cumsum(x.double(), dim=dim).float() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for x, stream, found in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(cumsum(x, dim=dim))
    torch.cuda.synchronize()
    graph, x = torch.cuda.CUDAGraph(), inputs[0].clone()
    with torch.cuda.graph(graph):
        captured = cumsum(cumsum(x, dim=dim) - x, dim=dim)
    for found, y in zip(outputs, expected, strict=True):
        largest = y.abs().amax(dim, keepdim=True)
        assert all(bool(((one - y).abs() <= 2e-6 * largest).all()) for one in found)
    for each in (*inputs, inputs[0]):
        x.copy_(each)
        graph.replay()
        exact = cumsum(cumsum(each.double(), dim=dim) - each, dim=dim)
        assert ((captured - exact).abs() <= 4e-6 * exact.abs().amax(dim, keepdim=True)).all()
