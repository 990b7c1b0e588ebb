"""Gradients in rewards and values alone, in which returns are linear: one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

from torch_dcs_ops import returns

from returns.oracle import make_batch

SHAPE = (5, 3)
RATES = ("number", "row", "step")
Operands = dict[str, Any]


def make_operands(device: str, rates: str) -> Operands:
    batch = make_batch(SHAPE, seed=7)
    x: Operands = {name: tensor.to(device) for name, tensor in batch._asdict().items()}
    x["rhos"] = x["rhos"] * 1.01 + 0.003  # away from the bounds that they are cut to
    if rates == "number":
        x |= {"gamma": 0.9, "trace": 0.8}
    elif rates == "row":
        x |= {"gamma": x["gamma"][0].clone(), "trace": x["trace"][0].clone()}
    return x | {"ends": {"terminated": x["terminated"], "truncated": x["truncated"]}}


def _gae(x: Operands, **bootstrap: Tensor) -> Any:
    return returns.gae(x["rewards"], x["values"], gamma=x["gamma"], gae_lambda=x["trace"], **bootstrap, **x["ends"])


def _td_lambda(x: Operands, *values: Tensor, **bootstrap: Tensor) -> Any:
    return returns.td_lambda_returns(
        x["rewards"], *values, gamma=x["gamma"], lambda_=x["trace"], **bootstrap, **x["ends"]
    )


def _vtrace(x: Operands, **bootstrap: Tensor) -> Any:
    return returns.vtrace(
        x["rewards"], x["values"], x["rhos"], gamma=x["gamma"], lambda_=x["trace"], clip_rho_threshold=1.1,
        clip_pg_rho_threshold=1.3, **bootstrap, **x["ends"],
    )  # fmt: skip


def _n_step(x: Operands, *values: Tensor, n: int = 3, **bootstrap: Tensor) -> Any:
    return returns.n_step_returns(
        x["rewards"], *values, n=n, gamma=x["gamma"], lambda_=x["trace"], **bootstrap, **x["ends"]
    )


# name: (function of operands, what it is linear in)
FUNCTIONS: dict[str, tuple[Callable[[Operands], Any], tuple[str, ...]]] = {
    "discounted": (
        lambda x: returns.discounted_returns(
            x["rewards"], x["gamma"], bootstrap_value=x["bootstrap_value"], **x["ends"]
        ),
        ("rewards", "bootstrap_value"),
    ),
    "gae, next values": (
        lambda x: _gae(x, next_values=x["next_values"]), ("rewards", "values", "next_values"),
    ),
    "gae, bootstrap value": (
        lambda x: _gae(x, bootstrap_value=x["bootstrap_value"]), ("rewards", "values", "bootstrap_value"),
    ),
    "td_lambda, next values": (
        lambda x: _td_lambda(x, next_values=x["next_values"]), ("rewards", "next_values"),
    ),
    "td_lambda, bootstrap value": (
        lambda x: _td_lambda(x, x["values"], bootstrap_value=x["bootstrap_value"]),
        ("rewards", "values", "bootstrap_value"),
    ),
    "n_step, next values": (
        lambda x: _n_step(x, next_values=x["next_values"]), ("rewards", "next_values"),
    ),
    "n_step, bootstrap value": (
        lambda x: _n_step(x, x["values"], bootstrap_value=x["bootstrap_value"]),
        ("rewards", "values", "bootstrap_value"),
    ),
    "n_step, n = 1": (lambda x: _n_step(x, n=1, next_values=x["next_values"]), ("rewards", "next_values")),
    "n_step, all steps": (lambda x: _n_step(x, n=9, next_values=x["next_values"]), ("rewards", "next_values")),
    "vtrace, next values": (
        lambda x: _vtrace(x, next_values=x["next_values"]), ("rewards", "values", "next_values"),
    ),
    "vtrace, bootstrap value": (
        lambda x: _vtrace(x, bootstrap_value=x["bootstrap_value"]), ("rewards", "values", "bootstrap_value"),
    ),
}  # fmt: skip


def of_leaves(name: str, x: Operands) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    function, names = FUNCTIONS[name]
    leaves = tuple(x[name].clone().requires_grad_() for name in names)
    return lambda *values: function(x | dict(zip(names, values, strict=True))), leaves


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_value
def test_gradients(device: str, name: str, rates: str) -> None:
    function, leaves = of_leaves(name, make_operands(device, rates))
    names = {type(result.grad_fn).__name__ for result in as_tuple(function(*leaves))}
    assert names == {"NStepFunctionBackward" if name.startswith("n_step") else "ReturnsFunctionBackward"}
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("flags", ["terminated", "truncated", "neither"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_flag_alone(device: str, name: str, flags: str) -> None:
    x = make_operands(device, "number")
    x["ends"] = {"terminated": None} if flags != "terminated" else {"terminated": x["terminated"]}
    if flags == "truncated":
        x["ends"]["truncated"] = x["truncated"].to(torch.float64)  # numbers 0 and 1
    function, leaves = of_leaves(name, x)
    assert gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_narrow_dtypes(device: str, name: str, dtype: torch.dtype) -> None:
    """Upstream gradients are sums of few terms of 1, 2 and 4: a gradient is rounded when it is stored, not before."""
    x = make_operands(device, "number")
    function, names = FUNCTIONS[name]
    tensors = {"rewards", "values", "next_values", "bootstrap_value", "rhos"}
    rounded = {key: value.to(dtype) if key in tensors else value for key, value in x.items()}
    exact = {key: value.to(torch.float64) if key in tensors else value for key, value in rounded.items()}

    def gradients(operands: Operands) -> list[Tensor]:
        leaves = [operands[key].clone().requires_grad_() for key in names]
        results = as_tuple(function(operands | dict(zip(names, leaves, strict=True))))
        upstream = [torch.arange(r.numel(), device=device).reshape(r.shape).remainder(3).to(r.dtype) for r in results]
        return [gradient.double() for gradient in torch.autograd.grad(results, leaves, upstream)]

    # Ratios, discounts and sums of at most 5 steps in float32, rounded once to the dtype.
    relative = torch.finfo(dtype).eps / 2 + 16 * torch.finfo(torch.float32).eps
    for found, wanted in zip(gradients(rounded), gradients(exact), strict=True):
        torch.testing.assert_close(found, wanted, rtol=relative, atol=relative * wanted.abs().max().item())


def test_a_bootstrap_value_that_broadcasts(device: str) -> None:
    x = make_operands(device, "number")
    x["bootstrap_value"] = x["bootstrap_value"][:1].clone()
    function, leaves = of_leaves("gae, bootstrap value", x)
    assert gradcheck(function, leaves)


def test_time_at_the_end_and_one_result(device: str) -> None:
    x = make_operands(device, "number")
    flags = {name: flag.T for name, flag in x["ends"].items()}

    def function(rewards: Tensor, values: Tensor, last: Tensor) -> Tensor:
        results = returns.gae(rewards, values, bootstrap_value=last, time_dim=-1, gamma=0.9, **flags)
        return results[0]

    leaves = [x[name].T.clone().requires_grad_() for name in ("rewards", "values")]
    assert gradcheck(function, (*leaves, x["bootstrap_value"].clone().requires_grad_()))


def test_no_steps_and_no_rows(device: str) -> None:
    for shape in ((0, 3), (4, 0)):
        rewards, values = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
        advantages, targets = returns.gae(rewards, values, next_values=values, terminated=None)
        (advantages.sum() + targets.sum()).backward()
        assert rewards.grad is not None
        assert rewards.grad.shape == shape


def test_no_steps_leave_a_bootstrap_value_without_weight(device: str) -> None:
    rewards, last = torch.zeros(0, 3, device=device), torch.ones(3, device=device, requires_grad=True)
    advantages, _ = returns.gae(rewards, rewards, bootstrap_value=last, terminated=None)
    advantages.sum().backward()
    assert last.grad is not None
    assert not last.grad.any()


@pytest.mark.parametrize("name", ["gae, next values", "gae, bootstrap value", "n_step, bootstrap value"])
def test_flags_may_change_after_the_forward(device: str, name: str) -> None:
    """Rollout buffers are filled again; flags that are numbers, or two of them, are not read by the backward."""

    def gradients(changes: bool) -> tuple[Tensor, ...]:
        x = make_operands(device, "number")
        kept = {flag: value.to(torch.float64) for flag, value in x["ends"].items()}
        x["ends"] = kept
        function, leaves = of_leaves(name, x)
        total = sum(result.pow(2).sum() for result in as_tuple(function(*leaves)))
        for flag in kept.values():
            if changes:
                flag.zero_()
        return torch.autograd.grad(total, leaves)  # type: ignore[arg-type]

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["gae, next values", "vtrace, next values", "n_step, bootstrap value"])
def test_flags_ratios_and_discounts_of_inference_mode(device: str, name: str) -> None:
    x = make_operands(device, "step")
    with torch.inference_mode():
        x["ends"] = {flag: value.clone() for flag, value in x["ends"].items()}
        x |= {factor: x[factor].clone() for factor in ("rhos", "gamma", "trace")}
    function, leaves = of_leaves(name, x)
    assert gradcheck(function, leaves)


def test_what_is_kept_for_a_backward(device: str) -> None:
    """Flags; nothing of the operands' size in their dtype."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = make_operands(device, "number")
    function, leaves = of_leaves("gae, next values", x)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*leaves)
    assert kept
    assert all(tensor.dtype == torch.bool for tensor in kept)


def test_discounts_with_a_gradient_take_the_formulas(device: str) -> None:
    x = make_operands(device, "step")
    gamma = x["gamma"].clone().requires_grad_()
    rewards = x["rewards"].clone().requires_grad_()
    result = returns.discounted_returns(rewards, gamma, **x["ends"])
    assert "ReturnsFunction" not in type(result.grad_fn).__name__
    gradients = torch.autograd.grad(result.sum(), (rewards, gamma))
    assert all(gradient.any() for gradient in gradients)
