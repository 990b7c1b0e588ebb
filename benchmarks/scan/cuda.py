"""dcs::discounted_cumsum on a GPU, each time as a fraction of copying the same number of bytes.

The floors, in tensors of input's size read or written: a scan 2 (= `y.copy_(x)`); with a per-step gamma 3; forward and
backward with the gradients of input and a scalar gamma 5 (x, y | dy, y, dx); with a per-step gamma 8 (x, g, y | dy, g,
y, dx, dg).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import torch
from cell import Case, Measured, run_cell
from harness import CudaTimer, Deadline, Row, Skipped
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (registers torch.ops.dcs)

from scan.peers import peer_functions

GAMMA = 0.99
TRITON_TARGET = 0.80
BACKWARD_TARGET = 0.80


CASES = (
    Case((4096, 4096), -1, 0.92),
    Case((1, 100_000_000), -1, 0.90),
    Case((16, 1_048_576), -1, 0.85),
    Case((256, 65_536), -1, 0.90),
    Case((65_536, 256), -1, 0.92),
    Case((1_048_576, 16), -1, 0.90),
    Case((1024, 65_536), 0, 0.90),
    Case((128, 65_536), 0, 0.90),
    Case((1024, 4096), 0, 0.80),
    Case((1, 100_000), -1, 1 / 1.3, tiny=True),
    Case((32, 8), -1, 1 / 1.3, tiny=True),
)
DTYPES = (torch.float32, torch.bfloat16)
DIRECTIONS = ("left", "right")


def own_functions(case: Case, dtype: torch.dtype) -> Iterator[Measured]:
    """The copy first, then the op in every form, then torch.cumsum."""
    dim = case.dim
    x = torch.randn(case.shape, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    yield Measured("copy", lambda: y.copy_(x), 1.0, None)
    steps = torch.empty_like(x).uniform_(0.9, 0.999)
    scalar = torch.ops.dcs.discounted_cumsum.default
    tensor = torch.ops.dcs.discounted_cumsum.Tensor
    for direction in DIRECTIONS:
        yield Measured(f"dcs {direction}", lambda d=direction: scalar(x, GAMMA, dim=dim, direction=d), 1.0, case.target)
    for direction in DIRECTIONS:
        yield Measured(
            f"dcs {direction}, per-step gamma",
            lambda d=direction: tensor(x, steps, dim=dim, direction=d),
            1.5,
            case.target,
        )
    if not case.tiny:
        yield from _backward_functions(case, x, steps)
    yield from _triton_functions(case, x, steps)
    yield Measured("dcs.cumsum", lambda: torch.ops.dcs.cumsum.default(x, dim), 1.0, None)
    yield Measured("torch.cumsum", lambda: torch.cumsum(x, dim), 1.0, None)


def _backward_functions(case: Case, x: Tensor, steps: Tensor) -> Iterator[Measured]:
    grad = torch.randn_like(x)
    leaf = x.detach().requires_grad_()
    gammas = {
        "": torch.tensor(GAMMA, device="cuda", requires_grad=True),
        ", per-step gamma": steps.detach().requires_grad_(),
    }
    for suffix, gamma in gammas.items():

        def both(gamma: Tensor = gamma) -> tuple[Tensor, ...]:
            out = torch.ops.dcs.discounted_cumsum.Tensor(leaf, gamma, dim=case.dim, direction="right")
            return torch.autograd.grad(out, (leaf, gamma), grad)

        yield Measured(f"dcs right, fwd+bwd{suffix}", both, 4.0 if suffix else 2.5, BACKWARD_TARGET)


TRITON = ("Triton left", "Triton right", "Triton left, per-step gamma")


def _triton_functions(case: Case, x: Tensor, steps: Tensor) -> Iterator[Measured]:
    for name in TRITON:
        target = TRITON_TARGET if name == "Triton left" and not case.tiny else None
        floor = 1.5 if name.endswith("step") else 1.0
        try:
            function = _triton_function(name, case, x, steps)
        except ImportError:
            return
        yield Measured(name, function, floor, target)


def _triton_function(name: str, case: Case, x: Tensor, steps: Tensor) -> Callable[[], Tensor]:
    from torch_dcs_ops.reference.scan import ScanCall
    from torch_dcs_ops.triton_kernels.scan.launch import scan

    gamma, number = (steps, 0.0) if name.endswith("step") else (None, GAMMA)
    call = ScanCall(gamma, number, case.dim % 2, "right" in name, False, None, None, None)
    return lambda: scan(x, call)


def _compile(job: tuple[str, Case, torch.dtype]) -> None:
    """In a process of its own: Triton keeps what it compiles in a cache on disk."""
    name, case, dtype = job
    x = torch.zeros(case.shape, device="cuda", dtype=dtype)
    try:
        _triton_function(name, case, x, x)()
        torch.cuda.synchronize()
    except Exception:
        return  # the cell says what it was


def compile_ahead(selected: Sequence[tuple[Case, torch.dtype]], skip: Sequence[str]) -> None:
    """All Triton kernels at once: one after the other, at a second each, they take longer than the measurements."""
    names = [name for name in TRITON if not any(word in name for word in skip)]
    jobs = [(name, case, dtype) for case, dtype in selected for name in names]
    if len(jobs) > 4 and find_spec("triton") is not None:
        workers = min(len(jobs), os.cpu_count() or 1, 16)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_compile, jobs))


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    """Every own cell, then, in what time is left, the peers."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer()
    selected = [(case, dtype) for case in CASES if keep(case.name) for dtype in DTYPES]
    compile_ahead(selected, skip)
    for case, dtype in selected:
        run_cell(timer, deadline, cell_seconds, case, dtype, own_functions(case, dtype), skip, rows, skipped)
    if "peers" not in skip:
        for case, dtype in selected:
            if dtype is torch.float32 or case.shape == (4096, 4096):
                peers = peer_functions(case, dtype, GAMMA)
                run_cell(timer, deadline, cell_seconds, case, dtype, peers, skip, rows, skipped, peers=True)
    return rows, skipped
