"""Packages of AOTInductor, where torch itself can load one."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.subprocesses import environment

_PLAIN = """
import sys, tempfile, torch
class Double(torch.nn.Module):
    def forward(self, x): return 2 * x
x = torch.ones(3, device=sys.argv[1])
path = f"{tempfile.mkdtemp()}/double.pt2"
torch._inductor.aoti_compile_and_package(torch.export.export(Double(), (x,)), package_path=path)
torch._inductor.aoti_load_package(path)(x)
"""


@functools.cache
def _crashes(device: str) -> bool:
    """Whether torch's loader kills the process over a package of torch's own ops, as that of torch 2.11 does for CUDA
    on some machines."""
    return subprocess.run([sys.executable, "-c", _PLAIN, device], env=environment(), check=False).returncode < 0


def load_package(path: str, device: str) -> Callable[..., Any]:
    if device == "cuda" and _crashes(device):
        pytest.skip("torch's own loader crashes here, also over a package without these ops")
    package: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    return package
