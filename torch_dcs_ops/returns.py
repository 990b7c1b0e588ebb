"""Returns and advantages of reinforcement learning, each one fused pass over the data.

All functions share one vocabulary. Tensors have the shape of `rewards`, any number of dimensions with time at
`time_dim` (default 0; environments, agents and so on are the others).

* ``terminated``: the episode ended with this step, its next state is worth nothing. Nothing is carried across.
* ``truncated``: the episode was cut off with this step (a time limit), its next state has a value all the same. Nothing
  is carried across. A step that is both counts as terminated.
* ``next_values``: V of every step's next state, as it was **before** a reset (torchrl's convention).
* ``bootstrap_value``: V of the state after the last step, of rewards' shape without `time_dim`, or with a time of size
  1 there (cleanrl's convention); the value of every other next state is then ``values[t + 1]``.

One of the last two is given, not both. **With bootstrap_value a truncated step is not bootstrapped, the last one
neither**: ``values[t + 1]`` belongs to the state after the reset, and nothing else is known. So do cleanrl and
stable-baselines3 (which adds gamma·V(terminal observation) to the reward of such a step first). To bootstrap truncated
steps pass next_values.

* ``mask`` (of :func:`discounted_returns`, :func:`gae` and :func:`td_lambda_returns`): where it is not set, the step
  does not count. It is stepped over as if it were not in the sequence: what is carried, and the value of the next
  state, pass over it, and its reward, value, next value and flags are not read.

* ``cu_seqlens``: offsets of packed sequences along `time_dim`, int32 or int64, from 0 to its size, not decreasing, on
  rewards' device (on a GPU they are not checked). Every sequence ends as the data does: nothing is carried to another
  one, and bootstrap_value has one value for each in the place of time.

Flags and the mask are bool, or numbers 0 and 1 of a floating-point dtype. ``gamma`` and ``lambda_`` are numbers or
tensors: one of rewards' number of dimensions broadcasts against rewards (a discount for every step), one with fewer
against rewards' shape without `time_dim` (a discount for every environment). Numbers outside [0, 1] are refused unless
``check_discounts=False``; tensors are not read back to check them.

dtypes are float16, bfloat16 (computed in float32 or wider), float32 and float64, on CPU and CUDA. Rewards, values and
ratios of different ones are promoted as torch does it: float64 rewards beside float32 values make float64 results.
Results are differentiable in everything but flags, any number of times, in both modes, and work under torch.func,
autocast (a half-precision input is computed and returned in float32) and torch.compile(fullgraph=True), where another
number for a discount does not compile again. Detach values, or call under torch.no_grad(), for targets that carry no
gradient. A NaN or an infinity reaches all steps that it is carried to; the value of a next state that is not used is
not looked at, nor, in lambda-returns, upgoing returns and Retrace targets, is a step's own value by its own target.

docs/returns.md says which convention is which library's.
"""

from __future__ import annotations

from torch import Tensor

from .ops.returns.call import ON_POLICY, Operands, fused_n_step_returns, fused_returns, threshold
from .ops.returns.coefficients import retrace_returns, upgo_returns
from .ops.returns.masked import masked_gae, masked_lambda_returns
from .ops.returns.packed import packed_operands
from .ops.returns.validate import as_n, check_given, check_n, check_one_bootstrap, check_values_given

__all__ = [
    "discounted_returns",
    "gae",
    "n_step_returns",
    "retrace_returns",
    "td_lambda_returns",
    "upgo_returns",
    "vtrace",
]


def discounted_returns(
    rewards: Tensor,
    gamma: float | Tensor,
    *,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Discounted sums of rewards to the end of the episode, ``G[t] = r[t] + gamma[t]·G[t+1]``.

    A truncated step and the last one add gamma·V(next state): of next_values, or bootstrap_value after the last step.
    With neither of them these states are worth 0 (the only function that may be called so).

    Args: see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape and device, and the dtype that the operands are promoted to. Where `mask` is not set it is
        that of the next step that counts (0 behind the last one).

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.

    Example::

        >>> rewards = torch.ones(4)
        >>> ends = torch.tensor([False, True, False, False])
        >>> torch_dcs_ops.returns.discounted_returns(rewards, 0.5, terminated=ends)
        tensor([1.5000, 1.0000, 1.5000, 1.0000])
    """
    op = "discounted_returns"
    check_one_bootstrap(op, next_values, bootstrap_value, needed=False)
    operands: Operands = (rewards, None, next_values, bootstrap_value, terminated, truncated)
    if mask is not None:
        return masked_lambda_returns(op, operands, (gamma, 1.0), mask, cu_seqlens, time_dim, check_discounts)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
    return fused_returns(op, operands, (gamma, 1.0), ON_POLICY, time_dim, (False, True, False), check_discounts)[1]


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
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation and the returns that go with it.

    ``A[t] = delta[t] + gamma·gae_lambda·A[t+1]`` with ``delta[t] = r[t] + gamma·V(s[t+1]) - values[t]``, and
    ``returns = A + values`` (Schulman et al., 2016, https://arxiv.org/abs/1506.02438, equation 16).

    Args: `gae_lambda` is what the other functions call lambda_; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        advantages and returns, of rewards' shape and device, and the dtype that the operands are promoted to. Where
        `mask` is not set the advantage is that of the next step that counts (0 behind the last one), as in verl, and
        returns are still ``A + values``.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.

    Example::

        >>> rewards, values = torch.rand(128, 8), torch.rand(128, 8)  # 128 steps of 8 environments
        >>> done = torch.rand(128, 8) < 0.05
        >>> advantages, returns = torch_dcs_ops.returns.gae(
        ...     rewards, values, bootstrap_value=torch.rand(8), terminated=done
        ... )
    """
    op = "gae"
    check_one_bootstrap(op, next_values, bootstrap_value)
    operands: Operands = (rewards, values, next_values, bootstrap_value, terminated, truncated)
    if mask is not None:
        return masked_gae(op, operands, (gamma, gae_lambda), mask, cu_seqlens, time_dim, check_discounts)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
    advantages, returns, _ = fused_returns(
        op,
        operands,
        (gamma, gae_lambda),
        ON_POLICY,
        time_dim,
        (True, True, False),
        check_discounts,
        "gae_lambda",
    )
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
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Lambda-returns, ``G[t] = r[t] + gamma·((1 - lambda)·V(s[t+1]) + lambda·G[t+1])``.

    Sutton and Barto, 2nd edition, equation 12.18; rlax calls it lambda_returns, torchrl TD(lambda). lambda_ 0 gives the
    one-step targets, 1 the discounted returns. With values that are the next_values of the step before these are the
    returns of :func:`gae`.

    Args: `values` is read with bootstrap_value alone; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape and device, and the dtype that the operands are promoted to.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "td_lambda_returns"
    check_one_bootstrap(op, next_values, bootstrap_value)
    check_values_given(op, values, bootstrap_value)
    values = None if next_values is not None else values
    operands: Operands = (rewards, values, next_values, bootstrap_value, terminated, truncated)
    if mask is not None:
        return masked_lambda_returns(op, operands, (gamma, lambda_), mask, cu_seqlens, time_dim, check_discounts)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
        operands = (operands[0], None, *operands[2:])
    return fused_returns(op, operands, (gamma, lambda_), ON_POLICY, time_dim, (False, True, False), check_discounts)[1]


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
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> Tensor:
    """Returns over n steps and then a value: rlax's n_step_bootstrapped_returns, with episode ends.

    ``r[t] + gamma·r[t+1] + ... + gamma^(n-1)·r[t+n-1] + gamma^n·V(s[t+n])``; an episode's or the data's end cuts it
    short, where it bootstraps (or, terminated, does not). lambda_ below 1 mixes in the values on the way:
    ``G[n][t] = r[t] + gamma·((1 - lambda)·V(s[t+1]) + lambda·G[n-1][t+1])``, ``G[0][t] = V(s[t])``.

    Args: `values` is read with bootstrap_value alone; `n` >= 1; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        G, of rewards' shape and device, and the dtype that the operands are promoted to.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.

    A value is read by the steps whose n steps end with it, and by those on the way where lambda_ is below 1. With
    gradients recorded values are subtracted before a scan and added after it: an infinite or NaN value is then seen by
    all steps that reach its own.
    """
    op = "n_step_returns"
    check_one_bootstrap(op, next_values, bootstrap_value)
    check_values_given(op, values, bootstrap_value)
    n = as_n(op, n)
    check_n(op, n)
    values = None if next_values is not None else values
    operands: Operands = (rewards, values, next_values, bootstrap_value, terminated, truncated)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
        operands = (operands[0], None, *operands[2:])
    return fused_n_step_returns(op, operands, (gamma, lambda_), time_dim, n, check_discounts)


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
    clip_c_threshold: float = 1.0,
    cu_seqlens: Tensor | None = None,
    time_dim: int = 0,
    check_discounts: bool = True,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

    ``targets = values + A`` with ``A[t] = min(clip_rho, rho)·delta[t] + gamma·lambda·min(clip_c, rho)·A[t+1]``, and
    ``pg_advantages[t] = min(clip_pg_rho, rho)·(r[t] + gamma·(V(s[t+1]) + lambda·A[t+1]) - values[t])``: rlax's
    vtrace_td_error_and_advantage, whose errors are ``targets - values``, and whose clip_c is 1; torchrl's rho_thresh
    and c_thresh are clip_rho_threshold and clip_c_threshold. float("inf") as a threshold clips nothing.

    Args: `rhos` are the ratios pi(a|s) / mu(a|s), not their logarithms; for the rest see :mod:`torch_dcs_ops.returns`.

    Returns:
        targets and pg_advantages, of rewards' shape and device, and the dtype that the operands are promoted to.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: an argument is wrong; the sentence names it.
    """
    op = "vtrace"
    check_one_bootstrap(op, next_values, bootstrap_value)
    check_given(op, "rhos", rhos)
    clip_rho = threshold(clip_rho_threshold, op, "clip_rho_threshold")
    clip_c = threshold(clip_c_threshold, op, "clip_c_threshold")
    clip_pg = threshold(clip_pg_rho_threshold, op, "clip_pg_rho_threshold")
    operands: Operands = (rewards, values, next_values, bootstrap_value, terminated, truncated)
    if cu_seqlens is not None:
        operands = packed_operands(op, operands, cu_seqlens, time_dim)
    _, targets, pg_advantages = fused_returns(
        op,
        operands,
        (gamma, lambda_),
        (rhos, clip_rho, clip_c, clip_pg),
        time_dim,
        (False, True, True),
        check_discounts,
    )
    return targets, pg_advantages
