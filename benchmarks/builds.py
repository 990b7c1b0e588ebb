"""Two builds of the package beside each other on one GPU: `python benchmarks/builds.py BEFORE AFTER`.

BEFORE and AFTER are folders that hold an installed package (`pip install --target FOLDER wheel`). Each build runs in a
process of its own. The two take turns case by case, some rounds over, so that a clock that drifts moves both alike; a
case counts with its fastest round. Only public functions are called, with arguments that every version takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import CudaTimer, Function, environment
from torch import Tensor

Case = Callable[[Any], Function]
WORKER = "worker"
F32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16


def random(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def gates(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    return torch.empty(shape, device="cuda").uniform_(0.9, 1.0).to(dtype).requires_grad_(grad)


def scan(shape: tuple[int, ...], dim: int, dtype: torch.dtype, kind: str, backward: bool) -> Case:
    def make(package: Any) -> Function:
        x = random(*shape, dtype=dtype, grad=backward)
        gamma: Any = gates(*shape, dtype=dtype, grad=backward) if kind == "step" else 0.99
        if not backward:
            return lambda: package.discounted_cumsum(x, gamma, dim=dim)
        grad = random(*shape, dtype=dtype)
        inputs = [x, gamma] if kind == "step" else [x]
        return lambda: torch.autograd.grad(package.discounted_cumsum(x, gamma, dim=dim), inputs, grad)

    return make


def rollout(name: str, shape: tuple[int, int], dim: int, dtype: torch.dtype) -> Case:
    def make(package: Any) -> Function:
        rewards, values, ratios = (random(*shape, dtype=dtype) for _ in range(3))
        following = random(*shape, dtype=dtype)
        ratios = ratios.abs()
        ends = torch.rand(shape, device="cuda") < 0.01
        bootstrap = random(shape[1 - dim], dtype=dtype)
        common = {"terminated": ends, "time_dim": dim}
        f = package.returns
        return {
            "gae": lambda: f.gae(rewards, values, bootstrap_value=bootstrap, **common),
            "gae next": lambda: f.gae(rewards, values, next_values=following, **common),
            "td_lambda": lambda: f.td_lambda_returns(rewards, next_values=following, **common),
            "vtrace": lambda: f.vtrace(rewards, values, ratios, bootstrap_value=bootstrap, **common),
            "n_step": lambda: f.n_step_returns(rewards, next_values=following, n=5, **common),
            "returns": lambda: f.discounted_returns(rewards, 0.99, **common),
        }[name]

    return make


def softmax(shape: tuple[int, ...], dim: int, dtype: torch.dtype, backward: bool) -> Case:
    def make(package: Any) -> Function:
        x = random(*shape, dtype=dtype, grad=backward)
        if not backward:
            return lambda: package.softmax(x, dim)
        grad = random(*shape, dtype=dtype)
        y = package.softmax(x, dim)
        return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)

    return make


def loss(rows: int, features: int, classes: int, dtype: torch.dtype, backward: bool) -> Case:
    def make(package: Any) -> Function:
        x = random(rows, features, dtype=dtype, grad=backward)
        weight = (random(classes, features) / features**0.5).to(dtype).requires_grad_(backward)
        target = torch.randint(classes, (rows,), device="cuda")
        if not backward:
            return lambda: package.linear_cross_entropy(x, weight, target)
        return lambda: torch.autograd.grad(package.linear_cross_entropy(x, weight, target), (x, weight))

    return make


def product(name: str, batch: int, size: int, dtype: torch.dtype, backward: bool) -> Case:
    def make(package: Any) -> Function:
        a, b = (random(batch, size, size, dtype=dtype, grad=backward) for _ in range(2))
        # max_bmm gives values and where they are from.
        function = package.log_bmm if name == "log_bmm" else lambda a, b: package.max_bmm(a, b)[0]
        if not backward:
            return lambda: function(a, b)
        grad = random(batch, size, size, dtype=dtype)
        return lambda: torch.autograd.grad(function(a, b), (a, b), grad)

    return make


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(name: str, dtype: torch.dtype, case: Case, backward: bool = False) -> None:
        found[f"{name} {str(dtype).removeprefix('torch.')}" + (" forward + backward" if backward else "")] = case

    rows = ((4096, 4096), (65_536, 256), (256, 65_536), (16, 1_048_576), (1, 20_000_000), (12_345, 1234))
    for shape, dim in [(shape, 1) for shape in rows] + [((128, 65_536), 0), ((1024, 65_536), 0), ((1024, 4096), 0)]:
        for dtype in (F32, BF16):
            for kind in ("number", "step"):
                for backward in (False, True):
                    name = f"scan {shape[0]}x{shape[1]} dim {dim} {kind}"
                    add(name, dtype, scan(shape, dim, dtype, kind, backward), backward)
    rollouts = [
        ((1024, 4096), 0), ((128, 65_536), 0), ((2000, 12_345), 0), ((64, 100_003), 0), ((4096, 1024), 1),
        ((65_536, 128), 1), ((16, 1_048_576), 1), ((33, 333), 1),
    ]  # fmt: skip
    for (a, b), dim in rollouts:
        for dtype in (F32, BF16):
            add(f"gae {a}x{b} dim {dim}", dtype, rollout("gae", (a, b), dim, dtype))
    for kind in ("gae next", "td_lambda", "vtrace", "n_step", "returns"):
        for (a, b), dim in (((1024, 4096), 0), ((4096, 1024), 1)):
            add(f"{kind} {a}x{b} dim {dim}", F32, rollout(kind, (a, b), dim, F32))
    lines: list[tuple[tuple[int, ...], int, torch.dtype]] = [
        ((4096, 8192), -1, BF16), ((16_384, 1000), -1, F32), ((65_536, 130), -1, BF16), ((2048, 2048, 3), 1, F32),
        ((8192, 4096), 0, BF16), ((64, 1_000_003), -1, F32), ((1024, 65_536), -1, HALF),
    ]  # fmt: skip
    for sizes, dim, dtype in lines:
        for backward in (False, True):
            add(f"softmax {'x'.join(map(str, sizes))} dim {dim}", dtype, softmax(sizes, dim, dtype, backward), backward)
    for n, d, v, dtype in (
        (8192, 4096, 128_256, BF16), (2048, 1024, 32_000, HALF), (4096, 2048, 50_304, BF16), (4096, 1024, 50_304, F32),
    ):  # fmt: skip
        for backward in (False, True):
            add(f"linear_cross_entropy {n}x{d}x{v}", dtype, loss(n, d, v, dtype, backward), backward)
    for batch, size, dtype in ((8, 1024, F32), (64, 256, F32), (8, 777, F32), (8, 1024, BF16)):
        for name in ("log_bmm", "max_bmm"):
            for backward in (False, True):
                add(f"{name} {batch}x{size}", dtype, product(name, batch, size, dtype, backward), backward)
    return found


def work() -> None:
    """Times the cases whose names come by standard input, one a line."""
    import torch_dcs_ops

    found = cases()
    timer = CudaTimer(seconds=0.05, slow_milliseconds=60.0)
    print(torch_dcs_ops.__file__, flush=True)
    for line in sys.stdin:
        name = line.strip()
        torch.manual_seed(0)
        timing = timer.medians({name: found[name](torch_dcs_ops)})[name]
        torch.cuda.empty_cache()
        print(timing.milliseconds, flush=True)


@dataclass
class Ratio:
    case: str
    before_ms: list[float] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)
    ratio: float = 0.0


class Build:
    def __init__(self, site: Path) -> None:
        path = os.pathsep.join([str(site.resolve()), str(Path(__file__).parent)])
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, WORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        loaded = self._line()
        if site.resolve() not in Path(loaded).parents:
            raise SystemExit(f"{site} holds no torch_dcs_ops: {loaded} was imported")

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a build's process has ended; its error is above")
        return line.strip()

    def milliseconds(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self._line())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of the older build")
    parser.add_argument("after", type=Path, help="folder of the newer build")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case is timed (default 3)")
    parser.add_argument("--before-commit", default="")
    parser.add_argument("--commit", help="of the newer build, where git cannot tell")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    builds = Build(options.before), Build(options.after)
    rows = [Ratio(name) for name in cases()]
    for number in range(options.rounds):
        for row in rows:
            turns = [(builds[0], row.before_ms), (builds[1], row.after_ms)]
            # The one that was second goes first in the next round.
            for build, times in turns if number % 2 == 0 else reversed(turns):
                times.append(build.milliseconds(row.case))
    for row in rows:
        row.ratio = min(row.after_ms) / min(row.before_ms)
    rows.sort(key=lambda row: -row.ratio)
    for row in rows:
        print(f"{row.ratio:.3f} {min(row.before_ms):.4f} to {min(row.after_ms):.4f} ms {row.case}")
    mean = statistics.geometric_mean(row.ratio for row in rows)
    print(f"{len(rows)} cases, geometric mean {mean:.3f}, above 1.02: {sum(row.ratio > 1.02 for row in rows)}")
    if options.output:
        facts = {**environment(options.commit), "before": options.before_commit, "note": __doc__}
        text = json.dumps({"environment": facts, "rows": [asdict(row) for row in rows]}, indent=1)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    work() if sys.argv[1:] == [WORKER] else main()
