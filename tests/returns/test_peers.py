"""torchrl, stable-baselines3, rlax and cleanrl's loop beside this package, in float64 where they can; the adapters.

``pip install torch_dcs_ops[peers]`` installs them; what is not installed is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import returns
from torch_dcs_ops.integrations import cleanrl, stable_baselines3
from torch_dcs_ops.integrations import torchrl as ours_as_torchrl

from returns.oracle import Batch, make_batch
from support.subprocesses import environment

EXACT: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}


def consistent(batch: Batch) -> Batch:
    """With next_values that are values of the next step, where the episode goes on."""
    shifted = torch.cat((batch.values[1:], batch.bootstrap_value[None]))
    ends = batch.terminated | batch.truncated
    return batch._replace(next_values=torch.where(ends, batch.next_values, shifted))


@pytest.fixture(scope="module")
def torchrl_functions() -> Any:
    return pytest.importorskip("torchrl.objectives.value.functional", reason="torchrl is not installed")


@pytest.mark.parametrize("rates", ["number", "step"])
@pytest.mark.parametrize(("shape", "time_dim"), [((4, 30, 1), -2), ((30, 4, 2), 0), ((2, 3, 17, 5), 2)], ids=str)
def test_torchrl_gae(torchrl_functions: Any, shape: tuple[int, ...], time_dim: int, rates: str) -> None:
    batch = make_batch((shape[time_dim], *(n for d, n in enumerate(shape) if d != time_dim % len(shape))), rates=rates)
    x = {name: tensor.movedim(0, time_dim) for name, tensor in batch._asdict().items() if tensor.dim() == len(shape)}
    done = x["terminated"] | x["truncated"]
    gamma, trace = (0.9, 0.8) if rates == "number" else (x["gamma"], x["trace"])
    arguments = (gamma, trace, x["values"], x["next_values"], x["rewards"], done, x["terminated"])
    got = ours_as_torchrl.vec_generalized_advantage_estimate(*arguments, time_dim=time_dim)
    names = ["generalized_advantage_estimate"] + ["vec_generalized_advantage_estimate"] * (rates == "number")
    for name in names:
        torch.testing.assert_close(got, getattr(torchrl_functions, name)(*arguments, time_dim=time_dim), **EXACT)
    default = ours_as_torchrl.vec_generalized_advantage_estimate(*arguments[:-1], time_dim=time_dim)
    wanted = torchrl_functions.generalized_advantage_estimate(*arguments[:-1], time_dim=time_dim)
    torch.testing.assert_close(default, wanted, **EXACT)


def test_torchrl_td_lambda(torchrl_functions: Any) -> None:
    batch = make_batch((30, 4, 1), rates="number")
    x = {name: tensor.movedim(0, 1) for name, tensor in batch._asdict().items() if tensor.dim() == 3}
    done = x["terminated"] | x["truncated"]
    arguments = (0.9, 0.8, x["next_values"], x["rewards"], done, x["terminated"])
    torch.testing.assert_close(
        ours_as_torchrl.vec_td_lambda_return_estimate(*arguments),
        torchrl_functions.td_lambda_return_estimate(*arguments), **EXACT,
    )  # fmt: skip


def test_torchrl_vtrace(torchrl_functions: Any) -> None:
    batch = consistent(make_batch((30, 4, 1), rates="number"))
    x = {name: tensor.movedim(0, 1) for name, tensor in batch._asdict().items() if tensor.dim() == 3}
    done, log_rho = x["terminated"] | x["truncated"], x["rhos"].log()
    advantages, targets = torchrl_functions.vtrace_advantage_estimate(
        0.9, log_rho, torch.zeros_like(log_rho), x["values"], x["next_values"], x["rewards"], done, x["terminated"]
    )
    got = returns.vtrace(
        x["rewards"], x["values"], x["rhos"], next_values=x["next_values"], terminated=x["terminated"], truncated=done,
        gamma=0.9, time_dim=1,
    )  # fmt: skip
    torch.testing.assert_close(got, (targets, advantages), **EXACT)


def sb3_loop(buffer: Any, last_values: Tensor, dones: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns as stable-baselines3 defines them, from the flags of episode starts."""
    rewards, values = torch.as_tensor(buffer.rewards), torch.as_tensor(buffer.values)
    starts = torch.cat((torch.as_tensor(buffer.episode_starts)[1:], torch.as_tensor(dones)[None].float())).double()
    after = torch.cat((values[1:], last_values.flatten()[None]))
    advantages, carry = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - starts[t]
        delta = rewards[t] + buffer.gamma * after[t] * goes_on - values[t]
        carry = delta + buffer.gamma * buffer.gae_lambda * goes_on * carry
        advantages[t] = carry
    return advantages, advantages + values


def sb3_arrays(batch: Batch) -> dict[str, Any]:
    starts = torch.cat((torch.ones(1, batch.rewards.size(1)), (batch.terminated | batch.truncated)[:-1].float()))
    return {"rewards": batch.rewards.numpy(), "values": batch.values.numpy(), "episode_starts": starts.numpy()}


def test_the_loop_of_stable_baselines3() -> None:
    pytest.importorskip("numpy", reason="numpy, which the buffer is made of, is not installed")
    batch = make_batch((40, 6))
    buffer = SimpleNamespace(**sb3_arrays(batch), gamma=0.97, gae_lambda=0.9)
    dones = (batch.terminated | batch.truncated)[-1].numpy()
    stable_baselines3.compute_returns_and_advantage(buffer, batch.bootstrap_value, dones)
    expected = sb3_loop(buffer, batch.bootstrap_value, dones)
    torch.testing.assert_close((torch.as_tensor(buffer.advantages), torch.as_tensor(buffer.returns)), expected, **EXACT)


def test_stable_baselines3() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="stable-baselines3 is not installed")
    spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is not installed")
    batch = make_batch((40, 6))
    dones = (batch.terminated | batch.truncated)[-1].numpy()
    results = []
    for compute in (
        stable_baselines3.compute_returns_and_advantage,
        buffers.RolloutBuffer.compute_returns_and_advantage,
    ):
        buffer = buffers.RolloutBuffer(40, spaces.Box(-1, 1, (2,)), spaces.Discrete(2), "cpu", 0.9, 0.97, 6)
        for name, array in sb3_arrays(batch).items():
            setattr(buffer, name, array)
        buffer.advantages = buffer.advantages.astype("float64")
        compute(buffer, batch.bootstrap_value, dones)
        results.append((torch.as_tensor(buffer.advantages), torch.as_tensor(buffer.returns)))
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize("next_shape", [(6,), (1, 6)], ids=str)
def test_the_loop_of_cleanrl(next_shape: tuple[int, ...]) -> None:
    batch = make_batch((40, 6))
    ends = batch.terminated | batch.truncated
    dones, next_done = torch.cat((torch.zeros(1, 6), ends[:-1].float())), ends[-1].float()
    advantages, carry = torch.zeros_like(batch.rewards), torch.zeros(6, dtype=torch.float64)
    for t in reversed(range(40)):
        ended, value = (next_done, batch.bootstrap_value) if t == 39 else (dones[t + 1], batch.values[t + 1])
        delta = batch.rewards[t] + 0.97 * value * (1 - ended) - batch.values[t]
        advantages[t] = carry = delta + 0.97 * 0.9 * (1 - ended) * carry
    got = cleanrl.compute_advantages(
        batch.rewards, batch.values, dones, batch.bootstrap_value.view(next_shape), next_done, 0.97, 0.9
    )
    torch.testing.assert_close(got, (advantages, advantages + batch.values), **EXACT)


@pytest.fixture(scope="module")
def rlax() -> Any:
    rlax = pytest.importorskip("rlax", reason="rlax is not installed")
    import jax

    jax.config.update("jax_enable_x64", True)
    return rlax


def columns(function: Any, *tensors: Tensor) -> Any:
    """rlax takes one sequence: `function` of every environment's, stacked."""
    import numpy

    results = [function(*(t[:, i].numpy() for t in tensors)) for i in range(tensors[0].size(1))]
    stack = [numpy.stack([numpy.asarray(r[k]) for r in results], 1) for k in range(len(results[0]))]
    return tuple(torch.as_tensor(s) for s in stack)


def rlax_batch() -> tuple[Batch, Tensor]:
    """Episodes end with discounts of 0 there, so none is truncated."""
    batch = make_batch((20, 4))
    batch = consistent(batch._replace(truncated=torch.zeros_like(batch.truncated)))
    return batch, batch.gamma * ~batch.terminated


def test_rlax_lambda_and_discounted_returns(rlax: Any) -> None:
    batch, discounts = rlax_batch()
    expected = columns(
        lambda r, d, v, c: [rlax.lambda_returns(r, d, v, c)], batch.rewards, discounts, batch.next_values, batch.trace
    )
    keywords: dict[str, Any] = {"next_values": batch.next_values, "terminated": batch.terminated}
    got = returns.td_lambda_returns(batch.rewards, gamma=batch.gamma, lambda_=batch.trace, **keywords)
    torch.testing.assert_close((got,), expected, **EXACT)
    expected = columns(lambda r, d, v: [rlax.discounted_returns(r, d, v)], batch.rewards, discounts, batch.next_values)
    torch.testing.assert_close((returns.discounted_returns(batch.rewards, batch.gamma, **keywords),), expected, **EXACT)


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_rlax_n_step_bootstrapped_returns(rlax: Any, n: int) -> None:
    batch, discounts = rlax_batch()
    expected = columns(
        lambda r, d, v, c: [rlax.n_step_bootstrapped_returns(r, d, v, n, c)],
        batch.rewards, discounts, batch.next_values, batch.trace,
    )  # fmt: skip
    got = returns.n_step_returns(
        batch.rewards, n=n, next_values=batch.next_values, terminated=batch.terminated, gamma=batch.gamma,
        lambda_=batch.trace,
    )  # fmt: skip
    torch.testing.assert_close((got,), expected, **EXACT)


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (1.7, 0.6)], ids=str)
def test_rlax_vtrace(rlax: Any, thresholds: tuple[float, float]) -> None:
    batch, discounts = rlax_batch()
    errors, pg_advantages = columns(
        lambda v, after, r, d, rho, c: rlax.vtrace_td_error_and_advantage(v, after, r, d, rho, c, *thresholds)[:2],
        batch.values, batch.next_values, batch.rewards, discounts, batch.rhos, batch.trace,
    )  # fmt: skip
    targets, got = returns.vtrace(
        batch.rewards, batch.values, batch.rhos, next_values=batch.next_values, terminated=batch.terminated,
        gamma=batch.gamma, lambda_=batch.trace, clip_rho_threshold=thresholds[0], clip_pg_rho_threshold=thresholds[1],
    )  # fmt: skip
    torch.testing.assert_close((targets - batch.values, got), (errors, pg_advantages), **EXACT)


def test_rlax_retrace(rlax: Any) -> None:
    """rlax's general form, with Retrace's coefficients."""
    batch, discounts = rlax_batch()
    coefficients = batch.trace[:-1] * batch.rhos[1:].clamp(max=1)

    def one(q: Any, v: Any, r: Any, d: Any, c: Any) -> Any:
        return [rlax.general_off_policy_returns_from_q_and_v(q[1:], v, r, d, c[:-1])]

    padded = torch.cat((coefficients, torch.zeros_like(coefficients[:1])))
    expected = columns(one, batch.values, batch.next_values, batch.rewards, discounts, padded)
    got = returns.retrace_returns(
        batch.rewards, batch.values, batch.rhos, next_values=batch.next_values, terminated=batch.terminated,
        gamma=batch.gamma, lambda_=batch.trace,
    )  # fmt: skip
    torch.testing.assert_close((got,), expected, **EXACT)


def test_the_adapters_import_no_peer() -> None:
    code = (
        "import sys; from torch_dcs_ops.integrations import cleanrl, gymnasium, stable_baselines3, tianshou, torchrl; "
        "peers = {'torchrl', 'tensordict', 'stable_baselines3', 'tianshou', 'rlax', 'jax', 'gymnasium'}; "
        "assert not peers & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
