"""FLOP formulas, handed over when torch.utils.flop_counter is imported: it imports triton, which we must not."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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


class _AtImport(importlib.abc.MetaPathFinder):
    """Runs `_hand_over` right behind the counter's own code, and is gone from then on."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _hand_over(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _AtImport())
