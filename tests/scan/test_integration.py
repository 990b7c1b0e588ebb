"""Autocast, FLOP counting, meta tensors, modes, checkpointing, subclasses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.oracle import make, make_gamma, make_reset


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_widens_like_torch_cumsum(device: str, dtype: torch.dtype) -> None:
    x = make((3, 50), dtype, device).requires_grad_()
    gamma = torch.rand(3, dtype=dtype).to(device).requires_grad_()
    initial = make((3,), dtype, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        results = [
            discounted_cumsum(x, 0.9),
            discounted_cumsum(x, gamma, initial=initial),
            torch.ops.dcs.discounted_cumsum(x, 0.9, initial=initial),
            torch.ops.dcs.discounted_cumsum(x, gamma),
            torch.ops.dcs._scan(x, gamma, 1.0, -1, True, False, initial, None, None),
            cumsum(x),
        ]
        assert all(y.dtype == torch.float32 for y in results)
        assert cumsum(x, dtype=torch.float64).dtype == torch.float64
        assert discounted_cumsum(x.double(), 0.9).dtype == torch.float64
        assert cumsum(torch.arange(3, device=device)).dtype == torch.int64
        loss = results[1].sum()
    expected = discounted_cumsum(x.float(), gamma.float(), initial=initial.float())
    torch.testing.assert_close(results[1], expected)
    grads = torch.autograd.grad(loss, (x, gamma))
    assert [g.dtype for g in grads] == [dtype, dtype]
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (x, gamma)))
    assert discounted_cumsum(x, 0.9).dtype == dtype


@pytest.mark.usefixtures("fresh_compiler")
def test_autocast_in_a_compiled_step(device: str) -> None:
    layer = torch.nn.Linear(8, 8, device=device)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return discounted_cumsum(layer(x), 0.9).sum()

    x = make((3, 8), torch.float32, device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), step(x))
    compiled(x).backward()


def test_flop_counter(device: str) -> None:
    """Two an element for the discounted sum, one for the plain one; the fused backward two scans' worth."""
    x = make((4, 100), torch.float32, device).requires_grad_()
    gamma = torch.rand(4, device=device, requires_grad=True)
    for function, forward in (
        (lambda: discounted_cumsum(x, 0.9), 800),
        (lambda: discounted_cumsum(x, gamma), 800),
        (lambda: torch.ops.dcs._scan(x, None, 0.9, 1, True, False, None, None, None), 800),
        (lambda: cumsum(x), 400),
    ):
        with FlopCounterMode(display=False) as counter:
            y = function()
        assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        discounted_cumsum(x, gamma).sum().backward()
    assert counter.get_total_flops() == 800 + 1600
    assert y.shape == x.shape


def test_meta_and_fake_tensors(device: str) -> None:
    shape = (4, 3, 6)
    x = make(shape, torch.bfloat16, device).transpose(0, 2)
    gamma = make_gamma("row", x.shape, 1, torch.float32, device)
    reset = make_reset(x.shape, device)
    y = discounted_cumsum(x, gamma, dim=1, reset=reset)
    meta = discounted_cumsum(x.to("meta"), gamma.to("meta"), dim=1, reset=reset.to("meta"))
    with FakeTensorMode() as mode:
        fake = discounted_cumsum(mode.from_tensor(x), mode.from_tensor(gamma), dim=1, reset=mode.from_tensor(reset))
        number = discounted_cumsum(mode.from_tensor(x), 0.9)
    for other in (meta, fake, number):
        assert (other.shape, other.dtype, other.stride()) == (y.shape, y.dtype, y.stride())
    assert meta.device.type == "meta"
    assert fake.device == x.device
    integers = torch.arange(6, device="meta")
    assert cumsum(integers, dtype=torch.int32).dtype == torch.int32
    assert cumsum(integers > 1).dtype == torch.int64


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_are_shown_the_public_op(device: str) -> None:
    x = make((3, 5), torch.float32, device).requires_grad_()
    for gamma, name in ((0.9, "default"), (torch.tensor(0.9, device=device), "Tensor")):
        with Seen() as seen:
            discounted_cumsum(x, gamma)
        assert f"dcs.discounted_cumsum.{name}" in seen.ops


def test_selective_checkpointing_by_the_public_op(device: str) -> None:
    """Saved by policy, the scan runs once; without one it runs again in the backward."""
    x = make((3, 5), torch.float32, device).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return discounted_cumsum(x.sin(), 0.9).cos()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_scan = op is torch.ops.dcs.discounted_cumsum.default
        return CheckpointPolicy.MUST_SAVE if is_scan else CheckpointPolicy.PREFER_RECOMPUTE

    counts = []
    for options in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}):
        with Seen() as seen:
            checkpoint(block, x, use_reentrant=False, **options).sum().backward()
        counts.append(seen.ops.count("dcs.discounted_cumsum.default"))
    assert counts == [2, 1]


class Labeled(Tensor):
    """A subclass that only has __torch_function__, which Tensor gives it."""


def test_tensor_subclasses_stay_themselves(device: str) -> None:
    x = make((3, 5), torch.float32, device)
    labeled = x.as_subclass(Labeled)
    assert isinstance(discounted_cumsum(labeled, 0.9), Labeled)
    assert isinstance(cumsum(labeled), Labeled)
    torch.testing.assert_close(discounted_cumsum(labeled, 0.9).as_subclass(Tensor), discounted_cumsum(x, 0.9))
    parameter = torch.nn.Parameter(x)
    assert type(discounted_cumsum(parameter, 0.9)) is Tensor


@pytest.mark.parametrize("name", ["gamma", "initial", "reset"])
def test_torch_function_of_an_operand(device: str, name: str) -> None:
    seen = []

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x = make((3, 8), torch.float32, device)
    gamma = make_gamma("row", x.shape, 1, x.dtype, device)
    operands = {"gamma": gamma, "initial": x[:, 0], "reset": make_reset(x.shape, device)}
    expected = discounted_cumsum(x, **operands)
    operands[name] = operands[name].as_subclass(Subclass)
    y = discounted_cumsum(x, **operands)
    assert any(function.namespace == "dcs" for function in seen if isinstance(function, torch._ops.OpOverload))
    assert isinstance(y, Subclass)
    assert torch.equal(y.as_subclass(Tensor), expected)


def test_torch_function_modes_see_the_call(device: str) -> None:
    class Mode(TorchFunctionMode):
        ops = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += isinstance(function, torch._ops.OpOverload) and function.namespace == "dcs"
            return function(*args, **(kwargs or {}))

    x = make((3, 8), torch.float32, device)
    with Mode() as mode:
        discounted_cumsum(x, 0.9)
        cumsum(x)
    assert mode.ops == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_records_the_call(device: str) -> None:
    def function(x: Tensor) -> Tensor:
        return discounted_cumsum(x, 0.9) + cumsum(x)

    x = make((3, 8), torch.float32, device)
    traced = torch.jit.trace(function, x)
    assert torch.equal(traced(x + 1), function(x + 1))


def test_public_and_raw_ops_agree(device: str) -> None:
    shape = (3, 4, 20)
    x, reset = make(shape, torch.float32, device), make_reset(shape, device)
    for dim, direction, window in ((0, "left", None), (1, "right", 2), (2, "left", 5), (-1, "right", None)):
        rows = [size for axis, size in enumerate(shape) if axis != dim % 3]
        options = {"dim": dim, "direction": direction, "window": window, "reset": reset}
        options["initial"] = make(rows, torch.float32, device, seed=3)
        for kind in ("number", "scalar", "row", "step"):
            gamma = make_gamma(kind, shape, dim, torch.float32, device)
            public = discounted_cumsum(x, gamma, **options)
            assert torch.equal(public, torch.ops.dcs.discounted_cumsum(x, gamma, **options))
            with torch.inference_mode():
                assert torch.equal(public, torch.ops.dcs.discounted_cumsum(x, gamma, **options))


def test_a_tensor_gamma_never_becomes_a_float() -> None:
    """With the overloads the other way round a one-element gamma would lose its gradient without a word."""
    for gamma in (torch.tensor(0.9), torch.tensor([0.9])):
        gamma.requires_grad_()
        (grad,) = torch.autograd.grad(torch.ops.dcs.discounted_cumsum(torch.ones(1, 3), gamma).sum(), gamma)
        torch.testing.assert_close(grad.sum(), torch.tensor(1 + 1 + 2 * 0.9))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graph_capture() -> None:
    x = make((64, 300), torch.float32, "cuda")
    gamma = torch.rand(64, device="cuda")
    expected = discounted_cumsum(x, gamma), discounted_cumsum(x, 0.9, dim=0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        discounted_cumsum(x, gamma), discounted_cumsum(x, 0.9, dim=0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = discounted_cumsum(x, gamma), discounted_cumsum(x, 0.9, dim=0)
    for tensor in got:
        tensor.zero_()
    graph.replay()
    torch.testing.assert_close(got, expected)
