"""Sizes that are no multiples of a word of 16 bytes, which a GPU's large products pad: here all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy, linear_log_probs
from torch_dcs_ops.ops.linear_cross_entropy import alignment

from linear_cross_entropy.oracle import assert_within_budget, gradients, leaf, make, oracle

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# (D, V): V, D, both of them odd, and even but no words; fewer classes than a word has.
SIZES = [(32, 1001), (33, 1000), (31, 1003), (30, 1006), (64, 129), (33, 5)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding wherever there is a size to pad."""
    monkeypatch.setattr(alignment, "_word", lambda product, dtype, *_: 16 // dtype.itemsize)
    monkeypatch.setattr(alignment, "_copies_pay", lambda rows: True)


def test_where_it_pays() -> None:
    """Words of 16 bytes on a GPU's tensor cores, where the products are large."""
    large = 4096 * 50257 * 1023
    for has_tf32, of_float32 in ((True, 4), (False, 1)):
        words = [alignment._word(large, dtype, "cuda", has_tf32) for dtype in (BF16, F16, F32, F64)]
        assert words == [8, 8, of_float32, 1]
    assert alignment._word(large, BF16, "cpu", True) == 1
    assert alignment._word(16 * 1001 * 33, BF16, "cuda", True) == 1
    assert [alignment.padded(size, 8) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [alignment.whole(size, 8) for size in (0, 7, 8, 17)] == [0, 0, 8, 16]


class Products:
    """Every GEMM of a call: its three matrices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []
        mm, addmm, addmm_ = torch.mm, torch.addmm, Tensor.addmm_

        def record(*matrices: Tensor) -> None:
            self.found.append(matrices)  # type: ignore[arg-type]

        def of_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None, **keywords: Any) -> Tensor:
            result = mm(left, right, out=out, **keywords)
            record(left, right, result)
            return result

        def of_addmm(total: Tensor, left: Tensor, right: Tensor, **keywords: Any) -> Tensor:
            record(left, right, total)
            return addmm(total, left, right, **keywords)

        def of_addmm_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
            record(left, right, total)
            return addmm_(total, left, right)

        monkeypatch.setattr(torch, "mm", of_mm)
        monkeypatch.setattr(torch, "addmm", of_addmm)
        monkeypatch.setattr(Tensor, "addmm_", of_addmm_)


def is_aligned(matrix: Tensor) -> bool:
    pitch = max(matrix.stride()) * matrix.itemsize
    return min(matrix.stride()) == 1 and pitch % 16 == matrix.data_ptr() % 16 == 0


@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("rows", [128, 512])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("features", "classes"), SIZES[:-1], ids=str)
@pytest.mark.each_pair
def test_every_product_is_of_whole_words(
    device: str, features: int, classes: int, dtype: torch.dtype, rows: int, chunk: int, always: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """But for those over the few classes behind them; in memory all of them are."""
    problem = make((rows,), features, classes, dtype, device, ignored=0.0)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    word = 16 // dtype.itemsize
    products = Products(monkeypatch)
    linear_cross_entropy(x, w, problem.target, memory_budget=chunk * (classes + 7) * dtype.itemsize).backward()
    assert len(products.found) >= 3
    rest = 0
    for matrices in products.found:
        assert all(map(is_aligned, matrices)), [(m.shape, m.stride(), m.data_ptr() % 16) for m in matrices]
        sizes = {size for matrix in matrices for size in matrix.shape}
        if any(size % word for size in sizes):
            assert {size for size in sizes if size % word} == {classes % word}
            rest += 1
    assert rest <= len(products.found) / 2


@pytest.mark.parametrize("chunk", [20, 50, 1000])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("features", "classes"), SIZES, ids=str)
@pytest.mark.parametrize("rows", [24, 120])
@pytest.mark.each_pair
def test_precision(
    device: str, rows: int, features: int, classes: int, dtype: torch.dtype, chunk: int, always: None
) -> None:
    """Single, shared and float32 sums; targets in the last classes as well, whose products are rounded twice."""
    problem = make((rows,), features, classes, dtype, device)
    target, options = problem.target, {"memory_budget": chunk * classes * dtype.itemsize}
    target[::3] = classes - 1
    results = []
    for kind in ("op", "eager", "exact"):
        x, w, b = (
            leaf(t.double() if kind == "exact" else t)
            for t in (problem.input, problem.linear_weight * 0.3, problem.linear_bias)
        )
        if kind == "op":
            loss = linear_cross_entropy(x, w, target, linear_bias=b, reduction="sum", **options)
        else:
            loss = oracle(x, w, target, linear_bias=b, reduction="sum")[0]
        results.append([loss, *gradients(loss, x, w, b)])
        assert [g.stride() for g in results[-1][1:]] == [(features, 1), (features, 1), (1,)]
    # Of input's gradient two roundings of the same size instead of one, at the worst: the square root of 2.
    assert_within_budget(*results, factors=(None, 1.5, 1.2, 1.2))


@pytest.mark.parametrize("accumulate_dtype", [None, BF16], ids=str)
def test_an_ignored_row_may_hold_anything(device: str, accumulate_dtype: torch.dtype | None, always: None) -> None:
    """Behind the last class its logits are neither 0 nor finite."""
    problem = make((60,), 33, 101, BF16, device, ignored=0.0)
    target = problem.target
    target[7] = -100
    x, w = problem.input.clone(), problem.linear_weight
    options: dict[str, Any] = {"memory_budget": 20 * 101 * 2, "accumulate_dtype": accumulate_dtype}
    clean = gradients(linear_cross_entropy(leaf(x), leaf_w := leaf(w), target, **options), leaf_w)
    for value in (torch.inf, torch.nan):
        x[7] = value
        spoilt = leaf(x)
        loss = linear_cross_entropy(spoilt, leaf_w, target, return_predictions=False, **options)
        grad_x, _ = gradients(loss, spoilt, leaf_w)
        assert loss.isfinite()
        assert grad_x.isfinite().all()
        assert not grad_x[7].any()
    assert clean[0].isfinite().all()


@pytest.mark.parametrize("layout", ["transposed", "column slice", "offset", "strided"])
def test_layouts(device: str, layout: str, always: None) -> None:
    """Operands whose rows start anywhere."""
    problem = make((4, 24), 32, 40, BF16, device)

    def laid_out(matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape[:-1].numel(), matrix.size(-1)
        if layout == "transposed":
            room = matrix.new_empty(columns, rows + 1)[:, :rows].t()
        elif layout == "column slice":
            room = matrix.new_empty(rows, columns + 3)[:, 3:]
        elif layout == "offset":
            room = matrix.new_empty(rows * columns + 1)[1:].view(rows, columns)
        else:
            room = matrix.new_empty(rows, 2 * columns)[:, ::2]
        return room.copy_(matrix.reshape(rows, columns))

    plain = [leaf(problem.input.reshape(96, 32)), leaf(problem.linear_weight)]
    other = [leaf(laid_out(problem.input)), leaf(laid_out(problem.linear_weight))]
    target = problem.target.reshape(96)
    losses = [linear_cross_entropy(*operands, target) for operands in (plain, other)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(losses[1], *other), gradients(losses[0], *plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(BF16).eps, atol=1e-6)


@pytest.mark.parametrize("eps", [None, 2.0**-4])
def test_other_entries(device: str, eps: float | None, always: None) -> None:
    """Log-probabilities, losses of rows, filtered gradients, leading dimensions."""
    problem = make((3, 20), 33, 1001, F32, device)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    loss = linear_cross_entropy(x, w, problem.target, reduction="none", grad_filter_eps=eps)
    exact = oracle(x.double(), w.double(), problem.target, reduction="none")[0]
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    assert [g.shape for g in gradients(loss.sum(), x, w)] == [x.shape, w.shape]
    log_probs, entropy = linear_log_probs(x, w, problem.target.clamp_min(0))
    logits = (x.double() @ w.double().t()).log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(logits.exp() * logits).sum(-1), rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in gradients(log_probs.sum() + entropy.sum(), x, w))
