"""The pass that fuses linear + cross_entropy under autocast, and on half-precision models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compile.fused_graphs import assert_same, rewritten
from compile.linear_cross_entropy_graphs import FUSED, Operands, rows
from support.selection import slow

pytestmark = pytest.mark.usefixtures("fresh_compiler", "nothing_said")

AUTOCAST: dict[str, Callable[[Operands, Tensor, Tensor], Tensor]] = {}


def autocast_case(
    function: Callable[[Operands, Tensor, Tensor], Tensor],
) -> Callable[[Operands, Tensor, Tensor], Tensor]:
    AUTOCAST[function.__name__] = function
    return function


@autocast_case
def all_inside(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(rows(o.head(x)), y.flatten())


@autocast_case
def head_inside(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = o.head(x)
    return F.cross_entropy(rows(logits).float(), y.flatten())


@autocast_case
def head_in_float32(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        with torch.autocast(x.device.type, enabled=False):
            logits = o.head(x)
        return F.cross_entropy(rows(logits), y.flatten())


@autocast_case
def other_half_dtype(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.float16):
        logits = o.head(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(rows(logits), y.flatten())


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(device: str, name: str) -> None:
    """The linear map keeps its dtype: what autocast made half is half, what was float32 is not made half."""
    o = Operands(device, torch.float32)
    function = AUTOCAST[name]
    record = rewritten(function)
    # Half logits are rounded to 2**-9 of themselves, and their gradients too.
    budgets = {"head_in_float32": 2e-6, "other_half_dtype": 2**-10}
    assert_same(function, o, record, tolerance=budgets.get(name, 2**-7))
    assert record.fused


@pytest.mark.parametrize("head_in_float32", [False, True])
def test_autocast_around_the_call(device: str, head_in_float32: bool) -> None:
    o = Operands(device, torch.float32)

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        if head_in_float32:
            with torch.autocast(x.device.type, enabled=False):
                return F.cross_entropy(rows(o.head(x)), y.flatten())
        return F.cross_entropy(rows(o.head(x)), y.flatten())

    record = rewritten(function)
    assert_same(function, o, record, 2e-6 if head_in_float32 else 2**-7, lambda: torch.autocast(device, torch.bfloat16))
    assert record.fused


@pytest.mark.parametrize("dtype", [slow(torch.float16), torch.bfloat16])
def test_half_models(device: str, dtype: torch.dtype) -> None:
    o = Operands(device, dtype)
    for name in ("nn.Linear", "shifted", "softcap"):
        torch._dynamo.reset()
        record = rewritten(FUSED[name])
        assert_same(FUSED[name], o, record, tolerance=4 * torch.finfo(dtype).eps)
        assert record.fused
