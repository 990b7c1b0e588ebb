"""functional.grouped_mm as CUDA has it: what it does not compute is unset there, and NaN here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_grouped_mm = functional.grouped_mm


def grouped_mm_with_nan(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """A stand-in for functional.grouped_mm on a CPU, to be put in its place."""
    product = _grouped_mm(left, right, offs=offs)
    if right.dim() == 3:
        # Between its rows, which a CPU with AMX multiplies as well (with_padding), nothing: CUDA does not.
        room = product.new_zeros(product.size(0), product.stride(0))
        product = room[:, : product.size(1)].copy_(product)
        product[int(offs) :] = torch.nan
    return product
