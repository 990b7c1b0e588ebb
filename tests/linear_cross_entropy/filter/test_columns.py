"""The filter's kernels that mark, keep and gather columns, and those that order and move rows."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from linear_cross_entropy.filter.kernel_oracle import (
    DEVICE,
    DTYPES,
    EPS,
    GROUP_ROWS,
    OPTIONS,
    SIZES,
    Problem,
    assert_close,
    error,
    keep,
    kernel_test,
    load,
    on_device,
    unit,
)

pytest.importorskip("triton")


def check_columns(steps: ModuleType, problem: Problem) -> None:
    before = problem.memory.clone()
    alive, q = problem.columns(steps)
    assert torch.equal(problem.memory, before)
    largest = problem.p.amax(0)
    clear = (largest / EPS - 1).abs() > 1e-4
    assert alive.dtype == torch.uint8
    assert torch.equal(alive.cpu().bool()[clear], (largest > EPS)[clear])
    sloped = torch.nn.functional.pad(problem.p * problem.slope, (0, 0, 0, -len(problem.p) % GROUP_ROWS))
    expected = sloped.view(-1, GROUP_ROWS, sloped.size(1)).sum(1)
    assert q.dtype == problem.logits.dtype
    # Below float16's smallest number, 6e-8, all is 0.
    floor = 1e-4 if q.dtype == torch.float16 else 1e-20
    assert_close(q, expected, unit(q.dtype) + 2e-5, floor)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_columns(steps: ModuleType, rows: int, columns: int, dtype: torch.dtype) -> None:
    check_columns(steps, Problem(rows, columns, dtype))


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("all_valid", [False, True])
def test_columns_of_a_full_group(steps: ModuleType, dtype: torch.dtype, all_valid: bool) -> None:
    """Which is read without masks, and the rows of the second one, none of which is valid, not at all."""
    problem = Problem(2 * GROUP_ROWS, 1030, dtype)
    problem.valid[:GROUP_ROWS] |= all_valid
    problem.valid[GROUP_ROWS:] = False
    problem.logits[~problem.valid] = math.inf
    problem.settle()
    check_columns(steps, problem)


@kernel_test
@pytest.mark.parametrize("name", OPTIONS)
def test_columns_with_options(steps: ModuleType, name: str) -> None:
    check_columns(steps, Problem(34, 1100, torch.bfloat16, **OPTIONS[name]))


@kernel_test
def test_columns_with_nan_and_without_valid_rows(steps: ModuleType) -> None:
    problem = Problem(40, 300, torch.float32)
    problem.valid[:3] = torch.tensor([True, False, True])
    problem.settle()
    problem.logits[1] = math.nan
    assert not bool(problem.columns(steps)[1].isnan().any())
    problem.logits[2, 7] = math.nan
    alive, q = problem.columns(steps, eps=2.0)
    assert alive.nonzero().flatten().tolist() == q[0].isnan().nonzero().flatten().tolist() == [7]
    problem.valid[:] = False
    alive, q = problem.columns(steps)
    assert not bool(alive.any() | q.any())


@kernel_test
@pytest.mark.parametrize("columns", [1, 5, 1024, 3000])
@pytest.mark.parametrize(("share", "most"), [(0.0, 1.0), (0.1, 0.5), (0.1, 0.0), (1.0, 0.5), (1.0, 1.0)])
def test_keep(steps: ModuleType, columns: int, share: float, most: float) -> None:
    rows, limit = 50, int(most * columns)
    alive = (torch.rand(columns) < share).to(torch.uint8)
    valid = torch.arange(rows) < 5
    target = torch.randint(columns, (rows,))
    target[:2] = torch.tensor([-1, 2**40])
    expected = alive.bool()
    expected[target[2:5]] = True
    if int(expected.sum()) > limit:
        expected[:] = True
    final, index, slot, count = (
        value.cpu() for value in keep(steps, *on_device(alive.clone(), target, valid), limit)
    )  # fmt: skip
    kept = expected.nonzero().flatten()
    assert torch.equal(final, expected.to(torch.uint8))
    assert count.tolist() == [len(kept)]
    assert torch.equal(index[: len(kept)].long(), kept)
    assert torch.equal(slot[kept].long(), torch.arange(len(kept)))
    assert index.sort().values.tolist() == list(range(columns))
    assert [value.dtype for value in (index, slot, count)] == [torch.int32] * 3


def check_gather(steps: ModuleType, problem: Problem, most: int) -> None:
    alive, _ = problem.columns(steps)
    alive, index, slot, count = problem.keep(steps, alive, most)
    exact = problem.gradient()
    mass = problem.gather(steps, alive, index, slot, count).cpu()
    kept = index[: int(count)].cpu().long()
    sizes = (problem.a + problem.h)[:, None].double() * problem.p * problem.slope
    budget = unit(problem.logits.dtype) + 2e-5
    # float16 has no numbers between 0 and 6e-8.
    floor = 1e-4 if problem.logits.dtype == torch.float16 else 0.0
    assert_close(problem.logits[:, : int(count)], exact[:, kept], budget, 1e-2 * sizes[:, kept] + floor + 1e-30)
    dead = alive.cpu() == 0
    # Without a softcap what the kept columns leave of 1, to within float32.
    assert_close(mass / problem.a, (problem.p * problem.slope)[:, dead].sum(1), 2e-5, 1e-30 if problem.softcap else 0.1)
    assert bool((problem.memory.cpu()[problem.outside] == 77).all())


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gather(steps: ModuleType, rows: int, columns: int, dtype: torch.dtype) -> None:
    check_gather(steps, Problem(rows, columns, dtype), columns)


@kernel_test
@pytest.mark.parametrize("name", OPTIONS)
def test_gather_with_options(steps: ModuleType, name: str) -> None:
    check_gather(steps, Problem(5, 1100, torch.bfloat16, **OPTIONS[name]), 1100)


@kernel_test
def test_more_than_most_are_all_and_exact(steps: ModuleType) -> None:
    problem = Problem(6, 3000, torch.float32)
    alive, index, slot, count = problem.keep(steps, problem.columns(steps)[0], 10)
    exact = problem.gradient()
    mass = problem.gather(steps, alive, index, slot, count)
    assert (int(count), float(mass.abs().max())) == (3000, 0.0)
    assert torch.equal(index.cpu(), torch.arange(3000, dtype=torch.int32))
    assert error(problem.logits, exact) < 1e-6


@kernel_test
def test_the_gradient_at_certain_targets_does_not_cancel(steps: ModuleType) -> None:
    """p_t is 1 within float32, p_t - 1 that of log p_t."""
    problem = Problem(4, 600, torch.float32)
    problem.valid[:] = True
    problem.target = torch.tensor([0, 1, 300, 599])
    problem.h = problem.a.clone()
    gap = torch.tensor([1e-3, 3e-6, 2e-7, 5e-8])
    problem.logits[:] = -200.0
    problem.logits[range(4), problem.target] = -gap.to(DEVICE)
    problem.lse = torch.zeros(4)
    alive, index, slot, count = problem.keep(steps, problem.columns(steps)[0], 600)
    problem.gather(steps, alive, index, slot, count)
    assert count.tolist() == [4]
    at_target = problem.logits[range(4), range(4)].cpu().double()
    assert_close(at_target, problem.h.double() * torch.expm1(-gap.double()), 2e-7)


@kernel_test
def test_gather_of_nan_and_inf(steps: ModuleType) -> None:
    """They stay in their rows; a row that is ignored is 0 whatever it holds."""
    problem = Problem(6, 1500, torch.float32)
    problem.valid = torch.tensor([True, False, True, True, False, True])
    problem.target = torch.tensor([5, 6, 7, 8, 9, 1499])
    problem.settle()
    problem.logits[1], problem.logits[2], problem.logits[3, 1200:] = math.nan, math.nan, -math.inf
    problem.lse[2] = math.nan
    problem.lse[3] = problem.logits[3].cpu().logsumexp(0)
    alive, index, slot, count = problem.keep(steps, torch.ones(1500, dtype=torch.uint8), 700)
    mass = problem.gather(steps, alive, index, slot, count)
    gradient = problem.logits.cpu()
    assert gradient.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert gradient[2].isnan().all()
    assert not bool(gradient[[1, 4]].any() | gradient[3, 1200:].any() | mass.any())
    assert torch.equal(index.cpu(), torch.arange(1500, dtype=torch.int32))


@kernel_test
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("step", [1, 7, 100])
def test_compacted_rows_restored(step: int, share: float) -> None:
    rows, columns, dtype = 50, 2050, torch.bfloat16
    wanted = torch.rand(rows) < share
    source = wanted.cumsum(0) - wanted.long()
    memory = torch.randn(rows, columns + 3).to(dtype)
    expected = memory.clone()
    expected[:, :columns] = torch.where(wanted[:, None], memory[source.clamp(max=rows - 1), :columns], 0)
    place, source, wanted = on_device(memory, source, wanted)
    load("compact_rows").restore_rows(place[:, :columns], source, wanted, step)
    assert torch.equal(place.cpu(), expected)


@kernel_test
@pytest.mark.parametrize("rows", [1, 50, 2500])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_order_of_rows(rows: int, share: float) -> None:
    target = torch.where(torch.rand(rows) < share, torch.randint(1000, (rows,)), -7)
    # Twice, a step of 2, and another alignment: launched again, and compiled for themselves.
    for place in (target, target, torch.stack((target, target), 1)[:, 0], torch.cat((target[:1], target))[1:]):
        index, rank, valid, count = (value.cpu() for value in load("compact_rows").order_rows(place.to(DEVICE), -7))
        assert torch.equal(valid, target != -7)
        assert count.tolist() == [int(valid.sum())]
        assert torch.equal(rank, valid.cumsum(0) - valid.long())
        assert torch.equal(index, torch.cat((valid.nonzero().squeeze(1), (~valid).nonzero().squeeze(1))))


def test_launched_again() -> None:
    """A kernel is looked for once for each key, and has its constants behind the other arguments."""
    calls: list[tuple[str, Any, Any]] = []

    class Kernel:
        def __init__(self, name: str, compiles: bool) -> None:
            self.name, self.compiles = name, compiles

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> Any:
                calls.append((self.name, grid, (*arguments, *options.items())))
                return Kernel("compiled", False) if self.compiles else None

            return launch

    launch = load("launch", "common").Relaunched(Kernel("kernel", True))
    for key in "aab":
        launch(key, (1, 1, 1), key, 5, num_warps=4, BLOCK=8)
    first = ("kernel", (1, 1, 1), ("a", 5, ("BLOCK", 8), ("num_warps", 4)))
    assert calls == [first, ("compiled", (1, 1, 1), ("a", 5, 8)), ("kernel", (1, 1, 1), ("b", *first[2][1:]))]
    calls.clear()
    launch = load("launch", "common").Relaunched(Kernel("interpreted", False))
    for _ in range(2):
        launch("a", (1, 1, 1), num_warps=4)
    assert [name for name, *_ in calls] == ["interpreted"] * 2
