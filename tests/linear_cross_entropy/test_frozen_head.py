"""linear_log_probs under a frozen linear_weight: forward forms the gradient of every row, and backward scales it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import linear_log_probs, linear_policy_loss
from torch_dcs_ops.ops.linear_cross_entropy import ids as driver

from linear_cross_entropy.oracle import Problem, leaf, make, relative_error
from linear_cross_entropy.recorder import Recorder
from linear_cross_entropy.test_ids import OPTIONS, expected


def log_probs_of(x: Tensor, problem: Problem, target: Tensor | None = None, **options: Any) -> Tensor:
    target = problem.target if target is None else target
    return linear_log_probs(
        x, problem.linear_weight, target, linear_bias=problem.linear_bias, need_entropy=False, **options
    )


def wanted_of(x: Tensor, problem: Problem, **options: Any) -> Tensor:
    ids = problem.target.unsqueeze(-1)
    return expected(x, problem.linear_weight, problem.linear_bias, ids, **options)[0].squeeze(-1)


@pytest.mark.parametrize("left_out", [True, False], ids=["left out", "run with the others"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(device: str, name: str, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ignored rows; upstream gradients of one, zero, at random, and expanded ones."""
    if not left_out:
        monkeypatch.setattr(driver, "compacts", lambda *_: None)
    problem = make(device=device)
    x = leaf(problem.input)
    got, wanted = log_probs_of(x, problem, **OPTIONS[name]), wanted_of(x, problem, **OPTIONS[name])
    torch.testing.assert_close(got, wanted)
    for grad in (torch.ones_like(wanted), torch.zeros_like(wanted), torch.randn_like(wanted), torch.ones(()).double()):
        grad = grad.to(device).expand_as(wanted)
        results = [torch.autograd.grad(values, x, grad, retain_graph=True) for values in (got, wanted)]
        torch.testing.assert_close(*results)


def test_other_shapes_and_ignored_index(device: str) -> None:
    problem = make(device=device)
    for target, ignore_index in ((problem.target.clamp(0), 0), (problem.target, None)):
        x = leaf(problem.input)
        one = log_probs_of(x, problem, target, ignore_index=ignore_index)
        same = log_probs_of(x, problem, target.unsqueeze(-1), ignore_index=ignore_index)
        both, _ = linear_log_probs(
            x, problem.linear_weight, target, linear_bias=problem.linear_bias, ignore_index=ignore_index
        )
        grad = torch.randn_like(one)
        torch.testing.assert_close(one, both)
        assert torch.equal(same.squeeze(-1), one)
        results = [torch.autograd.grad(values, x, grad) for values in (one, same.squeeze(-1), both)]
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0], results[2])
    for lead in ((0,), (2, 0), ()):
        few = make(lead, device=device)
        x = leaf(few.input)
        (gradient,) = torch.autograd.grad(log_probs_of(x, few).sum(), x)
        assert gradient.shape == x.shape


def test_logits_are_made_once(device: str) -> None:
    """Two products in all where linear_weight is frozen; and three more where it has a gradient."""
    problem = make((4,), 7, 13, device=device, ignored=0.0)
    product = 2 * 4 * 7 * 13
    for frozen, products in ((True, (2, 0)), (False, (1, 3))):
        x, w = leaf(problem.input), problem.linear_weight.clone().requires_grad_(not frozen)
        with FlopCounterMode(display=False) as forward:
            log_probs = linear_log_probs(x, w, problem.target, need_entropy=False)
        with FlopCounterMode(display=False) as backward:
            log_probs.sum().backward()
        assert (forward.get_total_flops(), backward.get_total_flops()) == tuple(product * count for count in products)


def test_further_results(device: str) -> None:
    """The gradient of the lse, which is no multiple of what forward has formed."""
    problem = make(device=device)
    x = leaf(problem.input)
    options: dict[str, Any] = {"linear_bias": problem.linear_bias, "need_entropy": False, "return_lse": True}
    log_probs, lse = linear_log_probs(x, problem.linear_weight, problem.target, **options)
    exact = expected(x, problem.linear_weight, problem.linear_bias, problem.target.unsqueeze(-1))
    wanted = exact[0].squeeze(-1), exact[2]
    torch.testing.assert_close((log_probs, lse), wanted)
    a, b = torch.randn_like(lse), torch.randn_like(lse)
    for of in (lambda p, z: (a * p + b * z).sum(), lambda p, z: (b * z).sum(), lambda p, z: (a * p).sum()):
        results = [torch.autograd.grad(of(*values), x, retain_graph=True) for values in ((log_probs, lse), wanted)]
        torch.testing.assert_close(*results)


def test_used_twice_and_batched_upstream_gradients(device: str) -> None:
    problem = make(device=device)
    x = leaf(problem.input)
    log_probs, wanted = log_probs_of(x, problem), wanted_of(x, problem)
    torch.testing.assert_close(
        torch.autograd.grad((log_probs * log_probs.exp()).sum(), x, retain_graph=True),
        torch.autograd.grad((wanted * wanted.exp()).sum(), x, retain_graph=True),
    )
    grads = torch.randn(4, *wanted.shape, dtype=wanted.dtype, device=device)
    results = [
        torch.autograd.grad(values, x, grads, retain_graph=True, is_grads_batched=True)
        for values in (log_probs, wanted)
    ]
    torch.testing.assert_close(*results)
    (gradient,) = torch.autograd.grad(log_probs.sum(), x, create_graph=True)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, wanted_gradient)
    torch.testing.assert_close(
        torch.autograd.grad(gradient.square().sum(), x), torch.autograd.grad(wanted_gradient.square().sum(), x)
    )


def test_derivatives_and_transforms(device: str) -> None:
    problem = make((3,), 4, 5, device=device)

    def f(x: Tensor) -> Tensor:
        return log_probs_of(x, problem, softcap=4.0, logit_scale=0.8)

    x = leaf(problem.input)
    assert gradcheck(f, x, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(f, x)
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(func.grad(lambda x: f(x).sum())(problem.input), gradient)


class Products:
    """Counts those of the chunks' drivers, by torch's FLOP counter, wherever these are called from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flops = 0
        for name in ("forward", "forward_with_gradient", "backward"):
            monkeypatch.setattr(driver, name, self.counting(getattr(driver, name)))

    def counting(self, run: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                found = run(*args, **keywords)
            self.flops += counter.get_total_flops()
            return found

        return counted


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "dcs"])
@pytest.mark.parametrize("policy", [False, True], ids=["log_probs", "policy"])
@pytest.mark.each_value
def test_compiled(
    device: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch, backend: str, policy: bool
) -> None:
    """As many products as eagerly, in a whole graph, for any number of rows."""
    counter = Products(monkeypatch)

    def f(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        if policy:
            return linear_policy_loss(
                x.tanh(), w, target, lambda log_probs, _: -log_probs.exp() * 2, reduction="sum", need_entropy=False
            )
        return (linear_log_probs(x.tanh(), w, target, need_entropy=False).exp() * -2).sum()

    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=True)
    for lead in ((2, 4), (3, 5)):
        problem = make(lead, device=device, ignored=0.0)
        rest = problem.linear_weight, problem.target
        x = leaf(problem.input)
        wanted = torch.autograd.grad(f(x, *rest), x)
        counter.flops = 0
        found = torch.autograd.grad(compiled(x, *rest), x)
        torch.testing.assert_close(found, wanted)
        assert counter.flops == 2 * (2 * x.numel() * problem.linear_weight.size(0))


def test_graphs(fresh_compiler: None) -> None:
    """A gradient of linear_weight, several ids and further gradients are formed in backward."""
    problem = make((4,))
    one, several = problem.target, problem.target.unsqueeze(-1).expand(-1, 2)
    full, backward = "dcs.linear_log_probs.full", "dcs._linear_log_probs_backward.default"
    for target, frozen, wanted in (
        (one, True, [["dcs._linear_log_probs_forward.default"], []]),
        (one.unsqueeze(-1), True, [["dcs._linear_log_probs_forward.default"], []]),
        (one, False, [[full], [backward]]),
        (several, True, [[full], [backward]]),
    ):
        recorder = Recorder()
        x, w = leaf(problem.input), problem.linear_weight.clone().requires_grad_(not frozen)
        torch._dynamo.reset()
        f = torch.compile(
            lambda x, w, target=target: linear_log_probs(x, w, target, need_entropy=False).sum(), backend=recorder
        )
        f(x, w).backward()
        assert recorder.ops == wanted


@pytest.mark.parametrize("wide", [False, True], ids=["own logits", "float32 logits"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_precision(device: str, dtype: torch.dtype, wide: bool) -> None:
    """Of a gradient that is rounded once before its factor and once behind it; no worse than torch's and one more."""
    problem = make((64,), 16, 50, dtype, device)
    exact_x = leaf(problem.input.double())
    exact_problem = problem._replace(linear_weight=problem.linear_weight.double(), linear_bias=None)
    grad = torch.randn(64, device=device)
    (exact,) = torch.autograd.grad(wanted_of(exact_x, exact_problem), exact_x, grad.double())
    x = leaf(problem.input)
    logits_dtype = torch.float32 if wide and dtype != torch.float32 else None
    ours = linear_log_probs(
        x, problem.linear_weight, problem.target, need_entropy=False, memory_budget=2000, logits_dtype=logits_dtype
    )
    (found,) = torch.autograd.grad(ours, x, grad)
    eager = torch.nn.functional.linear(x, problem.linear_weight).float().log_softmax(-1)
    valid = problem.target >= 0
    eager = torch.where(valid, eager.gather(-1, problem.target.clamp(0).unsqueeze(-1)).squeeze(-1), 0)
    (of_eager,) = torch.autograd.grad(eager, x, grad)
    assert found.dtype == dtype
    assert relative_error(found, exact) <= relative_error(of_eager, exact) + torch.finfo(dtype).eps / 2
