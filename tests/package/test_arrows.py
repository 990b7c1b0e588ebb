"""Which folder may import or include which: the arrows of docs/internals/architecture.md point one way.

A room is a folder or a file, a source belongs to the longest room that holds it, and a room that is not in its table
fails as an arrow does. What a room may use is listed; itself it may always use.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="not a source checkout")

_OP = ("_registry", "_native", "ops/_common")
PYTHON = {
    "_registry": (),
    "_version": (),
    "_native": ("_registry",),
    "reference": (),
    "reference/returns": ("reference/scan",),
    "reference/scan": (),
    "ops/_common": ("_registry", "_native"),
    "ops/scan": (*_OP, "reference/scan"),
    "ops/returns": (*_OP, "reference/returns", "reference/scan", "ops/scan"),
    "ops/linear_cross_entropy": (*_OP, "reference"),
    "ops/log_bmm": (*_OP, "reference"),
    "ops/softmax": (*_OP, "reference"),
    "ops": ("ops/scan", "ops/returns", "ops/linear_cross_entropy", "ops/log_bmm", "ops/softmax"),
    "returns": ("_registry", "ops/_common", "ops/returns", "reference/returns"),
    "nn": ("ops/_common", "ops/linear_cross_entropy"),
    "distributed/common": ("ops/_common",),
    "distributed/linear_cross_entropy": (
        *("_registry", "ops/_common", "ops/linear_cross_entropy", "reference", "distributed/common"),
    ),
    "distributed/scan": ("_registry", "ops/_common", "ops/scan", "reference/scan", "distributed/common"),
    "distributed/returns": (
        *("ops/_common", "ops/returns", "reference/returns", "distributed/common", "distributed/scan"),
    ),
    "distributed/dtensor": (
        *("_registry", "ops/_common", "ops/scan", "ops/linear_cross_entropy", "reference", "distributed/common"),
        *("distributed/linear_cross_entropy", "distributed/scan"),
    ),
    "distributed": (
        *("ops/_common", "distributed/linear_cross_entropy", "distributed/scan", "distributed/returns"),
        "distributed/dtensor",
    ),
    "compile/inductor": ("_version",),
    "compile/passes": ("_registry", "ops/returns", "compile/inductor"),
    "compile/scan_values": ("compile/inductor",),
    "compile/scan_lowering": (
        "_registry",
        "ops/_common",
        "ops/returns",
        "reference/scan",
        "compile/passes",
        "compile/inductor",
        "compile/scan_values",
    ),
    "compile": ("_version", "ops/linear_cross_entropy", "compile/passes", "compile/scan_lowering", "compile/inductor"),
    "_info": ("_native", "_version", "compile", "compile/inductor"),
    "integrations": ("returns", "ops/linear_cross_entropy"),
    "__init__": (
        *("_info", "_native", "_registry", "_version", "compile", "distributed", "nn", "ops", "returns"),
        *("ops/linear_cross_entropy", "ops/log_bmm", "ops/softmax"),  # the packages that its functions are named after
    ),
    "_plan": ("_native", "_registry"),
    "cli": ("__init__", "_plan"),
    "__main__": ("cli",),
}
TRITON_INSTALLED = ("torch_dcs_ops", "triton_kernels")
TRITON = {
    "__init__": (),
    "common": (),
    "scan": ("common",),
    "returns": ("common", "scan"),
    "linear_cross_entropy": ("common",),
    "log_bmm": ("common",),
    "softmax": ("common",),
}
CSRC = {
    "include/dcs": (),
    "include/dcs/scan": ("include/dcs",),
    "include/dcs/returns": ("include/dcs", "include/dcs/scan"),
    "include/dcs/cross_entropy": ("include/dcs",),
    "include/dcs/log_bmm": ("include/dcs",),
    "cpu/common": ("include/dcs",),
    "cuda/common": ("include/dcs", "cuda/common/ptx"),
    "cuda/common/ptx": (),
    "cuda/scan/carry": ("cuda/common", "cuda/common/ptx"),
}
for _family in ("scan", "returns", "cross_entropy", "log_bmm", "softmax"):
    CSRC[f"cpu/{_family}"] = ("cpu/common", "include/dcs", f"include/dcs/{_family}")
    CSRC[f"cuda/{_family}"] = ("cuda/common", "cuda/common/ptx", "include/dcs", f"include/dcs/{_family}")
CSRC["cuda/returns"] += ("cuda/scan", "cuda/scan/carry", "cuda/scan/columns", "cuda/scan/rows")
_SCAN_KERNELS = tuple(f"cuda/scan/{name}" for name in ("rows", "long_rows", "columns"))
CSRC["cuda/scan/lines"] = (*CSRC["cuda/scan"], "cuda/scan/carry")
for _name in _SCAN_KERNELS:
    CSRC[_name] = (*CSRC["cuda/scan"], "cuda/scan/carry", "cuda/scan/lines")
CSRC["cuda/scan"] += (*_SCAN_KERNELS, "cuda/scan/carry")


class Arrow(NamedTuple):
    place: str
    source: Path
    target: Path


def python_arrows(root: Path, package: str, installed: tuple[str, ...] = ()) -> Iterator[Arrow]:
    """The imports of a package's own modules; paths are relative to its folder.

    `installed`: its name where that is another one. Of what it is installed in it may import the references, for types.
    """
    folder = root / package
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for module in _imported(node, (package, *path.relative_to(folder).parent.parts)):
                if installed and module[: len(installed)] == installed:
                    module = (package, *module[len(installed) :])
                assert module[:1] != installed[:1] or module[1] == "reference", f"{path} imports {'.'.join(module)}"
                if module[0] == package:
                    place = f"{path}:{getattr(node, 'lineno', 0)}"
                    yield Arrow(place, path.relative_to(folder), _file_of(folder, module[1:]))


def _imported(node: ast.AST, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(node, ast.Import):
        return [tuple(alias.name.split(".")) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level <= len(package), f"line {node.lineno} imports from above the package"
        base = package[: len(package) - node.level + 1] if node.level else ()
        base += tuple(node.module.split(".")) if node.module else ()
        return [(*base, alias.name) for alias in node.names]
    return []


def _file_of(folder: Path, parts: tuple[str, ...]) -> Path:
    """The module that is imported, or that what is imported is taken from."""
    for count in range(len(parts), -1, -1):
        place = Path(*parts[:count])
        if count and (folder / place).with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if (folder / place).is_dir():
            return place / "__init__.py"
    raise AssertionError(f"{folder} holds no {parts}")


def include_arrows(root: Path) -> Iterator[Arrow]:
    """The `#include "..."` of csrc, by the folders that the build searches; paths are relative to csrc."""
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp", ".in"):
            continue
        relative = path.relative_to(root / "csrc")
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.match(r'\s*#\s*include "(.+)"', line):
                places = (Path(relative.parts[0]) / found[1], Path("include") / found[1])
                there = [place for place in places if (root / "csrc" / place).is_file()]
                assert there, f"{path}:{number} includes {found[1]}, which is in neither of {places}"
                yield Arrow(f"{path}:{number}", relative, there[0])


def room_of(path: Path, rooms: Mapping[str, tuple[str, ...]]) -> str:
    name = path.with_suffix("").as_posix()
    held = [room for room in rooms if name == room or name.startswith(f"{room}/")]
    assert held, f"{path} is in none of the rooms of this test's table"
    return max(held, key=len)


def crooked(arrows: Iterator[Arrow], rooms: Mapping[str, tuple[str, ...]]) -> list[str]:
    found = []
    for place, *ends in arrows:
        source, target = (room_of(end, rooms) for end in ends)
        if source != target and target not in rooms[source]:
            found.append(f"{place}: {source} must not use {target}")
    return found


def test_python() -> None:
    assert not crooked(python_arrows(ROOT, "torch_dcs_ops"), PYTHON)


def test_triton() -> None:
    assert not crooked(python_arrows(ROOT, "triton_kernels", TRITON_INSTALLED), TRITON)


def test_csrc() -> None:
    assert not crooked(include_arrows(ROOT), CSRC)


@pytest.mark.parametrize("rooms", [PYTHON, TRITON, CSRC], ids=["python", "triton", "csrc"])
def test_the_tables_have_no_circle(rooms: Mapping[str, tuple[str, ...]]) -> None:
    def visit(room: str, above: tuple[str, ...]) -> None:
        assert room not in above, " -> ".join((*above, room))
        for below in rooms.get(room, ()):
            visit(below, (*above, room))

    for room in rooms:
        visit(room, ())


@pytest.mark.parametrize(
    ("place", "text", "sentence"),
    [
        ("torch_dcs_ops/ops/softmax.py", "from ..compile import backend\n", "ops/softmax must not use compile"),
        ("torch_dcs_ops/reference/scan.py", "import torch_dcs_ops.ops.scan\n", "reference/scan must not use ops/scan"),
        ("triton_kernels/softmax.py", "from torch_dcs_ops.triton_kernels.scan import a\n", "softmax must not use scan"),
        ("csrc/cuda/common/device.h", '#include "scan/a.h"\n', "cuda/common must not use cuda/scan"),
    ],
)
def test_an_arrow_that_points_up_is_found(tmp_path: Path, place: str, text: str, sentence: str) -> None:
    others = (
        *("torch_dcs_ops/compile/backend.py", "torch_dcs_ops/ops/scan/__init__.py", "triton_kernels/scan/a.py"),
        "csrc/cuda/scan/a.h",
    )
    for path in (*others, place):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / place).write_text(text)
    found = crooked(python_arrows(tmp_path, "torch_dcs_ops"), PYTHON)
    found += crooked(python_arrows(tmp_path, "triton_kernels", TRITON_INSTALLED), TRITON)
    found += crooked(include_arrows(tmp_path), CSRC)
    assert found == [f"{tmp_path / place}:1: {sentence}"]


def test_the_worked_example_keeps_to_the_tables(tmp_path: Path) -> None:
    """Of docs/internals/adding_an_op.md: its module and C++, exported as the page says, and the rows that it adds."""
    for folder in ("torch_dcs_ops", "csrc/include", "csrc/cpu"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    page = (ROOT / "docs/internals/adding_an_op.md").read_text()
    for path, code in re.findall(r"^```\w+\n(?:#|//) (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    for package, module in (("ops", ".log1mexp"), (".", ".ops.log1mexp")):
        file = tmp_path / "torch_dcs_ops" / package / "__init__.py"
        file.write_text(f"{file.read_text()}from {module} import log1mexp\n")
    rows = re.findall(r"^\+    (\"\w+/log1mexp\": .*),$", page, re.MULTILINE)
    python, csrc = (eval(f"{{{row}}}", {"_OP": _OP}) for row in rows)
    exporting = {room: (*PYTHON[room], *python) for room in ("ops", "__init__")}
    assert not crooked(python_arrows(tmp_path, "torch_dcs_ops"), PYTHON | python | exporting)
    assert not crooked(include_arrows(tmp_path), CSRC | csrc)
