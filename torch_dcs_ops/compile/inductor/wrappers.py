"""What torch.compile makes of functions and modules, and what is within."""

from __future__ import annotations

from typing import Any

from . import probes


def uncompiled(function: Any) -> Any:
    """What torch.compile made a module of, and the call of a module that was compiled in place, `module.compile()`.

    Where torch does not tell, the function itself: Dynamo then traces into what was compiled, or stops before it.
    """
    if probes.missing("wrappers"):
        return function
    function = getattr(function, "_orig_mod", function)
    if getattr(function, "_compiled_call_impl", None) is not None:
        return function._call_impl
    return function
