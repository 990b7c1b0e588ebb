"""The pass that fuses linear + cross_entropy: what it finds, what it leaves alone, and that results stay the same.

The graphs are Dynamo's; what runs is the rewritten graph in eager mode, so that a case takes milliseconds. How the pass
gets into TorchInductor is in test_backend.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torch_dcs_ops.compile.passes import linear_cross_entropy as fusing
from torch_dcs_ops.compile.passes import match_steps

from compile.fused_graphs import LOSS, assert_same, rewritten
from compile.linear_cross_entropy_graphs import FUSED, REFUSED, B, D, Operands, T, V, rows
from support.selection import slow

pytestmark = pytest.mark.usefixtures("fresh_compiler", "nothing_said")


# A graph of symbolic sizes takes five times as long to make: most of the forms that change sizes, or read them.
OF_SIZES = (
    "nn.Linear", "unpacked shape", "shifted", "slices of sizes", "classes in the middle, permute",
    "gathered, by functions, shifted",
)  # fmt: skip
DYNAMIC = [(name, True) if name in OF_SIZES else slow(name, True) for name in FUSED]


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in FUSED), *DYNAMIC])
def test_fuses(device: str, name: str, dynamic: bool) -> None:
    o, function = Operands(device), FUSED[name]
    record = rewritten(function, dynamic=dynamic)
    # Another length is another static graph: nothing new to see.
    assert_same(function, o, record, lengths=(T, 4) if dynamic else (T,))
    assert record.fused >= 1
    for graph in record.graphs:
        targets = [node.target for node in graph.nodes]
        assert LOSS in targets
        assert F.cross_entropy not in targets
        assert F.nll_loss not in targets
        assert torch._C._nn.linear not in targets


def test_two_losses_of_tied_weights(device: str) -> None:
    o = Operands(device)

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(rows(F.linear(x, o.w)), y.flatten())
        second = F.cross_entropy(rows(F.linear(x.flip(1) + F.embedding(y.clamp(min=0), o.w), o.w)), y.flatten())
        return first + 0.3 * second

    record = rewritten(function)
    assert_same(function, o, record)
    assert record.fused % 2 == 0


def test_float_constants_of_a_module_under_dynamic(device: str) -> None:
    """With dynamic=True Dynamo makes variables of them."""
    o = Operands(device)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    o.cap = 3.0  # type: ignore[attr-defined]

    def function(o: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(rows(torch.tanh(o.head(x) / o.cap) * o.cap), y.flatten())

    record = rewritten(function, dynamic=True)
    assert_same(function, o, record)
    assert record.fused


@pytest.mark.parametrize("name", REFUSED)
def test_leaves_alone(device: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    function, reason = REFUSED[name]
    before: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before.append(str(module.graph))
        assert not any(found.fused for found in fusing.fuse_linear_cross_entropy(module.graph, 0))
        assert str(module.graph) == before[-1]
        return module

    with caplog.at_level(logging.INFO, "torch_dcs_ops"):
        torch.compile(function, backend=backend, fullgraph=True)(o, o.x, o.y)
    assert before
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert record.levelno == logging.WARNING


def changing(number: int) -> Callable[[Operands, Tensor, Tensor, float], Tensor]:
    def temperature(o: Operands, x: Tensor, y: Tensor, t: float) -> Tensor:
        return F.cross_entropy(rows(2.0 * o.head(x) / t), y.flatten())

    def cap(o: Operands, x: Tensor, y: Tensor, t: float) -> Tensor:
        return F.cross_entropy(rows((o.head(x) / t).tanh() * t), y.flatten())

    return (temperature, cap)[number]


@pytest.mark.parametrize("number", [0, 1], ids=["temperature", "cap"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_changes_is_no_constant(
    device: str, dynamic: bool | None, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its values would be compiled anew, up to the recompile limit."""
    o, function = Operands(device), changing(number)
    record = rewritten(function, dynamic=dynamic)
    for t in (1.5, 1.25, 1.125, 1.0625, 1.75, 1.875, 2.0, 2.25, 2.5, 2.75, 3.0, 1.5):
        torch.testing.assert_close(record.run(o, o.x, o.y, t), function(o, o.x, o.y, t))
    if number == 0:
        # A variable of the graph, from the start or after its first value.
        assert len(record.graphs) == (1 if dynamic else 2)
        assert record.fused == len(record.graphs)
    else:
        # With dynamic=True every number is a variable, and some are constants all the same.
        assert record.fused == (match_steps.SOFTCAPS_OF_A_LINE if dynamic else 1)
        assert len(record.graphs) == record.fused + 1
        assert "changes from call to call" in caplog.text


def test_a_reason_is_given_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    function, reason = REFUSED["returned"]
    for _ in range(2):
        torch._dynamo.reset()
        rewritten(function).run(o, o.x, o.y)
    assert caplog.text.count(reason) == 1
    assert "linear_cross_entropy_graphs.py" in caplog.text  # The line that the loss comes from.


def test_few_logits_are_left_to_the_compiler(device: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    record = rewritten(FUSED["nn.Linear"], minimum_logits=B * T * V + 1)
    with caplog.at_level(logging.INFO, "torch_dcs_ops"):
        record.run(o, o.x, o.y)
    assert record.fused == 0
    assert f"{B * T * V} logits" in caplog.text
    torch._dynamo.reset()
    record = rewritten(FUSED["nn.Linear"], minimum_logits=B * T * V)
    record.run(o, o.x, o.y)
    assert record.fused == 1


def test_sizes_that_may_change_count_as_large(device: str) -> None:
    o = Operands(device)
    record = rewritten(FUSED["nn.Linear"], dynamic=True, minimum_logits=1000)
    record.run(o, o.x, o.y)
    assert record.fused == 1


class Stateful(nn.Module):
    """Statements whose results nobody uses, around a loss that is fused."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, device=device)
        self.norm = nn.BatchNorm1d(D, device=device)
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("average", torch.zeros(D, device=device))
        self.register_buffer("cache", torch.zeros(B, T, D, device=device))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1)
        self.average.lerp_(x.detach().mean((0, 1)), 0.1)
        h = x * 2
        h.mul_(3)
        h.clamp_(-4, 4)
        self.norm(h.detach().flatten(0, 1))
        self.cache.copy_(h.detach())
        h = h + self.cache
        F.relu(h, inplace=True)
        torch.mul(self.steps, 2, out=self.steps)
        loss = F.cross_entropy(rows(self.head(h)), y.flatten())
        self.steps += 1
        return loss


def test_statements_around_the_loss_are_kept(device: str) -> None:
    torch.manual_seed(0)
    eager, traced = Stateful(device), Stateful(device)
    traced.load_state_dict(eager.state_dict())
    x, y = torch.randn(B, T, D, device=device), torch.randint(0, V, (B, T), device=device)
    record = rewritten(traced)
    for _ in range(2):
        torch.testing.assert_close(record.run(x, y), eager(x, y))
    assert record.fused == 1
    torch.testing.assert_close(traced.state_dict(), eager.state_dict())
    assert int(traced.steps) == 9


@torch.library.custom_op("dcs_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


@double_.register_fake
def _(x: Tensor) -> None: ...


# Statements after the logits were made of h.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda h: h.add_(1),
    "view": lambda h: h[0].zero_(),
    "operator": lambda h: h.__imod__(0.5),
    "inplace argument": lambda h: F.relu(h, inplace=True),
    "inplace module": nn.ReLU(inplace=True),
    "random": lambda h: F.dropout(h, 0.5, True, True),
    "out": lambda h: torch.mul(h, 2, out=h),
    "aten": lambda h: torch.ops.aten.copy_.default(h, h * 2),
    "custom op": double_,
    "running mean": lambda h: F.batch_norm(h.flatten(0, 1).exp(), h[0, 0], h[0, 1], training=True),
    "foreach": lambda h: torch._foreach_add_([h], 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_operands_that_change(device: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        h = x.detach() * 1.5
        logits = F.linear(h, o.w)
        CHANGES[name](h)
        return F.cross_entropy(rows(logits), y.flatten())

    o = Operands(device)
    record = rewritten(function)
    torch.manual_seed(1)
    got = record.run(o, o.x, o.y)
    torch.manual_seed(1)
    torch.testing.assert_close(got, function(o, o.x, o.y))
    assert record.fused == 0
    assert "may change what its logits were made of" in caplog.text


def test_logits_in_a_tensor_of_the_user(device: str) -> None:
    """What `out` has given a linear map is to be there afterwards."""
    buffer = torch.zeros(B * T, V, device=device, dtype=torch.float64)

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows(x), o.w, o.b, out=buffer), y.flatten())

    o = Operands(device)
    with torch.no_grad():
        record = rewritten(function)
        torch.testing.assert_close(record.run(o, o.x, o.y), function(o, o.x, o.y))
    assert record.fused == 0


def test_a_matrix_that_is_turned_after_its_transpose(device: str) -> None:
    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        matrix = o.w[:D] * 1
        transposed = matrix.T
        matrix.t_()
        return F.cross_entropy(rows(x @ transposed), y.flatten() % D)

    o = Operands(device)
    with torch.no_grad():
        record = rewritten(function)
        torch.testing.assert_close(record.run(o, o.x, o.y), function(o, o.x, o.y))


def test_other_uses_of_the_operands(device: str) -> None:
    """They only read, and what they change is something else."""

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        h = x * 2
        logits = F.linear(h, o.w)
        auxiliary = (h.square().mean() + o.w.norm()) * 0.1
        other = F.relu(h + 1, inplace=True).sum()
        return F.cross_entropy(rows(logits), y.flatten()) + auxiliary + other

    o = Operands(device)
    record = rewritten(function)
    assert_same(function, o, record)
    assert record.fused


@pytest.mark.parametrize("transform", ["grad", "grad_and_value", "jacrev", "vmap", "jvp", "hessian"])
def test_transforms(device: str, transform: str) -> None:
    o = Operands(device)
    x, w, y = o.x.detach()[0], o.w.detach(), o.y.clamp(min=0)[0]

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), y)

    def function(x: Tensor) -> Any:
        if transform == "jvp":
            return torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        if transform == "vmap":
            return torch.func.vmap(loss)(torch.stack([x, x * 2]))
        return getattr(torch.func, transform)(loss)(x)

    torch.testing.assert_close(rewritten(function).run(x), function(x))


def test_an_error_leaves_the_graph(device: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    o = Operands(device)
    monkeypatch.setattr(fusing._registry, "linear_cross_entropy", fails)
    record = rewritten(FUSED["shifted"])
    torch.testing.assert_close(record.run(o, o.x, o.y), FUSED["shifted"](o, o.x, o.y))
    assert record.fused == 0
    assert F.cross_entropy in [node.target for node in record.graphs[0].nodes]
    assert "ZeroDivisionError: planted" in caplog.text
