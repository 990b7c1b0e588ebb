"""What is to be done when somebody imports a module that we must not: it is large, and not everybody needs it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then` with the module `name`: now if it has been imported, else right behind its own code."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AtImport(name, then))


class _AtImport(importlib.abc.MetaPathFinder):
    """Is gone from the moment when the module is found."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
