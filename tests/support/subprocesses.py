"""Tests that start a Python of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcs_ops


def environment(**changes: str) -> dict[str, str]:
    """This process's, so that the other one imports the very package that is tested, whatever its working directory."""
    package = str(Path(torch_dcs_ops.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, **changes}


PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib")


def run_tests(file: str, *arguments: str, **changes: str) -> None:
    """pytest over a test file, in another environment; at least one of its tests has to run, and all to pass."""
    # No plugin that is installed beside pytest is needed, and they double the time that a small file takes.
    variables = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **changes)
    variables.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*PYTEST, "-o", "addopts=", file, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        cwd=Path(file).parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def run_with_instruction_set(isa: str, file: str, *arguments: str) -> None:
    """`run_tests` with the CPU kernels of `isa`, unless this process has them. What is slow is left to test-cpus."""
    if os.environ.get("TORCH_DCS_CPU_ISA"):
        pytest.skip("runs inside itself")
    if torch.backends.cpu.get_cpu_capability() == isa.upper():
        pytest.skip(f"{isa} is what this process runs")
    run_tests(file, *arguments, "-m", "not slow", TORCH_DCS_CPU_ISA=isa)


# Inductor starts no processes of its own that compile: each takes eight seconds to import torch.
COMPILES_ITSELF = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Beside other tests on two cores, the threads of a product of 128 by 64 by 256 wait four times as long as they compute.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run_in_the_interpreter(file: str, *arguments: str) -> None:
    """`run_tests` with Triton's interpreter."""
    variables = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning", **COMPILES_ITSELF, **ONE_THREAD}
    run_tests(file, *arguments, **variables)


def rare(*values: Any) -> Any:
    """A parameter set which adds to others only what `make test` can do without: `slow` where there is no GPU.

    There the interpreter takes a thousand times as long as a GPU, which runs all of them.
    """
    return pytest.param(*values, marks=() if torch.cuda.is_available() else pytest.mark.slow)
