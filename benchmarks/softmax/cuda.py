"""dcs::softmax on a GPU, each time as a fraction of copying the same number of bytes.

The floors, in tensors read or written: forward 2 (= `y.copy_(x)`), backward 3 (gradient, output, input's gradient).
Alone (`PYTHONPATH=benchmarks python -m softmax.cuda`) it prints a line a cell, without the peers that must be compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch
from cell import Case, Measured, run_cell
from harness import CudaTimer, Deadline, Row, Skipped

CASES = (
    Case((4096, 256), -1, 0.95),
    Case((4096, 1024), -1, 0.95),
    Case((4096, 8192), -1, 0.95),
    Case((4096, 32_768), -1, 0.95),
    Case((2048, 65_536), -1, 0.90),
    Case((1024, 131_072), -1, 0.90),
    Case((512, 262_144), -1, 0.90),
)
# Without a target: another dimension, rows too long for a cluster, too few rows, rows that begin inside vectors.
OTHERS = (
    Case((128, 262_144), 0, 0.0),
    Case((1024, 65_536), 0, 0.0),
    Case((65_536, 256), 0, 0.0),
    Case((16, 4_194_304), -1, 0.0),
    Case((16, 131_072), -1, 0.0),
    Case((4096, 8191), -1, 0.0),
    Case((65_536, 257), -1, 0.0),
)
BACKWARD_TARGET = 0.90
BACKWARD_FLOOR = 1.5
DTYPES = (torch.float32, torch.bfloat16)


def functions(case: Case, dtype: torch.dtype, with_peers: bool) -> Iterator[Measured]:
    dim = case.dim
    x, g = (torch.randn(case.shape, device="cuda", dtype=dtype) for _ in range(2))
    copy = torch.empty_like(x)
    yield Measured("copy", lambda: copy.copy_(x), 1.0, None)
    own, own_backward = torch.ops.dcs.softmax.default, torch.ops.dcs._softmax_backward.default
    y = own(x, dim)
    yield Measured("dcs.softmax", lambda: own(x, dim), 1.0, case.target or None)
    target = BACKWARD_TARGET if case.target else None
    yield Measured("dcs.softmax, backward", lambda: own_backward(g, y, dim), BACKWARD_FLOOR, target)
    yield Measured("torch.softmax", lambda: torch.softmax(x, dim), 1.0, None)
    theirs = torch.ops.aten._softmax_backward_data.default
    yield Measured("torch.softmax, backward", lambda: theirs(g, y, dim, dtype), BACKWARD_FLOOR, None)
    if not with_peers:
        return
    yield from _triton_functions(case, x, g)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, dim), dynamic=False)
    yield Measured("compiled softmax", lambda: compiled(x), 1.0, None)
    compiled_backward = torch.compile(lambda g, y: theirs(g, y, dim, dtype), dynamic=False)
    yield Measured("compiled softmax, backward", lambda: compiled_backward(g, y), BACKWARD_FLOOR, None)
    if dim == -1 and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        yield Measured("Liger softmax", lambda: LigerSoftmaxFunction.apply(x), 1.0, None)


def _triton_functions(case: Case, x: torch.Tensor, g: torch.Tensor) -> Iterator[Measured]:
    try:
        from torch_dcs_ops.triton_kernels.softmax import softmax, softmax_backward
    except ImportError:
        return
    dim = case.dim % 2
    y = softmax(x, dim)
    yield Measured("Triton softmax", lambda: softmax(x, dim), 1.0, None)
    yield Measured("Triton softmax, backward", lambda: softmax_backward(g, y, dim), BACKWARD_FLOOR, None)


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer()
    for case in CASES + OTHERS:
        for dtype in DTYPES:
            if keep(f"softmax {case.name}"):
                cell = functions(case, dtype, with_peers="peers" not in skip)
                run_cell(timer, deadline, cell_seconds, case, dtype, cell, skip, rows, skipped)
    return rows, skipped


def main() -> None:
    timer = CudaTimer(seconds=0.05)
    deadline = Deadline(40.0)
    print("fractions of copy speed: dcs forward, backward | torch forward, backward")
    for case in CASES + OTHERS:
        for dtype in DTYPES:
            rows: list[Row] = []
            skipped: list[Skipped] = []
            run_cell(timer, deadline, 5.0, case, dtype, functions(case, dtype, False), (), rows, skipped)
            found = " ".join(f"{row.fraction:.3f}" for row in rows[1:]) or skipped[0].reason
            below = " below" if any(row.target and row.fraction < row.target for row in rows) else ""
            name = f"{case.name:<18}{str(dtype).removeprefix('torch.'):<10}"
            print(f"{name}copy {rows[0].milliseconds if rows else 0:.4f} ms  {found}{below}", flush=True)


if __name__ == "__main__":
    main()
