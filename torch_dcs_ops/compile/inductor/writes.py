"""A mode that sees what ops write to, by their schemas. Imported behind `support.supports("passes")`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .dynamo import storage_of


class Writes(TorchDispatchMode):
    """Sees whether an op writes to one of some storages, by what its schema says."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.seen = memory, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                written = given if isinstance(given, list | tuple) else [given]
                tensors = [tensor for tensor in written if isinstance(tensor, Tensor)]
                self.seen |= any(storage_of(tensor) in self.memory for tensor in tensors)
        return func(*args, **kwargs)
