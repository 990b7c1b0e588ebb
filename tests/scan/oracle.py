"""What the scan tests share: float64 oracles, error budgets, input factories, layouts.

Nothing here calls torch_dcs_ops. The oracles take the definition step by step: a recurrence, or for a window the sum it
stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

REAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
DTYPES = (*REAL_DTYPES, *COMPLEX_DTYPES)
HALF = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def wide_gates(input: Tensor, gamma: float | Tensor, dim: int) -> Tensor:
    """The gate of every step, in input's shape, as a kernel sees them."""
    if not isinstance(gamma, Tensor):
        return torch.full(input.shape, gamma, dtype=torch.float64)
    gamma = gamma.detach().cpu()
    if gamma.dim() == input.dim() and input.dim() and gamma.size(dim) != 1:
        # A per-step gamma is read in input's precision, in float32 beside a half-precision input.
        narrow = torch.float32 if input.dtype in HALF and gamma.dtype != input.dtype else input.dtype
        gamma = gamma.to(narrow if gamma.is_complex() else narrow.to_real())
    gamma = gamma.to(wide_dtype(gamma.dtype))
    if gamma.dim() < input.dim():
        rows = list(input.shape)
        del rows[dim]
        gamma = gamma.expand(rows).unsqueeze(dim)
    return gamma.expand(input.shape)


def oracle(
    input: Tensor,
    gamma: float | Tensor,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The result in float64 or complex128, on the CPU."""
    if input.dim() == 0:
        row_reset = None if reset is None else reset.reshape(1)
        row_gamma = gamma.reshape(1) if isinstance(gamma, Tensor) else gamma
        return oracle(
            input.reshape(1), row_gamma, direction=direction, initial=initial, reset=row_reset, window=window
        ).reshape(())
    gates = wide_gates(input, gamma, dim).movedim(dim, -1)
    values = input.detach().cpu().to(wide_dtype(input.dtype)).movedim(dim, -1)
    start = None if initial is None else initial.detach().cpu().to(values.dtype).expand(values.shape[:-1])
    cuts = torch.zeros(values.shape, dtype=torch.bool) if reset is None else reset.cpu().movedim(dim, -1)
    length = values.size(-1)
    output = torch.empty_like(values)
    order = list(range(length))[:: -1 if direction == "right" else 1]
    for index, t in enumerate(order):
        # The carry at t, built from as far back as the window reaches: one multiplication and one addition a step.
        reach = index if window is None else min(index, window - 1)
        with_initial = start is not None and reach == index and (window is None or window - 1 > index)
        if window is None and index:
            carry = output[..., order[index - 1]]
        else:
            carry = start if with_initial else None
            for s in order[index - reach : index]:
                carry = _step(values, gates, cuts, s, carry)
        output[..., t] = _step(values, gates, cuts, t, carry)
    return output.movedim(-1, dim)


def _step(values: Tensor, gates: Tensor, cuts: Tensor, t: int, carry: Tensor | None) -> Tensor:
    if carry is None:
        return values[..., t]
    return torch.where(cuts[..., t], values[..., t], values[..., t] + gates[..., t] * carry)


def differentiable_oracle(
    input: Tensor,
    gamma: float | Tensor,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The same by aten operations that every transform differentiates; for float64 and short inputs."""
    values = input.movedim(dim, -1)
    length = values.size(-1)
    order = list(range(length))[:: -1 if direction == "right" else 1]
    reach = length + 1 if window is None else window
    cuts = None if reset is None else reset.movedim(dim, -1)
    is_step = isinstance(gamma, Tensor) and gamma.dim() == input.dim()
    gates = gamma.expand(input.shape).movedim(dim, -1) if is_step else gamma  # type: ignore[union-attr]
    output: list[Any] = [None] * length
    for index, t in enumerate(order):
        total, weight, cut = values[..., t], 1.0, None
        for distance in range(1, reach):
            back = index - distance
            if back < -1 or (back == -1 and initial is None):
                break
            link = order[back + 1]
            weight = weight * (gates[..., link] if is_step else gates)  # type: ignore[index]
            if cuts is not None:
                cut = cuts[..., link] if cut is None else cut | cuts[..., link]
            term = weight * (initial if back == -1 else values[..., order[back]])
            total = total + (term if cut is None else torch.where(cut, 0.0, term))
        output[t] = total
    return torch.stack(output, -1).movedim(-1, dim)


def error_budget(expected: Tensor, input: Tensor, gamma: float | Tensor, **options: Any) -> Tensor:
    """What rounding may do to every output element.

    The recurrence itself, run in the accumulation dtype (float32 for half precision and float32), rounds twice a step,
    so to first order its error is at most 2u·Σ (d + 1)·|weight·x| over the distances d: u·2·(scan of the scan of
    |x|). One rounding to the output's dtype comes on top. Complex products round at most 3 times as much (Brent,
    Percival, Zimmermann 2007).
    """
    dtype = input.dtype
    accumulation = torch.finfo(torch.float64 if wide_dtype(dtype) == dtype else torch.float32)
    rounding = accumulation.eps / 2 * (3 if dtype.is_complex else 1)
    dim = options.get("dim", -1)
    if options.get("initial") is not None:
        options["initial"] = _magnitude(options["initial"])
    gates = _magnitude(wide_gates(input, gamma, dim)) if input.dim() else gamma
    absolute = oracle(_magnitude(input), gates, **options)
    if options.get("window") is None:
        steps = oracle(absolute, gates, **options)
    else:
        steps = absolute * min(options["window"], max(input.shape, default=1) + 1)
    final = torch.finfo(dtype)
    return 2 * rounding * steps.abs() + final.eps * expected.abs() + final.smallest_normal


def _magnitude(tensor: Tensor) -> Tensor:
    """Absolute values in float64; what is not finite has no error."""
    return torch.nan_to_num(tensor.detach().cpu().to(wide_dtype(tensor.dtype)).abs(), 0.0, 0.0, 0.0)


def assert_is_scan(actual: Tensor, input: Tensor, gamma: float | Tensor, **options: Any) -> None:
    """`actual` is the scan of `input`: finite entries within the budget, NaN and inf exactly where they belong."""
    expected = oracle(input, gamma, **options)
    assert actual.dtype == input.dtype
    assert actual.shape == input.shape
    assert actual.device == input.device
    got = actual.detach().cpu().to(expected.dtype)
    largest = torch.finfo(input.dtype).max
    finite = expected.isfinite() & (expected.abs() < largest * 0.99)
    overflows = expected.isfinite() & ~finite  # inf in a narrower dtype
    assert torch.equal(got.isfinite() | overflows, expected.isfinite()), "NaN or inf in the wrong places"
    budget = error_budget(expected, input, gamma, **options)
    error = (got - expected).abs()
    excess = torch.where(finite, error - budget, -1.0)
    if excess.numel():
        worst = int(excess.argmax())
        assert bool((excess <= 0).all()), (
            f"error {error.flatten()[worst]:.3e} beyond the budget {budget.flatten()[worst]:.3e} at flat index {worst}"
        )


def make(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=wide_dtype(dtype))
    return drawn.to(dtype=dtype, device=device)


def make_gamma(kind: str, shape: Sequence[int], dim: int, dtype: torch.dtype, device: str, *, seed: int = 1) -> Any:
    """gamma of a kind: "number", "scalar" (0-D), "row", "row1" (size 1 along time), "step", "time" (all rows alike)."""
    if kind == "number":
        return 0.9
    rows = list(shape)
    rows.pop(dim)
    kept = list(shape)
    kept[dim] = 1
    line = [1] * len(shape)
    line[dim] = shape[dim]
    size = {"scalar": (), "row": rows, "row1": kept, "step": list(shape), "time": line}[kind]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(tuple(size), generator=generator, dtype=torch.float64) * 1.2 - 0.2
    if dtype.is_complex:
        drawn = drawn * torch.exp(2j * math.pi * torch.rand(tuple(size), generator=generator, dtype=torch.float64))
    return drawn.to(dtype=dtype, device=device)


def make_reset(shape: Sequence[int], device: str = "cpu", *, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(tuple(shape), generator=generator) < 0.2).to(device)


def _strided(tensor: Tensor) -> Tensor:
    padded = tensor.new_zeros([2 * size for size in tensor.shape])
    view = padded[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def _sub_view(tensor: Tensor) -> Tensor:
    padded = tensor.new_full([size + 3 for size in tensor.shape], 7)
    view = padded[tuple(slice(2, 2 + size) for size in tensor.shape)]
    return view.copy_(tensor)


def _permuted(tensor: Tensor) -> Tensor:
    axes = list(range(tensor.dim()))[::-1]
    return tensor.permute(axes).contiguous().permute(axes)


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() else tensor


# The same kind of values (of the first row alone for "expanded") in memory laid out differently.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "permuted": _permuted,
    "expanded": _expanded,
    "strided": _strided,
    "sub_view": _sub_view,
}
