"""What is carried into a slice, added to the scan of the slice from 0: to its head, where it has not decayed yet.

The part of the carry in y is a scan of nothing from the carry: the recurrence itself says where it is below the
smallest normal number, which a NaN, an infinity or what gates of 1 keep never is. On a CPU it is followed block by
block until it is so in all rows. On CUDA nothing waits for it: of a discount that is a number and below 1 in size the
host knows after how many steps nothing finite is left, and one kernel takes what is not finite further, if there is
any. All else is scanned from the carry (totals.py says what that is).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...ops._common.triton import launchers_for
from ...reference.scan import has_step_gates

if TYPE_CHECKING:
    from .discounted_cumsum import ScanSegments

_LEAST_STEPS = 4096  # of a slice: below them a second scan is as fast
_BLOCK_STEPS = 1024  # of the first block; each is twice as long as the one before
_WHOLE = (torch.float32, torch.float64)  # half precision would be rounded twice


def steps_until_nothing(gamma: float, dtype: torch.dtype) -> int | None:
    """After how many steps gamma's power makes a subnormal number of the largest one; None: never."""
    size = abs(gamma)
    if not size < 1:
        return None
    if size == 0:
        return 1
    info = torch.finfo(dtype)
    octaves = math.log2(info.max) - math.log2(info.smallest_normal) + 1
    return math.ceil(octaves / -math.log2(size))


def is_eager(*tensors: Tensor) -> bool:
    """Whether kernels may be launched on these tensors at once: nothing traces them, and no mode looks on."""
    are_plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return are_plain and not is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def may_be_mended(x: Tensor, gamma: Tensor | None, call: ScanSegments, reset: Tensor | None) -> bool:
    """Whether x is scanned from 0 first and then the head of that mended, and not scanned once all is known."""
    steps = x.size(call.dim)
    if not is_eager(x) or x.dtype not in _WHOLE or steps < _LEAST_STEPS:
        return False
    if gamma is not None:
        return x.device.type == "cpu"
    head = steps_until_nothing(call.gamma_value, x.dtype)
    if head is None or head > steps // 2:
        return False
    if x.device.type == "cpu":
        return True
    if reset is not None:
        return False  # what is not finite would have to end at one, wherever that is
    # A scan lies as empty_like does.
    is_contiguous = torch.empty_like(x, device="meta").is_contiguous()
    return x.is_cuda and is_contiguous and launchers_for(x, "scan.slices") is not None


def mend_(
    y: Tensor, gamma: Tensor | None, call: ScanSegments, carry: Tensor, reset: Tensor | None, shifted: bool
) -> None:
    """Adds the part of `carry` (segments, *rows) that a shifted scan begins with, to y, each segment's scan from 0."""
    steps, dim, done = y.size(call.dim), call.dim, 0
    size, smallest = _BLOCK_STEPS, torch.finfo(y.dtype).smallest_normal
    if y.is_cuda:
        size = min(steps_until_nothing(call.gamma_value, y.dtype) or steps, steps)
    while done < steps:
        count = min(size, steps - done)
        start = steps - done - count if call.reverse else done
        part, carry = _part_of_carry(y, gamma, call, carry, reset, shifted, slice(start, start + count))
        y.narrow(dim, start, count).add_(part)
        done, size = done + count, 2 * size
        if y.is_cuda:
            _carry_on(y, call, carry if shifted else carry * call.gamma_value, steps - done)
            return
        # A subnormal number times 0.9 may be itself for ever.
        if bool((carry.abs() < smallest).all()):
            return


def _part_of_carry(
    y: Tensor, gamma: Tensor | None, call: ScanSegments, carry: Tensor, reset: Tensor | None, shifted: bool, at: slice
) -> tuple[Tensor, Tensor]:
    """(the carry's part in the steps `at`, what it is behind them)."""
    dim, count = call.dim, at.stop - at.start
    shape = list(y.shape)
    shape[dim] = count
    gates: Any = gamma
    has_steps = gamma is not None and has_step_gates(gamma, y.dim())
    if gamma is not None and has_steps:
        gates = gamma.expand(y.shape).narrow(dim, at.start, count)
    cuts = None if reset is None else reset.narrow(dim, at.start, count)
    nothing = y.new_zeros(shape)
    if not shifted:
        part = call.scan(nothing, gates, carry, cuts)
        return part, part.select(dim, call.last).contiguous()
    nothing.select(dim, call.first).copy_(carry)
    part = call.scan(nothing, gates, None, cuts, shifted=True)
    last: Any = call.gamma_value
    if gamma is not None:
        last = gates.select(dim, call.last) if has_steps else gamma.expand(y.shape[:dim] + y.shape[dim + 1 :])
    behind = part.select(dim, call.last) * last
    if cuts is not None:
        behind = torch.where(cuts.select(dim, call.last), 0, behind)
    return part, behind.to(y.dtype)


def _carry_on(y: Tensor, call: ScanSegments, carry: Tensor, steps: int) -> None:
    """What comes into the last `steps`, in the direction of the scan, goes on where it is not finite."""
    module = launchers_for(y, "scan.slices")
    assert module is not None  # `may_be_mended`
    start, sign = 0 if call.reverse else y.size(call.dim) - steps, -1 if call.gamma_value < 0 else 1
    module.add_what_is_not_finite_(y, start, steps, carry, call.dim, sign, call.reverse)
