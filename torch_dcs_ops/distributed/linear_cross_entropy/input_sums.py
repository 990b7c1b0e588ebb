"""input's gradient, of which every rank has a part: its sum over the ranks is on its way under the last products of
linear_weight's gradient.

What sum it is goes by the name `input_sum` through the ops: "all" rows on all ranks, each rank's "own" rows, or "" for
this rank's part alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..common import Ranks


class InputSum:
    """Of what `part` returns once the last product with linear_weight has been made; in `dtype`, but for a part."""

    def __init__(self, part: Callable[[], Tensor], team: Ranks, input_sum: str, dtype: torch.dtype) -> None:
        self.part, self.team, self.input_sum, self.dtype = part, team, input_sum, dtype
        self.pending: Callable[[], Tensor] | None = None

    def begin(self) -> None:
        """Once: later calls change nothing."""
        if self.pending is None:
            self.pending = _summing(self.part(), self.team, self.input_sum, self.dtype)

    def result(self) -> Tensor:
        self.begin()
        assert self.pending is not None
        return self.pending()


def rows_of_sum(rows: int, team: Ranks, input_sum: str) -> int:
    return rows // team.size if input_sum == "own" else rows


def _summing(part: Tensor, team: Ranks, input_sum: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    if not input_sum:
        return lambda: part
    if input_sum == "own":
        own = team.scattered_totaling(part)
        return lambda: own().to(dtype)
    if team.size > 1 and part.dtype != dtype and part.size(0) % team.size == 0:
        # The sum in the wide dtype, the result in the narrow one: three quarters of an all-reduce's bytes.
        own = team.scattered_totaling(part)
        return lambda: team.gather(own().to(dtype)).flatten(0, 1)
    total = team.totaling(part)
    return lambda: total().to(dtype)
