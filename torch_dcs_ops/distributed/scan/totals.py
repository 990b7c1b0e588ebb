"""What ranks tell each other of their slices of time: what each hands on, and the product of its gates.

On a CPU, and wherever the scan of a slice from 0 is of use, what it hands on is that scan's last y. On a GPU a scan
that would be thrown away is not made: kernels that only read find both numbers, in float64 (triton_kernels/scan).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...ops._common.triton import launchers_for
from ...reference.scan import ScanCall, has_step_gates
from .head import is_eager, may_be_mended

if TYPE_CHECKING:
    from .discounted_cumsum import ScanSegments

_TINY, _HUGE = 5e-324, torch.finfo(torch.float64).max
_LEAST_STEPS = 1024  # of a slice: a block's of one row
_READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Totals(NamedTuple):
    """Of every segment and row, (segments, *rows), in float64 or complex128."""

    ends: Tensor
    products: Tensor
    cuts: Tensor | None  # 1 where a reset cuts a segment


def totals_of(
    x: Tensor, gamma: Tensor | None, call: ScanSegments, reset: Tensor | None, shifted: bool, keep: bool
) -> tuple[Totals, Tensor | None]:
    """(the totals of scans from 0, these scans where `keep` and head.py has what is carried into them added).

    With `shifted` a segment hands on its last y times its last gate.
    """
    wide, dim = torch.promote_types(x.dtype, torch.float64), call.dim
    is_kept = keep and may_be_mended(x, gamma, call, reset)
    if gamma is None and reset is None and call.gamma_value == 1:
        # Nothing need be written.
        return Totals(x.sum(dim, dtype=wide), _products(x, gamma, call), None), None
    kernels = None if is_kept else _kernels_for(x, gamma, call)
    if kernels is not None:
        scan = ScanCall(gamma, call.gamma_value, dim, call.reverse, shifted, None, reset, None)
        ends, products, cuts = kernels.totals(x, scan)
        return Totals(ends, products, None if reset is None else cuts), None
    products = _products(x, gamma, call)
    ends, own = torch.zeros_like(products), None
    if x.size(dim):
        own = call.scan(x, gamma, None, reset, shifted)
        ends = own.select(dim, call.last).to(wide)
        if shifted:
            ends = _handed_on(ends, x, gamma, call, reset)
    cuts = None if reset is None else reset.any(dim).to(wide)
    return Totals(ends, products, cuts), own if is_kept else None


def _kernels_for(x: Tensor, gamma: Tensor | None, call: ScanSegments) -> ModuleType | None:
    numbers = (x,) if gamma is None else (x, gamma)
    is_read = x.is_cuda and all(number.dtype in _READ for number in numbers)
    if not is_read or x.size(call.dim) < _LEAST_STEPS or not is_eager(*numbers):
        return None
    return launchers_for(x, "scan.totals")


def _handed_on(last: Tensor, x: Tensor, gamma: Tensor | None, call: ScanSegments, reset: Tensor | None) -> Tensor:
    gate: Any = call.gamma_value
    if gamma is not None and has_step_gates(gamma, x.dim()):
        gate = gamma.expand(x.shape).select(call.dim, call.last)
    elif gamma is not None:
        gate = _rows(gamma.to(x.device), x, call.dim)
    ends: Tensor = gate * last
    return ends if reset is None else torch.where(reset.select(call.dim, call.last), 0, ends)


def _rows(gamma: Tensor, x: Tensor, dim: int) -> Tensor:
    return gamma.expand(x.shape[:dim] + x.shape[dim + 1 :])


def _products(x: Tensor, gamma: Tensor | None, call: ScanSegments) -> Tensor:
    """Of all gates of a segment, in float64 or complex128.

    One that leaves float64's range stays at its end, so that what a product of finite gates makes of 0 is 0, and of an
    infinity an infinity, as in the recurrence.
    """
    wide, dim = torch.promote_types(x.dtype, torch.float64), call.dim
    if gamma is not None and has_step_gates(gamma, x.dim()):
        gates = gamma.to(wide).expand(x.shape)
        product = gates.prod(dim)
        signs, is_infinite = gates.sgn().prod(dim), gates.isinf().any(dim)
    else:
        base = x.new_full((), call.gamma_value, dtype=wide) if gamma is None else gamma.to(device=x.device, dtype=wide)
        base = _rows(base, x, dim)
        steps = x.size(dim)
        product, signs, is_infinite = base**steps, base.sgn() ** steps, base.isinf()
    product = torch.where(product == 0, signs * _TINY, product)
    if wide.is_complex:
        return product
    return torch.where(is_infinite, product, torch.nan_to_num(product, torch.nan, _HUGE, -_HUGE))
