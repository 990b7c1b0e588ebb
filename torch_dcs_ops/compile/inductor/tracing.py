"""Whether a graph is being traced: what ops ask, so that nothing which takes time to import is imported here."""

from __future__ import annotations

from typing import Any

import torch

from . import support

_context: Any = None
if support.has("tracing"):
    from torch._guards import TracingContext

    _context = TracingContext


def is_traced() -> bool:
    """Whether a graph is being traced for the compiler. Where torch does not tell: False.

    So it is in Dynamo, which traces the backward of compiled autograd and in torch 2.11 takes no such question.
    """
    if _context is None or torch.compiler.is_dynamo_compiling():
        return False
    return _context.try_get() is not None
