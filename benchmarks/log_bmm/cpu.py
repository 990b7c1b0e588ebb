"""dcs::log_bmm on the CPU against torch.logsumexp of all terms, forward and with the backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import CpuTimer, Deadline, Row, Skipped

from torch_dcs_ops import log_bmm, max_bmm

from log_bmm.functions import DATA, naive, step, unsafe

BATCH, SIZE = 8, 256
TARGETS = {"fwd": 8.0, "fwd+bwd": 5.0}  # times naive's speed


def run(deadline: Deadline, keep: Callable[[str], bool]) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    floors: dict[str, float] = {}
    case = f"log_bmm {BATCH}x{SIZE}"
    for name, draw in DATA.items():
        if not keep(f"{case} {name}"):
            continue
        if deadline.left <= 0:
            skipped.append(Skipped(case, "float32", name, "the time budget is used up"))
            continue
        a, b = draw(BATCH, SIZE, "cpu")
        suites: dict[str, dict[str, Callable[[], object]]] = {
            "fwd": {"unsafe": lambda a=a, b=b: unsafe(a, b), "dcs": lambda a=a, b=b: log_bmm(a, b)},
            "fwd+bwd": {"unsafe": step(unsafe, a, b), "dcs": step(log_bmm, a, b)},
        }
        if not floors:
            # Naive takes as long on any data.
            slow = {"fwd": lambda a=a, b=b: naive(a, b), "fwd+bwd": step(naive, a, b)}
            slow["max"] = lambda a=a, b=b: torch.max(a.unsqueeze(-1) + b.unsqueeze(-3), -2)
            timings = CpuTimer(most=3).medians(slow)
            floors = {what: timing.milliseconds for what, timing in timings.items()}
            rows += [
                Row(case, "float32", f"naive, {what}", t.milliseconds, t.repetitions) for what, t in timings.items()
            ]
            suites["max"] = {"dcs": lambda a=a, b=b: max_bmm(a, b)}
        for what, functions in suites.items():
            for label, timing in CpuTimer(seconds=0.3, most=30).medians(functions).items():
                row = Row(case, "float32", f"{name} {label}, {what}", timing.milliseconds, timing.repetitions)
                rows.append(row.compare(floors[what], TARGETS.get(what) if label == "dcs" else None))
    return rows, skipped
