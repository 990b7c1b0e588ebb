"""Few rows of a number gamma, or of per-step gammas: clusters of blocks that read again what lies before them."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# Rows of one cluster of blocks and of several, of as many as there can be; with a last vector that is not whole, where
# there is but one row; rows that are too long.
SHAPES = (
    (1, 4100), (1, 8192), (1, 9998), (8, 16_384), (1, 16_390), (1, 32_768), (3, 20_008), (4, 33_000), (2, 40_008),
    (1, 60_001), (1, 100_000), (1, 100_001), (1, 131_072), (1, 131_080), (1, 262_144), (1, 262_152),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected_of(x: torch.Tensor, gamma: float | torch.Tensor, direction: str) -> torch.Tensor:
    exact = gamma.double().cpu() if isinstance(gamma, torch.Tensor) else gamma
    return discounted_cumsum(x.double().cpu(), exact, direction=direction)


def check(x: torch.Tensor, gamma: float | torch.Tensor, direction: str, what: str) -> torch.Tensor:
    """Within the last digit of a half and 1e-6 of a row's largest value."""
    y = discounted_cumsum(x, gamma, direction=direction)
    expected = expected_of(x, gamma, direction)
    error = ((y.double().cpu() - expected).abs() / expected.abs().amax(1, keepdim=True)).max()
    eps = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    assert error <= eps + 1e-6, f"{what}: {error}"
    return y


def assert_not_finite_alike(y: torch.Tensor, expected: torch.Tensor, what: tuple[object, ...]) -> None:
    assert torch.equal(y.isnan(), expected.isnan()), what
    assert torch.equal(y.isposinf(), expected.isposinf()), what
    assert torch.equal(y.isneginf(), expected.isneginf()), what


def gates_of(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-step gammas: in (0.8, 1); of both signs; with episodes' ends; whose products fade within a vector; past 1, in
    one warp's segment or throughout."""
    low, high = {
        "signs": (-1.0, 1.0),
        "fading": (1e-20, 1e-19),
        "fading episodes": (1e-20, 1e-19),
        "past 1": (0.93, 1.06),
    }.get(kind, (0.8, 1.0))
    gates = (low + (high - low) * torch.rand(x.shape, dtype=torch.float64, device=x.device)).to(x.dtype)
    if kind == "once past 1":
        gates[:, x.shape[1] // 3] = 1.75
    return torch.where(torch.rand(x.shape, device=x.device) < 0.01, 0, gates) if "episodes" in kind else gates


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Gammas whose powers fade within a vector, within a warp, within a block, and not at all; 1; and one beyond 1."""
    x = torch.randn(shape, device="cuda").to(dtype)
    for gamma in (0.99, 0.999, 1.0, 0.9999, -0.97, 0.3, -1e-3, 1e-30, 0.0, 1.00001):
        check(x, gamma, direction, f"gamma {gamma}")


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gamma_a_step(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    fading = () if dtype == torch.float16 else ("fading", "fading episodes")
    for kind in ("below 1", "signs", "episodes", "past 1", "once past 1", *fading):
        gates = gates_of(x, kind)
        y = check(x, gates, direction, f"gates {kind}")
        assert torch.equal(discounted_cumsum(x, gates, direction=direction), y)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("shape", [(2, 9000), (1, 100_001)], ids=str)
def test_totals_near_the_end_of_float(shape: tuple[int, int], direction: str) -> None:
    """Some as large as float can sum, in a few warps' segments."""
    x = torch.randn(shape, device="cuda")
    gates = gates_of(x, "below 1")
    for at in (0, 700, shape[1] // 2, shape[1] - 1):
        x[:, at] = 1e37
    check(x, gates, direction, "totals of 1e37")


def step_by_step(x: torch.Tensor, gates: torch.Tensor, direction: str) -> torch.Tensor:
    if direction == "right":
        return step_by_step(x.flip(1), gates.flip(1), "left").flip(1)
    rows = [list(zip(*row, strict=True)) for row in zip(x.tolist(), gates.tolist(), strict=True)]
    return torch.tensor(
        [list(accumulate(steps[1:], lambda y, step: step[0] + step[1] * y, initial=steps[0][0])) for steps in rows],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 9000), (1, 100_001)], ids=str)
def test_special_values_and_gates(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """As below, beside the recurrence step by step. No carry enters a row's first step, whose gate may be anything."""
    first = 0 if direction == "left" else -1
    for kind in ("below 1", "signs", "episodes", "fading", "once past 1"):
        for at in (0, 5, 4095, shape[1] // 2, shape[1] - 3, shape[1] - 1):
            for value in (float("inf"), float("-inf"), float("nan")):
                x = torch.randn(shape, device="cuda").to(dtype)
                gates = gates_of(x, kind)
                gates[:, first] = value
                x[0, at] = value
                if kind == "signs":
                    gates[-1, at] = float("nan")
                y = discounted_cumsum(x, gates, direction=direction).double().cpu()
                assert_not_finite_alike(y, step_by_step(x, gates, direction), (kind, at, value))


@pytest.mark.parametrize("direction", ["left", "right"])
def test_ones(direction: str) -> None:
    """Sums that grow to 1000 stay within five of the last digits of 1000."""
    x = torch.ones(1, 10_000, device="cuda")
    y = discounted_cumsum(x, 0.999, direction=direction)
    assert (y.double().cpu() - expected_of(x, 0.999, direction)).abs().max() <= 3e-4


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 9000), (1, 100_001), (3, 40_008)], ids=str)
def test_special_values(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """What is not finite goes as far as the recurrence takes it, through powers that no float holds, and no farther."""
    length = shape[1]
    for at in (0, 5, 127, 4095, length // 2, length - 3, length - 1):
        for value in (float("inf"), float("-inf"), float("nan")):
            x = torch.randn(shape, device="cuda").to(dtype)
            x[0, at] = value
            for gamma in (0.99, 0.5, -0.9, 1.0, 1e-20, -1e-4):
                y = discounted_cumsum(x, gamma, direction=direction).double().cpu()
                assert_not_finite_alike(y, expected_of(x, gamma, direction), (at, value, gamma))


@pytest.mark.parametrize("direction", ["left", "right"])
def test_strided_and_unaligned_rows(direction: str) -> None:
    storage = torch.randn(4, 50_000, device="cuda")
    for x in (storage[::2, :40_000], storage[:, 4:20_004], storage[:, 1:20_001], storage[1, 3:30_000].unsqueeze(0)):
        for gamma in (0.99, gates_of(storage, "below 1")[: x.size(0), : x.size(1)], gates_of(x, "below 1")):
            y = discounted_cumsum(x, gamma, direction=direction)
            expected = expected_of(x, gamma, direction)
            error = ((y.double().cpu() - expected).abs().max() / expected.abs().max()).item()
            assert error <= torch.finfo(x.dtype).eps + 1e-6, f"shape {tuple(x.shape)}, strides {x.stride()}: {error}"


@pytest.mark.parametrize("shape", [(1, 9000), (1, 100_000), (4, 30_000)], ids=str)
def test_launches_one_behind_the_other(shape: tuple[int, int]) -> None:
    """Each reads what the one before it has written, other kernels between them too, in a graph as in a stream."""
    x = torch.randn(shape, device="cuda")
    gates = gates_of(x, "signs") * 0.5

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for i in range(30):
            y = discounted_cumsum(y, gates if i % 5 == 4 else 0.5, direction="left" if i % 2 else "right")
            if wait:
                torch.cuda.synchronize()
            if i % 3 == 2:
                y = y * 0.25
        return y

    expected = chain(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            assert torch.equal(chain(False), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(20):
        x.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, chain(True))


@pytest.mark.parametrize("shape", [(1, 9000), (1, 100_001), (4, 30_000)], ids=str)
def test_gradients_and_bits(shape: tuple[int, int]) -> None:
    x, grad = torch.randn(shape, device="cuda", requires_grad=True), torch.randn(shape, device="cuda")
    first = None
    for _ in range(50):
        y = discounted_cumsum(x, 0.98, direction="left")
        (grad_x,) = torch.autograd.grad(y, x, grad)
        if first is None:
            first = y, grad_x
        assert torch.equal(y, first[0])
        assert torch.equal(grad_x, first[1])
    expected = expected_of(grad, 0.98, "right")
    assert (grad_x.double().cpu() - expected).abs().max() <= 1.1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cumsum(dtype: torch.dtype) -> None:
    x = torch.randn(2, 50_000, device="cuda").to(dtype)
    expected = x.double().cpu().cumsum(1)
    error = (cumsum(x, 1).double().cpu() - expected).abs().max()
    assert error <= (torch.finfo(dtype).eps + 1e-6) * expected.abs().max()
