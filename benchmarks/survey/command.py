"""`python benchmarks/run.py survey`: random problems beside a copy of their bytes and torch's own op."""

from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import Deadline, Row, Skipped, environment, write

from survey.draw import FAMILIES, LIMITS, Problem, draw_all
from survey.measure import Clock, Settings, compile_ahead, measure, release
from survey.report import content, print_report

FAMILY_NAMES = ", ".join(FAMILIES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py survey", description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="problems a family (default 40)")
    parser.add_argument("--families", default=",".join(FAMILIES), help=f"comma-separated, of {FAMILY_NAMES}")
    parser.add_argument("--passes", choices=("forward", "backward", "both"), default="both",
                        help="backward: forward and backward; both: as drawn")  # fmt: skip
    parser.add_argument("--backend", choices=("native", "triton", "reference"), help="default: the package's choice")
    parser.add_argument("--compiled", action="store_true", help='ours under torch.compile(backend="dcs")')
    parser.add_argument("--only", default="", help="comma-separated problems, such as 17 or scan/17; overrides --count")
    parser.add_argument("--match", default="", help="regular expression: problems whose line has it, such as float64")
    parser.add_argument("--elements", type=float, nargs=2, metavar=("LEAST", "MOST"), help="range of sizes")
    parser.add_argument("--skip", choices=("torch",), help="torch: do not time torch's ops")
    parser.add_argument("--list", action="store_true", help="print the problems and measure nothing")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds; problems after it are skipped")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile ahead on a GPU (default 8)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--picture", type=Path, help="image to draw, such as survey.svg; needs matplotlib")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    options.families = [name for name in options.families.split(",") if name]
    if not set(options.families) <= set(FAMILIES):
        parser.error(f"--families must be among {FAMILY_NAMES}, got {','.join(options.families)}")
    options.only = [name for name in options.only.split(",") if name]
    for name in options.only:
        family, _, index = name.rpartition("/")
        if family not in ("", *options.families) or not index.isdecimal():
            parser.error(f"--only must have problems such as 17 or scan/17, of --families, got {name}")
    if options.elements and not 1 <= options.elements[0] <= options.elements[1]:
        parser.error("--elements must be at least 1 and in order, got {:g} {:g}".format(*options.elements))
    try:
        re.compile(options.match)
    except re.error as error:
        parser.error(f"--match must be a regular expression, got {options.match}: {error}")
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda, but torch finds no CUDA device")
    return options


def problems_of(options: argparse.Namespace) -> list[Problem]:
    limits = LIMITS[options.device]
    if options.elements:
        limits = limits._replace(elements=tuple(options.elements))
    only = options.only
    indices = sorted({int(name.rpartition("/")[2]) for name in only}) if only else range(options.count)
    drawn = draw_all(options.seed, options.families, indices, limits, options.passes)
    kept = [problem for problem in drawn if not only or problem.name in only or str(problem.index) in only]
    return [problem for problem in kept if re.search(options.match, str(problem))]


def repetition(options: argparse.Namespace) -> str:
    """The command without what chooses problems: every option that changes a problem or how it is run."""
    words = ["python benchmarks/run.py survey", f"--device {options.device} --seed {options.seed}"]
    words += [f"--passes {options.passes}"] if options.passes != "both" else []
    words += [f"--backend {options.backend}"] if options.backend else []
    words += ["--compiled"] if options.compiled else []
    words += [f"--elements {options.elements[0]:g} {options.elements[1]:g}"] if options.elements else []
    words += [f"--threads {options.threads}"] if options.device == "cpu" else []
    return " ".join(words)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    problems = problems_of(options)
    if options.list:
        print("\n".join(map(str, problems)))
        return 0
    if options.backend:
        os.environ["TORCH_DCS_KERNELS"] = options.backend
    import torch_dcs_ops

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    kernels = {device: use["kind"] for device, use in torch_dcs_ops.info()["kernels"].items()}
    facts = {**environment(options.commit), "kernels": kernels}
    settings = Settings(options.device, options.compiled, options.skip is None)
    print(f"{facts['gpu'] if options.device == 'cuda' else facts['cpu']}, torch {facts['torch']}, "
          f"commit {facts['commit']}, kernels {kernels[options.device]}, seed {options.seed}, "
          f"{len(problems)} problems")  # fmt: skip
    rows, skipped = run(problems, settings, Deadline(options.budget), options.workers)
    command = shlex.join(arguments)
    for file in filter(None, (options.output, options.picture)):  # folders are this machine's own
        command = command.replace(str(file), file.name)
    chosen = {"command": command, "seed": options.seed, "passes": options.passes}
    record = content(facts, chosen, problems, rows, skipped)
    print_report(record, repetition(options))
    if options.output:
        write(options.output, record)
    if options.picture:
        from survey.picture import draw_record

        draw_record(record, options.picture)
    return 0


def run(
    problems: Sequence[Problem], settings: Settings, deadline: Deadline, workers: int
) -> tuple[list[Row], list[Skipped]]:
    if settings.device == "cuda":
        is_triton = os.environ.get("TORCH_DCS_KERNELS") == "triton"
        peer = {"linear_cross_entropy"} if settings.peers else set()
        everything = settings.compiled or is_triton
        compile_ahead([p for p in problems if everything or p.family in peer], settings, workers, deadline.left / 2)
    clock = Clock(settings.device)
    # What is there already is not searched for garbage after every problem.
    gc.freeze()
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for problem in problems:
        if deadline.left <= 0:
            skipped.append(Skipped(problem.name, problem.dtype, "all", "the time budget is used up"))
            continue
        part = measure(problem, settings, clock)
        release()
        rows += part[0]
        skipped += part[1]
        times = ", ".join(f"{row.name} {row.milliseconds:.4f} ms" for row in part[0]) or "skipped"
        print(f"{f'{part[0][0].fraction:.3f}' if part[0] else '-':>7}  {problem}  ({times})", flush=True)
    return rows, skipped
