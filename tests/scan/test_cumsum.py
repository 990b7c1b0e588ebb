"""cumsum against torch.cumsum, which it extends by `reverse`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from torch_dcs_ops import cumsum

from scan.oracle import DTYPES, LAYOUTS, assert_is_scan, make

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def reference(x: Tensor, dim: int, reverse: bool, dtype: torch.dtype | None = None) -> Tensor:
    if not reverse or x.dim() == 0:
        return torch.cumsum(x, dim, dtype=dtype)
    return torch.cumsum(x.flip(dim), dim, dtype=dtype).flip(dim)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floating_point(device: str, dtype: torch.dtype, reverse: bool) -> None:
    for shape in ((), (1,), (0,), (200,), (5, 33), (3, 0, 2), (4, 9, 6)):
        x = make(shape, dtype, device)
        for dim in range(-max(len(shape), 1), max(len(shape), 1)):
            assert_is_scan(cumsum(x, dim, reverse=reverse), x, 1.0, dim=dim, direction="right" if reverse else "left")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_give_int64(device: str, dtype: torch.dtype, reverse: bool) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (4, 300, 3), device=device).to(dtype)
    for dim in range(3):
        y = cumsum(x, dim, reverse=reverse)
        assert y.dtype == torch.int64
        assert torch.equal(y, reference(x, dim, reverse))


def test_int64_is_exact_and_wraps(device: str) -> None:
    x = torch.full((5,), 2**62, dtype=torch.int64, device=device)
    x[0] += 1
    for reverse in (False, True):
        assert torch.equal(cumsum(x, reverse=reverse), reference(x, 0, reverse))


@pytest.mark.parametrize("reverse", [False, True])
def test_dtype_converts_first(device: str, reverse: bool) -> None:
    for given, wanted in itertools.product(
        (torch.int32, torch.float32, torch.bfloat16, torch.bool),
        (torch.float64, torch.float32, torch.int64, torch.int32),
    ):
        x = (torch.arange(24, device=device).reshape(4, 6) % 5).to(given)
        y = cumsum(x, 1, reverse=reverse, dtype=wanted)
        assert y.dtype == wanted
        assert torch.equal(y, reference(x, 1, reverse, wanted))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, layout: str) -> None:
    for tensor in (make((4, 9, 6), torch.float64, device), torch.arange(216, device=device).reshape(4, 9, 6)):
        x = LAYOUTS[layout](tensor)
        for dim, reverse in itertools.product(range(3), (False, True)):
            y = cumsum(x, dim, reverse=reverse)
            torch.testing.assert_close(y, reference(x, dim, reverse))
            assert y.stride() == torch.empty_like(x).stride()


def test_small_tails_survive(device: str) -> None:
    """A reversed sum made of a total less a prefix would lose them."""
    x = torch.tensor([1e8, 1.0, 1e-3], device=device)
    assert torch.equal(cumsum(x, reverse=True)[1:], x.flip(0).cumsum(0).flip(0)[1:])


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(device: str, reverse: bool) -> None:
    for shape, dtype in itertools.product(((), (4,), (2, 5)), (torch.float64, torch.complex128)):
        x = make(shape, dtype, device).requires_grad_()
        options = {"check_forward_ad": True, "check_batched_grad": True}
        assert gradcheck(lambda x: cumsum(x, 0, reverse=reverse), x, check_batched_forward_grad=True, **options)
        assert gradgradcheck(lambda x: cumsum(x, 0, reverse=reverse).square(), x, check_fwd_over_rev=True)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_gradients_come_back_in_inputs_dtype(device: str) -> None:
    for given, wanted in (
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.complex64),
    ):
        x = make((5,), given, device).requires_grad_()
        (grad,) = torch.autograd.grad(cumsum(x, dtype=wanted).abs().sum(), x)
        (expected,) = torch.autograd.grad(torch.cumsum(x, 0, dtype=wanted).abs().sum(), x)
        assert grad.dtype == given
        torch.testing.assert_close(grad, expected)
    x = make((5,), torch.float32, device).requires_grad_()
    assert not cumsum(x, dtype=torch.int64).requires_grad
    assert not cumsum(torch.arange(3, device=device)).requires_grad


def test_transforms(device: str) -> None:
    x = make((3, 5), torch.float64, device)

    def loss(x: Tensor) -> Tensor:
        return cumsum(x, 0, reverse=True).pow(3).sum()

    def expected(x: Tensor) -> Tensor:
        return reference(x, 0, True).pow(3).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(expected)(x))
    torch.testing.assert_close(torch.func.hessian(loss)(x[0]), torch.func.hessian(expected)(x[0]))
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (x,)), torch.func.jvp(expected, (x,), (x,)))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x), torch.vmap(torch.func.grad(expected))(x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training(device: str, dynamic: bool) -> None:
    def step(x: Tensor) -> Tensor:
        return (cumsum(x, 1, reverse=True) * x).mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((3, 4), (5, 9)):
        x = make(shape, torch.float32, device).requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(step(x), x))
