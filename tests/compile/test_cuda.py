"""Every .cu file compiles for sm_90; no GPU is needed.

Where the CUDA library is built from these sources, its build has shown that. Where it was left out, or is older or for
other architectures, `make test-all` compiles every file if there is an nvcc: on two cores that takes longer than the
rest of the suite.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torch_dcs_ops
from torch_dcs_ops import _native

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCES = sorted((CSRC / "cuda").rglob("*.cu"))
pytestmark = pytest.mark.skipif(not SOURCES, reason="not a source checkout")
CUDA = _native.BUILD_INFO.get("cuda", {"built": False, "reason": "a pure-Python build"})


def instances() -> dict[str, tuple[Path, str, str]]:
    """Template, SUFFIX and SCALAR of the translation units that CMakeLists.txt makes of templates."""
    text = (CSRC / "CMakeLists.txt").read_text() if SOURCES else ""
    floating = "".join(re.findall(r"set\(floating (.*)\)", text))
    scalars = dict(re.findall(r'set\(scalar_(\w+) "?(.*?)"?\)', text))
    folders = dict(re.findall(r"set\(folder_(\w+) (.*)\)", text))
    return {
        f"{family}_{suffix}": (CSRC / "cuda" / folders.get(family, family) / "instance.cu.in", suffix, scalars[suffix])
        for family, suffixes in re.findall(r"set\(suffixes_(\w+) (.*)\)", text)
        for suffix in suffixes.replace("${floating}", floating).split()
    }


INSTANCES = instances()


def newest_source() -> float:
    folders = (ROOT / "csrc" / "cuda", ROOT / "csrc" / "include")
    times = (path.stat().st_mtime for folder in folders for path in folder.rglob("*") if path.is_file())
    return max(times, default=0.0)


def installed_library() -> Path | None:
    """_C_cuda.so if this installation has one, built from these sources for sm_90 or the GPU at hand."""
    for folder in map(Path, torch_dcs_ops.__path__):
        path = folder / "_C_cuda.so"
        suits = any(architecture.startswith(("90", "native")) for architecture in CUDA.get("architectures", ()))
        if suits and path.is_file() and path.stat().st_mtime >= newest_source():
            return path
    return None


slow = () if installed_library() is not None else pytest.mark.slow


def nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("nvcc is not installed")
    banner = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.", banner)
    if release is None or int(release[1]) < 12:
        pytest.skip("nvcc is older than 12.0")
    return found


@pytest.mark.parametrize(
    "source", [pytest.param(path, id=str(path.relative_to(CSRC / "cuda")), marks=slow) for path in SOURCES]
)
def test_compiles_for_sm_90(source: Path, tmp_path: Path) -> None:
    if installed_library() is not None:
        return  # the build compiled this very file, and stops at an error
    include = Path(torch.__file__).parent / "include"
    command = [nvcc(), "-arch=sm_90", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]
    command += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-isystem", str(include)]
    command += [f"-I{CSRC / 'include'}", f"-I{CSRC / 'cuda'}", "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) for name in INSTANCES])
def test_instance_compiles_for_sm_90(name: str, tmp_path: Path) -> None:
    template, suffix, scalar = INSTANCES[name]
    source = tmp_path / f"{name}.cu"
    source.write_text(template.read_text().replace("@SUFFIX@", suffix).replace("@SCALAR@", scalar))
    test_compiles_for_sm_90(source, tmp_path)


def test_every_template_has_instances() -> None:
    templates = {template for template, *_ in INSTANCES.values()}
    assert templates == set((CSRC / "cuda").rglob("instance.cu.in"))


def test_library_holds_device_code() -> None:
    library = installed_library()
    if not CUDA["built"]:
        pytest.skip(f"the CUDA library was left out of the build: {CUDA['reason']}; make test-all compiles its sources")
    if library is None:
        pytest.skip("_C_cuda.so is older than its sources, or for another architecture")
    assert b".nv_fatbin" in library.read_bytes()
