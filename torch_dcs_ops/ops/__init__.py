"""The ops: importing this package registers everything about them, op by op."""

from . import scan as _scan  # isort: skip  # The private family that the others are fronts of.
from . import cross_entropy_rows as _cross_entropy_rows  # isort: skip
from . import temporal_difference as _temporal_difference  # isort: skip
from . import n_step as _n_step  # isort: skip
from .cumsum import cumsum
from .discounted_cumsum import discounted_cumsum, discounted_cumsum_left, discounted_cumsum_right
from .linear_cross_entropy import linear_cross_entropy
from .linear_log_probs import linear_log_probs
from .log_bmm import log_bmm
from .max_bmm import max_bmm
from .sample_bmm import sample_bmm
from .softmax import softmax

__all__ = [
    "cumsum",
    "discounted_cumsum",
    "discounted_cumsum_left",
    "discounted_cumsum_right",
    "linear_cross_entropy",
    "linear_log_probs",
    "log_bmm",
    "max_bmm",
    "sample_bmm",
    "softmax",
]
