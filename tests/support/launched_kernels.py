"""Which CUDA kernels of the package a call launches, and whether the GPU is the one that a test knows the plans of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch

KERNEL = re.compile(r"dcs::(?:\(anonymous namespace\)::)?(\w+_kernel)\b")


def launched_kernels(run: Callable[[], object]) -> Counter[str]:
    """How often each is launched, by its name without arguments."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return Counter(name for event in profile.events() for name in KERNEL.findall(event.name))


def has_132_multiprocessors() -> bool:
    """An H200, or another GPU of compute capability 9.0 with as many."""
    if not torch.cuda.is_available():
        return False
    device = torch.cuda.get_device_properties(0)
    return (device.major, device.minor, device.multi_processor_count) == (9, 0, 132)
