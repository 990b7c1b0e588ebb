"""Over several processes: losses whose vocabulary, and scans whose time, is shared out among the ranks of a group.

Importing this imports nothing of torch.distributed beyond what `import torch` does. The rules by which the ops take
DTensors are registered when torch.distributed.tensor is imported.
"""

from types import ModuleType

from ..ops._common.at_import import when_imported
from .linear_cross_entropy.context_parallel import context_parallel_targets
from .linear_cross_entropy.kl_div import vocab_parallel_linear_kl_div
from .linear_cross_entropy.log_probs import vocab_parallel_linear_log_probs
from .linear_cross_entropy.loss import vocab_parallel_linear_cross_entropy
from .returns import sequence_parallel_gae
from .scan.discounted_cumsum import sequence_parallel_discounted_cumsum

__all__ = [
    "context_parallel_targets",
    "sequence_parallel_discounted_cumsum",
    "sequence_parallel_gae",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_kl_div",
    "vocab_parallel_linear_log_probs",
]


def _register_rules(_: ModuleType) -> None:
    from . import dtensor


when_imported("torch.distributed.tensor", _register_rules)
