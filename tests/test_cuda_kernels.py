"""What only a GPU can show: capture, streams, bits from run to run, addresses past 2**31."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# One for each way through the kernels: a thread a row, packed rows, one tile, a chain of tiles, odd rows, columns.
SHAPES = (((32, 8), 1), ((300, 16), 1), ((7, 4096), 1), ((3, 100_000), 1), ((3, 9001), 1), ((300, 257), 0))


def problem(shape: tuple[int, int], dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, device="cuda")
    return x, torch.rand_like(x), torch.rand(shape, device="cuda") < 0.01


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_capture_and_replay(shape: tuple[int, int], dim: int) -> None:
    x, gates, reset = problem(shape, dim)

    def calls() -> list[torch.Tensor]:
        return [
            discounted_cumsum(x, 0.99, dim=dim),
            discounted_cumsum(x, gates, dim=dim, direction="left"),
            discounted_cumsum(x, 0.9, dim=dim, reset=reset),
            discounted_cumsum(x, 0.9, dim=dim, window=100),
        ]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for _ in range(3):
        x.normal_()
        for output in captured:
            output.fill_(float("nan"))
        graph.replay()
        for output, expected in zip(captured, calls(), strict=True):
            assert torch.equal(output, expected)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_the_bits_are_the_same_in_100_runs(shape: tuple[int, int], dim: int) -> None:
    x, gates, _ = problem(shape, dim)
    gates.requires_grad_()
    scalar = torch.tensor(0.99, device="cuda", requires_grad=True)

    def results() -> list[torch.Tensor]:
        number, step = discounted_cumsum(x, scalar, dim=dim), discounted_cumsum(x, gates, dim=dim)
        return [
            number.detach(),
            step.detach(),
            *torch.autograd.grad(number.sin().sum() + step.sin().sum(), (scalar, gates)),
        ]

    first = results()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("direction", ["left", "right"])
def test_gradients_with_resets(shape: tuple[int, int], dim: int, direction: str) -> None:
    """Also for memcheck: the adjoint takes the reset of the step before, and the first step has none."""
    x, gates, reset = problem(shape, dim)
    for gamma in (torch.tensor(0.9, device="cuda"), gates):
        leaves = [x.double().requires_grad_(), gamma.double().requires_grad_()]
        on_cpu = [leaf.detach().cpu().requires_grad_() for leaf in leaves]
        got = torch.autograd.grad(
            discounted_cumsum(*leaves, dim=dim, direction=direction, reset=reset).sin().sum(), leaves
        )
        expected = torch.autograd.grad(
            discounted_cumsum(*on_cpu, dim=dim, direction=direction, reset=reset.cpu()).sin().sum(), on_cpu
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


def test_side_stream() -> None:
    x = torch.randn(64, 20_000, device="cuda")
    expected = discounted_cumsum(x, 0.99)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.mul_(2)
        output = discounted_cumsum(x, 0.99)
    stream.synchronize()
    torch.testing.assert_close(output, 2 * expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31 + 40,), (2**31 // 8 + 5, 8), (2**31 // 64 + 5, 64), (3, 2**30 + 8)])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_addresses_past_two_to_the_31(shape: tuple[int, ...], direction: str) -> None:
    x = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    y = discounted_cumsum(x, 0.5, direction=direction).flatten()
    length = shape[-1]
    distance = torch.arange(min(length, 32), device="cuda")
    expected = (2 - 0.5 ** distance.double()).to(torch.bfloat16)
    last = y[-length:]
    got = last[: distance.numel()] if direction == "left" else last[-distance.numel() :].flip(0)
    assert torch.equal(got, expected)
    assert float(y.float().min()) >= 1
    assert float(y.float().max()) <= 2


@pytest.mark.slow
def test_cumsum_past_two_to_the_31() -> None:
    x = torch.ones(2**31 + 40, dtype=torch.int64, device="cuda")
    y = cumsum(x, 0)
    assert int(y[-1]) == 2**31 + 40
    assert int(y[2**31]) == 2**31 + 1
