"""The filter's kernels of products with the columns that are kept, their sums, and all steps one after another."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.linear_cross_entropy.filter import Chunk

from linear_cross_entropy.filter.kernel_oracle import (
    DEVICE,
    DTYPES,
    EPS,
    GPU,
    GROUP_ROWS,
    Problem,
    Product,
    assert_close,
    error,
    gpu_test,
    keep,
    kernel_test,
    load,
    never,
    place_of_groups,
    sum_error,
    unit,
)

pytest.importorskip("triton")


# rows, columns, features, count: tiles that are full, and that are not in each direction.
PRODUCTS = [(1, 3, 5, 3), (64, 320, 128, 256), (131, 300, 133, 70), (70, 140, 64, 0)]
BULK_PRODUCTS = [(70, 136, 272, 0), (131, 304, 512, 300), (64, 400, 304, 400)]
PRODUCTS += [*BULK_PRODUCTS, (1000, 30_000, 1024, 2500), (1024, 50_257, 4096, 3001)] if GPU else []


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_input_gradient(steps: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    problem = Product(*shape, dtype)
    expected = problem.left @ problem.weight[problem.kept_rows].cpu().double()
    for out_dtype in {dtype, torch.float32}:
        whole = torch.full((shape[0] + 2, shape[2] + 3), 77.0, dtype=out_dtype, device=DEVICE)
        out = whole[1:-1, :-3]
        steps.input_gradient(problem.kept, problem.on_device_index, problem.count, problem.weight, out)
        assert error(out, expected) <= unit(out_dtype) + sum_error(len(problem.kept_rows))
        out.fill_(77.0)  # 77 is a value that the product may have; around it nothing else was written.
        assert bool((whole == 77).all())


@kernel_test
def test_operands_of_any_stride(steps: ModuleType) -> None:
    for stride in (301, 304, 320):
        problem = Product(40, 300, 48, 90, torch.bfloat16, stride)
        expected = problem.left @ problem.weight[problem.kept_rows].cpu().double()
        out = torch.empty(40, 48, device=DEVICE)
        weight = problem.weight.t().contiguous().t()
        steps.input_gradient(problem.kept, problem.on_device_index, problem.count, weight, out)
        assert error(out, expected) <= 1e-6
        total = torch.empty(300, 48, device=DEVICE)
        since = never(300)
        arguments = (problem.kept, problem.on_device_index, problem.count, problem.input.t().contiguous().t())
        steps.add_weight_gradient(*arguments, total, None, since, 0)
        assert error(total[problem.kept_rows], problem.left.t() @ problem.input.cpu().double()) <= 1e-6


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_weight_gradient(steps: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Two chunks and the tails, in hi and lo halves, in the halves alone, and in float32."""
    _, columns, features, _ = shape
    chunks = [Product(*shape, dtype) for _ in range(2)]
    q = torch.rand(35, columns).to(dtype).to(DEVICE)
    sums = torch.randn(35, features).to(dtype).to(DEVICE)
    for kind in ("float32",) if dtype == torch.float32 else ("hi and lo", "compact", "float32"):
        wide = torch.float32 if kind == "float32" else dtype
        total = torch.full((columns, features), math.nan, dtype=wide, device=DEVICE)
        rest = torch.full_like(total, math.nan) if kind == "hi and lo" else None
        since = never(columns)
        expected = torch.zeros(columns, features, dtype=torch.float64)
        for number, chunk in enumerate(chunks):
            since[chunk.kept_rows] = since[chunk.kept_rows].clamp(max=number)
            steps.add_weight_gradient(
                chunk.kept, chunk.on_device_index, chunk.count, chunk.input, total, rest, since, number
            )  # fmt: skip
            expected[chunk.kept_rows] += chunk.left.t() @ chunk.input.cpu().double()
        known = since.cpu() < 2
        assert not known.any() or not bool(total.cpu()[known].isnan().any())
        assert bool(total.cpu()[~known].isnan().all())
        sums_error = sum_error(shape[0])
        budget = {"hi and lo": 4 * unit(dtype) ** 2 + sums_error, "compact": 3 * unit(dtype), "float32": sums_error}[
            kind
        ]
        if rest is not None:
            assert error((total.double() + rest.double()).cpu()[known], expected[known]) <= budget
        else:
            assert error(total.cpu()[known], expected[known]) <= budget
        for keep_rest in (True, False) if rest is not None else (False,):
            steps.finish_weight_gradient(q, sums, total, rest, since, 2, keep_rest)
            since.zero_()
            expected += q.cpu().double().t() @ sums.cpu().double()
            if keep_rest and rest is not None:
                assert error(total.double() + rest.double(), expected) <= budget
        assert error(total, expected) <= (budget if kind != "hi and lo" else unit(dtype) + 1e-6)


@kernel_test
@pytest.mark.parametrize("shape", [*BULK_PRODUCTS, (70, 136, 264, 40)])
def test_products_in_bulk(steps: ModuleType, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of a device that has the shared memory for them, and so few multiprocessors that it fills.

    Rows of 264 features are aligned for the descriptors, not for the loads of rows that an index names.
    """
    products = sys.modules[steps.input_gradient.__module__]
    if GPU and products.device_of(torch.empty(0, device=DEVICE)).shared_memory < products.BULK_BYTES:
        pytest.skip("the device has less shared memory")
    monkeypatch.setattr(products, "device_of", lambda tensor: load("launch", "common").Device(2, products.BULK_BYTES))
    made = []
    describe = products.descriptor

    def counted(*arguments: Any) -> Any:
        made.append(describe(*arguments))
        return made[-1]

    monkeypatch.setattr(products, "descriptor", counted)
    test_input_gradient(steps, shape, torch.bfloat16)
    assert len(made) == (2 if shape[2] % 16 == 0 else 0)
    test_weight_gradient(steps, shape, torch.bfloat16)
    assert len(made) >= 11 - 2 * (shape[2] % 16 != 0)
    assert all(one is not None for one in made)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_column_sums(steps: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    problem = Product(*shape, dtype)
    sums = steps.column_sums(problem.kept, problem.on_device_index, problem.count).cpu()
    expected = torch.zeros(shape[1], dtype=torch.float64)
    expected[problem.kept_rows] = problem.left.sum(0)
    assert_close(sums, expected, 1e-6, float(shape[0]) ** 0.5)
    assert sums.dtype == torch.float32


@kernel_test
def test_no_rows(steps: ModuleType) -> None:
    problem = Problem(1, 20, torch.float32)
    empty, none = problem.logits[:0], torch.empty(0, device=DEVICE)
    valid, target = none.bool(), none.long()
    q = place_of_groups(empty)
    alive = torch.zeros(20, dtype=torch.uint8, device=DEVICE)
    steps.columns(empty, none, valid, None, 0.0, 1.0, EPS, q, GROUP_ROWS, alive)
    chosen = steps.choose_rows(none, none, valid, GROUP_ROWS, 0, 32)
    parts = steps.share_tails(q, q, chosen, alive[None], 1, None, 0.0, 1.0)
    assert parts.size(0) == 0
    factors, single = steps.weigh_tails(none, parts, chosen, GROUP_ROWS, none.view(0, 3), None, 0, none.view(0, 3))
    assert factors.shape == single.shape == (0,)
    steps.add_tails(none.view(0, 3), factors, single, chosen.slot, None, none.view(0, 3), GROUP_ROWS)
    alive, index, slot, count = keep(steps, alive, target, valid, 10)
    assert (int(alive.sum()), q.shape, int(count)) == (0, (0, 20), 0)
    chunk = Chunk(empty, none, target, valid, none, none, None, 0.0, 1.0)
    steps.gather_(chunk, None, alive, index, slot, count, none)
    steps.input_gradient(empty, index, count, torch.ones(20, 3, device=DEVICE), none.view(0, 3))
    total = torch.full((20, 3), 5.0, device=DEVICE)
    steps.add_weight_gradient(empty, index, count, none.view(0, 3), total, None, never(20), 0)
    assert bool((total == 5).all())
    steps.finish_weight_gradient(q, none.view(0, 3), total, None, never(20), 1, False)
    assert not bool(total.any() | steps.column_sums(empty, index, count).any())


def run_all(steps: ModuleType, problem: Problem, product: Product, out: Tensor, total: Tensor, rest: Tensor) -> Any:
    rows = (problem.lse, problem.target, problem.valid, problem.a, problem.h)
    q = place_of_groups(problem.logits)
    single = problem.logits[:8].clone()
    alive = torch.zeros(1, problem.logits.size(1), dtype=torch.uint8, device=DEVICE)
    since, mass = never(alive.size(1)), torch.empty_like(problem.lse)
    steps.mark_targets(alive, problem.target, problem.valid, 256)
    steps.columns(problem.logits, problem.lse, problem.valid, None, 0.0, 1.0, EPS, q, GROUP_ROWS, alive[0])
    index, slot, count = steps.keep(alive[0], since, 0, 20_000, steps.new_buffers(alive, alive.size(1)))
    steps.gather_(Chunk(problem.logits, *rows, None, 0.0, 1.0), None, alive[0], index, slot, count, mass)
    chosen = steps.choose_rows(mass, problem.lse, problem.valid, GROUP_ROWS, 8, 32)
    parts = steps.share_tails(q, single, chosen, alive, 2, None, 0.0, 1.0)
    sums = torch.empty(q.size(0) + 8, 512, dtype=q.dtype, device=DEVICE)
    factors, own = steps.weigh_tails(mass, parts, chosen, GROUP_ROWS, product.input, None, 0, sums)
    steps.input_gradient(problem.logits, index, count, product.weight, out)
    steps.add_tails(out, factors, own, chosen.slot, None, sums.float(), GROUP_ROWS)
    steps.add_weight_gradient(problem.logits, index, count, product.input, total, rest, since, 0)
    steps.finish_weight_gradient(q, sums[: q.size(0)], total, rest, since, 1, False)
    return mass, parts, single, count, steps.column_sums(problem.logits, index, count)


@gpu_test
def test_cuda_graph_and_equal_bits(steps: ModuleType) -> None:
    """A graph captured with one chunk's logits replays with another's, with other counts, and gives the same bits."""
    problem = Problem(256, 30_000, torch.bfloat16)
    product = Product(256, 30_000, 512, 30_000, torch.bfloat16)
    for name in ("lse", "target", "valid", "a", "h"):
        setattr(problem, name, getattr(problem, name).to(DEVICE))
    out = torch.empty(256, 512, dtype=torch.bfloat16, device=DEVICE)
    total = torch.empty(30_000, 512, dtype=torch.bfloat16, device=DEVICE)
    operands = (problem, product, out, total, torch.empty_like(total))
    first = problem.logits.clone()
    run_all(steps, *operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all(steps, *operands)
    for logits in (first, first.roll(1000, 1) * 0.5):
        problem.lse.copy_(torch.where(problem.valid, logits.float().logsumexp(1), 0))
        problem.logits.copy_(logits)
        eager = [value.clone() for value in (*run_all(steps, *operands), out, total)]
        problem.logits.copy_(logits)
        graph.replay()
        for value, expected in zip((*captured, out, total), eager, strict=True):
            assert torch.equal(value, expected)


@gpu_test
@pytest.mark.slow
def test_addresses_past_two_to_the_31(steps: ModuleType) -> None:
    columns = 128_256
    rows = 2**31 // columns + 64
    last = Problem(32, columns, torch.bfloat16)
    whole = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    whole[-32:] = last.logits
    valid = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    valid[-32:] = last.valid.to(DEVICE)

    def extended(values: Tensor) -> Tensor:
        return torch.cat((values.new_zeros(rows - 32), values)).to(DEVICE)

    lse, target, a, h = (extended(values) for values in (last.lse, last.target, last.a, last.h))
    alive = torch.zeros(columns, dtype=torch.uint8, device=DEVICE)
    steps.columns(whole, lse, valid, None, 0.0, 1.0, EPS, place_of_groups(whole), GROUP_ROWS, alive)
    expected_alive, _ = last.columns(steps)
    assert torch.equal(alive, expected_alive)
    alive, index, slot, count = keep(steps, alive, target, valid, columns)
    mass = torch.empty(rows, device=DEVICE)
    steps.gather_(Chunk(whole, lse, target, valid, a, h, None, 0.0, 1.0), None, alive, index, slot, count, mass)
    assert torch.equal(mass[-32:], last.gather(steps, alive, index, slot, count))
    assert torch.equal(whole[-32:], last.logits)
    weight = torch.randn(columns, 256, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(rows, 256, dtype=torch.bfloat16, device=DEVICE)
    steps.input_gradient(whole, index, count, weight, out)
    kept = index[: int(count)].long()
    assert error(out[-32:], last.logits[:, : len(kept)].double() @ weight[kept].double()) < 4e-3
    input = torch.randn(rows, 256, dtype=torch.bfloat16, device=DEVICE)
    total = torch.zeros(columns, 256, device=DEVICE)
    steps.add_weight_gradient(whole, index, count, input, total, None, never(columns), 0)
    expected = last.logits[:, : len(kept)].double().t() @ input[-32:].double()
    assert error(total[kept], expected) < 1e-5
    sums = steps.column_sums(whole, index, count)
    assert error(sums[kept], last.logits[:, : len(kept)].double().sum(0)) < 1e-5
