"""`_temporal_difference_scan`'s kernels against the reference, which test_semantics.py holds against definitions."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import _native, discounted_cumsum, returns
from torch_dcs_ops.reference import returns as reference
from torch_dcs_ops.reference import scan as reference_scan

from scan.oracle import HALF, LAYOUTS, REAL_DTYPES
from support.cuda_graphs import captured
from support.selection import for_gpus, slow
from support.subprocesses import run_tests, run_with_instruction_set

OP = torch.ops.dcs._temporal_difference_scan.default
CLIPS = (1.1, 0.9, 1.3)


class Call(NamedTuple):
    """The op's arguments before the numbers."""

    rewards: Tensor
    values: Tensor | None
    next_values: Tensor | None
    bootstrap_value: Tensor | None
    terminated: Tensor | None
    truncated: Tensor | None
    gamma: Tensor | None
    trace: Tensor | None
    rhos: Tensor | None
    dim: int
    needs: tuple[bool, bool, bool] = (True, True, True)
    numbers: tuple[float, float] = (0.98, 0.95)  # where gamma and trace are None

    def arguments(self) -> tuple[Any, ...]:
        gamma, trace = self.numbers
        return (*self[:6], self.gamma, gamma, self.trace, trace, self.rhos, *CLIPS, self.dim, *self.needs)


def call(
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    kind: str = "gae",
    next_values: bool = False,
    rates: str = "number",
    flags: str = "bool",
    layout: str = "contiguous",
    seed: int = 0,
) -> Call:
    """kind: "gae", "vtrace" (with rhos), "returns" (without values) or "shifted" (with values of next states alone)."""
    generator = torch.Generator().manual_seed(seed)
    change = LAYOUTS[layout]

    def normal(*size: int) -> Tensor:
        return change(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)).to(device)

    def flag() -> Tensor:
        drawn = torch.rand(shape, generator=generator) < 0.03
        return change(drawn if flags == "bool" else drawn.to(dtype)).to(device)

    rows = [size for axis, size in enumerate(shape) if axis != dim]
    sizes = {"number": None, "row": rows, "step": shape}[rates]
    drawn = [None if sizes is None else torch.rand(tuple(sizes), generator=generator) for _ in range(2)]
    gamma, trace = (None if d is None else change((d * 0.3 + 0.7).to(torch.float32)).to(device) for d in drawn)
    return Call(
        normal(*shape),
        None if kind == "returns" else normal(*shape),
        normal(*shape) if next_values else None,
        None if next_values else normal(*rows),
        flag() if flags != "none" else None,
        flag() if flags != "none" else None,
        gamma,
        trace,
        normal(*shape).exp() if kind == "vtrace" else None,
        dim,
        (False, True, False) if kind in ("returns", "shifted") else (True, True, True),
    )


def wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu() if tensor.dtype == torch.bool else tensor.cpu().double()


def budgets(c: Call, *, long: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What rounding may do to advantages, targets and pg_advantages.

    A step takes at most 8 roundings, of its temporal difference, its gate and their sum. With D the temporal difference
    in magnitudes, an error of u·D at every step, and of as much as the carry at every step that it is carried over, add
    up to 8u·(the scan of the scan of D). One rounding to the output's dtype comes on top.
    """
    r, v, after, last, _, _, gamma, trace, rhos = map(wide, c[:9])
    assert r is not None
    dim, zero = c.dim, torch.zeros_like(r)
    rate = [
        reference_scan.wide_gates(r, rate, number, dim).expand(r.shape)
        for rate, number in zip((gamma, trace), c.numbers, strict=True)
    ]
    if after is None:
        following = zero if v is None else torch.roll(v, -1, dim)
        after = following.abs() + (
            zero if last is None else last.expand(zero.select(dim, 0).shape).unsqueeze(dim).abs()
        )
    ratios = [torch.ones_like(r) if rhos is None else rhos.clamp(max=clip) for clip in CLIPS]
    ends = zero.bool()
    for flag in (c.terminated, c.truncated):
        ends = ends if flag is None else ends | (flag.cpu() != 0)
    size = ratios[0] * (r.abs() + 2 * rate[0] * after.abs() + (zero if v is None else v.abs()))
    gates = rate[0] * rate[1] * ratios[1]
    for _ in range(2):
        scan = reference_scan.ScanCall(gates, 1.0, dim, True, False, None, ends, None)
        size = discounted_cumsum(size, gates, dim=dim, reset=ends) if long else reference_scan.scan(size, scan)
    accumulation = torch.finfo(torch.float64 if c.rewards.dtype == torch.float64 else torch.float32)
    budget = 4 * accumulation.eps * size
    carried = torch.roll(budget, -1, dim) + budget
    return budget, budget, (ratios[2] / ratios[1].clamp(min=1e-300) + ratios[2]) * budget + ratios[2] * carried


def check(c: Call, *, long: bool = False) -> None:
    """`long`: against the CPU's kernels in double, as the reference takes seconds for rows of so many steps."""
    results = OP(*c.arguments())
    wide_arguments = [wide(a) if isinstance(a, Tensor) else a for a in c.arguments()]
    defined = reference.TemporalDifferenceCall(*wide_arguments)  # type: ignore[arg-type]
    expected = OP(*wide_arguments) if long else reference.temporal_difference_scan(defined)
    final = torch.finfo(c.rewards.dtype)
    for result, wanted, budget, need in zip(results, expected, budgets(c, long=long), c.needs, strict=True):
        assert result.dtype == c.rewards.dtype
        assert result.device == c.rewards.device
        if not need:
            assert result.shape == (0,)
            continue
        assert result.shape == c.rewards.shape
        assert result.stride() == torch.empty_like(c.rewards).stride()
        excess = (result.cpu().double() - wanted).abs() - budget - final.eps * wanted.abs() - final.smallest_normal
        assert not (excess > 0).any(), f"{float(excess.max()):.3e} beyond the budget"


KINDS = ("gae", "vtrace", "returns", "shifted")
# What each kernel takes at a time, one less and one more: vectors of 8 and 16, lines of 1024 on a CPU; tiles on a GPU.
SIZES = (1, 7, 8, 9, 16, 17, 33, 255, 256, 257, 1024, 1025)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_flags_and_discounts(device: str, kind: str, dtype: torch.dtype) -> None:
    options = list(itertools.product((0, 1), (False, True), ("number", "row", "step"), ("bool", "float", "none")))
    # Every combination for float32; of the others every fifth, which has each value of each option in it.
    for dim, next_values, rates, flags in options if dtype == torch.float32 else options[::5]:
        check(call((17, 19), dim, dtype, device, kind=kind, next_values=next_values, rates=rates, flags=flags))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", SIZES)
@pytest.mark.each_value
def test_sizes(device: str, length: int, kind: str) -> None:
    for width, dim in itertools.product((1, 9, 40, 257), (0, 1)):
        shape = (length, width) if dim == 0 else (width, length)
        check(call(shape, dim, torch.float32, device, kind=kind, next_values=width == 40, seed=width))


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((3, 3001), 1), ((3001, 3), 0), ((9, 1000, 2), 1), ((20_000, 8), 1), ((5, 40_000), 0)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
def test_large(device: str, kind: str, shape: tuple[int, ...], dim: int) -> None:
    if device == "cuda":
        shape = tuple(size * 8 if size > 1000 else size for size in shape)
    check(call(shape, dim, torch.float32, device, kind=kind))
    check(call(shape, dim, torch.float32, device, kind=kind, next_values=True, rates="step", flags="float"))


@pytest.mark.parametrize(
    ("dtype", "flags"), [(torch.float32, "none"), (torch.float64, "none"), (torch.bfloat16, "bool")]
)
@for_gpus
def test_a_block_a_row_at_the_limit_of_static_shared_memory(device: str, dtype: torch.dtype, flags: str) -> None:
    check(call((3, 5000), 1, dtype, device, kind="returns", flags=flags))


def columns_on(device: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A CPU takes columns by the vector, a GPU by the block: there remainders will do. test_large has more columns."""
    return shape if device == "cuda" else (*shape[:-1], shape[-1] if shape[-1] < 2048 else shape[-1] % 2048 or 2048)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((131, 2128), 0), ((200, 4096), 0), ((2, 140, 2112), 1), ((9, 25_360), 0), ((2, 12, 25_376), 1),
        ((40, 17_001), 0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
def test_many_columns(device: str, kind: str, shape: tuple[int, ...], dim: int) -> None:
    """On a GPU: a block's warps in turn, or a warp alone, on columns in whole words or not, the last ones in part."""
    shape = columns_on(device, shape)
    for next_values, flags in itertools.product((False, True), ("bool", "none")):
        check(call(shape, dim, torch.float32, device, kind=kind, next_values=next_values, flags=flags))
    check(call(shape, dim, torch.bfloat16, device, kind=kind))


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_few_steps_with_powers_of_any_size(device: str, kind: str, gamma: float) -> None:
    """Powers of gamma that float holds, and that it does not."""
    for shape, dim in (((128, 256), 0), ((250, 40), 0), ((700, 32), 1)):
        c = call(shape, dim, torch.float32, device, kind=kind, next_values=kind == "returns")
        check(c._replace(numbers=(gamma, 1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
@for_gpus
def test_few_columns_of_whole_steps(device: str, kind: str, dtype: torch.dtype) -> None:
    """On a GPU: one kind of end, whole warps and blocks, the public functions' outputs; and what just misses it."""
    for shape in ((16, 8), (112, 2104), (128, 256), (240, 40), (256, 24), (128, 255), (120, 256), (256, 2112)):
        for next_values in (False, True):
            c = call(columns_on(device, shape), 0, dtype, device, kind=kind, next_values=next_values)
            c = c._replace(truncated=None)
            check(c)
            if kind == "vtrace":
                c = c._replace(needs=(False, True, True))
                check(c)
            check(c._replace(terminated=None))
            check(c._replace(bootstrap_value=None))


@for_gpus
def test_few_columns_with_ratios_of_any_size(device: str) -> None:
    """Products of ratios that float holds, and that it does not, with carries that are large enough to show it."""
    for shape in ((128, 256), (250, 41)):
        c = call(shape, 0, torch.float32, device, kind="vtrace")
        ends = c.terminated
        c = c._replace(terminated=None, truncated=None)
        assert c.rhos is not None
        for ratio in (0.0, 1e-20, 1e-38, 1e30):
            rhos = c.rhos.clone()
            rhos[5::7, ::3] = ratio
            check(c._replace(rhos=rhos))
            check(c._replace(rhos=rhos, terminated=ends, needs=(False, True, True)))
            check(c._replace(rhos=torch.full_like(rhos, ratio), numbers=(1.0, 1.0)))
            rewards = c.rewards.clone()
            rewards[100] = 1e30
            check(c._replace(rhos=rhos, rewards=rewards))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    ("shape", "dim"), [((128, 256), 0), ((100, 37), 0), ((4096, 8), 1), ((3, 140_003), 1), ((20, 140_003), 1)], ids=str
)
def test_a_launch_waits_for_the_results_that_it_reads(shape: tuple[int, int], dim: int) -> None:
    """Each reads what the one before writes, whose end it overlaps; replays find words that long rows have left."""
    c = call(shape, dim, torch.float32, "cuda")._replace(truncated=None, numbers=(0.6, 0.5))

    def run(waits: bool) -> list[Tensor]:
        results = [c.values]
        for _ in range(40):
            advantages, targets, _ = OP(*c._replace(rewards=results[-1], values=results[-1]).arguments())
            results += [targets, advantages]
            if waits:
                torch.cuda.synchronize()
        return results  # type: ignore[return-value]

    expected = run(True)
    graph, recorded = captured(lambda: run(False))
    for _ in range(20):
        assert all(map(torch.equal, expected, run(False)))
        graph.replay()
        assert all(map(torch.equal, expected, recorded))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(device: str, kind: str, layout: str) -> None:
    for dim, rates, flags in itertools.product((0, 1, 2), ("row", "step"), ("bool", "float")):
        check(call((5, 12, 11), dim, torch.float32, device, kind=kind, rates=rates, flags=flags, layout=layout))


def test_operands_of_different_layouts(device: str) -> None:
    for dim in (0, 1, 2):
        c = call((6, 10, 9), dim, torch.float32, device, kind="vtrace", rates="step")
        changed = [LAYOUTS[layout](t) if t is not None else None for layout, t in zip(
            ("contiguous", "permuted", "contiguous", "contiguous", "strided", "sub_view", "expanded", "permuted",
             "strided"), c[:9], strict=True)]  # fmt: skip
        check(Call(*changed, dim=dim))  # type: ignore[arg-type]


def test_four_dimensions(device: str) -> None:
    for dim in range(4):
        check(call((3, 4, 5, 6), dim, torch.float32, device, rates="row", layout="permuted"))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_values_are_rounded_once(device: str, dtype: torch.dtype) -> None:
    """A sum that would stagnate in half precision: 2000 times 1."""
    ones = torch.ones(2000, 9, dtype=dtype, device=device)
    total = returns.discounted_returns(ones, 1.0)[0]
    assert (total == torch.tensor(2000, dtype=dtype, device=device)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [0, 1])
def test_nan_and_infinity_reach_what_they_are_carried_to(device: str, dim: int, bad: float) -> None:
    """From step 300 back to the end of the episode before, step 99, and to nowhere else."""
    for name in ("rewards", "values", "rhos", "next_values"):
        c = call((400, 40), 0, torch.float32, device, kind="vtrace", next_values=name == "next_values", flags="none")
        ends = torch.zeros(400, 40, dtype=torch.bool, device=device)
        ends[99] = True
        c = c._replace(terminated=ends)
        spoilt = getattr(c, name).clone()
        spoilt[300, 5] = bad
        c = c._replace(**{name: spoilt, "dim": dim})
        if dim:
            c = Call(*(t.T.contiguous() if isinstance(t, Tensor) and t.dim() == 2 else t for t in c))
        advantages, _, pg_advantages = (result.movedim(dim, 0) for result in OP(*c.arguments()))
        clean = name == "rhos" and bad > 0  # an infinite ratio is clipped
        reached = torch.zeros(400, 40, dtype=torch.bool, device=device)
        reached[100:301, 5] = not clean
        assert torch.equal(~advantages.isfinite(), reached), name
        # pg weights a step by its own ratio and reads the advantage after it.
        reached[300, 5] = not clean
        assert torch.equal(~pg_advantages.isfinite(), reached), name


def test_values_beyond_an_end_are_not_read(device: str) -> None:
    nan = float("nan")
    for dim in (0, 1):
        c = call((30, 40), dim, torch.float32, device, next_values=True)
        assert c.terminated is not None
        assert c.next_values is not None
        spoilt = c._replace(next_values=c.next_values.masked_fill(c.terminated, nan))
        assert all(map(torch.equal, OP(*c.arguments()), OP(*spoilt.arguments())))
    ends = torch.tensor([False, True, False, False, False], device=device)
    x, ones = torch.full((5,), nan, device=device), torch.ones(5, device=device)
    x[[1, 4]] = 1.0
    expected = torch.tensor([2.0, 1.5, 1.875, 1.75, 1.5], device=device)
    expected[0] = 1 + 0.5 * 1.5
    assert torch.equal(returns.discounted_returns(ones, 0.5, next_values=x, truncated=ends), expected)


def test_a_nan_carried_past_an_end_is_dropped(device: str) -> None:
    """Selected away, not multiplied by 0."""
    for dim in (0, 1):
        rewards = torch.ones(20, 20, device=device)
        rewards[10:] = float("nan")
        done = torch.zeros(20, 20, dtype=torch.bool, device=device)
        done[9] = True
        rewards, done = (rewards, done) if dim == 0 else (rewards.T.contiguous(), done.T.contiguous())
        result = returns.discounted_returns(rewards, 0.9, terminated=done, time_dim=dim).movedim(dim, 0)
        assert result[:10].isfinite().all()
        assert result[10:].isnan().all()


@pytest.mark.parametrize("shape", [(2048, 64), (300, 700), (64, 2048), (5, 9000)], ids=str)
def test_the_bits_are_the_same_with_any_number_of_threads(shape: tuple[int, int]) -> None:
    before = torch.get_num_threads()
    try:
        for dim in (0, 1):
            c = call(shape, dim, torch.float32, "cpu", kind="vtrace")
            results = []
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                results.append(OP(*c.arguments()))
            for other in results[1:]:
                assert all(map(torch.equal, results[0], other))
    finally:
        torch.set_num_threads(before)


def test_the_bits_are_the_same_from_run_to_run(device: str) -> None:
    for shape, dim in (((3000, 70), 0), ((70, 3000), 1), ((4, 60_000), 1), ((4000, 8), 1)):
        c = call(shape, dim, torch.float32, device, kind="vtrace")
        first = OP(*c.arguments())
        for _ in range(20):
            assert all(map(torch.equal, first, OP(*c.arguments())))


@pytest.mark.skipif(_native.CPU.kind != "native", reason="there is no CPU library")
@pytest.mark.parametrize("instructions", [slow("default"), "avx2"])
def test_other_instruction_sets(instructions: str) -> None:
    run_with_instruction_set(instructions, __file__, "-k", "cpu and (test_dtypes or nan or beyond)")


def test_the_reference_serves_where_there_are_no_kernels() -> None:
    run_tests(__file__, "-k", "cpu and (four or nan or beyond)", TORCH_DCS_KERNELS="reference")
