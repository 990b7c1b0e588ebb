"""The pages say what is true: their Python runs, the files they name exist, README's output is what comes out."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from support.subprocesses import run_tests

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
README = ROOT / "README.md"
ADDING_AN_OP = ROOT / "docs" / "internals" / "adding_an_op.md"
RUNNABLE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A path from the root of the repository or of the package. `*`, `<family>` and `{a,b}` stand for several.
IN_REPOSITORY = r"\.ci|\.github|benchmarks|csrc|docs|examples|tests|torch_dcs_ops|triton_kernels"
IN_PACKAGE = "compile|distributed|integrations|ops|reference"
NAMED = re.compile(rf"(?<![\w./-])(?:{IN_REPOSITORY}|{IN_PACKAGE})/[\w./*<>{{}},-]*[\w*>}}/]")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_python_blocks_run(page: Path) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_readme_examples_print_what_is_shown() -> None:
    """Each alone, with nothing of the ones before."""
    blocks = [block for block in BLOCK.findall(README.read_text()) if block[0] in ("python", "text")]
    assert [language for language, _ in blocks] == ["python", "text"] * 3
    for (_, code), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(README), "exec"), {})
        assert printed.getvalue() == shown


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def expanded(path: str) -> list[str]:
    """`a/{b,c}/<family>` is a/b/* and a/c/*."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if braces is None:
        return [re.sub(r"<[^<>]*>", "*", path)]
    before, after = path[: braces.start()], path[braces.end() :]
    return [whole for part in braces[1].split(",") for whole in expanded(before + part + after)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    new = re.findall(r"^(?:#|//) (\S+\.\w+)$", text, re.MULTILINE)  # those of a worked example, and its modules
    new += [path.removeprefix("torch_dcs_ops/").removesuffix(".py") for path in new]
    for path in NAMED.findall(text):
        for name in expanded(path.rstrip("/")):
            assert name in new or any((*ROOT.glob(name), *(ROOT / "torch_dcs_ops").glob(name))), path


def test_pre_commit_has_the_pinned_versions() -> None:
    revisions = dict(re.findall(r"/([\w-]+)\n +rev: v([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    pins = dict(re.findall(r'"([\w-]+)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert revisions["ruff-pre-commit"] == pins["ruff"]
    assert revisions["mirrors-clang-format"] == pins["clang-format"]


INSTALL = """
import sys
import types
from pathlib import Path

import torch
import torch_dcs_ops

registry = torch_dcs_ops._registry
registry.LIBRARY.define({schema!r}, tags=(torch.Tag.pt2_compliant_tag,))
exec({name!r}, vars(registry))
for path in {modules!r}:
    name = path.removesuffix(".py").replace("/", ".")
    package, _, last = name.rpartition(".")
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__ = package
    file = Path({folder!r}) / path
    exec(compile(file.read_text(), file, "exec"), vars(module))
    setattr(sys.modules[package], last, module)
"""


@pytest.mark.slow
def test_the_worked_example_works(tmp_path: Path) -> None:
    """The page's schema, reference and registration, and then its tests, in a process of their own."""
    edit = next(code for language, code in BLOCK.findall(ADDING_AN_OP.read_text()) if language == "diff")
    schema, name = edit.splitlines()
    modules = {re.match(r"# (\S+)\n", code)[1]: code for code in python_blocks(ADDING_AN_OP)}  # type: ignore[index]
    tests = next(path for path in modules if path.startswith("tests/"))
    for path, code in modules.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    installed = [path for path in modules if path != tests]
    conftest = INSTALL.format(schema=schema.strip('+ ",'), name=name[1:], modules=installed, folder=str(tmp_path))
    (tmp_path / tests).with_name("conftest.py").write_text(conftest)
    run_tests(str(tmp_path / tests), "-p", "no:logging")  # which has torch.compile write all that it does
