"""Backward passes of linear_cross_entropy: orders of derivative, what is formed when, who may see the buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcs_ops import linear_cross_entropy, linear_log_probs

from linear_cross_entropy.oracle import Problem, gradients, leaf, make, oracle

EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 4.0, "logit_scale": 0.8, "z_loss": 0.1}


class Recorder(TorchDispatchMode):
    """The private ops that ran, with which of the need_* arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[bool, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if name.startswith("_linear_cross_entropy"):
            needs = args[-5:-2] if name.endswith("forward") else args[-3:]
            self.calls.append((name.rsplit("_", 1)[1], tuple(needs)))
        return function(*args, **(kwargs or {}))


def leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_numerical_derivatives(device: str, reduction: str) -> None:
    problem = make((3,), 4, 5, device=device)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return linear_cross_entropy(
            x, w, problem.target, linear_bias=b, weight=problem.weight, reduction=reduction, return_lse=True,
            memory_budget=80, **EVERYTHING,
        )  # fmt: skip

    assert gradcheck(f, leaves(problem), check_batched_grad=True)
    assert gradgradcheck(f, leaves(problem))


def test_numerical_derivatives_of_log_probs(device: str) -> None:
    problem = make((3,), 4, 5, device=device)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return linear_log_probs(x, w, problem.target, linear_bias=b, softcap=4.0, logit_scale=0.8)

    assert gradcheck(f, leaves(problem), check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(f, leaves(problem))


def test_numerical_derivatives_in_forward_mode(device: str) -> None:
    problem = make((3,), 4, 5, device=device)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return linear_cross_entropy(x, w, problem.target, linear_bias=b, return_lse=True, **EVERYTHING)

    assert gradcheck(f, leaves(problem), check_forward_ad=True, check_backward_ad=False)
    assert gradgradcheck(f, leaves(problem), check_fwd_over_rev=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_class_probabilities_and_class_weights_have_gradients(device: str, reduction: str) -> None:
    problem = make((3,), 4, 5, device=device)

    def f(x: Tensor, q: Tensor, weight: Tensor) -> Any:
        return linear_cross_entropy(
            x, problem.linear_weight, q, weight=weight, reduction=reduction, label_smoothing=0.1
        )

    operands = (leaf(problem.input), leaf(problem.probabilities), leaf(problem.weight))
    assert gradcheck(f, operands)
    assert gradgradcheck(f, operands)


def test_third_derivatives(device: str) -> None:
    problem = make((3,), 4, 5, device=device)
    results = []
    for f in (lambda *a: linear_cross_entropy(*a, **EVERYTHING), lambda *a: oracle(*a, **EVERYTHING)[0]):
        x, w = leaf(problem.input), leaf(problem.linear_weight)
        value = f(x, w, problem.target)
        for _ in range(3):
            value = sum(g.pow(2).sum() for g in torch.autograd.grad(value, (x, w), create_graph=True))
        results.append(gradients(value, x, w))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_what_is_needed_is_formed(device: str, reduction: str, frozen: tuple[int, ...]) -> None:
    problem = make(device=device)
    operands = [problem.input, problem.linear_weight, problem.linear_bias]
    needs = tuple(index not in frozen for index in range(3))
    operands = [leaf(t) if need else t for t, need in zip(operands, needs, strict=True)]
    x, w, b = operands
    with Recorder() as recorder:
        loss = linear_cross_entropy(x, w, problem.target, linear_bias=b, reduction=reduction)
        expected = oracle(x, w, problem.target, linear_bias=b, reduction=reduction)[0]
        wanted = [t for t in operands if t.requires_grad]
        grad = torch.randn_like(expected)
        torch.testing.assert_close(gradients(loss, *wanted, grad=grad), gradients(expected, *wanted, grad=grad))
    if reduction == "mean":
        assert recorder.calls == [("forward", needs)]
    else:
        assert recorder.calls == [("forward", (False,) * 3), ("backward", needs)]


def test_without_grad_no_gradient_is_formed(device: str) -> None:
    problem = make(device=device)
    x, w, _ = leaves(problem)
    with Recorder() as recorder, torch.no_grad():
        loss = linear_cross_entropy(x, w, problem.target)
    assert not loss.requires_grad
    assert all(not any(needs) for _, needs in recorder.calls)


def test_backward_twice(device: str) -> None:
    """retain_graph keeps the formed gradients as they are; the second backward may take them."""
    problem = make(device=device)
    x, w, b = leaves(problem)
    loss = linear_cross_entropy(x, w, problem.target, linear_bias=b)
    expected = gradients(oracle(x, w, problem.target, linear_bias=b)[0], x, w, b)
    for factor in (3.0, -0.5, 1.0):
        got = torch.autograd.grad(loss * factor, (x, w, b), retain_graph=True)
        torch.testing.assert_close(list(got), [factor * g for g in expected])
    (loss * 7).backward()
    torch.testing.assert_close([x.grad, w.grad, b.grad], [7 * g for g in expected])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate(device: str) -> None:
    problem = make(device=device)
    x, w, b = leaves(problem)
    total: list[Tensor] = [torch.zeros_like(t) for t in (x, w, b)]
    for step in range(3):
        target = problem.target.roll(step, 0)
        (linear_cross_entropy(x, w, target, linear_bias=b) / 3).backward()
        expected = gradients(oracle(x, w, target, linear_bias=b)[0] / 3, x, w, b)
        total = [t + g for t, g in zip(total, expected, strict=True)]
        torch.testing.assert_close([x.grad, w.grad, b.grad], total)


def test_two_losses_of_the_same_operands(device: str) -> None:
    problem = make(device=device)
    x, w, _ = leaves(problem)
    both = [
        2 * f(x, w, problem.target) + 3 * f(x, w, problem.target.roll(1, 0))
        for f in (linear_cross_entropy, lambda *a: oracle(*a)[0])
    ]
    torch.testing.assert_close(*(gradients(loss, x, w) for loss in both))


def test_hooks_see_and_change_the_gradients(device: str) -> None:
    """As DistributedDataParallel's hooks do: on leaves, on what comes before the op, and after accumulation."""
    problem = make(device=device)
    results = []
    for f in (linear_cross_entropy, lambda *a: oracle(*a)[0]):
        x, w, _ = leaves(problem)
        seen: list[Tensor] = []
        w.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g * 2)
        w.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        hidden = x.tanh()
        hidden.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        (f(hidden, w, problem.target) * 3).backward()
        results.append([x.grad, w.grad, *seen])
    torch.testing.assert_close(*results)


def formed_gradients(loss: Tensor) -> list[int]:
    """Where the gradients that forward formed for input and linear_weight lie."""
    return [tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors[5:7]]  # type: ignore[union-attr]


def test_scaling_is_in_place_only_where_nobody_can_see_it(device: str) -> None:
    problem = make(device=device)

    def run(keep: bool = False, **options: Any) -> bool:
        x, w, _ = leaves(problem)
        loss = linear_cross_entropy(x, w, problem.target, **options)
        places = formed_gradients(loss)
        found = torch.autograd.grad(loss, (x, w), torch.full_like(loss, 2.0), retain_graph=keep)
        torch.testing.assert_close(list(found), [2 * g for g in gradients(oracle(x, w, problem.target)[0], x, w)])
        return [g.data_ptr() for g in found] == places

    assert run()
    assert not run(keep=True)
    # Hooks that pack what is saved may hand out what others hold.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not run()
    x, w, _ = leaves(problem)
    loss = linear_cross_entropy(x, w, problem.target)
    batched = torch.autograd.grad(loss, (x, w), torch.tensor([1.0, 2.0]).to(loss), is_grads_batched=True)
    exact = gradients(oracle(x, w, problem.target)[0], x, w)
    torch.testing.assert_close(list(batched), [torch.stack((g, 2 * g)) for g in exact])


def test_a_half_gradient_is_scaled_by_the_unrounded_factor(device: str) -> None:
    problem = make((64,), 16, 50, torch.bfloat16, device)
    x, w, _ = leaves(problem)
    third, whole = (gradients(linear_cross_entropy(x, w, problem.target) * factor, x, w) for factor in (1 / 3, 1.0))
    for part, full in zip(third, whole, strict=True):
        assert torch.equal(part, (full.float() * torch.tensor(1 / 3)).to(part.dtype))


def test_checkpointed(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    problem = make(device=device)
    x, w, _ = leaves(problem)
    loss = checkpoint(lambda a, b: linear_cross_entropy(a.sin(), b, problem.target), x, w, use_reentrant=False)
    torch.testing.assert_close(gradients(loss, x, w), gradients(oracle(x.sin(), w, problem.target)[0], x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device: str, dtype: torch.dtype) -> None:
    """input, linear_weight and linear_bias as F.linear has them, the loss float32."""
    problem = make((8,), 16, 20, torch.float32, device)
    x, w, b = leaves(problem)
    with torch.autocast(device, dtype):
        loss = linear_cross_entropy(x, w, problem.target, linear_bias=b, weight=problem.weight)
        log_probs, entropy = linear_log_probs(x, w, problem.target, linear_bias=b)
    assert loss.dtype == log_probs.dtype == entropy.dtype == torch.float32
    low = [t.to(dtype) for t in (x, w, b)]
    expected = linear_cross_entropy(low[0], low[1], problem.target, linear_bias=low[2], weight=problem.weight)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    got, wanted = gradients(loss, x, w, b), gradients(expected, x, w, b)
    assert [g.dtype for g in got] == [torch.float32] * 3
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_flops(device: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    problem = make((4, 5), 7, 13, device=device)
    x, w, _ = leaves(problem)
    gemm = 2 * 20 * 7 * 13

    def count(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    assert count(lambda: linear_cross_entropy(*problem[:3])) == gemm
    assert count(lambda: linear_log_probs(*problem[:3])) == gemm
    assert count(lambda: linear_cross_entropy(x, w, problem.target).backward()) == 3 * gemm
    assert count(lambda: linear_cross_entropy(x, problem.linear_weight, problem.target).backward()) == 2 * gemm
    assert count(lambda: linear_cross_entropy(x, w, problem.target, reduction="none").sum().backward()) == 4 * gemm


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_values_of_rows_can_be_changed_in_place(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(11, 4, dtype=torch.float64)
    y = torch.randint(11, shape)
    loss, lse = linear_cross_entropy(x, w, y, reduction="none", return_lse=True)
    (actual,) = torch.autograd.grad(loss.mul_(3).sum() + lse.mul_(2).sum(), x)
    logits = x @ w.T
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(3 * reference + 2 * logits.logsumexp(-1).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_no_features() -> None:
    x, w = torch.randn(6, 0, requires_grad=True), torch.randn(11, 0, requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.randint(11, (6,)))
    torch.testing.assert_close(loss, torch.tensor(11.0).log())
    loss.backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 0)
