"""Steps that do not count (`mask`): stepped over as if they were not in the sequence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from torch_dcs_ops import returns

from returns.oracle import make_batch
from support.selection import slow

LENGTH, ROWS = 12, 30
NAN = float("nan")
Rollout = dict[str, Any]


def rollout(device: str, rates: str = "number", convention: str = "bootstrap", seed: int = 0) -> Rollout:
    """Float64, time first. What does not count is NaN, and its flags are set."""
    batch = make_batch((LENGTH, ROWS), rates=rates, seed=seed)
    mask = torch.rand(LENGTH, ROWS, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0], mask[:, 1], mask[:, 2] = False, True, False
    mask[5, 2] = True
    x: Rollout = {"mask": mask, "terminated": batch.terminated | ~mask, "truncated": batch.truncated | ~mask}
    names = ("rewards", "values", "next_values") if convention == "next" else ("rewards", "values")
    x |= {name: getattr(batch, name).masked_fill(~mask, NAN) for name in names}
    if convention == "bootstrap":
        x["bootstrap_value"] = batch.bootstrap_value
    gamma, trace = {"number": (0.9, 0.8), "row": (batch.gamma[0], batch.trace[0])}.get(
        rates, (batch.gamma.masked_fill(~mask, NAN), batch.trace.masked_fill(~mask, NAN))
    )
    x |= {"gamma": gamma, "lambda_": trace}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in x.items()}


def gae(x: Rollout) -> tuple[Tensor, ...]:
    x = dict(x)
    return returns.gae(x.pop("rewards"), x.pop("values"), gae_lambda=x.pop("lambda_"), **x)


def td_lambda(x: Rollout) -> tuple[Tensor, ...]:
    x = dict(x)
    return (returns.td_lambda_returns(x.pop("rewards"), x.pop("values"), **x),)


def discounted(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name not in ("values", "lambda_")}
    return (returns.discounted_returns(x.pop("rewards"), x.pop("gamma"), **x),)


FUNCTIONS: dict[str, Callable[[Rollout], tuple[Tensor, ...]]] = {
    "gae": gae, "td_lambda": td_lambda, "discounted": discounted,
}  # fmt: skip


def without_steps(function: Callable[[Rollout], tuple[Tensor, ...]], x: Rollout) -> tuple[Tensor, ...]:
    """Every column by itself, its steps that do not count taken out; NaN where they were."""
    counts = x["mask"]
    results = [torch.full_like(x["rewards"], NAN) for _ in function(x)]
    for column in range(ROWS):
        steps = counts[:, column].nonzero().flatten()

        def taken(value: Any, steps: Tensor = steps, column: int = column) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value[steps, column] if value.dim() == 2 else value[column]

        short = {name: taken(value) for name, value in x.items() if name != "mask"}
        for result, part in zip(results, function(short), strict=True):
            result[steps, column] = part
    return tuple(results)


@pytest.mark.parametrize("convention", ["bootstrap", "next"])
@pytest.mark.parametrize("rates", ["number", "row", "step"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_if_they_were_not_there(device: str, name: str, rates: str, convention: str) -> None:
    x = rollout(device, rates, convention)
    expected = without_steps(FUNCTIONS[name], x)
    for result, wanted in zip(FUNCTIONS[name](x), expected, strict=True):
        counted = x["mask"]
        assert result.shape == wanted.shape
        # Discounts of a step are of the rewards' precision.
        torch.testing.assert_close(result[counted], wanted[counted], rtol=1e-12, atol=1e-12)


def test_without_any_bootstrap(device: str) -> None:
    x = rollout(device, convention="neither")
    (result,), (expected,) = discounted(x), without_steps(discounted, x)
    torch.testing.assert_close(result[x["mask"]], expected[x["mask"]], rtol=1e-12, atol=1e-12)


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """verl's compute_gae_advantage_return before it whitens, for (batch, time)."""
    after = carry = torch.zeros_like(rewards[:, 0])
    advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        carried = delta + gamma * lam * carry
        after = values[:, t] * mask[:, t] + (1 - mask[:, t]) * after
        carry = carried * mask[:, t] + (1 - mask[:, t]) * carry
        advantages.append(carry)
    stacked = torch.stack(advantages[::-1], 1)
    return stacked, stacked + values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_verl(device: str, dtype: torch.dtype) -> None:
    rewards, values = (torch.randn(5, 40, device=device, dtype=dtype) for _ in range(2))
    mask = (torch.rand(5, 40, device=device) < 0.7).to(dtype)
    result = returns.gae(
        rewards, values, bootstrap_value=torch.zeros(5, device=device, dtype=dtype), terminated=None, mask=mask,
        gamma=0.99, gae_lambda=0.95, time_dim=1,
    )  # fmt: skip
    expected = verl_gae(rewards.double(), values.double(), mask.double(), 0.99, 0.95)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for got, wanted in zip(result, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_what_a_step_that_does_not_count_gets(device: str) -> None:
    mask = torch.tensor([False, True, False, False, True, False], device=device)
    x = {
        "rewards": torch.ones(6, device=device), "values": torch.arange(6.0, device=device), "mask": mask,
        "bootstrap_value": torch.tensor(3.0, device=device), "terminated": None, "gamma": 0.5, "lambda_": 0.5,
    }  # fmt: skip
    advantages, targets = gae(x)
    assert torch.equal(advantages[[0, 2, 3, 5]], torch.stack((*advantages[[1, 4, 4]], advantages.new_zeros(()))))
    assert torch.equal(targets, advantages + x["values"])
    for function in (td_lambda, discounted):
        (result,) = function(x)
        assert torch.equal(result[[0, 2, 3, 5]], torch.stack((*result[[1, 4, 4]], result.new_zeros(()))))


@pytest.mark.parametrize("convention", ["bootstrap", "next"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_value
def test_gradients(device: str, name: str, convention: str) -> None:
    x = rollout(device, "row", convention)
    rows = slice(0, 4)
    x = {n: v[..., rows] if isinstance(v, Tensor) else v for n, v in x.items()}
    used = [n for n, v in x.items() if isinstance(v, Tensor) and v.is_floating_point()]
    if name == "discounted":
        used = [n for n in used if n not in ("values", "lambda_")]
    if name == "td_lambda" and convention == "next":
        used.remove("values")
    # Finite, as gradcheck adds to them; test_as_if_they_were_not_there has what is not.
    leaves = [x[n].nan_to_num(0.25).requires_grad_() for n in used]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return FUNCTIONS[name](x | dict(zip(used, leaves, strict=True)))

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_what_does_not_count_are_0(device: str, name: str) -> None:
    x = rollout(device)
    leaves = {n: x[n].clone().requires_grad_() for n in ("rewards", "values", "bootstrap_value")}
    result = FUNCTIONS[name](x | leaves)[0]
    for leaf, n in zip(torch.autograd.grad(result.sin().sum(), list(leaves.values()), materialize_grads=True),
                       leaves, strict=True):  # fmt: skip
        assert leaf.isfinite().all()
        if n != "bootstrap_value":
            assert not leaf[~x["mask"]].any()


@pytest.mark.parametrize("name", [slow("discounted"), "gae", slow("td_lambda")])
def test_compiled(device: str, name: str, fresh_compiler: None) -> None:
    x = rollout(device)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for gamma in (0.9, 0.7):
        x["gamma"] = gamma
        torch.testing.assert_close(compiled(x), FUNCTIONS[name](x), equal_nan=True)
    leaves = [x["rewards"].nan_to_num(0.0).requires_grad_() for _ in range(2)]
    for function, leaf in zip((compiled, FUNCTIONS[name]), leaves, strict=True):
        function(x | {"rewards": leaf})[0].sin().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_meta_and_autocast(device: str, name: str) -> None:
    x = rollout(device)
    small = {n: x[n] for n in ("gamma", "lambda_")} | {"bootstrap_value": x["bootstrap_value"][3], "terminated": None}

    def column(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return FUNCTIONS[name](small | {"rewards": rewards, "values": values, "mask": mask})[0]

    apart = torch.func.vmap(column, (1, 1, 1), 1)
    together = FUNCTIONS[name](x | {"bootstrap_value": small["bootstrap_value"], "terminated": None, "truncated": None})
    torch.testing.assert_close(apart(x["rewards"], x["values"], x["mask"]), together[0])
    meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in x.items()}
    assert all(r.is_meta and r.shape == (LENGTH, ROWS) for r in FUNCTIONS[name](meta))
    half = {n: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in x.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        assert all(r.dtype == torch.float32 for r in FUNCTIONS[name](half))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty(device: str, name: str, shape: tuple[int, ...]) -> None:
    x: Rollout = dict.fromkeys(("rewards", "values"), torch.ones(shape, device=device))
    x |= {"bootstrap_value": torch.ones((), device=device), "mask": torch.ones(shape, device=device, dtype=torch.bool)}
    x |= {"terminated": None, "gamma": 0.9, "lambda_": 0.8}
    assert all(r.shape == shape for r in FUNCTIONS[name](x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sentences(name: str) -> None:
    x = rollout("cpu")
    op = {"gae": "gae", "td_lambda": "td_lambda_returns", "discounted": "discounted_returns"}[name]
    for wrong, exception, sentence in (
        (x["mask"][:4], RuntimeError, f"mask must have rewards' shape ({LENGTH}, {ROWS}), got (4, {ROWS})"),
        (x["mask"].int(), RuntimeError, "mask must be bool or have rewards' dtype float64, got int32"),
        (x["mask"].to("meta"), RuntimeError, "mask must be on rewards' device cpu, got meta"),
        ([True], TypeError, "mask must be a tensor or None, got list"),
    ):
        with pytest.raises(exception, match="^" + re.escape(f"{op}: {sentence}")):
            FUNCTIONS[name](x | {"mask": wrong})
    nested = torch.nested.nested_tensor([torch.ones(2)])
    with pytest.raises(RuntimeError, match=f"^{op}: gamma must be a dense tensor, got a nested one"):
        FUNCTIONS[name](x | {"gamma": nested})
