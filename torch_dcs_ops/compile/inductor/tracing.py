"""Whether a graph is being traced: what ops ask, so that nothing which takes time to import is imported here."""

from __future__ import annotations

from typing import Any

from . import support

_context: Any = None
if support.has("tracing"):
    from torch._guards import TracingContext

    _context = TracingContext


def is_traced() -> bool:
    """Whether a graph is being traced for the compiler. Where torch does not tell: False."""
    return _context is not None and _context.try_get() is not None
