"""softmax's CUDA kernels: every regime and its boundaries, capture, bits from run to run, addresses past 2**31."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import softmax

from softmax.cuda_checks import backward, check, poison
from softmax.oracle import DTYPES, assert_gradient, assert_softmax
from support.cuda_graphs import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# Lanes (to 256 elements, or 256 vectors of 16 bytes), a block, clusters of 2 to 16 blocks, chunks.
WIDTHS = (
    1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 63, 64, 65, 128, 200, 255, 256, 257, 512, 1000, 1023, 1024, 1025, 2048, 2056,
    4096, 4100, 8191, 8192, 8200, 16384, 16392, 32768, 32769, 65536, 65537, 131072, 131080, 262144, 262145, 300001,
    524288, 524296, 1048576, 1048577, 1200000, 3000001,
)  # fmt: skip
FEW, MANY = 3, 600


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows(columns: int, dtype: torch.dtype) -> None:
    for rows in (1, FEW, MANY) if columns <= 40_000 else (1, FEW):
        check((4 * torch.randn(rows, columns, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [65536, 65537, 131072, 262144, 300001])
def test_many_long_rows(columns: int, dtype: torch.dtype) -> None:
    """As many as fill the GPU several times: clusters are not made larger for want of rows."""
    x = torch.randn(400, columns, device="cuda").to(dtype)
    g = torch.randn_like(x)
    y = softmax(x)
    dx = backward(g, y, 1)
    for part in (slice(0, 3), slice(200, 203), slice(397, 400)):
        assert_softmax(y[part], x[part], 1)
        assert_gradient(dx[part], g[part], y[part], 1)
    assert not y.isnan().any()
    assert not dx.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 5, 8, 31, 64, 65, 128, 256, 257, 512, 513, 1024, 1025, 5000, 70_001])
@pytest.mark.parametrize("inner", [2, 3, 8, 16, 33, 64, 200])
def test_columns(length: int, inner: int, dtype: torch.dtype) -> None:
    """Inner columns in whole vectors and not; steps in registers, and in chunks."""
    for outer in (1, 5) if length * inner < 1 << 20 else (1,):
        check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 5, 9, 33, 130, 2048])
@pytest.mark.parametrize("inner", [2, 3, 5, 7, 49, 121, 257])
def test_many_slabs_of_few_columns(length: int, inner: int, dtype: torch.dtype) -> None:
    """(length, inner) begins at every place of a vector of 16 bytes."""
    outer = max(5, min(3000, 3_000_000 // (length * inner)))
    check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [999, 1001, 9000, 9001, 150_001])
@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 15, 40, 100])
def test_few_steps_of_many_columns(length: int, inner: int, dtype: torch.dtype) -> None:
    """A step begins at another place of a vector than the one before."""
    for outer in (1, 3):
        check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [64, 128, 1000, 40_000])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 8, 9, 16, 17])
def test_steps_of_one_thread(length: int, inner: int, dtype: torch.dtype) -> None:
    """Those of a thread, and one more."""
    for outer in (1, 7):
        check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 17, 8192), (1, 148, 2004), (6, 1347, 17), (700, 77, 20), (1, 2510, 54),
                                   (18, 80, 182), (30, 333, 100), (1, 4000, 64), (1, 9194, 52), (3, 20, 15_001),
                                   (1, 2000, 500), (2, 1, 40), (5, 2040, 24)], ids=str)  # fmt: skip
def test_small_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Windows of 1 to 32 columns, in a block and in clusters of 2 to 16."""
    check((4 * torch.randn(shape, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(17, 262_145), (133, 131_073), (5, 500_001, 2), (1, 1_000_003, 3), (1, 100_001, 49),
                                   (60, 20_000, 31), (40, 9000, 63)])  # fmt: skip
def test_long_lines_that_fill_the_device_badly(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One row more than clusters that run at a time; few columns of many steps."""
    check(torch.randn(shape, device="cuda").to(dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100, 4096), (1000, 16384), (3000, 40_000), (17, 300, 1000)], ids=str)
def test_many_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(torch.randn(shape, device="cuda").to(dtype), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [24, 160, 161, 300, 1003])
@pytest.mark.parametrize("length", [260, 700, 1500, 2900, 6100, 13_000, 29_000])
def test_long_columns(length: int, inner: int, dtype: torch.dtype) -> None:
    """Held by a block, and by clusters of 2 to 16; and longer ones."""
    for outer in (1, 3) if length * inner < 1 << 21 else (1,):
        check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 4, 5, 16])
@pytest.mark.parametrize("shape", [(1, 9000, 2003), (2, 14_000, 777), (1, 25_000, 1304), (3, 9600, 1096),
                                   (1, 60_000, 300)], ids=str)  # fmt: skip
def test_windows_that_no_cluster_holds(shape: tuple[int, int, int], padding: int, dtype: torch.dtype) -> None:
    """Read twice, or in a view held by groups of blocks, several at once."""
    check((4 * torch.randn(*shape[:2], shape[2] + padding, device="cuda")).to(dtype)[..., : shape[2]], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [1, 2, 8])
@pytest.mark.parametrize("shape", [(1, 8_000_003, 2), (1, 300_003, 62), (2, 500_001, 18), (1, 500_000, 32)], ids=str)
def test_large_slabs_of_padded_steps(shape: tuple[int, int, int], padding: int, dtype: torch.dtype) -> None:
    """Gaps as columns, whatever they hold, and copied where a gap is longer than a step."""
    wide = torch.randn(*shape[:2], shape[2] + padding, device="cuda").to(dtype)
    wide[..., shape[2] :] = float("nan")
    check(wide[..., : shape[2]], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [5, 64, 1000, 9000, 70_000, 70_001])
def test_rows_that_begin_inside_a_vector(columns: int, dtype: torch.dtype) -> None:
    base = torch.randn(4 * (columns + 9) + 1, device="cuda").to(dtype)
    check(base[1 : 1 + 4 * columns].view(4, columns), 1)
    check(base[:-1].view(4, columns + 9)[:, 3 : 3 + columns], 1)
    check(base[1 : 1 + 4 * columns].view(columns, 4), 0)
    check(base[:columns].expand(3, columns), 1)
    y = softmax(base[: 4 * columns].view(4, columns))
    off_by_one = base[1 : 1 + 4 * columns].view(4, columns)
    assert_gradient(backward(off_by_one, y, 1), off_by_one, y, 1)
    assert_gradient(backward(base[0].expand(4, columns), y, 1), base[0].expand(4, columns), y, 1)


VIEWS = {
    "padded": lambda wide, shape: wide((*shape[:-1], shape[-1] + 5))[..., : shape[-1]],
    "padded by vectors": lambda wide, shape: wide((*shape[:-1], shape[-1] + 16))[..., : shape[-1]],
    "sliced": lambda wide, shape: wide((*shape[:-1], shape[-1] + 9))[..., 3 : 3 + shape[-1]],
    "sliced before": lambda wide, shape: wide((shape[0], shape[1] + 3, *shape[2:]))[:, 1 : 1 + shape[1]],
    "halves": lambda wide, shape: wide((shape[0], 2 * shape[1], *shape[2:]))[:, : shape[1]],
    "every second": lambda wide, shape: wide((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "expanded": lambda wide, shape: wide((1, *shape[1:])).expand(shape),
    "one element": lambda wide, shape: wide([1] * len(shape)).expand(shape),
    "overlapping": lambda wide, shape: wide((shape[0] + math.prod(shape[1:]),)).unfold(
        0, math.prod(shape[1:]), 1)[: shape[0]].unflatten(1, shape[1:]),
    "holes in holes": lambda wide, shape: wide((*shape[:-2], shape[-2] + 1, shape[-1] + 3))[..., :-1, :-3],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((700, 5), 1), ((300, 64), 1), ((90, 333), 1), ((70, 1000), 1), ((9, 9001), 1), ((3, 140_001), 1),
     ((2, 1_200_001), 1), ((9, 5, 3), 1), ((90, 700, 3), 1), ((3, 90_001, 2), 1), ((700, 60), 0), ((9001, 33), 0),
     ((40, 900, 64), 1), ((5, 40_001), 0), ((3, 20_000, 130), 1), ((9, 50, 1000), 2), ((30_000, 20), 1), ((999, 33), 1),
     ((2000, 7, 30), 1), ((148, 2004), 0), ((3, 5000, 17), 1), ((8, 3000), 0),
     ((2, 100_000, 5), 2), ((2, 20_000, 7, 3), 2)],
    ids=str,
)  # fmt: skip
def test_views(shape: tuple[int, ...], dim: int, view: str, dtype: torch.dtype) -> None:
    """Inputs, and gradients, that lie in memory as nothing else of the call does."""

    def wide(sizes: Sequence[int]) -> Tensor:
        return torch.randn(tuple(sizes), device="cuda").to(dtype)

    def small(sizes: Sequence[int]) -> Tensor:
        """Sums of products of these stay within float16, also of thousands of steps that are alike."""
        return wide(sizes) / 16

    x = VIEWS[view](wide, shape)
    check(x, dim)
    y, g = softmax(wide(shape), dim), VIEWS[view](small, shape)
    for grad, output in ((g, y), (small(shape), g), (g, VIEWS[view](small, shape))):
        poison()
        assert_gradient(backward(grad, output, dim), grad, output, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_another_order(dtype: torch.dtype) -> None:
    """What no runs are: dimensions in another order, and one row's elements alike."""
    y = softmax(torch.randn(300, 200, device="cuda").to(dtype))
    for g in (
        torch.randn(200, 300, device="cuda").to(dtype).t(),
        torch.randn(300, 1, device="cuda").to(dtype).expand(300, 200),
    ):
        poison()
        assert_gradient(backward(g, y, 1), g, y, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 400_000), (3, 8, 40_008), (3000, 8, 520), (300, 2, 2056), (40, 5, 1000)])
def test_few_steps_of_whole_vectors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check((4 * torch.randn(shape, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [160, 161, 1024, 1003])
@pytest.mark.parametrize("length", [8, 9, 13, 16, 17, 27])
def test_steps(length: int, inner: int, dtype: torch.dtype) -> None:
    """Columns that a thread takes alone, and a step more."""
    for outer in (1, 70):
        check((4 * torch.randn(outer, length, inner, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [7, 64, 1000, 9001, 40_000, 140_000, 1_200_001])
def test_special_values(columns: int, dtype: torch.dtype) -> None:
    """Rows with NaN, with inf, of -inf alone, and nearly so; of the largest numbers that there are."""
    x = torch.randn(12, columns, device="cuda").to(dtype)
    big, inf = torch.finfo(dtype).max, float("inf")
    x[0, columns // 2] = float("nan")
    x[1, 0] = inf
    x[2, -1] = inf
    x[3] = -inf
    x[4, :-1] = -inf
    x[5, 1:] = -inf
    x[6, ::2] = -inf
    x[7] = big
    x[8] = -big
    x[9, 0] = big
    x[10, :-1] = -big
    x[11, columns // 2] = -inf
    for tensor, dim in ((x, 1), (x.t().contiguous(), 0)):
        y = softmax(tensor, dim)
        assert_softmax(y, tensor, dim)
        g = torch.randn_like(tensor)
        assert_gradient(backward(g, y, dim), g, y, dim)
        grads = torch.zeros_like(tensor)
        grads.select(1 - dim, 11).fill_(inf)
        assert backward(grads, y, dim).select(1 - dim, 11).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [5, 100, 3000, 70_001])
@pytest.mark.parametrize("inner", [3, 130, 131])
def test_special_values_in_one_column(length: int, inner: int, dtype: torch.dtype) -> None:
    """They reach no other column, nor another slab."""
    x, inf = torch.randn(2, length, inner, device="cuda").to(dtype), float("inf")
    x[0, length // 2, 0] = float("nan")
    x[0, -1, 1] = inf
    x[0, :, 2] = -inf
    x[1, ::2, 0] = -inf
    x[1, :, 1] = -torch.finfo(dtype).max
    check(x, 1)


SHAPES = (((300, 40), 1), ((300, 1000), 1), ((50, 9000), 1), ((9, 70_000), 1), ((2, 1_300_000), 1), ((300, 64), 0),
          ((9000, 64), 0), ((9000, 33), 0), ((3000, 7), 1), ((300, 1001), 1), ((17, 262_145), 1), ((300_001, 3), 0),
          ((5, 9001), 0), ((300, 999), 0), ((1, 133_778), 1), ((40, 300_001), 1), ((40_000, 30), 0),
          ((9001, 1203), 0), ((100_001, 49), 0))  # fmt: skip


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_the_bits_are_the_same_in_100_runs(shape: tuple[int, int], dim: int) -> None:
    x, g = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    y = softmax(x, dim)
    dx = backward(g, y, dim)
    for _ in range(100):
        assert torch.equal(softmax(x, dim), y)
        assert torch.equal(backward(g, y, dim), dx)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_capture_and_replay(shape: tuple[int, int], dim: int, padding: int) -> None:
    x = torch.randn(shape[0], shape[1] + padding, device="cuda")[:, : shape[1]]
    g = torch.randn(shape, device="cuda")

    def run() -> list[Tensor]:
        y = softmax(x, dim)
        return [y, backward(g, y, dim)]

    graph, results = captured(run)
    for _ in range(3):
        x.normal_()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for result, expected in zip(results, run(), strict=True):
            assert torch.equal(result, expected)


def test_side_stream() -> None:
    x = torch.randn(64, 100_000, device="cuda")
    expected = softmax(2 * x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.mul_(2)
        output = softmax(x)
    stream.synchronize()
    assert torch.equal(output, expected)


# Of kernels whose blocks wait for each other, and of clusters of 16.
TOGETHER = (
    ((17, 262_145), 1),
    ((1, 1_000_003), 1),
    ((40_000, 30), 0),
    ((1, 60_000), 1),
    ((12, 40_000), 1),
    ((6000, 64), 0),
    ((30_000, 64), 0),
    ((9001, 1203), 0),
    ((100_001, 49), 0),
)


def test_a_green_context() -> None:
    """With fewer multiprocessors than the device has, blocks that have to run together find no room there."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts", reason="this torch has no green contexts")
    problems = [(torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda"), dim) for shape, dim in TOGETHER]
    torch.cuda.synchronize()
    context = green_contexts.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    context.set_context()
    try:
        results = [(y := softmax(x, dim), backward(g, y, dim)) for x, g, dim in problems]
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    for (x, g, dim), (y, dx) in zip(problems, results, strict=True):
        assert_softmax(y, x, dim)
        assert_gradient(dx, g, y, dim)


@pytest.mark.parametrize(("shape", "dim"), TOGETHER, ids=str)
def test_two_streams_at_once(shape: tuple[int, int], dim: int) -> None:
    """Blocks that wait for each other, beside others of another stream."""
    x, g = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    y = softmax(x, dim)
    dx = backward(g, y, dim)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append((softmax(x, dim), backward(g, y, dim)))
    torch.cuda.synchronize()
    for output, gradient in results:
        assert torch.equal(output, y)
        assert torch.equal(gradient, dx)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dim"), [((2**31 + 40,), 0), ((2**31 // 8 + 5, 8), 1), ((3, 2**30 + 8), 1),
                                            ((2**31 // 4096 + 5, 4096), 1), ((2**26 + 5, 33), 0), ((5, 2**29), 0),
                                            ((2, 2**30 + 9), 0)],
                         ids=str)  # fmt: skip
def test_addresses_past_two_to_the_31(shape: tuple[int, ...], dim: int) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    y = softmax(x, dim)
    each = torch.tensor(1 / shape[dim]).to(torch.bfloat16)
    assert float(y.min()) == float(y.max()) == float(each)
    g = torch.ones_like(x)
    g.flatten()[-1] = 3
    del x
    dx = backward(g, y, dim)
    sum_of_line = float(each) * (shape[dim] + 2)
    last = dx.flatten()[-1]
    assert abs(float(last) - (3 - sum_of_line) * float(each)) <= 0.02 * abs(float(each)) * (3 + sum_of_line)


@pytest.mark.slow
def test_a_view_past_two_to_the_31() -> None:
    x = torch.zeros(2**19 + 5, 4097, dtype=torch.bfloat16, device="cuda")[:, :-1]
    x[-1, -1] = 5
    y = softmax(x)
    assert float(y[:-1].min()) == float(y[:-1].max()) == 1 / 4096
    assert_softmax(y[-1:], x[-1:], 1)
