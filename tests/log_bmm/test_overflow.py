"""The sums of log_bmm's derivatives beside factors so large that a product with 1 / S alone is beyond float32."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops.reference import log_bmm as reference


@pytest.mark.parametrize("over", [0, 2])
@pytest.mark.parametrize("scale", [1.0, 1e13, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_factors(device: str, over: int, scale: float, dtype: torch.dtype) -> None:
    # log S is -62: as large as 1 / S gets in the products of exponentials.
    a = torch.tensor([[[0.0, -70.0]]], dtype=dtype, device=device)
    b = torch.tensor([[[-62.0], [0.0]]], dtype=dtype, device=device)
    _, log_s = torch.ops.dcs._log_bmm(a, b, "highest")
    factors = torch.tensor([[[3.0, -5.0]]], dtype=dtype, device=device) * scale
    x, z = (factors, None) if over == 0 else (None, factors.mT)
    sums = torch.ops.dcs._log_bmm_product(a, b, log_s, x, None, z, over)
    expected = reference.log_bmm_product(a.double(), b.double(), log_s.double(), *(
        None if t is None else t.double() for t in (x, None, z)
    ), over)  # fmt: skip
    assert expected.isfinite().all()
    torch.testing.assert_close(sums.double(), expected, rtol=2e-5 if dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_special_factors_stay_in_their_k(device: str, special: float) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1, 3, 4, device=device), torch.randn(1, 4, 5, device=device)
    _, log_s = torch.ops.dcs._log_bmm(a, b, "highest")
    z = torch.randn(1, 4, 5, device=device)
    z[0, 2, 1] = special
    sums = torch.ops.dcs._log_bmm_product(a, b, log_s, None, None, z, 2)
    torch.testing.assert_close(
        sums, reference.log_bmm_product(a, b, log_s, None, None, z, 2), rtol=1e-5, atol=1e-6, equal_nan=True
    )
