"""`_n_step_returns`: its kernels against the reference, itself held by test_semantics.py; and the op."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from torch_dcs_ops import returns
from torch_dcs_ops.reference import returns as reference
from torch_dcs_ops.reference.returns import NStepCall

from returns.test_kernels import Call, budgets, call, wide
from scan.oracle import LAYOUTS, REAL_DTYPES
from support.selection import slow
from support.subprocesses import rare, run_tests

OP = torch.ops.dcs._n_step_returns.default
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Below, at and above what the kernels have known to the compiler, share, and sum in float.
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 64, 65)


def arguments(c: Call, n: int) -> tuple[Any, ...]:
    gamma, trace = c.numbers
    return (*c[:6], c.gamma, gamma, c.trace, trace, c.dim, n)


def check(c: Call, n: int, function: Callable[..., Tensor] = OP) -> None:
    """The budget of the scan over all steps holds for one over some of them."""
    result = function(*arguments(c, n))
    wide_arguments = (wide(a) if isinstance(a, Tensor) else a for a in arguments(c, n))
    wanted = reference.n_step_returns(NStepCall(*wide_arguments))
    assert result.dtype == c.rewards.dtype
    assert result.stride() == torch.empty_like(c.rewards).stride()
    final = torch.finfo(c.rewards.dtype)
    excess = (result.cpu().double() - wanted).abs() - budgets(c)[1] - final.eps * wanted.abs() - final.smallest_normal
    assert not (excess > 0).any(), f"n = {n}: {float(excess.max()):.3e} beyond the budget"


def kind(next_values: bool) -> dict[str, Any]:
    """Values of the next states: given, or those of the next step."""
    return {"kind": "returns" if next_values else "gae", "next_values": next_values}


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_dtypes_flags_and_discounts(device: str, dtype: torch.dtype) -> None:
    options = itertools.product((0, 1), (False, True), ("number", "row", "step"), ("bool", "float", "none"))
    for i, (dim, next_values, rates, flags) in enumerate(options):
        c = call((24, 32), dim, dtype, device, rates=rates, flags=flags, seed=i, **kind(next_values))
        for n in (3, WINDOWS[i % len(WINDOWS)]):
            check(c, n)


@pytest.mark.parametrize("n", WINDOWS)
def test_sizes(device: str, n: int) -> None:
    for length, width in itertools.product((1, 7, 8, 9, 40, 130), (1, 9, 130)):
        for dim, next_values in itertools.product((0, 1), (False, True)):
            c = call((length, width) if dim == 0 else (width, length), dim, torch.float32, device, **kind(next_values))
            check(c, n)
            check(c._replace(truncated=None, numbers=(0.97, 1.0)), n)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 33), (3, 90, 5), (40, 34)], ids=str)
def test_odd_and_even_columns(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for i, n in enumerate((1, 2, 4, 5, 8)):
        for layout in ("contiguous", "strided"):
            options = {"rates": ("number", "row")[i % 2], "flags": "bool", "seed": i, "layout": layout}
            check(call(shape, len(shape) - 2, dtype, device, **options, **kind(i % 2 == 0)), n)


@pytest.mark.parametrize("n", [1, 8, 33, 250, 2**62])
def test_long(device: str, n: int) -> None:
    shapes = (((3, 599), 1), ((599, 3), 0), ((2, 260, 34), 1), ((2, 4500), 1))
    for (shape, dim), rates in itertools.product(shapes, ("number", "row")):
        check(call(shape, dim, torch.float32, device, rates=rates, **kind(rates == "row")), n)


def test_gradients_of_one_step(device: str) -> None:
    """Of rows whose flags lie apart in another way than their rewards: a stride of one step says nothing."""
    rewards, values = (torch.randn(300, 1, device=device, requires_grad=True) for _ in range(2))
    bootstrap = torch.randn(300, device=device, requires_grad=True)
    terminated = (torch.arange(300, device=device) % 3 == 0)[None].t()
    targets = returns.n_step_returns(
        rewards, values, bootstrap_value=bootstrap, terminated=terminated, gamma=0.5, n=1, time_dim=1
    )
    grad = torch.randn_like(targets)
    of_rewards, of_bootstrap = torch.autograd.grad(targets, (rewards, bootstrap), grad)
    assert torch.equal(of_rewards, grad)
    assert torch.equal(of_bootstrap, torch.where(terminated, 0, 0.5 * grad)[:, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, layout: str) -> None:
    for dim, rates, n in itertools.product((0, 1, 2), ("row", "step"), (3, 9)):
        check(call((5, 12, 11), dim, torch.float32, device, rates=rates, layout=layout, **kind(n == 3)), n)
        check(call((6, 12, 16), dim, torch.bfloat16, device, rates=rates, layout=layout, **kind(n == 9)), n)


def test_operands_of_different_layouts(device: str) -> None:
    names = ("contiguous", "permuted", "contiguous", "contiguous", "strided", "sub_view", "expanded", "permuted")
    for dim, next_values in itertools.product((0, 1, 2), (False, True)):
        c = call((6, 10, 9), dim, torch.float32, device, rates="step", **kind(next_values))
        changed = [t if t is None else LAYOUTS[name](t) for name, t in zip(names, c[:8], strict=True)]
        check(Call(*changed, None, dim), 4)


@pytest.mark.parametrize("n", [1, 5, 16, 20])
@pytest.mark.parametrize("shape", [(33, 1), (64, 7), (100, 128), (130, 129), (31, 300)], ids=str)
def test_the_layout_shows_in_no_bit(shape: tuple[int, int], n: int) -> None:
    """On the CPU, where columns whose steps are adjacent in memory are read and written by tiles of 16 by 128."""
    for next_values, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        c = call(shape, 0, dtype, "cpu", flags="bool", seed=n, **kind(next_values))
        expected = OP(*arguments(c, n))
        turned = [a.t().contiguous().t() if isinstance(a, Tensor) and a.dim() == 2 else a for a in arguments(c, n)]
        for mixed in (turned, [turned[0], *arguments(c, n)[1:]], [c.rewards, *turned[1:]]):
            result = OP(*mixed)
            assert result.stride() == torch.empty_like(mixed[0]).stride()
            assert torch.equal(result, expected)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 1.5, -0.5])
@pytest.mark.parametrize("trace", [0.0, 1.0])
def test_discounts_at_and_beyond_their_bounds(device: str, gamma: float, trace: float) -> None:
    for dim, n in itertools.product((0, 1), (1, 3, 8, 20)):
        c = call((64, 48), dim, torch.float32, device, **kind(n == 8))
        result = OP(*arguments(c._replace(numbers=(gamma, trace)), n))
        sizes = (a if a is None or a.dtype == torch.bool else a.abs() for a in map(wide, c[:6]))
        operands = [a if not isinstance(a, Tensor) else wide(a) for a in c[:6]]
        wanted, size = (reference.n_step_returns(NStepCall(*tensors, None, g, None, trace, dim, n))  # type: ignore[arg-type]
                        for tensors, g in ((operands, gamma), (list(sizes), abs(gamma))))  # fmt: skip
        # n products and sums of the steps' magnitudes, each within a rounding of a discount and two of its own.
        assert ((result.cpu().double() - wanted).abs() <= 4 * n * torch.finfo(torch.float32).eps * (size + 1e-30)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_the_windows_that_read_it(device: str, bad: float) -> None:
    for dim, n, name in itertools.product((0, 1), (1, 4, 8, 11), ("rewards", "values", "next_values")):
        shape = (40, 32) if dim == 0 else (32, 40)
        c = call(shape, dim, torch.float32, device, flags="none", **kind(name == "next_values"))
        spoilt = getattr(c, name).clone()
        spoilt.movedim(dim, 0)[30, 5] = bad
        done = torch.zeros(shape, dtype=torch.bool, device=device)
        done.movedim(dim, 0)[27] = True
        result = OP(*arguments(c._replace(**{name: spoilt, "terminated": done, "numbers": (0.9, 1.0)}), n))
        reached = torch.zeros(40, 32, dtype=torch.bool, device=device)
        # The value is read by the one result whose window ends before it.
        last = 29 if name == "values" else 30
        reached[max(last - n + 1, 28) : last + 1 if name == "rewards" else max(last - n + 2, 28), 5] = True
        if name != "rewards" and last - n + 1 < 28:
            reached[:] = False
        assert torch.equal(~result.movedim(dim, 0).isfinite(), reached), (dim, n, name)


def test_values_beyond_an_end_are_not_read(device: str) -> None:
    for dim, n in itertools.product((0, 1), (1, 5, 9)):
        c = call((32, 40), dim, torch.float32, device, **kind(True))
        assert c.next_values is not None
        assert c.terminated is not None
        spoilt = c._replace(next_values=c.next_values.masked_fill(c.terminated, math.nan))
        assert torch.equal(OP(*arguments(c, n)), OP(*arguments(spoilt, n)))


@pytest.mark.parametrize(("dim", "layout"), [slow(0, "contiguous"), (1, "permuted")])
def test_opcheck(device: str, dim: int, layout: str) -> None:
    change = LAYOUTS[layout]
    x, v, rate = (change(torch.rand(4, 5, device=device)).detach().requires_grad_() for _ in range(3))
    row = torch.rand(5 - dim, device=device, requires_grad=True)
    done = change(torch.rand(4, 5, device=device) < 0.3)
    for tensors in (
        (x, v, None, row, done, None, row, 1.0, rate, 1.0),
        (x.detach(), None, v.detach(), None, done, done, None, 0.9, None, 0.8),
        (x.detach(), None, None, None, None, None, None, 0.9, None, 1.0),
    ):
        result = opcheck(OP, (*tensors, dim, 3))
        assert set(result.values()) == {"SUCCESS"}, result


def test_opcheck_of_degenerate_shapes(device: str) -> None:
    for shape in ((0,), (1,), (0, 3), (3, 0)):
        x = torch.randn(shape, device=device, requires_grad=True)
        result = opcheck(OP, (x, None, x.detach(), None, None, None, None, 0.9, None, 1.0, 0, 2))
        assert set(result.values()) == {"SUCCESS"}, result


def test_n_of_numpy() -> None:
    import numpy as np

    x = torch.arange(5.0)
    for n in (np.int64(2), np.int32(2), np.uint8(2)):
        result = returns.n_step_returns(x, n=n, next_values=x, terminated=None)  # type: ignore[arg-type]
        assert torch.equal(result, returns.n_step_returns(x, n=2, next_values=x, terminated=None))
    with pytest.raises(RuntimeError, match="n must be at least 1, got 0"):
        returns.n_step_returns(x, n=np.int64(0), next_values=x, terminated=None)  # type: ignore[arg-type]
    for wrong in (np.bool_(True), np.float64(2), torch.tensor(2), True):
        with pytest.raises(TypeError, match="n must be an integer, got"):
            returns.n_step_returns(x, n=wrong, next_values=x, terminated=None)  # type: ignore[arg-type]


def test_n_is_checked_by_every_entry(device: str) -> None:
    x = torch.ones(4, 3, device=device)
    operands = (x, x, None, x[0], None, None, None, 0.9, None, 1.0, 0)
    with pytest.raises(RuntimeError, match="_n_step_returns: n must be at least 1, got 0"):
        OP(*operands, 0)
    with pytest.raises(RuntimeError, match=r"_n_step_returns: values must have rewards' shape \(4, 3\), got \(2, 3\)"):
        OP(x, x[:2], *operands[2:], 1)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in operands]
        with pytest.raises(RuntimeError, match="_n_step_returns: n must be at least 1, got -1"):
            OP(*fakes, -1)


def test_one_call_without_gradients_and_in_a_graph(device: str, fresh_compiler: None) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, v, last = (torch.randn(size, device=device) for size in ((8, 3), (8, 3), (3,)))
    done = torch.rand(8, 3, device=device) < 0.2

    def function(n: int) -> Tensor:
        return returns.n_step_returns(x, v, n=n, bootstrap_value=last, terminated=done, gamma=0.9)

    with Watch():
        eager = function(3)
    assert seen == [OP]
    graphs: list[torch.fx.Graph] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend)(3)
    assert torch.equal(compiled, eager)
    assert len(graphs[-1].find_nodes(op="call_function", target=OP)) == 1


# The Triton kernel.

kernel_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_triton.py"
)


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU")
def test_all_of_the_kernel_tests() -> None:
    run_tests(__file__, "-k", "cuda", TORCH_DCS_KERNELS="triton")


@kernel_test
@pytest.mark.parametrize(
    ("shape", "dim"),
    [pytest.param((3, 90), 1, marks=pytest.mark.slow), ((21, 40), 0), ((2, 19, 9), 1), ((1, 3), 0)],
    ids=str,
)
@pytest.mark.parametrize("every", [5, rare(1)])
def test_triton(every: int, shape: tuple[int, ...], dim: int) -> None:
    """All options, and every fifth of them: each value of each, and each dtype."""
    pytest.importorskip("triton")
    launch = importlib.import_module("torch_dcs_ops.triton_kernels.returns.n_step").n_step_returns
    device = "cpu" if INTERPRETED else "cuda"
    options = list(itertools.product((False, True), ("number", "row", "step"), ("bool", "float", "none")))
    for i, (next_values, rates, flags) in list(enumerate(options))[::every]:
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[i % 4]
        c = call(shape, dim, dtype, device, rates=rates, flags=flags, seed=i, **kind(next_values))
        for n in (1, 4, 2**40):
            check(c, n, lambda *arguments: launch(NStepCall(*arguments)))
