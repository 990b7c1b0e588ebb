"""What modules of several libraries share."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(input: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies input here: autocast's where that is on."""
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
