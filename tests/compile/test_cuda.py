"""Every .cu file compiles for sm_90 where there is an nvcc; no GPU is needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torch_dcs_ops

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
pytestmark = pytest.mark.skipif(not SOURCES, reason="not a source checkout")


def nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("nvcc is not installed")
    banner = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.", banner)
    if release is None or int(release[1]) < 12:
        pytest.skip("nvcc is older than 12.0")
    return found


def newest_source() -> float:
    folders = (ROOT / "csrc" / "cuda", ROOT / "csrc" / "include")
    return max(path.stat().st_mtime for folder in folders for path in folder.rglob("*") if path.is_file())


def installed_library() -> Path | None:
    """_C_cuda.so if this installation has one, built from these sources for sm_90 or the GPU at hand."""
    for folder in map(Path, torch_dcs_ops.__path__):
        facts, path = folder / "_build_info.json", folder / "_C_cuda.so"
        if facts.is_file() and path.is_file() and path.stat().st_mtime >= newest_source():
            architectures = json.loads(facts.read_text())["cuda"]["architectures"]
            if any(architecture.startswith(("90", "native")) for architecture in architectures):
                return path
    return None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_sm_90(source: Path, tmp_path: Path) -> None:
    if installed_library() is not None:
        return  # the build compiled this very file, and stops at an error
    include = Path(torch.__file__).parent / "include"
    command = [nvcc(), "-arch=sm_90", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]
    command += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-isystem", str(include)]
    command += [
        f"-I{ROOT / 'csrc' / 'include'}",
        f"-I{ROOT / 'csrc' / 'cuda'}",
        "-c",
        str(source),
        "-o",
        str(tmp_path / "out.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_library_holds_device_code() -> None:
    library = installed_library()
    if library is None:
        pytest.skip("_C_cuda.so is not installed, or older than its sources")
    assert b".nv_fatbin" in library.read_bytes()
