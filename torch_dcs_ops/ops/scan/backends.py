"""The Python backends of the scan ops: the reference everywhere, Triton where the compiled library is missing.

A backend is two functions with the meaning of `_scan` and `_scan_gradients`; the op modules put validation and the
public ops' arguments in front of them and register them under the backend's dispatch key. Compiled libraries register
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...reference import scan as reference
from ...reference.scan import ScanCall
from .._common.triton import TRITON_KEYS, launchers


class Backend(NamedTuple):
    dispatch_key: str
    scan: Callable[[Tensor, ScanCall], Tensor]
    scan_gradients: Callable[[Tensor, Tensor, ScanCall], tuple[Tensor, Tensor]]


def _triton_scan(input: Tensor, call: ScanCall) -> Tensor:
    module = launchers("scan.launch")
    if module is not None:
        try:
            output: Tensor = module.scan(input, call)
            return output
        except NotImplementedError:
            pass
    return reference.scan(input, call)


def _triton_scan_gradients(grad: Tensor, output: Tensor, call: ScanCall) -> tuple[Tensor, Tensor]:
    module = launchers("scan.launch")
    if module is not None:
        try:
            gradients: tuple[Tensor, Tensor] = module.scan_gradients(grad, output, call)
            return gradients
        except NotImplementedError:
            pass
    return reference.scan_gradients(grad, output, call)


def _backends() -> tuple[Backend, ...]:
    backends = [Backend("CompositeExplicitAutograd", reference.scan, reference.scan_gradients)]
    backends += [Backend(key, _triton_scan, _triton_scan_gradients) for key in TRITON_KEYS]
    return tuple(backends)


BACKENDS = _backends()
