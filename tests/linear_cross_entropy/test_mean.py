"""What a mean over rows divides by and leaves to the logits' gradient, by the op of one launch and by torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops import _registry
from torch_dcs_ops.ops.linear_cross_entropy import mean as module
from torch_dcs_ops.reference.linear_cross_entropy.loss import Options

IGNORED = -100
CLASSES = 11


def targets(rows: int, ignored: float, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < ignored] = IGNORED
    return target.to(device)


@pytest.mark.parametrize("ignored", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 31, 1024, 1025, 40000])
def test_factors(device: str, rows: int, dtype: torch.dtype, is_weighted: bool, ignored: float) -> None:
    target = targets(rows, ignored, device)
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1), dtype=dtype).to(device)
    factors = torch.full((3,), math.nan, dtype=dtype, device=device)
    _registry.mean_factors(target, weight if is_weighted else None, IGNORED, 0.0, factors)
    valid = target[target != IGNORED].cpu()
    divisor = float(weight.cpu().double()[valid].sum()) if is_weighted else float(valid.numel())
    rounding = 32 * torch.finfo(dtype).eps
    assert float(factors[0]) == pytest.approx(divisor, rel=rounding, abs=0.0)
    assert float(factors[1]) == pytest.approx(1 / divisor if divisor else math.inf, rel=rounding)
    assert float(factors[2]) == 1.0


@pytest.mark.parametrize("ignored", [0.3, 2.0])
def test_a_boost(device: str, ignored: float) -> None:
    """With no valid row the reciprocal is infinite: it goes to the logits' gradient, and nothing is lacking."""
    target, factors = targets(50, ignored, device), torch.empty(3, device=device)
    _registry.mean_factors(target, None, IGNORED, 512.0, factors)
    count = int((target != IGNORED).sum())
    assert factors.tolist() == pytest.approx([count, 512.0, 1 / count / 512] if count else [0.0, math.inf, 1.0])


def test_a_target_that_is_no_class(device: str) -> None:
    """Is not looked up: the row op is what refuses it."""
    if device == "cpu":
        pytest.skip("the reference looks weights up by indexing, which refuses it")
    target, factors = torch.tensor([3, CLASSES, -7, 1 << 40], device=device), torch.empty(3, device=device)
    _registry.mean_factors(target, torch.ones(CLASSES, device=device), IGNORED, 0.0, factors)
    assert float(factors[0]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 1025, 40000])
def test_mean(device: str, rows: int, dtype: torch.dtype) -> None:
    values = torch.rand(rows, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device, dtype)
    divisor, mean = torch.tensor([7.0], dtype=dtype, device=device), torch.empty((), dtype=dtype, device=device)
    _registry.mean(values, divisor, mean)
    assert float(mean) == pytest.approx(float(values.double().sum()) / 7, rel=64 * torch.finfo(dtype).eps)


def test_nothing_over_nothing_is_nan(device: str) -> None:
    zero, mean = torch.zeros(1, device=device), torch.empty((), device=device)
    _registry.mean(torch.zeros(5, device=device), zero, mean)
    assert math.isnan(float(mean))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_boosted", [False, True])
def test_both_ways(
    device: str, monkeypatch: pytest.MonkeyPatch, is_boosted: bool, is_weighted: bool, reduction: str
) -> None:
    """The op of one launch says what torch's operations say."""
    target, head = targets(300, 0.3, device), torch.randn(CLASSES, 5, device=device).half()
    weight = torch.rand(CLASSES, device=device) if is_weighted else None
    options = Options(reduction, IGNORED, label_smoothing=0.1, z_loss=0.5)
    if not is_boosted:
        head = head.float()
    found = []
    for is_one_launch in (True, False):
        monkeypatch.setattr(module, "_is_one_launch", lambda _, one=is_one_launch: one)
        factors = module.factors_of(head, target, weight, options, is_boosted=is_boosted)
        found.append((*factors, module.mean_of(torch.ones(300, device=device), factors.divisor)))
    torch.testing.assert_close(found[0], found[1])


def test_opcheck(device: str) -> None:
    weight, factors = torch.rand(CLASSES, device=device), torch.empty(3, device=device)
    opcheck(_registry.mean_factors, (targets(9, 0.3, device), weight, IGNORED, 2.0, factors))
    opcheck(_registry.mean, (torch.rand(9, device=device), factors[:1] + 1, torch.empty((), device=device)))


@pytest.mark.parametrize("wrong", ["target", "weight", "factors"])
def test_errors(device: str, wrong: str) -> None:
    target, weight, factors = targets(4, 0.0, device), torch.rand(CLASSES, device=device), torch.empty(3, device=device)
    tensors = {"target": target, "weight": weight, "factors": factors}
    tensors[wrong] = tensors[wrong].to(torch.float16)
    with pytest.raises(RuntimeError, match=rf"^_mean_factors: {wrong} must be .*, got .*float16"):
        _registry.mean_factors(tensors["target"], tensors["weight"], IGNORED, 0.0, tensors["factors"])
    with pytest.raises(RuntimeError, match=r"^_mean: divisor and mean must be one float32 each, got"):
        _registry.mean(weight, factors, factors[0])
