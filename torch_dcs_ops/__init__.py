"""Discounted scans, fused losses, log-semiring products: `torch.ops.dcs` with C++, CUDA C++ and Triton kernels.

Importing the package registers the ops and loads the compiled libraries; nothing else is imported (no triton, no
NumPy). `torch_dcs_ops.info()` says which kernels are in use and why.
"""

from __future__ import annotations

from . import _registry, _native  # isort: skip  (the schemas, then the libraries that implement them, then the rest)
from . import compile, nn
from .ops import (
    cumsum,
    discounted_cumsum,
    discounted_cumsum_left,
    discounted_cumsum_right,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    linear_policy_loss,
    linear_top_k,
    log_bmm,
    max_bmm,
    sample_bmm,
    softmax,
)
from . import distributed, returns
from ._info import info
from ._version import __version__

__all__ = [
    "__version__",
    "compile",
    "cumsum",
    "discounted_cumsum",
    "discounted_cumsum_left",
    "discounted_cumsum_right",
    "distributed",
    "info",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "linear_policy_loss",
    "linear_top_k",
    "log_bmm",
    "max_bmm",
    "nn",
    "returns",
    "sample_bmm",
    "softmax",
]
