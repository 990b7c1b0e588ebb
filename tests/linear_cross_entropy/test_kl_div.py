"""linear_kl_div against plain PyTorch in float64: values, gradients of both heads, options, transforms."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import linear_kl_div
from torch_dcs_ops.ops.linear_cross_entropy import kl_chunks

from linear_cross_entropy.oracle import leaf, make, relative_error

DIRECTIONS = ["forward", "reverse", "jsd"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "beta": {"beta": 0.1},
    "softcap of the student": {"softcap": 2.5, "logit_scale": 0.7},
    "softcap of the teacher": {"teacher_softcap": 2.0, "teacher_logit_scale": -0.6},
    "one row at a time": {"memory_budget": 1},
    "everything": {"temperature": 0.7, "beta": 0.8, "softcap": 3.0, "teacher_logit_scale": 0.6, "memory_budget": 700},
}


class Heads(NamedTuple):
    x: Tensor
    w: Tensor
    teacher_x: Tensor
    teacher_w: Tensor
    bias: Tensor
    teacher_bias: Tensor
    target: Tensor


def heads_of(
    lead: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64, device: str = "cpu", **sizes: Any
) -> Heads:
    student = make(lead, sizes.get("features", 7), sizes.get("classes", 13), dtype, device)
    teacher = make(lead, sizes.get("teacher_features", 4), sizes.get("classes", 13), dtype, device, seed=9)
    return Heads(*student[:2], *teacher[:2], student.linear_bias, teacher.linear_bias, student.target)


def expected(
    x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, bias: Tensor | None, teacher_bias: Tensor | None,
    target: Tensor | None, direction: str, reduction: str = "none", **options: Any,
) -> Tensor:  # fmt: skip
    def log_p(a: Tensor, b: Tensor, c: Tensor | None, whose: str) -> Tensor:
        z = functional.linear(a, b, c) * options.get(f"{whose}logit_scale", 1.0)
        if cap := options.get(f"{whose}softcap"):
            z = torch.tanh(z / cap) * cap
        return (z / options.get("temperature", 1.0)).log_softmax(-1)

    p, q = log_p(x, w, bias, ""), log_p(teacher_x, teacher_w, teacher_bias, "teacher_")

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return functional.kl_div(b, a, reduction="none", log_target=True).sum(-1)

    beta = options.get("beta", 0.5)
    mixture = (beta * q.exp() + (1 - beta) * p.exp()).log()
    rows = {
        "forward": lambda: kl(q, p), "reverse": lambda: kl(p, q),
        "jsd": lambda: beta * kl(q, mixture) + (1 - beta) * kl(p, mixture),
    }[direction]()  # fmt: skip
    valid = torch.ones_like(rows, dtype=torch.bool) if target is None else target >= 0
    rows = torch.where(valid, rows, 0)
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / valid.sum()}[reduction]


def call(heads: Any, **options: Any) -> Tensor:
    x, w, teacher_x, teacher_w, bias, teacher_bias, target = heads
    return linear_kl_div(
        x, w, teacher_x, teacher_w, linear_bias=bias, teacher_bias=teacher_bias, target=target, **options
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(device: str, name: str, direction: str) -> None:
    """Of both heads, with an upstream gradient of one, zero, and at random."""
    heads = heads_of(device=device)
    leaves = [leaf(t) for t in heads[:6]]
    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"direction": direction, "reduction": reduction, **OPTIONS[name]}
        got, wanted = call((*leaves, heads.target), **options), expected(*leaves, heads.target, **options)
        torch.testing.assert_close(got, wanted)
        for grad in (torch.ones_like(wanted), torch.zeros_like(wanted), torch.randn_like(wanted)):
            results = [torch.autograd.grad(loss, leaves, grad, retain_graph=True) for loss in (got, wanted)]
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ignored_rows_that_are_not_left_out(device: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: they are run with the others, and have the loss 0 and no gradient."""
    monkeypatch.setattr(kl_chunks, "compacts", lambda *_: None)
    test_values_and_gradients(device, "everything", direction)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_not_needed_is_not_made(device: str, direction: str, reduction: str) -> None:
    """The logits are made once for a sum and a mean, whose gradients forward forms; else again in the backward."""
    heads = heads_of((4,), device=device)
    sizes = 2 * 4 * 13 * 7, 2 * 4 * 13 * 4  # FLOPs of one product of the student, and of the teacher
    for student, teacher, products in ((True, False, (3, 1)), (False, True, (1, 3)), (True, True, (3, 3))):
        needs = (student, student, teacher, teacher)
        operands = [t.clone().requires_grad_(need) for t, need in zip(heads[:4], needs, strict=True)]
        with FlopCounterMode(display=False) as forward:
            loss = linear_kl_div(*operands, direction=direction, reduction=reduction)
        with FlopCounterMode(display=False) as backward:
            loss.sum().backward()
        once, gradients = sum(sizes), sum(a * b for a, b in zip(products, sizes, strict=True))
        counted = forward.get_total_flops(), backward.get_total_flops()
        assert counted == ((once, gradients) if reduction == "none" else (gradients, 0))
        assert tuple(t.grad is not None for t in operands) == needs


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduced_losses(device: str, reduction: str, direction: str) -> None:
    """Used twice, by a loss that needs another factor, with gradients of gradients, and with batches of factors."""
    heads = heads_of(device=device)
    leaves = [leaf(t) for t in heads[:6]]
    options: dict[str, Any] = {"direction": direction, "reduction": reduction, "softcap": 3.0, "temperature": 1.5}
    losses = [run((*leaves, heads.target), **options) for run in (call, lambda a, **rest: expected(*a, **rest))]
    results = [torch.autograd.grad((loss * 3).exp() + loss, leaves, retain_graph=True) for loss in losses]
    torch.testing.assert_close(*results)
    factors = torch.randn(4, dtype=torch.float64, device=device)
    results = [torch.autograd.grad(loss, leaves, factors, retain_graph=True, is_grads_batched=True) for loss in losses]
    torch.testing.assert_close(*results)
    of_gradients = []
    for loss in losses:
        gradients = torch.autograd.grad(loss * loss, leaves, create_graph=True)
        of_gradients.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    torch.testing.assert_close(*of_gradients)


def test_a_reduced_loss_of_related_operands(device: str) -> None:
    """Self-distillation: the teacher's operands are made of the student's; and one operand is both heads'."""
    heads = heads_of(device=device, teacher_features=7)
    results = []
    for run in (call, lambda a, **rest: expected(*a, **rest)):
        x, w = leaf(heads.x), leaf(heads.w)
        loss = run((x, w, x.sin(), w, None, None, heads.target), direction="jsd", reduction="mean")
        gradients = torch.autograd.grad(loss, (x, w), create_graph=True)
        results.append([loss, *gradients, *torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, w))])
    torch.testing.assert_close(*results)


def test_autocast_with_gradients(device: str) -> None:
    heads = heads_of(dtype=torch.float32, device=device)
    leaves = [leaf(t) for t in heads[:4]]
    with torch.autocast(device, torch.bfloat16):
        loss = linear_kl_div(*leaves, target=heads.target)
    half = [leaf(t.bfloat16()) for t in heads[:4]]
    wanted = linear_kl_div(*half, target=heads.target)
    assert torch.equal(loss, wanted)
    results = [[g.float() for g in torch.autograd.grad(*pair)] for pair in ((loss, leaves), (wanted, half))]
    torch.testing.assert_close(*results)


def test_packed_gradients(device: str) -> None:
    """By hooks of saved tensors."""
    heads = heads_of(device=device)
    x = leaf(heads.x)
    (wanted,) = torch.autograd.grad(linear_kl_div(x, *heads[1:4]), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = linear_kl_div(x, *heads[1:4])
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_derivatives(device: str, direction: str) -> None:
    heads = heads_of((3,), device=device, features=3, teacher_features=2, classes=4)
    leaves = tuple(leaf(t) for t in heads[:6])

    def f(*operands: Tensor) -> Tensor:
        return call((*operands, heads.target), direction=direction, reduction="none", softcap=4.0, beta=0.3)

    assert gradcheck(f, leaves, check_forward_ad=True)
    assert gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's kl_div
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transforms(device: str, direction: str) -> None:
    heads = heads_of((3, 4), device=device)

    def f(x: Tensor, w: Tensor, teacher_x: Tensor, target: Tensor) -> Tensor:
        return call((x, w, teacher_x, *heads[3:6], target), direction=direction)

    def g(x: Tensor, w: Tensor, teacher_x: Tensor, target: Tensor) -> Tensor:
        return expected(x, w, teacher_x, *heads[3:6], target, direction, "mean")

    args = (heads.x, heads.w, heads.teacher_x, heads.target)
    dims = (0, None, 0, 0)
    torch.testing.assert_close(func.vmap(f, dims)(*args), func.vmap(g, dims)(*args))
    results = [func.vmap(func.grad(h, (0, 1, 2)), dims)(*args) for h in (f, g)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_precision(device: str, direction: str, dtype: torch.dtype) -> None:
    """Not worse than torch on float32 logits that were rounded to the dtype."""
    heads = heads_of((64,), dtype, device, features=16, teacher_features=24, classes=50)
    exact_leaves = [leaf(t.double()) for t in heads[:4]]
    exact = expected(*exact_leaves, None, None, heads.target, direction, "mean")
    exact_results = [exact, *torch.autograd.grad(exact, exact_leaves)]
    errors = []
    for ours in (True, False):
        leaves = [leaf(t) for t in heads[:4]]
        if ours:
            loss = linear_kl_div(*leaves, target=heads.target, direction=direction, memory_budget=8000)
        else:
            logits = [functional.linear(*leaves[:2]).float(), functional.linear(*leaves[2:]).float()]
            one = torch.eye(50, device=device)
            loss = expected(logits[0], one, logits[1], one, None, None, heads.target, direction, "mean")
        assert loss.dtype == torch.float32
        found = [loss, *torch.autograd.grad(loss, leaves)]
        errors.append([relative_error(a, b) for a, b in zip(found, exact_results, strict=True)])
    eps = torch.finfo(torch.float32).eps
    for got, eager in zip(errors[0][1:], errors[1][1:], strict=True):
        assert got <= 1.2 * eager + 4 * eps
    assert errors[0][0] <= torch.finfo(dtype).eps + 4 * eps


def test_other_dtypes_of_the_teacher(device: str) -> None:
    heads = heads_of(dtype=torch.float32, device=device)
    teacher = [t.bfloat16() for t in (heads.teacher_x, heads.teacher_w)]
    x = leaf(heads.x)
    loss = linear_kl_div(x, heads.w, *teacher)
    logits = functional.linear(*teacher).float()
    wanted = expected(x, heads.w, logits, torch.eye(13, device=device), None, None, None, "forward", "mean")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(wanted, x))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    ("own", "other"),
    [(torch.float64, torch.bfloat16), (torch.float32, torch.float64), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_gradients_of_both_dtypes(device: str, own: torch.dtype, other: torch.dtype, reduction: str) -> None:
    """Whichever dtype the loss has, each head's gradients are of its operands' own."""
    heads = heads_of(device=device)
    leaves = [leaf(t.to(dtype)) for t, dtype in zip(heads[:4], (own, own, other, other), strict=True)]
    loss = linear_kl_div(*leaves, reduction=reduction).sum() * 3
    wide = [leaf(t.detach().double()) for t in leaves]
    wanted = expected(*wide, None, None, None, "forward", "sum") * 3
    found = torch.autograd.grad(loss, leaves)
    assert [g.dtype for g in found] == [own, own, other, other]
    for got, exact in zip((loss, *found), (wanted, *torch.autograd.grad(wanted, wide)), strict=True):
        assert relative_error(got, exact) < 2e-2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_heads_and_masked_classes(device: str, direction: str) -> None:
    """0 and no gradient where they agree; classes of -inf in both count nothing."""
    heads = heads_of(device=device)
    leaves = [leaf(heads.x), leaf(heads.w)]
    loss = linear_kl_div(*leaves, heads.x, heads.w, direction=direction)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), tuple(map(torch.zeros_like, leaves)))
    bias = heads.bias.clone()
    bias[10:] = -torch.inf
    operands = [leaf(t) for t in heads[:4]]
    got = linear_kl_div(*operands, linear_bias=bias, teacher_bias=bias, direction=direction)
    x, w, teacher_x, teacher_w = operands
    few = linear_kl_div(
        x, w[:10], teacher_x, teacher_w[:10], linear_bias=bias[:10], teacher_bias=bias[:10], direction=direction
    )
    torch.testing.assert_close(got, few)
    torch.testing.assert_close(torch.autograd.grad(got, operands), torch.autograd.grad(few, operands))


def test_ignored_rows(device: str) -> None:
    heads = heads_of(device=device)
    x = leaf(heads.x)
    for target in (torch.full_like(heads.target, -100), torch.zeros_like(heads.target)):
        for ignore_index in (-100, 0, None):
            keywords: dict[str, Any] = {"target": target, "ignore_index": ignore_index}
            rows = linear_kl_div(x, *heads[1:4], reduction="none", **keywords)
            is_empty = bool((target == (-100 if ignore_index is None else ignore_index)).all())
            assert bool(rows.any()) is not is_empty
            mean = linear_kl_div(x, *heads[1:4], **keywords)
            zero = linear_kl_div(x, *heads[1:4], zero_if_empty=True, **keywords)
            assert bool(mean.isnan()) is is_empty
            torch.testing.assert_close(zero, rows.mean())
            torch.testing.assert_close(torch.autograd.grad(zero, x), torch.autograd.grad(rows.mean(), x))


def test_a_learned_scale(device: str) -> None:
    heads = heads_of(device=device)
    scales = [leaf(torch.tensor(value, dtype=torch.float64, device=device)) for value in (0.7, 1.3)]
    options = {"logit_scale": scales[0], "teacher_logit_scale": scales[1]}
    got, wanted = call(heads, **options), expected(*heads, "forward", "mean", **options)
    torch.testing.assert_close(torch.autograd.grad(got, scales), torch.autograd.grad(wanted, scales))


def test_compiled(device: str, fresh_compiler: None) -> None:
    def f(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
        return linear_kl_div(x.tanh(), w, teacher_x, teacher_w, direction="jsd") * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((2, 4), (3, 5)):
        heads = heads_of(lead, torch.float32, device)
        leaves = [leaf(t) for t in heads[:4]]
        results = [torch.autograd.grad(run(*leaves), leaves) for run in (f, compiled)]
        torch.testing.assert_close(*results)


def test_autocast(device: str) -> None:
    heads = heads_of(dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = linear_kl_div(*heads[:4])
    assert torch.equal(loss, linear_kl_div(*(t.bfloat16() for t in heads[:4])))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
def test_degenerate_shapes(device: str, lead: tuple[int, ...]) -> None:
    heads = heads_of(lead, device=device)
    leaves = [leaf(t) for t in heads[:4]]
    rows = linear_kl_div(*leaves, reduction="none")
    assert rows.shape == lead
    gradients = torch.autograd.grad(rows.sum(), leaves)
    assert all(g.shape == t.shape for g, t in zip(gradients, leaves, strict=True))


X, W, E = torch.ones(2, 3), torch.ones(5, 3), torch.ones(2, 4)
V = torch.ones(5, 4)


@pytest.mark.parametrize(
    ("args", "options", "error", "sentence"),
    [
        ((X, W, E, W), {}, RuntimeError, "teacher_weight must have the shape (V, D) with D = 4 as in teacher_input"),
        ((X, W, E, V[:4]), {}, RuntimeError, "teacher_weight must have as many classes as linear_weight, 5, got 4"),
        ((X, W, E[:1], V), {}, ValueError, "teacher_input must have input's leading shape (2,), got (1,)"),
        ((X, W, E, V), {"target": torch.zeros(3).long()}, ValueError, "target must have input's leading shape (2,)"),
        ((X, W, E, V), {"target": torch.zeros(2)}, RuntimeError, "target must be int64, got float32"),
        ((X, W, E, V), {"direction": "both"}, ValueError, 'direction must be "forward", "reverse" or "jsd"'),
        ((X, W, E, V), {"reduction": "batch"}, ValueError, 'reduction must be "none", "mean" or "sum", got "batch"'),
        ((X, W, E, V), {"beta": 1.0}, RuntimeError, "beta must be above 0 and below 1, got 1.0"),
        ((X, W, E, V), {"temperature": 0.0}, RuntimeError, "temperature must be a positive number, got 0.0"),
        ((X, W, E, V), {"teacher_softcap": -1.0}, RuntimeError, "teacher_softcap must be a positive number or None"),
        ((X, W, E, V), {"temperature": "2"}, TypeError, "temperature must be a number, got str"),
        ((X, W, E, V), {"teacher_bias": 1}, TypeError, "teacher_bias must be a tensor or None, got int"),
        ((X, W, [1.0], V), {}, TypeError, "teacher_input must be a tensor, got list"),
        ((X, W, E, None), {}, TypeError, "teacher_weight must be a tensor, got NoneType"),
        ((None, W, E, V), {"reduction": "none"}, TypeError, "input must be a tensor, got NoneType"),
        ((leaf(X), None, E, V), {}, TypeError, "linear_weight must be a tensor, got NoneType"),
        ((X, W, E, V), {"zero_if_empty": "no"}, TypeError, "zero_if_empty must be a bool, got str"),
        ((X, W, E, V), {"zero_if_empty": None, "reduction": "none"}, TypeError, "zero_if_empty must be a bool, got"),
        ((X, W, E, V), {"teacher_bias": torch.ones(4)}, RuntimeError, "teacher_bias must have the shape (5,)"),
    ],
    ids=range(19),
)  # fmt: skip
def test_sentences(args: Any, options: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(f"linear_kl_div: {sentence}")):
        linear_kl_div(*args, **options)
