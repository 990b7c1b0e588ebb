"""The softmax kernels and their exponential on a CPU, which needs no GPU: what they compute, read and write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import cuda_emulation

pytestmark = [
    pytest.mark.skipif(not (cuda_emulation.ROOT / "csrc").is_dir(), reason="not a source checkout"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emulation.build(Path(__file__).with_name("softmax_on_cpu.cpp"), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_softmax(program: Path, seed: int) -> None:
    found = subprocess.run([str(program), "350", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout


def test_power_of_doubles(tmp_path: Path) -> None:
    program = cuda_emulation.build(Path(__file__).with_name("power_on_cpu.cpp"), tmp_path)
    found = subprocess.run([str(program), "1000000", "1"], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
