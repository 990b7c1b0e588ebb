"""The loss of Hugging Face transformers' language models by `linear_cross_entropy`, without their logits.

Such a model's forward is decoder -> head -> (a scale or a softcap) -> cross entropy, and returns the logits beside the
loss, which is why no compiler may drop them. `fused_loss` puts another forward on one model, not on its class: the
class's own one, with the head's product and the cross entropy behind it as one operator. `FusedLossCallback` does it
for Trainer.

Needs transformers >= 4.56; developed with 5.23.
"""

from __future__ import annotations

from .patch import FusedLoss, fused_loss
from .trainer import FusedLossCallback

__all__ = ["FusedLoss", "FusedLossCallback", "fused_loss"]
