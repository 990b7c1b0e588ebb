"""vmap of the scan family: the batch goes in front of every operand, `dim` moves one to the right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from .. import _registry
from ._validate_scan import check_dim, check_direction, check_output, check_scan, check_unshifted_initial

_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
_OP = "discounted_cumsum"


class _Operand(NamedTuple):
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


class _Batch:
    """The operands of one call under one level of vmap."""

    def __init__(self, *tensors: Tensor | None) -> None:
        interpreter = retrieve_current_functorch_interpreter()
        self.level = interpreter.level()
        self.size = interpreter.batch_size()  # type: ignore[attr-defined]
        self.operands = [None if t is None else _Operand(*_unwrap_batched(t, self.level)) for t in tensors]

    @property
    def is_batched(self) -> bool:
        return any(operand is not None and operand.position is not None for operand in self.operands)

    def full(self, index: int, ndim: int) -> Tensor | None:
        """An operand of input's shape. A 0-D input becomes a sequence of one step."""
        operand = self.operands[index]
        if operand is None:
            return None
        tensor = operand.front(self.size)
        return tensor if ndim else tensor.unsqueeze(1)

    def row(self, index: int, ndim: int) -> Tensor | None:
        """An operand of one entry a row (`initial`)."""
        operand = self.operands[index]
        return None if operand is None else operand.rows(max(ndim - 1, 0))

    def gamma(self, index: int, ndim: int) -> Tensor | None:
        operand = self.operands[index]
        if operand is None:
            return None
        logical = operand.tensor.dim() - (operand.position is not None)
        if 0 < logical == ndim:
            return operand.tensor.unsqueeze(0) if operand.position is None else operand.front(self.size)
        return operand.rows(max(ndim - 1, 0))

    def wrap(self, tensor: Tensor, ndim: int) -> Tensor:
        return _add_batch_dim(tensor if ndim else tensor.squeeze(1), 0, self.level)


def _scan_vmap(
    input: Tensor,
    gamma: Tensor | None,
    dim: int,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
    call: Callable[[Tensor, Any, int, Any, Any], Tensor],
    *,
    op: str = _OP,
    integers_allowed: bool = False,
) -> Tensor:
    """`call(input, gamma, dim, initial, reset)` on the operands below the level."""
    ndim = input.dim()
    normal = check_scan(op, input, gamma, dim, initial, reset, window, integers_allowed=integers_allowed)
    batch = _Batch(input, gamma, initial, reset)
    with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
        if not batch.is_batched:
            return call(input, gamma, dim, initial, reset)
        full = batch.full(0, ndim)
        assert full is not None
        return batch.wrap(call(full, batch.gamma(1, ndim), normal + 1, batch.row(2, ndim), batch.full(3, ndim)), ndim)


def _scan(
    keyset: Any,
    input: Tensor,
    gamma: Tensor | None,
    gamma_value: float,
    dim: int,
    reverse: bool,
    shifted: bool,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
) -> Tensor:
    check_unshifted_initial(_OP, shifted, initial)

    def call(input: Tensor, gamma: Any, dim: int, initial: Any, reset: Any) -> Tensor:
        output: Tensor = _registry.scan(input, gamma, gamma_value, dim, reverse, shifted, initial, reset, window)
        return output

    return _scan_vmap(input, gamma, dim, initial, reset, window, call, integers_allowed=True)


def _discounted_cumsum_tensor(
    keyset: Any,
    input: Tensor,
    gamma: Tensor,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    check_direction(_OP, direction)

    def call(input: Tensor, gamma: Any, dim: int, initial: Any, reset: Any) -> Tensor:
        output: Tensor = _registry.discounted_cumsum_tensor(
            input, gamma, dim=dim, direction=direction, initial=initial, reset=reset, window=window
        )
        return output

    return _scan_vmap(input, gamma, dim, initial, reset, window, call)


def _discounted_cumsum_number(
    keyset: Any,
    input: Tensor,
    gamma: float,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    check_direction(_OP, direction)

    def call(input: Tensor, _: Any, dim: int, initial: Any, reset: Any) -> Tensor:
        output: Tensor = _registry.discounted_cumsum_number(
            input, gamma, dim=dim, direction=direction, initial=initial, reset=reset, window=window
        )
        return output

    return _scan_vmap(input, None, dim, initial, reset, window, call)


def _cumsum(
    keyset: Any, input: Tensor, dim: int = -1, *, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    ndim = input.dim()
    normal = check_dim("cumsum", input, dim)
    batch = _Batch(input)
    with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
        full = batch.full(0, ndim)
        return batch.wrap(_registry.cumsum(full, normal + 1, reverse=reverse, dtype=dtype), ndim)


def _scan_backward(
    keyset: Any,
    grad: Tensor,
    output: Tensor,
    gamma: Tensor | None,
    gamma_value: float,
    dim: int,
    reverse: bool,
    initial: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    ndim = grad.dim()
    dim = check_scan(_OP, grad, gamma, dim, initial, reset, None)
    check_output(_OP, output, grad)
    batch = _Batch(grad, output, gamma, initial, reset)
    with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
        grad_input, grad_gamma = _registry.scan_backward(
            batch.full(0, ndim),
            batch.full(1, ndim),
            batch.gamma(2, ndim),
            gamma_value,
            dim + 1,
            reverse,
            batch.row(3, ndim),
            batch.full(4, ndim),
        )
        # The sums over time of a 0-D input are (B,) already.
        return batch.wrap(grad_input, ndim), _add_batch_dim(grad_gamma, 0, batch.level)


for _name, _kernel in (
    ("_scan", _scan),
    ("_scan_backward", _scan_backward),
    ("discounted_cumsum.Tensor", _discounted_cumsum_tensor),
    ("discounted_cumsum", _discounted_cumsum_number),
    ("cumsum", _cumsum),
):
    _registry.LIBRARY.impl(_name, _kernel, "FuncTorchBatched", with_keyset=True)
