"""torch.library.opcheck, all four tests, on every op: schema, autograd, fakes (strides too), AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from scan.oracle import LAYOUTS, make, make_gamma, make_reset
from support.selection import slow

NUMBER = torch.ops.dcs.discounted_cumsum.default
TENSOR = torch.ops.dcs.discounted_cumsum.Tensor
CUMSUM = torch.ops.dcs.cumsum.default
SCAN = torch.ops.dcs._scan.default
SCAN_GRADIENTS = torch.ops.dcs._scan_gradients.default


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# What sees strides. How a call is traced and differentiated does not depend on them, and takes most of the time.
OF_STRIDES = ("test_schema", "test_faketensor")
TRACED_LAYOUTS = ("contiguous", "permuted")


def check(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, utilities: tuple[str, ...] = ALL
) -> None:
    result = opcheck(op, args, kwargs or {}, test_utils=utilities)
    assert set(result.values()) == {"SUCCESS"}, result
    assert set(result) == set(utilities)


def utilities_for(layout: str) -> tuple[str, ...]:
    return ALL if layout in TRACED_LAYOUTS else OF_STRIDES


def grad(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.each_value
def test_layouts(device: str, dim: int, layout: str) -> None:
    """opcheck runs with sizes made symbolic as well (test_aot_dispatch_dynamic)."""
    shape = (3, 4, 5)
    change = LAYOUTS[layout]
    x = grad(change(make(shape, torch.float32, device)))
    rows = [size for axis, size in enumerate(shape) if axis != dim]
    options = {
        "dim": dim,
        "initial": grad(change(make(rows, torch.float32, device, seed=3))),
        "reset": change(make_reset(shape, device)),
    }
    utilities = utilities_for(layout)
    check(NUMBER, (x, 0.9), options, utilities)
    for kind in ("row", "step"):
        gamma = grad(change(make_gamma(kind, shape, dim, torch.float32, device)))
        check(TENSOR, (x, gamma), options, utilities)


@pytest.mark.parametrize("layout", ["permuted", slow("expanded")])
@pytest.mark.parametrize("kind", [slow("row"), "step"])
def test_windows(device: str, kind: str, layout: str) -> None:
    shape = (3, 6)
    x = grad(LAYOUTS[layout](make(shape, torch.float32, device)))
    gamma = grad(make_gamma(kind, shape, 1, torch.float32, device))
    check(TENSOR, (x, gamma), {"window": 3, "initial": grad(make((3,), torch.float32, device))})
    check(NUMBER, (x, 0.9), {"window": 100, "direction": "left"})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 5), (5, 0), (1, 1), (2, 0, 3)], ids=str)
def test_degenerate_shapes(device: str, shape: tuple[int, ...]) -> None:
    x = grad(make(shape, torch.float32, device))
    check(NUMBER, (x, 0.9))
    check(TENSOR, (x, grad(torch.tensor(0.9, device=device))), {"direction": "left"})
    check(CUMSUM, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float64), torch.complex64], ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    x = grad(make((3, 5), dtype, device))
    for kind in ("row", "row1", "step"):
        check(TENSOR, (x, grad(make_gamma(kind, (3, 5), 1, dtype, device))))
        check(TENSOR, (x, make_gamma(kind, (3, 5), 1, torch.float32, device)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cumsum(device: str, layout: str) -> None:
    x, utilities = grad(LAYOUTS[layout](make((3, 4, 5), torch.float32, device))), utilities_for(layout)
    check(CUMSUM, (x, 1), {"reverse": True}, utilities)
    check(CUMSUM, (x, 0), {"dtype": torch.float64}, utilities)
    check(CUMSUM, (LAYOUTS[layout](torch.arange(60, device=device).reshape(3, 4, 5)),), None, utilities)
    check(CUMSUM, (LAYOUTS[layout](make_reset((3, 4, 5), device)),), None, utilities)


@pytest.mark.parametrize("layout", [slow(name) if name == "permuted" else name for name in LAYOUTS])
@pytest.mark.parametrize(("kind", "wide"), [slow("row", torch.float64), ("step", torch.float32)])
def test_private_ops(device: str, kind: str, wide: torch.dtype, layout: str) -> None:
    shape, change = (3, 4, 5), LAYOUTS[layout]
    x, reset = grad(change(make(shape, torch.float32, device))), change(make_reset(shape, device))
    output, utilities = grad(change(make(shape, torch.float32, device, seed=8))), utilities_for(layout)
    gamma = grad(change(make_gamma(kind, shape, 1, torch.float32, device)))
    initial = grad(change(make((3, 5), torch.float32, device)))
    check(SCAN, (x, gamma, 1.0, 1, True, True, None, reset, None), None, utilities)
    check(SCAN, (x, gamma, 1.0, 1, False, False, initial, reset, 2), None, utilities)
    check(SCAN_GRADIENTS, (x, output, gamma, 1.0, 1, True, initial, reset), None, utilities)
    check(SCAN_GRADIENTS, (x, output, None, 0.9, 1, False, None, None), None, utilities)
    half = x.detach().bfloat16()
    gamma = make_gamma(kind, shape, 1, wide, device)
    check(SCAN_GRADIENTS, (half, half + 1, gamma, 1.0, 1, True, None, None), None, utilities)
