"""The command line: ``python -m torch_dcs_ops {info,demo,bench}``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_dcs_ops.cli import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_dcs_ops", description="Discounted scans and fused losses for PyTorch."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{info,demo,bench}")
    info = subparsers.add_parser("info", help="versions, the kernels in use and why, what is missing and how to get it")
    info.add_argument("--json", action="store_true", help="print one JSON object instead")
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
    return commands.info(as_json=options.json)
