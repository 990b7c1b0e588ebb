"""`_temporal_difference_scan` over few rows of many steps, which blocks of a GPU share, many columns, any alignment."""

from __future__ import annotations

import math

import pytest
import torch

from returns.test_kernels import call, check
from scan.oracle import REAL_DTYPES

SHAPES = [((2, 12_345), 1), ((1033, 7), 0), ((2, 1100, 70), 1), ((613, 517), 1), ((62, 33, 131), 1), ((9001, 31), 1)]
# Of columns that fill a GPU, and of few steps.
SHAPES += [((23, 9002), 0), ((5, 7, 1201), 1)]


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
