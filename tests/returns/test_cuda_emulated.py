"""The temporal difference scan of any shape, and gradients, on a CPU, which needs no GPU: what kernels compute."""

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
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emulation.build(Path(__file__).with_name("chunks_on_cpu.cpp"), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_chunks(chunks: Path, seed: int) -> None:
    found = subprocess.run([str(chunks), "100", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emulation.build(Path(__file__).with_name("walk_on_cpu.cpp"), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_walk(walk: Path, seed: int) -> None:
    found = subprocess.run([str(walk), "200", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emulation.build(Path(__file__).with_name("gradients_on_cpu.cpp"), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_gradients(gradients: Path, seed: int) -> None:
    found = subprocess.run([str(gradients), "100", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
