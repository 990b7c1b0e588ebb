"""verl's fused heads over `linear_log_probs`, with the argument lists of verl 0.4 to 0.9; verl is not imported.

In a module that `actor_rollout_ref.model.external_lib` names, so that every worker imports it::

    from torch_dcs_ops.integrations.verl import FusedLinearForPPO
    from verl.utils.experimental import torch_functional

    torch_functional.FusedLinearForPPO = FusedLinearForPPO

verl takes it for `use_fused_kernels` with the implementation "torch" (or "liger"). With "triton" it is
`linear_cross_entropy` of verl.utils.kernel.linear_cross_entropy, replaced alike.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ..ops.linear_cross_entropy.log_probs import linear_log_probs
from ._common import product_dtype

__all__ = ["FusedLinearForPPO", "linear_cross_entropy"]


class FusedLinearForPPO(nn.Module):
    """verl.utils.experimental.torch_functional.FusedLinearForPPO.

    Args:
        chunk_size, impl_backend: kept as attributes, and without meaning: `linear_log_probs` chooses both.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of input_ids in float32, and entropy in the dtype of the logits, both input_ids' shape.

        Args:
            hidden_states: (..., D); verl's takes (T, D) and (B, T, D).
            vocab_weights: (V, D).
            input_ids: (...), integers; -100 has the log-probability and the entropy 0.
            temperature: divides the logits.

        Raises:
            RuntimeError, ValueError, TypeError: as of :func:`torch_dcs_ops.linear_log_probs`.
        """
        log_probs, entropy = linear_log_probs(
            hidden_states, vocab_weights, input_ids.long(), logit_scale=1 / temperature
        )
        return log_probs.float(), entropy.to(product_dtype(hidden_states))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """verl.utils.kernel.linear_cross_entropy.linear_cross_entropy, on any device: log-probabilities and entropy.

    Args:
        hidden: (..., D).
        weight: (V, D).
        labels: (...), integers; N of them.
        temperature: divides the logits.
        reduction: "none", "sum" or "mean", of the log-probabilities alone.
        dist_process_group: None, or a group of one process; verl's splits the vocabulary over this group.

    Returns:
        Log-probabilities (N,), or () with a reduction, and entropy (N,), float32.

    Raises:
        NotImplementedError: the group has more processes (tensor parallelism of Megatron).
        ValueError: an unknown reduction.
    """
    processes = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    if processes > 1:
        raise NotImplementedError(
            "verl.linear_cross_entropy: dist_process_group must be None or hold one process, as a head that is split "
            f"over processes is not supported, got {processes} processes"
        )
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f'verl.linear_cross_entropy: reduction must be "none", "sum" or "mean", got {reduction!r}')
    log_probs, entropy = linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1).long(), logit_scale=1 / temperature
    )
    reduced: Tensor = log_probs if reduction.lower() == "none" else getattr(log_probs, reduction.lower())()
    return reduced.float(), entropy.float()
