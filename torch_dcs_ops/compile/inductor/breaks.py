"""Where Dynamo breaks a graph, and why: what it notes itself, by a private name of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from . import probes

# What the frames around the one that breaks say.
_ECHO = "step_unsupported"


@dataclass(frozen=True)
class GraphBreak:
    """The line that ends a graph."""

    place: str  # File "...", line n, in f
    reason: str


class Watch:
    """Notes the graph breaks within a `with` block; where torch keeps no such notes, none."""

    def __init__(self) -> None:
        self._notes: list[Any] = []
        self._before: list[Any] = []
        self._unsupported: dict[str, int] = {}

    def __enter__(self) -> Watch:
        if not probes.missing("breaks"):
            self._notes = sys.modules["torch._dynamo.output_graph"].graph_break_reasons
            self._before = list(self._notes)
            self._unsupported = dict(self._counted())
        return self

    def __exit__(self, *_: object) -> None:
        self._notes = list(self._notes)

    def found(self) -> list[GraphBreak]:
        """The graph breaks so far, each once, in their order."""
        known = set(map(id, self._before))
        notes = [note for note in self._notes if id(note) not in known and note.user_stack]
        own = [note for note in notes if note.reason != _ECHO] or notes
        return list(dict.fromkeys(GraphBreak(_place(note.user_stack[-1]), _first_line(note.reason)) for note in own))

    def hindrances(self) -> list[str]:
        """What Dynamo could not trace. Where it is in a loop, the function runs as it stands, and no break is noted."""
        if probes.missing("breaks"):
            return []
        new = [reason for reason, count in self._counted().items() if count != self._unsupported.get(reason)]
        return list(dict.fromkeys(map(_first_line, new)))

    @staticmethod
    def _counted() -> dict[str, int]:
        counted: dict[str, int] = sys.modules["torch._dynamo.utils"].counters["unimplemented"]
        return counted


def _place(frame: Any) -> str:
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'


def _first_line(reason: str) -> str:
    return (reason.strip().splitlines() or [""])[0]
