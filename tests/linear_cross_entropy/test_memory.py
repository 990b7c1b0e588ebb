"""What a call allocates: the peak by the profiler's record of every allocation, the kernels' own included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torch_dcs_ops import linear_cross_entropy, linear_kl_div, linear_log_probs, linear_policy_loss, linear_top_k

from linear_cross_entropy.oracle import leaf, make, oracle
from support.selection import slow

FEATURES, CLASSES = 16, 5000
BUDGET = 1 << 20
# Beyond the logits: the row op's temporaries where it is the reference, slices of a 16-bit gradient, values of rows.
SLACK = 24 << 20


def peak(run: Callable[[], Any]) -> int:
    """The most bytes of CPU tensors at a time that `run` adds to what there was."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peak_inside_gemms(rows: int, features: int, classes: int, chunk: int, dtype: torch.dtype) -> int:
    """What torch's own GEMMs of a step take beside operands and results: nothing, or copies for its kernels."""
    x, w = torch.randn(rows, features).to(dtype), torch.randn(classes, features).to(dtype)
    logits, grad_x = torch.randn(chunk, classes).to(dtype), torch.empty(chunk, features, dtype=dtype)
    part = torch.randn(rows, -(-classes // 8)).to(dtype)
    grad_w = torch.empty(part.size(1), features, dtype=dtype)
    gemms: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.mm(x[:chunk], w.t(), out=logits),
        lambda: torch.mm(logits, w, out=grad_x),
        lambda: torch.mm(part.t(), x, out=grad_w),
    )
    return max(map(peak, gemms))


def full_logits(rows: int, dtype: torch.dtype) -> int:
    return rows * CLASSES * dtype.itemsize


def operands(rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    problem = make((rows,), FEATURES, CLASSES, dtype)
    return leaf(problem.input), leaf(problem.linear_weight), problem.target


def test_the_measure_sees_full_logits() -> None:
    x, w, y = operands(4000, torch.float32)
    assert peak(lambda: oracle(x, w, y)[0].backward()) > full_logits(4000, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.each_value
def test_training_memory_does_not_grow_with_the_logits(reduction: str, dtype: torch.dtype) -> None:
    rows = 12_000 // dtype.itemsize
    x, w, y = operands(rows, dtype)
    used = peak(lambda: linear_cross_entropy(x, w, y, reduction=reduction, memory_budget=BUDGET).sum().backward())
    # The gradients, at most float32 and once more in their own dtype, and a second sum of linear_weight's size.
    results = (x.numel() + 2 * w.numel()) * 4 + (x.numel() + w.numel()) * dtype.itemsize
    assert used <= results + BUDGET + SLACK < full_logits(rows, dtype) * 0.8


@pytest.mark.parametrize("eps", [None, 2**-8])
def test_leaving_out_ignored_rows_takes_no_more_memory(eps: float | None) -> None:
    """Beside the moment's rows of input, and a block of the gradient on its way to its place."""
    rows, features = 6000, 1000
    problem = make((rows,), features, 500, torch.float32, ignored=0.0)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    used = [
        peak(lambda y=y: linear_cross_entropy(x, w, y, memory_budget=BUDGET, grad_filter_eps=eps).backward())
        for y in (problem.target, problem.target.masked_fill(torch.arange(rows) % 3 == 0, -100))
    ]
    assert used[1] <= used[0] + (32 << 20) < used[0] + 2 * x.nbytes


def test_inference_memory() -> None:
    rows = 6000
    x, w, y = operands(rows, torch.float32)
    with torch.no_grad():
        for run in (lambda: linear_cross_entropy(x, w, y), lambda: linear_log_probs(x, w, y)):
            assert peak(run) <= (32 << 20) + SLACK < full_logits(rows, torch.float32) / 2


# Products of bfloat16 take a CPU half a minute here, those of all five in float32, too.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("run", ["top k", "statistics", *map(slow, ("ids", "divergence", "policy loss"))])
def test_ids_and_divergences_hold_a_chunk(run: str, dtype: torch.dtype) -> None:
    """Forward and backward; the divergence's temporaries are its blocks of float32 values, some eight at a time."""
    rows = 12_000 // dtype.itemsize
    x, w, y = operands(rows, dtype)
    teacher_x, teacher_w, _ = (t.detach() for t in operands(rows, dtype))
    ids = torch.stack((y, y.flip(0)), -1)
    results = (x.numel() + 2 * w.numel()) * 4 + (x.numel() + w.numel()) * dtype.itemsize
    limit = results + BUDGET + SLACK
    assert limit < full_logits(rows, dtype) * 0.8
    runs = {
        "ids": lambda: linear_log_probs(x, w, ids, memory_budget=BUDGET, return_argmax_log_prob=True)[0].sum(),
        "top k": lambda: linear_top_k(x, w, 4, memory_budget=BUDGET)[0].sum(),
        "divergence": lambda: linear_kl_div(x, w, teacher_x, teacher_w, direction="jsd", memory_budget=BUDGET),
        "statistics": lambda: linear_policy_loss(x, w, ids, lambda p, e: p.sum(1) - e, memory_budget=BUDGET),
        "policy loss": lambda: linear_policy_loss(x, w, y, torch.sub, memory_budget=BUDGET),
    }
    assert peak(lambda: runs[run]().backward()) <= limit


def test_a_frozen_head_costs_no_gradient() -> None:
    problem = make((64,), 400, CLASSES, torch.float32)
    x, w = leaf(problem.input), problem.linear_weight
    used = peak(lambda: linear_cross_entropy(x, w, problem.target, memory_budget=1).backward())
    assert used < w.nbytes / 2 + SLACK < w.nbytes * 4  # the row op's own temporaries are in it
    assert peak(lambda: linear_cross_entropy(leaf(x), leaf(w), problem.target).backward()) > w.nbytes


def test_backward_scales_in_place() -> None:
    """8 MB of gradient that exist already: a backward that frees the graph adds next to nothing."""
    problem = make((64,), 400, CLASSES, torch.float32)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    loss = linear_cross_entropy(x, w, problem.target) * 3
    assert peak(lambda: loss.backward(retain_graph=True)) > w.nbytes
    x.grad = w.grad = None
    assert peak(loss.backward) < w.nbytes / 8


def test_create_graph_costs_no_logits_until_they_are_needed() -> None:
    rows = 6000
    x, w, y = operands(rows, torch.float32)
    loss = linear_cross_entropy(x, w, y, memory_budget=BUDGET)
    used = peak(lambda: torch.autograd.grad(loss, (x, w), create_graph=True))
    assert used < x.nbytes + w.nbytes + BUDGET + SLACK < full_logits(rows, torch.float32) / 2
