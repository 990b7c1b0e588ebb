"""One shape and dtype of a GPU benchmark: functions timed beside a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from harness import CudaTimer, Deadline, Function, Row, Skipped, Timing, reason_of


@dataclass(frozen=True)
class Case:
    """One shape; `target` is the fraction of copy speed to reach."""

    shape: tuple[int, int]
    dim: int
    target: float
    tiny: bool = False  # timed under CUDA-graph replay; the target is 1 / 1.3

    @property
    def name(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}" + (" dim=0" if self.dim == 0 else "")


@dataclass(frozen=True)
class Measured:
    """A function to time: `floor` is its traffic over a copy's."""

    name: str
    function: Function
    floor: float
    target: float | None


def run_cell(
    timer: CudaTimer,
    deadline: Deadline,
    cell_seconds: float,
    case: Case,
    dtype: torch.dtype,
    functions: Iterator[Measured],
    skip: Sequence[str],
    rows: list[Row],
    skipped: list[Skipped],
    peers: bool = False,
) -> None:
    dtype_name = str(dtype).removeprefix("torch.")
    cell = Deadline(cell_seconds)
    measured: dict[str, Measured] = {}
    for candidate in functions:
        if any(word in candidate.name for word in skip):
            continue
        reason = None
        if deadline.left <= 0:
            reason = "the time budget is used up"
        elif cell.left <= 0:
            reason = f"the cell's {cell_seconds:.0f} s are used up"
        else:
            try:
                candidate.function()
                torch.cuda.synchronize()
            except Exception as error:  # a peer that cannot do the shape says so in the table
                reason = reason_of(error)
        if reason is None:
            measured[candidate.name] = candidate
        else:
            skipped.append(Skipped(case.name, dtype_name, candidate.name, reason))
    if "copy" not in measured or (peers and len(measured) == 1):
        return
    calls = {name: entry.function for name, entry in measured.items()}
    timings: dict[str, Timing] = timer.graph_medians(calls) if case.tiny else timer.medians(calls)
    copy = timings["copy"].milliseconds
    for name, timing in timings.items():
        row = Row(case.name, dtype_name, name, timing.milliseconds, timing.repetitions)
        row.note = "CUDA graph" if case.tiny else ""
        rows.append(row.compare(copy * measured[name].floor, measured[name].target))
