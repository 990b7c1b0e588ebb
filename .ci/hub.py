"""Make a kernel repository of the Hugging Face Hub from a wheel: `python .ci/hub.py WHEEL FOLDER`.

FOLDER/build gets the variants that the wheel has libraries for: one for the CPU's and, if it is there, one with the
CUDA library as well; torch-universal for a pure-Python wheel. The libraries use the LibTorch stable ABI, so a variant
is for every torch from the one that they need on. It holds the package as it is in the wheel, and hub_init.py as its
entry.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

NAME = "torch-dcs-ops"
KERNEL_VERSION = 1  # of the Hub: another number where a function's arguments change
CARD = """---
license: bsd-3-clause
tags:
- kernels
---

`linear_cross_entropy`, `linear_log_probs` and `discounted_cumsum` of torch_dcs_ops {version}, for torch >= 2.11.

```python
from pathlib import Path

from kernels import get_local_kernel

kernel = get_local_kernel(Path("."))  # where this README is
```
"""


def variants(facts: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Names and backends, as the kernels library writes them, for what `_build_info.json` says; None without one."""
    if facts is None:
        return {"torch-universal": {"type": "cpu"}}
    framework = f"torch-stable-abi{facts['needs_torch'].replace('.', '')}"
    system = f"{platform.machine()}-{platform.system().lower()}"
    found: dict[str, dict[str, Any]] = {f"{framework}-cpu-{system}": {"type": "cpu"}}
    if facts["cuda"]["built"]:
        toolkit = re.search(r"(\d+)\.(\d+)", facts["cuda"]["compiler"])
        if toolkit is None:
            raise SystemExit(f"hub: the CUDA compiler must have a version, got {facts['cuda']['compiler']!r}")
        architectures = [_architecture(name) for name in facts["cuda"]["architectures"]]
        found[f"{framework}-cu{toolkit[1]}{toolkit[2]}-{system}"] = {"type": "cuda", "archs": architectures}
    return found


def _architecture(name: str) -> str:
    """CMake's 90a-real as 9.0a; without a suffix there is PTX as well."""
    number = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", name)
    if number is None:
        raise SystemExit(f"hub: a CUDA architecture must be a number, got {name!r}")
    return f"{number[1]}.{number[2]}{number[3]}" + ("" if number[4] == "-real" else "+PTX")


def make(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = "torch_dcs_ops/_build_info.json"
        facts = json.loads(archive.read(info)) if info in names else None
        version = wheel.name.split("-")[1]
        shutil.rmtree(folder / "build", ignore_errors=True)
        for variant, backend in variants(facts).items():
            place = folder / "build" / variant
            kept = [name for name in names if backend["type"] == "cuda" or not name.endswith("_C_cuda.so")]
            archive.extractall(place, kept)
            shutil.copyfile(Path(__file__).with_name("hub_init.py"), place / "__init__.py")
            metadata = {
                "id": re.sub(r"\W", "_", f"_{NAME}_{backend['type']}_{version}"),
                "name": NAME,
                "version": KERNEL_VERSION,
                "license": "BSD-3-Clause",
                "python-depends": [],
                "backend": backend,
            }
            (place / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
            print(place)
    (folder / "README.md").write_text(CARD.format(version=version))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
