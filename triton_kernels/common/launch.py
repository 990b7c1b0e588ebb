"""What launching takes beside the kernels: the device they run on and what it has."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD = 16  # bytes that a thread loads at a time


class Device(NamedTuple):
    multiprocessors: int
    shared_memory: int  # bytes that a program may have
    tensor_memory: bool = False  # where the sums of its tensor cores lie
    dependent_launches: bool = False  # whether a launch may begin while the one before it ends


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the device of its operands."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


class Relaunched:
    """A kernel that calls wait for, launched without another look at what its arguments are.

    Triton looks at every argument of every launch, to find the kernel that it has compiled for such ones, on the CPU
    and before anything runs. Here the caller's key says which ones those are.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def __call__(self, key: Any, grid: tuple[int, int, int], *arguments: Any, num_warps: int, **constants: Any) -> None:
        """key: equal for arguments of the same dtypes and alignments on the same device, and integers of one width.

        constants: in the kernel's order, behind all other arguments; its integers must not be specialized.
        """
        known = self.compiled.get(key)
        if known is not None:
            known[grid](*arguments, *constants.values())
            return
        # The interpreter has nothing compiled.
        found = self.kernel[grid](*arguments, **constants, num_warps=num_warps)
        if found is not None:
            self.compiled[key] = found


def device_of(tensor: Tensor) -> Device:
    # The interpreter's tensors are on the CPU; two "multiprocessors" have a program loop over several tiles.
    return _cuda_device(tensor.device.index) if tensor.is_cuda else Device(2, 0)


@functools.cache
def _cuda_device(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    nvidia = torch.version.hip is None
    tensor_memory = nvidia and facts.major in (10, 11)
    shared_memory = getattr(facts, "shared_memory_per_block_optin", 0)
    return Device(facts.multi_processor_count, shared_memory, tensor_memory, nvidia and facts.major >= 9)


def units(*lengths: int) -> tuple[int, ...]:
    """Each length as so many of a unit, and the unit: Triton sees multiples of 16 by itself, but not those of 8."""
    unit = math.gcd(WORD, *lengths)
    return (*(length // unit for length in lengths), unit)


def float_bits(number: float) -> int:
    """The bits of a float64: Triton rounds a float argument to float32."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def readable(matrix: Tensor) -> int:
    """How many columns may be read: the padding of rows of whole words too, where the memory has it."""
    rows, columns = matrix.shape
    wide = _whole_words(columns, matrix)
    end = matrix.storage_offset() + (rows - 1) * matrix.stride(0) + wide
    if wide <= matrix.stride(0) and end * matrix.element_size() <= matrix.untyped_storage().nbytes():
        return wide
    return columns


def _whole_words(columns: int, like: Tensor) -> int:
    elements = WORD // like.element_size()
    return -(-columns // elements) * elements
