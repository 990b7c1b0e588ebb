"""Builds programs that run CUDA kernels on a CPU (cuda_on_cpu/emulation.h): their logic, without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_EMULATION = Path(__file__).parent / "cuda_on_cpu"
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];")


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    return next(
        (Path(home) / "include" for home in homes if home and (Path(home) / "include/cuda_fp16.h").exists()), None
    )


def build(source: Path, folder: Path) -> Path:
    """The program of `source`, which includes emulation.h and then kernels of csrc/cuda. In `folder`."""
    headers, compiler = _cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("the emulation of CUDA needs g++ and the CUDA toolkit's headers")
    kernels = folder / "cuda"
    shutil.copytree(ROOT / "csrc/cuda", kernels)
    for file in kernels.rglob("*.cuh"):
        file.write_text(_DYNAMIC.sub(r"unsigned char* const \1 = emulation::shared();", file.read_text()))
    program = folder / source.stem
    includes = [_EMULATION, kernels, ROOT / "csrc/include", headers]
    # Kernels compare and convert as nvcc lets them, without a word.
    command = [compiler, "-O1", "-std=c++17", "-w", "-fpermissive", "-mcx16", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, str(source), "-o", str(program), "-lpthread", "-latomic"], check=True)
    return program
