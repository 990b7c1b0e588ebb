"""Returns that do not contain the value of a step's own state: whatever it is, it does not show in them.

So it is with the first values of the data and of every episode in lambda-returns, upgoing returns and Retrace targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import returns

from returns.oracle import Batch, make_batch

FIRST = (0, 4, 7)  # of the data, after a terminated step, after a truncated one
LENGTH = 9


def rollout(device: str, dtype: torch.dtype, time_dim: int, rates: str = "number") -> dict[str, Any]:
    flags = torch.zeros(LENGTH, 20, dtype=torch.long)
    flags[3], flags[6] = 1, 2
    batch: Batch = make_batch((LENGTH, 20), flags=flags, rates=rates)

    def placed(tensor: Tensor) -> Tensor:
        tensor = tensor if tensor.dtype == torch.bool else tensor.to(dtype)
        return tensor.movedim(0, time_dim).to(device).contiguous()

    x: dict[str, Any] = {name: placed(getattr(batch, name)) for name in ("rewards", "values", "next_values", "rhos")}
    rate = {"number": lambda t: 0.9, "row": lambda t: t[0].to(device), "step": placed}[rates]
    return x | {
        "last": batch.bootstrap_value.to(device, dtype), "gamma": rate(batch.gamma), "lambda_": rate(batch.trace),
        "ends": {"terminated": placed(batch.terminated), "truncated": placed(batch.truncated), "time_dim": time_dim},
    }  # fmt: skip


def td_lambda(x: dict[str, Any], values: Tensor) -> Tensor:
    return returns.td_lambda_returns(
        x["rewards"], values, bootstrap_value=x["last"], gamma=x["gamma"], lambda_=x["lambda_"], **x["ends"]
    )


def upgo(x: dict[str, Any], values: Tensor) -> Tensor:
    return returns.upgo_returns(x["rewards"], values, bootstrap_value=x["last"], gamma=x["gamma"], **x["ends"])


def whole_n_steps(x: dict[str, Any], values: Tensor) -> Tensor:
    return returns.n_step_returns(x["rewards"], values, n=LENGTH, bootstrap_value=x["last"], **x["ends"])


def retrace(x: dict[str, Any], values: Tensor) -> Tensor:
    return returns.retrace_returns(
        x["rewards"], values, x["rhos"], next_values=x["next_values"], gamma=x["gamma"], lambda_=x["lambda_"],
        **x["ends"],
    )  # fmt: skip


FUNCTIONS: dict[str, Callable[[dict[str, Any], Tensor], Tensor]] = {
    "td_lambda": td_lambda, "upgo": upgo, "retrace": retrace,
}  # fmt: skip


def spoiled(values: Tensor, time_dim: int, bad: float) -> Tensor:
    return values.index_fill(time_dim, torch.tensor(FIRST, device=values.device), bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("rates", ["number", "row", "step"])
@pytest.mark.parametrize("name", [*FUNCTIONS, "n_step"])
def test_a_value_that_no_return_contains_shows_in_none(
    device: str, name: str, rates: str, time_dim: int, bad: float
) -> None:
    x = rollout(device, torch.float32, time_dim, rates)
    function = (FUNCTIONS | {"n_step": whole_n_steps})[name]
    expected = function(x, spoiled(x["values"], time_dim, 0.5))
    assert expected.isfinite().all()
    assert torch.equal(function(x, spoiled(x["values"], time_dim, bad)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_dtypes(device: str, name: str, dtype: torch.dtype) -> None:
    for time_dim in (0, 1):
        x = rollout(device, dtype, time_dim)
        bad = 6e4 if dtype == torch.float16 else 1e30
        expected = FUNCTIONS[name](x, spoiled(x["values"], time_dim, 0.5))
        assert torch.equal(FUNCTIONS[name](x, spoiled(x["values"], time_dim, bad)), expected)


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nor_in_their_gradients(device: str, name: str, bad: float) -> None:
    x = rollout(device, torch.float32, 0)

    def gradients(value: float) -> tuple[Tensor, ...]:
        leaves = [x["rewards"].clone().requires_grad_(), spoiled(x["values"], 0, value).requires_grad_()]
        result = FUNCTIONS[name](x | {"rewards": leaves[0]}, leaves[1])
        rewards, values = torch.autograd.grad(result.sin().sum(), leaves, materialize_grads=True)
        return result.detach(), rewards, values

    for got, expected in zip(gradients(bad), gradients(0.5), strict=True):
        torch.testing.assert_close(got, expected)
        assert expected.isfinite().all()
    assert not gradients(bad)[2][list(FIRST)].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nor_in_compiled_code(device: str, name: str, fresh_compiler: None) -> None:
    x = rollout(device, torch.float32, 0)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    expected = FUNCTIONS[name](x, spoiled(x["values"], 0, 0.5))
    torch.testing.assert_close(compiled(x, spoiled(x["values"], 0, float("nan"))), expected)
