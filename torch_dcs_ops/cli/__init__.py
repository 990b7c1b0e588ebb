"""The command line: ``python -m torch_dcs_ops {info,demo,bench}``, and ``--version``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_dcs_ops import __version__
from torch_dcs_ops.cli import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as `info | head` has. What Python would still write at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torch_dcs_ops", description="Discounted scans and fused losses for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"torch_dcs_ops {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{info,demo,bench}")
    info = subparsers.add_parser("info", help="versions, the kernels in use and why, what is missing and how to get it")
    info.add_argument("--json", action="store_true", help="print one JSON object instead")
    _add_plan(info)
    # demo and bench have options of their own; -h reaches them too.
    for name, text in (
        ("demo", "train PPO on CartPole-v1, a language model and a CRF tagger; one part alone: see `demo --help`"),
        ("bench", "run benchmarks/ of a source checkout; options are passed on, see `bench --help`"),
    ):
        subparsers.add_parser(name, help=text, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        return commands.demo(rest)
    if options.command == "bench":
        return commands.bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    chosen = {name: value for name in _PLAN_OPTIONS if (value := getattr(options, name)) is not None}
    if options.plan is None:
        if chosen:
            info.error(f"--{next(iter(chosen))} says what --plan is asked for: --plan SHAPE DTYPE is missing")
        return commands.info(as_json=options.json)
    try:
        return commands.plan(*options.plan, as_json=options.json, **chosen)
    except ValueError as error:
        info.error(str(error))


_PLAN_OPTIONS = ("dim", "gamma", "reset", "initial", "reverse", "window")


def _add_plan(info: argparse.ArgumentParser) -> None:
    group = info.add_argument_group(
        "plan",
        "which CUDA kernel a discounted scan of a contiguous tensor takes, how it is launched, and why: on the current "
        "GPU, or on an H200 where there is none",
    )
    group.add_argument("--plan", nargs=2, metavar=("SHAPE", "DTYPE"), help="such as 4096x4096 float32")
    group.add_argument("--dim", type=int, help="along which it is scanned; default -1")
    group.add_argument("--gamma", choices=("number", "row", "step"), help="default number, of at most 1")
    for name, text in (
        ("reset", "with resets"),
        ("initial", "with initial values"),
        ("reverse", "from the last step back"),
    ):
        group.add_argument(f"--{name}", action="store_true", default=None, help=text)
    group.add_argument("--window", type=int, help="of so many steps")
