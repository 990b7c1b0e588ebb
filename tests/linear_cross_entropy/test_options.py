"""Every option of linear_cross_entropy against F.linear and F.cross_entropy in float64: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy, linear_log_probs

from linear_cross_entropy.oracle import Problem, gradients, leaf, make, oracle

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_index": {"ignore_index": 3},
    "ignore_index None": {"ignore_index": None},
    "label_smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": 0.7},
    "negative logit_scale": {"logit_scale": -0.7},
    "z_loss": {"z_loss": 0.3},
    "shift": {"shift": True},
    "shift by two": {"shift": 2},
    "linear_bias": {"linear_bias": True},
    "weight": {"weight": True},
    "probabilities": {"probabilities": True},
    "one row at a time": {"memory_budget": 1},
    "a few rows at a time": {"memory_budget": 4 * 13 * 8},
}


def check(problem: Problem, options: dict[str, Any]) -> None:
    options = dict(options)
    by_class = options.pop("probabilities", False)
    target = problem.probabilities if by_class else problem.target
    if options.get("ignore_index") == 3 and not by_class:
        target = torch.where(target < 0, 3, target)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    leaves = [x, w]
    if options.pop("linear_bias", False):
        options["linear_bias"] = leaf(problem.linear_bias)
        leaves.append(options["linear_bias"])
    if options.pop("weight", False):
        options["weight"] = problem.weight
    expected = oracle(x, w, target, **options)
    got = linear_cross_entropy(x, w, target, return_lse=True, return_predictions=True, **options)
    torch.testing.assert_close(got[:2], expected[:2])
    # Of classes that are equal, as those of an expanded linear_weight are, rounding predicts any.
    logits = functional.linear(x, w, options.get("linear_bias"))
    logits = logits[..., : -options["shift"], :] if options.get("shift") else logits
    predicted = [logits.gather(-1, predictions.unsqueeze(-1)) for predictions in (got[2], expected[2])]
    torch.testing.assert_close(*predicted)
    torch.testing.assert_close(linear_cross_entropy(x, w, target, **options), expected[0])
    grad = torch.randn_like(expected[0])
    grad_lse = torch.randn_like(expected[1])
    for outputs, grads in (((0,), [grad]), ((0, 1), [grad, grad_lse]), ((1,), [grad_lse])):
        results = [
            torch.autograd.grad([r[k] for k in outputs], leaves, grads, retain_graph=True, materialize_grads=True)
            for r in (got, expected)
        ]
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_one_by_one(device: str, name: str, reduction: str) -> None:
    check(make(device=device), OPTIONS[name] | {"reduction": reduction})


def test_random_combinations(device: str) -> None:
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis, which draws the cases, is not installed")
    from hypothesis import strategies as st

    cases = st.fixed_dictionaries(
        {
            "reduction": st.sampled_from(["none", "mean", "sum"]),
            "label_smoothing": st.sampled_from([0.0, 0.1]),
            "softcap": st.sampled_from([None, 3.0]),
            "logit_scale": st.sampled_from([1.0, 0.5]),
            "z_loss": st.sampled_from([0.0, 0.2]),
            "shift": st.sampled_from([0, True, 2]),
            "linear_bias": st.booleans(),
            "weight": st.booleans(),
            "probabilities": st.booleans(),
            "memory_budget": st.sampled_from([None, 1, 200, 1000]),
        }
    )

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        options=cases,
        lead=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        features=st.integers(1, 5),
        classes=st.integers(1, 20),
        seed=st.integers(0, 99),
    )
    def run(options: Any, lead: Any, features: int, classes: int, seed: int) -> None:
        if lead[-1] <= options["shift"]:
            lead = [*lead[:-1], options["shift"] + 1]
        # A mean over no valid target is nan, and is tested by itself.
        check(make(lead, features, classes, device=device, seed=seed, ignored=0.0), options)

    run()


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_leading_shapes(device: str, lead: tuple[int, ...], reduction: str) -> None:
    for by_class in (False, True):
        check(make(lead, device=device, ignored=0.0), {"reduction": reduction, "probabilities": by_class})


@pytest.mark.parametrize("lead", [(0,), (0, 5), (2, 0)], ids=str)
def test_no_rows(device: str, lead: tuple[int, ...]) -> None:
    problem = make(lead, device=device)
    for reduction, by_class in ((r, p) for r in ("none", "mean", "sum") for p in (False, True)):
        target = problem.probabilities if by_class else problem.target
        x, w = leaf(problem.input), leaf(problem.linear_weight)
        loss, lse, predictions = linear_cross_entropy(
            x, w, target, reduction=reduction, return_lse=True, return_predictions=True
        )
        expected = torch.zeros(lead, dtype=x.dtype, device=device)
        expected = {"none": expected, "sum": expected.sum(), "mean": expected.mean()}[reduction]
        torch.testing.assert_close(loss, expected, equal_nan=True)
        assert lse.shape == predictions.shape == lead
        grad_x, grad_w = gradients(loss.sum(), x, w)
        assert grad_x.shape == x.shape
        assert torch.equal(grad_w, torch.zeros_like(w))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_row_ignored(device: str, dtype: torch.dtype) -> None:
    """mean is nan, as F.cross_entropy's; the gradients are 0."""
    problem = make(dtype=dtype, device=device, ignored=1.0)
    for reduction in ("none", "mean", "sum"):
        x, w, b = leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)
        loss, lse = linear_cross_entropy(
            x, w, problem.target, linear_bias=b, reduction=reduction, z_loss=0.1, return_lse=True
        )
        assert bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())
        assert bool((lse == 0).all())
        for gradient, operand in zip(gradients(loss.sum(), x, w, b), (x, w, b), strict=True):
            assert torch.equal(gradient, torch.zeros_like(operand))


@pytest.mark.parametrize("weight", [[0.0, 0.0], [0.0, 1.0], [1.0, -1.0], [torch.nan, 1.0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_class_weights_that_sum_to_0(device: str, dtype: torch.dtype, weight: list[float]) -> None:
    """Finite where F.cross_entropy is, as in an ignored row of input's gradient; on CPUs nan where it is as well.

    A GPU's product meets infinite terms of both signs in another order, and torch's makes nan of each there.
    """
    problem = make((4,), classes=2, dtype=dtype, device=device, ignored=0.0)
    target = torch.tensor([0, -100, 0 if weight[1] == 1 else 1, -100], device=device)
    x, w, weights = (
        leaf(problem.input),
        leaf(problem.linear_weight),
        torch.tensor(weight, device=device).to(problem.weight),
    )
    losses = (
        linear_cross_entropy(x, w, target, weight=weights),
        functional.cross_entropy(functional.linear(x, w).to(weights), target, weights),
    )
    for results in zip(*([loss, *gradients(loss, x, w)] for loss in losses), strict=True):
        assert torch.equal(results[0].isfinite(), results[1].isfinite())
        assert device == "cuda" or torch.equal(results[0].isnan(), results[1].isnan())
    assert not bool(losses[0].isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_zero_if_empty(device: str, dtype: torch.dtype) -> None:
    """0 with gradients of 0 over no valid target; what it was over some."""
    for ignored in (1.0, 0.3):
        problem = make(dtype=dtype, device=device, ignored=ignored)
        for options in ({}, {"shift": 2}, {"weight": problem.weight, "z_loss": 0.1}):
            results = []
            for zero_if_empty in (True, False):
                x, w = leaf(problem.input), leaf(problem.linear_weight)
                loss = linear_cross_entropy(x, w, problem.target, zero_if_empty=zero_if_empty, **options)
                results.append([loss, *gradients(loss, x, w)])
            if ignored == 1.0:
                assert bool(results[1][0].isnan())
                results[1] = [torch.zeros_like(value) for value in results[1]]
            torch.testing.assert_close(*results, rtol=0, atol=0)
    x = leaf(make((0,), dtype=dtype, device=device).input)
    problem = make((0,), dtype=dtype, device=device)
    for target in (problem.target, problem.probabilities):
        loss = linear_cross_entropy(x, problem.linear_weight, target, zero_if_empty=True)
        assert float(loss.detach()) == 0
        assert gradients(loss, x)[0].shape == x.shape


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_z_loss_by_itself(device: str, reduction: str) -> None:
    problem = make(device=device)
    for options in ({}, {"shift": 2}, {"weight": problem.weight}, {"probabilities": True, "shift": 1}):
        call: dict[str, Any] = {"reduction": reduction} | options
        target = problem.probabilities if call.pop("probabilities", False) else problem.target
        x = leaf(problem.input)
        with_term = linear_cross_entropy(x, problem.linear_weight, target, z_loss=0.3, return_z_loss=True, **call)
        without = linear_cross_entropy(x, problem.linear_weight, target, **call)
        torch.testing.assert_close(with_term[0] - with_term[1], without)
        assert not with_term[1].requires_grad
        expected = oracle(x, problem.linear_weight, target, z_loss=0.3, **call)[0]
        torch.testing.assert_close(gradients(with_term[0].sum(), x), gradients(expected.sum(), x))
    _, lse, term = linear_cross_entropy(*problem[:3], z_loss=0.3, reduction="none", return_lse=True, return_z_loss=True)
    torch.testing.assert_close(term, 0.3 * lse.square())
    empty = torch.full_like(problem.target, -100)
    _, term = linear_cross_entropy(*problem[:2], empty, z_loss=0.3, return_z_loss=True, zero_if_empty=True)
    assert float(term) == 0


def test_one_class(device: str) -> None:
    for options in ({}, {"label_smoothing": 0.2, "z_loss": 0.1}, {"probabilities": True}):
        check(make(classes=1, device=device), {"linear_bias": True, **options})


@pytest.mark.parametrize(("lead", "shift"), [((2, 1), True), ((3, 2), True), ((3, 2), 2), ((2, 4), 3)], ids=str)
def test_shift_with_few_targets(device: str, lead: tuple[int, ...], shift: int) -> None:
    problem = make(lead, device=device, ignored=0.0)
    for reduction in ("none", "sum"):
        check(problem, {"reduction": reduction, "shift": shift})
        check(problem, {"reduction": reduction, "shift": shift, "probabilities": True})


def test_predictions_of_ignored_rows(device: str) -> None:
    problem = make(device=device, ignored=0.5)
    _, predictions = linear_cross_entropy(*problem[:3], return_predictions=True)
    assert torch.equal(predictions, functional.linear(*problem[:2]).argmax(-1))
    assert predictions.dtype == torch.int64


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"logit_scale": 0.3}, {"ignore_index": None}], ids=str)
def test_log_probs(device: str, options: dict[str, Any]) -> None:
    problem = make(device=device)
    x, w, b = leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)
    scale, cap = options.get("logit_scale", 1.0), options.get("softcap")
    z = functional.linear(x, w, b) * scale
    z = z if cap is None else torch.tanh(z / cap) * cap
    log_p = z.log_softmax(-1)
    valid = problem.target >= 0
    expected = (
        torch.where(valid, log_p.gather(-1, problem.target.clamp(0).unsqueeze(-1)).squeeze(-1), 0),
        torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0),
    )
    for budget in (None, 1):
        got = linear_log_probs(x, w, problem.target, linear_bias=b, memory_budget=budget, **options)
        torch.testing.assert_close(got, expected)
        for like in (torch.ones_like, torch.zeros_like, torch.randn_like):
            grads = [like(e) for e in expected]
            results = [torch.autograd.grad(of, (x, w, b), grads, retain_graph=True) for of in (got, expected)]
            torch.testing.assert_close(*results)


LAYOUTS: dict[str, Any] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "offset": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device: str, layout: str) -> None:
    problem = Problem(*map(LAYOUTS[layout], make((4, 6), device=device)))
    for options in ({"reduction": "none"}, {"shift": True}, {"probabilities": True, "label_smoothing": 0.1}):
        check(problem, {"linear_bias": True, "weight": True, "memory_budget": 300, **options})
