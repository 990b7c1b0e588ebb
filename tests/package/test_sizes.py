"""What a reader can hold: files of 400 lines, functions of 100, parameter lists of 12, and which may be longer."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="not a source checkout")

LINES, FUNCTION_LINES, PARAMETERS = 400, 100, 12
PYTHON = ("torch_dcs_ops", "triton_kernels", "tests", "benchmarks", "examples")
CSRC = ("*.h", "*.cpp", "*.cuh", "*.cu", "*.in")

LONG_FILES: tuple[str, ...] = ()
# Kernels of scans whose speed hangs on the order of their instructions. In phases four have other machine code:
# split columns (half precision: up to 12 registers more, 1.5 % more instructions), warp rows (by up to 4 %), block
# columns (1 % more to 4 % less) and resident rows (in another order).
LONG_FUNCTIONS = {
    "csrc/cuda/scan/columns/block_columns.cuh:block_columns_kernel",
    "csrc/cuda/scan/columns/split_columns.cuh:split_columns_kernel",
    "csrc/cuda/scan/long_rows/bulk_stream.cuh:bulk_stream_kernel",
    "csrc/cuda/scan/long_rows/few_rows.cuh:few_rows_kernel",
    "csrc/cuda/scan/long_rows/few_rows_gated.cuh:few_rows_gated_kernel",
    "csrc/cuda/scan/long_rows/resident.cuh:resident_rows_kernel",
    "csrc/cuda/scan/rows/warp_rows.cuh:warp_rows_kernel",
}
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
}
# The same of C++ and CUDA: what a registration makes an operator of has the schema's arguments.
CXX_SIGNATURES = {
    "csrc/include/dcs/cross_entropy/ops.h:cross_entropy_rows": "dcs::_cross_entropy_rows_",
    "csrc/include/dcs/returns/gradients.h:returns_gradients": "dcs::_returns_gradients",
    "csrc/include/dcs/returns/ops.h:temporal_difference_scan": "dcs::_temporal_difference_scan",
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


# A comment, a string or a character of C++; digits may be parted by an apostrophe.
NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.DOTALL)
SCOPE = re.compile(r"\bnamespace\b|\bextern\b|\b(?:struct|class|enum|union)\b[^()]*$")


def bodies(text: str) -> Iterator[tuple[str, int]]:
    """The head and the length in lines of every outermost function of a C++ file."""
    code = NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    code = re.sub(
        r"^[ \t]*#.*?(?<!\\)$", lambda match: "\n" * match[0].count("\n"), code, flags=re.DOTALL | re.MULTILINE
    )
    scopes: list[tuple[int, str]] = []
    for brace in re.finditer(r"[{}]", code):
        at = brace.start()
        if brace[0] == "{":
            scopes.append((at, re.split(r"[;{}]", code[:at][-1000:])[-1].strip()))
            continue
        begin, head = scopes.pop()
        if not SCOPE.search(head) and all(SCOPE.search(outer) for _, outer in scopes):
            yield head, code.count("\n", begin, at) + 1
    assert not scopes


def test_cxx_functions() -> None:
    """From its opening brace to the closing one."""
    long = {}
    for path in csrc_files():
        for head, length in bodies(path.read_text()):
            if length > FUNCTION_LINES:
                named = re.findall(r"(\w+)\s*\(", re.sub(r"__launch_bounds__\s*\(", "", head))
                long[f"{name_of(path)}:{named[-1] if named else head}"] = length
    assert long.keys() == LONG_FUNCTIONS, long


def test_the_length_of_a_cxx_function_is_seen() -> None:
    text = "namespace a {\nstruct B {\n  int c() const {\n    if (d) {\n      return '{';  // {\n    }\n  }\n};\n}\n"
    assert list(bodies(text)) == [("int c() const", 5)]


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


def cxx_parameters(head: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of each outermost parenthesis in the head of a C++ function."""
    depth, begin, count = 0, 0, 0
    for at, character in enumerate(head):
        if character in "(<[{":
            if character == "(" and not depth:
                begin, count = at, 1
            depth += 1
        elif character in ")>]}":
            depth -= 1
            if character == ")" and not depth:
                named = re.search(r"(\w+)\s*$", head[:begin])
                yield named[1] if named else "", count if head[begin + 1 : at].strip() else 0
        elif character == "," and depth == 1 and begin:
            count += 1


def test_cxx_parameter_lists() -> None:
    long: dict[str, int] = {}
    for path in csrc_files():
        for head, _ in bodies(path.read_text()):
            long |= {f"{name_of(path)}:{name}": count for name, count in cxx_parameters(head) if count > PARAMETERS}
    assert long.keys() == CXX_SIGNATURES.keys(), long


def test_the_parameters_of_a_cxx_function_are_seen() -> None:
    head = (
        "template <int a, int b> __global__ void __launch_bounds__(1, 2) f(pair<int, int> c, int (*d)(int, int), int e)"
    )
    assert list(cxx_parameters(head)) == [("__launch_bounds__", 2), ("f", 3)]
