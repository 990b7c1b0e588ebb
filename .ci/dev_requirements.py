"""Print the `dev` extra of pyproject.toml, one pin a line: the environment is made before the package is built."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["dev"], sep="\n")
