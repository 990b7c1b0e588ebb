"""Long rows that blocks of a GPU share or take alone: gates of every kind, rows of partial tiles, adjoints alone."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DIRECTIONS = pytest.mark.parametrize("direction", ["left", "right"])


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`expected` in float64: its rounding to `dtype`, and 1e-5 of the row's largest for what is in float32."""
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    scale = torch.where(finite, expected.abs(), 0.0).amax(-1, keepdim=True)
    budget = torch.finfo(dtype).eps * expected.abs() + 1e-5 * scale
    assert bool(((got - expected).abs() <= budget)[finite].all())


@DIRECTIONS
@DTYPES
@pytest.mark.parametrize("rows", [2, 264])
def test_gates_of_every_kind(rows: int, dtype: torch.dtype, direction: str) -> None:
    """Products of gates that vanish, that are 0, whose gates are above 1, negative, subnormal or no numbers."""
    length = 600_008 if rows == 2 else 20_008
    gates = torch.rand(rows, length, device="cuda")
    fifth = length // 5
    gates[:, fifth : 2 * fifth].uniform_(-0.5, 1.2)
    gates[:, 2 * fifth : 3 * fifth].uniform_(0.9, 1.09)
    gates[:, 3 * fifth : 4 * fifth].uniform_(1e-7, 1e-5)
    gates[:, 4 * fifth :].uniform_(0.99, 1.0)
    gates[:, 4 * fifth :: 197] = 0
    gates[1, length // 2 + 17] = float("nan")
    gates = gates.to(dtype)
    x = torch.randn(rows, length, device="cuda").to(dtype)
    got = discounted_cumsum(x, gates, direction=direction).double().cpu()
    check(got, discounted_cumsum(x.double().cpu(), gates.double().cpu(), direction=direction), dtype)


@DIRECTIONS
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [(2, 4_000_000), (264, 30_304), (1, 100_000)], ids=str)
def test_gates_that_take_each_other_back(shape: tuple[int, int], backward: bool, direction: str) -> None:
    """Every other gate is one over the gate before it. A product of all in float would lose 1e-8 a step."""
    even = torch.empty(shape[0], shape[1] // 2, device="cuda").uniform_(0.99, 1.01)
    gates = torch.stack((even, 1 / even), -1).view(shape)
    x = torch.randn(shape, device="cuda").requires_grad_(backward)

    upstream = torch.randn(shape, device="cuda")

    def result(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        y = discounted_cumsum(x, gates, direction=direction)
        return torch.autograd.grad(y, x, upstream.to(y))[0] if backward else y

    got = result(x, gates).double().cpu()
    wide = x.detach().double().cpu().requires_grad_(backward)
    check(got, result(wide, gates.double().cpu()).detach(), torch.float32)


@DIRECTIONS
@DTYPES
@pytest.mark.parametrize("shape", [(264, 20_008), (264, 50_000), (500, 9_008)], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
def test_rows_alone(shape: tuple[int, int], kind: str, dtype: torch.dtype, direction: str) -> None:
    """Rows by the hundred whose tiles are not whole, each of which a block takes alone."""
    x = torch.randn(shape, device="cuda").to(dtype)
    gamma = torch.empty({"number": (), "row": (shape[0], 1), "step": shape}[kind], device="cuda").uniform_(0.9, 0.999)
    gamma = gamma.to(dtype) if kind == "step" else gamma
    got = discounted_cumsum(x, gamma.squeeze(-1) if kind == "row" else gamma, direction=direction).double().cpu()
    gates = gamma.double().cpu().expand(shape)
    check(got, discounted_cumsum(x.double().cpu(), gates, direction=direction), dtype)


@DIRECTIONS
@pytest.mark.parametrize("gamma", [1.05, 1.2])
def test_an_infinity_keeps_its_sign_in_rows_alone(gamma: float, direction: str) -> None:
    x = torch.randn(264, 50_000, device="cuda").to(torch.bfloat16)
    y = discounted_cumsum(x, gamma, direction=direction)
    assert not y.isnan().any()
    ends = y[:, -1 if direction == "left" else 0]
    assert bool(ends.isinf().all())
    steps = x[:, :2000] if direction == "left" else x[:, -2000:].flip(1)
    signs = (steps.double() * gamma ** -torch.arange(2000.0, dtype=torch.float64, device="cuda")).sum(1).sign()
    assert torch.equal(ends.sign().double(), signs)


@DIRECTIONS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 400_008), (264, 50_000)], ids=str)
def test_the_gradient_of_input_alone(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """A shifted scan: a step's gate is that of the step before."""
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    gates = torch.empty(shape, device="cuda").uniform_(0.8, 1.0).to(dtype)
    grad = torch.randn(shape, device="cuda").to(dtype)
    (got,) = torch.autograd.grad(discounted_cumsum(x, gates, direction=direction), x, grad)
    against = {"left": "right", "right": "left"}[direction]
    rolled = gates.double().cpu().roll(-1 if direction == "left" else 1, 1)
    check(got.double().cpu(), discounted_cumsum(grad.double().cpu(), rolled, direction=against), dtype)
