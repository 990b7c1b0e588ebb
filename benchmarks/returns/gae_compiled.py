"""Generalized advantage estimation in float32, compiled with backend="dcs", beside other ways to write and compile it.

The floor is a copy of the traffic that cannot be done without: rewards and values (4 bytes a step each) and done (1)
are read once, advantages and returns (4 each) written once; 17 bytes where a copy of the rewards moves 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from cell import Case, Measured, run_cell
from harness import CudaTimer, Deadline, Row, Skipped
from torch import Tensor

from torch_dcs_ops import discounted_cumsum

from scan.peers import associative_scan, python_loop

GAMMA, LAMBDA = 0.99, 0.95
TRAFFIC = 17 / 8
# (batch, T) with the last dimension as time, and (T, batch) with the first one.
CASES = (
    Case((4096, 1024), 1, 1.0),
    Case((65536, 128), 1, 1.0),
    Case((1024, 65536), 0, 0.85),
    Case((128, 65536), 0, 0.85),
    Case((1024, 4096), 0, 0.85),
)
Recurrence = Callable[[Tensor, Tensor, int], Tensor]


def gae(recurrence: Recurrence, dim: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Advantages and returns of rewards, values (one more step) and done; `recurrence(deltas, done, dim)`."""

    def compute(rewards: Tensor, values: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        steps = rewards.size(dim)
        now, after = values.narrow(dim, 0, steps), values.narrow(dim, 1, steps)
        advantages = recurrence(rewards + GAMMA * after * (~done) - now, done, dim)
        return advantages, advantages + now

    return compute


def with_resets(deltas: Tensor, done: Tensor, dim: int) -> Tensor:
    return discounted_cumsum(deltas, GAMMA * LAMBDA, dim=dim, reset=done)


def with_step_gammas(deltas: Tensor, done: Tensor, dim: int) -> Tensor:
    return discounted_cumsum(deltas, GAMMA * LAMBDA * (~done), dim=dim)


def functions(case: Case) -> Iterator[Measured]:
    rewards = torch.randn(case.shape, device="cuda")
    longer = [n + (dim == case.dim) for dim, n in enumerate(case.shape)]
    values, done = torch.randn(longer, device="cuda"), torch.rand(case.shape, device="cuda") < 0.01
    copy = torch.empty_like(rewards)
    yield Measured("copy", lambda: copy.copy_(rewards), 1.0, None)

    def measured(name: str, recurrence: Recurrence, backend: str | None, target: float | None = None) -> Measured:
        torch._dynamo.reset()
        function = gae(recurrence, case.dim)
        if backend is not None:
            function = torch.compile(function, backend=backend, dynamic=False)
        function(rewards, values, done)
        return Measured(name, lambda: function(rewards, values, done), TRAFFIC, target)

    yield measured("gae, dcs backend", with_resets, "dcs", case.target)
    yield measured("gae, dcs backend, per-step gamma", with_step_gammas, "dcs", case.target)
    yield measured("gae, inductor and the op", with_resets, "inductor")

    def associative(deltas: Tensor, done: Tensor, dim: int) -> Tensor:
        return associative_scan(GAMMA * LAMBDA * (~done), deltas, dim, True)

    def loop(deltas: Tensor, done: Tensor, dim: int) -> Tensor:
        return python_loop(GAMMA * LAMBDA * (~done), deltas, dim, True)

    yield measured("peers: gae, compiled associative_scan", associative, "inductor")
    yield measured("peers: gae, Python loop", loop, None)


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer()
    for case in CASES:
        if keep(f"gae {case.name}"):
            run_cell(timer, deadline, cell_seconds, case, torch.float32, functions(case), skip, rows, skipped)
    return rows, skipped
