"""Triton's interpreter in less time, for the processes that run tests in it (conftest.py).

Before each launch, and each call of one device function by another, it searches all attributes of `triton.language` for
builtins to replace: a third of what the tests took. Here the names are searched for once, and the functions of one
module are seen to once a launch. What is replaced by what, and all that kernels compute and the interpreter checks,
stays as it is. Beside that, triton 3.6 makes a number of an array of one element, which NumPy 2.4 refuses.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Replaces private functions of triton 3.6 and 3.7; a version without them stays as slow as it is."""
    if hasattr(interpreter, "_patch_lang_tensor"):
        _take_numbers_of_one_element(interpreter._patch_lang_tensor)
    try:
        is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr
        patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        np_dtype = interpreter._get_np_dtype
        assert list(inspect.signature(interpreter._patch_builtin).parameters)[:2] == ["pkg", "builder"]
    except (AttributeError, AssertionError):
        return

    np_dtype_of_scalar = functools.cache(np_dtype)

    def np_dtype_of(tt_dtype: Any) -> Any:
        # Pointers and blocks have no hash; a block's is the one of its elements.
        scalar = tt_dtype.scalar
        return np_dtype(scalar) if scalar.is_ptr() else np_dtype_of_scalar(scalar)

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(pkg: Any, builder: Any, *scope: Any) -> None:
        for name in builtins_of(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):
                patch_attr(pkg, name, member, builder, *scope)

    # The namespaces of functions that are seen to until the launch that runs now ends; None: no launch runs.
    seen: set[int] | None = None

    def patch_lang_once(fn: Any) -> Any:
        if seen is None:
            return patch_lang(fn)
        if id(fn.__globals__) in seen:
            return None  # what a launch itself undoes at its end is that of its first call
        seen.add(id(fn.__globals__))
        return patch_lang(fn)

    def launched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen = set()
        try:
            return launch(*args, **kwargs)
        finally:
            seen = None

    interpreter._get_np_dtype = np_dtype_of
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once
    interpreter.GridExecutor.__call__ = launched


def _take_numbers_of_one_element(patch_lang_tensor: Any) -> None:
    def patched(tensor: Any, *scope: Any) -> None:
        patch_lang_tensor(tensor, *scope)  # notes what `tensor` had, and puts it back after the launch
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
