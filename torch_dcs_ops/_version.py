"""The installed version of this package, and of others."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str | None:
    """The version of an installed distribution; None where it has no metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# A checkout on the path that is not installed has no metadata.
__version__ = version_of("torch_dcs_ops") or "0+unknown"
