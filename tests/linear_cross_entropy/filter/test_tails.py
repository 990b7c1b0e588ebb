"""The kernels of the residual mass of the filtered columns (tails), of groups of rows and of rows apart from them."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_cross_entropy.filter.kernel_oracle import (
    DEVICE,
    DTYPES,
    GROUP_ROWS,
    OPTIONS,
    SIZES,
    Problem,
    assert_close,
    error,
    kernel_test,
    on_device,
    unit,
)

pytest.importorskip("triton")


def choice(steps: ModuleType, problem: Problem, apart: Tensor, groups: int) -> Any:
    """As `choose_rows` makes it of rows of which `apart` have the largest masses."""
    mass = torch.rand(len(problem.lse)).index_add(0, apart, torch.full((len(apart),), -3.0))
    lse, valid = on_device(problem.lse, problem.valid)
    chosen = steps.choose_rows(mass.to(DEVICE), lse, valid, GROUP_ROWS, len(apart), 1)
    assert torch.equal(chosen.rows.cpu(), apart)
    bounds = torch.searchsorted(apart, torch.arange(0, GROUP_ROWS * groups + 1, GROUP_ROWS))
    assert torch.equal(chosen.bounds.cpu().long(), bounds)
    # Of fewer valid rows than are chosen the last ones are none of them.
    return chosen._replace(valid=problem.valid[apart].to(DEVICE))


def check_tails(steps: ModuleType, problem: Problem) -> None:
    """Rows 1 and 3, and the last, apart from their groups."""
    rows, columns = problem.logits.shape
    _, q = problem.columns(steps)
    alive = (torch.rand(2, columns) < 0.2).to(torch.uint8)
    apart = torch.tensor(sorted({row % rows for row in (1, 3, rows - 1)}))
    chunk_groups = max((q.size(0) + 1) // 2, 1)
    chosen = choice(steps, problem, apart, q.size(0))
    single = torch.full((len(apart), problem.logits.stride(0)), 77.0, dtype=q.dtype, device=DEVICE)[:, :columns]
    single.copy_(problem.logits[apart])
    totals = steps.share_tails(
        q, single, chosen, *on_device(alive), chunk_groups, *on_device(problem.bias), problem.softcap, problem.scale
    ).cpu().sum(1)  # fmt: skip
    chunk = torch.arange(rows) // (GROUP_ROWS * chunk_groups)
    tails = torch.where(alive[chunk] == 0, problem.p * problem.slope, 0)
    expected = tails[apart]
    # What the subtraction leaves is as exact as what it starts from.
    whole = torch.nn.functional.pad(tails, (0, 0, 0, -rows % GROUP_ROWS)).view(-1, GROUP_ROWS, columns).sum(1)
    others = tails.index_fill(0, apart, 0)
    others = torch.nn.functional.pad(others, (0, 0, 0, -rows % GROUP_ROWS)).view(-1, GROUP_ROWS, columns).sum(1)
    floor = 1e-4 if q.dtype == torch.float16 else 1e-20
    budget = unit(q.dtype) + 2e-5
    assert_close(single, expected, budget, floor)
    assert bool((q.cpu() >= 0).all())
    assert bool(((q.cpu().double() - others).abs() <= 3 * budget * (whole + floor)).all())
    # Sums of what is there, after its rounding.
    assert_close(totals, torch.cat((q, single)).cpu().double().sum(1), 1e-5, 1e-20)
    assert single.untyped_storage().nbytes() == 0 or bool((single._base.cpu()[:, columns:] == 77).all())


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_tails(steps: ModuleType, rows: int, columns: int, dtype: torch.dtype) -> None:
    check_tails(steps, Problem(rows, columns, dtype))


@kernel_test
@pytest.mark.parametrize("name", OPTIONS)
def test_tails_with_options(steps: ModuleType, name: str) -> None:
    check_tails(steps, Problem(140, 1100, torch.bfloat16, **OPTIONS[name]))


@kernel_test
def test_tails_of_nan(steps: ModuleType) -> None:
    """Rows that are not valid, and columns that are kept, hold anything."""
    problem = Problem(40, 300, torch.float32)
    problem.valid[:3] = torch.tensor([True, False, True])
    problem.settle()
    problem.logits[1], problem.logits[2, 7] = math.nan, math.nan
    alive, q = problem.columns(steps)
    alive[7] = 1
    single, chosen = problem.logits[:3].clone(), choice(steps, problem, torch.arange(3), 1)
    totals = steps.share_tails(q, single, chosen, alive[None], 2, None, 0.0, 1.0)
    assert bool(torch.cat((q, single)).isfinite().all() & totals.isfinite().all())
    assert not bool(single[1].any() | single[:, 7].any() | q[:, 7].any())
    assert bool(single[[0, 2]].any(1).all())


# Rows, each of how many, and what sets masses apart: nothing, ties, NaN.
CHOICES = [(1, 32), (33, 32), (700, 1), (1100, 7), (700, 4000)]


def check_choice(steps: ModuleType, rows: int, each: int, kind: str) -> None:
    mass, lse, valid = torch.randn(rows), torch.randn(rows), torch.rand(rows) < 0.6
    if kind == "ties":
        mass = mass.round()
    if kind == "nan":
        mass[::5] = torch.tensor(math.nan).copysign(mass[::5])
        mass[1::5] = math.inf
    apart = -(-rows // each)
    order = mass.abs().nan_to_num(nan=math.inf, posinf=1e30).sort(descending=True, stable=True).indices
    chosen = steps.choose_rows(*on_device(mass, lse, valid), GROUP_ROWS, apart, each)
    found = [value.cpu().long() for value in (chosen.rows, chosen.valid, chosen.slot, chosen.bounds)]
    expected = order[:apart].sort().values
    assert torch.equal(found[0], expected)
    counted = torch.zeros(rows, dtype=torch.bool)
    counted[order[: -(-int(valid.sum()) // each)]] = True
    assert torch.equal(found[1].bool(), (counted & valid)[expected])
    slot = torch.full((rows,), -1)
    slot[expected] = torch.where(found[1].bool(), torch.arange(apart), -1)
    assert torch.equal(found[2], slot)
    starts = torch.arange(0, rows + GROUP_ROWS, GROUP_ROWS)
    assert torch.equal(found[3], torch.searchsorted(expected, starts))
    assert torch.equal(chosen.lse.cpu(), lse[expected])


@kernel_test
@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize(("rows", "each"), CHOICES)
def test_choose_rows(steps: ModuleType, rows: int, each: int, kind: str) -> None:
    check_choice(steps, rows, each, kind)


@kernel_test
def test_choose_of_many_rows(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sort ranks them."""
    monkeypatch.setattr(sys.modules[steps.choose_rows.__module__], "MOST_RANKED", 100)
    check_choice(steps, 700, 32, "ties")


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "features"), [(1, 1), (300, 70), (40, 1030), pytest.param(260, 1030, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("indexed", [False, True])
def test_weigh_and_add_tails(steps: ModuleType, rows: int, features: int, indexed: bool, dtype: torch.dtype) -> None:
    start, each = 2, 16
    mass, lse, valid = torch.randn(rows), torch.randn(rows), torch.rand(rows) < 0.8
    chosen = steps.choose_rows(*on_device(mass, lse, valid), GROUP_ROWS, -(-rows // each), each)
    groups, singles = -(-rows // GROUP_ROWS), len(chosen.rows)
    parts = torch.rand(groups + singles, 3)
    parts[0] = 0.0
    input = torch.randn(rows + 9, features).to(dtype)
    index = torch.randperm(rows + 9) if indexed else None
    memory = torch.full((groups + singles, features), math.nan, dtype=dtype, device=DEVICE)
    factors, single = steps.weigh_tails(
        *on_device(mass, parts), chosen, GROUP_ROWS, *on_device(input, index), start, memory
    )
    slot, wide = chosen.slot.cpu().long(), torch.float64
    inverse = 1 / parts.to(wide).sum(1)
    inverse[0] = 0
    own_group = torch.arange(rows) // GROUP_ROWS
    assert_close(factors, torch.where(slot < 0, mass.to(wide) * inverse[own_group], 0), 1e-6)
    assert_close(single, mass[chosen.rows.cpu()].to(wide) * inverse[groups:], 1e-6)
    taken = input[start : start + rows] if index is None else input[index[start : start + rows]]
    sums = torch.zeros(groups + singles, features, dtype=wide)
    sums.index_add_(0, own_group, factors.cpu().to(wide)[:, None] * taken.to(wide))
    sums[groups:] = single.cpu().to(wide)[:, None] * taken.to(wide)[chosen.rows.cpu()]
    assert error(memory, sums) <= unit(dtype) + 1e-6

    for evens in (None, torch.randn(rows)):
        extra = int(evens is not None)
        table, before = torch.randn(extra + groups + singles, features), torch.randn(rows, features).to(dtype)
        whole = torch.full((rows + 1, features + 3), 77.0, dtype=dtype, device=DEVICE)
        whole[:-1, :-3] = before
        expected = before.to(wide)
        expected += (factors.cpu()[:, None] * table[extra + own_group]).to(wide)
        own = slot >= 0
        expected[own] += (single.cpu()[slot[own], None] * table[extra + groups + slot[own]]).to(wide)
        if evens is not None:
            expected += (evens[:, None] * table[:1]).to(wide)
        steps.add_tails(whole[:-1, :-3], factors, single, chosen.slot, *on_device(evens, table), GROUP_ROWS)
        assert error(whole[:-1, :-3], expected) <= unit(dtype) + 1e-6
        assert bool((whole[-1] == 77).all() & (whole[:, -3:] == 77).all())
