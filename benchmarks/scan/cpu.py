"""dcs::discounted_cumsum on the CPU against torch.cumsum, and what a call costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import CpuTimer, Deadline, Row, Skipped, call_microseconds

import torch_dcs_ops

from scan.peers import python_loop

GAMMA = 0.99
SHAPES = ((1, 100_000), (4096, 4096), (65_536, 128))
# Microseconds a call on a 4x4 tensor may take; forward only, gradients recorded or not.
CALL_TARGETS = {"public": 6.0, "public, grad": 16.0, ".default": 9.0, ".default, grad": 20.0}


def run(deadline: Deadline, keep: Callable[[str], bool]) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    op = torch.ops.dcs.discounted_cumsum.default
    for shape in SHAPES:
        name = f"{shape[0]}x{shape[1]}"
        if not keep(name):
            continue
        if deadline.left <= 0:
            skipped.append(Skipped(name, "float32", "all", "the time budget is used up"))
            continue
        x = torch.randn(shape)
        y = torch.empty_like(x)
        timings = CpuTimer().medians(
            {
                "torch.cumsum": lambda x=x: torch.cumsum(x, -1),
                "copy": lambda x=x, y=y: y.copy_(x),
                "dcs left": lambda x=x: op(x, GAMMA, dim=-1, direction="left"),
                "dcs right": lambda x=x: op(x, GAMMA, dim=-1, direction="right"),
                "dcs.cumsum": lambda x=x: torch.ops.dcs.cumsum.default(x, -1),
                "dcs.cumsum reverse": lambda x=x: torch.ops.dcs.cumsum.default(x, -1, reverse=True),
            }
        )
        floor = timings["torch.cumsum"].milliseconds
        for what, timing in timings.items():
            row = Row(name, "float32", what, timing.milliseconds, timing.repetitions)
            rows.append(row.compare(floor, 1.0 if what in ("dcs left", "dcs right") else None))
    if keep("128x16 dim=0"):
        rows += _rollout_rows()
    if keep("4x4"):
        rows += _call_rows()
    return rows, skipped


def _rollout_rows() -> list[Row]:
    """A rollout of 128 steps in 16 environments: the op against a Python loop."""
    x = torch.randn(128, 16)
    timings = CpuTimer(seconds=0.3).medians(
        {
            "Python loop": lambda: python_loop(x, GAMMA, 0, True),
            "dcs right": lambda: torch.ops.dcs.discounted_cumsum.default(x, GAMMA, dim=0, direction="right"),
        }
    )
    loop = timings["Python loop"].milliseconds
    return [
        Row("128x16 dim=0", "float32", name, timing.milliseconds, timing.repetitions).compare(loop)
        for name, timing in timings.items()
    ]


def _call_rows() -> list[Row]:
    x = torch.randn(4, 4)
    leaf = torch.randn(4, 4, requires_grad=True)
    default = torch.ops.dcs.discounted_cumsum.default
    calls = {
        "public": lambda: torch_dcs_ops.discounted_cumsum(x, GAMMA),
        "public, grad": lambda: torch_dcs_ops.discounted_cumsum(leaf, GAMMA),
        ".default": lambda: default(x, GAMMA),
        ".default, grad": lambda: default(leaf, GAMMA),
        "clone": lambda: x.clone(),
        "clone, grad": lambda: leaf.clone(),
    }
    rows = []
    for name, call in calls.items():
        microseconds = call_microseconds(call)
        target = CALL_TARGETS.get(name)
        row = Row("4x4, one call", "float32", name, microseconds / 1e3, 15, note=f"{microseconds:.1f} us")
        rows.append(row if target is None else row.compare(target / 1e3, 1.0))
    return rows
