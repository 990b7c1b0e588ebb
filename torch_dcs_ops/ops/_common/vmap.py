"""The operands of a call under one level of vmap, for the ops' kernels at the FuncTorchBatched key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


class Operand(NamedTuple):
    """A tensor below the level of vmap, and where its batch dimension is (None: it has none)."""

    tensor: Tensor
    position: int | None

    def front(self, size: int) -> Tensor:
        """With the batch in front; put there where the operand has none."""
        if self.position is None:
            return self.tensor.unsqueeze(0).expand(size, *self.tensor.shape)
        return self.tensor.movedim(self.position, 0)

    def rows(self, ndim: int) -> Tensor:
        """Aligned at the right of `ndim` dimensions behind the batch."""
        if self.position is None:
            return self.tensor
        front = self.tensor.movedim(self.position, 0)
        return front.reshape(front.size(0), *(1,) * (ndim - front.dim() + 1), *front.shape[1:])

    def sample(self, index: int) -> Tensor:
        return self.tensor if self.position is None else self.tensor.select(self.position, index)


class Batch:
    """The operands of one call under one level of vmap."""

    def __init__(self, *tensors: Tensor | None) -> None:
        interpreter = retrieve_current_functorch_interpreter()
        self.level = interpreter.level()
        self.size = interpreter.batch_size()  # type: ignore[attr-defined]
        self.operands = [None if t is None else Operand(*_unwrap_batched(t, self.level)) for t in tensors]

    @property
    def is_batched(self) -> bool:
        return any(self.has_batch(index) for index in range(len(self.operands)))

    def has_batch(self, index: int) -> bool:
        operand = self.operands[index]
        return operand is not None and operand.position is not None

    def samples(self, index: int) -> list[Tensor | None]:
        """The operands of one sample."""
        return [None if operand is None else operand.sample(index) for operand in self.operands]

    def wrap(self, tensor: Tensor) -> Tensor:
        """A result with the batch in front, one level up."""
        return _add_batch_dim(tensor, 0, self.level)
