"""softmax's Triton kernels against float64: on a GPU for real, else in a process with Triton's interpreter."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from softmax.oracle import assert_gradient, assert_softmax
from support.sm_90 import compiled_for_sm_90
from support.subprocesses import run_in_the_interpreter
from support.triton_modules import triton_module

pytest.importorskip("triton")
pytestmark = pytest.mark.each_value

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_softmax_in_the_interpreter"
)
# The interpreter cuts float32 off to bfloat16, where the GPU rounds.
DTYPES = (torch.float32, torch.float64, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_softmax_in_the_interpreter(marks: str) -> None:
    run_in_the_interpreter(__file__, "-m", marks)


@pytest.fixture
def kernels() -> ModuleType:
    """triton_kernels/softmax.py, installed or from the checkout."""
    return triton_module("softmax")


@pytest.fixture(params=["small tiles"] if INTERPRETED else ["small tiles", "as shipped"])
def tiles(request: pytest.FixtureRequest, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """How long a line is that no tile holds; small tiles take short lines through the loops."""
    if request.param == "small tiles":
        monkeypatch.setattr(kernels, "LARGEST_TILE", 64)
        monkeypatch.setattr(kernels, "LOOP_TILE", 32)
        monkeypatch.setattr(kernels, "COLUMN_TILE", 512)
        return 65
    return 32769


def check(kernels: ModuleType, x: Tensor, dim: int) -> None:
    y = kernels.softmax(x, dim)
    assert y.stride() == torch.empty_like(x).stride()
    assert_softmax(y, x, dim)
    g = torch.randn(x.shape, device=DEVICE).to(x.dtype)
    dx = kernels.softmax_backward(g, y, dim)
    assert dx.stride() == torch.empty_like(y).stride()
    assert_gradient(dx, g, y, dim)


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (4 * torch.randn(shape, device=DEVICE)).to(dtype)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 31, 33, 256, 1000])
def test_rows(kernels: ModuleType, columns: int, dtype: torch.dtype) -> None:
    for rows in (1, 5, 70):
        check(kernels, make(rows, columns, dtype=dtype), 1)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lines_longer_than_a_tile(kernels: ModuleType, tiles: int, dtype: torch.dtype) -> None:
    for length in (tiles - 1, tiles, 5 * tiles + 3):
        check(kernels, make(3, length, dtype=dtype), 1)
        check(kernels, make(length, 7, dtype=dtype), 0)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "inner"), [(1, 2), (5, 3), (33, 40), (64, 32), (100, 65)])
def test_columns(kernels: ModuleType, length: int, inner: int, dtype: torch.dtype) -> None:
    check(kernels, make(2, length, inner, dtype=dtype), 1)


@kernel_test
def test_layouts(kernels: ModuleType) -> None:
    x = make(4, 6, 5, 7)
    for view in (x.permute(2, 0, 3, 1), x[:, ::2, 1:, ::3], x[1:], x.flatten()[1:], x[:, :, :1].expand(4, 6, 9, 7)):
        for dim in range(view.dim()):
            check(kernels, view, dim)
    y = kernels.softmax(x, 1)
    g = torch.ones((), device=DEVICE).expand(x.shape)
    assert_gradient(kernels.softmax_backward(g, y, 1), g, y, 1)


@kernel_test
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1)], ids=str)
def test_degenerate_shapes(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    check(kernels, make(*shape), 0)


@kernel_test
@pytest.mark.parametrize("columns", [20, 200])
@pytest.mark.usefixtures("tiles")
def test_special_values(kernels: ModuleType, columns: int) -> None:
    x, inf, big = make(8, columns), float("inf"), torch.finfo(torch.float32).max
    x[0, 3], x[1, 0], x[2] = float("nan"), inf, -inf
    x[3, :-1] = -inf
    x[4, 1:] = -inf
    x[5], x[6], x[7, 5] = big, -big, big
    for tensor, dim in ((x, 1), (x.t().contiguous(), 0)):
        assert_softmax(kernels.softmax(tensor, dim), tensor, dim)


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
def test_the_same_bits_every_time(kernels: ModuleType) -> None:
    for shape, dim in (((300, 1000), 1), ((20, 100_000), 1), ((3000, 100), 0)):
        x = make(*shape)
        first = kernels.softmax(x, dim)
        for _ in range(30):
            assert torch.equal(kernels.softmax(x, dim), first)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "name", ["softmax_resident", "softmax_looped", "softmax_backward_resident", "softmax_backward_looped"]
)
def test_compiles_for_sm_90(kernels: ModuleType, name: str, axis: int) -> None:
    import triton

    kernel = getattr(kernels, name)
    constants = {"LINES": 4, "STEPS": 64, "AXIS": axis, "ACC": triton.language.float32, "LOWEST": -3.4e38}
    kinds = dict.fromkeys(("length", "inner", "outer"), "i32")
    assert compiled_for_sm_90(kernel, constants, kinds, number="*bf16").asm["ptx"]
