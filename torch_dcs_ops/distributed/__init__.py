"""Over several processes: losses whose vocabulary, and scans whose time, is shared out among the ranks of a group.

Importing this imports nothing of torch.distributed beyond what `import torch` does.
"""

from .linear_cross_entropy.log_probs import vocab_parallel_linear_log_probs
from .linear_cross_entropy.loss import vocab_parallel_linear_cross_entropy
from .returns import sequence_parallel_gae
from .scan import sequence_parallel_discounted_cumsum

__all__ = [
    "sequence_parallel_discounted_cumsum",
    "sequence_parallel_gae",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_log_probs",
]
