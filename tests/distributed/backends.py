"""What tests of two processes run on; the processes themselves import no pytest."""

from __future__ import annotations

import pytest
import torch

BACKENDS = [
    "gloo",
    pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]
