"""`torch_dcs_ops.info()`: versions, the kernels in use for each device and why, what is missing and how to get it."""

from __future__ import annotations

import platform
from typing import Any

import torch

from . import _native, compile
from ._version import __version__, version_of
from .compile.inductor import support

_DESCRIPTIONS = {
    ("native", "cpu"): "C++",
    ("native", "cuda"): "CUDA C++",
    ("triton", "cpu"): "Triton, interpreted",
    ("triton", "cuda"): "Triton",
    ("reference", "cpu"): "reference (plain PyTorch, slow)",
    ("reference", "cuda"): "reference (plain PyTorch, slow)",
}
_FALLBACKS = {
    ("native", "cpu"): ("reference",),
    ("native", "cuda"): ("reference",),
    ("triton", "cpu"): ("reference",),
    ("triton", "cuda"): ("reference",),
    ("reference", "cpu"): (),
    ("reference", "cuda"): (),
}
# The ops that have no kernel of their own there: the reference calls torch's.
_LEFT_TO_TORCH = {
    ("native", "cpu"): ("softmax",),
    ("reference", "cpu"): ("softmax",),
    ("reference", "cuda"): ("softmax",),
}


class Info(dict[str, Any]):
    """A plain dict of strings, lists and dicts (it goes through json.dumps); printed, it is a readable text."""

    def __str__(self) -> str:
        lines = ["versions"]
        lines += [f"  {name:<14} {version or 'not installed'}" for name, version in self["versions"].items()]
        lines.append("kernels")
        for device, kernels in self["kernels"].items():
            lines.append(f"  {device:<14} {kernels['description']}")
            lines.append(f"  {'':<14} because {kernels['reason']}")
            if kernels["built_with"]:
                lines.append(f"  {'':<14} built with {kernels['built_with']}")
            if kernels["left_to_torch"]:
                lines.append(f"  {'':<14} torch's own for {', '.join(kernels['left_to_torch'])}")
            if kernels["fallback"]:
                lines.append(f"  {'':<14} where they have no case: {', then '.join(kernels['fallback'])}")
        lines.append("compile")
        lines.append(f"  {'backend':<14} dcs; for every torch.compile: {'yes' if self['compile']['enabled'] else 'no'}")
        lines += [f"  {name:<14} {self['compile'][name]}" for name in ("losses", "scans")]
        lines.append("devices")
        lines += [f"  {name}" for name in self["devices"]]
        lines.append("missing" if self["missing"] else "missing: nothing")
        for item in self["missing"]:
            lines.append(f"  {item['name']:<14} {item['reason']}")
            if item["remedy"]:
                lines.append(f"  {'':<14} to get it: {item['remedy']}")
        if self["forced"]:
            lines.append(f"forced: {_native.VARIABLE}={self['forced']}")
        return "\n".join(lines)


def info() -> Info:
    """What this installation runs on.

    Returns:
        A dict, which prints as a text, with

        * ``versions``: of torch_dcs_ops, python, torch, cuda (torch's), triton;
        * ``kernels``: for "cpu" and "cuda" the ``kind`` in use ("native", "triton" or "reference"), its
          ``description``, the ``reason``, the compiler and architectures a library was ``built_with`` (None for other
          kinds, and where it is not known), the ``fallback`` kinds for cases it does not cover, and the ops that are
          ``left_to_torch``: there torch's own kernel is called;
        * ``libraries``: for each compiled library its ``path`` (None where it was not found) and whether it is
          ``loaded``;
        * ``compile``: whether ``compile.enable()`` is in force (``enabled``), and whether ``losses`` and ``scans`` fuse
          with what is around them in compiled code, or why not: an untested torch, a part of it that is not what it
          was, graphs of this process that were compiled without;
        * ``devices``: the CPU and the CUDA devices that torch sees;
        * ``missing``: a list of ``name``, ``reason`` and ``remedy`` (None where there is none);
        * ``forced``: what TORCH_DCS_KERNELS was set to when the package was imported, or None.
    """
    kernels = {}
    libraries = {"cpu": _native.CPU_LIBRARY, "cuda": _native.CUDA_LIBRARY}
    for device, choice in (("cpu", _native.CPU), ("cuda", _native.CUDA)):
        kernels[device] = {
            "kind": choice.kind,
            "description": _DESCRIPTIONS[choice.kind, device],
            "reason": choice.reason,
            "built_with": _built_with(libraries[device]) if choice.kind == "native" else None,
            "fallback": list(_FALLBACKS[choice.kind, device]),
            "left_to_torch": list(_LEFT_TO_TORCH.get((choice.kind, device), ())),
        }
    missing: list[dict[str, str | None]] = [
        {"name": library.name, "reason": library.missing, "remedy": library.remedy}
        for library in libraries.values()
        if not library.loaded
    ]
    missing += _devices_without_code(_native.CUDA_LIBRARY)
    return Info(
        versions={
            "torch_dcs_ops": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "triton": version_of("triton"),
        },
        kernels=kernels,
        libraries={library.name: {"path": library.path, "loaded": library.loaded} for library in libraries.values()},
        compile={"enabled": compile.is_enabled(), **_fusions()},
        devices=_devices(),
        missing=missing,
        forced=_native.REQUESTED,
    )


def _fusions() -> dict[str, str]:
    return {
        "losses": _fused("passes", "one op with the linear map before them"),
        "scans": _fused("scans", "on CUDA part of the kernels around them, where that is faster"),
    }


def _fused(part: str, how: str) -> str:
    hindrance, failures = support.hindrance(part), support.failures(part)
    if hindrance is not None:
        return f"calls of their own: {hindrance}"
    return how if failures is None else f"{how}; {failures}"


def _built_with(library: _native.Library) -> str | None:
    if library.compiler is None:
        return None
    architectures = ", ".join(library.architectures)
    return f"{library.compiler} for {architectures}" if architectures else library.compiler


def _devices_without_code(library: _native.Library) -> list[dict[str, str | None]]:
    """The GPUs that the loaded library holds neither code nor PTX for: its kernels end there in a CUDA error."""
    if not library.loaded or "native" in library.architectures or not torch.cuda.is_available():
        return []
    without: list[dict[str, str | None]] = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        code = ", ".join(library.architectures)
        if library.architectures and not any(_serves(name, major, minor) for name in library.architectures):
            without.append(
                {
                    "name": f"cuda:{index}",
                    "reason": f"{library.name} was built for {code}, not for sm_{major}{minor}",
                    "remedy": f"build with DCS_CUDA_ARCHITECTURES={major}{minor}, or set {_native.VARIABLE}=triton",
                }
            )
    return without


def _serves(architecture: str, major: int, minor: int) -> bool:
    """Whether code for `architecture`, in CMake's words ("90-real", "100-virtual", "90"), runs on that GPU."""
    number, _, kind = architecture.partition("-")
    built = int("".join(character for character in number if character.isdigit()) or 0)
    if kind != "real" and built <= 10 * major + minor:
        return True  # PTX, which the driver compiles for any later GPU
    return built // 10 == major and built % 10 <= minor


def _devices() -> list[str]:
    devices = [f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            devices.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, sm_{major}{minor})")
    return devices
