"""Filtered gradients (`grad_filter_eps`) against the same mathematics over dense logits in float64, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy import filter as gradient_filter
from torch_dcs_ops.ops.linear_cross_entropy import filter_tails
from torch_dcs_ops.ops.linear_cross_entropy import plan as planning
from torch_dcs_ops.ops.linear_cross_entropy.filter import filter_steps
from torch_dcs_ops.ops.linear_cross_entropy.gradients import Upstream
from torch_dcs_ops.ops.linear_cross_entropy.plan import FilteredPlan, make_filtered_plan
from torch_dcs_ops.reference.linear_cross_entropy.loss import Needs, Options

from linear_cross_entropy.filter.oracle import BF16, CLASSES, EPS, F32, F64, GROUP, budget_of, dense, operands
from linear_cross_entropy.oracle import gradients, leaf, oracle, relative_error
from support.cuda_graphs import captured


@pytest.fixture(autouse=True)
def _small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of these tests has not the classes for an eps of 16/V."""
    monkeypatch.setattr(gradient_filter, "LEAST_ODDS", 1)


def compare(
    device: str,
    options: dict[str, Any],
    *,
    rows: int = 150,
    chunk: int = 64,
    dtype: torch.dtype = F32,
    factor: float = 1.5,
    seed: int = 0,
    sharpness: float = 1.0,
    eps: float = EPS,
) -> None:
    """The op's filtered gradients against `dense`; the budget is what torch makes of the exact ones."""
    x, w, target, bias, weight = operands(rows, dtype, device, seed=seed)
    x = x * sharpness
    options = dict(options)
    if options.get("ignore_index") == 3:
        target = torch.where(target < 0, 3, target)
    options["linear_bias"] = leaf(bias)
    if options.pop("weight", False):
        options["weight"] = weight
    run_rows = rows if device == "cuda" else int((target != options.get("ignore_index", -100)).sum())
    plan = make_filtered_plan(run_rows, CLASSES, dtype, device, budget_of(chunk, dtype))
    assert plan.rows <= min(chunk, max(run_rows, 1))

    def run(call: Callable[..., Any], wide: torch.dtype, **more: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [leaf(tensor.to(wide)) for tensor in (x, w, bias)]
        changed = options | {"linear_bias": leaves[2]} | more
        loss = call(*leaves[:2], target, **changed)
        loss = loss[0] if isinstance(loss, tuple) else loss
        torch.manual_seed(1)
        grad = torch.randn(loss.shape, dtype=F64).to(loss)
        return grad, gradients(loss, *leaves, grad=grad)

    grad, got = run(linear_cross_entropy, dtype, grad_filter_eps=eps, memory_budget=budget_of(chunk, dtype))
    _, eager = run(oracle, dtype)
    _, exact = run(oracle, F64)
    settings = {k: v for k, v in options.items() if k != "linear_bias"}
    expected, kept = dense(
        x, w, target, plan.rows, eps, linear_bias=bias, grad_loss=grad, group_rows=plan.group_rows, **settings
    )
    assert all(0 < part < 0.5 for part in kept), kept
    # What torch makes of the exact ones, and the rounding of an lse, relative to which the probabilities are.
    lse = linear_cross_entropy(x, w, target, return_lse=True, **options)[1]
    floor = max(4.0, float(lse.detach().abs().max())) * torch.finfo(F32).eps
    for index, (gradient, wanted) in enumerate(zip(got, expected, strict=True)):
        error = relative_error(gradient, wanted)
        allowed = factor * relative_error(eager[index], exact[index]) + floor
        assert error <= allowed, f"gradient {index}: error {error:.2e} beyond the budget {allowed:.2e}"
    # It is another gradient, but for one row that shares with none, and where there is no tail.
    assert rows == 1 or sharpness > 1 or relative_error(got[0], exact[0]) > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_index": {"ignore_index": 3},
    "label_smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "softcap": {"softcap": 30.0},
    "logit_scale": {"logit_scale": 1.3},
    "negative logit_scale": {"logit_scale": -1.2},
    "z_loss": {"z_loss": 0.1},
    "weight": {"weight": True},
    "all of them": {"label_smoothing": 0.2, "logit_scale": 1.1, "z_loss": 0.05, "weight": True, "ignore_index": 3},
    "capped": {"softcap": 40.0, "logit_scale": 1.2, "z_loss": 0.05, "weight": True},
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: str, name: str, reduction: str) -> None:
    compare(device, OPTIONS[name] | {"reduction": reduction})


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", ["plain", "label_smoothing", "capped"])
def test_dtypes(device: str, name: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype == F64:
        pytest.skip("float64 is exact on a GPU")
    for reduction in ("mean", "none"):
        compare(device, OPTIONS[name] | {"reduction": reduction}, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 97, 150])
def test_sizes(device: str, rows: int) -> None:
    compare(device, {"reduction": "sum"}, rows=rows, chunk=32, seed=rows)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("segment", [1, 64, 100, 128])
def test_segments(device: str, segment: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_tails, "SEGMENT_ROWS", segment)
    for chunk in (32, 64, 96):
        compare(device, {"reduction": "mean", "label_smoothing": 0.1}, chunk=chunk, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "chunk"), [(100, 128), (150, 128), (500, 200)])
def test_groups_of_a_gpu(
    device: str, rows: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 rows, on a CPU too."""
    monkeypatch.setitem(planning._GROUP_ROWS, "cpu", 128)
    monkeypatch.setattr(filter_tails, "SEGMENT_ROWS", 300)
    for options in ({"label_smoothing": 0.1, "ignore_index": 3}, {"softcap": 30.0}):
        compare(device, {"reduction": "none", **options}, rows=rows, chunk=chunk, dtype=dtype, eps=0.5)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_frozen_operands(device: str, dtype: torch.dtype) -> None:
    x, w, target, bias, _ = operands(dtype=dtype, device=device)
    options = {"grad_filter_eps": EPS, "memory_budget": budget_of(64, dtype), "label_smoothing": 0.1}
    for reduction in ("sum", "none"):
        every = [leaf(x), leaf(w), leaf(bias)]
        loss = linear_cross_entropy(every[0], every[1], target, linear_bias=every[2], reduction=reduction, **options)
        expected = gradients(loss.sum(), *every)
        for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
            some = [leaf(t) if index in wanted else t for index, t in enumerate((x, w, bias))]
            loss = linear_cross_entropy(some[0], some[1], target, linear_bias=some[2], reduction=reduction, **options)
            got = gradients(loss.sum(), *(some[index] for index in wanted))
            assert all(torch.equal(g, expected[index]) for g, index in zip(got, wanted, strict=True))


def test_gradient_of_the_lse(device: str) -> None:
    x, w, target, _, _ = operands(device=device)
    grad_loss, grad_lse = torch.randn(2, x.size(0), device=device)
    for reduction, upstream in (("none", grad_loss), ("mean", grad_loss[0])):
        leaves = leaf(x), leaf(w)
        outputs = linear_cross_entropy(
            *leaves, target, reduction=reduction, return_lse=True, grad_filter_eps=EPS, memory_budget=budget_of(64)
        )
        got = torch.autograd.grad(outputs, leaves, (upstream, grad_lse))
        expected, _ = dense(x, w, target, 64, EPS, reduction=reduction, grad_loss=upstream, grad_lse=grad_lse)
        for gradient, wanted in zip(got, expected, strict=False):
            assert relative_error(gradient, wanted) < 4e-6


def test_shift_and_leading_shape(device: str) -> None:
    x, w, target, _, _ = operands(144, device=device)
    moved = torch.cat((target.view(3, 48)[:, 1:], target.new_full((3, 1), -100)), 1).flatten()
    leaves = leaf(x.view(3, 48, -1)), leaf(w)
    got = gradients(
        linear_cross_entropy(*leaves, target.view(3, 48), shift=True, grad_filter_eps=EPS, memory_budget=1), *leaves
    )
    expected, _ = dense(x, w, moved, 32, EPS)
    assert relative_error(got[0].flatten(0, 1), expected[0]) < 4e-6
    assert relative_error(got[1], expected[1]) < 4e-6


@pytest.mark.parametrize("layout", ["transposed", "every other", "expanded"])
def test_strides(device: str, layout: str) -> None:
    x, w, target, _, _ = operands(96, device=device)
    change = {
        "transposed": lambda t: t.t().contiguous().t(),
        "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "expanded": lambda t: t[:1].expand(t.shape),
    }[layout]
    x = change(x)
    w, target = (w, target[:1].clamp(0).expand(96)) if layout == "expanded" else (change(w), target)
    leaves = leaf(x), leaf(w)
    got = gradients(linear_cross_entropy(*leaves, target, grad_filter_eps=EPS, memory_budget=1), *leaves)
    expected, _ = dense(x, w, target, 32, EPS)
    assert relative_error(got[0], expected[0]) < 1e-5
    assert relative_error(got[1], expected[1]) < 1e-5


def test_results_are_the_exact_ones(device: str) -> None:
    x, w, target, bias, _ = operands(device=device)
    results = [
        linear_cross_entropy(
            leaf(x), w, target, linear_bias=bias, return_lse=True, return_predictions=True, grad_filter_eps=eps,
            memory_budget=budget_of(64),
        )
        for eps in (None, EPS)
    ]  # fmt: skip
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_half_sums_over_many_chunks(device: str) -> None:
    """Ten chunks cost linear_weight's gradient no more than one; the compact plan rounds after every chunk."""
    x, w, target, _, _ = operands(320, BF16, device)
    expected, _ = dense(x, w, target, 32, EPS, reduction="none", grad_loss=torch.ones(320, device=device))
    rounding = relative_error(expected[1].to(BF16), expected[1])
    errors = []
    for accumulate in (None, BF16):
        for reduction in ("sum", "none"):
            head = leaf(w)
            linear_cross_entropy(
                x, head, target, reduction=reduction, grad_filter_eps=EPS, memory_budget=1, accumulate_dtype=accumulate
            ).sum().backward()
            errors.append(relative_error(head.grad, expected[1]))
    # Rounded once; the kept columns' gradients are in half precision before, independent ones, and smaller in the sum.
    assert max(errors[:2]) <= 1.5 * rounding
    assert min(errors[2:]) > max(errors[:2])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_certain_rows(device: str, dtype: torch.dtype) -> None:
    """p beyond exp(-100) everywhere but at one class, right or wrong: nothing divides by the tail's empty sums."""
    for options in ({}, {"softcap": 500.0}, {"label_smoothing": 0.1}):
        compare(device, {"reduction": "mean", **options}, rows=64, chunk=32, dtype=dtype, sharpness=40.0)


@pytest.mark.parametrize("rows", [0, 5, 70])
def test_no_valid_row(device: str, rows: int) -> None:
    x, w, target, bias, _ = operands(rows, device=device)
    target = torch.full_like(target, -100)
    for reduction in ("mean", "sum", "none"):
        leaves = [leaf(t) for t in (x, w, bias)]
        loss = linear_cross_entropy(
            *leaves[:2], target, linear_bias=leaves[2], reduction=reduction, z_loss=0.1, label_smoothing=0.1,
            grad_filter_eps=EPS, memory_budget=1,
        )  # fmt: skip
        for gradient, operand in zip(gradients(loss.sum(), *leaves), leaves, strict=True):
            assert torch.equal(gradient, torch.zeros_like(operand))


def test_one_class(device: str) -> None:
    x, w, b = (leaf(t) for t in torch.randn(3, 40, 4, device=device))
    linear_cross_entropy(
        x, leaf(w[:1]), torch.zeros(40, dtype=torch.int64, device=device), linear_bias=leaf(b[0, :1]), z_loss=0.1,
        grad_filter_eps=EPS,
    ).backward()  # fmt: skip
    assert bool(x.grad.isfinite().all())


def test_nan_stays_in_its_row(device: str) -> None:
    x, w, target, _, _ = operands(device=device)
    clean = leaf(x)
    row = int((target >= 0).nonzero()[40])
    dirty = x.clone()
    dirty[row, 2] = torch.nan
    dirty = leaf(dirty)
    for values in (clean, dirty):
        linear_cross_entropy(values, w, target, reduction="sum", grad_filter_eps=EPS, memory_budget=1).backward()
    assert bool(dirty.grad[row].isnan().all())
    others = torch.arange(x.size(0), device=device) != row
    # Its chunk keeps all columns.
    assert bool(dirty.grad[others].isfinite().all())
    assert relative_error(dirty.grad[others], clean.grad[others]) < 0.1


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_bits_are_the_same_in_every_run(device: str, dtype: torch.dtype) -> None:
    x, w, target, bias, _ = operands(300, dtype, device)

    def run() -> list[Tensor]:
        leaves = [leaf(t) for t in (x, w, bias)]
        loss = linear_cross_entropy(
            *leaves[:2], target, linear_bias=leaves[2], label_smoothing=0.1, grad_filter_eps=EPS,
            memory_budget=budget_of(64, dtype),
        )  # fmt: skip
        return gradients(loss, *leaves)

    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(), strict=True))


def test_one_function_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    target, cpu = torch.zeros(3, dtype=torch.int64), torch.ones(3, 4)
    options, needs = Options(grad_filter_eps=EPS), Needs(input=True)
    assert filter_steps(cpu, CLASSES, target, Upstream(), options, needs) is not None
    assert filter_steps(cpu, CLASSES, target, Upstream(), options, Needs()) is None
    monkeypatch.setattr(gradient_filter, "LEAST_ODDS", 16)
    assert filter_steps(cpu, int(16 / EPS) - 1, target, Upstream(), options, needs) is None
    assert filter_steps(cpu, int(16 / EPS), target, Upstream(), options, needs) is not None
    monkeypatch.setattr(gradient_filter, "LEAST_ODDS", 1)
    assert filter_steps(cpu, CLASSES, target, Upstream(entropy=cpu[:, 0]), options, needs) is None
    assert filter_steps(cpu, CLASSES, target.float(), Upstream(), options, needs) is None
    steps = object()
    for missing, kind in ((False, "native"), (True, "native"), (True, "reference")):
        monkeypatch.setattr(gradient_filter, "launchers", lambda name, missing=missing: None if missing else steps)
        monkeypatch.setattr(gradient_filter._native, "CUDA", SimpleNamespace(kind=kind))
        found = [
            filter_steps(
                SimpleNamespace(device=torch.device("cuda"), dtype=dtype), CLASSES, target, Upstream(), options, needs
            )
            for dtype in (F32, F64)
        ]  # fmt: skip
        assert found == ([gradient_filter.reference] * 2 if kind == "reference" else [None if missing else steps, None])


def test_plans() -> None:
    def plan(rows: int, dtype: torch.dtype = BF16, **more: Any) -> Any:
        return make_filtered_plan(rows, 128256, dtype, "cuda", **more)

    assert plan(8192) == FilteredPlan(1024, 128256, True, 128)
    assert plan(8192, accumulate_dtype=BF16) == (1024, 128256, False, 128)
    assert plan(8192, F32) == (1024, 128256, False, 128)
    assert plan(1000) == (1000, 128256, False, 128)
    assert plan(0).rows == 1
    for budget in (1, 50 * 2 * 128256, 100 * 2 * 128256, 1000 * 2 * 128256):
        for rows in (33, 100, 150, 1025, 5000):
            chunk, _, _, group = plan(rows, memory_budget=budget)
            assert chunk >= rows or chunk % group == 0
            assert group == (128 if budget >= 128 * 2 * 128256 else GROUP)
            assert min(chunk, rows) <= max(budget // (2 * 128256), GROUP)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_nothing_waits_for_the_gpu(dtype: torch.dtype) -> None:
    """A call in a CUDA graph, replayed with other rows and another number of kept columns."""
    calls = [operands(dtype=dtype, device="cuda", seed=seed) for seed in range(3)]
    x, w, target, bias, weight = (t.clone() for t in calls[0])
    options = {"weight": weight, "label_smoothing": 0.1, "grad_filter_eps": EPS, "memory_budget": budget_of(64, dtype)}

    def run() -> list[Tensor]:
        leaves = [leaf(t) for t in (x, w, bias)]
        return gradients(linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], **options), *leaves)

    graph, results = captured(run)
    for call in calls:
        for place, values in zip((x, w, target, bias, weight), call, strict=True):
            place.copy_(values)
        graph.replay()
        for gradient, expected in zip(results, run(), strict=True):
            assert relative_error(gradient, expected) < 4 * torch.finfo(dtype).eps


def test_a_class_weight_without_a_target_has_no_part(device: str) -> None:
    x, w, target, _, weight = operands(device=device)
    unused = [c for c in range(CLASSES) if c not in set(target.tolist())][:3]
    found = []
    for values in ([1.0, 1.0, 1.0], [torch.inf, torch.nan, 3e38]):
        weight[unused] = torch.tensor(values, device=device)
        leaves = leaf(x), leaf(w)
        found.append(gradients(linear_cross_entropy(*leaves, target, weight=weight, grad_filter_eps=EPS), *leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("gap", [15.0, 21.0, 25.0])
def test_rows_that_are_nearly_certain(device: str, gap: float) -> None:
    """p - 1 of the target, and the tail, of some 1e-8: exact in float32 as long as lse is small."""
    rows, classes = 64, 501
    # One hot inputs make the rows of linear_weight the columns of logits.
    logits = torch.full((rows, classes), -gap, device=device) + 0.5 * torch.randn(1, classes, device=device)
    target = torch.arange(rows, device=device)
    logits[range(rows), target] = 0.0
    found = []
    for dtype, eps in ((F32, EPS), (F64, None)):
        leaves = leaf(torch.eye(rows, dtype=dtype, device=device)), leaf(logits.t().to(dtype))
        loss = linear_cross_entropy(*leaves, target, reduction="sum", grad_filter_eps=eps)
        found.append(gradients(loss, *leaves))
    # All rows have the same tail but for their targets: sharing it is exact but for those.
    assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) < 5e-3


def test_rows_without_an_upstream_gradient_have_no_part(device: str) -> None:
    x, w, target, _, _ = operands(96, device=device)
    target = target.clamp(min=0)
    grad = torch.zeros(96, device=device)
    grad[40] = 1.0
    leaves = leaf(x), leaf(w)
    options = {"reduction": "none", "grad_filter_eps": EPS}
    whole = gradients(linear_cross_entropy(*leaves, target, **options), *leaves, grad=grad)
    single = leaf(x[40:41]), leaf(w)
    alone = gradients(linear_cross_entropy(*single, target[40:41], **options), *single, grad=grad[40:41])
    assert relative_error(whole[0][40:41], alone[0]) < 1e-5
    assert relative_error(whole[1], alone[1]) < 1e-5
    assert not whole[0][:40].any()
