"""The Triton kernels of filtered gradients, step by step, against plain torch in float64; and of rows moved in place.

On a GPU for real; without one in Triton's interpreter, which one test starts in a process of its own.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import run_in_the_interpreter
from torch import Tensor

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
kernel_test = pytest.mark.skipif(not INTERPRETED and not GPU, reason="no GPU: runs in test_in_the_interpreter")
DTYPES = [torch.bfloat16, torch.float32] + ([] if INTERPRETED else [torch.float16])
GROUP_ROWS = 128
EPS = 2.0**-10
# rows, columns: one group and several, less than a block of columns and several, whole words and not.
SIZES = [(1, 1), (5, 33), (37, 1100), (3, 2048)] + ([(700, 50_257), (300, 128_256)] if GPU else [])


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    run_in_the_interpreter(__file__, "-m", marks)


def load(name: str) -> ModuleType:
    """A module of triton_kernels, installed or from the checkout."""
    try:
        return importlib.import_module(f"torch_dcs_ops.triton_kernels.{name}")
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        try:
            return importlib.import_module(f"triton_kernels.{name}")
        finally:
            sys.path.pop(0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if INTERPRETED:
        multiply_bfloat16(monkeypatch)
    return load("filtered_gradients")


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as 16-bit integers, and its dot product multiplies these."""
    from triton.runtime import interpreter

    exact = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return exact(self, widened(a), widened(b), *arguments)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def unit(dtype: torch.dtype) -> float:
    """The error of one rounding; the interpreter cuts bfloat16 off where a GPU rounds."""
    return torch.finfo(dtype).eps * (1.0 if INTERPRETED else 0.5)


def assert_close(value: Tensor, expected: Tensor, tolerance: float, floor: float = 0.0) -> None:
    """Each within `tolerance` of itself, and of `floor`."""
    assert value.shape == expected.shape
    value, expected = value.double().cpu(), expected.double().cpu()
    worst = ((value - expected).abs() / (expected.abs() + floor)).nan_to_num(0).max() if expected.numel() else 0.0
    assert torch.equal(value.isnan(), expected.isnan())
    assert float(worst) <= tolerance, f"{float(worst)} > {tolerance}"


def sum_error(terms: int) -> float:
    """Of a float32 sum of products of either sign, each step's rounding on its own."""
    return 1e-6 + torch.finfo(torch.float32).eps / 2 * terms**0.5


def error(value: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    norm = float(expected.double().norm())
    return float((value.double().cpu() - expected.double().cpu()).norm()) / (norm if norm > 0 else 1.0)


class Problem:
    """Logits of a softmax that is concentrated, and what belongs to their rows; a third of the rows is ignored."""

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False, softcap: float = 0.0,
        scale: float = 1.0, stride: int | None = None, offset: int = 0,
    ) -> None:  # fmt: skip
        stride = columns if stride is None else stride
        memory = torch.full((offset + rows * stride + 64,), 77.0, dtype=dtype)
        self.outside = torch.ones(memory.shape, dtype=torch.bool)
        self.outside.as_strided((rows, columns), (stride, 1), offset).fill_(False)
        view = memory.as_strided((rows, columns), (stride, 1), offset)
        view.copy_(torch.randn(rows, columns) * 1.5 + 4 * torch.randn(columns))
        self.memory = memory.to(DEVICE)
        self.logits = self.memory.as_strided((rows, columns), (stride, 1), offset)
        self.bias = torch.randn(columns) if bias else None
        self.softcap, self.scale = softcap, scale
        self.valid = torch.rand(rows) > 0.3
        self.valid[0] = True
        self.target = torch.where(self.valid, torch.randint(columns, (rows,)), -100)
        self.a, self.h = torch.rand(rows), torch.rand(rows)
        self.settle()

    def settle(self) -> None:
        """lse, p and s of the logits and the valid rows as they are now."""
        z, self.slope = self.transformed()
        self.lse = torch.where(self.valid, z.logsumexp(1), 0).float()
        self.p = torch.where(self.valid[:, None], (z - self.lse[:, None].double()).exp(), 0)

    def transformed(self) -> tuple[Tensor, Tensor]:
        u = self.logits.cpu().double()
        u = (u if self.bias is None else u + self.bias) * self.scale
        if not self.softcap:
            return u, torch.ones_like(u)
        bent = torch.tanh(u / self.softcap)
        return self.softcap * bent, 1 - bent * bent

    def columns(self, steps: ModuleType, eps: float = EPS) -> tuple[Tensor, Tensor]:
        bias, lse, valid = on_device(self.bias, self.lse, self.valid)
        q = place_of_groups(self.logits)
        alive = torch.zeros(self.logits.size(1), dtype=torch.uint8, device=DEVICE)
        steps.columns(self.logits, lse, valid, bias, self.softcap, self.scale, eps, q, GROUP_ROWS, alive)
        return alive, q

    def keep(self, steps: ModuleType, alive: Tensor, most: int) -> tuple[Tensor, ...]:
        return keep(steps, alive.to(DEVICE), *on_device(self.target, self.valid), most)

    def gather(self, steps: ModuleType, alive: Tensor, index: Tensor, slot: Tensor, count: Tensor) -> Tensor:
        rows = on_device(self.lse, self.target, self.valid, self.a, self.h, None, self.bias)
        mass = torch.full((len(self.lse),), math.nan, device=DEVICE)
        steps.gather_(self.logits, *rows, self.softcap, self.scale, alive, index, slot, count, mass)
        return mass

    def gradient(self) -> Tensor:
        log_p = torch.where(self.valid[:, None], self.transformed()[0] - self.lse[:, None].double(), 0)
        hot = torch.nn.functional.one_hot(self.target.clamp(min=0), log_p.size(1)).bool()
        a, h = self.a.double()[:, None], self.h.double()[:, None]
        exact = torch.where(hot, h * log_p.expm1() + (a - h) * self.p, a * self.p) * self.slope
        return torch.where(self.valid[:, None], exact, 0)


def keep(steps: ModuleType, alive: Tensor, target: Tensor, valid: Tensor, most: int) -> tuple[Tensor, ...]:
    """(alive, index, slot, count) of one chunk, which is the first one."""
    steps.mark_targets(alive[None], target, valid, max(len(target), 1))
    since = torch.full_like(alive, 5, dtype=torch.int32)
    kept = steps.keep(alive, since, 3, most, steps.new_places(alive, len(alive)))
    assert torch.equal(since, 5 - 2 * alive.int())
    return alive, *kept


def place_of_groups(logits: Tensor) -> Tensor:
    """For q: rows of whole words of 16 bytes, and NaN before."""
    words = 16 // logits.element_size()
    stride = -(-logits.size(1) // words) * words
    return logits.new_full((-(-len(logits) // GROUP_ROWS), stride), math.nan)[:, : logits.size(1)]


def on_device(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 8.0},
    "everything": {"bias": True, "softcap": 8.0, "scale": -0.7, "stride": 1130, "offset": 3},
    "padded": {"stride": 1104},
    "halves of words": {"stride": 1108},
}


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


class Product:
    """Operands whose columns past the count, and rows that are not kept, are NaN: nothing of them may be used."""

    def __init__(
        self, rows: int, columns: int, features: int, count: int, dtype: torch.dtype, stride: int | None = None
    ) -> None:
        memory = torch.full((rows, columns if stride is None else stride), math.nan)
        memory[:, :count] = torch.randn(rows, count)
        self.index = torch.randperm(columns, dtype=torch.int32)
        self.kept_rows = self.index[:count].long()
        self.index[:count] = self.kept_rows.sort().values
        self.kept_rows = self.index[:count].long()
        weight = torch.full((columns, features), math.nan)
        weight[self.kept_rows] = torch.randn(count, features)
        self.features, self.columns, self.dtype = features, columns, dtype
        self.kept = memory.to(dtype).to(DEVICE)[:, :columns]
        self.count = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        self.on_device_index = self.index.to(DEVICE)
        self.weight = weight.to(dtype).to(DEVICE)
        self.input = torch.randn(rows, features).to(dtype).to(DEVICE)
        self.left = self.kept[:, :count].cpu().double()


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


def never(columns: int) -> Tensor:
    return torch.full((columns,), 2**31 - 1, dtype=torch.int32, device=DEVICE)


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
    monkeypatch.setattr(products, "device_of", lambda tensor: load("launch").Device(2, products.BULK_BYTES))
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
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("step", [1, 7, 100])
def test_rows_moved_apart(step: int, share: float) -> None:
    rows, columns, dtype = 50, 2050, torch.bfloat16
    wanted = torch.rand(rows) < share
    source = wanted.cumsum(0) - wanted.long()
    memory = torch.randn(rows, columns + 3).to(dtype)
    expected = memory.clone()
    expected[:, :columns] = torch.where(wanted[:, None], memory[source.clamp(max=rows - 1), :columns], 0)
    place, source, wanted = on_device(memory, source, wanted)
    load("moved_rows").restore_rows(place[:, :columns], source, wanted, step)
    assert torch.equal(place.cpu(), expected)


@kernel_test
@pytest.mark.parametrize("rows", [1, 50, 2500])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_order_of_rows(rows: int, share: float) -> None:
    target = torch.where(torch.rand(rows) < share, torch.randint(1000, (rows,)), -7)
    for place in (target, torch.stack((target, target), 1)[:, 0]):
        index, rank, valid, count = (value.cpu() for value in load("moved_rows").order_rows(place.to(DEVICE), -7))
        assert torch.equal(valid, target != -7)
        assert count.tolist() == [int(valid.sum())]
        assert torch.equal(rank, valid.cumsum(0) - valid.long())
        assert torch.equal(index, torch.cat((valid.nonzero().squeeze(1), (~valid).nonzero().squeeze(1))))


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
    steps.gather_(empty, none, target, valid, none, none, None, None, 0.0, 1.0, alive, index, slot, count, none)
    steps.input_gradient(empty, index, count, torch.ones(20, 3, device=DEVICE), none.view(0, 3))
    total = torch.full((20, 3), 5.0, device=DEVICE)
    steps.add_weight_gradient(empty, index, count, none.view(0, 3), total, None, never(20), 0)
    assert bool((total == 5).all())
    steps.finish_weight_gradient(q, none.view(0, 3), total, None, never(20), 1, False)
    assert not bool(total.any() | steps.column_sums(empty, index, count).any())


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


def run_all(steps: ModuleType, problem: Problem, product: Product, out: Tensor, total: Tensor, rest: Tensor) -> Any:
    rows = (problem.lse, problem.target, problem.valid, problem.a, problem.h)
    q = place_of_groups(problem.logits)
    single = problem.logits[:8].clone()
    alive = torch.zeros(1, problem.logits.size(1), dtype=torch.uint8, device=DEVICE)
    since, mass = never(alive.size(1)), torch.empty_like(problem.lse)
    steps.mark_targets(alive, problem.target, problem.valid, 256)
    steps.columns(problem.logits, problem.lse, problem.valid, None, 0.0, 1.0, EPS, q, GROUP_ROWS, alive[0])
    index, slot, count = steps.keep(alive[0], since, 0, 20_000, steps.new_places(alive, alive.size(1)))
    steps.gather_(problem.logits, *rows, None, None, 0.0, 1.0, alive[0], index, slot, count, mass)
    chosen = steps.choose_rows(mass, problem.lse, problem.valid, GROUP_ROWS, 8, 32)
    parts = steps.share_tails(q, single, chosen, alive, 2, None, 0.0, 1.0)
    sums = torch.empty(q.size(0) + 8, 512, dtype=q.dtype, device=DEVICE)
    factors, own = steps.weigh_tails(mass, parts, chosen, GROUP_ROWS, product.input, None, 0, sums)
    steps.input_gradient(problem.logits, index, count, product.weight, out)
    steps.add_tails(out, factors, own, chosen.slot, None, sums.float(), GROUP_ROWS)
    steps.add_weight_gradient(problem.logits, index, count, product.input, total, rest, since, 0)
    steps.finish_weight_gradient(q, sums[: q.size(0)], total, rest, since, 1, False)
    return mass, parts, single, count, steps.column_sums(problem.logits, index, count)


@pytest.mark.skipif(not GPU, reason="there is no CUDA device")
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


@pytest.mark.skipif(not GPU, reason="there is no CUDA device")
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
    steps.gather_(whole, lse, target, valid, a, h, None, None, 0.0, 1.0, alive, index, slot, count, mass)
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


# Beside the pointers to half numbers: what the kernels' arguments are.
KINDS = {
    "i1": ["valid_ptr"],
    "u8": ["alive_ptr", "own_valid_ptr"],
    "i32": ["slot_ptr", "index_ptr", "count_ptr", "counts_ptr", "since_ptr", "rank_ptr", "bounds_ptr"],
    "i64": ["target_ptr", "rows_ptr"],
    "fp32": [
        "lse_ptr",
        "own_lse_ptr",
        "bias_ptr",
        "a_ptr",
        "h_ptr",
        "mass_ptr",
        "sums_ptr",
        "parts_ptr",
        "factors_ptr",
        "single_ptr",
        "evens_ptr",
        "table_ptr",
        "softcap",
        "scale",
        "eps",
        "smallest",
    ],
}
PRODUCT_OPTIONS = {"PRECISION": "tf32", "DEPTH": 64, "COLUMNS": 128, "ROWS": 128, "BAND": 8, "PARTS": 4, "EVEN": False}


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("filtered_columns", "sum_groups", {"ROWS": 4}),
        ("filtered_columns", "mark_rows", {}),
        ("filtered_columns", "count_alive", {}),
        ("filtered_columns", "place_columns", {}),
        ("filtered_tails", "rank_rows", {"ROWS": 16, "BLOCK": 512}),
        ("filtered_tails", "take_rows", {"BLOCK": 2048, "EACH": 32}),
        ("filtered_tails", "part_group", {"kinds": {"single_ptr": "bf16", "valid_ptr": "u8"}}),
        ("filtered_tails", "weigh_rows", {"ROWS": 8, "BLOCK": 512, "kinds": {"index_ptr": "i64", "sums_ptr": "bf16"}}),
        ("filtered_tails", "add_rows", {"ROWS": 8, "BLOCK": 512}),
        ("filtered_gradients", "gather_rows", {"ROWS": 2, "WORD": 8}),
        ("filtered_gradients", "pack_rows", {"ROWS": 1}),
        ("filtered_gradients", "sum_kept", {"ROWS": 64, "BLOCK": 64}),
        ("moved_rows", "order_targets", {}),
        ("filtered_products", "multiply_kept", PRODUCT_OPTIONS),
        ("filtered_products", "add_products", PRODUCT_OPTIONS),
    ],
)
def test_compiles_for_sm_90(module: str, name: str, options: dict[str, Any]) -> None:
    """With all options on, where no GPU is: the interpreter knows nothing of types that must agree."""
    assert compiled_for_sm_90(module, name, options).asm["ptx"]


WIDE_ROWS = ("kept_ptr", "weight_ptr", "weight_stride", "out_ptr", "out_stride", "D")


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize("total", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("module", "name", "tile", "aligned"),
    [
        ("filtered_bulk", "multiply_kept_in_bulk", "BULK_KEPT_TILE", ("weight_ptr", "weight_stride", "D")),
        ("filtered_bulk", "multiply_kept_in_bulk", "BULK_KEPT_TILE", WIDE_ROWS[1:]),
        ("filtered_bulk", "add_products_in_bulk", "BULK_TILE", ()),
        ("filtered_bulk", "add_products_in_bulk", "BULK_TILE", ("total_ptr", "rest_ptr", "total_stride", "D")),
        ("filtered_products", "multiply_kept", "WIDE", ()),
        ("filtered_products", "multiply_kept", "WIDE", WIDE_ROWS),
    ],
)
def test_wide_tiles_fit(module: str, name: str, tile: str, aligned: tuple[str, ...], total: str) -> None:
    """Into the shared memory of the devices that they are chosen for, however much of it the compiler plans."""
    tiles = load("filtered_tiles")
    sizes = getattr(tiles, tile)
    options = PRODUCT_OPTIONS | {"ROWS": sizes.rows, "COLUMNS": sizes.columns, "DEPTH": sizes.depth, "PARTS": 2}
    options |= {"STAGES": sizes.stages, "kinds": dict.fromkeys(("out_ptr", "total_ptr", "rest_ptr"), total)}
    assert compiled_for_sm_90(module, name, options, sizes.warps, aligned).metadata.shared <= tiles.BULK_BYTES


def compiled_for_sm_90(
    module: str, name: str, options: dict[str, Any], warps: int = 4, aligned: tuple[str, ...] = ()
) -> Any:
    """With `aligned` arguments known to be divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = dict(options)
    kernel = getattr(load(module), name)
    names: list[str] = kernel.arg_names
    changed = options.pop("kinds", {})
    known = {"UNIT": 8, "GROUP_ROWS": GROUP_ROWS, "BLOCK": 1024, "BLOCKS": 128, **options}
    constants = {argument: known.get(argument, True) for argument in names if argument == argument.upper()}
    constants = {argument: value for argument, value in constants.items() if argument not in ("V", "D", "G", "K")}
    kinds = {argument: kind for kind, arguments in KINDS.items() for argument in arguments} | changed

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in ("kept", "left", "right"):
            block = {"kept": ("ROWS", "DEPTH"), "left": ("DEPTH", "ROWS"), "right": ("DEPTH", "COLUMNS")}[argument]
            return "tensordesc<bf16[{}, {}]>".format(*(constants[name] for name in block))
        pointer = argument.endswith("_ptr")
        return ("*" if pointer else "") + kinds.get(argument, "bf16" if pointer else "i32")

    source = ASTSource(
        fn=kernel,
        signature={argument: kind(argument) for argument in names},
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(names.index(argument),): [["tt.divisibility", 16]] for argument in aligned if argument in names},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
