"""Processes of one group, one a GPU, and times and peaks that are the slowest's and the largest of them."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Function, Timing
from torch import Tensor

COLLECTIVES_IN = datetime.timedelta(seconds=60)
QUEUED_CYCLES = 4_000_000  # of a GPU's clock: 2 ms, in which the launches of what is timed are far ahead


@dataclass
class Here:
    """This process, and the small problems' `is_small`."""

    rank: int
    ranks: int
    device: str
    is_small: bool
    control: Any = None  # a group of gloo: what the processes tell each other beside what is timed

    def begin(self, rendezvous: str) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(self.rank)
        else:
            torch.set_num_threads(1)
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{rendezvous}", rank=self.rank, world_size=self.ranks, timeout=COLLECTIVES_IN
        )
        self.control = dist.new_group(backend="gloo", timeout=COLLECTIVES_IN)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Entry by entry, over the ranks."""
        every = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in every]

    def said(self, value: object) -> list[Any]:
        """What every rank says."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def same(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rank 0's, on all ranks."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)
        return tensors

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def medians(self, functions: Mapping[str, Function], turns: int = 12, *, queued: bool = True) -> dict[str, Timing]:
        """Of the slowest rank, one function after the other in every turn; two turns before these warm up.

        `queued`: the launches are made while the GPUs wait, as behind the layers of a model, and a collective lets all
        ranks begin at once. Otherwise a call begins on idle GPUs.
        """
        times: dict[str, list[float]] = {name: [] for name in functions}
        tick = torch.zeros(1, device=self.device)
        for turn in range(turns + 2):
            for name, function in functions.items():
                dist.barrier(group=self.control)
                taken = self._milliseconds(function, tick, queued)
                if turn >= 2:
                    times[name].append(taken)
        return {name: Timing(statistics.median(self.largest(of_rank)), len(of_rank)) for name, of_rank in times.items()}

    def _milliseconds(self, function: Function, tick: Tensor, queued: bool) -> float:
        if self.device != "cuda":
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if queued:
            torch.cuda._sleep(QUEUED_CYCLES)
        dist.all_reduce(tick)
        first.record()
        function()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def warm(self, seconds: float = 0.5) -> None:
        """So that the clocks are those of work."""
        if self.device != "cuda":
            return
        a = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.synchronize()

    def peak_mebibytes(self, function: Function, leaves: Sequence[Tensor]) -> float:
        """Beyond what is held before it, of a second call; the gradients of `leaves` are in it. The largest rank's."""
        function()
        if self.device != "cuda":
            return 0.0
        self.synchronize()
        for leaf in leaves:
            leaf.grad = None
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        self.synchronize()
        most = torch.cuda.max_memory_allocated()
        for leaf in leaves:
            leaf.grad = None
        return self.largest([(most - held) / 2**20])[0]


def own_slice(here: Here, size: int) -> slice:
    """Which of `size` things, in equal parts but for the last, are this rank's."""
    part = -(-size // here.ranks)
    return slice(min(here.rank * part, size), min((here.rank + 1) * part, size))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def run_ranks(rank: int, ranks: int, device: str, is_small: bool, folder: str, work: Callable[[Here], None]) -> None:
    """A process's whole life; NVLink's multicast is left off, which some containers do not have."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    here = Here(rank, ranks, device, is_small)
    here.begin(f"{folder}/rendezvous")
    here.warm()
    work(here)
    dist.destroy_process_group()
