"""dcs::log_bmm on CUDA in float32 beside naive, compiled naive and the unsafe product of exponentials.

Run by run.py with the other suites, or alone, one line a cell:

    PYTHONPATH=benchmarks python -m log_bmm.cuda --only 8x256
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

import torch
from harness import CudaTimer, Deadline, Row, Skipped
from torch import Tensor

from torch_dcs_ops import log_bmm

from log_bmm.functions import DATA, Product, naive, step, unsafe

SIZES = ((8, 1024), (8, 256), (1, 2048))
# Milliseconds, forward and forward with backward, of data that is certified as a whole.
TARGETS = {(8, 1024): (0.6, 1.8), (8, 256): (0.05, 0.25), (1, 2048): (0.6, 1.6)}
CERTIFIED = ("N(0,1)", "N(0,10^2)")
# Eager naive holds all terms, and with the backward three times; it and its compiled form take as long on any data.
NAIVE_BYTES = 24 << 30
NAIVE_DATA = "N(0,1)"


def _functions(batch: int, n: int, data: str, skip: Sequence[str]) -> dict[str, Product]:
    functions: dict[str, Product] = {"unsafe": unsafe, "dcs": log_bmm}
    if data == NAIVE_DATA and "peers" not in skip:
        if 12 * batch * n**3 <= NAIVE_BYTES:
            functions["naive"] = naive
        functions["compiled naive"] = torch.compile(naive, dynamic=False)
    return functions


def _error(a: Tensor, b: Tensor) -> float:
    """Of the first rows' results, relative to max(1, |out|), against float64."""
    a, b = a[:1, :16], b[:1]
    right = naive(a.double(), b.double())
    return float(((log_bmm(a, b) - right).abs() / right.abs().clamp(min=1)).max())


def cell(timer: CudaTimer, batch: int, n: int, data: str, skip: Sequence[str]) -> list[Row]:
    torch.manual_seed(0)
    a, b = DATA[data](batch, n, "cuda")
    case = f"{batch}x{n} {data}"
    rows: list[Row] = []
    functions = _functions(batch, n, data, skip)
    for place, what in enumerate(("fwd", "fwd+bwd")):
        runs: dict[str, Callable[[], object]] = {
            name: step(f, a, b) if place else (lambda f=f: f(a, b)) for name, f in functions.items()
        }
        timings = timer.medians(runs)
        for name, timing in timings.items():
            row = Row(case, "float32", f"log_bmm {name}, {what}", timing.milliseconds, timing.repetitions)
            row.compare(timings["unsafe"].milliseconds)
            if name == "dcs":
                target = TARGETS[batch, n][place] if data in CERTIFIED else None
                row.note = "" if target is None else f"target {target} ms" + (" missed" * (row.milliseconds > target))
                row.note += "" if place else f" error {_error(a, b):.1e}"
            rows.append(row)
    torch.cuda.empty_cache()
    return rows


def run(
    deadline: Deadline, keep: Callable[[str], bool], skip: Sequence[str], cell_seconds: float
) -> tuple[list[Row], list[Skipped]]:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    timer = CudaTimer(seconds=0.05)
    for batch, n in SIZES:
        for data in DATA:
            case = f"log_bmm {batch}x{n} {data}"
            if not keep(case):
                continue
            if deadline.left <= 0:
                skipped.append(Skipped(case, "float32", "all", "the time budget is used up"))
                continue
            rows += cell(timer, batch, n, data, skip)
    return rows, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression: the cells to run, such as '8x256 N'")
    parser.add_argument("--skip", default="", help="comma-separated words: 'peers' leaves naive out")
    parser.add_argument("--precision", default="highest", choices=("highest", "high", "medium"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision(options.precision)
    timer = CudaTimer(seconds=0.05)
    print("ms forward / forward+backward; error of log_bmm's forward against float64, relative to max(1, |out|)")
    for batch, n in SIZES:
        for data in DATA:
            if re.search(options.only, f"{batch}x{n} {data}") is None:
                continue
            rows = cell(timer, batch, n, data, options.skip.split(","))
            times = {row.name.removeprefix("log_bmm "): row for row in rows}
            names = [name.removesuffix(", fwd") for name in times if name.endswith(", fwd")]
            parts = [
                f"{name} {times[f'{name}, fwd'].milliseconds:.3f}/{times[f'{name}, fwd+bwd'].milliseconds:.3f}"
                for name in names
            ]
            notes = [times[f"dcs, {what}"].note for what in ("fwd", "fwd+bwd")]
            print(f"{batch}x{n} {data}: {'  '.join(parts)}  [{'; '.join(filter(None, notes))}]", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
