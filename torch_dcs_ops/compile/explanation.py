"""`compile.explain`: what the passes make of a function's graphs, as data and as text; nothing is generated for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .graph_pass import losses_in
from .inductor import breaks, support
from .inductor.breaks import GraphBreak
from .inductor.wrappers import uncompiled
from .passes.findings import Finding, Reason


@dataclass(frozen=True)
class Explanation:
    """What `backend="dcs"` finds in a function, fuses and leaves alone; printed, it is a readable text.

    Attributes:
        losses: of each loss in the graphs where it stands (`loss`, `place`), whether it is `fused` with its linear
            map, and if not the `reason`, that reason in full (`clause`) and the `cure`.
        breaks: of each graph break the `place` and the `reason`.
        graphs: how many graphs the function was traced as.
        calls: how often the graphs call each operator of this package themselves, by name.
        hindrance: why nothing is fused, with this torch, or in a function that Dynamo does not trace at all; else None.
    """

    losses: tuple[Finding, ...]
    breaks: tuple[GraphBreak, ...]
    graphs: int
    calls: dict[str, int]
    hindrance: str | None = None

    @property
    def fused(self) -> tuple[Finding, ...]:
        return tuple(loss for loss in self.losses if loss.fused)

    @property
    def left_alone(self) -> tuple[Finding, ...]:
        return tuple(loss for loss in self.losses if not loss.fused)

    def __str__(self) -> str:
        counts = (_counted(self.graphs, "graph"), _counted(len(self.breaks), "graph break"))
        lines = [f"{', '.join(counts)}; {_counted(len(self.losses), 'loss', 'es')}, {len(self.fused)} fused"]
        if self.hindrance is not None:
            lines.append(f"nothing is fused: {self.hindrance}")
        for loss in self.losses:
            lines.append(f"{'fused' if loss.fused else 'left alone':<12}{loss.name}")
            if not loss.fused:
                lines += [f"  {'because':<10}it {loss.clause}", f"  {'cure':<10}{loss.cure}"]
        for found in self.breaks:
            lines += [f"{'graph break':<12}{found.place}", f"  {'because':<10}{found.reason}"]
        lines += [f"{'call':<12}{name}{f', {count} times' if count > 1 else ''}" for name, count in self.calls.items()]
        if self.graphs and not self.losses and not self.calls:
            lines.append("no F.cross_entropy, no F.nll_loss, no gathered log_softmax, no operator of this package")
        return "\n".join(lines)


def explanation_of(
    function: Callable[..., object], args: Any, kwargs: Any, minimum_logits: int, dynamic: bool | None
) -> Explanation:
    hindrance = None if support.supports("passes") else support.hindrance("passes")
    losses: list[Finding] = []
    calls: Counter[str] = Counter()
    graphs = 0
    ended_by: GraphBreak | None = None  # the graph before

    def looks(graph_module: fx.GraphModule, _: Any) -> Any:
        nonlocal graphs, ended_by
        graphs += 1
        calls.update(_own_operators(graph_module))
        if hindrance is None:
            losses.extend(_behind(ended_by, loss) for loss in losses_in(graph_module, minimum_logits))
        ended_by = next(reversed(watch.found()), None)
        return graph_module

    torch.compiler.reset()
    try:
        with breaks.Watch() as watch:
            traced: Callable[..., Any] = torch.compile(uncompiled(function), backend=looks, dynamic=dynamic)
            traced(*args, **kwargs)
    finally:
        torch.compiler.reset()
    if graphs == 0 and hindrance is None:
        reasons = watch.hindrances() or ["it makes no graph"]
        hindrance = f"the function runs as it stands, as Dynamo does not trace it: {'; '.join(reasons)}"
    return Explanation(tuple(losses), tuple(watch.found()), graphs, dict(calls), hindrance)


def _behind(found: GraphBreak | None, loss: Finding) -> Finding:
    """A loss whose logits come from outside of its graph, where that begins behind a graph break."""
    if found is None or loss.reason is not Reason.OTHER_GRAPH:
        return loss
    clause = f"{loss.clause}: that graph begins behind the graph break at {found.place}"
    return replace(loss, reason=Reason.GRAPH_BREAK, clause=clause)


def _own_operators(graph_module: fx.GraphModule) -> list[str]:
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets: list[Any] = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [str(target.overloadpacket) for target in targets if getattr(target, "namespace", None) == "dcs"]


def _counted(count: int, name: str, plural: str = "s") -> str:
    return f"{count} {name}{'' if count == 1 else plural}"
