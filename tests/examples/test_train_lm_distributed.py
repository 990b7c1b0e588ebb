"""examples/train_lm_distributed.py: FSDP2 and tensor parallelism, with a checkpoint half-way, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from support.subprocesses import environment

if not dist.is_available():
    pytest.skip("a torch without torch.distributed", allow_module_level=True)

from torch_dcs_ops.examples import train_lm_distributed as example

FILE = example.__file__


def torchrun(ranks: int, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, FILE, *arguments], env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(2, ["--tensor-parallel", "2", "--steps", "4"]), (2, ["--tensor-parallel", "1"]), (4, []), (4, ["--compile"])],
)
def test_losses_are_those_of_one_process(ranks: int, arguments: list[str], tmp_path: Path) -> None:
    said = torchrun(ranks, *arguments, "--checkpoint", str(tmp_path / "checkpoint"))
    assert "off by" in said
    assert (tmp_path / "checkpoint" / ".metadata").is_file()
