"""integrations.verl beside verl's own module, loaded by its file where verl is installed, and the formula."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.integrations import verl

from linear_cross_entropy.oracle import assert_within_budget

FACTOR = 1.5


@functools.cache
def verls_own() -> Any:
    """The module that holds its FusedLinearForPPO; importing verl as a whole needs ray, vLLM and more."""
    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        pytest.skip("verl is not installed")
    path = Path(package.origin).parent / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verls_torch_functional", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operands(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape, 24, device=device).to(dtype).requires_grad_()
    w = (torch.randn(70, 24, device=device) / 24**0.5).to(dtype).requires_grad_()
    return x, w, torch.randint(70, shape, device=device)


def formula(x: Tensor, w: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (x @ w.T).div(temperature).log_softmax(-1)
    return log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def with_gradients(function: Any, x: Tensor, w: Tensor, ids: Tensor, temperature: float = 0.7) -> list[Tensor]:
    log_probs, entropy = function(x, w, ids, temperature)
    weights = torch.linspace(-1, 2, ids.numel(), device=ids.device).to(log_probs.dtype)
    loss = (log_probs.flatten() * weights).sum() + (entropy.flatten() * weights.flip(0)).sum()
    return [log_probs, entropy, *torch.autograd.grad(loss, (x, w))]


def exactly(x: Tensor, w: Tensor, ids: Tensor) -> list[Tensor]:
    wide = (x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
    return with_gradients(formula, *wide, ids)


@pytest.mark.parametrize("shape", [(40,), (4, 10)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_linear_beside_verls(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    arguments = operands(dtype, device, shape)
    found = with_gradients(verl.FusedLinearForPPO(), *arguments)
    own = with_gradients(verls_own().FusedLinearForPPO(), *arguments)
    assert [(value.dtype, value.shape) for value in found] == [(value.dtype, value.shape) for value in own]
    assert_within_budget(found, own, exactly(*arguments), [FACTOR] * 4)


def test_the_signatures_are_verls() -> None:
    def parameters(function: Any) -> list[tuple[str, Any]]:
        return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]

    own = verls_own().FusedLinearForPPO
    assert parameters(verl.FusedLinearForPPO.forward) == parameters(own.forward)
    assert set(parameters(own)) <= set(parameters(verl.FusedLinearForPPO))  # impl_backend is of 0.9


@pytest.mark.parametrize("shape", [(40,), (4, 10)], ids=str)
def test_fused_linear_beside_the_formula(device: str, shape: tuple[int, ...]) -> None:
    arguments = operands(torch.float32, device, shape)
    found = with_gradients(verl.FusedLinearForPPO(chunk_size=7), *arguments)
    assert_within_budget(found, with_gradients(formula, *arguments), exactly(*arguments), [FACTOR] * 4)


def test_ids_of_other_integers_and_ignored_ones() -> None:
    x, w, ids = operands(torch.float32, "cpu", (5,))
    expected = verl.FusedLinearForPPO()(x, w, ids)
    torch.testing.assert_close(verl.FusedLinearForPPO()(x, w, ids.int()), expected, rtol=0, atol=0)
    ids[2] = -100
    assert [value[2].item() for value in verl.FusedLinearForPPO()(x, w, ids)] == [0, 0]


def test_under_autocast(device: str) -> None:
    x, w, ids = operands(torch.float32, device, (4, 10))
    with torch.autocast(device, torch.bfloat16):
        log_probs, entropy = verl.FusedLinearForPPO()(x, w, ids)
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("reduction", ["none", "sum", "MEAN"])
def test_linear_cross_entropy(device: str, reduction: str) -> None:
    """Flat results, as verl's kernel has them; its reductions leave the entropy as it is."""
    x, w, ids = operands(torch.float32, device, (4, 10))
    log_probs, entropy = formula(x.double(), w.double(), ids, 0.7)
    reduced = {"none": log_probs.flatten(), "sum": log_probs.sum(), "MEAN": log_probs.mean()}[reduction]
    found = verl.linear_cross_entropy(x, w, ids, 0.7, reduction)
    torch.testing.assert_close(found, (reduced.float(), entropy.flatten().float()), rtol=1e-5, atol=1e-5)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, ids = operands(torch.float32, "cpu", (5,))
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    with pytest.raises(NotImplementedError, match=r"dist_process_group must be None or hold one .*, got 2 processes"):
        verl.linear_cross_entropy(x, w, ids, 1.0, "none", group)
    group.size = lambda: 1
    verl.linear_cross_entropy(x, w, ids, 1.0, "none", group)
    with pytest.raises(ValueError, match=r"reduction must be .*, got 'max'"):
        verl.linear_cross_entropy(x, w, ids, 1.0, "max")
