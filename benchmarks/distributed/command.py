"""Shared-out vocabularies and time on several GPUs: `PYTHONPATH=benchmarks python -m distributed.command`.

Starts a process a GPU, which are one NCCL group; times are those of the slower rank, and every result is compared with
one GPU's or with float64 first. `--small` runs small problems, on a CPU as processes of gloo where there is no GPU, to
try the command itself. A part that takes too long, or whose processes end, is named and left out; the others go on.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Deadline, Row, Skipped, environment, print_rows, reason_of, report, write

from distributed import heads, scans
from distributed.parts import Check, Found
from distributed.ranks import Here, run_ranks

PARTS = {"scans": scans.run, "errors": heads.errors, "log_probs": heads.log_probs, "loss": heads.loss}
STARTS_IN = 60.0


def work(names: list[str], progress: str, here: Here) -> None:
    """The parts, one after the other; rank 0 writes what each has found."""
    for name in names:
        if here.rank == 0:
            _add(progress, {"part": name, "begun": True})
        torch.manual_seed(0)
        failure, found = "", Found()
        try:
            found = PARTS[name](here)
        except Exception as error:  # of one part; the others go on if the ranks still answer each other
            failure = reason_of(error)
            traceback.print_exc()
        failures = [said for said in here.said(failure) if said]
        if failures:
            found.skipped.append(Skipped(name, "", name, failures[0]))
        if here.rank == 0:
            _add(progress, {"part": name, **asdict(found)})
        if here.device == "cuda":
            torch.cuda.empty_cache()


def _add(progress: str, line: dict[str, Any]) -> None:
    with open(progress, "a") as file:
        file.write(json.dumps(line) + "\n")


class Team:
    """Processes that run the parts; `ended` are those that are done, `found` what they have found."""

    def __init__(self, names: list[str], ranks: int, device: str, is_small: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.progress = Path(self.folder.name) / "progress"
        context = multiprocessing.get_context("spawn")
        do = functools.partial(work, names, str(self.progress))
        self.processes = [
            context.Process(
                target=run_ranks, args=(rank, ranks, device, is_small, self.folder.name, do), daemon=True
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for process in self.processes:
            process.start()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.progress.read_text().splitlines()] if self.progress.exists() else []

    def wait(self, part_seconds: float, deadline: Deadline) -> tuple[list[dict[str, Any]], str]:
        """What was found, and why the part that was begun last has not ended, if so."""
        seen, since, why = 0, time.monotonic(), ""
        while not why and any(process.is_alive() for process in self.processes):
            time.sleep(0.05)
            lines = self.lines()
            if len(lines) != seen:
                seen, since = len(lines), time.monotonic()
            if deadline.left <= 0:
                why = "the time budget is used up"
            elif time.monotonic() - since > (part_seconds if seen else STARTS_IN):
                why = f"no end within {part_seconds if seen else STARTS_IN:.0f} s"
            elif codes := [p.exitcode for p in self.processes if not p.is_alive() and p.exitcode]:
                why = f"a process ended with exit code {codes[0]}"
        for process in self.processes:
            if why:
                process.kill()
            process.join()
        lines = self.lines()
        self.folder.cleanup()
        return lines, why


def collect(names: list[str], options: argparse.Namespace, device: str) -> Found:
    """Of all parts, by as many teams as it takes."""
    found, left, deadline = Found(), list(names), Deadline(options.budget)
    while left:
        lines, why = Team(left, options.ranks, device, options.small).wait(options.part_seconds, deadline)
        for line in lines:
            if "begun" in line:
                continue
            found.rows += [Row(**row) for row in line["rows"]]
            found.skipped += [Skipped(**one) for one in line["skipped"]]
            found.checks += [Check(**one) for one in line["checks"]]
            left.remove(line["part"])
        if left:
            first = left.pop(0)
            found.skipped.append(Skipped(first, "", first, why or "the processes ended"))
            if not lines or deadline.left <= 0:
                found.skipped += [Skipped(name, "", name, why) for name in left]
                break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, comma-separated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="small problems, on a CPU where there are too few GPUs")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all (default 150)")
    parser.add_argument("--part-seconds", type=float, default=60.0, help="seconds a part may take (default 60)")
    options = parser.parse_args()
    names = [name for name in options.parts.split(",") if name]
    if not set(names) <= set(PARTS):
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {options.parts}")
    has_gpus = torch.cuda.device_count() >= options.ranks
    if not has_gpus and not options.small:
        parser.error(f"{options.ranks} GPUs are needed, torch finds {torch.cuda.device_count()}; or --small")
    facts: dict[str, object] = {**environment(options.commit), "ranks": options.ranks}
    if has_gpus:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found = collect(names, options, "cuda" if has_gpus else "cpu")
    if options.output:
        checks = [{**asdict(check), "holds": check.holds} for check in found.checks]
        write(options.output, {**report(facts, found.rows, found.skipped), "checks": checks})
    for check in found.checks:
        print(f"{'ok  ' if check.holds else 'FAIL'} {check.name}: {check.value:.3g} <= {check.budget:.3g}")
    print_rows(found.rows, found.skipped)
    return 0 if all(check.holds for check in found.checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
