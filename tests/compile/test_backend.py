"""backend="dcs" and compile.enable(): the pass inside TorchInductor, its options, and the compiler's caches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import torch_dcs_ops
from torch_dcs_ops.compile import graph_pass
from torch_dcs_ops.compile.graph_pass import Hook
from torch_dcs_ops.compile.inductor import configuration
from torch_dcs_ops.ops.linear_cross_entropy import compiled as saved_gradient

from support.compiler import no_cached_graphs
from support.selection import slow
from support.subprocesses import COMPILES_ITSELF, environment

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ALWAYS = {"dcs.minimum_logits": 0}


@pytest.fixture(autouse=True)
def _disabled_again() -> Iterator[None]:
    yield
    torch_dcs_ops.compile.disable()


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(23, 8), nn.Linear(8, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.is_checkpointed = is_checkpointed

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(hidden.tanh())[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 23), tokens[:, 1:].reshape(-1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.is_checkpointed:
            return checkpoint(self.loss, hidden, tokens, use_reentrant=False)  # type: ignore[no-any-return]
        return self.loss(hidden, tokens)


def is_fused(function: Callable[..., Tensor], *args: Any) -> bool:
    """Whether a call runs the fused op: seen when it runs, as no pass runs where code comes from a cache."""
    with profile(activities=[ProfilerActivity.CPU]) as events:
        function(*args).backward()
    return any(event.key == "dcs::_linear_cross_entropy_forward" for event in events.key_averages())


def assert_trains_alike(compiled: Callable[..., Tensor], model: nn.Module, tokens: Tensor) -> None:
    losses, gradients = [], []
    for run in (model, compiled):
        model.zero_grad()
        loss = run(tokens)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("dynamic", [slow(False), True])
def test_backend(device: str, is_checkpointed: bool, dynamic: bool) -> None:
    model = Model(is_checkpointed).to(device)
    compiled = torch.compile(model, backend="dcs", fullgraph=True, dynamic=dynamic, options=ALWAYS)
    for shape in ((3, 7), (2, 5)):
        tokens = torch.randint(23, shape, device=device)
        assert_trains_alike(compiled, model, tokens)
    assert is_fused(compiled, tokens)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))


def test_backend_is_found_by_name() -> None:
    assert "dcs" in torch.compiler.list_backends()


@config.patch(max_autotune_gemm_backends="ATEN")  # no kernels to choose from, which takes long
def test_mode_and_options_are_those_of_inductor(device: str) -> None:
    seen: list[tuple[bool, bool]] = []

    def looks(graph: fx.Graph) -> None:
        seen.append((config.max_autotune, config.epilogue_fusion))

    tokens = torch.randint(23, (2, 5), device=device)
    model = Model().to(device)
    options = {**ALWAYS, "max_autotune": True, "epilogue-fusion": False, "pre_grad_custom_pass": looks}
    assert is_fused(torch.compile(model, backend="dcs", options=options), tokens)
    assert seen[0] == (True, False)
    torch._dynamo.reset()
    seen.clear()
    with config.patch(pre_grad_custom_pass=looks):
        assert not is_fused(torch.compile(model, backend="dcs", mode="max-autotune-no-cudagraphs"), tokens)
        assert config.pre_grad_custom_pass is looks
    assert seen == [(True, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dcs.minimum_logits": -1}, "minimum_logits must be an integer >= 0, got -1"),
        ({"dcs.minimum_logits": "many"}, "minimum_logits must be an integer >= 0, got 'many'"),
        ({"dcs.memory_budget": 0}, "memory_budget must be None or an integer >= 1, got 0"),
        ({"dcs.memory_budget": 1e9}, r"memory_budget must be None or an integer >= 1, got 1000000000\.0"),
        ({"dcs.unknown": 1}, "Unexpected optimization option dcs.unknown"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(Model(), backend="dcs", options=options)(torch.randint(23, (2, 5)))


def test_enable_and_disable(device: str) -> None:
    model = Model().to(device)
    tokens = torch.randint(23, (2, 5), device=device)
    compiled = torch.compile(model, fullgraph=True)
    assert not torch_dcs_ops.compile.is_enabled()
    assert not is_fused(compiled, tokens)
    torch_dcs_ops.compile.enable(minimum_logits=0)
    torch_dcs_ops.compile.enable(minimum_logits=0)
    assert torch_dcs_ops.compile.is_enabled()
    assert is_fused(compiled, tokens)
    assert_trains_alike(compiled, model, tokens)
    torch_dcs_ops.compile.enable()
    assert not is_fused(compiled, tokens)  # too few logits
    torch_dcs_ops.compile.enable(minimum_logits=1)
    assert is_fused(compiled, tokens)
    torch_dcs_ops.compile.disable()
    torch_dcs_ops.compile.disable()
    assert not torch_dcs_ops.compile.is_enabled()
    assert not is_fused(compiled, tokens)
    assert config.pre_grad_custom_pass is None


def test_enable_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="minimum_logits must be an integer >= 0, got True"):
        torch_dcs_ops.compile.enable(minimum_logits=True)
    with pytest.raises(ValueError, match="memory_budget must be None or an integer >= 1, got True"):
        torch_dcs_ops.compile.enable(memory_budget=True)
    assert not torch_dcs_ops.compile.is_enabled()


ROWS, CLASSES = 512, 1000


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), target)


def saved_bytes(compiled: Callable[..., Tensor]) -> int:
    """What a training step holds for its backward."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(ROWS, 16, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(hidden, torch.randint(CLASSES, (ROWS,)))
    loss.backward()
    assert hidden.grad is not None
    return sum(saved.values())


def test_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training holds no logits by default; where the budget has room for all, their gradient."""
    # As on a GPU with sizes that fill it.
    monkeypatch.setattr(saved_gradient, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(saved_gradient, "prefers_saved_gradient", lambda *_: True)
    logits = ROWS * CLASSES * 2
    # The head and its gradient; hidden states, their gradient, targets and values of rows.
    rest = 2 * CLASSES * 16 * 2 + ROWS * (2 * 16 * 2 + 3 * 8)
    assert rest < logits / 4
    for budget, held in ((None, 0), (1 << 16, 0), (logits, logits)):
        torch._dynamo.reset()
        options = {**ALWAYS, "dcs.memory_budget": budget}
        assert held <= saved_bytes(torch.compile(Head(), backend="dcs", options=options)) <= held + rest
    torch._dynamo.reset()
    compiled = torch.compile(Head())
    torch_dcs_ops.compile.enable(minimum_logits=0, memory_budget=logits)
    assert saved_bytes(compiled) >= logits
    torch_dcs_ops.compile.enable(minimum_logits=0)
    assert saved_bytes(compiled) <= rest


class Earlier(CustomGraphPass):
    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return self.name


def test_the_passes_of_others_still_run() -> None:
    earlier = Earlier("a")
    with config.patch(pre_grad_custom_pass=earlier), no_cached_graphs():
        torch_dcs_ops.compile.enable(minimum_logits=0)
        assert is_fused(torch.compile(Model(), fullgraph=True), torch.randint(23, (2, 5)))
        assert earlier.calls == 1
        torch_dcs_ops.compile.disable()
        assert config.pre_grad_custom_pass is earlier


def test_disable_finds_the_hook_among_the_passes_of_others() -> None:
    earlier, later = Earlier("a"), Earlier("b")
    with config.patch(pre_grad_custom_pass=earlier):
        torch_dcs_ops.compile.enable()
        config.pre_grad_custom_pass = [config.pre_grad_custom_pass, later]
        assert torch_dcs_ops.compile.is_enabled()
        torch_dcs_ops.compile.disable()
        assert config.pre_grad_custom_pass == [earlier, later]
        assert not torch_dcs_ops.compile.is_enabled()


def test_lowerings_are_off_where_the_caches_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    configuration.say_that_the_key_lacks_them.cache_clear()
    assert not configuration.lowers_scans()
    with config.patch(pre_grad_custom_pass=Hook()):
        assert configuration.lowers_scans()
    assert not caplog.records
    with config.patch(pre_grad_custom_pass=Hook((lambda graph: None,))):
        assert not configuration.lowers_scans()
        assert not configuration.lowers_scans()
    assert [record.getMessage()[:40] for record in caplog.records] == ["scans do not fuse with other operations:"]
    if hasattr(config, "pre_grad_pass_timing"):  # from torch 2.13 on
        with config.patch(pre_grad_custom_pass=Hook(), pre_grad_pass_timing="early"):
            assert not configuration.lowers_scans()


def test_every_source_is_in_the_key() -> None:
    """Of the folders that decide about compiled code, at any depth."""
    package = Path(torch_dcs_ops.__file__).parent
    sources = {Path(name) for name in graph_pass.source_files()}
    for folder in ("compile", "distributed", "ops", "reference"):
        assert sources >= {path.relative_to(package) for path in (package / folder).rglob("*.py")}
    assert Path("compile", "inductor", "heuristics.py") in sources
    assert Path("_registry.py") in sources
    called = {path for path in graph_pass.source_files().values() if path.parents[1].name == "triton_kernels"}
    assert "register_groups.py" in {path.name for path in called}
    for path in called:
        for name in re.findall(r"^from \.(\w+) import", path.read_text(), re.MULTILINE):
            assert path.with_name(f"{name}.py") in called


def test_files_that_change_places_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one name too: every family has its validate.py."""
    files = graph_pass.source_files()
    key = graph_pass._sources.__wrapped__()
    first, second = "ops/scan/validate.py", "ops/log_bmm/validate.py"
    monkeypatch.setattr(graph_pass, "source_files", lambda: files | {first: files[second], second: files[first]})
    assert graph_pass._sources.__wrapped__() != key


def test_uuid() -> None:
    plain = Hook().uuid()
    assert plain is not None
    assert plain == Hook().uuid()
    others = [Hook((), 7), Hook((), memory_budget=7), Hook((Earlier("a"),)), Hook((Earlier("b"),))]
    assert len({plain, *(other.uuid() for other in others)}) == 5
    assert Hook((), memory_budget=7) == Hook((), memory_budget=7) != Hook()
    assert Hook((lambda graph: None,)).uuid() is None


# What one process compiles, the next one finds in the cache, and with another setting does not.
CACHE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
import torch
from torch._dynamo.utils import counters
from compile.test_backend import ALWAYS, Model, is_fused
import torch_dcs_ops
torch.manual_seed(0)
tokens, model = torch.randint(23, (2, 5)), Model()
for backend in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    if backend == "enabled":
        torch_dcs_ops.compile.enable(minimum_logits=0)
    compiled = torch.compile(model, backend="dcs" if backend == "dcs" else "inductor", fullgraph=True,
                             options=ALWAYS if backend == "dcs" else None)
    fused = is_fused(compiled, tokens)
    found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    bypassed = counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"]
    print(json.dumps([fused, found > 0, bypassed]))
"""


@pytest.mark.slow
def test_caches_between_processes() -> None:
    # Graphs are found by this tag, and so by no earlier run of the test; in a folder of its own the compiler would
    # compile the headers of torch again, for 15 seconds.
    tag = uuid.uuid4().hex
    variables = environment(TORCH_COMPILE_CACHE_KEY_TAG=tag, TORCHINDUCTOR_FX_GRAPH_CACHE="1", **COMPILES_ITSELF)
    results = []
    for names in (("inductor", "dcs"), ("inductor", "enabled")):
        folders = [str(Path(__file__).parents[1])]
        command = [sys.executable, "-c", CACHE, json.dumps(names), json.dumps(folders)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        results += [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    # enable() and the backend of the same options share what they compile.
    assert results == [[False, False, 0], [True, False, 0], [False, True, 0], [True, True, 0]]
