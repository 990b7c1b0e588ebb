"""`dcs::_cross_entropy_rows_` in float64: its exponentials, and the oracle that has more digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linear_cross_entropy.rows.exact import check_in_float64, exact_rows
from linear_cross_entropy.rows.oracle import (
    INTERPRETED,
    KERNELS,
    KINDS,
    Kernel,
    make_kernel,
    make_logits,
    make_options,
    make_target,
    oracle,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has NumPy's exponentials")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return make_kernel(str(request.param))


def test_exponentials(kernel: Kernel) -> None:
    """Each alone in the sum of its row, where no other hides a wrong digit; all remainders of log 2, in 865 octaves."""
    gaps = torch.linspace(-600, 0, 30_000, dtype=torch.float64)
    logits = torch.stack((gaps, torch.zeros_like(gaps)), 1).to(kernel.device)
    target = torch.ones(len(gaps), dtype=torch.int64, device=kernel.device)
    written = logits.clone()
    check_in_float64(kernel(written, target), written, logits, target, {})
    # Where the sum is 1 the gradient is exp(gap), which is to be within one unit in the last place.
    gap, power = gaps[gaps < -40].numpy(), written[:, 0].cpu()[gaps < -40].numpy()
    assert np.all(np.abs(power - np.exp(gap.astype(np.longdouble))) <= np.spacing(power))


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_is_autograd(kind: str) -> None:
    options = make_options(kind, 5, 40, torch.float64, "cpu")
    logits, target = make_logits(5, 40, torch.float64, "cpu"), make_target(5, 40, "cpu")
    results, gradient = oracle(torch.float64, logits, target, options)
    expected = {"loss": results.loss, "lse": results.lse, "entropy": results.entropy, "gradient": gradient}
    for name, number in exact_rows(logits, target, options).items():
        value = torch.from_numpy(number.value.astype("float64")).reshape(expected[name].shape)
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-13)
