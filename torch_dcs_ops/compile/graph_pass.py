"""What the compiler is given: a pre-grad pass that fuses linear + cross-entropy, gives discounts as numbers and marks
returns that stay calls, and itself the mark of scans that are to be lowered."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._version import __version__
from .inductor import dynamo, support
from .inductor.configuration import CustomGraphPass
from .passes.constant_discounts import give_numbers
from .passes.findings import Finding, say
from .passes.linear_cross_entropy import MINIMUM_LOGITS, find_linear_cross_entropy, fuse_linear_cross_entropy
from .passes.standalone_returns import mark_returns_alone

log = logging.getLogger("torch_dcs_ops.compile")

_failed: set[str] = set()


class Hook(CustomGraphPass):
    """The pass of this package after those (`earlier`) that were there before."""

    # The lowerings of scans ask the compiler's configuration for this: code compiled with them and without has
    # different keys in the compiler's caches, as `uuid` is part of these.
    dcs_scan_lowering = True

    def __init__(
        self,
        earlier: tuple[Any, ...] = (),
        minimum_logits: int = MINIMUM_LOGITS,
        memory_budget: int | None = None,
    ) -> None:
        if not _is_integer(minimum_logits) or minimum_logits < 0:
            raise ValueError(f"minimum_logits must be an integer >= 0, got {minimum_logits!r}")
        if memory_budget is not None and (not _is_integer(memory_budget) or memory_budget < 1):
            raise ValueError(f"memory_budget must be None or an integer >= 1, got {memory_budget!r}")
        self.earlier = earlier
        self.minimum_logits, self.memory_budget = minimum_logits, memory_budget
        self.has_run = False  # on the graph at hand: one whose code comes from the compiler's cache meets no pass

    def __call__(self, graph: fx.Graph) -> None:
        self.has_run = True
        for earlier in self.earlier:
            earlier(graph)
        if not support.supports("passes"):
            return
        if dynamo.lacks_values(graph):
            support.failed("passes", "the nodes of Dynamo's graph do not say what they stand for")
            return
        _guarded(
            "linear + cross_entropy",
            lambda: fuse_linear_cross_entropy(graph, self.minimum_logits, self.memory_budget),
        )
        _guarded("discounts", lambda: give_numbers(graph))
        _guarded("returns", lambda: mark_returns_alone(graph))

    def uuid(self) -> bytes | None:
        """What compiled code depends on; None, if that is not known of an earlier pass."""
        others = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self.earlier]
        if None in others:
            return None
        return hashlib.sha256(repr((_sources(), *self._settings(), others)).encode()).digest()

    # torch 2.11 does not ask pre-grad passes for their uuid: it pickles a deep copy of them into its keys.
    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        uuid = self.uuid()
        if uuid is None:
            raise TypeError("an earlier pre-grad pass has no uuid, so nothing that it changes can be cached")
        return (bytes, (uuid,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hook) and (other.earlier, other._settings()) == (self.earlier, self._settings())

    def __hash__(self) -> int:
        return hash((self.earlier, self._settings()))

    def _settings(self) -> tuple[int, int | None]:
        return self.minimum_logits, self.memory_budget


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def say_what_is_cached(graph_module: fx.GraphModule, hook: Hook) -> None:
    """Logs, if that is asked for, what `hook` did to a graph whose code the compiler has just found in its cache."""
    if not hook.has_run and log.isEnabledFor(logging.INFO) and support.supports("passes"):
        say(losses_in(graph_module, hook.minimum_logits), "the compiler's cache has code with")
    hook.has_run = False


def losses_in(graph_module: fx.GraphModule, minimum_logits: int) -> list[Finding]:
    """What the pass over losses does to a graph and those within it, which stay as they are."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [finding for graph in graphs for finding in find_linear_cross_entropy(graph, minimum_logits)]


def _guarded(name: str, rewrite: Callable[[], object]) -> None:
    """Runs a pass. An error in one is never the end of a compilation: it is said once, and at DEBUG from then on."""
    try:
        rewrite()
    except Exception:
        level = logging.DEBUG if name in _failed else logging.WARNING
        _failed.add(name)
        log.log(level, "the %s pass failed; the graph is compiled as it stands", name, exc_info=True)


@functools.cache
def _sources() -> str:
    """A hash of what decides about compiled code: `source_files` and the versions."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for name, path in sorted(source_files().items()):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def source_files() -> dict[str, Path]:
    """This folder, the ops' schemas and rules, the Triton functions that generated kernels call; by their place in the
    package, as files of several folders have one name."""
    package = Path(__file__).parents[1]
    folders = ("compile", "distributed", "ops", "reference")
    paths = [path for folder in folders for path in package.joinpath(folder).rglob("*.py")]
    files = {path.relative_to(package).as_posix(): path for path in (*paths, package / "_registry.py")}
    for name in ("scan.gamma", "scan.register_groups", "scan.tile"):
        spec = importlib.util.find_spec(f"torch_dcs_ops.triton_kernels.{name}")
        assert spec is not None
        files[f"triton_kernels/{name.replace('.', '/')}.py"] = Path(str(spec.origin))
    return files
