"""The environment of tests that start a Python of their own."""

from __future__ import annotations

import os
from pathlib import Path

import torch_dcs_ops


def environment(**changes: str) -> dict[str, str]:
    """This process's, so that the other one imports the very package that is tested, whatever its working directory."""
    package = str(Path(torch_dcs_ops.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, **changes}
