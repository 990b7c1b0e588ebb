"""What linear_policy_loss takes for loss_fn and row arguments, shapes and strides, and what it refuses."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_log_probs, linear_policy_loss
from torch_dcs_ops.ops.linear_cross_entropy import ids as ids_module
from torch_dcs_ops.ops.linear_cross_entropy import row_probe

from linear_cross_entropy.oracle import leaf, make
from linear_cross_entropy.policy_oracle import plain, policy, surrogate


@pytest.fixture(autouse=True)
def _nothing_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this test for another device."""
    monkeypatch.setattr(row_probe, "_probed", weakref.WeakKeyDictionary())


def test_an_argument_that_is_made_of_the_input(device: str) -> None:
    """Its path counts once, in a gradient that is differentiated too; and a loss takes part in others."""
    problem = make((6,), device=device)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    losses: list[Tensor] = []
    for run in (linear_policy_loss, lambda x, w, y, fn, *args: plain(fn, x, w, None, y, *args)):
        loss = 3 * run(x, w, problem.target, policy, x.sin().sum(-1)) + x.square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        losses += [loss, grad, *torch.autograd.grad(grad.square().sum(), (x, w), retain_graph=True)]
        losses += torch.autograd.grad(loss, (x, w))
    torch.testing.assert_close(losses[: len(losses) // 2], losses[len(losses) // 2 :])


def test_a_learned_temperature(device: str) -> None:
    problem = make(device=device)
    scale = leaf(torch.tensor(0.7, dtype=torch.float64, device=device))
    args = problem.target, policy, problem.input[..., 0]
    got = linear_policy_loss(*problem[:2], *args, linear_bias=problem.linear_bias, logit_scale=scale)
    wanted = plain(policy, *problem[:2], problem.linear_bias, args[0], args[2], logit_scale=scale)
    torch.testing.assert_close(torch.autograd.grad(got, scale), torch.autograd.grad(wanted, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_args", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_of_arguments_of_other_dtypes(device: str, of_args: torch.dtype, dtype: torch.dtype) -> None:
    """And of other strides. Sums over chunks of what is for all rows do not round to the argument's dtype."""
    problem = make((500,), dtype=dtype, device=device)
    with torch.device(device):
        table, beta = leaf(torch.randn(4, 500, dtype=of_args).t()), leaf(torch.ones((), dtype=of_args))
    assert not table.is_contiguous()

    def loss(log_probs: Tensor, _: Tensor, table: Tensor, beta: Tensor) -> Tensor:
        return log_probs * (table.sum(1) + beta)

    operands = leaf(problem.input), problem.linear_weight
    got = linear_policy_loss(*operands, problem.target, loss, table, beta, reduction="sum", memory_budget=400)
    wanted = plain(loss, *operands, None, problem.target, table, beta, reduction="sum")
    gradients = [torch.autograd.grad(2 * value, (table, beta)) for value in (got, wanted)]
    assert [g.dtype for g in gradients[0]] == [of_args, of_args]
    narrower = max((of_args, dtype), key=lambda dtype: torch.finfo(dtype).eps)
    torch.testing.assert_close(gradients[0][0].to(narrower), gradients[1][0].to(narrower))
    of_beta = 2 * plain(lambda log_probs, _: log_probs, *operands, None, problem.target, reduction="sum").detach()
    torch.testing.assert_close(gradients[0][1].to(narrower), of_beta.to(narrower))


def test_arguments_of_inference_mode(device: str) -> None:
    problem = make(device=device)
    x = leaf(problem.input)
    with torch.inference_mode():
        old, beta = problem.input[..., 0] * 2, problem.input.sum()

    def ratio(log_probs: Tensor, _: Tensor, old: Tensor, beta: Tensor) -> Tensor:
        return (log_probs - old).exp() - beta

    got = linear_policy_loss(x, *problem[1:3], ratio, old, beta)
    wanted = linear_policy_loss(x, *problem[1:3], ratio, old.clone(), beta.clone())
    results = [torch.autograd.grad(loss, x, create_graph=True) for loss in (got, wanted)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    results = [torch.autograd.grad(grad.square().sum(), x) for (grad,) in results]
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_without_a_gradient_has_none(device: str, reduction: str) -> None:
    problem = make(device=device)
    loss = linear_policy_loss(
        leaf(problem.input), *problem[1:3], lambda log_probs, _: 2 * log_probs.detach(), reduction=reduction
    )
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.sum().backward()


def test_strides(device: str) -> None:
    """Views of all kinds, among the row arguments too."""
    problem = make((5, 6), device=device)
    x = problem.input.transpose(0, 1)[::2]
    w, target = problem.linear_weight.t().contiguous().t(), problem.target.t()[::2]
    with torch.device(device):
        old = leaf(torch.randn(5, 6, dtype=torch.float64).t()[::2])
        table = torch.randn(1, 1, 8, dtype=torch.float64).expand(3, 5, 8)
    advantages = old.detach()[:, :1]
    leaves = [leaf(x), leaf(w)]
    assert not leaves[0].is_contiguous()
    args = (old, advantages, table, 0.3, 2.0)
    got = linear_policy_loss(*leaves, target, surrogate, *args, memory_budget=300)
    wanted = plain(surrogate, *leaves, None, target, *args)
    torch.testing.assert_close(got, wanted)
    results = [torch.autograd.grad(loss, [*leaves, old]) for loss in (got, wanted)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
def test_degenerate_shapes(device: str, lead: tuple[int, ...]) -> None:
    problem = make(lead, device=device, ignored=0.0)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    for target in (problem.target, problem.target.unsqueeze(-1).expand(*lead, 2)):
        fn = policy if target.dim() == len(lead) else lambda log_probs, *rest: policy(log_probs.sum(1), *rest)
        for reduction in ("none", "sum"):
            loss = linear_policy_loss(*leaves, target, fn, problem.input[..., 0], reduction=reduction)
            assert loss.shape == (lead if reduction == "none" else ())
            gradients = torch.autograd.grad(loss.sum(), leaves)
            assert bool(gradients[1].any()) is (lead == ())
            assert gradients[0].shape == problem.input.shape


@pytest.mark.parametrize("left_out", [True, False])
def test_no_row_counts(device: str, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not left_out:
        monkeypatch.setattr(ids_module, "compacts", lambda *_: None)
    problem = make(device=device, ignored=1.0)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    for zero, wanted in ((False, torch.nan), (True, 0.0)):
        loss = linear_policy_loss(*leaves, problem.target, policy, problem.input[..., 0], zero_if_empty=zero)
        torch.testing.assert_close(float(loss.detach()), wanted, equal_nan=True)
        assert not any(bool(g.any()) for g in torch.autograd.grad(loss, leaves))


ROWS = 12
MIXING: dict[str, Any] = {
    "a mean of log-probabilities": lambda log_probs, entropy, a: a * (log_probs - log_probs.mean()),
    "a mean of the entropy": lambda log_probs, entropy, a: a * log_probs - entropy.mean(),
    "normal advantages": lambda log_probs, entropy, a: (a - a.mean()) * log_probs,
    "deviations that one row has not": lambda log_probs, entropy, a: log_probs * a / a.std(),
    "a ratio of sequences, 1 everywhere": lambda log_probs, entropy, a: (
        a * (log_probs - log_probs.detach()).mean().exp()
    ),
    "a ratio of sequences alone": lambda log_probs, entropy, a: 0 * a + (log_probs - log_probs.detach()).mean().exp(),
    "pairs": lambda log_probs, entropy, a: a * log_probs + log_probs.flip(0),
    "a sum over time": lambda log_probs, entropy, a: a * log_probs.cumsum(0),
    "the number of rows": lambda log_probs, entropy, a: a * log_probs / log_probs.numel(),
}
APART: dict[str, Any] = {
    "in place": lambda log_probs, entropy, a: (a * log_probs).sub_(entropy),
    "without a gradient": lambda log_probs, entropy, a: a,
    "of the entropy alone": lambda log_probs, entropy, a: a * entropy,
    "on the policy": lambda log_probs, entropy, a: -a * (log_probs - log_probs.detach()).exp(),
    "a tiny divergence": lambda log_probs, entropy, a: (1e-5 * log_probs).exp() - 1 - 1e-5 * log_probs + 0 * a,
    "in float64": lambda log_probs, entropy, a: log_probs.double() * a,
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_rows_is_refused(device: str, name: str, reduction: str) -> None:
    problem = make((ROWS,), device=device, ignored=0.0)
    x = leaf(problem.input)
    for budget in (None, 4 * 13 * 8):
        with pytest.raises(RuntimeError, match="linear_policy_loss: loss_fn must give the loss of a row from that row"):
            linear_policy_loss(
                x, problem.linear_weight, problem.target, MIXING[name], problem.input[:, 0], reduction=reduction,
                memory_budget=budget,
            )  # fmt: skip


def _normal_ratios(log_probs: Tensor, _: Tensor, old: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    return -ratio / ratio.mean().detach()


def _normal_weights(log_probs: Tensor, _: Tensor, weights: Tensor) -> Tensor:
    return log_probs * weights / weights.mean()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("fn", [_normal_ratios, _normal_weights])
def test_rows_that_mix_where_they_differ(device: str, fn: Any, reduction: str) -> None:
    """The first call of a policy with its own log-probabilities, or of one sequence, gives no other value."""
    problem = make((ROWS,), device=device, ignored=0.0)
    x, of_row = leaf(problem.input), torch.ones_like(problem.input[:, 0])
    if fn is _normal_ratios:
        of_row = linear_log_probs(*problem[:3], need_entropy=False).detach()
    with pytest.raises(RuntimeError, match="loss_fn must give the loss of a row from that row alone"):
        linear_policy_loss(x, problem.linear_weight, problem.target, fn, of_row, reduction=reduction)


def test_rows_of_nan_say_nothing(device: str) -> None:
    """Those that are ignored may hold it, and be the ones that are looked at."""
    problem = make((ROWS,), device=device, ignored=0.0)
    weights = problem.input[:, 0].abs()

    def loss(log_probs: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        return log_probs * weights / weights.mean()

    linear_policy_loss(leaf(problem.input), *problem[1:3], loss, weights * torch.nan)
    with pytest.raises(RuntimeError, match="loss_fn must give the loss of a row from that row alone"):
        linear_policy_loss(leaf(problem.input), *problem[1:3], loss, weights)


def test_rows_that_mix_in_chunks_of_one(device: str) -> None:
    problem = make((ROWS,), device=device, ignored=0.0)
    for need_entropy in (True, False):
        with pytest.raises(RuntimeError, match="loss_fn must give the loss of a row from that row alone"):
            linear_policy_loss(
                leaf(problem.input), *problem[1:3], lambda log_probs, _: log_probs - log_probs.mean(), memory_budget=1,
                need_entropy=need_entropy,
            )  # fmt: skip


def test_a_loss_may_check_its_arguments(device: str) -> None:
    problem = make((ROWS,), device=device, ignored=0.0)

    def loss(log_probs: Tensor, _: Tensor, mask: Tensor) -> Tensor:
        assert bool(((mask == 0) | (mask == 1)).all())
        return mask * log_probs

    mask = torch.ones_like(problem.input[:, 0])
    assert linear_policy_loss(leaf(problem.input), *problem[1:3], loss, mask).requires_grad
    assert row_probe._is_probed(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", APART)
def test_a_loss_of_single_rows_is_taken(device: str, name: str, dtype: torch.dtype) -> None:
    problem = make((ROWS,), dtype=dtype, device=device, ignored=0.0)
    x, advantages = leaf(problem.input), problem.input[:, 0]
    got = linear_policy_loss(x, problem.linear_weight, problem.target, APART[name], advantages, memory_budget=200)
    wanted = plain(APART[name], x, problem.linear_weight, None, problem.target, advantages)
    torch.testing.assert_close(got, wanted.to(dtype))
    if got.requires_grad and wanted.requires_grad:
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(wanted, x))


def test_rows_are_looked_at_once_for_a_function(device: str) -> None:
    """A few one by one, then all, and half of them. Where the few's gradients are 0, which says nothing, those of the
    largest ones are; all again while these are 0.
    """
    problem = make((ROWS,), device=device, ignored=0.0)
    sizes: list[int] = []

    def loss(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
        sizes.append(log_probs.numel())
        return -advantages * log_probs

    looks, splits, halves = [4, 1, 1, 1, 1, 4, 1, 1, 1, 1], [12] * 7, [12, 6, 12, 6]
    looked_at, looked_twice = [*looks, *splits, *halves, 12], [*looks, 12, *looks, *splits, *halves, 12]
    for advantages, wanted in ((0.0, looked_twice), (1.0, looked_at), (1.0, [12])):
        sizes.clear()
        linear_policy_loss(leaf(problem.input), *problem[1:3], loss, torch.full_like(problem.input[:, 0], advantages))
        assert sizes == wanted
    assert row_probe._is_probed(loss)
    row_probe._probed.clear()
    # Two rows have a gradient, and are none of the first four that are looked at: a clipped ratio has none.
    few = torch.zeros_like(problem.input[:, 0])
    few[[1, 2]] = 1.0
    for wanted in (looked_twice, [12]):
        sizes.clear()
        linear_policy_loss(leaf(problem.input), *problem[1:3], loss, few)
        assert sizes == wanted

    def mixes(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
        return -advantages * log_probs * (1 + (advantages * log_probs).sum())

    with pytest.raises(RuntimeError, match="that changes with the other rows"):
        linear_policy_loss(leaf(problem.input), *problem[1:3], mixes, few)

    class Trainer:
        def loss(self, log_probs: Tensor, _: Tensor) -> Tensor:
            sizes.append(log_probs.numel())
            return -log_probs

    trainers = Trainer(), Trainer()
    for trainer, wanted in ((trainers[0], looked_at), (trainers[0], [12]), (trainers[1], [12])):
        sizes.clear()
        linear_policy_loss(leaf(problem.input), *problem[1:3], trainer.loss)
        assert sizes == wanted


def test_a_gradient_that_would_be_lost_is_refused(device: str) -> None:
    problem = make((ROWS,), device=device)
    scale = leaf(torch.ones((), dtype=torch.float64, device=device))
    x, w, target = leaf(problem.input), problem.linear_weight, problem.target
    with pytest.raises(
        RuntimeError, match=re.escape("tensors that require a gradient from row_args, got one of the shape ()")
    ):
        linear_policy_loss(x, w, target, lambda log_probs, _: log_probs * scale.exp())
    whole = leaf(torch.ones(ROWS, dtype=torch.float64, device=device))
    with pytest.raises(RuntimeError, match=re.escape("got one of the shape (12,) by another way")):
        linear_policy_loss(x, w, target.clamp(min=0), lambda p, _: whole[: p.numel()])
    got = linear_policy_loss(x, w, target, lambda log_probs, _, scale: log_probs * scale.exp(), scale)
    wanted = linear_policy_loss(x, w, target, lambda log_probs, _: log_probs * scale.exp(), reduction="none").sum()
    counted = (target != -100).sum()
    torch.testing.assert_close(torch.autograd.grad(got, scale)[0] * counted, torch.autograd.grad(wanted, scale)[0])


X, W, T = torch.ones(2, 3, 4, requires_grad=True), torch.ones(5, 4), torch.ones(2, 3, dtype=torch.long)
LEADING = "row_args[0] must have input's leading shape (2, 3), or 1 in it, and any dimensions behind it, got "
RESULT = "loss_fn must return a loss for every row, of the shape (4,), got "


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("changes", "args", "error", "sentence"),
    [
        ({}, (torch.ones(2),), ValueError, LEADING + "(2,)"),
        ({}, (torch.ones(3, 2),), ValueError, LEADING + "(3, 2)"),
        ({}, (torch.ones(6),), ValueError, LEADING + "(6,)"),
        ({}, (T, torch.ones(2, 2)), ValueError, "row_args[1] must have input's leading shape (2, 3)"),
        ({}, ([1.0, 2.0],), TypeError, "row_args[0] must be a tensor, a number or None, got list"),
        ({}, (torch.ones(2, 3).to_sparse(),), RuntimeError, "row_args[0] must be a dense tensor, got the layout"),
        ({}, (torch.ones(2, 3, device="meta"),), RuntimeError, "row_args[0] must be on input's device cpu, got meta"),
        ({"loss_fn": 3}, (), TypeError, "loss_fn must be a function of (log_probs, entropy, *row_args), got int"),
        ({"loss_fn": lambda p, e: p.sum()}, (), ValueError, RESULT + "()"),
        ({"loss_fn": lambda p, e: p.unsqueeze(1)}, (), ValueError, RESULT + "(4, 1)"),
        ({"loss_fn": lambda p, e: (p, e)}, (), TypeError, "loss_fn must return a tensor, got tuple"),
        ({"loss_fn": lambda p, e: p > 0}, (), RuntimeError, "loss_fn must return a floating-point tensor, got bool"),
        ({"target": T[:1]}, (), ValueError, "target must have the shape (2, 3), or a last dimension more"),
        ({"target": T.float()}, (), RuntimeError, "target must be int64 (class indices), got float32"),
        ({"linear_weight": W[:, :3]}, (), RuntimeError, "linear_weight must have the shape (V, D) with D = 4"),
        ({"linear_weight": 1}, (), TypeError, "linear_weight must be a tensor, got int"),
        ({"softcap": -1.0}, (), RuntimeError, "softcap must be a positive number or None, got -1.0"),
        ({"loss_fn": lambda p, e: p.view(2, 3)}, (), RuntimeError, "loss_fn must take some rows at a time, got"),
        ({"ignore_index": 1.5}, (), TypeError, "ignore_index must be an integer or None, got float"),
        ({"need_entropy": "a"}, (), TypeError, "need_entropy must be a bool, got str"),
        ({"zero_if_empty": "yes"}, (), TypeError, "zero_if_empty must be a bool, got str"),
        ({"return_statistics": "x"}, (), TypeError, "return_statistics must be a bool, got str"),
        ({"softcap": "a"}, (), TypeError, "softcap must be a number or None, got str"),
        ({"memory_budget": 2.5}, (), TypeError, "memory_budget must be an integer or None, got float"),
        ({"need_entropy": 3}, (), TypeError, "need_entropy must be a bool, got 3"),
        ({"return_statistics": None}, (), TypeError, "return_statistics must be a bool, got NoneType"),
    ],
    ids=range(26),
)  # fmt: skip
def test_sentences(changes: Any, args: Any, error: type[Exception], sentence: str, reduction: str) -> None:
    call = {"input": X, "linear_weight": W, "target": T, "loss_fn": lambda log_probs, *_: log_probs, **changes}
    operands = [call.pop(name) for name in ("input", "linear_weight", "target", "loss_fn")]
    with pytest.raises(error, match=re.escape(f"linear_policy_loss: {sentence}")):
        linear_policy_loss(*operands, *args, reduction=reduction, **call)


def test_other_sentences() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=re.escape("row_args[0] must be a dense tensor, got a nested one")):
        linear_policy_loss(X, W, T, policy, nested)
    with pytest.raises(ValueError, match='linear_policy_loss: reduction must be "none", "mean" or "sum", got "batch"'):
        linear_policy_loss(X, W, T, policy, reduction="batch")
    with pytest.raises(IndexError, match=r"target must be in \[0, 4\]"):
        linear_policy_loss(X, W, T + 5, lambda log_probs, _: log_probs)
