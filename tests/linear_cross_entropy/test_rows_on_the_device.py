"""Ignored rows of log-probabilities and of two heads as CUDA leaves them out.

Their number stays on the device, or is read behind the launch of a first product.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import linear_cross_entropy, linear_kl_div, linear_log_probs
from torch_dcs_ops.ops.linear_cross_entropy import chunks as loss_driver
from torch_dcs_ops.ops.linear_cross_entropy import gradients as gradients_module
from torch_dcs_ops.ops.linear_cross_entropy import ids as driver
from torch_dcs_ops.ops.linear_cross_entropy import kl_chunks, valid_rows

from linear_cross_entropy.grouped_products import grouped_mm_with_nan
from linear_cross_entropy.oracle import assert_within_budget, leaf, make, relative_error
from linear_cross_entropy.test_ids import expected as expected_log_probs
from linear_cross_entropy.test_ids import ids_of
from linear_cross_entropy.test_kl_div import DIRECTIONS
from linear_cross_entropy.test_kl_div import expected as expected_divergence

ROWS, FEATURES, CLASSES, TEACHER_FEATURES = 40, 8, 16, 12
CHUNKS = 9 * CLASSES * 4  # bytes of 9 rows of logits
MASKS = ("random", "last", "none", "all")


class Products(list[int]):
    """How many rows each grouped product has multiplied; there is none where the number of rows is read."""

    is_read = False

    def check(self, most: int) -> None:
        assert bool(self) != self.is_read
        assert max(self, default=0) <= most


@pytest.fixture(params=["dX grouped", "dX by one product", "number read"])
def products(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Products:
    """What a grouped product leaves out is NaN."""
    found = Products()
    found.is_read = request.param == "number read"
    if found.is_read:
        monkeypatch.setattr(valid_rows, "may_wait", lambda *_: True)

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        found.append(int(offs))
        return grouped_mm_with_nan(left, right, offs=offs)

    monkeypatch.setattr(driver, "compacts", lambda *_: "device")
    monkeypatch.setattr(kl_chunks, "compacts", lambda *_: "device")
    monkeypatch.setattr(functional, "grouped_mm", grouped_mm)
    monkeypatch.setattr(gradients_module, "grouped_product_fills", lambda *_: request.param == "dX grouped")
    return found


def masked(target: Tensor, mask: str) -> Tensor:
    rows = torch.arange(ROWS)
    ignored = {"random": rows * 7 % 5 < 2, "last": rows > 20, "none": rows < 0, "all": rows >= 0}[mask]
    return target.masked_fill(ignored.view(-1, *(1,) * (target.dim() - 1)), -100)


def check(ours: Any, plain: Any, operands: list[Tensor], results: int) -> None:
    """Values and gradients no worse than torch's in float32, against float64."""
    torch.manual_seed(3)
    found, upstream = [], None
    for run, dtype in ((ours, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        leaves = [leaf(t.to(dtype)) for t in operands]
        values = run(*leaves)
        upstream = upstream or [torch.randn_like(v) for v in values]
        grads = torch.autograd.grad(values, leaves, [g.to(dtype) for g in upstream])
        found.append([*values, *grads])
    got, eager, exact = found
    for values, wide in zip(got, exact, strict=True):
        assert values.isfinite().all()
        assert bool(values.any()) == bool(wide.any())
    if all(bool(wide.any()) for wide in exact):
        assert_within_budget(got, eager, exact, [1.5] * (results + len(operands)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_log_probs(products: Products, frozen: bool, count: int, mask: str) -> None:
    problem = make((ROWS,), FEATURES, CLASSES, torch.float32, ignored=0.0)
    ids = masked(ids_of(problem, count, 0.0 if count == 1 else 0.1), mask)
    w, options = problem.linear_weight, {"softcap": 3.0, "logit_scale": 0.7}

    def ours(x: Tensor, w: Tensor = w) -> list[Tensor]:
        keywords: dict[str, Any] = {**options, "need_entropy": not frozen, "memory_budget": CHUNKS}
        found = linear_log_probs(x, w, ids, **keywords)
        return list(found) if isinstance(found, tuple) else [found]

    def plain(x: Tensor, w: Tensor = w) -> list[Tensor]:
        return expected_log_probs(x, w.to(x.dtype), None, ids, **options)[: 1 if frozen else 2]

    operands = [problem.input] if frozen else [problem.input, w]
    check(ours, plain, operands, 1 if frozen else 2)
    products.check(min(9, int((ids >= 0).any(1).sum())))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.each_value
def test_divergences(products: Products, direction: str, reduction: str, mask: str) -> None:
    student = make((ROWS,), FEATURES, CLASSES, torch.float32, ignored=0.0)
    teacher = make((ROWS,), TEACHER_FEATURES, CLASSES, torch.float32, seed=9)
    target = masked(student.target, mask)
    options: dict[str, Any] = {"direction": direction, "reduction": reduction, "temperature": 1.3, "softcap": 3.0}

    def ours(*operands: Tensor) -> list[Tensor]:
        return [linear_kl_div(*operands, target=target, memory_budget=2 * CHUNKS, **options)]

    def plain(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> list[Tensor]:
        return [expected_divergence(x, w, teacher_x, teacher_w, None, None, target, **options)]

    check(ours, plain, [*student[:2], *teacher[:2]], 1)
    products.check(min(9, int((target >= 0).sum())))


def test_one_head_that_cannot_be_compacted(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both heads' rows must be in one order: all are run then."""
    monkeypatch.setattr(kl_chunks, "compacts", lambda input, *_: "device" if input.size(1) == FEATURES else None)
    student = make((ROWS,), FEATURES, CLASSES, torch.float32, ignored=0.0)
    teacher = make((ROWS,), TEACHER_FEATURES, CLASSES, torch.float32, seed=9)
    target = masked(student.target, "random")
    got = linear_kl_div(*student[:2], *teacher[:2], target=target, memory_budget=CHUNKS)
    wanted = expected_divergence(*student[:2], *teacher[:2], None, None, target, "forward", "mean")
    torch.testing.assert_close(got, wanted)
    assert not products


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["entropy", "two ids", "loss"])
def test_a_backward_takes_what_its_forward_knows(kind: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are not ordered again, however often it runs; they are where nothing may wait, as under capture."""
    problem = make((ROWS,), FEATURES, CLASSES, torch.float32, ignored=0.0)
    target, waits = masked(problem.target, mask), [True]
    target = (
        torch.stack((target, target.roll(1)), 1).where(target.unsqueeze(1) >= 0, -100) if kind == "two ids" else target
    )
    orders: list[bool] = []

    class Counted(valid_rows.ValidRows):
        def __init__(self, *args: Any) -> None:
            orders.append(args[-1])
            super().__init__(*args)

    monkeypatch.setattr(valid_rows, "ValidRows", Counted)
    monkeypatch.setattr(valid_rows, "may_wait", lambda *_: waits[0])
    monkeypatch.setattr(functional, "grouped_mm", grouped_mm_with_nan)
    monkeypatch.setattr(gradients_module, "grouped_product_fills", lambda *_: True)
    for module in (driver, loss_driver):
        monkeypatch.setattr(module, "compacts", lambda *_: "device")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        if kind == "loss":
            return linear_cross_entropy(x, w, target, reduction="none", memory_budget=CHUNKS).square().sum()
        found = linear_log_probs(x, w, target, need_entropy=kind == "entropy", memory_budget=CHUNKS)
        results = found if isinstance(found, tuple) else (found,)
        return torch.cat([values.square().flatten() for values in results]).sum()

    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    value = loss(*leaves)
    grads = [torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2)]
    assert orders == [True]
    waits[0] = False
    grads.append(torch.autograd.grad(value, leaves, retain_graph=True))
    assert orders == [True, False]
    waits[0] = True
    grads.append(torch.autograd.grad(value, leaves, retain_graph=True, create_graph=True))
    with FlopCounterMode(display=False):  # sees the ops, which are called by the dispatcher
        grads.append(torch.autograd.grad(value, leaves, retain_graph=True))
    batched = torch.autograd.grad(value, leaves, torch.ones(2, dtype=value.dtype), is_grads_batched=True)
    for module in (driver, loss_driver):
        monkeypatch.setattr(module, "compacts", lambda *_: None)
    plain = torch.autograd.grad(loss(*leaves), leaves)
    for found in (*grads, *([g[i] for g in batched] for i in range(2))):
        torch.testing.assert_close(tuple(found), plain)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs a GPU of compute capability 9 or 10",
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_read", [True, False], ids=["number read", "grouped"])
def test_on_a_gpu(is_read: bool, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of CUDA and Triton on rows that are left out, beside the same calls that leave none out."""
    rows, features, classes = 2048, 512, 4096
    monkeypatch.setattr(valid_rows, "LEAST_PRODUCT", 0)
    monkeypatch.setattr(valid_rows, "may_wait", lambda *_: is_read)
    student, teacher = (
        make((rows,), features, classes, torch.bfloat16, "cuda", seed=seed, ignored=0.0) for seed in (0, 1)
    )
    x, w, teacher_x, teacher_w = (t / features**0.25 for t in (*student[:2], *teacher[:2]))
    place = torch.arange(rows, device="cuda")
    ignored = {"random": place * 7 % 5 < 2, "last": place > 900, "none": place < 0, "all": place >= 0}[mask]
    target, budget = student.target.masked_fill(ignored, -100), 2 * classes * 512
    ids = torch.stack((target, target.roll(1).masked_fill(ignored, -100)), 1)

    def results() -> list[Tensor]:
        found = []
        for of in ("one", "several", "frozen", *DIRECTIONS):
            leaves = [leaf(x), w if of == "frozen" else leaf(w)]
            if of in DIRECTIONS:
                values = linear_kl_div(
                    *leaves, teacher_x, teacher_w, target=target, direction=of, reduction="none", memory_budget=budget
                )
            else:
                targets = ids if of == "several" else target
                values = linear_log_probs(*leaves, targets, need_entropy=False, memory_budget=budget)
            upstream = torch.linspace(-1, 1, values.numel(), device="cuda").view(values.shape)
            found += [values.detach(), *torch.autograd.grad(values, [t for t in leaves if t.requires_grad], upstream)]
        return found

    got = results()
    for module in (driver, kl_chunks):
        monkeypatch.setattr(module, "compacts", lambda *_: None)
    for values, wanted in zip(got, results(), strict=True):
        assert values.isfinite().all()
        assert bool(values.any()) == bool(wanted.any())
        assert relative_error(values, wanted) < 4 * torch.finfo(torch.bfloat16).eps or not bool(wanted.any())
