"""torch.compile(fullgraph=True), export, AOTInductor: the op stays one opaque node, and everything else as in eager."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_dcs_ops import cumsum, discounted_cumsum
from torch_dcs_ops.compile.passes.constant_discounts import give_numbers

from scan.oracle import LAYOUTS, make, make_gamma, make_reset
from support.packages import load_package
from support.selection import slow

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def train_step(window: int | None) -> Any:
    def step(x: Tensor, gamma: Any, initial: Tensor, reset: Tensor) -> Tensor:
        y = discounted_cumsum(x, gamma, initial=initial, reset=reset, window=window)
        return (y * torch.tanh(x)).mean()

    return step


def check_training(device: str, step: Any, kind: str, sizes: Any, **compile_options: Any) -> None:
    compiled = torch.compile(step, fullgraph=True, **compile_options)
    for batch, length in sizes:
        shape = (batch, length)
        x = make(shape, torch.float32, device).requires_grad_()
        gamma = make_gamma(kind, shape, 1, torch.float32, device)
        initial = make((batch,), torch.float32, device, seed=3).requires_grad_()
        reset = make_reset(shape, device)
        leaves = [x, initial] + ([gamma.requires_grad_()] if isinstance(gamma, Tensor) else [])
        results = []
        for run in (step, compiled):
            loss = run(x, gamma, initial, reset)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(results[1], results[0])


SIZES = ((3, 5), (4, 7), (6, 12))


@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.each_value
def test_training_step_through_aot_autograd(device: str, dynamic: bool, window: int | None, kind: str) -> None:
    check_training(device, train_step(window), kind, SIZES, backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [slow(False), True])
def test_training_step_through_inductor(device: str, dynamic: bool) -> None:
    check_training(device, train_step(None), "row", SIZES, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_step_through_inductor_in_full(device: str, dynamic: bool, window: int | None, kind: str) -> None:
    check_training(device, train_step(window), kind, SIZES, dynamic=dynamic)


def test_sizes_that_change_compile_twice(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    check_training(device, train_step(None), "row", [(b, t) for b in (2, 3, 5) for t in (4, 9, 16)], backend=counter)
    assert counter.frame_count <= 3


def test_a_gamma_that_changes_does_not_compile_again(device: str) -> None:
    """20 numbers, at most 3 graphs; a float argument of the op would end at the recompile limit."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, g: discounted_cumsum(x, g).sin(), fullgraph=True, backend=counter)
    x = make((3, 50), torch.float64, device)  # a number and a tensor gamma may take kernels that round differently
    for gamma in torch.linspace(0.05, 1.1, 20).tolist():
        torch.testing.assert_close(compiled(x, gamma), discounted_cumsum(x, gamma).sin())
    assert counter.frame_count <= 3


def test_a_compiled_number_keeps_float64_precision(device: str) -> None:
    x = torch.ones(1, 10_000, dtype=torch.float64, device=device)
    compiled = torch.compile(lambda x, g: discounted_cumsum(x, g), fullgraph=True, backend="inductor")
    for gamma in (0.999, 0.9991):
        torch.testing.assert_close(compiled(x, gamma), discounted_cumsum(x, gamma), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["int 1", "int 0", "float32", "float64", "int64"])
def test_numbers_of_other_types(device: str, kind: str) -> None:
    if kind.startswith("int "):
        gamma: Any = int(kind[4:])
    else:
        numpy = pytest.importorskip("numpy", reason="numpy, whose numbers these are, is not installed")
        gamma = getattr(numpy, kind)(2 if kind == "int64" else 0.5)
    x = make((3, 5), torch.float64, device)
    expected = discounted_cumsum(x, float(gamma))
    assert torch.equal(discounted_cumsum(x, gamma), expected)
    constant = torch.compile(lambda x: discounted_cumsum(x, gamma), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(constant(x), expected)
    argument = torch.compile(discounted_cumsum, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(argument(x, gamma), expected)


class Recorder:
    """A backend that keeps the forward and backward graphs of AOTAutograd."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(module, inputs)

    def calls(self, index: int) -> str:
        """One line a node: the operator and its constant arguments. Detaching is autograd's bookkeeping."""
        lines = []
        for node in self.graphs[index].graph.nodes:
            if node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
                constants = [a for a in node.args if not isinstance(a, torch.fx.Node)]
                constants += [f"{k}={v}" for k, v in node.kwargs.items() if k in ("reverse", "direction", "window")]
                lines.append(f"{node.target}({', '.join(map(str, constants))})")
        return "\n".join(lines)


def assert_expected_graph(actual: str, expected: str) -> None:
    """The text in the test is the expectation; EXPECTTEST_ACCEPT=1 writes it anew."""
    expecttest = pytest.importorskip("expecttest", reason="expecttest, which compares the graphs, is not installed")
    expecttest.assert_expected_inline(actual, expected, skip=1)


traced_graph = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the graphs are those of torch 2.13, this is {torch.__version__}"
)


@traced_graph
def test_graph_of_a_policy_gradient_step() -> None:
    """The step of `make demo`: the public op in the forward, nothing of it in the backward."""

    def step(log_probs: Tensor, rewards: Tensor, done: Tensor) -> Tensor:
        returns = discounted_cumsum(rewards, 0.99, reset=done)
        return -(log_probs * (returns - returns.mean())).mean()

    recorder = Recorder()
    log_probs = torch.randn(4, 8, requires_grad=True)
    done = torch.zeros(4, 8, dtype=torch.bool)
    torch.compile(step, backend=recorder, fullgraph=True)(log_probs, torch.randn(4, 8), done).backward()
    assert_expected_graph(
        recorder.calls(0),
        """\
aten.ones.default([])
aten.mul.Tensor(0.99)
dcs.discounted_cumsum.Tensor()
aten.mean.default()
aten.sub.Tensor()
aten.mul.Tensor()
aten.mean.default()
aten.neg.default()""",
    )
    assert_expected_graph(
        recorder.calls(1),
        """\
aten.neg.default()
aten.expand.default([4, 8])
aten.div.Scalar(32)
aten.mul.Tensor()""",
    )


@traced_graph
def test_graph_of_a_learned_gamma() -> None:
    """The public op in the forward, one fused kernel in the backward."""
    recorder = Recorder()
    x, gamma = torch.randn(4, 8, requires_grad=True), torch.rand(4, requires_grad=True)
    initial = torch.randn(4, requires_grad=True)
    compiled = torch.compile(
        lambda x, g, i: discounted_cumsum(x, g, initial=i, direction="left").sum(), backend=recorder, fullgraph=True
    )
    compiled(x, gamma, initial).backward()
    assert_expected_graph(
        recorder.calls(0),
        """\
dcs.discounted_cumsum.Tensor(direction=left)
aten.sum.default()""",
    )
    assert_expected_graph(
        recorder.calls(1),
        """\
aten.expand.default([4, 8])
dcs._scan_gradients.default(1.0, 1, False, None)
<built-in function getitem>(0)
<built-in function getitem>(1)
aten.view.default([4])
aten.select.int(1, 0)
aten.mul.Tensor()""",
    )


@pytest.mark.parametrize("argument", [slow(0), slow(1), (0, 1)], ids=str)
def test_transforms_inside_a_compiled_function(device: str, argument: int | tuple[int, int]) -> None:
    def loss(x: Tensor, gamma: Tensor) -> Tensor:
        return discounted_cumsum(x, gamma).pow(3).sum()

    args = (make((4, 5), torch.float64, device), make_gamma("row", (4, 5), 1, torch.float64, device))
    functions = [
        torch.func.vmap(torch.func.grad(loss, (0, 1))),
        lambda x, g: torch.func.jvp(loss, (x, g), (g[:, None] * x, g)),
    ]
    # Torch 2.11 cannot compile the basis of a hessian of anything, nor 2.12 one in two arguments.
    without = ("2.11.",) if isinstance(argument, int) else ("2.11.", "2.12.")
    if not torch.__version__.startswith(without):
        functions.append(torch.func.hessian(loss, argument))
    for function in functions:
        torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*args), function(*args))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, layout: str) -> None:
    x = LAYOUTS[layout](make((4, 9, 6), torch.float32, device))
    compiled = torch.compile(lambda x: discounted_cumsum(x, 0.9, dim=1) * 2, fullgraph=True, backend="inductor")
    y = compiled(x)
    torch.testing.assert_close(y, discounted_cumsum(x, 0.9, dim=1) * 2)


def test_sizes_known_only_at_run_time(device: str) -> None:
    def function(x: Tensor, gamma: Tensor) -> Tensor:
        return discounted_cumsum(x[x > 0], gamma).sum()

    x = make((40,), torch.float64, device).requires_grad_()
    gamma = torch.tensor(0.5, dtype=torch.float64, device=device, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = [torch.autograd.grad(f(x, gamma), (x, gamma)) for f in (compiled, function)]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_a_graph_are_given_as_numbers(device: str, dynamic: bool) -> None:
    """With dynamic=True a number is a variable, and stays a tensor."""
    given = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        given.append(give_numbers(module.graph))
        module.graph.lint()
        module.recompile()
        targets = [node.target for node in module.graph.nodes]
        assert targets.count(torch.ops.dcs.discounted_cumsum.default) == given[-1]
        return module

    def function(x: Tensor, row: Tensor) -> Tensor:
        y = discounted_cumsum(x, 0.9, dim=0, reset=x > 1) + discounted_cumsum(x, -2, dim=0, direction="left")
        return y + discounted_cumsum(x, row, dim=0) + discounted_cumsum(x, torch.tensor(0.5), dim=0, window=2)

    number = 0.9

    def changing(x: Tensor, row: Tensor) -> Tensor:
        return discounted_cumsum(x, number, dim=0) + discounted_cumsum(x, row, dim=0)

    x, row = make((7, 3), torch.float64, device).requires_grad_(), torch.rand(3, dtype=torch.float64, device=device)
    for case, count in ((function, 2), (changing, 0 if dynamic else 1)):
        results = torch.compile(case, fullgraph=True, dynamic=dynamic, backend=backend)(x, row), case(x, row)
        assert given.pop() == count
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.sin().sum(), x) for result in results))


def test_numbers_through_the_backend(device: str) -> None:
    def function(x: Tensor, gamma: float) -> Tensor:
        return (discounted_cumsum(x * 2, gamma, dim=0) * 2).sin()

    compiled = torch.compile(function, fullgraph=True, backend="dcs")
    x = make((7, 3), torch.float32, device).requires_grad_()
    for gamma in (0.9, 0.8, 0.7):
        results = compiled(x, gamma), function(x, gamma)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.sum(), x) for result in results))


class Returns(torch.nn.Module):
    def forward(self, x: Tensor, gamma: Tensor) -> Tensor:
        return discounted_cumsum(x, 0.9) + discounted_cumsum(x, gamma, direction="left", window=3) + cumsum(x)


def exported(device: str, strict: bool) -> torch.export.ExportedProgram:
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    args = (make((3, 5), torch.float32, device), torch.rand(3, device=device))
    return torch.export.export(Returns(), args, dynamic_shapes=({0: batch, 1: length}, {0: batch}), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_ops(device: str, strict: bool) -> None:
    program = exported(device, strict)
    for stage in (program, program.run_decompositions()):
        targets = [str(node.target) for node in stage.graph.nodes if node.op == "call_function"]
        assert targets.count("dcs.discounted_cumsum.Tensor") == 2
        assert targets.count("dcs.cumsum.default") == 1
    args = (make((4, 9), torch.float32, device), torch.rand(4, device=device))
    torch.testing.assert_close(program.module()(*args), Returns()(*args))


@pytest.mark.slow
def test_ahead_of_time_inductor(device: str, tmp_path: Any) -> None:
    path = torch._inductor.aoti_compile_and_package(exported(device, False), package_path=str(tmp_path / "returns.pt2"))
    args = (make((4, 9), torch.float32, device), torch.rand(4, device=device))
    torch.testing.assert_close(load_package(path, device)(*args), Returns()(*args))


def test_make_fx_sees_the_public_op(device: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = make((3, 5), torch.float32, device)
    for mode, gamma in itertools.product(("real", "fake", "symbolic"), (0.5, torch.tensor(0.5, device=device))):

        def constant(x: Tensor, gamma: Any = gamma) -> Tensor:
            return discounted_cumsum(x, gamma)

        def argument(x: Tensor, gamma: Tensor) -> Tensor:
            return discounted_cumsum(x, gamma)

        args = (x, gamma) if isinstance(gamma, Tensor) else (x,)
        graph = make_fx(argument if len(args) == 2 else functools.partial(constant), tracing_mode=mode)(*args)
        assert "dcs.discounted_cumsum" in graph.code
        torch.testing.assert_close(graph(*args), discounted_cumsum(x, gamma))
