"""`_temporal_difference_scan` over few rows of many steps, which blocks of a GPU share, many columns, any alignment."""

from __future__ import annotations

import math

import pytest
import torch

from returns.test_kernels import OP, call, check
from scan.oracle import REAL_DTYPES
from support.subprocesses import rare

SHAPES = [((2, 12_345), 1), ((1033, 7), 0), rare((2, 1100, 70), 1), ((613, 517), 1), rare((62, 33, 131), 1)]
# Of columns that fill a GPU, and of few steps.
SHAPES += [rare((9001, 31), 1), rare((23, 9002), 0), ((5, 7, 1201), 1)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.each_value
def test_any_shape(device: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    """Steps are neighbors in memory, or nearly, or not at all."""
    options = [
        ("gae", "number", "bool", "contiguous"),
        ("gae", "row", "none", "strided"),
        ("vtrace", "number", "none", "contiguous"),
        ("vtrace", "step", "float", "permuted"),
        ("shifted", "number", "bool", "sub_view"),
        ("returns", "row", "bool", "contiguous"),
    ]
    # The reference takes a second for rows of so many steps.
    if device == "cpu" and (shape[dim] > 10_000 or math.prod(shape) > 200_000):
        options = options[:1]
    for kind, rates, flags, layout in options:
        check(call(shape, dim, dtype, device, kind=kind, rates=rates, flags=flags, layout=layout))


# A row is a warp's, or warps share it; a block takes several, or one, or a cluster does; as many threads as an H200 has
# room for.
SMALL_ROWS = [(8, 128), (64, 300), (5000, 5), (23, 7, 33), (6, 4096), (3, 30_001)]
SMALL_ROWS += [(8, 53_818), (10, 65_536), (3740, 230)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shape", SMALL_ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "sub_view"])
def test_rows_that_a_gpu_has_at_once(layout: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for kind, flags, has_next in [
        ("gae", "bool", False),
        ("gae", "bool", True),
        ("gae", "none", False),
        ("shifted", "bool", False),
        ("returns", "bool", True),
        ("returns", "bool", False),
        ("vtrace", "bool", False),
        ("vtrace", "bool", True),
    ]:
        c = call(shape, len(shape) - 1, dtype, "cuda", kind=kind, flags=flags, layout=layout, next_values=has_next)
        check(c, long=shape[-1] > 1000)


# Longer than a cluster holds; the last one has more tiles than a group of groups.
LONG_ROWS = [
    ((3, 286_747), torch.bfloat16, "shifted", "number", "bool", "contiguous"),
    ((3, 286_747), torch.bfloat16, "vtrace", "row", "none", "strided"),
    ((3, 286_747), torch.float16, "gae", "step", "float", "contiguous"),
    ((2, 3, 123_001), torch.float32, "gae", "number", "none", "contiguous"),
    ((2, 3, 123_001), torch.float32, "vtrace", "number", "none", "sub_view"),
    ((2, 3, 123_001), torch.float32, "returns", "row", "none", "contiguous"),
    ((50, 123_001), torch.float32, "gae", "row", "bool", "contiguous"),
    ((2, 131_072), torch.float64, "gae", "number", "none", "contiguous"),
    ((2, 131_072), torch.float64, "vtrace", "step", "none", "contiguous"),
    ((1, 3_500_000), torch.float32, "gae", "number", "none", "contiguous"),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("shape", "dtype", "kind", "rates", "flags", "layout"), LONG_ROWS, ids=str)
def test_rows_that_no_cluster_holds(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, rates: str, flags: str, layout: str
) -> None:
    """Their blocks wait for each other's segments in memory; the same bits come of it whenever these come."""
    c = call(shape, len(shape) - 1, dtype, "cuda", kind=kind, rates=rates, flags=flags, layout=layout)
    check(c, long=True)
    first = OP(*c.arguments())
    assert all(all(map(torch.equal, first, OP(*c.arguments()))) for _ in range(10))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("columns", [405_505, 811_008, 811_010], ids=str)
@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_two_steps_of_columns_that_fill_a_gpu(dtype: torch.dtype, columns: int) -> None:
    """A thread takes more of them where words are narrow."""
    for kind, rates in (("gae", "number"), ("vtrace", "row"), ("vtrace", "step")):
        check(call((2, columns), 0, dtype, "cuda", kind=kind, rates=rates, flags="bool"))
