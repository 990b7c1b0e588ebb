"""Modules of the Triton kernels, wherever these are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def triton_module(name: str) -> ModuleType:
    """A module of triton_kernels, such as "scan.launch", installed or from the checkout."""
    try:
        return importlib.import_module(f"torch_dcs_ops.triton_kernels.{name}")
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        try:
            return importlib.import_module(f"triton_kernels.{name}")
        finally:
            sys.path.pop(0)
