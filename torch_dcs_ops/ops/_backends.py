"""The Python backends of the scan ops: the reference everywhere, Triton where the compiled library is missing.

A backend is two functions with the meaning of `_scan` and `_scan_backward`; the op modules put validation and the
public ops' arguments in front of them and register them under the backend's dispatch key. Compiled libraries register
themselves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from .. import _native
from ..reference import scan as reference


class Backend(NamedTuple):
    dispatch_key: str
    scan: Callable[..., Tensor]
    scan_backward: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def _launchers() -> ModuleType | None:
    # Imported at the first call: importing the package does not import triton.
    try:
        from ..triton_kernels import scan
    except ImportError as error:
        warnings.warn(f"the Triton kernels cannot be imported, the slow reference runs instead: {error}", stacklevel=2)
        return None
    return scan  # type: ignore[no-any-return, unused-ignore]


def _triton_scan(*args: Any) -> Tensor:
    launchers = _launchers()
    if launchers is not None:
        try:
            output: Tensor = launchers.scan(*args)
            return output
        except NotImplementedError:
            pass
    return reference.scan(*args)


def _triton_scan_backward(*args: Any) -> tuple[Tensor, Tensor]:
    launchers = _launchers()
    if launchers is not None:
        try:
            gradients: tuple[Tensor, Tensor] = launchers.scan_backward(*args)
            return gradients
        except NotImplementedError:
            pass
    return reference.scan_backward(*args)


def _backends() -> tuple[Backend, ...]:
    backends = [Backend("CompositeExplicitAutograd", reference.scan, reference.scan_backward)]
    for key, kernels in (("CPU", _native.CPU), ("CUDA", _native.CUDA)):
        if kernels.kind == "triton":
            backends.append(Backend(key, _triton_scan, _triton_scan_backward))
    return tuple(backends)


BACKENDS = _backends()
