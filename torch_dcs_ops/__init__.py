"""Discounted scans, fused losses, log-semiring products: `torch.ops.dcs` with C++, CUDA C++ and Triton kernels.

Importing the package registers the ops and loads the compiled libraries; nothing else is imported (no triton, no
NumPy). `torch_dcs_ops.info()` says which kernels are in use and why.
"""

from __future__ import annotations

import sys
import warnings

if "torch" not in sys.modules:
    # torch warns of a NumPy that is not there, which nothing here needs. This filter alone goes again, which a comment
    # in it tells from a user's: warnings.catch_warnings would undo those that torch sets as well.
    warnings.filterwarnings("ignore", message="(?#torch_dcs_ops)Failed to initialize NumPy", category=UserWarning)
    _filter = warnings.filters[0]
    import torch

    warnings.filters.remove(_filter)  # type: ignore[attr-defined]
    del _filter

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
