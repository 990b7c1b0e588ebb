"""Whether all ranks have the same targets: a rank with others has other rows to leave out, and another's loss.

On a CPU the ranks tell each other what they have before anything else: three numbers. On CUDA nothing waits, and
nothing more is told: a target of one rank alone has no owner among the ranks, or two, which an assertion on the device
finds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import Ranks

_OP = "linear_cross_entropy"
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407  # of a linear congruential generator


def check_targets(target: Tensor, ignore_index: int, classes: int, ranks: Ranks) -> None:
    """Raises the same sentence on all ranks: IndexError where a target is no class. For CPUs; elsewhere it returns."""
    if ranks.size == 1 or target.device.type != "cpu":
        return
    ids = target.reshape(-1)
    wrong = ((ids < 0) | (ids >= classes)) & (ids != ignore_index)
    first = wrong.nonzero()[:1]
    # In wrapping arithmetic; every index has a factor of its own.
    digest = (ids * (torch.arange(ids.numel()) * _MULTIPLIER + _INCREMENT)).sum()
    own = torch.stack((wrong.any().long(), ids[first].sum(), digest))
    every = ranks.gather(own).tolist()
    _refuse(every, ignore_index, classes)


def _refuse(every: list[list[int]], ignore_index: int, classes: int) -> None:
    for rank, (is_wrong, value, _) in enumerate(every):
        if is_wrong:
            where = "" if all(other[:2] == every[0][:2] for other in every) else f" (on rank {rank})"
            raise IndexError(
                f"{_OP}: target must be in [0, {classes - 1}] or ignore_index ({ignore_index}), got {value}{where}"
            )
    for rank, (_, _, digest) in enumerate(every):
        if digest != every[0][2]:
            raise RuntimeError(f"{_OP}: target must be the same on all ranks, got other values on rank {rank}")


def assert_one_owner(log_probs: Tensor, elsewhere: float, target: Tensor, ignore_index: int) -> None:
    """On CUDA: that each target (n, K) is one rank's, an ignored one nobody's; log_probs is (ranks, K, n)."""
    if log_probs.device.type == "cuda":
        owners = (log_probs != elsewhere).sum(0)
        torch._assert_async((owners.t() == (target != ignore_index)).all())
