"""Times problems: ours, the floor and torch's in one run, with the timers of the harness."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass

import torch
from harness import CpuTimer, CudaTimer, Function, Row, Skipped, Timing, reason_of

from survey.draw import Problem
from survey.work import Data, Lacking, functions, work_of

# Up to here, on a GPU, replays of a CUDA graph with warm caches; above, single calls with a cold one.
GRAPH_ELEMENTS = 2_000_000
# A call that takes longer is not replayed: there are 20 calls in a graph, and 20 replays.
GRAPH_MILLISECONDS = 0.3


@dataclass(frozen=True)
class Settings:
    device: str
    compiled: bool = False
    peers: bool = True


class Clock:
    """About 0.1 s a problem."""

    def __init__(self, device: str) -> None:
        self.cuda = CudaTimer(seconds=0.01, slow_milliseconds=10.0, replays=20) if device == "cuda" else None

    def medians(self, calls: Mapping[str, Function], is_small: bool) -> tuple[dict[str, Timing], set[str]]:
        """The times, and which of them are of replays."""
        if self.cuda is None:
            return CpuTimer(seconds=0.03, most=50).medians(calls), set()
        if is_small:
            firsts = {name: self.cuda.once(call) for name, call in calls.items()}
            short = {name: calls[name] for name, first in firsts.items() if first <= GRAPH_MILLISECONDS}
            long = {name: calls[name] for name in calls if name not in short}
            # What cannot be captured is timed by single calls, as all of its problem is.
            with contextlib.suppress(RuntimeError):
                return self.cuda.graph_medians(short) | self.cuda.medians(long), set(short)
            torch.cuda.synchronize()
        return self.cuda.medians(calls), set()


def ready(problem: Problem, settings: Settings, skipped: list[Skipped]) -> tuple[dict[str, Function], str, int] | None:
    """The functions after a first call each, the name of the floor and how many times it counts."""
    if settings.compiled or (problem.family == "linear_cross_entropy" and settings.device == "cuda"):
        torch._dynamo.reset()
    calls: dict[str, Function] = {}

    def skip(name: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, Lacking) else reason_of(error)
        skipped.append(Skipped(problem.name, problem.dtype, name, reason))

    try:
        data = Data(problem, settings.device)
        work = work_of(problem, data, settings.compiled)
    except Exception as error:  # an older build, too little memory: a line in the report
        skip("all", error)
        return None
    for name, make in functions(problem, work, data, settings.compiled).items():
        if name == "torch" and not settings.peers:
            continue
        try:
            call = make()
            call()
            if settings.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            skip(name, error)
            if name != "torch":
                return None
        else:
            calls[name] = call
    return calls, work.floor_name, work.floor_calls


def release() -> None:
    """Closures, and what a compiler holds, may be circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(problem: Problem, settings: Settings, clock: Clock) -> tuple[list[Row], list[Skipped]]:
    """A row for each function; none where ours cannot be had."""
    skipped: list[Skipped] = []
    made = ready(problem, settings, skipped)
    if made is None:
        return [], skipped
    calls, floor_name, floor_calls = made
    is_small = problem.family != "linear_cross_entropy" and problem.elements <= GRAPH_ELEMENTS
    try:
        timings, replayed = clock.medians(calls, is_small)
    except Exception as error:
        return [], [*skipped, Skipped(problem.name, problem.dtype, "all", reason_of(error))]
    floor = timings[floor_name].milliseconds * floor_calls
    rows = []
    for name, timing in timings.items():
        row = Row(problem.name, problem.dtype, name, timing.milliseconds, timing.repetitions)
        row.note = "CUDA graph" if name in replayed else ""
        rows.append(row.compare(floor))
    return rows, skipped


def _compile_alone() -> None:
    """Inductor starts no processes of its own in each of these. It has not been imported yet."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(job: tuple[Problem, Settings]) -> None:
    """In a process of its own: Triton and Inductor keep what they compile in caches on disk."""
    ready(*job, [])
    release()


def compile_ahead(problems: Sequence[Problem], settings: Settings, workers: int, seconds: float) -> None:
    """One after the other, at seconds each, they take longer than the measurements. What is late is not begun."""
    workers = min(len(problems), workers, os.cpu_count() or 1)
    if workers > 1:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _compile_alone) as pool:
            wait([pool.submit(_compile, (problem, settings)) for problem in problems], seconds)
            pool.shutdown(cancel_futures=True)
