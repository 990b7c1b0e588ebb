"""Scans that torch.compile fuses with the operations around them: how many kernels come out, and what these compute.

With a GPU the kernels run for real. Without one Inductor is made to write them for an emulated GPU and they run in
Triton's interpreter: then one test runs this file and others in a process of its own that sets TRITON_INTERPRET=1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import cumsum, discounted_cumsum

from compile.generated_code import (
    BLOCKS,
    DEVICE,
    Kernels,
    assert_one_kernel,
    lowering_test,
    negated_scan,
    on_device,
    starts_the_interpreter,
)
from scan.oracle import make, make_gamma
from support.subprocesses import rare, run_in_the_interpreter

pytest.importorskip("triton")

B, T = 5, 37


@starts_the_interpreter
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    """Files of lowerings in one process, which imports the compiler once; test_scan_lowering_values.py is long."""
    names = ("test_scan_lowering", "test_returns_lowering", "test_inductor", "../scan/test_triton_columns")
    run_in_the_interpreter(*(str(Path(__file__).parent / f"{name}.py") for name in names), "-m", f"skipif and {marks}")


def random_inputs(time: int) -> tuple[Tensor]:
    """One tensor with T steps along `time`."""
    return (make((B, T) if time else (T, B), torch.float32, DEVICE, seed=int(torch.randint(100, ()))),)


def wide(arguments: Any) -> Any:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]


# GAE: TD errors, a scan from the last step, returns.
def gae(rewards: Tensor, values: Tensor, done: Tensor, time: int) -> tuple[Tensor, Tensor]:
    length = rewards.size(time)
    now, after = values.narrow(time, 0, length), values.narrow(time, 1, length)
    delta = rewards + 0.99 * after * (~done) - now
    advantages = discounted_cumsum(delta, 0.99 * 0.95, dim=time, reset=done)
    return advantages, advantages + now


def gae_inputs(batch: int, length: int, time: int) -> tuple[Tensor, ...]:
    inputs = torch.randn(batch, length), torch.randn(batch, length + 1), torch.rand(batch, length) < 0.1
    return on_device(*(tensor if time else tensor.T.contiguous() for tensor in inputs))


@lowering_test
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.each_value
def test_gae_is_one_kernel(kernels: Kernels, dynamic: bool, time: int, looped: bool) -> None:
    import torch._inductor.config as inductor_config

    compiled = torch.compile(gae, fullgraph=True, dynamic=dynamic)
    with inductor_config.patch("triton.persistent_reductions", not looped):
        for batch, length in ((B, T), (B + 2, T + 10)) if dynamic else ((B, T),):
            inputs = gae_inputs(batch, length, time)
            results = compiled(*inputs, time)
            torch.testing.assert_close(results, gae(*wide(inputs), time), check_dtype=False, rtol=1e-4, atol=1e-5)
    assert_one_kernel(kernels)
    assert ("tl.max_contiguous" in kernels.source) == (time == 0)
    assert "from torch_dcs_ops.compile.inductor import heuristics as triton_heuristics" in kernels.source


@lowering_test
@pytest.mark.parametrize("option", ["force_cooperative_reductions", rare("tile_reductions"), rare("use_block_ptr")])
def test_gae_under_other_options_of_the_code_generator(kernels: Kernels, option: str) -> None:
    """Where a kernel could not run backwards under an option, there is none or the option is not used for it."""
    import torch._inductor.config as inductor_config

    inputs = gae_inputs(B, T, 1)
    gamma = torch.full((B,), 0.9, device=DEVICE)

    def function(x: Tensor) -> Tensor:
        return discounted_cumsum(x * 2, gamma, dim=1) + 1

    with inductor_config.patch(f"triton.{option}", True):
        result = torch.compile(function, fullgraph=True)(inputs[0])
    torch.testing.assert_close(result, function(inputs[0]), rtol=1e-4, atol=1e-4)
    assert bool(kernels.extern_ops()) == (option != "force_cooperative_reductions")


@lowering_test
@pytest.mark.parametrize("option", ["use_block_ptr", rare("use_tensor_descriptor")])
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.each_value
def test_tiles_are_not_loaded_by_blocks(kernels: Kernels, direction: str, option: str) -> None:
    """Block pointers load a tile in the natural order of its steps."""
    import torch._inductor.config as inductor_config

    def function(x: Tensor) -> Tensor:
        return discounted_cumsum(x * 2, 0.9, dim=0, direction=direction) + 1

    x = make((128, B), torch.float32, DEVICE)
    with inductor_config.patch(f"triton.{option}", True):
        result = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-4)
    assert [op for op in kernels.extern_ops() if "discounted_cumsum" in op]


@lowering_test
@pytest.mark.parametrize("time", [rare(0), 1])
def test_normalized_returns_minus_a_baseline_are_one_kernel(kernels: Kernels, time: int) -> None:
    def function(rewards: Tensor, mean: Tensor, std: Tensor, baseline: Tensor) -> Tensor:
        return discounted_cumsum((rewards - mean) / std, 0.99, dim=time) - baseline

    mean, std = on_device(torch.tensor(0.5), torch.tensor(2.0))
    inputs = *random_inputs(time), mean, std, *random_inputs(time)
    result = torch.compile(function, fullgraph=True)(*inputs)
    torch.testing.assert_close(result, function(*wide(inputs)), check_dtype=False, rtol=1e-4, atol=1e-5)
    assert_one_kernel(kernels)


@lowering_test
@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.each_value
def test_backward_is_one_kernel(kernels: Kernels, kind: str, time: int) -> None:
    """The upstream gradient, the adjoint scan, the gradients of gates and what made the input: nothing is copied."""

    def function(x: Tensor, scale: Tensor, gamma: Any) -> Tensor:
        return (discounted_cumsum(x * scale, gamma, dim=time) * 2).sum()

    (x,), (scale,) = random_inputs(time), random_inputs(time)
    gamma = make_gamma(kind, x.shape, time, torch.float32, DEVICE)
    leaves = [x, *([gamma] if isinstance(gamma, Tensor) else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = torch.compile(function, fullgraph=True)(x, scale, gamma)
    kernels.clear()
    gradients = torch.autograd.grad(loss, leaves)
    expected = torch.autograd.grad(function(*wide((x, scale, gamma))), leaves)
    torch.testing.assert_close(gradients, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert_one_kernel(kernels)


@lowering_test
def test_numbers_reach_the_backward_and_do_not_compile_again(kernels: Kernels) -> None:
    """The first number is a constant of both kernels; from the second one on it is an input of them."""

    def function(x: Tensor, gamma: float) -> Tensor:
        return (discounted_cumsum(x * 2, gamma, dim=0) * 2).sum()

    compiled = torch.compile(function, fullgraph=True)
    x = make((T, B), torch.float32, DEVICE).requires_grad_()
    for gamma in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        (gradient,) = torch.autograd.grad(compiled(x, gamma), x)
        (expected,) = torch.autograd.grad(function(x.double(), gamma), x)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
        if gamma == 0.9:
            assert len(kernels.graphs) == 2
            assert all("tl.full([1, 1], 0.9, tl.float64)" in graph for graph in kernels.graphs)
    assert len(kernels.graphs) == 4


# Two scans, or a scan and a reduction, that one kernel would compute if they ran alike.
COMPANIONS = {
    "left scan": lambda x, time: discounted_cumsum(x, 0.5, dim=time, direction="left"),
    "right scan": lambda x, time: discounted_cumsum(x, 0.5, dim=time, direction="right"),
    "cumsum": lambda x, time: cumsum(x, time),
    "reversed cumsum": lambda x, time: cumsum(x, time, reverse=True),
    "torch.cumsum": lambda x, time: torch.cumsum(x, time),
    "sum": lambda x, time: x.sum(time, keepdim=True),
    "argmax": lambda x, time: x.argmax(time, keepdim=True),
    "sum over rows": lambda x, time: x.sum(1 - time, keepdim=True),
}
LIKE_OTHERS = ("cumsum", "reversed cumsum", "torch.cumsum", "sum", "argmax")


@lowering_test
@pytest.mark.parametrize("companion", [rare(name) if name in LIKE_OTHERS else name for name in COMPANIONS])
@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.each_value
def test_a_right_scan_beside_others(kernels: Kernels, time: int, companion: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return discounted_cumsum(y, 0.9, dim=time) - 1, COMPANIONS[companion](y, time) * 2

    x = random_inputs(time)[0].round(decimals=1)
    results = torch.compile(function, fullgraph=True)(x)
    for result, expected in zip(results, function(x.double()), strict=True):
        torch.testing.assert_close(result, expected, check_dtype=False, rtol=1e-4, atol=1e-4)
    if companion in ("right scan", "reversed cumsum", "sum"):
        assert len(kernels.names()) == 1
    assert not [op for op in kernels.extern_ops() if "dcs" in op]


@lowering_test
def test_a_right_scan_of_a_left_scan(kernels: Kernels) -> None:
    def function(x: Tensor) -> Tensor:
        return discounted_cumsum(discounted_cumsum(x + 1, 0.9, direction="left") * 2, 0.8) + x

    (x,) = on_device(torch.randn(B, T))
    result = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x.double()), check_dtype=False, rtol=1e-4, atol=1e-4)
    assert len(kernels.names()) == 2


@lowering_test
@pytest.mark.parametrize("time", [0, rare(1)])
def test_returns_normalized_by_their_own_mean(kernels: Kernels, time: int) -> None:
    """A reduction of a scan, and its result back in the shape of the scan: two loops."""

    def function(x: Tensor) -> Tensor:
        returns = discounted_cumsum(x * 2, 0.9, dim=time)
        return returns - returns.mean(time, keepdim=True)

    (x,) = random_inputs(time)
    result = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(result, function(x.double()), check_dtype=False, rtol=1e-4, atol=1e-4)
    assert not kernels.extern_ops()


@lowering_test
def test_what_is_not_lowered(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 4 elements each the interpreter would run thousands of programs for the operations around the long rows.
    monkeypatch.setitem(BLOCKS, "XBLOCK", 1024)
    x, few = make((B, T), torch.float32, DEVICE), make((2, 9000), torch.float32, DEVICE)
    gamma, number = torch.rand(B, device=DEVICE), torch.tensor(0.9, device=DEVICE)
    functions = {
        "window": lambda: -discounted_cumsum(-x, gamma, window=3),
        "complex": lambda: discounted_cumsum((x + 1).to(torch.complex64), gamma),
        "nothing to fuse with": lambda: discounted_cumsum(x[1:], gamma[1:]),
        "one step": lambda: -discounted_cumsum(-x[:, :1], gamma),
        "few long rows": lambda: -discounted_cumsum(-few, number),
    }
    for name, function in functions.items():
        torch._dynamo.reset()
        kernels.clear()
        torch.testing.assert_close(torch.compile(function, fullgraph=True)(), function())
        assert [op for op in kernels.extern_ops() if "discounted_cumsum" in op], name


@lowering_test
def test_other_compilations_are_left_alone(kernels: Kernels) -> None:
    import torch._inductor.config as inductor_config

    x, gamma = make((B, T), torch.float32, DEVICE), torch.rand(B, device=DEVICE)
    with inductor_config.patch(pre_grad_custom_pass=None):
        result = torch.compile(negated_scan, fullgraph=True)(x, gamma, None)
    torch.testing.assert_close(result, discounted_cumsum(x, gamma))
    assert [op for op in kernels.extern_ops() if "discounted_cumsum" in op]


@lowering_test
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.each_value
def test_consumers_of_every_second_step(kernels: Kernels, looped: bool, direction: str) -> None:
    """Torch 2.15 takes them out of the registers that hold a tile, by their place in the natural order of the steps."""
    import torch._inductor.config as inductor_config

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = discounted_cumsum(x * 2, 0.9, dim=1, direction=direction)
        even, odd = (x / x.abs().sum(1, keepdim=True)).unflatten(1, (-1, 2)).unbind(-1)
        return y, even * 3 + odd

    x = make((B, 128), torch.float32, DEVICE)
    with inductor_config.patch("triton.persistent_reductions", not looped):
        results = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(results, function(x.double()), check_dtype=False, rtol=1e-4, atol=1e-4)


def test_tiles_are_no_larger_than_the_sizes() -> None:
    """Inductor leaves masks out where a size is 1, and relies on a tile of 1 there."""
    from torch_dcs_ops.compile.inductor import heuristics

    for tiles in heuristics.TILES.values():
        for tile in tiles:
            assert heuristics._config(tile, {"x": 1, "r0_": 4}).kwargs == {"XBLOCK": 1, "R0_BLOCK": 4}
    assert [c.kwargs for c in heuristics._whole_row_configs({"x": 1, "r0_": 256})] == [{"XBLOCK": 1}, {"XBLOCK": 1}]


def test_deterministic_compilations_do_not_choose_by_timing() -> None:
    from torch_dcs_ops.compile.inductor import heuristics

    sizes = {"x": 64, "r0_": 64}
    assert not heuristics._chooses_without_timing(sizes, inductor_meta={"deterministic": False})
    assert heuristics._chooses_without_timing({**sizes, "y": 2}, inductor_meta={})
    for decorator in (heuristics.reduction, heuristics.persistent_reduction):
        with mock.patch.object(heuristics, "triton_heuristics") as inductor:
            decorator(sizes, inductor_meta={"deterministic": True})
        inductor.cached_autotune.assert_not_called()
