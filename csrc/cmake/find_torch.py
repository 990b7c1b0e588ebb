"""Print the folder of the installed torch package, or nothing; CMake runs this to find torch's headers.

torch is never imported: that takes seconds, and in pip's isolated builds it is not on sys.path. There the environment
that pip installs into is still what sysconfig names, so its site-packages are looked at next; TORCH_DIR, a folder that
holds torch's `include`, is the last resort.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
from pathlib import Path


def candidates() -> list[Path]:
    """Folders that may be the torch package, in the order they are tried."""
    found: list[Path] = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        found.append(Path(next(iter(spec.submodule_search_locations))))
    roots = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for base in (sys.base_prefix,):
        roots += [sysconfig.get_path(name, vars={"base": base, "platbase": base}) for name in ("purelib", "platlib")]
    roots.append(site.getusersitepackages())
    found += [Path(root) / "torch" for root in roots if root]
    if os.environ.get("TORCH_DIR"):
        given = Path(os.environ["TORCH_DIR"])
        found += [given, given / "torch"]
    return found


def main() -> None:
    for folder in candidates():
        if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            print(folder)
            return
    for folder in candidates():  # an older torch: CMake names its version in the error
        if (folder / "version.py").is_file():
            print(folder)
            return


if __name__ == "__main__":
    main()
