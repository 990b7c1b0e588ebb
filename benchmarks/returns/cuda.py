"""Returns on a GPU in float32, eager and compiled, as fractions of a copy of the bytes that cannot be done without.

A step of GAE reads rewards and values (4 bytes each) and done (1), and writes advantages and returns: 17 bytes.
V-trace reads the ratios too, 21; TD(lambda) reads rewards and next values, five-step returns rewards and values, and
both write one tensor, 13. A copy of half as many bytes moves as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from cell import Case, Measured, run_cell
from harness import CudaTimer, Deadline, Row, Skipped

from returns.functions import KINDS, Kind, Rollout, peers, rollout

TARGET = 0.80
# (batch, T) with the last dimension as time, and (T, batch) with the first one.
CASES = (
    Case((8192, 2048), 1, TARGET),
    Case((32_768, 8), 1, 1 / 1.3, tiny=True),
    Case((4096, 65_536), 1, TARGET),
    Case((1024, 65_536), 0, TARGET),
    Case((128, 65_536), 0, TARGET),
    Case((128, 256), 0, 1 / 1.3, tiny=True),
)
# Seconds that this part may take; the harness's budget is for all of a device.
SECONDS = 80.0


def copy_of(x: Rollout, kind: Kind) -> Measured:
    source = torch.randint(256, (x.rewards.numel() * kind.bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return Measured("copy", lambda: target.copy_(source), 1.0, None)


def own(case: Case, kind: Kind) -> Iterator[Measured]:
    x = rollout(case.shape, case.dim, "cuda", **kind.options)
    yield copy_of(x, kind)
    yield Measured(f"{kind.name}, eager", lambda: kind.function(x), 1.0, case.target)
    torch._dynamo.reset()
    compiled = torch.compile(kind.function, backend="dcs", dynamic=False)
    yield Measured(f"{kind.name}, dcs backend", lambda: compiled(x), 1.0, case.target)


def others(case: Case, kind: Kind) -> Iterator[Measured]:
    x = rollout(case.shape, case.dim, "cuda", **kind.options)
    yield copy_of(x, kind)
    for name, function in peers(x, compiled=True):
        yield Measured(f"peers: {name}", function, 1.0, None)


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    """Every own cell, GAE first; then, in what time is left, the peers."""
    deadline = Deadline(min(SECONDS, deadline.left))
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer()
    selected = [(case, kind) for kind in KINDS for case in CASES if keep(f"{kind.name} {case.name}")]
    with torch.no_grad():
        for case, kind in selected:
            run_cell(timer, deadline, cell_seconds, case, torch.float32, own(case, kind), skip, rows, skipped)
        if "peers" not in skip:
            for case, kind in selected:
                if kind is KINDS[0]:
                    run_cell(
                        timer, deadline, cell_seconds, case, torch.float32, others(case, kind), skip, rows, skipped,
                        peers=True,
                    )  # fmt: skip
    return rows, skipped
