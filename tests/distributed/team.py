"""A few processes of one group that run the cases they are sent, one after the other.

To start a process takes seconds, a case milliseconds: the processes stay for all tests of a session. Whatever does not
answer in time is ended, and its test fails. A process that crashes is named with its exit code and its stack. Tensors
travel as plain bytes: torch's own way shares their memory by a second connection, which can fail on its own.
Of gloo's processes a case's tensors are on the CPU, of NCCL's on a GPU each; what they return is on the CPU.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

STARTS_IN = 180.0
ANSWERS_IN = 120.0
COLLECTIVES_IN = 60.0


def device() -> str:
    """Where this process's tensors are."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def on_device(tree: Any) -> Any:
    """With all tensors in it there."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device()), tree)


def made_on_device(case: Callable[..., Any]) -> Callable[..., Any]:
    """A case whose new tensors are there, if it draws none by a generator."""

    @functools.wraps(case)
    def run(*args: Any) -> Any:
        with torch.device(device()) if device() != "cpu" else contextlib.nullcontext():
            return case(*args)

    return run


def _send(pipe: Connection, what: Any) -> None:
    pipe.send_bytes(pickle.dumps(pytree.tree_map_only(Tensor, Tensor.cpu, what)))


def _received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(rank: int, ranks: int, folder: str, commands: Connection, collectives_in: float, backend: str) -> None:
    with open(_crash_file(folder, rank), "w") as crashes:
        os.dup2(crashes.fileno(), 2)  # what C++ says before it aborts
        faulthandler.enable(crashes)
        faulthandler.register(signal.SIGUSR1, crashes)
        try:
            _serve_cases(rank, ranks, folder, commands, collectives_in, backend)
        except BaseException:
            traceback.print_exc(file=crashes)
            raise


def _crash_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"crash_of_rank_{rank}"


def _serve_cases(rank: int, ranks: int, folder: str, commands: Connection, collectives_in: float, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast, which some containers do not have
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=collectives_in),
    )
    _send(commands, (True, None))
    while (command := _received(commands)) is not None:
        case, args = command
        torch.manual_seed(0)
        try:
            _send(commands, (True, case(*args)))
        except Exception as error:
            _send(commands, (False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


def sentence_of(call: Callable[[], Any]) -> tuple[str, str]:
    """(type, words) of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "nothing was raised"


class Team:
    def __init__(self, ranks: int, collectives_in: float = COLLECTIVES_IN, backend: str = "gloo") -> None:
        self.backend, self.is_stopped = backend, False
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, self.folder.name, theirs, collectives_in, backend), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self._answers(STARTS_IN)

    def answers(self, case: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Every rank's (whether it returned, what, or its exception in words)."""
        for pipe in self.pipes:
            _send(pipe, (case, args))
        return self._answers(ANSWERS_IN)

    def answer_of_the_others(self, lost: int, seconds: float, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Of the ranks but one, which the case ends, within so many seconds."""
        for pipe in self.pipes:
            _send(pipe, (case, args))
        others = [pipe for rank, pipe in enumerate(self.pipes) if rank != lost]
        assert all(pipe.poll(seconds) for pipe in others), f"no answer within {seconds} s"
        return [self._answer(pipe) for pipe in others]

    def _answer(self, pipe: Connection) -> Any:
        try:
            return _received(pipe)
        except EOFError:
            return False, ("ended", "the process has ended")

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """What the ranks return; `case` is a function of a module, and its tensors are plain."""
        answers = self.answers(case, *args)
        failed = "\n".join(f"rank {rank}: {what[2]}" for rank, (ok, what) in enumerate(answers) if not ok)
        if failed and self.backend == "nccl":
            self.stop()  # a GPU may be stuck in a collective, or its context lost
        assert not failed, failed
        return [what for _, what in answers]

    def _answers(self, seconds: float) -> list[tuple[bool, Any]]:
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(seconds):
                said = self._whereabouts()
                self.stop()
                raise AssertionError(f"rank {rank} did not answer within {seconds} s:\n{said}")
            try:
                found.append(_received(pipe))
            except EOFError:
                raise AssertionError(self._end_of(rank)) from None
        return found

    def _whereabouts(self) -> str:
        """The stacks of all processes that are alive."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        files = [_crash_file(self.folder.name, rank) for rank in range(len(self.processes))]
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(files) if file.exists())

    def _end_of(self, rank: int) -> str:
        """How a process that nobody asked to end has ended."""
        process, file = self.processes[rank], _crash_file(self.folder.name, rank)
        process.join(5)
        said = file.read_text() if file.exists() else ""
        self.stop()
        return f"rank {rank} ended with exit code {process.exitcode}:\n{said}"

    def stop(self) -> None:
        if self.is_stopped:
            return
        self.is_stopped = True
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # of a process that has ended
                _send(pipe, None)
        self.stop()
