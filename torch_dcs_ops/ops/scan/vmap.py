"""vmap of the scan family: the batch goes in front of every operand, `dim` moves one to the right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.scan import ScanCall
from .._common.validate import check_dim
from .._common.vmap import BATCHED, Batch
from .validate import check_direction, check_output, check_scan, check_unshifted_initial

_OP = "discounted_cumsum"


class ScanBatch(Batch):
    """The operands of one call under one level of vmap, in the shapes that a scan takes them in."""

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

    def wrap_like(self, tensor: Tensor, ndim: int) -> Tensor:
        return self.wrap(tensor if ndim else tensor.squeeze(1))


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
    batch = ScanBatch(input, gamma, initial, reset)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        if not batch.is_batched:
            return call(input, gamma, dim, initial, reset)
        full = batch.full(0, ndim)
        assert full is not None
        return batch.wrap_like(
            call(full, batch.gamma(1, ndim), normal + 1, batch.row(2, ndim), batch.full(3, ndim)), ndim
        )


def _scan(keyset: Any, input: Tensor, *args: Any) -> Tensor:
    given = ScanCall(*args)
    check_unshifted_initial(_OP, given.shifted, given.initial)

    def call(input: Tensor, gamma: Any, dim: int, initial: Any, reset: Any) -> Tensor:
        output: Tensor = _registry.scan(input, *given._replace(gamma=gamma, dim=dim, initial=initial, reset=reset))
        return output

    return _scan_vmap(
        input, given.gamma, given.dim, given.initial, given.reset, given.window, call, integers_allowed=True
    )


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
    batch = ScanBatch(input)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        full = batch.full(0, ndim)
        return batch.wrap_like(_registry.cumsum(full, normal + 1, reverse=reverse, dtype=dtype), ndim)


def _scan_gradients(keyset: Any, grad: Tensor, output: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    gamma, gamma_value, dim, reverse, initial, reset = args
    ndim = grad.dim()
    dim = check_scan(_OP, grad, gamma, dim, initial, reset, None)
    check_output(_OP, output, grad)
    batch = ScanBatch(grad, output, gamma, initial, reset)
    is_number = gamma is not None and not gamma.dim()
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        gammas = batch.gamma(2, ndim)
        if gammas is not None and not gammas.dim():
            gammas = gammas.expand(batch.size, *(1,) * max(ndim - 1, 0))  # one per row: every sample has its own sum
        grad_input, grad_gamma = _registry.scan_gradients(
            batch.full(0, ndim), batch.full(1, ndim), gammas, gamma_value, dim + 1, reverse, batch.row(3, ndim),
            batch.full(4, ndim),
        )  # fmt: skip
        if is_number:
            grad_gamma = grad_gamma.flatten(1).sum(1) if ndim > 1 else grad_gamma
        # The sums over time of a 0-D input are (B,) already.
        return batch.wrap_like(grad_input, ndim), batch.wrap(grad_gamma)


for _name, _kernel in (
    ("_scan", _scan),
    ("_scan_gradients", _scan_gradients),
    ("discounted_cumsum.Tensor", _discounted_cumsum_tensor),
    ("discounted_cumsum", _discounted_cumsum_number),
    ("cumsum", _cumsum),
):
    _registry.LIBRARY.impl(_name, _kernel, "FuncTorchBatched", with_keyset=True)
