"""The reference of `dcs::_cross_entropy_rows_` against autograd over float64 logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.linear_cross_entropy.loss import Options, cross_entropy
from torch_dcs_ops.reference.linear_cross_entropy.rows import RowsCall, cross_entropy_rows_, row_dtype

from linear_cross_entropy.oracle import make

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def expected(
    logits: Tensor, target: Tensor, bias: Any, weight: Any, grads: Any, options: Options
) -> tuple[list[Tensor], Tensor]:
    """(loss, lse, predictions, entropy) and the gradient, in float64."""
    z = logits.detach().double().clone().requires_grad_()
    bias, weight = (None if t is None else t.double() for t in (bias, weight))
    results = cross_entropy(z if bias is None else z + bias, target, weight, options)
    total = sum(
        (g.double() * r).sum()
        for g, r in zip(grads, (results[0], results[1], results[3]), strict=True)
        if g is not None
    )
    (gradient,) = torch.autograd.grad(total, z)  # type: ignore[arg-type]
    return [r.detach() for r in results], gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 31, 1000])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.each_pair
def test_rows(device: str, by_class: bool, classes: int, dtype: torch.dtype) -> None:
    rows = 7
    problem = make((rows,), 3, classes, dtype, device)
    target = problem.probabilities if by_class else problem.target
    wide = row_dtype(dtype)
    for smoothing, softcap, scale, z_loss in itertools.product((0.0, 0.1), (None, 4.0), (1.0, 0.5), (0.0, 0.1)):
        for full in (False, True):
            options = Options("none", -100, smoothing, softcap, scale, z_loss)
            bias, weight = (problem.linear_bias.to(wide), problem.weight) if full else (None, None)
            grads = [torch.randn(rows, dtype=wide, device=device) for _ in range(3)] if full else [None] * 3
            buffer = torch.full((rows, classes + 5), 7.0, dtype=dtype, device=device)
            logits = buffer[:, :classes]
            logits.copy_(torch.randn(rows, classes, dtype=torch.float64) * 3)
            results, gradient = expected(
                logits, target, bias, weight, grads if full else [torch.ones(rows, device=device), None, None], options
            )
            call = RowsCall(
                logits, target, bias, weight, *grads, -100, smoothing, softcap or 0.0, scale, z_loss, True, True, True
            )
            outputs = cross_entropy_rows_(call)
            for got, want in zip(outputs, results, strict=True):
                torch.testing.assert_close(
                    got.to(want.dtype), want, rtol=2e-5 if wide != want.dtype else 1e-9, atol=2e-5
                )
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                logits.double(), gradient, rtol=tolerance, atol=max(tolerance, 2e-6) * float(gradient.abs().max())
            )
            assert bool((buffer[:, classes:] == 7).all()), "written beyond the row"


def test_without_gradient_logits_stay(device: str) -> None:
    logits = torch.randn(4, 9, device=device)
    before = logits.clone()
    target = torch.tensor([0, 8, -100, 3], device=device)
    outputs = cross_entropy_rows_(RowsCall(logits, target))
    assert torch.equal(logits, before)
    assert [o.numel() for o in outputs] == [4, 4, 0, 0]
    assert outputs[0][2] == outputs[1][2] == 0


def test_one_gradient_for_all_rows(device: str) -> None:
    logits = torch.randn(4, 9, device=device)
    target = torch.tensor([0, 8, -100, 3], device=device)
    results = []
    for grad in (torch.full((1,), 0.3, device=device), torch.full((4,), 0.3, device=device)):
        copy = logits.clone()
        cross_entropy_rows_(RowsCall(copy, target, None, None, grad, grad, grad, gradient=True))
        results.append(copy)
    assert torch.equal(*results)
    assert bool((results[0][2] == 0).all())


def test_ignored_rows_are_overwritten_whatever_they_hold(device: str) -> None:
    logits = torch.full((3, 9), torch.nan, device=device)
    target = torch.full((3,), -100, device=device)
    call = RowsCall(logits, target, label_smoothing=0.1, z_loss=0.1, gradient=True, predictions=True, entropy=True)
    loss, lse, _, entropy = cross_entropy_rows_(call)
    for tensor in (logits, loss, lse, entropy):
        assert bool((tensor == 0).all())


def test_targets_are_checked_before_anything_is_written() -> None:
    logits = torch.randn(4, 9)
    before = logits.clone()
    with pytest.raises((IndexError, RuntimeError), match="target must be in"):
        cross_entropy_rows_(RowsCall(logits, torch.tensor([0, 1, 2, 9]), gradient=True))
    assert torch.equal(logits, before)
