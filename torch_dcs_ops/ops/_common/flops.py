"""FLOP formulas, handed over when torch.utils.flop_counter is imported: it imports triton, which we must not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .at_import import when_imported

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}


def register(packet: Any, formula: Callable[..., int]) -> None:
    """`formula` takes an op's arguments, shapes in place of tensors, and returns the FLOPs."""
    _FORMULAS[packet] = formula
    if _COUNTER in sys.modules:
        _hand_over(sys.modules[_COUNTER])


def _hand_over(counter: ModuleType) -> None:
    for packet, formula in _FORMULAS.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)


when_imported(_COUNTER, _hand_over)
