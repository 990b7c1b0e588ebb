"""Returns, returns over n steps and gradients of returns on a CPU, which needs no GPU: what kernels compute."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import cuda_emulation

pytestmark = [
    pytest.mark.skipif(not (cuda_emulation.ROOT / "csrc").is_dir(), reason="not a source checkout"),
    pytest.mark.slow,
]


@pytest.fixture(
    scope="module",
    params=["serial_columns", "few_steps", "small_rows", "flat_rows", "tile_columns", "n_step", "gradients"],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name(f"{request.param}_on_cpu.cpp")
    return cuda_emulation.build(source, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_problems(program: Path, seed: int) -> None:
    found = subprocess.run([str(program), "100", str(seed)], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
