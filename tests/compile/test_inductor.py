"""The adapter for the compiler's private parts: what it asks of torch, and what happens where torch has it not."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import torch_dcs_ops
from torch_dcs_ops import discounted_cumsum
from torch_dcs_ops.compile import backend
from torch_dcs_ops.compile.inductor import configuration, dynamo, probes, support, versions

from compile.generated_code import DEVICE, Kernels, lowering_test
from scan.oracle import make
from support.compiler import no_cached_graphs
from support.subprocesses import rare

CACHES = (support.has, support._warn_of_version, support._warn_of_missing, backend._install_lowerings)


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is said yet, and what a test makes known about torch is forgotten after it."""
    monkeypatch.setattr(support, "_failures", {})
    monkeypatch.setattr(probes, "_found", {})
    for cache in CACHES:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in CACHES:
        cache.cache_clear()
    torch_dcs_ops.compile.disable()
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of this package so far."""
    caplog.set_level(logging.WARNING, "torch_dcs_ops")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("torch_dcs_ops")]


PARTS = [part for parts in probes.PARTS.values() for part in parts]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_torch_has(part: probes.Part) -> None:
    assert probes.lack_of(part) is None


def test_this_torch_is_a_tested_one() -> None:
    assert versions.is_tested(), f"tested with torch {versions.tested()}, this is {torch.__version__}"


def example(given: int, by_name: int = 0) -> int:
    return given + by_name


class Example:
    declared: int
    there = 1

    def __init__(self) -> None:
        self.made = 2


@pytest.mark.parametrize(
    ("part", "lack"),
    [
        (probes.Part("torch._no_such_module"), "torch._no_such_module"),
        (probes.Part("example", "gone"), "example.gone"),
        (probes.Part("example", "Example.gone"), "example.Example.gone"),
        (probes.Part("example", "gone", is_new=True), None),
        (probes.Part("example", "example", parameters=("given", "by_name")), None),
        (probes.Part("example", "example", parameters=("given",)), "example.example(given): it takes (given, by_name)"),
        (probes.Part("example", "example", parameters=(), is_new=True), "example.example(): it takes (given, by_name)"),
        (probes.Part("example", "example", takes=("by_name",)), None),
        (probes.Part("example", "example", takes=("by_name", "other")), "the parameter other of example.example"),
        (probes.Part("example", "number", takes=("x",)), "the parameters of example.number"),
        (probes.Part("example", "Example", attributes=("declared", "there", "made")), None),
        (probes.Part("example", "Example", attributes=("there", "lost")), "example.Example.lost"),
        (probes.Part("example", attributes=("example", "lost")), "example.lost"),
    ],
)  # fmt: skip
def test_what_is_lacking(part: probes.Part, lack: str | None) -> None:
    module: Any = types.ModuleType("example")
    module.example, module.Example, module.number = example, Example, 3
    with mock.patch.dict("sys.modules", {"example": module}):
        assert probes.lack_of(part) == lack


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 23, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(discounted_cumsum(hidden.tanh(), 0.9, dim=0)), target)


def assert_trains(**options: Any) -> bool:
    """Compiles, checks a loss and a gradient against the model's own; returns whether the loss was fused."""
    model, hidden, target = Model(), torch.randn(6, 8), torch.randint(23, (6,))
    loss = model(hidden, target)
    expected = torch.autograd.grad(loss, model.head.weight)
    torch._dynamo.reset()
    with no_cached_graphs(), profile(activities=[ProfilerActivity.CPU]) as events:
        result = torch.compile(model, fullgraph=True, **options)(hidden, target)
        gradients = torch.autograd.grad(result, model.head.weight)
    torch.testing.assert_close((result, gradients), (loss, expected))
    return any(event.key == "dcs::_linear_cross_entropy_forward" for event in events.key_averages())


DCS: dict[str, Any] = {"backend": "dcs", "options": {"dcs.minimum_logits": 0}}


def test_a_version_beyond_the_tested_ones(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """It compiles as without this package, with one warning in all."""
    monkeypatch.setattr(versions, "TESTED_VERSIONS", ((2, 0), (2, 1)))
    with mock.patch("torch_dcs_ops.compile.scan_lowering.install") as install:
        assert not assert_trains(**DCS)
        assert not assert_trains(**DCS)
        torch_dcs_ops.compile.enable(minimum_logits=0)
        assert torch_dcs_ops.compile.is_enabled()
        assert not assert_trains()
    install.assert_not_called()
    (warning,) = said()
    assert "tested with torch 2.0, 2.1; under torch" in warning
    assert "tested with torch 2.0, 2.1" in torch_dcs_ops.info()["compile"]["losses"]


def test_a_torch_without_what_scans_need(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """The lowerings go with one warning, the passes stay."""
    from torch._inductor import ir

    with monkeypatch.context() as without:
        without.delattr(ir, "Scan")
        without.delattr(ir, "Sort")
        assert not support.has("scans")
    with mock.patch("torch_dcs_ops.compile.scan_lowering.install") as install:
        assert assert_trains(**DCS)
        assert assert_trains(**DCS)
    install.assert_not_called()
    (warning,) = said()
    assert warning.startswith("scans do not fuse with other operations: torch ")
    assert "lacks torch._inductor.ir.Scan, and " in warning
    assert "lacks torch._inductor.ir.Scan" in torch_dcs_ops.info()["compile"]["scans"]


def test_a_torch_without_what_passes_need(said: Callable[[], list[str]]) -> None:
    with mock.patch.dict(probes.PARTS, {"passes": (probes.Part("torch._subclasses", "GoneTensor"),)}):
        assert not assert_trains(**DCS)
        assert not assert_trains(**DCS)
    (warning,) = said()
    assert "linear + cross-entropy is not fused" in warning
    assert "lacks torch._subclasses.GoneTensor" in warning


def test_graphs_that_do_not_say_what_nodes_stand_for(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(dynamo, "lacks_values", lambda graph: True)
    assert not assert_trains(**DCS)
    assert not assert_trains(**DCS)
    (warning,) = said()
    assert "do not say what they stand for" in warning
    assert "not in 2 graphs" in torch_dcs_ops.info()["compile"]["losses"]


def test_a_torch_that_takes_no_passes(said: Callable[[], list[str]]) -> None:
    """The backend is then the ordinary one, by public names."""
    with (
        mock.patch.dict(probes.PARTS, {"backend": (probes.Part("torch._inductor.custom_graph_pass", "Gone"),)}),
        mock.patch.object(configuration, "backend") as private,
    ):
        assert not assert_trains(backend="dcs", options={"dcs.minimum_logits": 0, "max_autotune": False})
        assert not assert_trains(backend="dcs")
        torch_dcs_ops.compile.enable()
        assert not torch_dcs_ops.compile.is_enabled()
    private.assert_not_called()
    (warning,) = said()
    assert "do what the ordinary backend does: torch " in warning
    assert "lacks torch._inductor.custom_graph_pass.Gone" in warning


def negated_scan(x: Tensor) -> Tensor:
    return -discounted_cumsum(-x, 0.9, dim=0)


def scans(kernels: Kernels) -> list[str]:
    return [op for op in kernels.extern_ops() if "discounted_cumsum" in op]


def assert_is_called(kernels: Kernels, said: Callable[[], list[str]], reason: str) -> None:
    """That scans in two graphs are calls with the right results, one warning, and a word in `info`."""
    for length in (64, 128):
        torch._dynamo.reset()
        kernels.clear()
        x = make((length, 5), torch.float32, DEVICE)
        torch.testing.assert_close(torch.compile(negated_scan, fullgraph=True)(x), negated_scan(x))
        assert len(scans(kernels)) == 1
    (warning,) = said()
    assert warning.startswith("scans do not fuse with other operations in a graph under torch ")
    assert reason in warning
    assert "not in 2 graphs: " in torch_dcs_ops.info()["compile"]["scans"]


@lowering_test
def test_unknown_source(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    from torch_dcs_ops.compile.inductor import generated_source

    monkeypatch.setattr(generated_source, "_SCAN_CALL", re.compile("no such (a)(b)(c)(d)"))
    assert_is_called(kernels, said, "UnknownSourceError: a scan was generated in a form that is not known")


@lowering_test
def test_an_unknown_decorator(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    from torch_dcs_ops.compile.inductor import generated_source

    monkeypatch.setattr(generated_source, "_KNOWN_DECORATOR", re.compile("no such"))
    assert_is_called(kernels, said, "UnknownSourceError: a kernel with a scan was generated with a decorator")


@lowering_test
@pytest.mark.parametrize("looped", [rare(False), True])
def test_an_unknown_order_of_steps(
    kernels: Kernels, looped: bool, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Inductor writes the index of time in another place than the method that is wrapped."""
    from torch_dcs_ops.compile.inductor import codegen

    monkeypatch.setattr(codegen, "_add_to_header", lambda kernel, entry, code: None)
    with config.patch("triton.persistent_reductions", not looped):
        assert_is_called(kernels, said, "UnknownSourceError: the steps of a scan are in an order that is not known")


@lowering_test
def test_an_unknown_carry(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that carries a scan from tile to tile by an expression that is not known."""
    from torch_dcs_ops.compile.inductor import generated_source

    monkeypatch.setattr(generated_source, "_LAST_STEP", "rbase == another")
    x = make((5, 64), torch.float32, DEVICE)
    with config.patch("triton.persistent_reductions", False):
        result = torch.compile(lambda x: -discounted_cumsum(-x, 0.9), fullgraph=True)(x)
    torch.testing.assert_close(result, discounted_cumsum(x, 0.9))
    assert len(scans(kernels)) == 1


@lowering_test
def test_an_error_in_a_lowering(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    from torch_dcs_ops.compile.inductor import lowering

    monkeypatch.setattr(lowering.ir, "get_stride_order", mock.Mock(side_effect=TypeError("one argument more")))
    assert_is_called(kernels, said, "one argument more")


@lowering_test
def test_a_gradient_of_scans_that_are_called(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are compiled once more each, from the graphs that they were before."""
    from torch_dcs_ops.compile.inductor import generated_source

    monkeypatch.setattr(generated_source, "_KNOWN_DECORATOR", re.compile("no such"))
    x = make((64, 5), torch.float32, DEVICE).requires_grad_()
    compiled = torch.compile(lambda x: negated_scan(x).square().sum(), fullgraph=True)
    (result,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(negated_scan(x).square().sum(), x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert "not in 2 graphs" in torch_dcs_ops.info()["compile"]["scans"]


@lowering_test
def test_errors_of_another_reason_are_not_hidden_by_scans(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    from torch._inductor.graph import GraphLowering

    monkeypatch.setattr(GraphLowering, "codegen", mock.Mock(side_effect=RuntimeError("the disk is full")))
    with pytest.raises(Exception, match="the disk is full"):
        torch.compile(negated_scan, fullgraph=True)(make((64, 5), torch.float32, DEVICE))
    assert said() == []


@lowering_test
def test_graphs_without_scans_know_nothing_of_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_dcs_ops.compile.inductor import codegen

    for name in ("_add_to_header", "_rewritten", "_is_time_major", "_runs_alike", "_is_scanned", "_scans"):
        monkeypatch.setattr(codegen, name, mock.Mock(side_effect=AssertionError(name)))
    x = make((64, 5), torch.float32, DEVICE)
    result = torch.compile(lambda x: (x * 2).cumsum(0) + x.sum(0), fullgraph=True)(x)
    torch.testing.assert_close(result, (x * 2).cumsum(0) + x.sum(0), rtol=1e-4, atol=1e-4)
    assert len(kernels.names()) >= 1


def test_every_part_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "inductor.md"
    if not page.exists():
        pytest.skip("not a source checkout")
    text = page.read_text()
    missing = [str(part) for part in PARTS if (part.name or part.module).split(".")[-1] not in text]
    assert missing == []
