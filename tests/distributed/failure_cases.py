"""A rank that ends, or comes late, while the others wait for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from torch_dcs_ops.distributed import sequence_parallel_discounted_cumsum, vocab_parallel_linear_cross_entropy

from distributed.team import device, made_on_device


@made_on_device
def call(what: str) -> Any:
    input, weight = torch.ones(4, 5, requires_grad=True), torch.ones(3, 5)
    if what == "scan":
        return sequence_parallel_discounted_cumsum(input, 0.9, group=dist.group.WORLD)
    return vocab_parallel_linear_cross_entropy(
        input, weight, torch.zeros(4, dtype=torch.int64), group=dist.group.WORLD, first_class=3 * dist.get_rank(),
        classes=6,
    )  # fmt: skip


def without_one(what: str, happens: str) -> None:
    """All have made this call before, so that nobody asks the others first."""
    call(what)
    if dist.get_rank() == 1 and happens == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(12)
    call(what)
    if device() == "cuda":
        torch.cuda.synchronize()
