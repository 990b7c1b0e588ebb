"""What several files of tests of scans have."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.triton_modules import triton_module


@pytest.fixture
def launchers() -> ModuleType:
    """triton_kernels/scan/launch.py, installed or from the checkout."""
    return triton_module("scan.launch")
