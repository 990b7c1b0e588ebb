"""What each subcommand does; everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def info(*, as_json: bool) -> int:
    """Print ``torch_dcs_ops.info()``."""
    import torch_dcs_ops

    facts = torch_dcs_ops.info()
    print(json.dumps(facts, indent=2, default=str) if as_json else facts)
    return 0


def plan(shape: str, dtype: str, *, as_json: bool, **options: Any) -> int:
    """Print which CUDA kernel a scan takes; ValueError: a sentence about an argument."""
    from torch_dcs_ops import _plan

    facts = _plan.scan_plan(shape, dtype, **options)
    print(json.dumps(facts, indent=2) if as_json else facts)
    return 0


_DEMO_NEEDS = ("gymnasium", "matplotlib", "numpy", "rich", "tqdm")
_DEMO_PARTS = {
    "ppo": "ppo",
    "reinforce": "reinforce_cartpole",
    "language-model": "language_model",
    "crf-tagger": "crf_tagger",
    "grpo": "grpo",
    "distil": "distil",
}
# Run by their names only. PPO solves CartPole within 150000 steps, REINFORCE falls short of that after 819200.
_DEMO_ALONE = ("reinforce", "grpo", "distil")


def demo(arguments: Sequence[str]) -> int:
    """Run parts of the demo, examples/ installed as torch_dcs_ops.examples: one with its own options, or all but
    _DEMO_ALONE.
    """
    if arguments and arguments[0] in _DEMO_PARTS:
        return _lacks_demo_packages() or _run_example(arguments[0], arguments[1:])
    parts = f"{{{','.join(_DEMO_PARTS)}}}"
    parser = argparse.ArgumentParser(
        prog="python -m torch_dcs_ops demo",
        usage=f"%(prog)s [-h] [--seed SEED] | {parts} [options of the part]",
        description="Train PPO on CartPole-v1, then a language model and a CRF on the Python standard library. Needs "
        f"{', '.join(_DEMO_NEEDS)}: pip install 'torch_dcs_ops[demo]'.",
        epilog="reinforce, REINFORCE on CartPole-v1, grpo, sums of digits learned from rewards, and distil, a language "
        "model from a larger one, run only by their names. `demo ppo --help` and so on list the options of a part.",
    )
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args(arguments).seed
    if status := _lacks_demo_packages():
        return status
    return max(_run_example(part, ["--seed", str(seed)]) for part in _DEMO_PARTS if part not in _DEMO_ALONE)


def _lacks_demo_packages() -> int:
    """0, or 1 and a line that names what is missing."""
    missing = [name for name in _DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"demo: {', '.join(missing)} missing; pip install 'torch_dcs_ops[demo]'", file=sys.stderr)
    return int(bool(missing))


def _run_example(part: str, arguments: Sequence[str]) -> int:
    example = importlib.import_module(f"torch_dcs_ops.examples.{_DEMO_PARTS[part]}")
    return int(example.main(list(arguments)))


def bench(arguments: Sequence[str]) -> int:
    """Run benchmarks/run.py of the checkout this package is installed from, or of the working directory."""
    script = find_benchmarks()
    if script is None:
        print("bench: benchmarks/ is not installed; run this in a source checkout, or `make bench`", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode


def find_benchmarks() -> Path | None:
    """benchmarks/run.py of the source checkout, or None where there is none."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        script = root / "benchmarks" / "run.py"
        if script.is_file() and (root / "csrc" / "CMakeLists.txt").is_file():
            return script
    return None
