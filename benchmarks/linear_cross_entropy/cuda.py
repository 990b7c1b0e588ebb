"""dcs::linear_cross_entropy on a GPU, each time beside that of the GEMMs that it cannot do without.

The floor of forward and backward is three times one bare GEMM, that of the forward alone one. The peaks of memory are
those of the CUDA caching allocator, beyond the inputs; both gradients are in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from harness import CudaTimer, Deadline, Function, Row, Skipped, reason_of
from torch import Tensor

from linear_cross_entropy.functions import Loss, eager, own, peak_gibibytes, peers, step

DTYPE = torch.bfloat16
SECONDS = 120.0
FORWARD_TARGET = 1 / 1.12  # of the bare GEMM


@dataclass(frozen=True)
class Case:
    rows: int
    features: int
    classes: int

    @property
    def name(self) -> str:
        return f"linear_cross_entropy {self.rows}x{self.features}x{self.classes}"


CASES = (
    Case(8192, 4096, 128_256),
    Case(8192, 2304, 256_000),
    Case(16_384, 4096, 128_256),
    Case(65_536, 4096, 128_256),
)


@dataclass(frozen=True)
class Measured:
    """A function to time: `gemms` is its floor, in bare GEMMs."""

    name: str
    function: Function
    gemms: int
    leaves: tuple[Tensor, ...]
    target: float | None = None


def functions(case: Case, skip: Sequence[str]) -> Iterator[Measured]:
    x = torch.randn(case.rows, case.features, device="cuda", dtype=DTYPE, requires_grad=True)
    w = torch.randn(case.classes, case.features, device="cuda", dtype=DTYPE)
    w = w.div_(case.features**0.5).requires_grad_()
    y = torch.randint(case.classes, (case.rows,), device="cuda")

    def training(name: str, loss: Loss) -> Measured:
        return Measured(f"{name}, fwd+bwd", step(loss, x, w, y), 3, (x, w))

    yield Measured("GEMM", lambda: x.detach() @ w.detach().t(), 1, (x, w))
    yield Measured("dcs, forward", _without_grad(x, w, y), 1, (x, w), FORWARD_TARGET)
    yield training("dcs", own())
    yield training("dcs compact", own(accumulate_dtype=DTYPE))
    yield training("dcs one chunk", own(memory_budget=2 * case.rows * case.classes))
    yield training("eager", eager)
    torch._dynamo.reset()
    yield training("torch.compile", torch.compile(eager, dynamic=False))
    if "peers" not in skip:
        for name, loss in peers():
            yield training(name, loss)


def _without_grad(x: Tensor, w: Tensor, y: Tensor) -> Function:
    loss = own()

    def run() -> None:
        with torch.no_grad():
            loss(x, w, y)

    return run


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer(slow_milliseconds=float("inf"))
    deadline = Deadline(min(deadline.left, SECONDS))
    for case in CASES:
        if keep(case.name):
            _run_cell(timer, deadline, Deadline(cell_seconds), case, skip, rows, skipped)
    return rows, skipped


def _run_cell(
    timer: CudaTimer,
    deadline: Deadline,
    cell: Deadline,
    case: Case,
    skip: Sequence[str],
    rows: list[Row],
    skipped: list[Skipped],
) -> None:
    dtype = str(DTYPE).removeprefix("torch.")
    measured: dict[str, Measured] = {}
    peaks: dict[str, float] = {}
    for candidate in functions(case, skip):
        if any(word in candidate.name for word in skip):
            continue
        reason = None
        if min(deadline.left, cell.left) <= 0:
            reason = "the time budget is used up"
        else:
            try:
                peaks[candidate.name] = peak_gibibytes(candidate.function, candidate.leaves)
            except Exception as error:  # what cannot do the shape says so in the table
                reason = reason_of(error)
        if reason is None:
            measured[candidate.name] = candidate
        else:
            skipped.append(Skipped(case.name, dtype, candidate.name, reason))
    if "GEMM" not in measured:
        return
    timings = timer.medians({name: entry.function for name, entry in measured.items()})
    gemm = timings["GEMM"].milliseconds
    for name, timing in timings.items():
        row = Row(case.name, dtype, name, timing.milliseconds, timing.repetitions)
        row.note = f"peak {peaks[name]:.2f} GiB"
        rows.append(row.compare(gemm * measured[name].gemms, measured[name].target))
