"""linear_policy_loss against a plain softmax over full logits in float64: values, all gradients, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import linear_policy_loss
from torch_dcs_ops.ops.linear_cross_entropy import gradients as gradients_module
from torch_dcs_ops.ops.linear_cross_entropy import ids as ids_module
from torch_dcs_ops.ops.linear_cross_entropy import valid_rows

from linear_cross_entropy.grouped_products import grouped_mm_with_nan
from linear_cross_entropy.oracle import Problem, leaf, make, relative_error
from linear_cross_entropy.policy_oracle import arguments, ids_of, plain, policy, surrogate
from linear_cross_entropy.recorder import Recorder
from support.selection import slow

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row at a time": {"memory_budget": 1},
    "softcap, scale": {"softcap": 2.5, "logit_scale": -0.7},
    "ids are ignored by 3": {"ignore_index": 3},
    "no entropy": {"need_entropy": False},
    "uneven chunks": {"memory_budget": 4 * 13 * 8, "softcap": 3.0, "ignore_index": None},
}


def check(problem: Problem, target: Tensor, args: tuple[Any, ...], **options: Any) -> None:
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    every = [*leaves, *(arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad)]
    got = linear_policy_loss(*leaves[:2], target, surrogate, *args, linear_bias=leaves[2], **options)
    options.pop("memory_budget", None)
    wanted = plain(surrogate, *leaves, target, *args, **options)
    torch.testing.assert_close(got, wanted)
    for grad in (torch.ones_like(wanted), torch.zeros_like(wanted), torch.randn_like(wanted)):
        results = [
            torch.autograd.grad(loss, every, grad, retain_graph=True, allow_unused=True, materialize_grads=True)
            for loss in (got, wanted)
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("count", [None, 1, 2, 8, 64])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_value
def test_values_and_gradients(device: str, name: str, count: int | None) -> None:
    """Of operands and row arguments, several ids with equal ones among them."""
    problem = make(device=device)
    ignored = OPTIONS[name].get("ignore_index") or -100
    ids = ids_of(problem, count)
    ids = torch.where(ids == -100, ignored, ids)
    with torch.device(device):
        args = arguments("random", most_ids=max(8, count or 0))
    for reduction in ("mean", "sum", "none"):
        check(problem, ids, args, reduction=reduction, **OPTIONS[name])


@pytest.mark.parametrize("kind", ["ones", "zeros"])
@pytest.mark.parametrize("count", [None, 2])
def test_row_arguments_of_ones_and_zeros(device: str, count: int | None, kind: str) -> None:
    problem = make(device=device)
    with torch.device(device):
        check(problem, ids_of(problem, count), arguments(kind))


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("left_out", [True, False])
def test_nan_in_an_ignored_row(device: str, left_out: bool, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches nothing, wherever it is among the arguments."""
    if not left_out:
        monkeypatch.setattr(ids_module, "compacts", lambda *_: None)
    problem = make(device=device)
    ids = ids_of(problem, count)
    with torch.device(device):
        old, _, table, *rest = arguments("random")
    ignored = problem.target == -100
    assert bool(ignored.any())
    results = []
    for value in (0.0, torch.nan):
        filled = [leaf(old.masked_fill(ignored, value)), leaf(table.masked_fill(ignored.unsqueeze(-1), value))]
        leaves = [leaf(problem.input), leaf(problem.linear_weight), *filled]
        loss = linear_policy_loss(*leaves[:2], ids, surrogate, filled[0], filled[0], filled[1], *rest)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_arguments_of_ignored_rows_have_no_gradient(device: str, reduction: str, dtype: torch.dtype) -> None:
    """Of those that loss_fn sees as well, where its derivative is no number."""
    problem = make(dtype=dtype, device=device)
    valid = problem.target != -100
    assert not valid.all()
    weights = leaf(torch.where(valid, 0.5, torch.nan))
    loss = linear_policy_loss(
        leaf(problem.input), *problem[1:3], lambda log_probs, _, a: log_probs * a.log(), weights, reduction=reduction
    )
    (grad,) = torch.autograd.grad(loss.sum(), weights)
    torch.testing.assert_close(grad != 0, valid)
    assert bool(grad.isfinite().all())


def check_errors(problem: Problem, ids: Tensor, dtype: torch.dtype, **options: Any) -> None:
    """Of the gradients not more than torch makes on float32 logits that were rounded to the dtype; of the loss no more
    than that rounding. No rounding of what chunks add to weight's gradient.
    """
    with torch.device(ids.device):
        args = arguments("random", ids.shape[:1])
    leaves = [leaf(t.double()) for t in problem[:2]]
    rows = plain(surrogate, *leaves, None, ids, *args, **options, reduction="none")
    exact = rows.sum() / (rows != 0).sum()
    exact_gradients = torch.autograd.grad(exact, leaves)
    args = tuple(arg.detach().float() if isinstance(arg, Tensor) else arg for arg in args)
    leaves = [leaf(t) for t in problem[:2]]
    losses = (
        linear_policy_loss(*leaves, ids, surrogate, *args, **options, memory_budget=10 * 16 * dtype.itemsize),
        plain(surrogate, *leaves, None, ids, *args, **options),
    )
    floor = 4 * torch.finfo(torch.float32).eps
    assert losses[0].dtype == torch.float32
    assert abs(float((losses[0] - exact).detach())) <= (torch.finfo(dtype).eps + floor) * float(
        rows.detach().abs().mean()
    )
    errors = [list(map(relative_error, torch.autograd.grad(loss, leaves), exact_gradients)) for loss in losses]
    for got, eager in zip(*errors, strict=True):
        assert got <= 1.2 * eager + floor


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision(device: str, dtype: torch.dtype, count: int | None) -> None:
    problem = make((64,), 16, 13, dtype, device)
    check_errors(problem, ids_of(problem, count), dtype)


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("way", ["run with the others", "left out on the device", "left out by their number"])
def test_ignored_rows_on_gpus(way: str, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA does, on a CPU: run with the others, or left out by products that leave theirs unset, here NaN, or
    by those of fewer rows, once their number has been read.
    """
    where = None if way == "run with the others" else "device"
    monkeypatch.setattr(ids_module, "compacts", lambda *_: where)
    monkeypatch.setattr(valid_rows, "may_wait", lambda *_: way == "left out by their number")
    monkeypatch.setattr(functional, "grouped_mm", grouped_mm_with_nan)
    monkeypatch.setattr(gradients_module, "grouped_product_fills", lambda *_: True)
    problem = make((40,), 8, 16, torch.float32, ignored=0.5)
    for options in ({}, {"softcap": 2.5, "logit_scale": -0.7}, {"need_entropy": False}):
        check_errors(problem, ids_of(problem, count), torch.float32, **options)
    if way != "left out on the device":  # grouped_mm has no float64
        problem = make(ignored=0.5)
        check(problem, ids_of(problem, count), arguments("random"), memory_budget=300)


def test_float16_with_a_scaled_loss(device: str) -> None:
    """As by a GradScaler: gradients of a mean are below float16's range until they are multiplied."""
    problem = make((1000,), 8, 2000, torch.float16, device)
    exact_leaves, leaves = ([leaf(t.to(dtype)) for t in problem[:2]] for dtype in (torch.float64, torch.float16))
    advantages = problem.input[:, 0].float()

    def plainly(x: Tensor, w: Tensor) -> Tensor:
        log_p = (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
        valid = problem.target >= 0
        log_probs = log_p.gather(1, problem.target.clamp(min=0).unsqueeze(1)).squeeze(1)
        rows = policy(log_probs, -(log_p.exp() * log_p).sum(1), advantages)
        return torch.where(valid, rows, 0).sum() / valid.sum()

    exact = torch.autograd.grad(plainly(*exact_leaves), exact_leaves)
    losses = linear_policy_loss(*leaves, problem.target, policy, advantages), plainly(*leaves)
    scale = 2.0**13
    errors = [
        [relative_error(g.double() / scale, e) for g, e in zip(found, exact, strict=True)]
        for found in (torch.autograd.grad(scale * loss, leaves) for loss in losses)
    ]
    for got, eager in zip(*errors, strict=True):
        assert got <= 1.2 * eager


def products(run: Callable[[], Any], x: Tensor, w: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / (2 * x.numel() * w.size(0))


@pytest.mark.parametrize("count", [None, 2])
def test_the_logits_are_made_once(device: str, count: int | None) -> None:
    problem = make((16,), device=device, ignored=0.0)
    x, w, ids, advantages = problem.input, problem.linear_weight, ids_of(problem, count), problem.linear_bias[:1]
    fn = policy if count is None else lambda log_probs, *rest: policy(log_probs.sum(1), *rest)

    def step(needs_x: bool, needs_w: bool, **options: Any) -> float:
        leaves = x.clone().requires_grad_(needs_x), w.clone().requires_grad_(needs_w)
        loss = linear_policy_loss(*leaves, ids, fn, advantages, memory_budget=4 * 16 * 8, **options)
        return products(lambda: None if not loss.requires_grad else loss.sum().backward(), x, w)

    def forward(needs_x: bool, needs_w: bool, **options: Any) -> float:
        leaves = x.clone().requires_grad_(needs_x), w.clone().requires_grad_(needs_w)
        return products(lambda: linear_policy_loss(*leaves, ids, fn, advantages, **options), x, w)

    for needs_x, needs_w in ((True, True), (True, False), (False, True), (False, False)):
        assert forward(needs_x, needs_w) == 1 + needs_x + needs_w
        assert step(needs_x, needs_w) == 0
    assert forward(True, True, reduction="none") == 1
    assert step(True, True, reduction="none") == 3


@pytest.mark.parametrize("count", [None, 2])
def test_derivatives(device: str, count: int | None) -> None:
    problem = make((3,), 3, 5, device=device)
    ids = None if count is None else torch.tensor([[1, 1], [2, -100], [0, 4]], device=device)
    target = problem.target if ids is None else ids
    with torch.device(device):
        args = arguments("random", (3,))

    def f(x: Tensor, w: Tensor, bias: Tensor, old: Tensor, beta: Tensor) -> Tensor:
        return linear_policy_loss(
            x, w, target, surrogate, old, *args[1:3], beta, 2.0, linear_bias=bias, softcap=4.0, memory_budget=40
        )

    leaves = (leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias), args[0], args[3])
    assert gradcheck(f, leaves, check_forward_ad=True)
    assert gradgradcheck(f, leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(device: str) -> None:
    problem = make((4,), device=device, ignored=0.3)
    with torch.device(device):
        inputs, args = torch.randn(3, 4, 7, dtype=torch.float64), arguments("random", (4,))

    def ours(x: Tensor, w: Tensor, old: Tensor) -> Tensor:
        return linear_policy_loss(x, w, problem.target, surrogate, old, *args[1:])

    def full(x: Tensor, w: Tensor, old: Tensor) -> Tensor:
        log_p = functional.linear(x, w).log_softmax(-1)
        valid = problem.target >= 0
        log_probs = log_p.gather(-1, torch.where(valid, problem.target, 0).unsqueeze(-1)).squeeze(-1)
        rows = surrogate(log_probs, -(log_p.exp() * log_p).sum(-1), old, *args[1:])
        return torch.where(valid, rows, 0).sum() / valid.sum()

    operands = (inputs[0], problem.linear_weight, args[0])
    for transform in (
        lambda f: func.grad(f, (0, 1, 2))(*operands),
        lambda f: func.vmap(func.grad(f, (0, 1, 2)), (0, None, None))(inputs, *operands[1:]),
        lambda f: func.jvp(f, operands, operands),
        lambda f: func.hessian(f)(*operands),
    ):
        torch.testing.assert_close(transform(ours), transform(full))


@pytest.mark.parametrize("count", [slow(None), 3])
def test_compiled(device: str, count: int | None, fresh_compiler: None) -> None:
    """A whole graph, of linear_log_probs and the caller's function, for any size."""

    def f(x: Tensor, w: Tensor, target: Tensor, *args: Any) -> Tensor:
        return 2 * linear_policy_loss(x.tanh(), w, target, surrogate, *args, logit_scale=0.5)

    recorder = Recorder()
    compiled = torch.compile(f, fullgraph=True, backend=recorder, dynamic=True)
    for lead in ((4, 5), (2, 9)):
        problem = make(lead, dtype=torch.float32, device=device)
        with torch.device(device):
            args = arguments("random", lead, torch.float32)
        leaves = [leaf(problem.input), leaf(problem.linear_weight)]
        every = [*leaves, args[0], args[3]]
        results = [torch.autograd.grad(run(*leaves, ids_of(problem, count), *args), every) for run in (f, compiled)]
        torch.testing.assert_close(*results)
    assert len(recorder.ops) == 2  # a forward and a backward, not again for the other size
    assert recorder.ops[0] == [
        "dcs._linear_cross_entropy_forward.default" if count is None else "dcs.linear_log_probs.full"
    ]


def test_exported_and_traced(device: str) -> None:
    """Traced on tensors without values; what is exported holds the operator, whose backward makes the logits again."""
    problem = make(dtype=torch.float32, device=device)
    leaves, advantages = [leaf(t) for t in problem[:2]], problem.input[..., 0]

    class Loss(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return linear_policy_loss(x, w, problem.target, policy, advantages)

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(Loss()(x, w), (x, w))

    for strict in (True, False):
        program = torch.export.export(Loss(), tuple(leaves), strict=strict)
        assert "dcs.linear_log_probs" in str(program.graph)
        torch.testing.assert_close(program.module()(*leaves), Loss()(*leaves))
    graph = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    torch.testing.assert_close(graph(*leaves), gradients(*leaves))
    meta = [t.to("meta") for t in (*leaves, problem.target)]
    assert linear_policy_loss(*meta, policy, advantages.to("meta")).shape == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(device: str, reentrant: bool) -> None:
    """The forward that runs within the backward, and saved tensors that may be unpacked once."""
    problem = make(dtype=torch.float32, device=device)
    leaves = [leaf(t) for t in problem[:2]]

    def f(x: Tensor, w: Tensor) -> Tensor:
        return linear_policy_loss(x, w, problem.target, policy, problem.input[..., 0])

    for run in (f, lambda *args: checkpoint(f, *args, use_reentrant=reentrant)):
        run(*leaves).backward()
    wanted = torch.autograd.grad(f(*leaves), leaves)
    torch.testing.assert_close([t.grad for t in leaves], [2 * g for g in wanted])


def test_backward_twice(device: str) -> None:
    """The gradients are scaled in place only where nobody can see them again; a batch of upstream gradients is one."""
    problem = make(device=device)
    leaves = [leaf(t) for t in problem[:2]]
    loss = linear_policy_loss(*leaves, problem.target, policy, problem.input[..., 0])
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    factors = torch.tensor([2.0, -1.0], dtype=torch.float64, device=device)
    batch = torch.autograd.grad(loss, leaves, factors, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batch, tuple(torch.stack([2 * g, -g]) for g in wanted))
    for _ in range(2):
        (3 * loss).backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([t.grad for t in leaves], [7 * g for g in wanted])


def test_autocast(device: str) -> None:
    problem = make(dtype=torch.float32, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        leaves = [leaf(t) for t in problem[:2]]
        with torch.autocast(device, dtype):
            loss = linear_policy_loss(*leaves, problem.target, policy, problem.input[..., 0])
        half = [t.to(dtype) for t in leaves]
        wanted = linear_policy_loss(*half, problem.target, policy, problem.input[..., 0])
        assert torch.equal(loss, wanted)
        results = [torch.autograd.grad(value, leaves, retain_graph=True) for value in (loss, wanted)]
        torch.testing.assert_close(*results, rtol=0, atol=0)
        # Hidden states that an autocast layer has left in half precision, beside a float32 head.
        with torch.autocast(device, dtype):
            mixed = linear_policy_loss(half[0], leaves[1], problem.target, policy, problem.input[..., 0])
        assert torch.equal(mixed, wanted)


@pytest.mark.parametrize("count", [None, 2])
def test_statistics_of_every_row(device: str, count: int | None) -> None:
    """The same from a call with gradients and from one without."""
    problem = make(device=device)
    ids = ids_of(problem, count)
    fn = policy if count is None else lambda log_probs, *rest: policy(log_probs.sum(1), *rest)
    results = []
    for needs in (True, False):
        x = problem.input.clone().requires_grad_(needs)
        for need_entropy in (True, False):
            loss, *rows = linear_policy_loss(
                x, problem.linear_weight, ids, fn if need_entropy else lambda p, _: p.flatten(1).sum(1) if count else p,
                *([problem.input[..., 0]] if need_entropy else []), need_entropy=need_entropy, return_statistics=True,
                memory_budget=300,
            )  # fmt: skip
            assert loss.requires_grad is needs
            assert not any(values.requires_grad for values in rows)
            assert [values.shape for values in rows] == [ids.shape, ids.shape[:2]][: 1 + need_entropy]
            results.append(rows)
    torch.testing.assert_close(results[:2], results[2:])
    log_p = functional.linear(*problem[:2]).log_softmax(-1)
    wanted = log_p.gather(-1, ids.reshape(3, 5, -1).clamp(min=0)).reshape(ids.shape)
    torch.testing.assert_close(results[0][0], torch.where(ids < 0, 0, wanted))
