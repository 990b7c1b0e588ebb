"""Operands of different dtypes, and a bootstrap_value with a time of size 1: as if the caller had fitted them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import returns

STEPS, ENVIRONMENTS = 7, 3
FLOATS = ("rewards", "values", "next_values", "bootstrap_value", "rhos")

FUNCTIONS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "discounted_returns": (returns.discounted_returns, "bootstrap_value", {"gamma": 0.9}),
    "gae": (returns.gae, "values bootstrap_value", {}),
    "gae by next_values": (returns.gae, "values next_values", {}),
    "gae masked": (returns.gae, "values bootstrap_value mask", {}),
    "td_lambda_returns": (returns.td_lambda_returns, "values bootstrap_value", {}),
    "td_lambda_returns masked": (returns.td_lambda_returns, "next_values mask", {}),
    "n_step_returns": (returns.n_step_returns, "values bootstrap_value", {"n": 3}),
    "upgo_returns": (returns.upgo_returns, "values bootstrap_value", {}),
    "vtrace": (returns.vtrace, "values rhos bootstrap_value", {}),
    "retrace_returns": (returns.retrace_returns, "q_values rhos next_values", {}),
    "gae packed": (returns.gae, "values next_values", {"cu_seqlens": torch.tensor([0, 4, 4, STEPS])}),
    "vtrace packed": (returns.vtrace, "values rhos next_values", {"cu_seqlens": torch.tensor([0, 4, 4, STEPS])}),
}


def batch() -> dict[str, Tensor]:
    shape = (STEPS, ENVIRONMENTS)
    tensors = {name: torch.rand(shape) for name in (*FLOATS, "q_values")}
    flags = {name: torch.rand(shape) < 0.3 for name in ("terminated", "truncated")}
    return tensors | flags | {"mask": torch.rand(shape) < 0.7, "bootstrap_value": torch.rand(ENVIRONMENTS)}


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def cast(operands: dict[str, Any], dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    return {name: value.to(dtypes[name]) if name in dtypes else value for name, value in operands.items()}


@pytest.mark.parametrize("wide", ["rewards", "the others"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_float64_beside_float32(case: str, wide: str) -> None:
    function, names, keywords = FUNCTIONS[case]
    given = batch()
    operands = {name: given[name] for name in ("rewards", *names.split(), "terminated", "truncated")}
    floats = [name for name, tensor in operands.items() if tensor.dtype != torch.bool]
    chosen = [name for name in floats if (name == "rewards") == (wide == "rewards")]
    flags = {"terminated": torch.float32, "mask": torch.float32}  # of neither dtype once the operands are float64
    got = as_tuple(function(**cast(operands, dict.fromkeys(chosen, torch.float64) | flags), **keywords))
    expected = as_tuple(function(**cast(operands, dict.fromkeys(floats, torch.float64)), **keywords))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_float16_and_bfloat16_meet_in_float32() -> None:
    rewards, values = torch.rand(STEPS, ENVIRONMENTS).half(), torch.rand(STEPS, ENVIRONMENTS).bfloat16()
    last = torch.rand(ENVIRONMENTS).half()
    got = returns.gae(rewards, values, bootstrap_value=last, terminated=None)
    expected = returns.gae(rewards.float(), values.float(), bootstrap_value=last.float(), terminated=None)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_0d_value_does_not_widen() -> None:
    """torch's rule: a 0-D tensor of the same kind follows the others."""
    rewards, values = torch.rand(STEPS), torch.rand(STEPS)
    last = torch.rand((), dtype=torch.float64)
    got = returns.gae(rewards, values, bootstrap_value=last, terminated=None)
    torch.testing.assert_close(got, returns.gae(rewards, values, bootstrap_value=last.float(), terminated=None))
    assert (rewards + last).dtype == got[0].dtype == torch.float32


def test_gradients_come_back_in_their_own_dtypes() -> None:
    rewards = torch.rand(STEPS, ENVIRONMENTS, dtype=torch.float64, requires_grad=True)
    values = torch.rand(STEPS, ENVIRONMENTS, requires_grad=True)
    last = torch.rand(1, ENVIRONMENTS, requires_grad=True)

    def gradients(rewards: Tensor, values: Tensor, last: Tensor, last_row: Tensor) -> tuple[Tensor, ...]:
        advantages, _ = returns.gae(rewards, values, bootstrap_value=last_row, terminated=None)
        return torch.autograd.grad(advantages.square().sum(), (rewards, values, last))

    got = gradients(rewards, values, last, last)
    wide = values.double(), last.double()
    expected = gradients(rewards, *wide, wide[1][0])
    assert [gradient.dtype for gradient in got] == [torch.float64, torch.float32, torch.float32]
    torch.testing.assert_close(got, (expected[0], expected[1].float(), expected[2].float()), rtol=0, atol=0)


@pytest.mark.parametrize("time_dim", [0, 1, -1])
@pytest.mark.parametrize("case", [case for case, (_, names, _) in FUNCTIONS.items() if "bootstrap" in names])
def test_a_bootstrap_value_with_a_time_of_one(case: str, time_dim: int) -> None:
    """cleanrl's next_value, (1, num_envs)."""
    function, names, keywords = FUNCTIONS[case]
    given = batch()
    operands = {name: given[name] for name in ("rewards", *names.split(), "terminated")}
    last = operands.pop("bootstrap_value")
    operands = {name: tensor.movedim(0, time_dim) for name, tensor in operands.items()}
    got, expected = (
        as_tuple(function(**operands, bootstrap_value=value, time_dim=time_dim, **keywords))
        for value in (last.unsqueeze(time_dim), last)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_compiled(fresh_compiler: None) -> None:
    given = batch()
    rewards, values, last = given["rewards"].double(), given["values"], given["bootstrap_value"][None]

    def both(rewards: Tensor, values: Tensor, last: Tensor, gamma: float) -> tuple[Tensor, ...]:
        results = returns.gae(rewards, values, bootstrap_value=last, terminated=None, gamma=gamma)
        return (*results, returns.n_step_returns(rewards, values, n=2, bootstrap_value=last, terminated=None))

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for gamma in (0.9, 0.8):
        arguments = (rewards, values, last, gamma)
        torch.testing.assert_close(compiled(*arguments), both(*arguments), rtol=1e-12, atol=1e-12)


def test_func_transforms() -> None:
    given = batch()
    rewards, values, last = given["rewards"].double(), given["values"], given["bootstrap_value"]

    def one(rewards: Tensor, values: Tensor, last: Tensor) -> Tensor:
        return returns.gae(rewards, values, bootstrap_value=last, terminated=None)[0]

    got = torch.func.vmap(one, in_dims=(1, 1, 0), out_dims=1)(rewards, values, last)
    torch.testing.assert_close(got, one(rewards, values.double(), last.double()), rtol=1e-12, atol=1e-12)
    _, tangent = torch.func.jvp(lambda values: one(rewards, values, last), (values,), (torch.ones_like(values),))
    assert tangent.dtype == torch.float64
    torch.testing.assert_close(tangent, one(0 * rewards, torch.ones_like(rewards), 0 * last.double()))
