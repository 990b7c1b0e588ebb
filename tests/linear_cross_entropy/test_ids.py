"""linear_log_probs at several ids a row, its further results, and linear_top_k, against plain PyTorch in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from torch_dcs_ops import linear_log_probs, linear_top_k
from torch_dcs_ops.ops.linear_cross_entropy import ids as driver

from linear_cross_entropy.oracle import leaf, make, relative_error

ALL: dict[str, Any] = {"return_lse": True, "return_predictions": True, "return_argmax_log_prob": True}
UPSTREAM = torch.ones_like, torch.zeros_like, torch.randn_like
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": -0.7},
    "one row at a time": {"memory_budget": 1},
    "everything": {"softcap": 3.0, "logit_scale": 0.6, "memory_budget": 500},
}


def wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def ids_of(problem: Any, count: int, ignored: float = 0.2) -> Tensor:
    """Ids of which some are ignored, all of some rows; and equal ones, as there are more of them than classes."""
    generator = torch.Generator().manual_seed(1)
    classes = problem.linear_weight.size(0)
    ids = torch.randint(classes, (*problem.target.shape, count), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < ignored] = -100
    ids[torch.rand(ids.shape[:-1], generator=generator) < ignored] = -100
    return ids.to(problem.input.device)


def logits_of(x: Tensor, w: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    z = functional.linear(wide(x), wide(w), None if b is None else wide(b)) * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    return z if cap is None else torch.tanh(z / cap) * cap


def expected(x: Tensor, w: Tensor, b: Tensor | None, ids: Tensor, **options: Any) -> list[Tensor]:
    z = logits_of(x, w, b, **options)
    log_p = z.log_softmax(-1)
    valid = ids >= 0
    rows = valid.any(-1)
    best, predictions = log_p.max(-1)
    results = [torch.where(valid, log_p.gather(-1, ids.clamp(0)), 0)]
    results += [torch.where(rows, values, 0) for values in (-(log_p.exp() * log_p).sum(-1), z.logsumexp(-1))]
    return [*results, predictions, torch.where(rows, best, 0)]


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(device: str, name: str, count: int) -> None:
    """Upstream gradients of one, of zero, at random, and at random for one result with zero for the others."""
    problem = make(device=device)
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    x, w, b = leaves
    ids = ids_of(problem, count)
    got = linear_log_probs(x, w, ids, linear_bias=b, **ALL, **OPTIONS[name])
    wanted = expected(x, w, b, ids, **OPTIONS[name])
    torch.testing.assert_close(list(got), wanted)
    differentiable = [0, 1, 2, 4]
    upstream = [[like(wanted[k]) for k in differentiable] for like in UPSTREAM]
    upstream += [[torch.randn_like(wanted[k]) * (k == one) for k in differentiable] for one in differentiable]
    for grads in upstream:
        results = [
            torch.autograd.grad([values[k] for k in differentiable], leaves, grads, retain_graph=True)
            for values in (got, wanted)
        ]
        torch.testing.assert_close(*results)
    for k in differentiable:  # one result alone: the others have no gradient at all
        results = [torch.autograd.grad(values[k].sum(), leaves, retain_graph=True) for values in (got, wanted)]
        torch.testing.assert_close(*results)


def test_ignored_rows_that_are_not_left_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: they are run with the others, and have results and gradients of 0."""
    monkeypatch.setattr(driver, "compacts", lambda *_: None)
    for count in (1, 3):
        test_values_and_gradients(device, "everything", count)


def test_equal_ids_add_up(device: str) -> None:
    problem = make(device=device, ignored=0.0)
    x = leaf(problem.input)
    same = problem.target.unsqueeze(-1).expand(*problem.target.shape, 5)
    log_probs = linear_log_probs(x, problem.linear_weight, same, need_entropy=False)
    one, _ = linear_log_probs(x, problem.linear_weight, problem.target)
    torch.testing.assert_close(log_probs, one.unsqueeze(-1).expand_as(log_probs))
    grad = torch.randn_like(log_probs)
    torch.testing.assert_close(torch.autograd.grad(log_probs, x, grad), torch.autograd.grad(one, x, grad.sum(-1)))


@pytest.mark.parametrize("need_entropy", [True, False])
def test_what_is_asked_for(device: str, need_entropy: bool) -> None:
    problem = make(device=device)
    x, w = problem.input, problem.linear_weight
    for target in (problem.target, ids_of(problem, 3)):
        every = expected(x, w, None, target if target.dim() == x.dim() else target.unsqueeze(-1))
        if target.dim() < x.dim():
            every[0] = every[0].squeeze(-1)
        for lse in (True, False):
            for predictions in (True, False):
                for best in (True, False):
                    got = linear_log_probs(
                        x, w, target, need_entropy=need_entropy, return_lse=lse, return_predictions=predictions,
                        return_argmax_log_prob=best,
                    )  # fmt: skip
                    wanted = (True, need_entropy, lse, predictions, best)
                    asked = [values for values, want in zip(every, wanted, strict=True) if want]
                    torch.testing.assert_close(list(got) if isinstance(got, tuple) else [got], asked)
                    assert isinstance(got, Tensor) == (len(asked) == 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_precision(device: str, dtype: torch.dtype) -> None:
    """Not worse than torch's log_softmax of the logits in the same dtype."""
    problem = make((64,), 16, 50, dtype, device)
    ids = ids_of(problem, 4)
    grads = None
    errors = []
    exact_leaves = [leaf(t.double()) for t in (problem.input, problem.linear_weight)]
    exact = expected(*exact_leaves, None, ids)
    grads = [torch.randn_like(exact[k]) for k in (0, 1)]
    exact_gradients = torch.autograd.grad(exact[:2], exact_leaves, grads)
    for ours in (True, False):
        x, w = leaf(problem.input), leaf(problem.linear_weight)
        if ours:
            values = linear_log_probs(x, w, ids, memory_budget=2000)
        else:
            log_p = functional.linear(x, w).float().log_softmax(-1)
            valid = ids >= 0
            entropy = torch.where(valid.any(-1), -(log_p.exp() * log_p).sum(-1), 0)
            values = (torch.where(valid, log_p.gather(-1, ids.clamp(0)), 0), entropy)
        found = torch.autograd.grad(values, (x, w), [g.float() for g in grads])
        pairs = zip((*values, *found), (*exact[:2], *exact_gradients), strict=True)
        errors.append([relative_error(a, b) for a, b in pairs])
    floor = 2 * torch.finfo(torch.float32).eps
    for got, eager in zip(*errors, strict=True):
        assert got <= 1.2 * eager + floor


def test_a_common_offset_and_a_certain_id(device: str) -> None:
    logits = torch.randint(-3, 4, (6, 11)).float() * 2
    w = torch.eye(11, device=device)
    ids = torch.randint(11, (6, 4))
    got = linear_log_probs((logits + 2.0**24).to(device), w, ids.to(device), need_entropy=False)
    torch.testing.assert_close(got.cpu().double(), logits.double().log_softmax(-1).gather(1, ids), rtol=1e-6, atol=1e-7)
    x = leaf(torch.eye(3, device=device) * 16)
    y = torch.arange(3, device=device)
    got = linear_log_probs(x, w[:, :3].contiguous(), torch.stack((y, y + 3), 1), need_entropy=False)
    wide_x = leaf(x.double())
    exact = functional.linear(wide_x, w[:, :3].double()).log_softmax(-1).gather(1, torch.stack((y, y + 3), 1))
    grad = torch.tensor([[1.0, 0.0]], device=device).expand(3, 2)
    (found,), (wanted,) = torch.autograd.grad(got, x, grad), torch.autograd.grad(exact, wide_x, grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-12)


def test_masked_classes(device: str) -> None:
    """-inf logits among the ids, and for all ids of a row."""
    problem = make((4,), 3, 5, device=device, ignored=0.0)
    b = problem.linear_bias.clone()
    b[3:] = -torch.inf
    x = leaf(problem.input)
    ids = torch.tensor([[0, 3], [3, 4], [1, 1], [4, -100]], device=device)
    got = linear_log_probs(x, problem.linear_weight, ids, linear_bias=b, need_entropy=False)
    few = functional.linear(x, problem.linear_weight[:3], b[:3]).log_softmax(-1)
    wanted = torch.where(ids < 3, few.gather(1, ids.clamp(0, 2)), -torch.inf).masked_fill(ids < 0, 0)
    torch.testing.assert_close(got, wanted)
    finite = wanted.isfinite()
    torch.testing.assert_close(torch.autograd.grad(got[finite].sum(), x), torch.autograd.grad(wanted[finite].sum(), x))


def test_derivatives(device: str) -> None:
    problem = make((3,), 4, 5, device=device)
    leaves = tuple(leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias))
    ids = ids_of(problem, 3)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        results = linear_log_probs(x, w, ids, linear_bias=b, softcap=4.0, logit_scale=0.8, **ALL)
        return [results[k] for k in (0, 1, 2, 4)]

    def top(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return linear_top_k(x, w, 2, linear_bias=b, softcap=4.0)[0]

    for function in (f, top):
        assert gradcheck(function, leaves, check_batched_grad=True, check_forward_ad=True)
        assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("dims", [(0, None, 0), (0, None, None), (None, None, 0), (0, 0, 0), (None, 0, None)], ids=str)
def test_transforms(device: str, dims: tuple[int | None, ...]) -> None:
    batch = [make((4,), 3, 5, device=device, seed=k) for k in range(3)]
    args = [torch.stack([p.input for p in batch]), torch.stack([p.linear_weight for p in batch]),
            torch.stack([ids_of(p, 2) for p in batch])]  # fmt: skip
    given = [values if dim == 0 else values[0] for values, dim in zip(args, dims, strict=True)]

    def f(x: Tensor, w: Tensor, ids: Tensor) -> Any:
        return linear_log_probs(x, w, ids, **ALL)

    def g(x: Tensor, w: Tensor, ids: Tensor) -> Any:
        return tuple(expected(x, w, None, ids))

    torch.testing.assert_close(func.vmap(f, dims)(*given), func.vmap(g, dims)(*given))
    gradients = [
        func.vmap(func.grad(lambda *a, h=h: h(*a)[0].sum() + h(*a)[1].sum(), (0, 1)), dims)(*given) for h in (f, g)
    ]
    torch.testing.assert_close(*gradients)
    if dims[0] == 0 or dims[1] == 0:
        top = func.vmap(lambda x, w: linear_top_k(x, w, 2), dims[:2])(*given[:2])
        wanted = func.vmap(lambda x, w: functional.linear(x, w).log_softmax(-1).topk(2), dims[:2])(*given[:2])
        torch.testing.assert_close(tuple(top), tuple(wanted))
        of_top = [
            func.vmap(func.grad(lambda x, w, h=h: h(x, w).exp().sum(), (0, 1)), dims[:2])(*given[:2])
            for h in (
                lambda x, w: linear_top_k(x, w, 2)[0],
                lambda x, w: logits_of(x, w, None).log_softmax(-1).topk(2)[0],
            )
        ]
        torch.testing.assert_close(*of_top)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 3, 13])
def test_top_k(device: str, k: int, dtype: torch.dtype) -> None:
    problem = make(dtype=dtype, device=device)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    options: dict[str, Any] = {"logit_scale": -0.5, "linear_bias": problem.linear_bias, "memory_budget": 300}
    log_probs, indices = linear_top_k(x, w, k, **options)
    logits = functional.linear(x, w)
    log_p = ((logits if dtype == torch.float64 else logits.float()) + problem.linear_bias).mul(-0.5).log_softmax(-1)
    wanted = log_p.topk(k)
    torch.testing.assert_close(log_probs, wanted[0])
    torch.testing.assert_close(log_p.gather(-1, indices), wanted[0])
    assert all(len(set(row.tolist())) == k for row in indices.flatten(0, 1))
    grad = torch.randn_like(log_probs)
    tolerance = {} if dtype == torch.float64 else {"rtol": 0.03, "atol": 0.05}
    torch.testing.assert_close(
        torch.autograd.grad(log_probs, (x, w), grad), torch.autograd.grad(wanted[0], (x, w), grad), **tolerance
    )


@pytest.mark.parametrize("k", [1, 2, 8, 64])
def test_top_k_of_many_classes(device: str, k: int) -> None:
    """All gradients, with equal classes among the largest, and whichever upstream gradient."""
    problem = make(classes=80, device=device)
    w = problem.linear_weight.clone()
    w[40:] = w[:40]
    leaves = [leaf(problem.input), leaf(w), leaf(problem.linear_bias)]
    for options in ({"softcap": 2.5}, {"logit_scale": 0.7, "memory_budget": 2000}):
        bias = leaves[2] if "softcap" in options else None  # with a bias no two are equal
        log_probs, indices = linear_top_k(*leaves[:2], k, linear_bias=bias, **options)
        log_p = logits_of(*leaves[:2], bias, **options).log_softmax(-1)
        wanted = log_p.gather(-1, indices)
        torch.testing.assert_close(log_probs, wanted)
        torch.testing.assert_close(wanted, log_p.topk(k)[0])
        every = leaves if bias is not None else leaves[:2]
        for like in UPSTREAM:
            grad = like(wanted)
            results = [torch.autograd.grad(of, every, grad, retain_graph=True) for of in (log_probs, wanted)]
            torch.testing.assert_close(*results)


def test_compiled(device: str, fresh_compiler: None) -> None:
    def f(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        log_probs, entropy, lse, _, best = linear_log_probs(x, w, ids, **ALL)
        top, indices = linear_top_k(x, w, 2)
        return (log_probs.sum() + entropy.sum() + lse.sum() - best.sum() + top.sum()) * 2 + indices.sum() * 0

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((2, 4), (3, 5)):
        problem = make(lead, device=device)
        leaves = [leaf(problem.input), leaf(problem.linear_weight)]
        results = [torch.autograd.grad(run(*leaves, ids_of(problem, 3)), leaves) for run in (f, compiled)]
        torch.testing.assert_close(*results)


def test_autocast(device: str) -> None:
    problem = make(dtype=torch.float32, device=device)
    ids = ids_of(problem, 2)
    with torch.autocast(device, torch.bfloat16):
        log_probs = linear_log_probs(problem.input, problem.linear_weight, ids, need_entropy=False)
        top, _ = linear_top_k(problem.input, problem.linear_weight, 2)
    half = problem.input.bfloat16(), problem.linear_weight.bfloat16()
    assert torch.equal(log_probs, linear_log_probs(*half, ids, need_entropy=False))
    assert torch.equal(top, linear_top_k(*half, 2)[0])


@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_no_rows(device: str, lead: tuple[int, ...]) -> None:
    problem = make(lead, device=device)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    ids = problem.target.unsqueeze(-1).expand(*lead, 3)
    results = linear_log_probs(x, w, ids, **ALL)
    assert [values.shape for values in results] == [(*lead, 3), lead, lead, lead, lead]
    grad_x, grad_w = torch.autograd.grad(results[0].sum(), (x, w))
    assert grad_x.shape == x.shape
    assert not bool(grad_w.any())
    assert linear_top_k(x, w, 2)[0].shape == (*lead, 2)


X, W = torch.ones(2, 3, 4), torch.ones(5, 4)
K_RANGE = "linear_top_k: k must be in [1, 5], the number of classes, got "
SHAPE = "target must have the shape (2, 3), or a last dimension more for several ids a row, got (2, 4, 2)"


def ids_like(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value)


@pytest.mark.parametrize(
    ("run", "error", "sentence"),
    [
        (lambda: linear_log_probs(X, W, ids_like(2, 4, 2)), ValueError, SHAPE),
        (
            lambda: linear_log_probs(X, W, ids_like(2, 3, 2).float()),
            RuntimeError,
            "target must be int64 (class indices)",
        ),
        (lambda: linear_log_probs(X, W, ids_like(2, 3, 0)), RuntimeError, "target must have one id a row at least"),
        (lambda: linear_log_probs(X, W, ids_like(2, 3, 2, value=7)), IndexError, "target must be in [0, 4]"),
        (
            lambda: linear_log_probs(X, W, ids_like(2, 3, 1), need_entropy="no"),
            TypeError,
            "need_entropy must be a bool, got",
        ),
        (lambda: linear_top_k(X, W, 6), RuntimeError, K_RANGE + "6"),
        (lambda: linear_top_k(X, W, 0), RuntimeError, K_RANGE + "0"),
        (lambda: linear_top_k(X, W, 1.5), TypeError, "linear_top_k: k must be an integer, got float"),
        (lambda: linear_top_k([1.0], W, 1), TypeError, "linear_top_k: input must be a tensor, got list"),
    ],
    ids=range(9),
)
def test_sentences(run: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        run()
