"""What several files of tests of scans have."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """triton_kernels/scan/launch.py, installed or from the checkout."""
    try:
        return importlib.import_module("torch_dcs_ops.triton_kernels.scan.launch")
    except ImportError:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
        return importlib.import_module("triton_kernels.scan.launch")
