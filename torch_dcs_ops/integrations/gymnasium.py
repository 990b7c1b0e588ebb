"""Which steps of gymnasium's vector environments are transitions; gymnasium is not imported.

By default these reset on the step **after** an episode's end (AutoresetMode.NEXT_STEP): that step ignores its action,
has a reward of 0 and observes the first state of a new episode. What is observed after any other step, an episode's
last one included, is that step's own next state. So the values of the T + 1 observations of a rollout give the
next_values of :func:`torch_dcs_ops.returns.gae`, truncated episodes are bootstrapped, and only the steps that reset are
to be left out of the loss::

    values = critic(observations)  # (T + 1, environments): of what the policy saw, and of what came after the last step
    advantages, returns = gae(
        rewards, values[:-1], next_values=values[1:], terminated=terminated, truncated=truncated
    )
    mask = next_step_mask(terminated, truncated, previous_done)
    loss = (mask * policy_loss(advantages)).sum() / mask.sum()

Nothing is carried from or to a step that resets, so what it gets itself does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._libraries import as_tensor, like

if TYPE_CHECKING:
    from ._libraries import Array, Arrays

__all__ = ["next_step_mask"]


def next_step_mask(
    terminated: Array, truncated: Arrays, previous_done: Arrays | None = None, *, time_dim: int = 0
) -> Array:
    """Where a step is a transition, not the reset after an episode's end, under AutoresetMode.NEXT_STEP.

    Args:
        terminated, truncated: of every step, of one shape with time at `time_dim`, bool or 0 and 1; NumPy arrays or
            tensors.
        previous_done: whether an episode ended with the step before the first one, of their shape without `time_dim`:
            where a rollout goes on from the one before, ``terminated[-1] | truncated[-1]`` of that. None: nowhere, as
            after ``reset()``.

    Returns:
        bool, of their shape; a tensor if `terminated` is one, else a NumPy array.

    Raises:
        RuntimeError: the shapes do not fit.
        IndexError: `time_dim` is not one of their dimensions.
    """
    ends, cuts = as_tensor(terminated) != 0, as_tensor(truncated) != 0
    if ends.shape != cuts.shape:
        raise RuntimeError(
            f"next_step_mask: truncated must have terminated's shape {tuple(ends.shape)}, got {tuple(cuts.shape)}"
        )
    ndim = ends.dim()
    if not -ndim <= time_dim < ndim:
        raise IndexError(
            f"next_step_mask: time_dim must be in [{-ndim}, {ndim - 1}] for {ndim}-D flags, got {time_dim}"
        )
    done, row = ends | cuts, ends.narrow(time_dim, 0, min(1, ends.size(time_dim)))
    if previous_done is None:
        first = torch.zeros_like(row)
    else:
        first = as_tensor(previous_done).to(done.device) != 0
        rows = tuple(size for dim, size in enumerate(ends.shape) if dim != time_dim % ndim)
        if first.shape != rows:
            raise RuntimeError(
                f"next_step_mask: previous_done must have terminated's shape without dim {time_dim}, {rows}, got "
                f"{tuple(first.shape)}"
            )
        first = first.unsqueeze(time_dim)
    mask = ~torch.cat((first, done), time_dim).narrow(time_dim, 0, done.size(time_dim))
    return like(mask, terminated)
