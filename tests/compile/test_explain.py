"""compile.explain(): each loss and graph break of a function is named, with its reason, line and cure."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dcs_ops
from torch_dcs_ops.compile import explain
from torch_dcs_ops.compile.inductor import configuration, probes, versions
from torch_dcs_ops.compile.passes.findings import Reason

from compile.linear_cross_entropy_graphs import B, Operands, T, V, rows
from support.subprocesses import COMPILES_ITSELF, environment

pytestmark = pytest.mark.usefixtures("fresh_compiler", "nothing_said")


@pytest.fixture(autouse=True)
def _disabled_again() -> Iterator[None]:
    yield
    torch_dcs_ops.compile.disable()


class Model(nn.Module):
    """`breaks`: as in GPT-2 of transformers, a statement between the logits and their loss ends the graph."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.breaks = breaks

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(rows(logits), tokens.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.head(self.embedding(tokens)), tokens)


def tokens() -> Tensor:
    return torch.randint(V, (B, T))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("way", ["function", "module", "compiled", "compiled in place"])
def test_fused(way: str, dynamic: bool | None) -> None:
    model: Any = Model()
    if way == "compiled in place":
        model.compile(backend="dcs")
    given = {"function": lambda x: model(x), "compiled": torch.compile(model, backend="dcs")}.get(way, model)
    found = explain(given, minimum_logits=0, dynamic=dynamic)(tokens())
    (loss,) = found.losses
    assert (loss.fused, loss.reason, loss.cure) == (True, None, None)
    assert (found.fused, found.left_alone, found.breaks, found.graphs) == ((loss,), (), (), 1)
    assert loss.loss == "cross_entropy"
    assert "test_explain.py" in loss.place
    assert "1 loss, 1 fused" in str(found)


def test_a_graph_break_in_the_loss() -> None:
    found = explain(Model(breaks=True), minimum_logits=0)(tokens())
    (loss,) = found.left_alone
    assert loss.reason is Reason.GRAPH_BREAK
    (broken,) = found.breaks
    line = Model.loss.__code__.co_firstlineno + 2
    assert f'test_explain.py", line {line}, in loss' in broken.place
    assert broken.place in loss.clause
    text = str(found)
    assert loss.place.endswith("in loss")
    for part in (loss.name, loss.cure, broken.place, broken.reason, "1 graph break"):
        assert part is not None
        assert part in text


def test_gpt2_of_transformers_logs_a_warning_within_its_loss() -> None:
    transformers = pytest.importorskip("transformers", reason="the graph break is in its model")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=99, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    )
    inputs = torch.randint(99, (2, 8))

    def loss(x: Tensor) -> Any:
        return model(input_ids=x, labels=x, use_cache=False).loss

    found = explain(loss, minimum_logits=0)(inputs)
    if found.fused:
        pytest.skip("this release of transformers logs nothing within the loss")
    assert [loss.reason for loss in found.losses] == [Reason.GRAPH_BREAK]
    assert any("in loss_function" in broken.place for broken in found.breaks)
    assert "fused_loss" in str(found)
    model.loss_type = "ForCausalLM"
    found = explain(loss, minimum_logits=0)(inputs)
    assert (len(found.fused), found.left_alone, found.breaks) == (1, (), ())


def test_a_graph_break_after_the_loss_is_not_its_reason() -> None:
    def function(logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y)
        torch._dynamo.graph_break()
        return loss * 2

    found = explain(function, minimum_logits=0)(torch.randn(3, V), torch.randint(V, (3,)))
    (loss,) = found.left_alone
    assert loss.reason is Reason.OTHER_GRAPH
    assert len(found.breaks) == 1
    assert found.graphs == 2


def test_few_logits() -> None:
    (loss,) = explain(Model())(tokens()).left_alone
    assert loss.reason is Reason.FEW_LOGITS
    assert f"{B * T * V} logits" in loss.clause
    assert loss.cure is not None
    assert "minimum_logits" in loss.cure
    torch_dcs_ops.compile.enable(minimum_logits=B * T * V)
    assert explain(Model())(tokens()).fused
    assert torch_dcs_ops.compile.is_enabled()
    assert explain(Model(), minimum_logits=B * T * V + 1)(tokens()).left_alone


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        (Reason.RETURNED, lambda z, y: (F.cross_entropy(z, y), z)),
        (Reason.USED, lambda z, y: F.cross_entropy(z, y) + z.logsumexp(-1).mean()),
        (Reason.FORM, lambda z, y: F.cross_entropy(z.exp(), y)),
        (Reason.MODE, lambda z, y: torch.no_grad()(lambda: F.cross_entropy(z, y))()),
    ],
)
def test_reasons(reason: Reason, function: Any) -> None:
    o = Operands("cpu")
    found = explain(lambda x, y: function(rows(o.head(x)), y.flatten()), minimum_logits=0)(o.x, o.y)
    (loss,) = found.losses
    assert loss.reason is reason
    assert str(loss).endswith(f"(cure: {reason.cure})")


def test_operands_that_change() -> None:
    o = Operands("cpu")

    def function(x: Tensor, y: Tensor) -> Tensor:
        h = x.detach() * 2
        logits = o.head(h)
        h.add_(1)
        return F.cross_entropy(rows(logits), y.flatten())

    (loss,) = explain(function, minimum_logits=0)(o.x, o.y).losses
    assert loss.reason is Reason.CHANGED


def test_two_losses_and_own_operators() -> None:
    o = Operands("cpu")

    def function(x: Tensor, y: Tensor) -> Any:
        z = o.no_bias(x)
        scans = torch_dcs_ops.discounted_cumsum(x, 0.5, dim=1).sum() + torch_dcs_ops.discounted_cumsum(x, 0.9).sum()
        return F.cross_entropy(rows(o.head(x)), y.flatten()) + F.cross_entropy(rows(z), y.flatten()), z, scans

    found = explain(function, minimum_logits=0)(o.x, o.y)
    assert [loss.reason for loss in found.losses] == [None, Reason.RETURNED]
    assert found.calls == {"dcs.discounted_cumsum": 2}
    assert "dcs.discounted_cumsum, 2 times" in str(found)


def test_a_break_in_a_loop_leaves_the_function_as_it_stands() -> None:
    def function(x: Tensor) -> Any:
        total = 0.0
        for _ in range(2):
            total = total + x.sum()
            torch._dynamo.graph_break()
        return total

    found = explain(function)(torch.ones(3))
    if found.graphs:
        pytest.skip("this torch traces what is around a break in a loop")
    assert found.hindrance is not None
    assert "torch._dynamo.graph_break()" in found.hindrance
    assert found.hindrance in str(found)


def test_nothing_to_find() -> None:
    found = explain(lambda x: x * 2)(torch.ones(3))
    assert (found.losses, found.calls, found.graphs) == ((), {}, 1)
    assert "no F.cross_entropy" in str(found)


def test_the_function_runs_once_and_its_errors_come_through() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        explain(function)(torch.ones(3))
    assert len(calls) == 1


def test_minimum_logits_is_checked() -> None:
    with pytest.raises(ValueError, match="minimum_logits must be an integer >= 0, got -1"):
        explain(Model(), minimum_logits=-1)
    with pytest.raises(TypeError, match="explain: function must be a function or a module, got int"):
        explain(3)  # type: ignore[arg-type]


def test_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dcs_ops.compile.explanation.support.supports", lambda part: False)
    monkeypatch.setattr(versions, "TESTED_VERSIONS", ())
    found = explain(Model(), minimum_logits=0)(tokens())
    assert found.losses == ()
    assert found.hindrance is not None
    assert f"nothing is fused: {found.hindrance}" in str(found)


def test_a_torch_that_notes_no_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_found", {"breaks": ("its notes",)})
    found = explain(Model(breaks=True), minimum_logits=0)(tokens())
    (loss,) = found.left_alone
    assert loss.reason is Reason.OTHER_GRAPH
    assert found.breaks == ()


def test_code_that_meets_no_pass(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As code from the compiler's cache: what it holds is logged where that is asked for."""
    monkeypatch.setattr(configuration, "backend", lambda mode, options, hook: lambda graph_module, inputs: graph_module)
    for level, count in ((logging.WARNING, 0), (logging.INFO, 1)):
        torch._dynamo.reset()
        with caplog.at_level(level, "torch_dcs_ops"):
            torch.compile(Model(), backend="dcs", options={"dcs.minimum_logits": 0})(tokens())
        assert caplog.text.count("the compiler's cache has code with 1 linear + cross_entropy") == count


# A second process finds the code of the first one in the compiler's cache, where no pass is run.
CACHED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
from torch._dynamo.utils import counters
from compile.test_explain import Model, tokens
torch.manual_seed(0)
model, x = Model(), tokens()
if sys.argv[2] == "enabled":
    import torch_dcs_ops
    torch_dcs_ops.compile.enable(minimum_logits=0)
    way = {}
else:
    way = {"backend": "dcs", "options": {"dcs.minimum_logits": 0}}
torch.compile(model, **way)(x).backward()
logits = lambda x: (lambda z: (model.loss(z, x), z))(model.head(model.embedding(x)))
torch.compile(logits, **way)(x)[0].backward()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dcs", "enabled"])
def test_a_warm_cache_says_what_it_holds(way: str) -> None:
    variables = environment(
        TORCH_COMPILE_CACHE_KEY_TAG=uuid.uuid4().hex,
        TORCHINDUCTOR_FX_GRAPH_CACHE="1",
        TORCH_LOGS="torch_dcs_ops",
        **COMPILES_ITSELF,
    )
    command = [sys.executable, "-c", CACHED, json.dumps([str(Path(__file__).parents[1])]), way]
    runs = [subprocess.run(command, env=variables, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-3000:] + runs[1].stderr[-3000:]
    assert [int(run.stdout.split()[-1]) for run in runs] == [0, 2]
    for run, verb in zip(runs, ("fused", "the compiler's cache has code with"), strict=True):
        assert run.stderr.count(f"{verb} 1 linear + cross_entropy") == 1
        assert run.stderr.count("1 linear + cross_entropy") == 1
        assert run.stderr.count("the compiled function also returns") == 1
