"""Say in one line each what the last build compiled: pip hides CMake's messages unless it fails."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

info_file = Path(sysconfig.get_path("platlib")) / "torch_dcs_ops" / "_build_info.json"
if not info_file.is_file():
    print("torch_dcs_ops: pure-Python build, no compiled library")
else:
    info = json.loads(info_file.read_text())
    for part in ("cpu", "cuda"):
        built = info[part]
        architectures = " ".join(built.get("architectures", []))
        if built["built"]:
            print(f"torch_dcs_ops: {part.upper()} library built with {built['compiler']} {architectures}".rstrip())
        else:
            print(f"torch_dcs_ops: {part.upper()} library left out: {built['reason']}")
