"""Filtered gradients (`grad_filter_eps`) where they are exact: rows, sums and losses that the filter leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy import filter as gradient_filter

from linear_cross_entropy.filter.oracle import BF16, CLASSES, EPS, F32, F64, budget_of, dense, operands
from linear_cross_entropy.oracle import assert_within_budget, gradients, leaf, oracle, relative_error


@pytest.fixture(autouse=True)
def _small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of these tests has not the classes for an eps of 16/V."""
    monkeypatch.setattr(gradient_filter, "LEAST_ODDS", 1)


def test_rows_keep_their_sums(device: str) -> None:
    """The bias' gradient summed is that of the exact rows: 0, but for z_loss and softcap."""
    x, w, target, bias, weight = operands(dtype=F32, device=device)
    for options in ({}, {"z_loss": 0.3}, {"softcap": 20.0, "z_loss": 0.3}, {"label_smoothing": 0.2, "weight": weight}):
        sums = []
        for eps in (None, EPS):
            b = leaf(bias)
            linear_cross_entropy(
                x, w, target, linear_bias=b, reduction="sum", grad_filter_eps=eps, memory_budget=1, **options
            ).backward()
            sums.append(float(b.grad.double().sum()))
        assert sums[1] == pytest.approx(sums[0], abs=1e-6 * x.size(0))


@pytest.mark.parametrize("rows_alike", [False, True])
def test_a_shared_tail_is_closer_than_none(device: str, rows_alike: bool) -> None:
    """Rows of one text are alike in their tails; where they are not, sharing is better still than dropping."""
    x, w, target, _, _ = operands(256, F64, device)
    if rows_alike:
        x = x + 2 * w.mean(0) / w.mean(0).norm()
    exact, _ = dense(x, w, target, 64, 0.0)
    shared, _ = dense(x, w, target, 64, EPS)
    dropped, _ = dense(x, w, target, 64, EPS, share=False)
    leaves = leaf(x.float()), leaf(w.float())
    loss = linear_cross_entropy(*leaves, target, grad_filter_eps=EPS, memory_budget=budget_of(64))
    for index, gradient in enumerate(gradients(loss, *leaves)):
        error = relative_error(gradient, exact[index])
        assert error == pytest.approx(relative_error(shared[index], exact[index]), rel=1e-2)
        assert error < relative_error(dropped[index], exact[index]) / 2


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1}], ids=str)
def test_rows_of_the_largest_tails_are_exact(device: str, options: dict[str, Any]) -> None:
    """One in 32: here of 128 rows, two of them of one group and all but one of one chunk."""
    x, w, target, _, _ = operands(128, device=device)
    target = target.clamp(min=0)
    flat = torch.tensor([3, 17, 40, 100], device=device)
    x[flat] *= 0.2
    found = []
    for eps in (None, EPS):
        leaf_x = leaf(x)
        linear_cross_entropy(
            leaf_x, w, target, reduction="sum", grad_filter_eps=eps, memory_budget=budget_of(64), **options
        ).backward()
        found.append(leaf_x.grad)
    errors = (found[1] - found[0]).norm(dim=1) / found[0].norm(dim=1)
    # float32's rounding of a row; the others differ from their groups.
    assert float(errors[flat].max()) < 1e-5
    others = torch.ones(128, dtype=torch.bool, device=device).index_fill_(0, flat, False)
    assert float(errors[others].median()) > 1e-3


def test_eps_of_zero_is_exact(device: str) -> None:
    x, w, target, _, _ = operands(device=device)
    found = []
    for eps in (None, 0.0, 0):
        leaves = leaf(x), leaf(w)
        found.append(gradients(linear_cross_entropy(*leaves, target, grad_filter_eps=eps), *leaves))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_flat_rows_are_exact(device: str, dtype: torch.dtype) -> None:
    """Nearly all of the columns alive: all of them are."""
    x, w, target, bias, weight = operands(dtype=dtype, device=device)
    x = x / 16
    for options in ({}, {"label_smoothing": 0.1, "weight": weight}, {"softcap": 5.0, "z_loss": 0.1}):
        found = []
        for run, wide in ((linear_cross_entropy, dtype), (oracle, dtype), (oracle, F64)):
            leaves = [leaf(t.to(wide)) for t in (x, w, bias)]
            more = {"grad_filter_eps": 1 / w.size(0), "memory_budget": budget_of(64, dtype)} if not found else {}
            loss = run(*leaves[:2], target, linear_bias=leaves[2], **options, **more)
            found.append(gradients(loss[0] if isinstance(loss, tuple) else loss, *leaves))
        assert_within_budget(*found, (1.5, 1.5, 1.5))


def test_where_the_gradient_is_exact(device: str) -> None:
    x, w, target, _, _ = operands(device=device)
    probabilities = torch.randn(x.size(0), CLASSES, device=device).softmax(-1)
    for y, options in ((probabilities, {}), (target, {"softcap": 20.0, "label_smoothing": 0.1})):
        found = []
        for eps in (None, EPS):
            leaves = leaf(x), leaf(w)
            found.append(gradients(linear_cross_entropy(*leaves, y, grad_filter_eps=eps, **options), *leaves))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
