"""Derivatives of both modes by autograd itself: gradcheck, gradgradcheck, layouts of upstream gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from torch_dcs_ops import discounted_cumsum

from scan.oracle import LAYOUTS, differentiable_oracle, make, make_gamma, make_reset

SHAPE = (2, 5)


def leaves(
    kind: str, dtype: torch.dtype, device: str, shape: tuple[int, ...] = SHAPE, gamma_dtype: Any = None
) -> list[Any]:
    x = make(shape, dtype, device).requires_grad_()
    gamma = make_gamma(kind, shape, -1, gamma_dtype or dtype, device)
    if isinstance(gamma, Tensor):
        gamma.requires_grad_()
    return [x, gamma, make(shape[:-1], dtype, device, seed=3).requires_grad_()]


def scan(reset: Tensor | None = None, window: int | None = None, direction: str = "right") -> Any:
    def call(x: Tensor, gamma: Any, initial: Tensor | None = None) -> Tensor:
        return discounted_cumsum(x, gamma, initial=initial, reset=reset, window=window, direction=direction)

    return call


@pytest.mark.parametrize("kind", ["number", "scalar", "row", "row1", "step", "time"])
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.each_pair
def test_gradcheck(device: str, kind: str, with_reset: bool, window: int | None, direction: str) -> None:
    reset = make_reset(SHAPE, device) if with_reset else None
    inputs = leaves(kind, torch.float64, device)
    assert gradcheck(scan(reset, window, direction), inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(scan(reset, window, direction), inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kind", ["row", "step"])
@pytest.mark.parametrize("window", [None, 3])
def test_gradcheck_in_full(device: str, kind: str, window: int | None) -> None:
    """Every entry of the Jacobian, batched gradients of both modes, undefined gradients."""
    function, inputs = scan(make_reset(SHAPE, device), window), leaves(kind, torch.float64, device)
    checks = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, inputs, check_undefined_grad=True, **checks)
    assert gradgradcheck(function, inputs, check_batched_grad=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("gamma_dtype", [torch.complex128, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["scalar", "row", "step"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.each_value
def test_gradcheck_complex(device: str, window: int | None, kind: str, gamma_dtype: torch.dtype) -> None:
    """Conjugates in the right places; a real gamma gets the real part."""
    inputs = leaves(kind, torch.complex128, device, gamma_dtype=gamma_dtype)
    function = scan(make_reset(SHAPE, device), window)
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("op", ["_scan", "_scan_gradients"])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("kind", ["row", "step"])
@pytest.mark.each_pair
def test_gradcheck_of_the_private_ops(device: str, kind: str, dtype: torch.dtype, reverse: bool, op: str) -> None:
    reset = make_reset(SHAPE, device)
    x, gamma, initial = leaves(kind, dtype, device)
    output = make(SHAPE, dtype, device, seed=5).requires_grad_()
    if op == "_scan_gradients":

        def backward(*args: Tensor) -> Any:
            return torch.ops.dcs._scan_gradients(*args[:3], 1.0, 1, reverse, args[3], reset)

        assert gradcheck(backward, (x, output, gamma, initial), check_forward_ad=True)
        assert gradgradcheck(backward, (x, output, gamma, initial))
        return
    for window in (None, 2):

        def shifted(x: Tensor, gamma: Tensor, window: Any = window) -> Any:
            return torch.ops.dcs._scan(x, gamma, 1.0, 1, reverse, True, None, reset, window)

        assert gradcheck(shifted, (x, gamma), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(shifted, (x, gamma), check_fwd_over_rev=True)


def test_third_derivative(device: str) -> None:
    def third(function: Any) -> Tensor:
        gamma = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
        x = make((6,), torch.float64, device)
        value = function(x, gamma).sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value, gamma, create_graph=True)
        return value

    torch.testing.assert_close(third(discounted_cumsum), third(differentiable_oracle))


def test_raw_ops_have_the_same_gradients(device: str) -> None:
    for kind in ("number", "row", "step"):
        inputs = leaves(kind, torch.float64, device)
        wanted = [t for t in inputs if isinstance(t, Tensor)]
        op = torch.ops.dcs.discounted_cumsum.default if kind == "number" else torch.ops.dcs.discounted_cumsum.Tensor
        raw = torch.autograd.grad(op(*inputs[:2], initial=inputs[2]).sin().sum(), wanted)
        public = torch.autograd.grad(discounted_cumsum(*inputs[:2], initial=inputs[2]).sin().sum(), wanted)
        assert all(torch.equal(a, b) for a, b in zip(raw, public, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradients_of_every_layout(device: str, layout: str) -> None:
    """.sum() hands a gradient of stride 0 down."""
    shape = (3, 8)
    upstream = LAYOUTS[layout](make(shape, torch.float64, device, seed=9))
    for kind, window in itertools.product(("row", "step"), (None, 3)):
        inputs = leaves(kind, torch.float64, device, shape)
        results = [
            torch.autograd.grad(function(inputs[0], inputs[1], initial=inputs[2], window=window), inputs, upstream)
            for function in (discounted_cumsum, differentiable_oracle)
        ]
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients_of_every_input_layout(device: str, layout: str, dim: int) -> None:
    shape = (3, 4, 5)
    for kind in ("row", "step"):
        leaf = make(shape, torch.float64, device).requires_grad_()
        gamma = make_gamma(kind, shape, dim, torch.float64, device).requires_grad_()
        results = [
            torch.autograd.grad(function(LAYOUTS[layout](leaf), gamma, dim=dim).sin().sum(), (leaf, gamma))
            for function in (discounted_cumsum, differentiable_oracle)
        ]
        torch.testing.assert_close(results[0], results[1])


def test_gamma_and_initial_broadcast_in_the_backward(device: str) -> None:
    x = make((2, 3, 6), torch.float64, device).requires_grad_()
    for gamma_shape, initial_shape, window in itertools.product(
        ((), (1,), (3,), (2, 1), (1, 1, 1), (1, 3, 6), (2, 3, 1)), ((), (3,), (2, 1)), (None, 4)
    ):
        gamma = torch.rand(gamma_shape, dtype=torch.float64).to(device).requires_grad_()
        initial = make(initial_shape, torch.float64, device).requires_grad_()
        inputs = (x, gamma, initial)
        results = [
            torch.autograd.grad(function(x, gamma, initial=initial, window=window).sin().sum(), inputs)
            for function in (discounted_cumsum, lambda x, g, **o: _with_expanded_gamma(x, g, **o))
        ]
        torch.testing.assert_close(results[0], results[1])


def _with_expanded_gamma(x: Tensor, gamma: Tensor, **options: Any) -> Tensor:
    return differentiable_oracle(x, gamma.expand(x.shape) if gamma.dim() == x.dim() else gamma, **options)


@pytest.mark.parametrize("window", [2, 3, 5, 8, 17, 18, 40])
@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.each_value
def test_gamma_through_windows_of_every_length(device: str, window: int, direction: str, dim: int) -> None:
    """Windows that divide the time and that do not, as long as it and longer; rates below 0, 0 and above 1."""
    shape = (17, 4) if dim == 0 else (4, 17)
    rates = torch.tensor([-0.7, 0.0, 0.95, 1.4], dtype=torch.float64, device=device)
    for gamma, complex_input, with_initial, with_reset in itertools.product(
        (rates, rates.unsqueeze(dim), rates[2]), (False, True), (False, True), (False, True)
    ):
        dtype = torch.complex128 if complex_input else torch.float64
        x, gamma = make(shape, dtype, device), gamma.clone().requires_grad_()
        options = {
            "dim": dim,
            "direction": direction,
            "window": window,
            "initial": make((4,), dtype, device, seed=3) if with_initial else None,
            "reset": make_reset(shape, device) if with_reset else None,
        }
        upstream = make(shape, dtype, device, seed=5)
        results = [
            torch.autograd.grad(function(x, gamma, **options), gamma, upstream)
            for function in (discounted_cumsum, differentiable_oracle)
        ]
        torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)


def test_gamma_through_a_window_keeps_what_is_not_finite(device: str) -> None:
    """An infinity or a NaN reaches the gradients of its own row, and no other."""
    for value in (float("nan"), float("inf")):
        x = make((3, 50), torch.float64, device)
        x[1, 20] = value
        gamma = torch.full((3,), 0.9, dtype=torch.float64, device=device, requires_grad=True)
        (grad,) = torch.autograd.grad(discounted_cumsum(x, gamma, window=7).sum(), gamma)
        assert grad.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("window", [None, 3])
def test_input_that_depends_on_gamma(device: str, window: int | None) -> None:
    """Each gradient is partial: nothing of the other paths is added twice, in the second derivative either."""

    def derivatives(function: Any) -> tuple[Tensor, Tensor]:
        gamma = torch.tensor([0.5, 0.8], dtype=torch.float64, device=device, requires_grad=True)
        x = make(SHAPE, torch.float64, device) * gamma[:, None]
        value = function(x, gamma, initial=gamma.square(), window=window).sin().sum()
        (first,) = torch.autograd.grad(value, gamma, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), gamma)[0]

    torch.testing.assert_close(derivatives(discounted_cumsum), derivatives(differentiable_oracle))


def test_a_retained_graph_gives_the_same_twice(device: str) -> None:
    x, gamma, initial = leaves("row", torch.float64, device)
    y = discounted_cumsum(x, gamma, initial=initial)
    first = torch.autograd.grad(y.sum(), (x, gamma, initial), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, gamma, initial))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_fused_and_composed_backwards_agree(device: str) -> None:
    for dtype, kind in itertools.product((torch.float32, torch.float64, torch.complex64), ("scalar", "row", "step")):
        inputs = leaves(kind, dtype, device, (4, 60))
        grads = [
            torch.autograd.grad(
                discounted_cumsum(*inputs[:2], initial=inputs[2]).abs().sum(), inputs, create_graph=graph
            )
            for graph in (False, True)
        ]
        torch.testing.assert_close(grads[0], tuple(g.detach() for g in grads[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients(device: str, dtype: torch.dtype) -> None:
    """Sums over time for gamma are kept in float32: within two roundings in half precision of the float64 gradient."""
    shape = (3, 50)
    for kind, gamma_dtype in itertools.product(("row", "step"), (dtype, torch.float32)):
        inputs = leaves(kind, dtype, device, shape, gamma_dtype=gamma_dtype)
        exact = [t.detach().double().requires_grad_() for t in inputs]
        got = torch.autograd.grad(discounted_cumsum(*inputs[:2], initial=inputs[2]).sum(), inputs)
        expected = torch.autograd.grad(discounted_cumsum(*exact[:2], initial=exact[2]).sum(), exact)
        size = torch.autograd.grad(
            discounted_cumsum(exact[0].abs(), exact[1].abs(), initial=exact[2].abs()).sum(), exact[1]
        )[0]
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.dtype == inputs[index].dtype
            scale = size.abs() if index == 1 else b.abs() + 1
            assert bool(((a.double() - b).abs() <= 4 * torch.finfo(dtype).eps * scale).all())


def test_frozen_arguments_get_nothing(device: str) -> None:
    for wanted in itertools.product((True, False), repeat=3):
        inputs = leaves("row", torch.float64, device)
        for tensor, keep in zip(inputs, wanted, strict=True):
            tensor.requires_grad_(keep)
        y = discounted_cumsum(*inputs[:2], initial=inputs[2])
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
        assert [t.grad is not None for t in inputs] == list(wanted)


def test_no_graph_without_grad_mode(device: str) -> None:
    inputs = leaves("row", torch.float64, device)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not discounted_cumsum(*inputs[:2], initial=inputs[2]).requires_grad
            assert not torch.ops.dcs.discounted_cumsum.Tensor(*inputs[:2]).requires_grad


def test_dual_numbers_of_one_argument(device: str) -> None:
    inputs = [t.detach() for t in leaves("row", torch.float64, device)]
    for index, window in itertools.product(range(3), (None, 3)):
        results = []
        for function in (discounted_cumsum, differentiable_oracle):
            with forward_ad.dual_level():
                args = list(inputs)
                args[index] = forward_ad.make_dual(inputs[index], torch.ones_like(inputs[index]))
                dual = function(args[0], args[1], initial=args[2], window=window)
                results.append(tuple(forward_ad.unpack_dual(dual)))
        torch.testing.assert_close(results[0], results[1])


def test_nan_behind_a_reset_stays_out_of_gradients(device: str) -> None:
    x = make((1, 6), torch.float64, device)
    x[0, 5] = float("nan")
    x.requires_grad_()
    reset = torch.zeros(1, 6, dtype=torch.bool, device=device)
    reset[0, 3] = True
    for kind, window in itertools.product(("row", "step"), (None, 3)):
        gamma = make_gamma(kind, (1, 6), 1, torch.float64, device).requires_grad_()
        y = discounted_cumsum(x, gamma, reset=reset, window=window)
        grad_x, grad_gamma = torch.autograd.grad(y[:, :4].sum(), (x, gamma))
        assert bool(grad_x.isfinite().all())
        if kind == "step":
            assert bool(grad_gamma[0, :3].isfinite().all())
            assert grad_gamma[0, 3].item() == 0
