"""softmax's CUDA kernel of slabs that groups of blocks hold in part: rows, columns and strips, some of them padded."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from torch_dcs_ops import softmax

from softmax.cuda_checks import backward, check
from softmax.oracle import DTYPES
from support.cuda_graphs import captured
from support.launched_kernels import has_132_multiprocessors, launched_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# Of one column and of several; of strips of one step and of several; of several rounds.
SLABS = ((3, 5_000_001, 1), (13, 1_300_001, 1), (1, 90_001, 153), (1, 120_000, 160), (103, 7007, 70), (31, 20_011, 37),
         (1, 60_001, 325), (1, 31_000, 993), (2, 15_001, 1859), (1, 20_000, 2048), (1, 11_000, 4095))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SLABS, ids=str)
def test_slabs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check((4 * torch.randn(shape, device="cuda")).to(dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [1, 5, 8])
@pytest.mark.parametrize("shape", SLABS, ids=str)
def test_padded_slabs(shape: tuple[int, int, int], padding: int, dtype: torch.dtype) -> None:
    """Each slab in one run, which begins at any element; what lies between them is NaN."""
    outer, length, inner = shape
    wide = (4 * torch.randn(outer, length * inner + padding, device="cuda")).to(dtype)
    wide[:, length * inner :] = float("nan")
    check(wide[:, : length * inner].view(shape), 1)


@pytest.mark.skipif(not has_132_multiprocessors(), reason="plans are known for 132 multiprocessors")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5_000_001, 1), (1, 90_001, 153), (1, 60_001, 325)], ids=str)
def test_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What the tests above launch."""
    outer, length, inner = shape
    wide = torch.randn(outer, length * inner + 5, device="cuda").to(dtype)
    padded, kernel = wide[:, : length * inner].view(shape), {"softmax_streamed_kernel": 1}
    x = padded.contiguous()
    assert launched_kernels(partial(softmax, padded, 1)) == kernel
    assert launched_kernels(partial(softmax, x, 1)) == kernel
    assert launched_kernels(partial(backward, torch.randn_like(x), softmax(x, 1), 1)) == kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_of_a_graph(dtype: torch.dtype) -> None:
    """Each replay's blocks tell its parts from those of the one before."""
    x = torch.randn(1, 60_001, 325, device="cuda").to(dtype)
    graph, (y,) = captured(lambda: [softmax(x, 1)])
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, softmax(x, 1))


def test_special_values() -> None:
    """NaN, infinities and a column of nothing but -inf, in what is held and in what is read twice."""
    x = torch.randn(1, 90_001, 153, device="cuda")
    for step, value in ((3, float("nan")), (45_000, float("inf")), (90_000, float("-inf"))):
        x[0, step, step % 153] = value
    x[0, :, 7] = float("-inf")
    check(x, 1)
    y = softmax(x, 1)
    assert torch.equal(y.nan_to_num(2), softmax(x, 1).nan_to_num(2))
