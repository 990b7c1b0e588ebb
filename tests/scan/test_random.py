"""Random problems over the shapes where kernels change their way: vectors, packed rows, tiles, chains, columns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

from scan.oracle import LAYOUTS, assert_is_scan, make, make_gamma, make_reset

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
SHORT = (
    ((3, 5), 1),
    ((32, 8), 1),
    ((100, 32), 1),
    ((129, 16), 1),
    ((40, 17), 1),
    ((9, 256), 1),
    ((4, 511), 1),
    ((3, 1000), 1),
    ((6, 5), 0),
    ((100, 33), 0),
    ((2, 50, 33), 1),
    ((2, 3, 4, 65), 3),
    ((2, 3, 70, 5), 2),
)
LONG = (
    ((2, 4096), 1),
    ((3, 5000), 1),
    ((2, 8195), 1),
    ((3, 40_000), 1),
    ((1, 300_000), 1),
    ((3000, 7), 0),
    ((300, 257), 0),
)


def draw(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Any, Any, dict[str, Any]]:
    """An input, a gamma and options, in random layouts."""
    choose = random.Random(f"{shape} {dim} {dtype} {seed}")
    layouts = [layout for name, layout in LAYOUTS.items() if name != "expanded" or shape[0] > 1]
    x = choose.choice(layouts)(make(shape, dtype, device, seed=seed))
    kind = choose.choice(("number", "scalar", "row", "step"))
    gamma = make_gamma(kind, shape, dim, dtype, device, seed=seed)
    if kind == "step":
        gamma = choose.choice(layouts)(gamma)
    rows = [size for d, size in enumerate(shape) if d != dim]
    options: dict[str, Any] = {"dim": dim, "direction": choose.choice(("left", "right"))}
    if choose.random() < 0.4:
        options["initial"] = make(rows, dtype, device, seed=seed + 1)
    if choose.random() < 0.4:
        options["reset"] = choose.choice(layouts)(make_reset(shape, device, seed=seed))
    if choose.random() < 0.25 and shape[dim] <= 1000:  # the oracle takes time x window steps
        options["window"] = choose.choice((1, 3, 70))
    return x, gamma, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHORT, ids=str)
@pytest.mark.each_value
def test_forward(device: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x, gamma, options = draw(shape, dim, dtype, device, seed=0)
    assert_is_scan(discounted_cumsum(x, gamma, **options), x, gamma, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHORT + LONG, ids=str)
def test_forward_sweep(device: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int) -> None:
    x, gamma, options = draw(shape, dim, dtype, device, seed=seed + 1)
    assert_is_scan(discounted_cumsum(x, gamma, **options), x, gamma, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHORT, ids=str)
def test_gradients_agree_with_the_time_loop(device: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """Against autograd through the recurrence written as a loop."""
    x, gamma, options = draw(shape, dim, dtype, device, seed=7)
    options.pop("window", None)
    gamma = torch.as_tensor(gamma, dtype=dtype, device=device)
    initial = options.get("initial")
    leaves = [t.detach().clone().requires_grad_() for t in (x, gamma) + (() if initial is None else (initial,))]
    if initial is not None:
        options["initial"] = leaves[2]
    output = discounted_cumsum(leaves[0], leaves[1], **options)
    upstream = make(shape, dtype, device, seed=9)
    got = torch.autograd.grad(output, leaves, upstream)

    values = leaves[0].movedim(dim, -1)
    gates = leaves[1] if leaves[1].dim() == len(shape) else leaves[1].unsqueeze(dim) if leaves[1].dim() else leaves[1]
    gates = gates.expand(shape).movedim(dim, -1)
    reset = options.get("reset")
    cuts = None if reset is None else reset.movedim(dim, -1)
    carry = None if initial is None else leaves[2]
    steps: list[Any] = [None] * shape[dim]
    for t in range(shape[dim])[:: -1 if options["direction"] == "right" else 1]:
        step = values[..., t]
        if carry is not None:
            carried = gates[..., t] * carry
            step = step + (carried if cuts is None else torch.where(cuts[..., t], 0.0, carried))
        carry = steps[t] = step
    expected = torch.autograd.grad(torch.stack(steps, -1).movedim(-1, dim), leaves, upstream)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max().clamp(min=1)))
