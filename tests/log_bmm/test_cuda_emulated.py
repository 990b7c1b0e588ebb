"""The CUDA kernels of max_bmm and sample_bmm on a CPU, which needs no GPU."""

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
def select(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_emulation.build(Path(__file__).with_name("select_on_cpu.cpp"), tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_select(select: Path, seed: int) -> None:
    found = subprocess.run([str(select), "15", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
