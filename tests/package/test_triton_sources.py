"""What newer versions of Triton take, and the oldest supported one, 3.6 (that of torch 2.11), does not.

The interpreter takes it too, so that no test that runs kernels shows it without a GPU and that version.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "triton_kernels"
pytestmark = pytest.mark.skipif(not KERNELS.is_dir(), reason="not a source checkout")


def jit_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
            if any(ast.unparse(one) == "triton.jit" for one in decorators):
                yield node


def constants_returned(function: ast.FunctionDef) -> list[str]:
    """Strings and constexpr parameters among what a function may return: there a result is a tensor, or many."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    constants = {one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) == "tl.constexpr"}
    found = []
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    while values:
        value = values.pop()
        if isinstance(value, ast.IfExp):
            values += [value.body, value.orelse]
        elif isinstance(value, ast.Tuple | ast.BoolOp):
            values += value.elts if isinstance(value, ast.Tuple) else value.values
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.append(repr(value.value))
        elif isinstance(value, ast.Name) and value.id in constants:
            found.append(value.id)
    return found


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_kernel_function_returns_a_constant(path: Path) -> None:
    functions = jit_functions(ast.parse(path.read_text()))
    returned = {function.name: constants_returned(function) for function in functions}
    assert not {name: found for name, found in returned.items() if found}, "make it a triton.constexpr_function"


def test_a_returned_constant_is_found() -> None:
    source = '@triton.jit\ndef f(x, G: tl.constexpr):\n    return "exact" if x else (G, x)\n'
    (function,) = jit_functions(ast.parse(source))
    assert sorted(constants_returned(function)) == ["'exact'", "G"]
