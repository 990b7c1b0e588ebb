"""Check a wheel as a user meets it: in an empty environment for each Python and torch, with nothing else installed.

    python .ci/check_wheel.py dist/torch_dcs_ops-*.whl
    python .ci/check_wheel.py dist/torch_dcs_ops-*.whl --python 3.11 --torch 2.13.0

A Python that is not installed is fetched by uv, where there is one; one that cannot be had is named and left out. The
environments, 1 GB each with a torch without CUDA, are made one after another in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "2.15.0")

# What is run in the environment, by its Python: statements that end in an error, or do not.
USE = """
import torch
from torch.nn import functional as F
import torch_dcs_ops as dcs

kernels = dcs.info()["kernels"]["cpu"]
assert kernels["kind"] == "native", kernels
x, w, y = torch.randn(9, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True), torch.randint(11, (9,))
results = []
for loss in (dcs.linear_cross_entropy(x, w, y), F.cross_entropy(x @ w.T, y)):
    results.append([loss, *torch.autograd.grad(loss, (x, w))])
torch.testing.assert_close(*results)
steps = torch.randn(3, 5, dtype=torch.float64)
powers = 0.5 ** torch.arange(5, dtype=torch.float64)
sums = torch.stack([steps[:, t:] @ powers[: 5 - t] for t in range(5)], 1)
torch.testing.assert_close(dcs.discounted_cumsum(steps, 0.5), sums)
a, b = torch.randn(2, 4, 3), torch.randn(2, 3, 5)
torch.testing.assert_close(dcs.log_bmm(a, b), torch.logsumexp(a[..., None] + b[:, None], 2))
found = dcs.compile.explain(lambda x, y: F.cross_entropy(F.linear(x, w), y), minimum_logits=0)(x, y)
assert found.fused and not found.left_alone, str(found)
"""


def checks(python: str, room: Path) -> str | None:
    """What is wrong with the package that is installed for `python`; None: nothing."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH"))}

    def run(*arguments: str, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
        done = subprocess.run(
            [python, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=room, env=variables, check=False
        )
        return done.returncode, done.stdout, done.stderr

    status, _, said = run("-c", "import torch_dcs_ops")
    if status or said:
        return f"the import says {said}"
    for arguments, word in ((["--version"], "torch_dcs_ops "), (["info"], "C++"), (["demo", "--help"], "usage:")):
        status, printed, said = run("-m", "torch_dcs_ops", *arguments)
        if status or said or word not in printed:
            return f"{' '.join(arguments)} ends with {status} and prints {printed}{said}"
    reading, writing = os.pipe()
    os.close(reading)
    status, _, said = run("-m", "torch_dcs_ops", "info", stdout=writing)
    os.close(writing)
    if status or said:
        return f"info | head ends with {status}: {said}"
    status, _, said = run("-W", "ignore", "-c", USE)
    return f"its use ends with {status}: {said}" if status else None


def find_python(version: str) -> str | None:
    """A Python of that version, or at that path: installed (a stand-in of pyenv's may not run), or fetched by uv."""
    found = shutil.which(version if "/" in version else f"python{version}")
    if found is not None and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        return found
    if shutil.which("uv") is None:
        return None
    if subprocess.run(["uv", "python", "install", "--quiet", version], capture_output=True, check=False).returncode:
        return None
    return subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=True).stdout.strip()


def check(wheel: Path, version: str, torch: str, room: Path) -> str | None:
    python = find_python(version)
    if python is None:
        return "left out, this Python cannot be had"
    environment = room / "environment"
    subprocess.run([python, "-m", "venv", "--clear", str(environment)], check=True)
    inside = str(environment / "bin" / "python")
    command = [inside, "-m", "pip", "install", "--quiet", f"torch=={torch}", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if f"No matching distribution found for torch=={torch}" in done.stderr:
        return "left out, there is no such torch for this Python"
    return f"pip: {done.stderr.strip()}" if done.returncode else checks(inside, room)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"versions or paths; default {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"default {' '.join(TORCHES)}")
    options = parser.parse_args()
    results: list[str | None] = []
    with tempfile.TemporaryDirectory() as room:
        for version in options.python:
            for torch in options.torch:
                results.append(check(options.wheel.resolve(), version, torch, Path(room)))
                print(f"Python {version}, torch {torch}: {results[-1] or 'works'}", flush=True)
    works = results.count(None)
    left_out = sum(result is not None and result.startswith("left out") for result in results)
    print(f"{works} of {len(results)} work, {left_out} left out")
    return int(works == 0 or works + left_out < len(results))


if __name__ == "__main__":
    sys.exit(main())
