"""The private op that multiplies gradients by factors that a device knows, in one rounding."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import _registry

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
TYPES = [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.bfloat16),
         (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "to"), TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 7), (129, 1000)], ids=str)
@pytest.mark.parametrize(("factor", "other"), [(None, None), (0.3, None), (None, -1.7), (0.3, -1.7)])
def test_products(
    factor: float | None, other: float | None, shape: tuple[int, ...], dtype: torch.dtype, to: torch.dtype, device: str
) -> None:
    """Within one rounding, and three of the factors."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(shape, device=device).to(dtype)
    one = None if factor is None else torch.tensor([factor], dtype=wide, device=device)
    two = None if other is None else torch.tensor([other], dtype=wide, device=device)
    expected = x.double() * (factor or 1.0) * (other or 1.0) * 0.125
    for output in (torch.full_like(x, float("nan"), dtype=to), x):  # in place last
        if output.dtype == to:
            _registry.scale(x, one, output, two, 0.125)
            budget = torch.finfo(to).eps + 3 * torch.finfo(wide).eps
            torch.testing.assert_close(output.double(), expected, rtol=budget, atol=1e-7 if to == torch.float16 else 0)


@pytest.mark.parametrize("device", DEVICES)
def test_errors(device: str) -> None:
    x, one = torch.randn(4, device=device), torch.ones(1, device=device)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="factor must be one float32, got float64"):
        _registry.scale(x, one.double(), x)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="other must be one float32"):
        _registry.scale(x, one, x, torch.ones(2, device=device))
    with pytest.raises((TypeError, ValueError, RuntimeError), match="input and output must be contiguous and of one"):
        _registry.scale(x, one, x[:3])
