"""Compiled log-probabilities and policy losses whose memory_budget has room for all logits: these are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops import linear_log_probs, linear_policy_loss
from torch_dcs_ops.reference.linear_cross_entropy.log_probs import HeadOptions

from linear_cross_entropy.oracle import leaf, make
from linear_cross_entropy.policy_oracle import ids_of, policy
from linear_cross_entropy.recorder import Recorder
from linear_cross_entropy.test_frozen_head import Products

ALL = 15 * 14 * 8  # bytes of 15 rows of 13 float64 logits, which are padded to 16 bytes
KEPT, OF_KEPT = "dcs._linear_log_probs_logits.default", "dcs._linear_log_probs_of_logits.default"


def log_probs(x: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    results = linear_log_probs(
        x.tanh(), w, target, linear_bias=b, return_lse=True, return_argmax_log_prob=True, **options
    )
    values, entropy, lse, best = results
    return (values * 2).sum() - entropy.square().sum() + lse.sum() + best.sum()


def two_results(x: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    values, entropy = linear_log_probs(x.tanh(), w, target, linear_bias=b, **options)
    return (values * 2).sum() - entropy.square().sum()


def loss(x: Tensor, w: Tensor, b: Tensor, target: Tensor, **options: Any) -> Tensor:
    def fn(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
        return policy(log_probs.reshape(log_probs.size(0), -1).sum(1), entropy, advantages)

    return linear_policy_loss(x.tanh(), w, target, fn, x.detach()[..., 0], linear_bias=b, **options) * 3


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("f", [log_probs, two_results, loss])
@pytest.mark.each_value
def test_three_products(
    device: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch, f: Callable[..., Tensor], count: int | None
) -> None:
    """Of ignored rows too; four where there is less room, or none is named."""
    problem = make(device=device)
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    target, counter = ids_of(problem, count), Products(monkeypatch)
    wanted = torch.autograd.grad(f(*leaves, target), leaves)
    for budget, ops in ((ALL, [[KEPT], [OF_KEPT]]), (ALL - 1, None), (None, None)):
        recorder = Recorder()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *args, budget=budget: f(*args, memory_budget=budget), fullgraph=True, backend=recorder
        )
        counter.flops = 0
        torch.testing.assert_close(torch.autograd.grad(compiled(*leaves, target), leaves), wanted)
        if ops is None:
            assert KEPT not in recorder.ops[0]
        else:
            assert recorder.ops == ops
            assert counter.flops == 3 * (2 * problem.input.numel() * 13)


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "dcs"])
def test_backends(device: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    problem, counter = make(device=device), Products(monkeypatch)
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    wanted = torch.autograd.grad(loss(*leaves, problem.target), leaves)
    counter.flops = 0
    compiled = torch.compile(lambda *args: loss(*args, memory_budget=ALL), fullgraph=True, backend=backend)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves, problem.target), leaves), wanted)
    assert counter.flops == 3 * (2 * problem.input.numel() * 13)


def test_whatever_else_is_asked_for(device: str, fresh_compiler: None) -> None:
    """Upstream gradients that are not there, frozen operands, other logits, and sizes that are symbols."""
    problem = make(dtype=torch.bfloat16, device=device)
    for options in ({}, {"logits_dtype": torch.float32, "softcap": 3.0}):
        for frozen in ((), (0,), (1, 2)):
            operands = [
                t if at in frozen else leaf(t)
                for at, t in enumerate((problem.input, problem.linear_weight, problem.linear_bias))
            ]
            needed = [t for t in operands if t.requires_grad]
            for f in (two_results, lambda *args, **more: linear_log_probs(*args[:2], args[3], **more)[1].sum()):
                compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
                results = [
                    torch.autograd.grad(run(*operands, problem.target, **options, **more), needed, allow_unused=True)
                    for run, more in ((f, {}), (compiled, {"memory_budget": 1 << 20}))
                ]
                torch.testing.assert_close(*results)
    recorder = Recorder()
    compiled = torch.compile(two_results, fullgraph=True, backend=recorder, dynamic=True)
    leaves = [leaf(t) for t in problem[:2]]
    compiled(*leaves, problem.linear_bias, problem.target, memory_budget=1 << 20).backward()
    assert KEPT not in recorder.ops[0]


def test_opcheck(device: str) -> None:
    problem = make((3, 2), 6, 11, torch.float32, device)
    ops, operands = torch.ops.dcs, problem[:2]
    for target in (problem.target, ids_of(problem, 3).clamp(max=10)):
        call = (*operands, target, problem.linear_bias, *HeadOptions())
        for needs in ((True, True), (False, False)):
            assert set(opcheck(ops._linear_log_probs_logits.default, (*call, *needs)).values()) == {"SUCCESS"}
        ids = target if target.dim() == 3 else target.unsqueeze(-1)
        logits = ops._linear_log_probs_logits(*call, True, False)[-1]
        grads = torch.randn_like(ids, dtype=torch.float32), None, torch.randn(3, 2, device=device)
        args = (*grads, logits, *operands, ids, *call[3:], True, True, True)
        assert set(opcheck(ops._linear_log_probs_of_logits.default, args).values()) == {"SUCCESS"}
        torch.testing.assert_close(
            ops._linear_log_probs_of_logits(*args), ops._linear_log_probs_backward(*args[:3], *args[4:])
        )
    with pytest.raises(RuntimeError, match="linear_log_probs: logits must be those of every row, got the shape"):
        ops._linear_log_probs_of_logits(*args[:3], logits[1:], *args[4:])
