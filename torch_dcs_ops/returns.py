"""Returns and advantages of reinforcement learning, each one fused pass over the data.

All functions share one vocabulary. Tensors have the shape of `rewards`, any number of dimensions with time at
`time_dim` (default 0; environments, agents and so on are the others).

* ``terminated``: the episode ended with this step, its next state is worth nothing. Nothing is carried across.
* ``truncated``: the episode was cut off with this step (a time limit), its next state has a value all the same. Nothing
  is carried across. A step that is both counts as terminated.
* ``next_values``: V of every step's next state, as it was **before** a reset (torchrl's convention).
* ``bootstrap_value``: V of the state after the last step, of rewards' shape without `time_dim` (cleanrl's convention);
  the value of every other next state is then ``values[t + 1]``.

One of the last two is given, not both. **With bootstrap_value a truncated step is not bootstrapped, the last one
neither**: ``values[t + 1]`` belongs to the state after the reset, and nothing else is known. So do cleanrl and
stable-baselines3 (which adds gamma·V(terminal observation) to the reward of such a step first). To bootstrap truncated
steps pass next_values.

Flags are bool, or numbers 0 and 1 in rewards' dtype. ``gamma`` and ``lambda_`` are numbers or tensors: one of rewards'
number of dimensions broadcasts against rewards (a discount for every step), one with fewer against rewards' shape
without `time_dim` (a discount for every environment). Numbers outside [0, 1] are refused unless
``check_discounts=False``; tensors are not read back to check them.

dtypes are float16, bfloat16 (computed in float32 or wider), float32 and float64, on CPU and CUDA. Results are
differentiable in everything but flags, any number of times, in both modes, and work under torch.func, autocast
(a half input is computed and returned in float32) and torch.compile(fullgraph=True), where another number for a
discount does not compile again. Detach values, or call under torch.no_grad(), for targets that carry no gradient. A
NaN or an infinity reaches all steps that it is carried to; the value of a next state that is not used is not looked at.

docs/returns.md says which convention is which library's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import _registry
from .ops._autocast import widened
from .ops._temporal_difference_formulas import n_step_formulas, next_step, one_step_errors, times
from .ops._validate import fail
from .ops._validate_returns import check_return_types, check_returns
from .ops.discounted_cumsum import as_number, number_as_tensor

__all__ = [
    "discounted_returns",
    "gae",
    "n_step_returns",
    "retrace_returns",
    "td_lambda_returns",
    "upgo_returns",
    "vtrace",
]

_scan = _registry.temporal_difference_scan
_below_autograd = torch._C._AutoDispatchBelowAutograd
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast_enabled = torch._C._is_any_autocast_enabled
_PLAIN = (Tensor, Parameter)


def discounted_returns(
    rewards: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Discounted sums of rewards to the end of the episode, ``G[t] = r[t] + gamma[t]·G[t+1]``.

    A truncated step and the last one add gamma·V(next state): of next_values, or bootstrap_value after the last step.
    With neither of them these states are worth 0 (the only function that may be called so).

    Args: see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.

    Example::

        >>> rewards = torch.ones(4)
        >>> ends = torch.tensor([False, True, False, False])
        >>> torch_dcs_ops.returns.discounted_returns(rewards, 0.5, terminated=ends)
        tensor([1.5000, 1.0000, 1.5000, 1.0000])
    """
    op = "discounted_returns"
    _check_one_bootstrap(op, next_values, bootstrap_value, needed=False)
    return _call(
        op, rewards, None, next_values, bootstrap_value, terminated, truncated, gamma, 1.0, None, (1.0, 1.0, 1.0),
        time_dim, (False, True, False), check_discounts,
    )[1]  # fmt: skip


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation and the returns that go with it.

    ``A[t] = delta[t] + gamma·gae_lambda·A[t+1]`` with ``delta[t] = r[t] + gamma·V(s[t+1]) - values[t]``, and
    ``returns = A + values`` (Schulman et al., 2016, https://arxiv.org/abs/1506.02438, equation 16).

    Args: `gae_lambda` is what the other functions call lambda_; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        advantages and returns, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.

    Example::

        >>> rewards, values = torch.rand(128, 8), torch.rand(128, 8)  # 128 steps of 8 environments
        >>> done = torch.rand(128, 8) < 0.05
        >>> advantages, returns = torch_dcs_ops.returns.gae(
        ...     rewards, values, bootstrap_value=torch.rand(8), terminated=done
        ... )
    """
    op = "gae"
    _check_one_bootstrap(op, next_values, bootstrap_value)
    advantages, returns, _ = _call(
        op, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, gae_lambda, None,
        (1.0, 1.0, 1.0), time_dim, (True, True, False), check_discounts, "gae_lambda",
    )  # fmt: skip
    return advantages, returns


def td_lambda_returns(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 0.95,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Lambda-returns, ``G[t] = r[t] + gamma·((1 - lambda)·V(s[t+1]) + lambda·G[t+1])``.

    Sutton and Barto, 2nd edition, equation 12.18; rlax calls it lambda_returns, torchrl TD(lambda). lambda_ 0 gives the
    one-step targets, 1 the discounted returns. With values that are the next_values of the step before these are the
    returns of :func:`gae`.

    Args: `values` is read with bootstrap_value alone; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "td_lambda_returns"
    _check_one_bootstrap(op, next_values, bootstrap_value)
    _check_values(op, values, bootstrap_value)
    return _call(
        op, rewards, None if next_values is not None else values, next_values, bootstrap_value, terminated, truncated,
        gamma, lambda_, None, (1.0, 1.0, 1.0), time_dim, (False, True, False), check_discounts,
    )[1]  # fmt: skip


def n_step_returns(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    n: int,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Returns over n steps and then a value: rlax's n_step_bootstrapped_returns, with episode ends.

    ``r[t] + gamma·r[t+1] + ... + gamma^(n-1)·r[t+n-1] + gamma^n·V(s[t+n])``; an episode's or the data's end cuts it
    short, where it bootstraps (or, terminated, does not). lambda_ below 1 mixes in the values on the way:
    ``G[n][t] = r[t] + gamma·((1 - lambda)·V(s[t+1]) + lambda·G[n-1][t+1])``, ``G[0][t] = V(s[t])``.

    Args: `values` is read with bootstrap_value alone; `n` >= 1; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.

    It is a scan over a window of n steps between pointwise operations, in eager mode a kernel each. Values are
    subtracted before the scan and added after it, so an infinite or NaN value is seen by all steps that reach its own.
    """
    op = "n_step_returns"
    _check_one_bootstrap(op, next_values, bootstrap_value)
    _check_values(op, values, bootstrap_value)
    if isinstance(n, bool) or not isinstance(n, int | torch.SymInt):
        raise TypeError(f"{op}: n must be an integer, got {type(n).__name__}")
    if n < 1:
        fail(op, f"n must be at least 1, got {n}")
    gamma_tensor, gamma_value = _discount(op, "gamma", gamma, rewards, check_discounts)
    trace, trace_value = _discount(op, "lambda_", lambda_, rewards, check_discounts)
    values = None if next_values is not None else values
    check_return_types(op, rewards, time_dim, values=values, next_values=next_values, bootstrap_value=bootstrap_value,
                       terminated=terminated, truncated=truncated)  # fmt: skip
    dim = check_returns(
        op, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma_tensor, trace, None, time_dim,
        False,
    )  # fmt: skip
    return n_step_formulas(
        rewards, values, next_values, bootstrap_value, terminated, truncated, gamma_tensor, gamma_value, trace,
        trace_value, dim, n,
    )  # fmt: skip


def vtrace(
    rewards: Tensor,
    values: Tensor,
    rhos: Tensor,
    *,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    clip_rho_threshold: float = 1.0,
    clip_pg_rho_threshold: float = 1.0,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

    ``targets[t] = values[t] + A[t]`` with ``A[t] = min(clip_rho, rho)·delta[t] + gamma·lambda·min(1, rho)·A[t+1]``, and
    ``pg_advantages[t] = min(clip_pg_rho, rho)·(r[t] + gamma·(V(s[t+1]) + lambda·A[t+1]) - values[t])``: rlax's
    vtrace_td_error_and_advantage, whose errors are ``targets - values``. float("inf") as a threshold clips nothing.

    Args: `rhos` are the ratios pi(a|s) / mu(a|s), not their logarithms; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        targets and pg_advantages, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "vtrace"
    _check_one_bootstrap(op, next_values, bootstrap_value)
    clips = (
        as_number(clip_rho_threshold, op, "clip_rho_threshold"),
        1.0,
        as_number(clip_pg_rho_threshold, op, "clip_pg_rho_threshold"),
    )
    _, targets, pg_advantages = _call(
        op, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, lambda_, rhos, clips, time_dim,
        (False, True, True), check_discounts,
    )  # fmt: skip
    return targets, pg_advantages


def retrace_returns(
    rewards: Tensor,
    q_values: Tensor,
    rhos: Tensor,
    *,
    next_values: Tensor,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    lambda_: float | Tensor = 1.0,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Retrace targets of action values (Munos et al., 2016, https://arxiv.org/abs/1606.02647).

    ``G[t] = r[t] + gamma·(V(s[t+1]) + c[t+1]·(G[t+1] - Q(s[t+1], a[t+1])))`` with ``c = lambda·min(1, rho)``.

    Args: `q_values` are those of the actions that were taken, Q(s[t], a[t]); `next_values` the expectations of
        Q(s[t+1], ·) under the target policy; `rhos` the ratios pi(a|s) / mu(a|s); for the rest see
        :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "retrace_returns"
    if next_values is None:
        fail(op, "next_values must be given, got None")
    gamma_tensor, gamma_value = _discount(op, "gamma", gamma, rewards, check_discounts)
    trace, number = _discount(op, "lambda_", lambda_, rewards, check_discounts)
    check_return_types(op, rewards, time_dim, q_values=q_values, next_values=next_values, rhos=rhos,
                       terminated=terminated, truncated=truncated)  # fmt: skip
    dim = check_returns(
        op, rewards, q_values, next_values, None, terminated, truncated, gamma_tensor, trace, rhos, time_dim, False,
        "q_values",
    )  # fmt: skip
    links = times(next_step(widened(rhos).clamp(max=1.0), dim), number if trace is None else trace, dim)
    targets: Tensor = _scan(
        rewards, q_values, next_values, None, terminated, truncated, gamma_tensor, gamma_value, links, 1.0, None, 1.0,
        1.0, 1.0, dim, False, True, False,
    )[1]  # fmt: skip
    return targets


def upgo_returns(
    rewards: Tensor,
    values: Tensor,
    *,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Upgoing returns (Vinyals et al., 2019, AlphaStar, https://doi.org/10.1038/s41586-019-1724-z).

    Lambda-returns whose lambda is 1 where the step after did not disappoint, ``r[t+1] + gamma·V(s[t+2]) >= V(s[t+1])``,
    and 0 where it did.

    Args: see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape, dtype and device.

    Raises:
        RuntimeError, IndexError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "upgo_returns"
    _check_one_bootstrap(op, next_values, bootstrap_value)
    gamma_tensor, gamma_value = _discount(op, "gamma", gamma, rewards, check_discounts)
    check_return_types(op, rewards, time_dim, values=values, next_values=next_values, bootstrap_value=bootstrap_value,
                       terminated=terminated, truncated=truncated)  # fmt: skip
    if values is None:
        fail(op, "values must be given, got None")
    dim = check_returns(
        op, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma_tensor, None, None, time_dim,
        True,
    )  # fmt: skip
    with torch.no_grad():
        errors = one_step_errors(
            rewards, values, next_values, bootstrap_value, terminated, truncated, gamma_tensor, gamma_value, dim
        )
        links = next_step((errors >= 0).to(rewards.dtype), dim)
    targets: Tensor = _scan(
        rewards, None if next_values is not None else values, next_values, bootstrap_value, terminated, truncated,
        gamma_tensor, gamma_value, links, 1.0, None, 1.0, 1.0, 1.0, dim, False, True, False,
    )[1]  # fmt: skip
    return targets


def _check_one_bootstrap(op: str, next_values: Any, bootstrap_value: Any, needed: bool = True) -> None:
    if next_values is not None and bootstrap_value is not None:
        fail(op, "bootstrap_value must be None with next_values, got both")
    if needed and next_values is None and bootstrap_value is None:
        fail(op, "next_values or bootstrap_value must be given, got neither")


def _check_values(op: str, values: Any, bootstrap_value: Any) -> None:
    if values is None and bootstrap_value is not None:
        fail(op, "values must be given with bootstrap_value, got None")


def _discount(op: str, name: str, rate: Any, rewards: Any, check: bool) -> tuple[Tensor | None, float]:
    """A discount as a tensor or as a number; while a graph is traced always as a tensor."""
    if isinstance(rate, Tensor):
        return rate, 1.0
    number = rate if type(rate) is float else as_number(rate, op, name)
    if check and not 0.0 <= number <= 1.0:
        raise ValueError(f"{op}: {name} must be in [0, 1] unless check_discounts=False, got {rate}")
    if is_compiling():
        return number_as_tensor(rate, rewards.device, op, name), 1.0
    return None, number


def _call(
    op: str,
    rewards: Tensor,
    values: Tensor | None,
    next_values: Tensor | None,
    bootstrap_value: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    gamma: Any,
    lambda_: Any,
    rhos: Tensor | None,
    clips: tuple[float, float, float],
    time_dim: int,
    needs: tuple[bool, bool, bool],
    check_discounts: bool,
    lambda_name: str = "lambda_",
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused op. It checks its arguments itself; only what it refuses is looked at again, for a sentence of `op`."""
    gamma, gamma_value = _discount(op, "gamma", gamma, rewards, check_discounts)
    trace, trace_value = _discount(op, lambda_name, lambda_, rewards, check_discounts)
    args = (
        rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, gamma_value, trace, trace_value,
        rhos, *clips, time_dim, *needs,
    )  # fmt: skip
    results: tuple[Tensor, Tensor, Tensor]
    if is_compiling():
        results = _scan(*args)
        return results
    try:
        if _is_observed(args[:7], (trace, rhos)):
            results = _scan(*args)
        else:
            # Nothing to record: past the Python kernel at the Autograd key.
            with _below_autograd():
                results = _scan(*args)
        return results
    except (IndexError, RuntimeError, TypeError):
        tensors = {"values": values, "next_values": next_values, "bootstrap_value": bootstrap_value,
                   "terminated": terminated, "truncated": truncated, "rhos": rhos}  # fmt: skip
        check_return_types(op, rewards, time_dim, **tensors)
        check_returns(
            op, rewards, values, next_values, bootstrap_value, terminated, truncated, gamma, trace, rhos, time_dim,
            needs[0] or needs[2], lambda_name=lambda_name,
        )  # fmt: skip
        raise


def _is_observed(*operands: tuple[Any, ...]) -> bool:
    """Whether autograd, a mode, a subclass or a transform is to see the call."""
    if _dispatch_modes() or _functorch_active() or forward_ad._current_level >= 0 or _autocast_enabled():
        return True
    records = torch.is_grad_enabled()
    for operand in (one for some in operands for one in some):
        if operand is not None and (type(operand) not in _PLAIN or (records and operand.requires_grad)):
            return True
    return False
