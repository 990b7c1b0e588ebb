"""The versions of torch whose private parts this package was written for and tested with."""

from __future__ import annotations

import torch

TESTED_VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_tested() -> bool:
    return torch_version() in TESTED_VERSIONS


def tested() -> str:
    """The versions, for a sentence."""
    return ", ".join(f"{major}.{minor}" for major, minor in TESTED_VERSIONS)
