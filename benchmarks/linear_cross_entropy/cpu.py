"""dcs::linear_cross_entropy on the CPU against F.linear and F.cross_entropy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import CpuTimer, Deadline, Row, Skipped
from torch.profiler import ProfilerActivity, profile

from linear_cross_entropy.functions import eager, own, step

ROWS, FEATURES, CLASSES = 2048, 512, 32_000
NAME = f"linear_cross_entropy {ROWS}x{FEATURES}x{CLASSES}"
TIME_TARGET = 1 / 1.05  # of eager's time


def run(deadline: Deadline, keep: Callable[[str], bool]) -> tuple[list[Row], list[Skipped]]:
    if not keep(NAME):
        return [], []
    if deadline.left <= 0:
        return [], [Skipped(NAME, "float32", "all", "the time budget is used up")]
    x = torch.randn(ROWS, FEATURES, requires_grad=True)
    w = (torch.randn(CLASSES, FEATURES) / FEATURES**0.5).requires_grad_()
    y = torch.randint(CLASSES, (ROWS,))
    functions = {"eager": step(eager, x, w, y), "dcs": step(own(), x, w, y)}
    timings = CpuTimer(most=3).medians(functions)
    floor = timings["eager"].milliseconds
    rows = []
    for name, timing in timings.items():
        row = Row(NAME, "float32", f"{name}, fwd+bwd", timing.milliseconds, timing.repetitions)
        x.grad = w.grad = None
        extra = _peak_bytes(functions[name]) - x.nbytes - w.nbytes
        row.note = f"{extra / 2**20:.0f} MiB beyond the gradients"
        rows.append(row.compare(floor, TIME_TARGET if name == "dcs" else None))
    return rows, []


def _peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes of CPU tensors at a time that the call adds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
