"""Gradients of gamma in the kernels of small scans on a GPU, against the CPU's kernels in double."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# Also of as many threads as an H200 has room for, and of more; the last ones of more steps than a cluster has.
SMALL_COLUMNS = (
    (2000, 33), (300, 700), (2100, 3), (12_000, 16), (7, 90, 50), (5058, 91), (2300, 260), (5100, 180), (1000, 1000),
    (16_384, 60), (800, 2500), (60_000, 5), (30_001, 21), (3, 20_000, 7),
)  # fmt: skip


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["row", "step"])
@pytest.mark.parametrize("shape", SMALL_COLUMNS, ids=str)
def test_gradients_of_small_columns(shape: tuple[int, ...], kind: str, dtype: torch.dtype, direction: str) -> None:
    """With resets and initial values, at whose step gamma's gradient has them for the output before."""
    x = torch.randn(shape, device="cuda").to(dtype)
    row = (*shape[:-2], *shape[-1:])
    gamma = torch.empty(shape if kind == "step" else row, device="cuda").uniform_(0.9, 0.9995)
    gamma = gamma.to(dtype) if kind == "step" else gamma
    initial, grad = torch.randn(row, device="cuda").to(dtype), torch.randn(shape, device="cuda").to(dtype)
    reset = torch.rand(shape, device="cuda") < 0.01

    def results(leaves: list[torch.Tensor], reset: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y = discounted_cumsum(leaves[0], leaves[1], dim=-2, direction=direction, initial=leaves[2], reset=reset)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    y, grad_x, grad_gamma, _ = results([x, gamma, initial], reset, grad)
    leaves = [leaf.double().cpu() for leaf in (x, gamma, initial)]
    expected, expected_x, expected_gamma, _ = results(leaves, reset.cpu(), grad.double().cpu())
    eps = torch.finfo(dtype).eps + 1e-6
    assert (y.cpu() - expected).abs().max() <= eps * expected.abs().max()
    assert (grad_x.cpu() - expected_x).abs().max() <= eps * expected_x.abs().max()
    # As of many columns: a term carries the rounding of the output and of the gradient.
    terms = 1 if kind == "step" else shape[-2]
    bound = 8 * eps * terms**0.5 * expected.abs().max() * expected_x.abs().max()
    assert (grad_gamma.cpu().double() - expected_gamma).abs().max() <= bound
    dropped = grad_gamma[reset] if kind == "step" else grad_gamma.new_zeros(1)
    assert not dropped.any()


# Several rows a thread, a warp and a block; one a block and a cluster, whose last block has no element of a first row.
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("shape", [(5000, 5), (3000, 13), (999, 77), (9, 3001), (3, 30_001), (3, 12_287)], ids=str)
def test_gradients_of_small_rows(shape: tuple[int, int], kind: str, dtype: torch.dtype, direction: str) -> None:
    rows, length = shape

    def padded(low: float) -> torch.Tensor:
        return (low + torch.rand(rows, length + 5, device="cuda")).to(dtype)[:, 2:-3]

    gates = torch.rand(1 if kind == "number" else rows, 1, device="cuda") if kind != "step" else padded(0.0)
    gamma = gates.flatten()[0] if kind == "number" else gates
    initial = torch.randn(rows, device="cuda").to(dtype)
    reset, x, grad = torch.rand(shape, device="cuda") < 0.01, padded(-0.5), padded(-0.5)
    choices: list[dict[str, Any]] = [{}, {"initial": initial}, {"reset": reset}, {"initial": initial, "reset": reset}]
    for options in choices:
        leaves = [t.detach().requires_grad_() for t in (x, gamma)]
        on_cpu = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
        exact: dict[str, Any] = {
            name: t.cpu() if t.dtype == torch.bool else t.double().cpu() for name, t in options.items()
        }
        y = discounted_cumsum(*leaves, direction=direction, **options)
        got = torch.autograd.grad(y, leaves, grad)
        expected = discounted_cumsum(*on_cpu, direction=direction, **exact)
        expected_grads = torch.autograd.grad(expected, on_cpu, grad.double().cpu())
        eps = torch.finfo(dtype).eps + 1e-6
        assert (got[0].double().cpu() - expected_grads[0]).abs().max() <= eps * expected_grads[0].abs().max()
        # A sum of n terms carries the roundings of outputs and gradients, each on its own.
        terms = {"number": rows * length, "row": length, "step": 1}[kind]
        saved = max(expected.abs().max(), initial.abs().max().double().cpu())
        bound = 8 * eps * terms**0.5 * saved * expected_grads[0].abs().max()
        assert (got[1].double().cpu() - expected_grads[1]).abs().max() <= bound


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("shape", [(70_001, 2), (501, 83, 3), (90_003, 4), (2_000_003, 2), (6001, 7)], ids=str)
def test_few_steps_with_gaps(shape: tuple[int, ...], kind: str, dtype: torch.dtype, direction: str) -> None:
    """Rows of some steps of a wider tensor, which a thread each takes, and the gradients of all that has them."""
    x = torch.randn(*shape[:-1], shape[-1] + 3, device="cuda").to(dtype)[..., 1:-2]
    gamma = torch.rand(shape if kind == "step" else shape[:-1], device="cuda").to(dtype)
    reset = torch.rand(shape, device="cuda") < 0.1

    def results(x: torch.Tensor, gamma: torch.Tensor, reset: torch.Tensor) -> list[torch.Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in ([x] if kind == "number" else [x, gamma])]
        y = discounted_cumsum(leaves[0], 0.9 if kind == "number" else leaves[1], direction=direction, reset=reset)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    found, expected = results(x, gamma, reset), results(x.double().cpu(), gamma.double().cpu(), reset.cpu())
    eps = torch.finfo(dtype).eps
    for each, wanted in zip(found, expected, strict=True):
        assert (each.cpu().double() - wanted).abs().max() <= 4 * eps * wanted.abs().max()
