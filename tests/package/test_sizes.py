"""What a reader can hold: files of 400 lines, functions of 100, parameter lists of 12, and which may be longer."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="not a source checkout")

LINES, FUNCTION_LINES, PARAMETERS = 400, 100, 12
PYTHON = ("torch_dcs_ops", "triton_kernels", "tests", "benchmarks", "examples")
CSRC = ("*.h", "*.cpp", "*.cuh", "*.cu", "*.in")

# The scan's CUDA kernels are to be replaced as a whole.
LONG_FILES = ("csrc/cuda/scan/long_rows/bulk_stream.cuh",)
# Functions with more parameters than PARAMETERS, other than @triton.jit ones, whose arguments are a kernel's.
SIGNATURES = {
    "torch_dcs_ops/nn.py:__init__": "public: the options of linear_cross_entropy",
    "torch_dcs_ops/ops/linear_cross_entropy/loss.py:linear_cross_entropy": "public",
    "torch_dcs_ops/ops/linear_cross_entropy/kl_div.py:linear_kl_div": "public",
    "torch_dcs_ops/ops/linear_cross_entropy/log_probs.py:linear_log_probs": "public",
    "torch_dcs_ops/ops/linear_cross_entropy/policy_loss.py:linear_policy_loss": "public",
    "torch_dcs_ops/returns.py:vtrace": "public",
    "torch_dcs_ops/distributed/linear_cross_entropy/loss.py:vocab_parallel_linear_cross_entropy": "public",
    "torch_dcs_ops/distributed/linear_cross_entropy/kl_div.py:vocab_parallel_linear_kl_div": "public",
    "torch_dcs_ops/distributed/linear_cross_entropy/log_probs.py:vocab_parallel_linear_log_probs": "public",
    "tests/linear_cross_entropy/oracle.py:oracle": "stands for linear_cross_entropy",
    "tests/linear_cross_entropy/filter/oracle.py:dense": "stands for linear_cross_entropy",
}


def python_files() -> Iterator[Path]:
    for folder in PYTHON:
        yield from (
            path for path in (ROOT / folder).rglob("*.py") if not any(part.is_symlink() for part in path.parents)
        )


def csrc_files() -> Iterator[Path]:
    for pattern in CSRC:
        yield from (ROOT / "csrc").rglob(pattern)


@functools.cache
def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files() -> None:
    lengths = {name_of(path): path.read_text().count("\n") for path in (*python_files(), *csrc_files())}
    assert len(lengths) > 200
    assert {name for name, length in lengths.items() if length > LINES} == set(LONG_FILES)


def test_functions() -> None:
    """A function's decorators do not count, its signature and its docstring do."""
    long = {}
    for path in python_files():
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > FUNCTION_LINES:
                long[f"{name_of(path)}:{function.name}"] = length
    assert long == {}


def test_parameter_lists() -> None:
    long = {}
    for path in python_files():
        for function in functions(path):
            listed = function.args
            count = len(listed.posonlyargs) + len(listed.args) + len(listed.kwonlyargs)
            is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            name = f"{name_of(path)}:{function.name}"
            if count > PARAMETERS and not is_kernel:
                long[name] = count
    assert long.keys() == SIGNATURES.keys(), long
