"""Discounts of steps in the rewards' half precision count as in float32; on GPUs they are read as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import _native, returns

from returns.test_kernels import OP, Call, call, check
from scan.oracle import HALF
from support.subprocesses import rare

# On a GPU: columns by a thread, in tiles, over blocks that share time.
STRIDED: list[Any] = [
    ((12, 300), 0),
    ((40, 37), 0),
    ((200, 66), 0),
    rare((5000, 9), 0),  # of 20 s on a CPU
    ((3, 200, 17), 1),
]
# Rows in a block, in a cluster, over blocks that share time; of odd lengths, too.
CONTIGUOUS: list[Any] = [
    ((300, 12), 1),
    ((700, 33), 1),
    ((9, 1001), 1),
    ((4, 30_000), 1),
    ((2, 300_001), 1),
]


def narrow_call(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str, kind: str, layout: str) -> Call:
    c = call(shape, dim, dtype, device, kind=kind, rates="step", layout=layout)
    assert c.gamma is not None
    assert c.trace is not None
    return c._replace(gamma=c.gamma.to(dtype), trace=c.trace.to(dtype))


def widened(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.float()


@pytest.mark.parametrize(("shape", "dim"), STRIDED + CONTIGUOUS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["gae", "vtrace", "returns"])
@pytest.mark.each_value
def test_they_count_as_in_float32(device: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    for layout in ("contiguous", "sub_view", "expanded"):
        c = narrow_call(shape, dim, dtype, device, kind, layout)
        one = c._replace(trace=widened(c.trace))
        # On a CPU `long` would compare the kernels with themselves, and the reference takes seconds for so many steps.
        if device == "cuda" or shape[dim] < 10_000:
            check(c, long=shape[dim] >= 10_000)
            check(one, long=shape[dim] >= 10_000)
        if device == "cpu" or dim != len(shape) - 1:
            # Rows that fit into shared memory depend on how wide discounts are, and with them the order of the sums.
            expected = OP(*c._replace(gamma=widened(c.gamma), trace=widened(c.trace)).arguments())
            assert all(map(torch.equal, OP(*c.arguments()), expected))
            assert all(map(torch.equal, OP(*one.arguments()), expected))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_other_dtypes_are_converted(device: str, dtype: torch.dtype) -> None:
    """Of the other half precision, and float64."""
    for shape, dim in (((200, 66), 0), ((9, 1001), 1)):
        c = narrow_call(shape, dim, dtype, device, "vtrace", "contiguous")
        assert c.gamma is not None
        other = HALF[dtype == HALF[0]]
        gamma = c.gamma.to(other)
        expected = OP(*c._replace(gamma=gamma.float()).arguments())
        for same in (gamma, gamma.double()):
            assert all(map(torch.equal, OP(*c._replace(gamma=same).arguments()), expected))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_functions(device: str, dtype: torch.dtype) -> None:
    """Beside gradients and returns over n steps, which convert them."""
    rewards, values, gamma, lambda_ = (torch.rand(90, 70, device=device).to(dtype) for _ in range(4))
    rewards.requires_grad_()

    def results(g: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        found = (
            *returns.gae(rewards, values, next_values=values, terminated=None, gamma=g, gae_lambda=rate),
            returns.td_lambda_returns(rewards, next_values=values, terminated=None, gamma=g, lambda_=rate),
            returns.n_step_returns(rewards, n=3, next_values=values, terminated=None, gamma=g, lambda_=rate),
        )
        return (*found, *torch.autograd.grad(found, rewards, [torch.ones_like(tensor) for tensor in found]))

    assert all(map(torch.equal, results(gamma, lambda_), results(gamma.float(), lambda_.float())))


@pytest.mark.skipif(_native.CUDA.kind != "native", reason="there is no CUDA library")
@pytest.mark.parametrize("dim", [0, 1])
def test_no_copy_is_made(dim: int) -> None:
    c = narrow_call((1024, 1024), dim, torch.bfloat16, "cuda", "returns", "contiguous")
    c = c._replace(terminated=None, truncated=None)
    OP(*c.arguments())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = OP(*c.arguments())[1]
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * result.nbytes  # the result, and no discounts of twice its size each
