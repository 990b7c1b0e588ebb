"""Rows without a target are left out of the work: the same results and gradients, whichever rows these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import linear_cross_entropy, linear_log_probs
from torch_dcs_ops.ops.linear_cross_entropy import chunks as driver
from torch_dcs_ops.ops.linear_cross_entropy import gradients as gradients_module
from torch_dcs_ops.ops.linear_cross_entropy import valid_rows
from torch_dcs_ops.ops.linear_cross_entropy.plan import make_plan
from torch_dcs_ops.ops.linear_cross_entropy.valid_rows import ValidRows, compacts, row_count
from torch_dcs_ops.reference.linear_cross_entropy.loss import Needs, Options

from linear_cross_entropy.filter.oracle import EPS, budget_of
from linear_cross_entropy.filter.oracle import operands as sparse_operands
from linear_cross_entropy.grouped_products import grouped_mm_with_nan
from linear_cross_entropy.oracle import Problem, assert_within_budget, gradients, leaf, make, oracle, relative_error
from support.cuda_graphs import captured

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = 150
MASKS: dict[str, Callable[[int], Tensor]] = {
    "none": lambda rows: torch.zeros(rows, dtype=torch.bool),
    "all": lambda rows: torch.ones(rows, dtype=torch.bool),
    "first": lambda rows: torch.arange(rows) == 0,
    "last": lambda rows: torch.arange(rows) == rows - 1,
    "all but the last": lambda rows: torch.arange(rows) < rows - 1,
    "first half": lambda rows: torch.arange(rows) < rows // 2,
    "last half": lambda rows: torch.arange(rows) >= rows // 2,
    "alternating": lambda rows: torch.arange(rows) % 2 == 0,
    "random": lambda rows: torch.rand(rows, generator=torch.Generator().manual_seed(1)) < 0.4,
}


def problem_of(mask: str, dtype: torch.dtype = F64, device: str = "cpu", rows: int = ROWS, **sizes: int) -> Problem:
    problem = make((rows,), dtype=dtype, device=device, ignored=0.0, **sizes)
    return problem._replace(target=problem.target.masked_fill(MASKS[mask](rows).to(device), -100))


def step(run: Callable[..., Any], problem: Problem, dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Gradients of input, linear_weight and linear_bias from random upstream ones of the loss; and the loss."""
    leaves = [leaf(t.to(dtype)) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    loss = run(*leaves[:2], problem.target, linear_bias=leaves[2], **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    torch.manual_seed(3)
    return gradients(loss, *leaves, grad=torch.randn(loss.shape, dtype=F64).to(loss)), loss.detach()


@pytest.fixture(params=["large chunks", "small chunks", "number read"])
def on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA runs: the number of valid rows stays in a tensor, for grouped_mm, which runs on a CPU as well.

    What it does not compute is NaN here, as it may be there. Of small chunks input's gradient is another product. Or
    the number is read once the first product has been begun.
    """
    if request.param == "number read":
        monkeypatch.setattr(valid_rows, "may_wait", lambda *_: True)
    monkeypatch.setattr(driver, "compacts", lambda *_: "device")
    monkeypatch.setattr(functional, "grouped_mm", grouped_mm_with_nan)
    monkeypatch.setattr(gradients_module, "grouped_product_fills", lambda *_: request.param == "large chunks")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(device: str, mask: str, reduction: str) -> None:
    """Gradients of loss and lse, each with upstream gradients of its own, over many chunks and one."""
    problem = problem_of(mask, device=device)
    for options in ({}, {"weight": problem.weight, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.2}):
        results = []
        for run in (linear_cross_entropy, oracle):
            more: dict[str, Any] = {}
            if run is linear_cross_entropy:
                more = {"return_lse": True, "memory_budget": 13 * 8 * 16}
            leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
            more |= options | {"linear_bias": leaves[2], "reduction": reduction}
            loss, lse = run(*leaves[:2], problem.target, **more)[:2]
            torch.manual_seed(2)
            upstream = [torch.randn_like(loss), torch.randn_like(lse)]
            if mask == "all" and reduction == "mean":
                upstream[0] = torch.zeros_like(loss)
            alone = torch.autograd.grad(loss, leaves, upstream[0], retain_graph=True)
            results.append((loss, lse, *alone, *torch.autograd.grad((loss, lse), leaves, upstream)))
        if mask == "all":
            # F.cross_entropy's own gradients are nan for a mean.
            loss, *rest = results[0]
            assert bool(loss.isnan() if reduction == "mean" else (loss == 0).all())
            assert all(torch.equal(t, torch.zeros_like(t)) for t in rest)
        else:
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("mask", MASKS)
def test_log_probs_and_entropy(device: str, mask: str) -> None:
    problem = problem_of(mask, device=device)
    valid = problem.target >= 0
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    log_p = functional.linear(*leaves).log_softmax(-1)
    own = log_p.gather(-1, problem.target.clamp(0).unsqueeze(-1)).squeeze(-1)
    expected = torch.where(valid, own, 0), torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0)
    got = linear_log_probs(*leaves[:2], problem.target, linear_bias=leaves[2], memory_budget=13 * 8 * 16)
    torch.testing.assert_close(got, expected)
    grads = [torch.randn_like(e) for e in expected]
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, grads), torch.autograd.grad(expected, leaves, grads), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("mask", ["last", "first half", "random"])
def test_dtypes(device: str, mask: str, dtype: torch.dtype) -> None:
    """Every way in which linear_weight's gradient is summed."""
    rows, features, classes = 600, 16, 520
    problem = problem_of(mask, dtype, device, rows, features=features, classes=classes)
    budgets = [None, 16 * classes * dtype.itemsize, 200 * classes * dtype.itemsize]
    for reduction in ("mean", "none"):
        eager, exact = (step(oracle, problem, wide, reduction=reduction)[0] for wide in (dtype, F64))
        for budget in budgets:
            got, _ = step(linear_cross_entropy, problem, dtype, reduction=reduction, memory_budget=budget)
            assert_within_budget(got, eager, exact, [1.5] * 3)


@pytest.mark.parametrize("eps", [None, EPS])
def test_frozen_operands(eps: float | None) -> None:
    problem = problem_of("random", F32, classes=200)
    x, w, b = (leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias))
    options: dict[str, Any] = {"grad_filter_eps": eps, "memory_budget": 1 << 15}
    expected = gradients(linear_cross_entropy(x, w, problem.target, linear_bias=b, **options), x, w, b)
    (alone,) = gradients(linear_cross_entropy(x, w.detach(), problem.target, linear_bias=b.detach(), **options), x)
    assert torch.equal(alone, expected[0])
    (alone,) = gradients(linear_cross_entropy(x.detach(), w, problem.target, linear_bias=b.detach(), **options), w)
    assert torch.equal(alone, expected[1])


@pytest.mark.parametrize("eps", [None, EPS])
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_it_is_the_call_without_these_rows(dtype: torch.dtype, eps: float | None) -> None:
    """Bit for bit on a CPU, which takes chunks of the valid rows."""
    x, w, target, bias, _ = sparse_operands(ROWS, dtype)
    valid = target >= 0
    options: dict[str, Any] = {"grad_filter_eps": eps, "memory_budget": budget_of(64, dtype), "label_smoothing": 0.1}
    found = []
    for rows in (slice(None), valid):
        leaves = [leaf(t) for t in (x[rows], w, bias)]
        losses = linear_cross_entropy(*leaves[:2], target[rows], linear_bias=leaves[2], reduction="none", **options)
        found.append((losses, *gradients(losses.sum(), *leaves)))
    (losses, grad_x, *others), (few_losses, few_grad_x, *few_others) = found
    assert torch.equal(losses[valid], few_losses)
    assert not losses[~valid].any()
    assert torch.equal(grad_x[valid], few_grad_x)
    assert not grad_x[~valid].any()
    assert all(map(torch.equal, others, few_others))


def test_rows_are_not_compacted_where_none_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("none", F32)

    def fail(*_: Any) -> None:
        raise AssertionError("rows were compacted")

    monkeypatch.setattr(valid_rows, "ValidRows", fail)
    for reduction in ("mean", "none"):
        step(linear_cross_entropy, problem, F32, reduction=reduction)
    with pytest.raises(AssertionError, match="rows were compacted"):
        step(linear_cross_entropy, problem_of("last", F32), F32)


def test_predictions_are_of_every_row(device: str) -> None:
    problem = problem_of("random", device=device)
    results = [
        linear_cross_entropy(
            leaf(problem.input), problem.linear_weight, problem.target, return_predictions=predictions, return_lse=True
        )
        for predictions in (True, False)
    ]
    torch.testing.assert_close(results[0][:2], results[1])
    logits = functional.linear(problem.input, problem.linear_weight)
    assert torch.equal(results[0][2], logits.argmax(-1))


def test_an_ignored_row_is_not_looked_at() -> None:
    """As the indices into a batch that is padded: with anything."""
    problem = problem_of("random", F32)
    dirty = problem._replace(input=problem.input.masked_fill((problem.target < 0).unsqueeze(1), torch.nan))
    for eps in (None, EPS):
        results = [step(linear_cross_entropy, p, F32, reduction="sum", grad_filter_eps=eps) for p in (problem, dirty)]
        assert torch.equal(results[0][1], results[1][1])
        assert all(map(torch.equal, results[0][0], results[1][0]))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("mask", MASKS)
def test_order(mask: str, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back by blocks of a few rows."""
    monkeypatch.setattr(valid_rows, "_BLOCK_BYTES", 7 * 3 * 4)
    x, valid = torch.randn(ROWS, 3), ~MASKS[mask](ROWS)
    rows = ValidRows(x, torch.where(valid, 5, -3), -3, where)
    count = int(valid.sum())
    assert rows.size(0) == (count if where == "host" else ROWS)
    assert torch.equal(rows[0:ROWS], torch.cat((x[valid], x[~valid]))[: rows.size(0)])
    for values in (x, x[:, 0].contiguous()):
        place = torch.full_like(values, torch.nan)
        place[:count] = rows.gather(values)[:count]
        rows.restore_(place)
        expected = torch.where(valid.view(-1, *(1,) * (values.dim() - 1)), values, 0)
        assert torch.equal(place, expected)
    counts = [row_count(rows, slice(start, min(start + 40, ROWS))) for start in range(0, ROWS, 40)]
    assert row_count(rows, slice(0, ROWS // 4)) is None
    if where == "host":
        assert counts == [None] * 4
    else:
        assert [int(c) for c in counts] == [min(max(count - start, 0), 40) for start in (0, 40, 80)] + [
            min(max(count - 120, 0), 30)
        ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("total", [ROWS, 1])
def test_a_number_that_is_read(total: int, mask: str) -> None:
    """There and back once the number of valid rows is known: no copies where that is all of them."""
    x, valid = torch.randn(total, 3), ~MASKS[mask](total)
    rows = ValidRows(x, torch.where(valid, 5, -3), -3, "device", waits=True)
    other = rows.of(x[:, :2])
    assert rows.size(0) == other.size(0) == total
    first = rows.rows_before_number(100)
    assert first == max(total // 4, 1)
    order = torch.cat((x[valid], x[~valid]))
    assert torch.equal(rows[0:first], order[:first])
    rows.settle(first)
    count = max(int(valid.sum()), first)
    assert rows.size(0) == other.size(0) == count
    assert rows.rows_before_number(100) == 100
    assert row_count(rows, slice(first, count)) is None
    for part in (slice(None), slice(first, count), torch.arange(first)):
        assert torch.equal(rows[part], order[:count][part])
    shared = rows[0:count].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert shared == (rows.is_every_row and other.is_every_row) == bool(valid.all())
    place = torch.full_like(x, torch.nan)
    place[:count] = rows.gather(x)[:count]
    rows.restore_(place)
    assert torch.equal(place, torch.where(valid.unsqueeze(1), x, 0))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_products_of_as_many_rows_as_are_valid(frozen: bool, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quarter of them, which the first product takes, at least; plain ones."""
    monkeypatch.setattr(valid_rows, "may_wait", lambda *_: True)
    monkeypatch.setattr(driver, "compacts", lambda *_: "device")
    monkeypatch.delattr(functional, "grouped_mm")
    problem = problem_of(mask, F32, features=8, classes=64)
    options = Options(reduction="sum", memory_budget=4 * 64 * 60 if frozen else None)  # addmm_ has no formula
    with FlopCounterMode(display=False) as counter:
        driver.forward(*problem[:3], None, None, options, Needs(True, not frozen, False), False, False)
    rows = max(int((problem.target >= 0).sum()), ROWS // 4)
    assert counter.get_total_flops() == (2 if frozen else 3) * 2 * rows * 8 * 64


def test_what_is_compacted() -> None:
    x, w, target = torch.randn(6, 8), torch.randn(16, 8), torch.zeros(6, dtype=torch.int64)
    assert compacts(x, w, target, False) == "host"
    assert compacts(x, w, target, True) is None
    assert compacts(x, w, torch.zeros(6, 16), False) is None
    assert compacts(x.to("meta"), w, target, False) is None


# Rows, features and options that make each sum of linear_weight's gradient; "shared" with all of a slice's gradients in
# the result's memory, and with a part of them.
SUMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "direct": (150, 32, {}),
    "shared": (64, 128, {"memory_budget": 2 * 504 * 20}),
    "shared in part": (150, 96, {"memory_budget": 2 * 504 * 40}),
    "float32": (150, 16, {"memory_budget": 2 * 504 * 40}),
    "compact": (150, 96, {"memory_budget": 2 * 504 * 40, "accumulate_dtype": BF16}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.usefixtures("on_the_device")
def test_on_the_device(sums: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accurate as over all of the rows."""
    rows, features, more = SUMS[sums]
    problem = problem_of(mask, BF16, rows=rows, features=features, classes=504)
    limits = more.get("memory_budget"), more.get("accumulate_dtype")
    assert make_plan(rows, features, 504, BF16, BF16, "cpu", True, *limits).accumulation == sums.split()[0]
    for options in ({}, {"weight": problem.weight, "label_smoothing": 0.1, "z_loss": 0.2}):
        for reduction in ("sum", "none"):
            options = options | {"reduction": reduction}
            got, loss = step(linear_cross_entropy, problem, BF16, **options, **more)
            assert not got[0][problem.target < 0].any()
            if mask == "all":
                assert not any(values.any() for values in (*got, loss))
                continue
            with monkeypatch.context() as without:
                without.setattr(driver, "compacts", lambda *_: None)
                every, whole_loss = step(linear_cross_entropy, problem, BF16, **options, **more)
            torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-4)
            assert_within_budget(got, every, step(oracle, problem, F64, **options)[0], [1.1, 1.1, 1.1])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("on_the_device")
def test_filtered_on_the_device(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored rows at the end share nothing: the gradients are those of valid rows alone."""
    x, w, target, bias, _ = sparse_operands(ROWS, BF16)
    target = target.clamp(0).masked_fill(MASKS[mask](ROWS), -100)
    found = []
    for where in ("device", "host"):
        monkeypatch.setattr(driver, "compacts", lambda *_, where=where: where)
        leaves = [leaf(t) for t in (x, w, bias)]
        loss = linear_cross_entropy(
            *leaves[:2], target, linear_bias=leaves[2], label_smoothing=0.1, reduction="sum", grad_filter_eps=EPS
        )
        found.append((loss.detach(), *gradients(loss, *leaves)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


CUDA_REASON = "needs a GPU of compute capability 9 or 10"


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10), reason=CUDA_REASON
)
@pytest.mark.parametrize("eps", [None, EPS])
@pytest.mark.parametrize(("reduction", "features"), [("mean", 512), ("none", 512), ("mean", 8192)])
def test_cuda_graph_with_another_mask(
    reduction: str, features: int, eps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured once, replayed with every mask: what runs without a graph, and what the valid rows alone give."""
    rows, classes = 2048, 4096
    monkeypatch.setattr(valid_rows, "LEAST_PRODUCT", 0)
    problem = problem_of("random", BF16, "cuda", rows, features=features, classes=classes)
    x, w = (t / features**0.25 for t in problem[:2])
    target = problem.target.clone()
    assert compacts(x, w, target, False) == "device"

    def run(x: Tensor = x, target: Tensor = target) -> list[Tensor]:
        leaves = leaf(x), leaf(w)
        loss = linear_cross_entropy(
            *leaves, target, reduction=reduction, grad_filter_eps=eps, memory_budget=2 * classes * 512
        )
        return [loss.detach(), *gradients(loss.sum(), *leaves)]

    graph, outputs = captured(run)
    for name, mask in MASKS.items():
        target.copy_(torch.randint(classes, (rows,)).masked_fill(mask(rows), -100))
        graph.replay()
        results = [t.clone() for t in outputs]
        valid = target >= 0
        assert not results[1][~valid].any()
        if name == "all":
            assert not results[2].any()
            continue
        for got, again in zip(results, run(), strict=True):
            assert relative_error(got, again) < 4 * torch.finfo(BF16).eps
        with monkeypatch.context() as without:
            without.setattr(driver, "compacts", lambda *_: None)
            alone = run(x[valid], target[valid])
        results[1] = results[1][valid]
        results[0] = results[0][valid] if reduction == "none" else results[0]
        for got, expected in zip(results, alone, strict=True):
            assert relative_error(got, expected) < 1e-2
