"""Run the benchmarks: `make bench`, or `python benchmarks/run.py --device cuda --output result.json`.

Prints a table and, with --output, writes JSON with the versions, the device and the commit measured. `python
benchmarks/run.py survey` draws problems at random instead, see `survey --help`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from harness import Deadline, Row, Skipped, environment, print_rows, report, write

SUITES = ("scan", "softmax", "gae", "returns", "linear_cross_entropy", "log_bmm")


def main() -> int:
    if sys.argv[1:2] == ["survey"]:
        # It chooses the kernels, which the package reads at import.
        from survey.command import main as survey

        return survey(sys.argv[2:])
    import torch_dcs_ops

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the CPU, and a GPU if any"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--suites", default="", help=f"of a GPU's, comma-separated, else all: {', '.join(SUITES)}")
    parser.add_argument("--only", default="", help="regular expression: the cases to run, such as '4096x4096|32x8'")
    parser.add_argument(
        "--skip", default="", help="comma-separated words; what has one in its name is left out; 'peers'"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--budget", type=float, default=170.0, help="seconds a device may take (default 170)")
    parser.add_argument("--cell-seconds", type=float, default=20.0, help="seconds one shape and dtype may take")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    options = parser.parse_args()
    suites = [name for name in options.suites.split(",") if name]
    if not set(suites) <= set(SUITES):
        parser.error(f"--suites must be among {', '.join(SUITES)}, got {options.suites}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    skip = [word for word in options.skip.split(",") if word]

    def keep(name: str) -> bool:
        return re.search(options.only, name) is not None

    kernels = {device: use["kind"] for device, use in torch_dcs_ops.info()["kernels"].items()}
    facts: dict[str, object] = {**environment(options.commit), "kernels": kernels}
    rows: list[Row] = []
    skipped: list[Skipped] = []
    if options.device in ("auto", "cpu"):
        from linear_cross_entropy import cpu as loss_cpu
        from log_bmm import cpu as log_bmm_cpu
        from returns import cpu as returns_cpu
        from scan import cpu as scan_cpu

        print(f"CPU: {facts['cpu']}, {options.threads} threads, torch {facts['torch']}")
        for on_cpu, title in (
            (scan_cpu, "scans; floor = torch.cumsum"),
            (loss_cpu, "linear_cross_entropy; floor = F.linear and F.cross_entropy"),
            (returns_cpu, "returns; floor = a Python loop of generalized advantage estimation"),
            (log_bmm_cpu, "log_bmm; floor = torch.logsumexp of all terms"),
        ):
            part = on_cpu.run(Deadline(options.budget), keep)
            print(title)
            print_rows(*part)
            rows += part[0]
            skipped += part[1]
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        from linear_cross_entropy import cuda as loss_cuda
        from log_bmm import cuda as log_bmm_cuda
        from returns import cuda as returns_cuda
        from returns import gae_compiled as gae_cuda
        from scan import cuda as scan_cuda
        from softmax import cuda as softmax_cuda

        print(f"GPU: {facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}")
        for name, suite, title in (
            ("scan", scan_cuda, "scans; floor = the same traffic as a copy"),
            ("softmax", softmax_cuda, "softmax; floor = the same traffic as a copy"),
            ("gae", gae_cuda, "generalized advantage estimation, compiled; floor = its traffic as a copy"),
            ("returns", returns_cuda, "returns, eager and compiled; floor = a copy of the same bytes"),
            ("linear_cross_entropy", loss_cuda, "linear_cross_entropy; floor = bare GEMMs: one, three with gradients"),
            ("log_bmm", log_bmm_cuda, "log_bmm in float32; floor = the unsafe product of exponentials"),
        ):
            if suites and name not in suites:
                continue
            part = suite.run(Deadline(options.budget), keep, skip, options.cell_seconds)
            print(title)
            print_rows(*part)
            rows += part[0]
            skipped += part[1]
    if options.output:
        write(options.output, report(facts, rows, skipped))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
