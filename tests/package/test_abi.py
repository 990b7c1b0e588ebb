"""The compiled libraries load into every torch >= 2.11: of torch they need nothing but C shims that 2.11 has."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import torch_dcs_ops

TARGET = "0x020b000000000000ULL"
LIBRARIES = ("_C.so", "_C_cuda.so")


def library(name: str) -> Path:
    for folder in torch_dcs_ops.__path__:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"{name} was not built")


def tool(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"none of {', '.join(names)} is installed")


def undefined_symbols(path: Path) -> dict[str, str]:
    """Name -> nm's type letter, of the symbols that another library must provide; versions (@GLIBC_...) cut off."""
    output = subprocess.run(
        [tool("nm"), "-D", "--undefined-only", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].split("@")[0]: line.split()[-2] for line in output.splitlines()}


@pytest.fixture(scope="module")
def shims() -> set[str]:
    """Every shim that torch's headers declare to code built for 2.11, CUDA's included."""
    include = Path(torch.__file__).parent / "include"
    source = "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n#include <torch/csrc/stable/c/shim.h>\n"
    command = [tool("c++", "g++", "clang++"), "-E", "-P", "-std=c++17", f"-I{include}", "-x", "c++", "-"]
    command += [f"-DTORCH_TARGET_VERSION={TARGET}", "-DUSE_CUDA"]
    text = subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", text))


@pytest.mark.parametrize("name", LIBRARIES)
def test_needs_only_shims_of_torch_2_11(name: str, shims: set[str]) -> None:
    needed = {symbol for symbol in undefined_symbols(library(name)) if symbol.startswith(("aoti_torch_", "torch_"))}
    assert needed, "a library that needs nothing of torch registers nothing"
    assert not needed - shims


@pytest.mark.parametrize("name", LIBRARIES)
def test_needs_no_newer_glibc_or_libstdcxx(name: str) -> None:
    """Those of manylinux_2_28, the oldest that torch's own wheels load with."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    versions = subprocess.run(
        [tool("readelf"), "-W", "--version-info", str(library(name))], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", versions)
    assert needed
    newer = {f"{kind}_{number}" for kind, number in needed if tuple(map(int, number.split("."))) > newest[kind]}
    assert not newer, f"csrc/cmake/old_glibc.cmake and csrc/manylinux do not know what {name} takes from {newer}"


@pytest.mark.parametrize("name", LIBRARIES)
def test_needs_no_cpp_symbol_of_torch(name: str) -> None:
    mangled = re.compile(r"^_Z\w*?(2at|3c10|5torch|6caffe2|4c10d|5THPVa)")
    assert not [symbol for symbol in undefined_symbols(library(name)) if mangled.match(symbol)]


@pytest.mark.parametrize("name", LIBRARIES)
def test_needs_no_python_symbol(name: str) -> None:
    assert not [symbol for symbol in undefined_symbols(library(name)) if symbol.startswith(("Py", "_Py"))]


def test_one_wheel_for_every_python() -> None:
    library("_C.so")
    tags = re.findall("^Tag: (.*)$", distribution("torch_dcs_ops").read_text("WHEEL") or "", re.MULTILINE)
    assert tags == [f"py3-none-linux_{platform.machine()}"]


def test_stream_shim_is_weak() -> None:
    """It lives in libtorch_cuda: a strong reference would keep _C_cuda.so from linking against a CPU torch."""
    assert undefined_symbols(library("_C_cuda.so")).get("aoti_torch_get_current_cuda_stream") in ("w", None)


def test_host_code_calls_no_device_function() -> None:
    """nvcc compiles such a call and puts exit(1) in its place."""
    assert "exit" not in undefined_symbols(library("_C_cuda.so"))


@pytest.mark.parametrize("name", LIBRARIES)
def test_needed_libraries(name: str) -> None:
    """No CUDA runtime (it is linked in), no libtorch_python, no search path of the machine that built it."""
    dynamic = subprocess.run(
        [tool("readelf"), "-d", str(library(name))], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert not [entry for entry in needed if re.match(r"libcudart|libtorch_python|libtorch_cuda|libpython", entry)]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    assert ("libtorch.so" in needed) == (name == "_C_cuda.so")


def test_instruction_set_files_define_no_shared_function() -> None:
    """The linker keeps one copy of an inline function, from any file. Were it an AVX-512 file's, every caller would
    execute AVX-512 and die on a CPU without it; so those files keep theirs in anonymous namespaces.
    """
    root = Path(__file__).parents[2]
    objects = [
        path
        for folder in root.glob("build/*/CMakeFiles/_C.dir")
        for path in folder.rglob("*.o")
        if re.search(r"_avx(2|512)\.cpp\.o$", path.name)
        and (root / "csrc" / path.relative_to(folder).with_suffix("")).is_file()
    ]
    if not objects:
        pytest.skip("no build folder")
    for path in objects:
        output = subprocess.run([tool("nm"), "-C", str(path)], check=True, capture_output=True, text=True).stdout
        weak = [line.split(maxsplit=2)[2] for line in output.splitlines() if re.match(r"^[0-9a-f]+ [Wu] ", line)]
        assert not weak, f"{path.name} defines {weak[:5]}"
