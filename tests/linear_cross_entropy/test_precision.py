"""Rounding and special values. Budgets are multiples of the error that torch's own computation in the same dtype makes,
against float64 (`assert_within_budget`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy, linear_log_probs

from linear_cross_entropy.oracle import assert_within_budget, gradients, leaf, make, oracle, relative_error

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32]


def three(
    x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, factor: float = 1.0, **options: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(loss, gradients of x, w and b) of the op, of torch in the same dtype, and of torch in float64."""
    results = []
    for kind in ("op", "eager", "exact"):
        leaves = [leaf(t.double() if kind == "exact" else t) for t in (x, w, b) if t is not None]
        call = dict(options)
        if b is not None:
            call["linear_bias"] = leaves[2]
        if kind == "op":
            loss = linear_cross_entropy(leaves[0], leaves[1], y, **call)
        else:
            call.pop("memory_budget", None), call.pop("accumulate_dtype", None)
            loss = oracle(leaves[0], leaves[1], y, **call)[0]
        results.append([loss, *gradients((loss * factor).sum(), *leaves)])
    return results[0], results[1], results[2]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "z_loss": {"z_loss": 0.01},
    "everything": {"label_smoothing": 0.1, "softcap": 8.0, "z_loss": 1e-3, "logit_scale": 0.5, "shift": True},
}


@pytest.mark.parametrize("accumulate_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [20, 50, 200])
@pytest.mark.parametrize("eps", [None, 2.0**-12])
def test_whatever_memory_held(
    device: str, eps: float | None, chunk: int, accumulate_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all fresh memory, also between the rows of logits, which a CPU's products may read."""
    problem = make((2, 60), 32, 101, torch.bfloat16, device)
    limits: dict[str, Any] = {"memory_budget": 101 * 2 * chunk}
    if eps is None:
        limits["accumulate_dtype"] = accumulate_dtype
    new_empty = Tensor.new_empty

    def with_nan(tensor: Tensor, *size: Any, **options: Any) -> Tensor:
        room = new_empty(tensor, *size, **options)
        return room.fill_(torch.nan) if room.is_floating_point() else room

    monkeypatch.setattr(Tensor, "new_empty", with_nan)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    loss = linear_cross_entropy(*leaves, problem.target, grad_filter_eps=eps, **limits)
    assert all(values.isfinite().all() for values in (loss, *gradients(loss, *leaves)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: str, name: str, reduction: str, dtype: torch.dtype) -> None:
    problem = make((2, 60), 32, 101, dtype, device)
    x, w, b = problem.input, problem.linear_weight * 0.5, problem.linear_bias
    options = OPTIONS[name] | {"reduction": reduction, "memory_budget": 101 * 4 * 50}
    results = three(x, w, b, problem.target, **options)
    assert_within_budget(*results, factors=(1.2, 1.2, 1.2, 1.2) if reduction == "none" else (None, 1.2, 1.2, 1.2))
    if reduction != "none":
        # One number may come out of eager without an error. Its rows' errors, all of one sign, are its budget.
        _, eager, exact = three(x, w, b, problem.target, **options | {"reduction": "none"})
        budget = (
            1.2 * float((eager[0] - exact[0]).detach().abs().sum() / exact[0].detach().sum())
            + torch.finfo(torch.float32).eps
        )
        assert relative_error(results[0][0], results[2][0]) <= budget


@pytest.mark.parametrize("chunks", [1, 4, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.each_value
def test_the_weight_gradient_at_any_number_of_chunks(device: str, dtype: torch.dtype, chunks: int) -> None:
    problem = make((512,), 16, 72, dtype, device)
    options = {"memory_budget": 72 * dtype.itemsize * (512 // chunks)}
    results = three(problem.input, problem.linear_weight, None, problem.target, **options)
    assert_within_budget(*results, factors=(None, 1.2, 1.1))
    if dtype == torch.bfloat16:
        results = three(
            problem.input, problem.linear_weight, None, problem.target, accumulate_dtype=torch.float32, **options
        )
        assert_within_budget(*results, factors=(None, 1.2, 1.1))


def test_the_compact_plan(device: str) -> None:
    """bfloat16 across chunks: up to 1.6 times one GEMM's error at four chunks, and really coarser than the default."""
    problem = make((512,), 16, 72, torch.bfloat16, device)
    options = {"memory_budget": 72 * 2 * 128, "accumulate_dtype": torch.bfloat16}
    got, eager, exact = three(problem.input, problem.linear_weight, None, problem.target, **options)
    assert_within_budget(got, eager, exact, factors=(None, 1.2, 1.6))
    default = three(problem.input, problem.linear_weight, None, problem.target, memory_budget=72 * 2 * 128)[0]
    assert relative_error(got[2], exact[2]) > relative_error(default[2], exact[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_loss_scaling(device: str, dtype: torch.dtype) -> None:
    """A mean over many rows has gradients below float16's smallest number: the scale must find them still there."""
    problem = make((4096,), 8, 32, dtype, device)
    scale = 65536.0
    results = three(problem.input, problem.linear_weight * 0.1, None, problem.target, scale)
    assert_within_budget(*results, factors=(None, 1.2, 1.2))
    assert all(r.dtype == dtype for r in results[0][1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1 / 3, 1000.0])
def test_an_upstream_gradient_costs_one_rounding(device: str, dtype: torch.dtype, factor: float) -> None:
    problem = make((256,), 16, 50, dtype, device)
    results = three(problem.input, problem.linear_weight, None, problem.target, factor)
    # Two roundings of the same size instead of one: the square root of 2.
    assert_within_budget(*results, factors=(None, 1.5, 1.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [95.0, 400.0])
def test_logits_far_apart(device: str, dtype: torch.dtype, spread: float) -> None:
    """The target more than 88 nats below the lse: exp of the difference underflows, or overflows where misplaced."""
    logits = torch.zeros(4, 9)
    logits[:, 3] = spread
    w = logits.new_zeros(9, 9).fill_diagonal_(1)
    x, w = (t.to(dtype=dtype, device=device) for t in (logits, w))
    for target in (0, 3):
        y = torch.full((4,), target, device=device)
        got, _, exact = three(x, w, None, y)
        for value, wanted in zip(got, exact, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("offset", [2.0**24, -(2.0**24)])
def test_a_common_offset(device: str, offset: float) -> None:
    """float32 logits near 2**24 are integers: their differences are exact, and so must be what is made of them."""
    logits = torch.randint(-3, 4, (6, 11)).float() * 2
    y = torch.randint(11, (6,))
    x = (logits + offset).to(device).requires_grad_()
    w = torch.eye(11, device=device)
    loss = linear_cross_entropy(x, w, y.to(device), reduction="none")
    expected = functional.cross_entropy(logits.double(), y, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-6, atol=1e-7)
    (grad,) = gradients(loss.sum(), x)
    wanted = logits.double().softmax(1) - functional.one_hot(y, 11)
    torch.testing.assert_close(grad.cpu().double(), wanted, rtol=1e-6, atol=1e-7)
    log_probs, entropy = linear_log_probs(x, w, y.to(device))
    torch.testing.assert_close(log_probs.cpu().double(), -expected, rtol=1e-6, atol=1e-7)
    p = logits.double().softmax(1)
    torch.testing.assert_close(entropy.cpu().double(), -(p * p.log()).sum(1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [5.0, 12.0, 16.0])
def test_certain_targets(device: str, dtype: torch.dtype, gap: float) -> None:
    """p_t - 1 at p_t near 1: formed from the logits, not as the difference of rounded numbers."""
    classes = 8
    w = torch.eye(classes, dtype=dtype, device=device)
    x = leaf(w * gap)
    y = torch.arange(classes, device=device)
    (grad,) = gradients(linear_cross_entropy(x, w, y, reduction="sum"), x)
    exact = torch.expm1((w * gap).double().log_softmax(1).diagonal())
    # The sum of the row's exponentials, near 1, is rounded once a term.
    absolute = classes * torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(grad.diagonal().double(), exact, rtol=torch.finfo(dtype).eps, atol=absolute)


@pytest.mark.parametrize("where", ["input", "linear_weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf(device: str, value: float, where: str) -> None:
    problem = make((4,), 3, 5, torch.float32, device, ignored=0.0)
    x, w = problem.input.clone(), problem.linear_weight.clone()
    (x if where == "input" else w)[1, 1] = value
    got, eager, _ = three(x, w, None, problem.target, reduction="none")
    for a, b in zip(got, eager, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        finite = b.isfinite()
        torch.testing.assert_close(a[finite], b[finite])


def test_minus_infinity_masks_classes(device: str) -> None:
    """A bias of -inf takes classes out: p = 0, no gradient, no nan, the entropy of the others."""
    problem = make((4,), 3, 5, torch.float64, device, ignored=0.0)
    b = problem.linear_bias.clone()
    b[3:] = -torch.inf
    x = leaf(problem.input)
    log_probs, entropy = linear_log_probs(x, problem.linear_weight, problem.target % 3, linear_bias=b)
    few = linear_log_probs(x, problem.linear_weight[:3], problem.target % 3, linear_bias=b[:3])
    torch.testing.assert_close((log_probs, entropy), few)
    torch.testing.assert_close(gradients((log_probs + entropy).sum(), x), gradients((few[0] + few[1]).sum(), x))


def test_a_masked_target(device: str) -> None:
    """The loss of an impossible target is inf, its gradient finite, as F.cross_entropy's."""
    problem = make((4,), 3, 5, torch.float32, device, ignored=0.0)
    b = problem.linear_bias.clone()
    b[3:] = -torch.inf
    got, eager, _ = three(problem.input, problem.linear_weight, b, torch.full_like(problem.target, 4))
    torch.testing.assert_close(got, eager, equal_nan=True)


def test_deterministic(device: str) -> None:
    problem = make((200,), 16, 300, torch.bfloat16, device)
    first, second = (
        three(problem.input, problem.linear_weight, problem.linear_bias, problem.target, memory_budget=40_000)[0]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_flat_tails_of_half_rows(device: str) -> None:
    """Probabilities of 5e-9, below float16's smallest number, make up a part of the gradient."""
    rows, classes, features = 32, 60_000, 16
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(classes, features, generator=generator) * 0.05 + 0.3
    target = torch.full((rows,), 7)
    w[7] += 2.0
    x = torch.full((rows, features), 0.55)
    x[:, 0] += torch.randn(rows, generator=generator) * 0.01
    x, w, target = x.half().to(device), w.half().to(device), target.to(device)
    results = []
    for call, dtype in ((linear_cross_entropy, torch.float16), (oracle, torch.float16), (oracle, torch.float64)):
        leaves = leaf(x.to(dtype)), leaf(w.to(dtype))
        loss = call(*leaves, target)
        loss = loss[0] if isinstance(loss, tuple) else loss
        results.append(torch.autograd.grad(loss * 65536, leaves))
    got, eager, exact = results
    for value, other, reference in zip(got, eager, exact, strict=True):
        assert relative_error(value, reference) < 1.2 * relative_error(other, reference) + 2e-3


HALF_CASES: dict[str, dict[str, Any]] = {
    "probabilities that sum to 64": {"mass": 64.0},
    "probabilities that sum to 3000": {"mass": 3000.0},
    "a head of 200": {"head": 200.0},
    "a head of 10, logit_scale 16": {"head": 10.0, "logit_scale": 16.0},
    "class weights of 300": {"class_weight": 300.0},
    "logit_scale 100": {"head": 0.1, "logit_scale": 100.0},
}


@pytest.mark.parametrize("name", HALF_CASES)
def test_float16_gradients_are_finite_where_torchs_are(device: str, name: str) -> None:
    case = {"mass": None, "head": 1.0, "class_weight": None, "logit_scale": 1.0} | HALF_CASES[name]
    problem = make((64,), 16, 50, torch.float16, device)
    head = torch.where(problem.linear_weight < 0, -case["head"], case["head"]).half()
    weight = None if case["class_weight"] is None else problem.weight * case["class_weight"]
    target = problem.target if case["mass"] is None else problem.probabilities * case["mass"]
    options = {"weight": weight, "logit_scale": case["logit_scale"]}
    got, eager, exact = three(problem.input * 0.01, head, None, target, **options)
    assert all(bool(gradient.isfinite().all()) for gradient in eager[1:])
    # On a CPU a product is rounded, and again where the sum is divided: the square root of 2.
    assert_within_budget(got, eager, exact, factors=(None, 1.5, 1.5))
