"""Timing and records shared by the benchmarks.

Everything that is compared is timed in one interleaved loop, so that a clock that drifts moves all of it alike; medians
throughout, on fresh random inputs (zeros draw less power, and a GPU runs them faster).
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Function = Callable[[], object]


@dataclass
class Row:
    """One measured time, and the time of the traffic it is compared with."""

    case: str
    dtype: str
    name: str
    milliseconds: float
    repetitions: int
    floor_milliseconds: float | None = None
    fraction: float | None = None  # floor / time: 1 is as fast as a copy of the same traffic
    target: float | None = None
    note: str = ""

    def compare(self, floor_milliseconds: float, target: float | None = None) -> Row:
        self.floor_milliseconds = floor_milliseconds
        self.fraction = floor_milliseconds / self.milliseconds
        self.target = target
        return self


@dataclass
class Skipped:
    case: str
    dtype: str
    name: str
    reason: str


@dataclass
class Timing:
    milliseconds: float
    repetitions: int


class Deadline:
    """A wall-clock limit; the cells that come after it are recorded as skipped."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def commit() -> str:
    """The git commit measured, "-dirty" where the tree differs from it, "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(measured_commit: str | None) -> dict[str, str | int | None]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        cpu = next(
            (line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), cpu
        )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": measured_commit or commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
    }


_TURN_SECONDS = 0.005


class CpuTimer:
    """Medians of wall times on the CPU."""

    def __init__(self, seconds: float = 1.0, most: int = 200) -> None:
        self.seconds, self.most = seconds, most
        # glibc gives freed memory back to the system beyond twice the largest block that it has seen freed: a process
        # that has freed a larger tensor than it times, as most have, does not fault in the same pages at every call.
        torch.empty(24 << 20, dtype=torch.uint8).fill_(0)

    def medians(self, functions: Mapping[str, Function]) -> dict[str, Timing]:
        for function in functions.values():
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        end = time.perf_counter() + self.seconds * len(functions)
        for repetition in range(self.most):
            if repetition >= 5 and time.perf_counter() > end:
                break
            for name, function in functions.items():
                # A short function has turns of several calls, the first of which is not timed: it finds the caches and
                # the allocator as it leaves them, not as the one before it does.
                calls = 1
                if times[name] and times[name][-1] < _TURN_SECONDS:
                    function()
                    calls = math.ceil(_TURN_SECONDS / times[name][-1])
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                times[name].append((time.perf_counter() - start) / calls)
        return {name: Timing(statistics.median(seconds) * 1e3, len(seconds)) for name, seconds in times.items()}


def call_microseconds(function: Function, calls: int = 1000, blocks: int = 15) -> float:
    """Median over blocks of the time of one call, for calls too short to time one by one."""
    for _ in range(calls):
        function()
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e6


class _Span:
    """A pair of CUDA events."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    @property
    def milliseconds(self) -> float:
        return self.start.elapsed_time(self.end)


class CudaTimer:
    """Medians of CUDA event times with a cold L2 cache, or per call of a replayed CUDA graph for tiny inputs."""

    GRAPH_CALLS = 20

    # The GPU sleeps this many seconds before a call that is timed, or LEAD times what Python takes to queue it.
    LEAST_SLEEP, LEAD = 0.5e-3, 2.0
    CYCLES_A_SECOND = 2e9  # of a fast GPU: on others the sleep is longer

    def __init__(self, seconds: float = 0.15, slow_milliseconds: float = 20.0, replays: int = 50) -> None:
        self.seconds, self.slow_milliseconds, self.replays = seconds, slow_milliseconds, replays
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device="cuda")

    def once(self, function: Function) -> float:
        """Milliseconds of one call after one to warm up (and compile)."""
        return self._warm_up(function)[0]

    def _warm_up(self, function: Function) -> tuple[float, float]:
        """Milliseconds of a call, and the seconds that the GPU is to sleep before others."""
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        sleep = self.LEAD * (time.perf_counter() - start)
        torch.cuda.synchronize()
        span = self._timed(function, sleep)
        torch.cuda.synchronize()
        return span.milliseconds, sleep

    def _timed(self, function: Function, sleep: float) -> _Span:
        self.flush.zero_()
        # The GPU is kept busy while Python queues the calls: what is timed is the GPU's work, not the launch latency. A
        # backward takes Python 0.6 ms and more on some machines.
        torch.cuda._sleep(int(self.CYCLES_A_SECOND * max(self.LEAST_SLEEP, sleep)))
        span = _Span()
        span.start.record()
        function()
        span.end.record()
        return span

    def medians(self, functions: Mapping[str, Function]) -> dict[str, Timing]:
        """Slow functions (a first time above `slow_milliseconds`) keep that one time."""
        result: dict[str, Timing] = {}
        fast: dict[str, Function] = {}
        sleeps: dict[str, float] = {}
        for name, function in functions.items():
            first, sleeps[name] = self._warm_up(function)
            if first > self.slow_milliseconds:
                result[name] = Timing(first, 1)
            else:
                fast[name] = function
        if not fast:
            return result
        rounds_start = time.perf_counter()
        spans: dict[str, list[_Span]] = {name: [] for name in fast}
        repetition = 0
        while repetition < 10 or (repetition < 100 and time.perf_counter() - rounds_start < self.seconds * len(fast)):
            for name, function in fast.items():
                spans[name].append(self._timed(function, sleeps[name]))
            torch.cuda.synchronize()
            repetition += 1
        for name in fast:
            result[name] = Timing(statistics.median(span.milliseconds for span in spans[name]), repetition)
        return {name: result[name] for name in functions}

    def graph_medians(self, functions: Mapping[str, Function]) -> dict[str, Timing]:
        """Per call, under replay of a CUDA graph of GRAPH_CALLS calls; inputs warm in the cache for all alike."""
        graphs = {}
        for name, function in functions.items():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(self.GRAPH_CALLS):
                    function()
            graphs[name] = graph
        spans: dict[str, list[_Span]] = {name: [] for name in graphs}
        for _ in range(self.replays):
            for name, graph in graphs.items():
                torch.cuda._sleep(100_000)
                span = _Span()
                span.start.record()
                graph.replay()
                span.end.record()
                spans[name].append(span)
        torch.cuda.synchronize()
        return {
            name: Timing(
                statistics.median(span.milliseconds for span in spans[name][5:]) / self.GRAPH_CALLS, self.replays - 5
            )
            for name in graphs
        }


def print_rows(rows: list[Row], skipped: list[Skipped]) -> None:
    """One line a row; "below" marks a fraction that misses its target."""
    width = max([21, *(len(row.case) for row in rows)]) + 1
    header = f"{'case':<{width}}{'dtype':<10}{'what':<34}{'ms':>11}{'floor ms':>11}{'fraction':>10}{'target':>8}"
    print(header)
    print("-" * len(header))
    case = ""
    for row in rows:
        if case and case != row.case + row.dtype:
            print()
        case = row.case + row.dtype
        floor = "" if row.floor_milliseconds is None else f"{row.floor_milliseconds:.4f}"
        fraction = "" if row.fraction is None else f"{row.fraction:.2f}"
        target = "" if row.target is None else f"{row.target:.2f}"
        below = row.fraction is not None and row.target is not None and row.fraction < row.target
        note = "  below" if below else ""
        note += f"  {row.note}" if row.note else ""
        print(
            f"{row.case:<{width}}{row.dtype:<10}{row.name:<34}{row.milliseconds:>11.4f}{floor:>11}{fraction:>10}{target:>8}{note}"
        )
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for skip in skipped:
        reasons.setdefault((skip.case, skip.dtype, skip.reason), []).append(skip.name)
    for (case, dtype, reason), names in reasons.items():
        print(f"skipped: {case} {dtype}: {reason}: {', '.join(names)}")


def report(environment_facts: Mapping[str, object], rows: list[Row], skipped: list[Skipped]) -> dict[str, object]:
    """The JSON that benchmarks/results/ keeps."""
    return {
        "environment": dict(environment_facts),
        "rows": [asdict(row) for row in rows],
        "skipped": [asdict(skip) for skip in skipped],
    }


def write(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"written: {path}")


def reason_of(error: BaseException) -> str:
    """Its first line, for a table."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
