"""``python -m torch_dcs_ops info --plan``: which CUDA kernel a scan takes, how it is launched, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import _native, _registry

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64")


class Limits(NamedTuple):
    """What a plan asks of a GPU, as limits_of of csrc/cuda/scan/ops.cpp has it."""

    name: str
    multiprocessors: int
    shared_bytes: int  # that one block can have
    cluster: int  # blocks that a cluster can have; 0: there are none


H200 = Limits("an H200", 132, 227 << 10, 16)


class Plan(dict[str, Any]):
    """A plain dict, which goes through json.dumps; printed, it is a readable text."""

    def __str__(self) -> str:
        limits = self["limits"]
        lines = [
            f"{'x'.join(map(str, self['shape'])) or '0-D'} {self['dtype']} along dim {self['dim']}: "
            f"{self['outer']} x {self['length']} steps x {self['inner']}",
            f"on {limits['name']}: {limits['multiprocessors']} multiprocessors, {limits['shared_bytes']} bytes of "
            f"shared memory a block, {_clusters(limits['cluster'])}",
            "candidates: the first that can take the scan is launched",
        ]
        for each in self["candidates"]:
            mark = ">" if each["chosen"] else " "
            lines.append(f"{mark} {each['name']:<16} {'can' if each['can'] else '-':<4} {each['takes']}")
        lines.append(f"launch of {self['kernel']}")
        if "aligned_kernel" in self:
            lines.append(f"  {'kernel':<20} {self['aligned_kernel']}")
        lines += [f"  {name:<20} {_text(value)}" for name, value in self["launch"].items()]
        if self["unused"]:
            lines.append(f"not in use here: {self['unused']}")
        return "\n".join(lines)


def _clusters(most: int) -> str:
    return f"clusters of {most}" if most else "no clusters"


def _text(value: int | bool) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def scan_plan(
    shape: str,
    dtype: str,
    *,
    dim: int = -1,
    gamma: str = "number",
    reset: bool = False,
    initial: bool = False,
    reverse: bool = False,
    window: int | None = None,
) -> Plan:
    """The plan of a forward scan of a contiguous tensor, on the current GPU, or on an H200 where there is none.

    Raises:
        ValueError: an argument is none that a scan takes, or the compiled library is missing; a sentence says which.
    """
    if not _native.CPU_LIBRARY.loaded:
        raise ValueError(f"the plan is made by the compiled library, which is missing: {_native.CPU_LIBRARY.missing}")
    if not re.fullmatch(r"[0-9]{1,18}(x[0-9]{1,18})*", shape):
        raise ValueError(f"SHAPE must be sizes such as 4096x4096, got {shape!r}")
    if dtype not in DTYPES:
        raise ValueError(f"DTYPE must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if window is not None and window < 1:
        raise ValueError(f"--window must be at least 1, got {window}")
    sizes = [int(size) for size in shape.split("x")]
    limits = current_limits()
    options = (dim, gamma, reset, initial, reverse, window or 0)
    try:
        text = _registry.scan_plan(sizes, getattr(torch, dtype), *options, *limits[1:])
    except (RuntimeError, IndexError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    facts: dict[str, Any] = json.loads(text)
    unused = _native.CUDA_LIBRARY.missing if torch.cuda.is_available() else None
    return Plan(shape=sizes, dtype=dtype, dim=dim % len(sizes), limits=limits._asdict(), **facts, unused=unused)


def current_limits() -> Limits:
    """Of the current GPU; of an H200 where there is none."""
    if not torch.cuda.is_available():
        return H200
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Limits(
        device.name,
        device.multi_processor_count,
        device.shared_memory_per_block_optin,
        _cluster(device.major, device.minor, _native.CUDA_LIBRARY.architectures),
    )


def _cluster(major: int, minor: int, architectures: Sequence[str]) -> int:
    """describe_device of csrc/cuda/common/host.h: clusters need code made for a GPU that has them."""
    built = (int(re.sub(r"\D", "", name) or 0) for name in architectures if name != "native")
    compiled = (
        not architectures or "native" in architectures or any(90 <= number <= 10 * major + minor for number in built)
    )
    return 0 if major < 9 or not compiled else 16 if major in (9, 10) else 8
