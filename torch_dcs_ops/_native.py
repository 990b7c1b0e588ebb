"""Finds and loads the compiled libraries, says why one is missing, and which kernels each device gets.

`_C.so` holds the CPU kernels, `_C_cuda.so` the CUDA ones (loaded only where torch has CUDA: it needs libtorch_cuda).
Both are looked for in the package's `__path__`: in an editable install they lie in the build's folder, not beside the
sources. The build leaves `_build_info.json` beside them: what it compiled with what, and why it left a library out. A
pure-Python build has none.

The environment variable TORCH_DCS_KERNELS, read once at import, forces one kind of kernel:

* ``native``: the compiled libraries; import fails where one cannot be loaded.
* ``triton``: the Triton kernels on CUDA (on the CPU as well under TRITON_INTERPRET=1).
* ``reference``: plain PyTorch, everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "TORCH_DCS_KERNELS"
KINDS = ("native", "triton", "reference")


@dataclass(frozen=True)
class Library:
    """A compiled library: where it was loaded from, or why it was not."""

    name: str
    path: str | None = None
    missing: str | None = None
    remedy: str | None = None
    compiler: str | None = None
    architectures: tuple[str, ...] = ()

    @property
    def loaded(self) -> bool:
        return self.missing is None


@dataclass(frozen=True)
class DeviceKernels:
    """The kernels that a device type gets: "native", "triton" or "reference", and why."""

    kind: str
    reason: str
    remedy: str | None = None


def _requested_kind() -> str | None:
    value = os.environ.get(VARIABLE) or None
    if value is not None and value not in KINDS:
        raise ImportError(f"{VARIABLE} must be one of {', '.join(KINDS)}, got {value!r}")
    return value


def _read_build_info(folders: Sequence[str]) -> dict[str, Any]:
    for folder in folders:
        path = Path(folder) / "_build_info.json"
        if path.is_file():
            facts: dict[str, Any] = json.loads(path.read_text())
            return facts
    return {}


def _load(part: str, name: str, folders: Sequence[str], remedy: str) -> Library:
    facts = BUILD_INFO.get(part, {})
    built_with = (facts.get("compiler"), tuple(facts.get("architectures", ())))
    for folder in folders:
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            torch.ops.load_library(path)
        except OSError as error:
            return Library(name, str(path), f"{path} cannot be loaded: {error}", remedy, *built_with)
        return Library(name, str(path), None, None, *built_with)
    if facts.get("reason"):
        return Library(name, None, f"{name} was left out of the build: {facts['reason']}", remedy)
    why = "" if BUILD_INFO else ": a pure-Python build, or a checkout that is not installed"
    return Library(name, None, f"{name} is not in {' or '.join(folders)}{why}", remedy)


def _load_cpu(folders: Sequence[str]) -> Library:
    if REQUESTED == "reference" or (REQUESTED == "triton" and _interprets_triton()):
        return Library("_C.so", None, f"not loaded: {VARIABLE}={REQUESTED}")
    remedy = "install the package where there is a C++ compiler, without TORCH_DCS_PURE_PYTHON"
    return _load("cpu", "_C.so", folders, remedy)


def _load_cuda(folders: Sequence[str]) -> Library:
    if REQUESTED in ("reference", "triton"):
        return Library("_C_cuda.so", None, f"not loaded: {VARIABLE}={REQUESTED}")
    if torch.version.cuda is None:
        return Library("_C_cuda.so", None, "this PyTorch is built without CUDA", "install a PyTorch with CUDA")
    remedy = "install the package where nvcc >= 12.0 is in PATH or named in CUDACXX, with DCS_CUDA=ON"
    return _load("cuda", "_C_cuda.so", folders, remedy)


def _interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _missing_triton() -> str | None:
    """Why the Triton kernels cannot be used; without importing triton, which takes a second."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec(f"{__package__}.triton_kernels") is None:
        return f"{__package__}.triton_kernels is not installed"
    return None


def _choose_cpu() -> DeviceKernels:
    if CPU_LIBRARY.loaded:
        return DeviceKernels("native", f"{CPU_LIBRARY.path} is loaded")
    if REQUESTED == "triton" and _interprets_triton():
        return DeviceKernels("triton", f"{VARIABLE}=triton and TRITON_INTERPRET=1")
    return DeviceKernels("reference", CPU_LIBRARY.missing or "", CPU_LIBRARY.remedy)


def _choose_cuda() -> DeviceKernels:
    if CUDA_LIBRARY.loaded:
        return DeviceKernels("native", f"{CUDA_LIBRARY.path} is loaded")
    reason = CUDA_LIBRARY.missing or ""
    if REQUESTED == "reference":
        return DeviceKernels("reference", reason)
    missing = _missing_triton()
    if missing is None:
        return DeviceKernels("triton", reason, CUDA_LIBRARY.remedy)
    return DeviceKernels("reference", f"{reason}; {missing}", "install triton, as torch for CUDA does")


def _refuse_missing() -> None:
    """A kind that was asked for by name and cannot be had ends the import."""
    if REQUESTED == "native":
        libraries = (CPU_LIBRARY,) if torch.version.cuda is None else (CPU_LIBRARY, CUDA_LIBRARY)
        for library in libraries:
            if not library.loaded:
                raise ImportError(f"{VARIABLE}=native, but {library.missing}; {library.remedy}")
    if REQUESTED == "triton":
        missing = _missing_triton()
        if missing is not None:
            raise ImportError(f"{VARIABLE}=triton, but {missing}")


def _folders() -> list[str]:
    return list(sys.modules[__name__.rpartition(".")[0]].__path__)


REQUESTED = _requested_kind()
BUILD_INFO = _read_build_info(_folders())
CPU_LIBRARY = _load_cpu(_folders())
CUDA_LIBRARY = _load_cuda(_folders())
_refuse_missing()
CPU = _choose_cpu()
CUDA = _choose_cuda()
