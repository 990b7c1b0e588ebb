"""Float32 logits of half-precision operands: what they keep, in every function and on every path, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops import linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_top_k
from torch_dcs_ops.ops.linear_cross_entropy.plan import make_plan
from torch_dcs_ops.ops.linear_cross_entropy.valid_rows import compacts
from torch_dcs_ops.reference.linear_cross_entropy.log_probs import HeadOptions
from torch_dcs_ops.reference.linear_cross_entropy.loss import Options

from linear_cross_entropy.oracle import Problem, assert_within_budget, gradients, leaf, make, oracle, relative_error
from linear_cross_entropy.policy_oracle import ids_of, plain, policy
from linear_cross_entropy.test_memory import peak

F32 = torch.float32
HALF_PRECISION = [torch.bfloat16, torch.float16]
FEATURES, CLASSES = 64, 300
# 7 rows of float32 logits and their gradient in half precision: chunks, on every device.
BUDGET = 7 * 6 * 304


def float32_budget(problem: Problem, scale: float = 1.0) -> float:
    """Of a logit, and of what is a few operations behind it: a dot product's sum of D products, each exact in float32.

    |error| <= D·u·sum |x·w|, with u = 2**-24; the lse, a mean of V terms of the same errors, twice that and V·u.
    """
    products = problem.input.double().abs().reshape(-1, FEATURES) @ problem.linear_weight.double().abs().t()
    return (3 * FEATURES * float(products.max()) * abs(scale) + CLASSES) * 2.0**-24


def problem_of(dtype: torch.dtype, device: str, lead: tuple[int, ...] = (3, 11)) -> Problem:
    return make(lead, FEATURES, CLASSES, dtype, device)


def exact(problem: Problem) -> list[Tensor]:
    return [leaf(tensor.double()) for tensor in (problem.input, problem.linear_weight, problem.linear_bias)]


def errors(found: Any, wanted: Any) -> float:
    return max(float((a.double() - b.double()).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
def test_log_probs_of_every_overload(device: str, dtype: torch.dtype) -> None:
    """Within a float32 product of their exact values, which logits of the operands' dtype are not."""
    problem = problem_of(dtype, device)
    x, w, bias = exact(problem)
    for target, keywords in (
        (problem.target, {}),
        (problem.target, {"return_lse": True, "return_argmax_log_prob": True, "softcap": 9.0, "logit_scale": 1.3}),
        (ids_of(problem, 4), {"return_lse": True, "logit_scale": -0.7}),
    ):
        wanted = linear_log_probs(x, w, target, linear_bias=bias, **keywords)
        budget = float32_budget(problem, keywords.get("logit_scale", 1.0))
        for memory_budget in (None, BUDGET):
            call = {"linear_bias": problem.linear_bias, "memory_budget": memory_budget, **keywords}
            wide = linear_log_probs(problem.input, problem.linear_weight, target, logits_dtype=F32, **call)
            assert {values.dtype for values in wide} == {F32}
            assert errors(wide, wanted) <= budget
            narrow = linear_log_probs(problem.input, problem.linear_weight, target, logits_dtype=dtype, **call)
            torch.testing.assert_close(
                narrow, linear_log_probs(problem.input, problem.linear_weight, target, **call), rtol=0, atol=0
            )
            assert errors(narrow, wanted) > budget


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
def test_losses(device: str, dtype: torch.dtype) -> None:
    problem = problem_of(dtype, device)
    x, w, bias = exact(problem)
    for options in (
        {},
        {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3},
        {"reduction": "none", "probabilities": True},
        {"reduction": "sum", "shift": 2},
    ):
        keywords = dict(options)
        target = problem.probabilities if keywords.pop("probabilities", False) else problem.target
        wanted, lse, _ = oracle(x, w, target, linear_bias=bias, **keywords)
        loss, found = linear_cross_entropy(
            problem.input, problem.linear_weight, target, linear_bias=problem.linear_bias, memory_budget=BUDGET,
            logits_dtype=F32, return_lse=True, **keywords,
        )  # fmt: skip
        budget = float32_budget(problem)
        rows = problem.target.numel() if keywords.get("reduction") == "sum" else 1
        assert errors([found], [lse]) <= budget
        # A squared lse times z_loss: its error by the derivative.
        assert errors([loss], [wanted]) <= rows * budget * (1 + 2e-3 * float(lse.detach().abs().max())) + 1e-6 * float(
            wanted.detach().abs().max()
        )


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
@pytest.mark.parametrize("budget", [None, BUDGET], ids=["one chunk", "chunks"])
def test_gradients(device: str, dtype: torch.dtype, budget: int | None) -> None:
    """As good as those of torch's own float32 logits in half precision, for each function and reduction."""
    problem = problem_of(dtype, device)
    ids, advantages = ids_of(problem, 4), torch.randn(3, 11, device=device)
    wide: dict[str, Any] = {"memory_budget": budget, "logits_dtype": F32}

    def ours(x: Tensor, w: Tensor, b: Tensor, case: str) -> Tensor:
        options: dict[str, Any] = {"linear_bias": b, **wide}
        if case == "policy":
            return linear_policy_loss(x, w, problem.target, policy, advantages, **options)
        if case == "ids":
            log_probs, entropy = linear_log_probs(x, w, ids, **options)
            return (log_probs.sum(-1) * advantages - 0.1 * entropy).sum()
        return linear_cross_entropy(x, w, problem.target, reduction=case, softcap=9.0, **options).mean()

    def by_torch(x: Tensor, w: Tensor, b: Tensor, case: str) -> Tensor:
        if case == "policy":
            return plain(policy, x, w, b, problem.target, advantages.to(x.dtype))
        if case == "ids":
            logits = torch.nn.functional.linear(x, w, b)
            log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
            valid = ids != -100
            log_probs = torch.where(valid, log_p.gather(-1, ids.clamp(min=0)), 0)
            entropy = torch.where(valid.any(-1), -(log_p.exp() * log_p).sum(-1), 0)
            return (log_probs.sum(-1) * advantages - 0.1 * entropy).sum()
        return oracle(x, w, problem.target, linear_bias=b, reduction=case, softcap=9.0)[0].mean()

    operands = [problem.input, problem.linear_weight, problem.linear_bias]
    for case in ("mean", "none", "ids", "policy"):
        found = []
        for run, wanted_dtype in ((ours, dtype), (by_torch, dtype), (by_torch, torch.float64)):
            leaves = [leaf(tensor.to(wanted_dtype)) for tensor in operands]
            found.append(gradients(run(*leaves, case), *leaves))
        assert [gradient.dtype for gradient in found[0]] == [dtype] * 3
        # On GPUs a product of the unit gradient is rounded before it is scaled: three roundings for the two of torch.
        assert_within_budget(*found, factors=(3 / 2 if device == "cuda" else 1.1,) * 3)


@pytest.mark.parametrize("frozen", ["input", "linear_weight"])
def test_a_frozen_operand(device: str, frozen: str) -> None:
    problem = problem_of(torch.bfloat16, device)
    x, w = (
        tensor if name == frozen else leaf(tensor)
        for name, tensor in (("input", problem.input), ("linear_weight", problem.linear_weight))
    )
    every = leaf(problem.input), leaf(problem.linear_weight)
    linear_cross_entropy(x, w, problem.target, memory_budget=BUDGET, logits_dtype=F32).backward()
    linear_cross_entropy(*every, problem.target, memory_budget=BUDGET, logits_dtype=F32).backward()
    for tensor, other in zip((x, w), every, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, other.grad, rtol=0, atol=0)
        else:
            assert tensor.grad is None


def test_importance_ratios(device: str) -> None:
    """A policy's ratio to itself, its log-probabilities having come from float32 logits of another program: 1."""
    problem = problem_of(torch.bfloat16, device)
    x, w = problem.input, problem.linear_weight
    ids = problem.target.clamp(min=0)
    log_p = torch.nn.functional.linear(x.double(), w.double()).log_softmax(-1)
    old = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1).float()

    def ratios(log_probs: Tensor, entropy: Tensor, old: Tensor) -> Tensor:
        return (log_probs - old).exp()

    worst = []
    for logits_dtype in (None, F32):
        _, log_probs, _ = linear_policy_loss(
            leaf(x), w, ids, ratios, old, logits_dtype=logits_dtype, return_statistics=True
        )
        worst.append(float(torch.expm1(log_probs - old).abs().max()))
    assert worst[1] <= math.expm1(float32_budget(problem)) < 5e-3 < worst[0]


def test_top_k(device: str) -> None:
    """Logits that are one number in bfloat16 are told apart, and the largest found."""
    w = torch.zeros(CLASSES, FEATURES, dtype=torch.bfloat16, device=device)
    w[:, 0] = 1
    w[:, 1] = torch.arange(CLASSES, device=device) / 512 * (-1) ** torch.arange(CLASSES, device=device)
    x = torch.zeros(2, FEATURES, dtype=torch.bfloat16, device=device)
    x[:, 0], x[:, 1] = 256, 1
    wanted = linear_top_k(x.double(), w.double(), 5)
    found = linear_top_k(x, w, 5, logits_dtype=F32, memory_budget=BUDGET)
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(linear_top_k(x, w, 5)[1], wanted[1])


def test_float16_logits_beyond_its_range(device: str) -> None:
    x = torch.full((2, FEATURES), 60.0, dtype=torch.float16, device=device)
    w = torch.full((3, FEATURES), 30.0, dtype=torch.float16, device=device)
    w[1] = 29.0
    target = torch.tensor([0, 2], device=device)
    log_probs, _ = linear_log_probs(leaf(x), leaf(w), target, logits_dtype=F32)
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, -math.log(2)))
    assert linear_log_probs(x, w, target)[0].isnan().all()


def operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)


def test_opcheck(device: str) -> None:
    problem = make((3, 2), 6, 11, torch.bfloat16, device)
    x, w, b = operands(problem)
    ops = torch.ops.dcs
    ids = ids_of(problem, 2).clamp(max=10)
    for op, args, keywords in (
        (ops.linear_cross_entropy.default, (x, w, problem.target), {"linear_bias": b}),
        (ops.linear_log_probs.default, (x, w, problem.target), {"linear_bias": b}),
        (ops.linear_log_probs.full, (x, w, ids), {"linear_bias": b}),
        (ops.linear_top_k.default, (x, w, 3), {}),
    ):
        assert set(opcheck(op, args, {"logits_dtype": F32, **keywords}).values()) == {"SUCCESS"}


def test_private_ops_on_meta_tensors() -> None:
    problem = make((3, 2), 6, 11, torch.bfloat16)
    call = (problem.input, problem.linear_weight, problem.target, problem.linear_bias, problem.weight)
    ids = ids_of(problem, 2).clamp(max=10)
    grads = torch.randn(3, 2, 2), torch.randn(3, 2), None
    ops = torch.ops.dcs
    rows = (torch.tensor(2.0), torch.randn(3, 2), None)
    for op, args in (
        (ops._linear_cross_entropy_forward, (*call, *Options(logits_dtype=F32), True, True, True, True, True)),
        (ops._linear_cross_entropy_backward, (*rows, *call, *Options(logits_dtype=F32), True, True, True)),
        (
            ops._linear_log_probs_backward,
            (*grads, *call[:2], ids, call[3], *HeadOptions(logits_dtype=F32), True, True, True),
        ),
    ):
        found = op.default(*args)
        on_meta = op.default(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in on_meta]


def loss_of(x: Tensor, w: Tensor, target: Tensor, **options: Any) -> Tensor:
    log_probs, entropy = linear_log_probs(x, w, target, logits_dtype=F32, **options)
    return (log_probs - 0.1 * entropy).sum() + linear_cross_entropy(x, w, target, logits_dtype=F32)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(device: str) -> None:
    problem = problem_of(torch.bfloat16, device)
    leaves = leaf(problem.input), leaf(problem.linear_weight)
    loss = loss_of(*leaves, problem.target)
    wanted = loss, *gradients(loss, *leaves)
    for dynamic in (False, True):
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        loss = compiled(*leaves, problem.target)
        torch.testing.assert_close((loss, *gradients(loss, *leaves)), wanted)


def test_transforms(device: str) -> None:
    problem = problem_of(torch.bfloat16, device)
    x, w, y = problem.input, problem.linear_weight, problem.target

    def one(x: Tensor, y: Tensor) -> Tensor:
        return linear_log_probs(x, w, y, logits_dtype=F32)[0]

    whole = one(x, y)
    torch.testing.assert_close(torch.func.vmap(one)(x, y), whole, rtol=0, atol=float32_budget(problem))
    each = torch.func.vmap(lambda w: linear_log_probs(x, w, y, logits_dtype=F32)[0])(torch.stack((w, w.flip(0))))
    torch.testing.assert_close(each[0], whole, rtol=0, atol=float32_budget(problem))
    leaves = leaf(x), leaf(w)
    wanted = gradients(loss_of(*leaves, y), *leaves)
    found = torch.func.grad(loss_of, argnums=(0, 1))(x, w, y)
    for gradient, other in zip(found, wanted, strict=True):
        assert relative_error(gradient, other) <= 2**-7  # a sum of several gradients is rounded in another order
    # Forward mode and second derivatives are those of float32 logits in any case.
    _, tangent = torch.func.jvp(lambda x: one(x, y), (x,), (torch.ones_like(x),))
    assert tangent.isfinite().all()
    second = gradients(gradients_with_graph(leaves, y), *leaves)
    assert all(gradient.isfinite().all() for gradient in second)


def gradients_with_graph(leaves: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    found = torch.autograd.grad(loss_of(*leaves, target), leaves, create_graph=True)
    return sum((gradient.float().square().sum() for gradient in found), torch.zeros((), device=target.device))


def test_autocast_lowers_the_operands_and_not_the_logits(device: str) -> None:
    problem = make((33,), FEATURES, CLASSES, F32, device)
    half = make((33,), FEATURES, CLASSES, torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        for target, other in ((problem.target, half.target), (ids_of(problem, 2), ids_of(half, 2))):
            found = linear_log_probs(problem.input, problem.linear_weight, target, logits_dtype=F32)
            lowered = problem.input.bfloat16(), problem.linear_weight.bfloat16()
            wanted = linear_log_probs(*lowered, other, logits_dtype=F32)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


REFUSED: list[tuple[torch.dtype, Any, dict[str, Any], str]] = [
    (F32, torch.bfloat16, {}, "logits_dtype must be None or float32 for float32 input, got bfloat16"),
    (torch.float64, F32, {}, "logits_dtype must be None or float64 for float64 input, got float32"),
    (torch.bfloat16, torch.float16, {}, "logits_dtype must be None or float32 for bfloat16 input, got float16"),
    (torch.bfloat16, torch.float64, {}, "logits_dtype must be None or float32 for bfloat16 input, got float64"),
    (torch.bfloat16, "float32", {}, "logits_dtype must be a torch.dtype or None, got str"),
    (torch.bfloat16, F32, {"grad_filter_eps": 0.1}, "logits_dtype must be None with grad_filter_eps, got float32"),
]


@pytest.mark.parametrize(("dtype", "logits_dtype", "options", "sentence"), REFUSED, ids=[case[-1] for case in REFUSED])
def test_what_is_refused(dtype: torch.dtype, logits_dtype: Any, options: dict[str, Any], sentence: str) -> None:
    problem = make((4,), 6, 11, dtype)
    x, w, y = problem.input, problem.linear_weight, problem.target
    calls: dict[str, Callable[[], Any]] = {
        "linear_cross_entropy": lambda: linear_cross_entropy(x, w, y, logits_dtype=logits_dtype, **options)
    }
    if not options:
        calls |= {
            "linear_log_probs": lambda: linear_log_probs(x, w, y, logits_dtype=logits_dtype),
            "linear_top_k": lambda: linear_top_k(x, w, 2, logits_dtype=logits_dtype),
            "linear_policy_loss": lambda: linear_policy_loss(x, w, y, policy, x[:, 0], logits_dtype=logits_dtype),
        }
    for name, call in calls.items():
        with pytest.raises((RuntimeError, TypeError), match=f"^{name}: {sentence}"):
            call()


def test_logits_of_inputs_dtype_by_name() -> None:
    problem = make((4,), 6, 11, torch.float64)
    x, w, y = problem.input, problem.linear_weight, problem.target
    same = linear_cross_entropy(x, w, y, logits_dtype=torch.float64, grad_filter_eps=0.1)
    torch.testing.assert_close(same, linear_cross_entropy(x, w, y), rtol=0, atol=0)


def test_chunks_hold_what_the_budget_says() -> None:
    """Float32 logits and, with gradients, these in half precision beside them."""
    for is_forward, times in ((True, 2), (False, 3)):
        sizes: tuple[Any, ...] = (6144, 256, 4096, torch.bfloat16, torch.bfloat16, "cuda", True)
        narrow = make_plan(*sizes, memory_budget=3 << 20, is_forward=is_forward)
        wide = make_plan(*sizes, memory_budget=3 << 20, is_forward=is_forward, logits_dtype=F32)
        assert wide.rows * wide.stride * 2 * times <= 3 << 20
        assert wide.rows <= narrow.rows / times
    unbounded = [make_plan(60000, 4096, 128256, *sizes[3:], logits_dtype=dtype) for dtype in (None, F32)]
    assert unbounded[1].rows * 3 <= unbounded[0].rows + 3 * 1024


@pytest.mark.parametrize("run", ["loss", "policy"])
def test_memory(run: str) -> None:
    rows, classes, budget = 2000, 5000, 1 << 18
    problem = make((rows,), 16, classes, torch.bfloat16)
    x, w, y = leaf(problem.input), leaf(problem.linear_weight), problem.target
    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: linear_cross_entropy(x, w, y, memory_budget=budget, logits_dtype=F32).backward(),
        "policy": lambda: linear_policy_loss(x, w, y, torch.sub, memory_budget=budget, logits_dtype=F32).backward(),
    }
    # As in test_memory.py: results, the budget, and slack for float32 copies of some classes and values of rows.
    results = (x.numel() + 2 * w.numel()) * 4 + (x.numel() + w.numel()) * 2
    assert peak(calls[run]) <= results + budget + (18 << 20) < rows * classes * 4 * 0.6


def test_gpus_take_a_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm, which leaves ignored rows out there, has no float32 result."""
    from torch_dcs_ops.ops.linear_cross_entropy import valid_rows

    class OnCuda:
        device, dtype = torch.device("cuda"), torch.bfloat16

    monkeypatch.setattr(valid_rows, "LEAST_PRODUCT", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(valid_rows, "_has_grouped_mm", lambda device: True)
    operands: Any = (OnCuda(), torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), False)
    assert compacts(*operands) == "device"
    assert compacts(*operands, torch.bfloat16) == "device"
    assert compacts(*operands, F32) is None
