"""Returns under torch.compile(fullgraph=True) and torch.export, as calls of the library.

Generated kernels have tests of their own, compile/test_returns_lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_dcs_ops import discounted_cumsum, returns
from torch_dcs_ops.compile import graph_pass
from torch_dcs_ops.compile.passes import constant_discounts
from torch_dcs_ops.compile.passes.standalone_returns import mark_returns_alone
from torch_dcs_ops.ops.returns.temporal_difference import STAYS_A_CALL

from returns.oracle import arguments, make_batch
from returns.test_transforms import FUNCTIONS, of_leaves, operands
from support.selection import slow

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_is_eager(device: str, name: str) -> None:
    function, leaves = of_leaves(name, operands(device))
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if name == "gae" else "aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), function(*leaves))


@pytest.mark.parametrize("name", ["gae", "vtrace", "n_step"])
def test_training(device: str, name: str) -> None:
    function, leaves = of_leaves(name, operands(device))

    def loss(*args: Tensor) -> Tensor:
        results = function(*args)
        return sum(r.sin().sum() for r in (results if isinstance(results, tuple) else (results,)))  # type: ignore[return-value]

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if name == "gae" else "aot_eager")
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    gradients = torch.autograd.grad(compiled(*tracked), tracked)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*tracked), tracked))


@pytest.mark.parametrize("time_dim", [0, 1])
def test_dynamic_sizes_compile_once(device: str, time_dim: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(rewards: Tensor, values: Tensor, rhos: Tensor, keywords: dict[str, Any]) -> Any:
        targets, pg = returns.vtrace(rewards, values, rhos, gamma=0.9, time_dim=time_dim, **keywords)
        return targets, pg, returns.n_step_returns(rewards, values, n=3, gamma=0.9, time_dim=time_dim, **keywords)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((5, 3), (8, 4), (40, 7), (300, 9)):
        batch = make_batch(shape)
        keywords = arguments(batch, "bootstrap", device, time_dim=time_dim)
        keywords = {k: v for k, v in keywords.items() if k in ("terminated", "truncated", "bootstrap_value")}
        x = [t.movedim(0, time_dim).to(device) for t in (batch.rewards, batch.values, batch.rhos)]
        torch.testing.assert_close(compiled(*x, keywords), function(*x, keywords))
    assert counter.frame_count <= 2


NUMBERS: dict[str, Callable[[Tensor, float, float], Any]] = {
    "gae": lambda x, g, c: returns.gae(x, x * 2, bootstrap_value=x[0], terminated=x > 1, gamma=g, gae_lambda=c),
    "discounted": lambda x, g, c: returns.discounted_returns(x, g, terminated=x > c),
    "td_lambda": lambda x, g, c: returns.td_lambda_returns(x, next_values=x, terminated=x > 1, gamma=g, lambda_=c),
    "n_step": lambda x, g, c: returns.n_step_returns(x, n=4, next_values=x, terminated=x > 1, gamma=g, lambda_=c),
    "retrace": lambda x, g, c: returns.retrace_returns(
        x, x, x.exp(), next_values=x, terminated=x > 1, gamma=g, lambda_=c
    ),
}


@pytest.mark.parametrize("name", ["gae", "n_step", "retrace", slow("discounted"), slow("td_lambda")])
def test_other_discounts_do_not_compile_again(device: str, name: str) -> None:
    """20 pairs of numbers, at most 3 graphs; a float argument of the op would end at the recompile limit."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(NUMBERS[name], fullgraph=True, backend=counter)
    x = torch.randn(20, 3, dtype=torch.float64, device=device)
    for gamma in torch.linspace(0.05, 1.0, 20).tolist():
        torch.testing.assert_close(compiled(x, gamma, 1.05 - gamma), NUMBERS[name](x, gamma, 1.05 - gamma))
    assert counter.frame_count <= 3


def test_a_compiled_discount_keeps_float64_precision(device: str) -> None:
    x = torch.ones(10_000, 1, dtype=torch.float64, device=device)
    compiled = torch.compile(lambda x, g: returns.discounted_returns(x, g), fullgraph=True)
    for gamma in (0.999, 0.9991):
        torch.testing.assert_close(compiled(x, gamma), returns.discounted_returns(x, gamma), rtol=1e-12, atol=0)


def test_a_discount_out_of_range_is_refused_in_a_graph_too(device: str) -> None:
    compiled = torch.compile(lambda x, g: returns.discounted_returns(x, g), backend="eager")
    x = torch.ones(3, device=device)
    with pytest.raises(Exception, match=r"gamma must be in \[0, 1\]"):
        compiled(x, 1.5)
    torch.testing.assert_close(compiled(x, 0.5), returns.discounted_returns(x, 0.5))
    unchecked = torch.compile(lambda x, g: returns.discounted_returns(x, g, check_discounts=False), fullgraph=True)
    torch.testing.assert_close(unchecked(x, 1.5), torch.tensor([4.75, 2.5, 1.0], device=device))


def test_export(device: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, rewards: Tensor, values: Tensor, done: Tensor) -> Any:
            return returns.gae(rewards, values, bootstrap_value=values[-1], terminated=done, gamma=0.97)

    length = torch.export.Dim("length", min=2)
    x = tuple(t.to(device) for t in (torch.randn(6, 3), torch.randn(6, 3), torch.rand(6, 3) < 0.2))
    program = torch.export.export(Model(), x, dynamic_shapes=({0: length}, {0: length}, {0: length}))
    assert any("_temporal_difference_scan" in str(node.target) for node in program.graph.nodes)
    longer = tuple(t.to(device) for t in (torch.randn(11, 3), torch.randn(11, 3), torch.rand(11, 3) < 0.2))
    torch.testing.assert_close(program.module()(*longer), Model()(*longer))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_capture_and_replay() -> None:
    batch = make_batch((300, 40))
    keywords = {k: v for k, v in arguments(batch, "bootstrap", "cuda", rates="number").items() if k != "lambda_"}
    x, v = batch.rewards.float().cuda(), batch.values.float().cuda()
    keywords["bootstrap_value"] = keywords["bootstrap_value"].float()
    returns.gae(x, v, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = returns.gae(x, v, **keywords)
    x.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, returns.gae(x, v, **keywords)))


def _marked(function: Callable[..., Any], *args: Tensor) -> tuple[int, torch.fx.Graph]:
    """The calls that stay the library's, of the graph that a backend is given, and the graph."""
    graphs: list[torch.fx.Graph] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*args)
    constant_discounts.give_numbers(graphs[0])
    return mark_returns_alone(graphs[0]), graphs[0]


def _gae(r: Tensor, v: Tensor, b: Tensor, done: Tensor, gamma: float | Tensor = 0.9) -> tuple[Tensor, Tensor]:
    return returns.gae(r, v, bootstrap_value=b, terminated=done, gamma=gamma, gae_lambda=0.8)


def test_returns_with_nothing_around_them_stay_a_call() -> None:
    r, v, b, done = torch.randn(8, 3), torch.randn(8, 3), torch.randn(3), torch.rand(8, 3) < 0.1
    count, graph = _marked(_gae, r, v, b, done)
    assert count == 1
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.dcs._temporal_difference_scan.default)
    assert call.args[6:10] == (None, 0.9, None, 0.8)  # numbers again: a kernel of its own
    views = _marked(lambda r, v, b, done: _gae(r.view(8, 3), v, b, done)[0].unsqueeze(0), r, v, b, done)
    assert views[0] == 1
    around: dict[str, Callable[..., Any]] = {
        "producer": lambda r, v, b, done: _gae(r * 2, v, b, done),
        "consumer": lambda r, v, b, done: _gae(r, v, b, done)[0].relu(),
        "producer behind a view": lambda r, v, b, done: _gae((r + 1).view(8, 3), v, b, done),
        "per-row gamma": lambda r, v, b, done: _gae(r, v, b, done, b),
    }
    for name, function in around.items():
        assert _marked(function, r, v, b, done)[0] == 0, name


def _written(x: Tensor, other: Tensor) -> Tensor:
    gamma = torch.ones((), dtype=torch.float64) * 0.5
    gamma.mul_(1.8)
    return discounted_cumsum(x, gamma)


def _written_before(x: Tensor, other: Tensor) -> Tensor:
    ones = torch.ones((), dtype=torch.float64)
    gamma = ones * 0.5
    ones.add_(gamma)
    return discounted_cumsum(x, gamma) * ones


def _copied(x: Tensor, other: Tensor) -> Tensor:
    gamma = torch.ones((), dtype=torch.float64) * 0.5
    view = gamma.to(torch.float64)
    view.copy_(other)
    return discounted_cumsum(x, gamma)


def _rounded(x: Tensor, other: Tensor) -> Tensor:
    return discounted_cumsum(x, torch.ones((), dtype=torch.bfloat16) * 0.99)


@pytest.mark.parametrize("function", [_written, _written_before, _copied, _rounded])
def test_tensors_that_look_like_numbers(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A user's own tensor may be made as the one of a number is, and then be written to, or be of few digits."""
    x, other = torch.randn(2, 40, requires_grad=True), torch.tensor(0.25, dtype=torch.float64)
    expected, got = function(x, other), torch.compile(function, fullgraph=True, backend="dcs")(x, other)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("failing", [1, 2])
def test_an_error_leaves_the_graph(
    failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in a pass would end the compilation; at the second call, leave the first one changed."""
    asked: list[Any] = []
    number_of = constant_discounts.number_of

    def fails(rate: Any) -> float | None:
        """At the first discount of a call; every one has two."""
        asked.append(rate)
        if len(asked) == 2 * failing - 1:
            raise ZeroDivisionError("planted")
        return number_of(rate)

    graphs: list[torch.fx.Graph] = []

    def looks(graph: torch.fx.Graph) -> None:
        graphs.append(graph)

    def twice(r: Tensor, v: Tensor, b: Tensor, done: Tensor) -> Any:
        return _gae(r, v, b, done), _gae(v, r, b, done)

    monkeypatch.setattr(constant_discounts, "number_of", fails)
    monkeypatch.setattr(graph_pass, "_failed", set())
    r, v, b, done = torch.randn(8, 3), torch.randn(8, 3), torch.randn(3), torch.rand(8, 3) < 0.1
    for _ in range(2):
        asked.clear()
        torch._dynamo.reset()
        compiled = torch.compile(twice, fullgraph=True, backend="dcs", options={"pre_grad_custom_pass": looks})
        torch.testing.assert_close(compiled(r, v, b, done), twice(r, v, b, done))
        calls = graphs[-1].find_nodes(op="call_function", target=torch.ops.dcs._temporal_difference_scan.default)
        assert len(calls) == 2
        assert not any(STAYS_A_CALL in call.meta or call.args[6] is None for call in calls)
    (record,) = (record for record in caplog.records if record.name == "torch_dcs_ops.compile")
    assert record.getMessage() == "the discounts pass failed; the graph is compiled as it stands"
    assert "ZeroDivisionError: planted" in caplog.text
