"""Returns on the CPU: generalized advantage estimation beside a Python loop, which is the floor, and torchrl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import CpuTimer, Deadline, Row, Skipped

from returns.functions import KINDS, peers, rollout

# Steps and environments, in both layouts.
SIZES = ((2048, 64), (128, 4096))
LOOP_TARGET = 20.0


def run(deadline: Deadline, keep: Callable[[str], bool]) -> tuple[list[Row], list[Skipped]]:
    """A fraction is how many times as fast as the loop."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for length, batch in SIZES:
        for dim in (0, 1):
            shape = (length, batch) if dim == 0 else (batch, length)
            name = f"gae {shape[0]}x{shape[1]}" + (" dim=0" if dim == 0 else "")
            if not keep(name):
                continue
            if deadline.left <= 0:
                skipped.append(Skipped(name, "float32", "all", "the time budget is used up"))
                continue
            x = rollout(shape, dim, "cpu", rhos=True, next_values=True)
            functions: dict[str, Callable[[], Any]] = {k.name: lambda k=k, x=x: k.function(x) for k in KINDS}  # type: ignore[misc]
            functions |= dict(peers(x, compiled=False))
            timings = CpuTimer(seconds=0.5).medians(functions)
            loop = timings["Python loop"].milliseconds
            for what, timing in timings.items():
                row = Row(name, "float32", what, timing.milliseconds, timing.repetitions)
                rows.append(row.compare(loop, LOOP_TARGET if what == "gae" else None))
    return rows, skipped
