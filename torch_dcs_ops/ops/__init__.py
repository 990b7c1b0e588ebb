"""The ops: importing this package registers everything about them, op by op."""

from .scan import kernel_ops as _scan  # isort: skip  # The private family that the others are fronts of.
from .linear_cross_entropy import rows as _cross_entropy_rows  # isort: skip
from .returns import temporal_difference as _temporal_difference  # isort: skip
from .returns import n_step as _n_step  # isort: skip
from .scan.cumsum import cumsum
from .scan.discounted_cumsum import discounted_cumsum, discounted_cumsum_left, discounted_cumsum_right
from .linear_cross_entropy.loss import linear_cross_entropy
from .linear_cross_entropy.log_probs import linear_log_probs
from .linear_cross_entropy.kl_div import linear_kl_div
from .linear_cross_entropy.policy_loss import linear_policy_loss
from .linear_cross_entropy.top_k import linear_top_k
from .log_bmm.log_bmm import log_bmm
from .log_bmm.max_bmm import max_bmm
from .log_bmm.sample_bmm import sample_bmm
from .softmax import softmax

__all__ = [
    "cumsum",
    "discounted_cumsum",
    "discounted_cumsum_left",
    "discounted_cumsum_right",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "linear_policy_loss",
    "linear_top_k",
    "log_bmm",
    "max_bmm",
    "sample_bmm",
    "softmax",
]
