"""The gate before the first step leads nowhere without an `initial`: nothing in it may reach y."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

BAD = (float("nan"), float("inf"))


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", [(2, 40), (3, 16), (2, 4096), (2, 40_000)])
def test_the_first_gate_of_a_row_is_not_used(device: str, shape: tuple[int, int], bad: float, direction: str) -> None:
    x = torch.ones(shape, device=device)
    gates = torch.full(shape, 0.5, device=device)
    expected = discounted_cumsum(x, 0.5, direction=direction)
    gates[:, 0 if direction == "left" else -1] = bad
    torch.testing.assert_close(discounted_cumsum(x, gates, direction=direction), expected)


@pytest.mark.parametrize("at", [127, 255, 1023])
def test_a_carry_that_cancels_stays_finite(device: str, at: int) -> None:
    """y is 1 and then 0; the pieces of a scan that start behind it exceed float32 by themselves."""
    x = torch.zeros(1, 4096, device=device)
    x[0, at], x[0, at + 1] = 1, -2
    expected = torch.zeros_like(x)
    expected[0, at] = 1
    assert torch.equal(discounted_cumsum(x, 2.0, direction="left"), expected)
