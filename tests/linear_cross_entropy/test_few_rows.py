"""Eager losses of few rows, which save the logits' gradient for their backward: what they save, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy import few_rows

from linear_cross_entropy.oracle import Problem, assert_within_budget, gradients, leaf, make, oracle, relative_error
from linear_cross_entropy.test_saved_gradient import OPTIONS, loss_of

BF16 = torch.bfloat16
ROWS, FEATURES = 30, 48
CLASSES = (2 * FEATURES + 5, 37)


@pytest.fixture(autouse=True)
def _cpus_leave_no_rows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a CPU would, and form the gradients in forward; the operations are the same on every device."""
    monkeypatch.setattr(few_rows, "compacts", lambda *_: None)


def saved_numbers(loss: Tensor) -> set[int]:
    """Of elements, of what the node of the loss keeps."""
    node: Any = loss.grad_fn
    return {tensor.numel() for tensor in node.saved_tensors if tensor is not None}


def by_each(problem: Problem, options: dict[str, Any], dtype: torch.dtype, upstream: float) -> list[tuple[Tensor, ...]]:
    """The gradients of twice the loss: of ours and of torch's own in dtype, and the exact ones."""
    found = []
    for function, of in ((linear_cross_entropy, dtype), (oracle, dtype), (oracle, torch.float64)):
        leaves = [leaf(tensor.to(of)) for tensor in (problem.input, problem.linear_weight, problem.linear_bias)]
        loss = loss_of(problem, options, function)(*leaves)
        found.append(gradients(loss, *leaves, grad=torch.full_like(loss, upstream)))
    return found


@pytest.mark.parametrize("upstream", [1.0, -0.3])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_value
def test_gradients(device: str, name: str, classes: int, dtype: torch.dtype, upstream: float) -> None:
    ignore_index = OPTIONS[name].get("ignore_index", -100)
    problem = make((3, ROWS // 3), FEATURES, classes, dtype, device, ignore_index=ignore_index)
    operands = problem.input, problem.linear_weight, problem.linear_bias
    found = by_each(problem, OPTIONS[name], dtype, upstream)
    assert [tensor.dtype for tensor in found[0]] == [dtype] * 3
    assert [tensor.shape for tensor in found[0]] == [tensor.shape for tensor in operands]
    assert all(tensor.is_contiguous() for tensor in found[0][:2])
    count = 3 if "linear_bias" in OPTIONS[name] else 2
    if dtype == torch.float64:  # the oracle's own roundings: sums of up to 101 terms, a softmax and two factors
        budget = 101 * torch.finfo(dtype).eps
        assert all(relative_error(a, b) <= budget for a, b in zip(found[0][:count], found[2][:count], strict=True))
        return
    assert_within_budget(*(values[:count] for values in found), factors=(1.5,) * count)


@pytest.mark.parametrize("classes", CLASSES)
def test_what_is_saved(device: str, classes: int) -> None:
    """The gradient of the logits and the operands; two backwards give the same, and a third one may overwrite it."""
    problem = make((ROWS,), FEATURES, classes, BF16, device)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    loss = linear_cross_entropy(*leaves, problem.target)
    assert saved_numbers(loss) == {ROWS * FEATURES, classes * FEATURES, ROWS, ROWS * classes}
    upstream = torch.tensor(0.7, device=device)
    first, second = (torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for _ in range(2))
    for others in (second, torch.autograd.grad(loss, leaves, upstream)):
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))


REFUSED: dict[str, dict[str, Any]] = {
    "filtered": {"grad_filter_eps": 1e-3},
    "a budget for fewer rows": {"memory_budget": 1},
    "float32 logits": {"logits_dtype": torch.float32},
    "few classes": {},
}


@pytest.mark.parametrize(
    "name", [*REFUSED, "float16 on a CPU", "more rows than features", "frozen weight", "packed by hooks"]
)
def test_others_form_them_in_forward(device: str, name: str) -> None:
    rows, classes = FEATURES + 1 if name == "more rows than features" else ROWS, 2 if name == "few classes" else 101
    is_half = name == "float16 on a CPU"
    problem = make((rows,), FEATURES, classes, torch.float16 if is_half else BF16, "cpu" if is_half else device)
    w = problem.linear_weight.requires_grad_(name != "frozen weight")
    if name == "packed by hooks":
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
            linear_cross_entropy(leaf(problem.input), w, problem.target)
        assert (rows, classes) not in shapes
        return
    loss = linear_cross_entropy(leaf(problem.input), w, problem.target, **REFUSED.get(name, {}))
    assert rows * classes not in saved_numbers(loss)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_some_gradients(device: str, needs: tuple[bool, bool]) -> None:
    problem = make((ROWS,), FEATURES, 101, torch.float64, device)
    x, w = problem.input.requires_grad_(needs[0]), problem.linear_weight.requires_grad_(needs[1])
    leaves = [tensor for tensor in (x, w) if tensor.requires_grad]
    found = gradients(linear_cross_entropy(x, w, problem.target), *leaves)
    torch.testing.assert_close(found, gradients(oracle(x, w, problem.target)[0], *leaves), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_many_upstream_gradients_at_once(device: str, dtype: torch.dtype) -> None:
    problem = half_problem(device)
    leaves = leaves_of(problem, dtype)
    many = torch.tensor([1.0, -0.5, 3.0], dtype=torch.promote_types(dtype, torch.float32), device=device)
    found = torch.autograd.grad(linear_cross_entropy(*leaves, problem.target), leaves, many, is_grads_batched=True)
    one = gradients(linear_cross_entropy(*leaves, problem.target), *leaves)
    for batch, single in zip(found, one, strict=True):
        budget = 2**-10 if dtype == torch.float16 else 1e-12
        assert relative_error(batch, many.view(-1, 1, 1) * single) <= budget


def test_second_derivatives_and_the_lse(device: str) -> None:
    """The saved gradient is of the loss alone, and has no derivative: then all is made again."""
    problem = make((6,), 8, 11, torch.float64, device)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]

    def penalty(function: Any, **keywords: Any) -> list[Tensor]:
        loss, lse, *_ = function(*leaves, problem.target, **keywords)
        first = torch.autograd.grad(loss + lse.square().sum(), leaves, create_graph=True)
        return gradients(sum(gradient.square().sum() for gradient in first), *leaves)

    torch.testing.assert_close(penalty(linear_cross_entropy, return_lse=True), penalty(oracle))


HALF_ROWS, HALF_FEATURES, HALF_CLASSES = 100, 128, 2000


def half_problem(device: str, rows: int = HALF_ROWS, **options: Any) -> Problem:
    """As at the start of a training: logits near 0, and so rows' gradients near 1."""
    problem = make((rows,), HALF_FEATURES, HALF_CLASSES, torch.float16, device, **options)
    return problem._replace(input=0.1 * problem.input, linear_weight=0.02 * problem.linear_weight)


def leaves_of(problem: Problem, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [leaf(problem.input.to(dtype)), leaf(problem.linear_weight.to(dtype))]


@pytest.mark.parametrize("upstream", [2.0**20, 2.0**16, 1.0])
@pytest.mark.parametrize("rows", [64, HALF_ROWS])
def test_the_range_of_float16(device: str, rows: int, upstream: float) -> None:
    """In range with the scales of a GradScaler, and nearer to the exact gradients than those in float16 alone."""
    problem = half_problem(device, rows, ignored=0.0)
    saved = saved_numbers(linear_cross_entropy(*leaves_of(problem), problem.target))
    assert (rows * HALF_CLASSES in saved) == (device == "cuda")
    found, eager, exact = (values[:2] for values in by_each(problem, {}, torch.float16, upstream / 2))
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    if upstream == 1:
        assert_within_budget(found, eager, exact, factors=(1.5, 1.5))
    assert all(relative_error(*pair) <= 2**-9 for pair in zip(found, exact, strict=True))


@pytest.mark.parametrize("upstream", [1.0, -0.3])
@pytest.mark.parametrize("name", OPTIONS)
def test_float16_by_the_saved_gradient(
    device: str, name: str, upstream: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device, with all options: its range holds upstream gradients near 1."""
    of_saved, calls = few_rows.gradients_of_saved, []
    monkeypatch.setattr(few_rows, "saves_logits_gradient", lambda *_: True)
    monkeypatch.setattr(few_rows, "gradients_of_saved", lambda *a, **k: calls.append(a) or of_saved(*a, **k))
    ignore_index = OPTIONS[name].get("ignore_index", -100)
    problem = make((HALF_ROWS,), HALF_FEATURES, 101, torch.float16, device, ignore_index=ignore_index)
    found = by_each(problem, OPTIONS[name], torch.float16, upstream)
    assert len(calls) == 1
    count = 3 if "linear_bias" in OPTIONS[name] else 2
    assert_within_budget(*(values[:count] for values in found), factors=(1.5,) * count)


HALF_REFUSED: dict[str, dict[str, Any]] = {
    "a sum": {"reduction": "sum"},
    "class weights": {"weight": torch.ones(HALF_CLASSES)},
    "large logits": {"logit_scale": 20.0},
    "z-loss": {"z_loss": 1e-4},
}


@pytest.mark.parametrize("name", [*HALF_REFUSED, "few rows"])
def test_float16_whose_range_is_not_known(device: str, name: str) -> None:
    """All is formed in forward, in float32."""
    problem = half_problem(device, 63 if name == "few rows" else HALF_ROWS)
    leaves = leaves_of(problem)
    options = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in HALF_REFUSED.get(name, {}).items()
    }
    loss = linear_cross_entropy(*leaves, problem.target, **options)
    assert problem.target.numel() * HALF_CLASSES not in saved_numbers(loss)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(loss, *leaves))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("upstream", [0.0, math.inf, math.nan])
def test_any_upstream(device: str, upstream: float, dtype: torch.dtype) -> None:
    problem = half_problem(device, ignored=0.0)
    leaves = leaves_of(problem, dtype)
    grad = torch.tensor(upstream, device=device)
    for gradient in gradients(linear_cross_entropy(*leaves, problem.target), *leaves, grad=grad):
        assert bool((gradient == 0).all()) if upstream == 0 else not bool(gradient.isfinite().any())


@pytest.mark.parametrize("classes", CLASSES)
def test_an_upstream_that_has_a_sign_beside_it(device: str, classes: int) -> None:
    """Such a tensor is not what its memory says; nor is the input's layout what the rows' is."""
    problem = make((ROWS,), FEATURES, classes, torch.float64, device)
    x = leaf(problem.input.t().contiguous().t())
    w = leaf(problem.linear_weight)
    upstream = torch.tensor(0.3, dtype=torch.float64, device=device)
    found = gradients(linear_cross_entropy(x, w, problem.target), x, w, grad=torch._neg_view(upstream))
    exact = gradients(oracle(x, w, problem.target)[0], x, w, grad=-upstream)
    torch.testing.assert_close(found, exact)


def test_products_that_are_in_range_where_factors_are_not(device: str) -> None:
    """input times the upstream gradient would be infinite, and 0 times that NaN."""
    x, w = torch.zeros(2, 16, device=device), torch.zeros(50, 16, device=device)
    x[0, 0], x[1], w[0, 0] = 1e20, 1.0, 1.0
    target, upstream = torch.tensor([0, 1], device=device), torch.tensor(1e19, device=device)
    leaves = [leaf(x), leaf(w)]
    found = gradients(linear_cross_entropy(*leaves, target), *leaves, grad=upstream)
    torch.testing.assert_close(found, gradients(oracle(*leaves, target)[0], *leaves, grad=upstream))


def test_a_backward_without_memory_may_be_tried_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make((ROWS,), FEATURES, 37, BF16, device)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    loss = linear_cross_entropy(*leaves, problem.target)
    upstream = torch.tensor(0.5, device=device)
    exact = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "ExactGradients", fails)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(loss, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, leaves, upstream), exact, strict=True))
