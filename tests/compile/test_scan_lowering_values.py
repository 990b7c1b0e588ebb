"""What a scan that torch.compile fuses with its neighbors computes: every kind of gamma, option, dtype, layout, length.

Where the kernels run says test_scan_lowering.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import cumsum, discounted_cumsum

from compile.generated_code import (
    DEVICE,
    INTERPRETED,
    Kernels,
    assert_one_kernel,
    lowering_test,
    negated_scan,
    on_device,
    starts_the_interpreter,
)
from scan.oracle import HALF, LAYOUTS, assert_is_scan, differentiable_oracle, make, make_gamma, make_reset
from support.subprocesses import run_in_the_interpreter

pytest.importorskip("triton")

B, T = 5, 37


@pytest.mark.slow
@starts_the_interpreter
@pytest.mark.parametrize("marks", ["not slow", "slow"])
def test_in_the_interpreter(marks: str) -> None:
    run_in_the_interpreter(__file__, "-m", marks)


def check_scan(kernels: Kernels, x: Tensor, gamma: Any, *, initial: Tensor | None = None, **options: Any) -> Tensor:
    compiled = torch.compile(negated_scan, fullgraph=True)
    result = compiled(x, gamma, initial, **options)
    assert_is_scan(result, x, gamma, initial=initial, **options)
    assert_one_kernel(kernels)
    return result


@lowering_test
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize(
    "kind", ["number", *(pytest.param(k, marks=pytest.mark.slow) for k in ("scalar", "row1", "time")), "row", "step"]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_gammas(kernels: Kernels, dim: int, kind: str, direction: str) -> None:
    shape = (T, B) if dim == 0 else (B, T)
    x = make(shape, torch.float32, DEVICE)
    rows = [n for axis, n in enumerate(shape) if axis != dim]
    initial, reset = make(rows, torch.float32, DEVICE, seed=3), make_reset(shape, DEVICE)
    gamma = make_gamma(kind, shape, dim, torch.float32, DEVICE)
    check_scan(kernels, x, gamma, dim=dim, direction=direction, initial=initial, reset=reset)


@lowering_test
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("has_reset", [False, True])
@pytest.mark.parametrize("kind", ["number", "step"])
def test_options(kernels: Kernels, kind: str, has_reset: bool, has_initial: bool) -> None:
    shape = (3, T, 4)
    x = make(shape, torch.float32, DEVICE)
    initial = make((4,), torch.float32, DEVICE, seed=3) if has_initial else None
    reset = make_reset(shape, DEVICE) if has_reset else None
    gamma = make_gamma(kind, shape, 1, torch.float32, DEVICE)
    check_scan(kernels, x, gamma, dim=1, initial=initial, reset=reset)


@lowering_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["number", "step"])
def test_dtypes(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype in HALF:
        pytest.skip("Triton's interpreter cuts half results off where the GPU rounds")
    check_scan(kernels, make((B, T), dtype, DEVICE), make_gamma(kind, (B, T), 1, dtype, DEVICE))


@lowering_test
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernels: Kernels, layout: str) -> None:
    x = LAYOUTS[layout](make((3, T, 4), torch.float32, DEVICE))
    result = check_scan(kernels, x, 0.9, dim=1)
    assert result.stride() == torch.empty_like(x).stride()


@lowering_test
def test_strides_that_a_consumer_relies_on(kernels: Kernels) -> None:
    def function(x: Tensor) -> Tensor:
        return discounted_cumsum(x * 2, 0.9, dim=0).as_strided((T * B,), (1,)) + 1

    x = make((B, T), torch.float32, DEVICE).T
    result = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x))


@lowering_test
@pytest.mark.parametrize("time", [0, 1])
def test_gamma_is_not_rounded_to_float32(kernels: Kernels, time: int) -> None:
    """A gamma of 0.999 rounded to float32 makes an error of 1.3e-2 here, a float32 carry from tile to tile as much."""
    length = 10_000 if not INTERPRETED else 4_000
    (x,) = on_device(torch.ones((1, length) if time else (length, 1)))
    result = torch.compile(negated_scan, fullgraph=True)(x, 0.999, None, dim=time)
    error = (result.double() - discounted_cumsum(x.double(), 0.999, dim=time)).abs().max()
    assert error <= 3e-4


@lowering_test
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("kind", ["number", "row", "step"])
def test_a_reset_drops_what_is_not_finite(kernels: Kernels, kind: str, direction: str) -> None:
    shape = (B, T)
    x = make(shape, torch.float32, DEVICE)
    x[0, 9], x[1, 20], x[2, 30] = math.nan, math.inf, -math.inf
    reset = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    reset[:, 3::12] = True
    gamma = make_gamma(kind, shape, 1, torch.float32, DEVICE)
    check_scan(kernels, x, gamma, direction=direction, reset=reset)


@lowering_test
@pytest.mark.parametrize("has_reset", [False, True])
def test_gates_that_are_not_finite(kernels: Kernels, has_reset: bool) -> None:
    """A gate of NaN or infinity reaches every later step, but not over a reset and not from the first step."""
    shape = (B, T)
    x = make(shape, torch.float32, DEVICE)
    gamma = make_gamma("step", shape, 1, torch.float32, DEVICE)
    gamma[0, 9], gamma[1, 20], gamma[2, 0], gamma[3, 15], gamma[4, 4] = math.nan, math.inf, math.nan, -math.inf, 0
    x[4, 2] = math.nan  # which a gate of 0 does not stop
    reset = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    reset[:, 15::9] = True
    check_scan(kernels, x, gamma, direction="left", reset=reset if has_reset else None)


@lowering_test
@pytest.mark.parametrize("kind", ["number", "row", "step"])
def test_products_that_overflow(kernels: Kernels, kind: str) -> None:
    """Products of 37 gates of 1e30 exceed float64, yet zeros stay zeros."""
    gamma: Any = 1e30
    if kind != "number":
        gamma = torch.full((B,) if kind == "row" else (B, T), 1e30, device=DEVICE)
    x = torch.zeros(B, T, device=DEVICE)
    x[1, 0] = 1e-30
    check_scan(kernels, x, gamma)


@lowering_test
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_cumsum(kernels: Kernels, dtype: torch.dtype, reverse: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return cumsum(x * 1 if dtype == torch.bool else x + 1, 0, reverse=reverse) * 2

    x = make((T, B), torch.float64, DEVICE).mul(10).to(dtype)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), function(x), rtol=1e-5, atol=1e-4)
    assert_one_kernel(kernels)


@lowering_test
@pytest.mark.parametrize(("kind", "time"), list(itertools.product(["scalar", "row", "row1", "step"], [0, 1])))
@pytest.mark.parametrize("direction", [pytest.param("left", marks=pytest.mark.slow), "right"])
def test_gradients(kernels: Kernels, direction: str, kind: str, time: int) -> None:
    shape, rows = (B, T) if time else (T, B), (B,)
    x, weight = make(shape, torch.float32, DEVICE), make(shape, torch.float32, DEVICE, seed=5)
    initial, reset = make(rows, torch.float32, DEVICE, seed=3), make_reset(shape, DEVICE)
    gamma = make_gamma(kind, shape, time, torch.float32, DEVICE)
    leaves = [leaf.requires_grad_() for leaf in (x, gamma, initial)]

    def loss(scan: Any, x: Tensor, gamma: Tensor, initial: Tensor, weight: Tensor) -> Tensor:
        y = scan(x * 2, gamma, dim=time, direction=direction, initial=initial, reset=reset)
        return (y * weight).sum()

    compiled = torch.compile(loss, fullgraph=True)
    gradients = torch.autograd.grad(compiled(discounted_cumsum, x, gamma, initial, weight), leaves)
    wide_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    aligned = wide_leaves[1]
    if kind == "row":  # the oracle takes a gamma of fewer dimensions for one that broadcasts at the right
        aligned = aligned.unsqueeze(time).expand(shape)
    if kind == "row1":
        aligned = aligned.expand(shape)
    expected = torch.autograd.grad(
        loss(differentiable_oracle, wide_leaves[0], aligned, wide_leaves[2], weight.double()), wide_leaves
    )
    for gradient, wide_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wide_gradient, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert not kernels.extern_ops()


@lowering_test
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("kind", ["number", "step"])
@pytest.mark.parametrize("length", [2, *(pytest.param(length, marks=pytest.mark.slow) for length in (32, 102)), 132])
def test_lengths(kernels: Kernels, length: int, kind: str, looped: bool, direction: str) -> None:
    """A thread scans groups of four steps where all rows are made of such, and of 32 steps or more."""
    import torch._inductor.config as inductor_config

    x = make((B, length), torch.float32, DEVICE)
    gamma = make_gamma(kind, x.shape, 1, torch.float32, DEVICE)
    reset = make_reset(x.shape, DEVICE)
    with inductor_config.patch("triton.persistent_reductions", not looped):
        result = torch.compile(negated_scan, fullgraph=True)(x, gamma, None, direction=direction, reset=reset)
    assert_is_scan(result, x, gamma, direction=direction, reset=reset)
    assert_one_kernel(kernels)
    in_groups = length in (32, 132)
    assert ("tl.max_contiguous" in kernels.source) == in_groups
    assert ("register_groups.turned" in kernels.source) == (in_groups and direction == "right")


@lowering_test
def test_a_single_step(kernels: Kernels) -> None:
    x = make((B, 1), torch.float32, DEVICE)
    gamma = make_gamma("row", x.shape, 1, torch.float32, DEVICE)
    assert_is_scan(torch.compile(negated_scan, fullgraph=True)(x, gamma, None), x, gamma)


@lowering_test
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("length", [64, 100])
def test_sums_of_groups(kernels: Kernels, length: int, looped: bool, reverse: bool) -> None:
    import torch._inductor.config as inductor_config

    x = torch.randint(-100, 100, (B, length), device=DEVICE)
    with inductor_config.patch("triton.persistent_reductions", not looped):
        result = torch.compile(lambda x: -cumsum(-x, 1, reverse=reverse), fullgraph=True)(x)
    assert torch.equal(result, x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1))
    assert_one_kernel(kernels)
    assert ("register_groups.turned" in kernels.source) == reverse
