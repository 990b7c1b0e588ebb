"""The build: what it does without a compiler, nvcc or torch, and what a wheel holds. Nothing here compiles a kernel."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torch_dcs_ops

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
pytestmark = pytest.mark.skipif(not (CSRC / "CMakeLists.txt").is_file(), reason="not a source checkout")


def cmake() -> str:
    beside = Path(sys.executable).parent / "cmake"  # an environment that is not activated
    found = str(beside) if beside.is_file() else shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not installed")
    return found


def configure(build: Path, *arguments: str, source: Path = CSRC, **variables: str) -> tuple[int, str]:
    """(exit status, output with white space collapsed, since CMake wraps its messages)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DCS_", "TORCH_", "CUDA"))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [cmake(), "-S", str(source), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}", *arguments]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def python_without_torch(tmp_path: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    found = subprocess.run(
        [str(python), str(CSRC / "cmake" / "find_torch.py")], check=True, capture_output=True, text=True
    ).stdout
    if found.strip():
        pytest.skip("the base Python has a torch")
    return f"-DPython_EXECUTABLE={python}"


def test_missing_compiler_stops_with_one_sentence(tmp_path: Path) -> None:
    status, output = configure(tmp_path, CXX="/nonexistent/c++")
    assert status != 0
    assert (
        "torch_dcs_ops: no C++ compiler was found; install one (g++ or clang++) or name it in CXX, or ask for the "
        "pure-Python build by name: TORCH_DCS_PURE_PYTHON=1 pip install torch_dcs_ops" in output
    )


def test_missing_torch_names_the_option(tmp_path: Path, python_without_torch: str) -> None:
    status, output = configure(tmp_path / "build", "-DDCS_CUDA=OFF", python_without_torch)
    assert status != 0
    assert "torch's headers were not found; install torch >= 2.11 first and pass --no-build-isolation to pip" in output


def test_old_torch_is_refused(tmp_path: Path, python_without_torch: str) -> None:
    old = tmp_path / "old" / "torch"
    old.mkdir(parents=True)
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    status, output = configure(tmp_path / "build", "-DDCS_CUDA=OFF", python_without_torch, TORCH_DIR=str(old))
    assert status != 0
    assert f"torch >= 2.11 is needed, {old} is 2.9.1+cpu" in output


def test_missing_nvcc_leaves_cuda_out_and_says_so(tmp_path: Path) -> None:
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "DCS_CUDA_ROOT": str(tmp_path)}
    if shutil.which("nvcc", path=variables["PATH"]):
        pytest.skip("nvcc is beside the C++ compiler")
    build = tmp_path / "build"
    status, output = configure(build, **variables)
    assert status == 0, output
    assert "the CUDA library is left out: nvcc was not found when the package was built" in output
    facts = json.loads((build / "_build_info.json").read_text())
    assert facts["cpu"]["built"]
    assert facts["cuda"] == {
        "built": False,
        "reason": "nvcc was not found when the package was built",
        "compiler": None,
        "architectures": [],
    }
    status, output = configure(tmp_path / "asked", "-DDCS_CUDA=ON", **variables)
    assert status != 0
    assert "DCS_CUDA=ON, but nvcc was not found" in output


@pytest.mark.parametrize(("setting", "gpu"), [("GPU", False), ("GPU", True), ("AUTO", False), ("ON", False)])
def test_make_builds_cuda_where_there_is_a_gpu(setting: str, gpu: bool, tmp_path: Path) -> None:
    """make's setting is GPU, pip's AUTO. This nvcc says its release only: where it is wanted, CMake stops at it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in (("nvcc", "echo release 13.0"), ("nvidia-smi", f"exit {0 if gpu else 9}")):
        (tools / name).write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ "$1" = -L ] || exit 1\n{script}\n')
        (tools / name).chmod(0o755)
    variables = {"PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}", "DCS_CUDA": setting}
    status, output = configure(tmp_path / "build", CUDACXX=str(tools / "nvcc"), **variables)
    left_out = "the CUDA library is left out: nvcc was found, but no GPU; DCS_CUDA=ON builds it all the same"
    assert (left_out in output) == (status == 0) == (setting == "GPU" and not gpu), output


def test_compiler_error_ends_the_build(tmp_path: Path) -> None:
    source = tmp_path / "csrc"
    shutil.copytree(CSRC, source, ignore=shutil.ignore_patterns("*.cpp", "*.cu"))
    (source / "manylinux" / "newer_functions.cpp").touch()
    (source / "cpu" / "broken.cpp").write_text("int broken( {\n")
    status, output = configure(tmp_path / "build", "-DDCS_CUDA=OFF", source=source)
    assert status == 0, output
    command = [cmake(), "--build", str(tmp_path / "build")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_pure_python_wheel(tmp_path: Path) -> None:
    # Not find_spec("pip"): setuptools' import hook takes that for a running pip and hands out the standard library's
    # distutils from then on, which breaks torch.compile in the tests that follow.
    pip = [sys.executable, "-m", "pip"]
    if (
        importlib.util.find_spec("scikit_build_core") is None
        or subprocess.run([*pip, "--version"], check=False).returncode
    ):
        pytest.skip("scikit-build-core or pip is not installed")
    command = [*pip, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w"]
    environment = {**os.environ, "TORCH_DCS_PURE_PYTHON": "1", "CXX": "/nonexistent/c++"}
    environment["TORCH_DCS_REPOSITORY_URL"] = "https://example.org/owner/name/"
    subprocess.run([*command, str(tmp_path), str(ROOT)], env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for expected in ("__init__.py", "py.typed", "triton_kernels/scan/launch.py", "examples/reinforce_cartpole.py"):
        assert f"torch_dcs_ops/{expected}" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".cu", "_build_info.json"))]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"torch_dcs_ops"}
    (about,) = (name for name in names if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(about))
    assert "Source, https://example.org/owner/name" in metadata.get_all("Project-URL", [])
    assert {"demo", "transformers"} <= set(metadata.get_all("Provides-Extra", []))
    assert "Programming Language :: Python :: 3.10" in metadata.get_all("Classifier", [])
    readme = metadata.get_payload(decode=True).decode()
    assert "](https://example.org/owner/name/blob/main/docs/compile.md)" in readme
    assert "](https://example.org/owner/name/raw/main/docs/images/speed.svg)" in readme
    assert not [target for target in re.findall(r"\]\(([^)]*)\)", readme) if not target.startswith("https://")]


def test_build_progress(tmp_path: Path) -> None:
    script, log = ROOT / ".ci" / "build_progress.py", tmp_path / "log"
    output = "".join(f"  [{n}/40] Building CXX object\n" for n in range(1, 41)) + "a warning\n"
    done = subprocess.run(
        [sys.executable, str(script), str(log)], input=output, capture_output=True, text=True, check=True
    )
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["1", *(str(n) for n in range(4, 41, 4))]
    assert log.read_text() == output


def test_build_info_matches_the_installed_libraries() -> None:
    folders = [Path(folder) for folder in torch_dcs_ops.__path__]
    found = [folder / "_build_info.json" for folder in folders if (folder / "_build_info.json").is_file()]
    if not found:
        pytest.skip("a pure-Python build")
    facts = json.loads(found[0].read_text())
    for part, name in (("cpu", "_C.so"), ("cuda", "_C_cuda.so")):
        assert facts[part]["built"] == any((folder / name).is_file() for folder in folders)
