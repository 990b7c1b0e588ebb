"""hypothesis: any shape, any strides, any discount, any options, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import discounted_cumsum

from scan.oracle import assert_is_scan, make, make_gamma, make_reset

pytest.importorskip("hypothesis", reason="hypothesis, which draws the cases, is not installed")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def views(draw: Any, tensor: Tensor) -> Tensor:
    """The values of `tensor` with its axes in any order in memory, any steps between them, any offset."""
    axes = draw(st.permutations(range(tensor.dim())))
    steps = [draw(st.integers(1, 3)) for _ in axes]
    offsets = [draw(st.integers(0, 2)) for _ in axes]
    permuted = tensor.permute(axes)
    storage = tensor.new_zeros([o + s * n for o, s, n in zip(offsets, steps, permuted.shape, strict=True)])
    slices = tuple(slice(o, o + s * n, s) for o, s, n in zip(offsets, steps, permuted.shape, strict=True))
    view = storage[slices]
    view.copy_(permuted)
    inverse = [axes.index(axis) for axis in range(tensor.dim())]
    return view.permute(inverse)


@st.composite
def calls(draw: Any, dtypes: Any = DTYPES) -> tuple[Tensor, Any, dict[str, Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 1000))
    x = draw(views(make(shape, dtype, seed=seed)))
    kind = draw(st.sampled_from(["number", "any number", "scalar", "row", "row1", "step", "time"]))
    if kind == "any number":
        gamma: Any = draw(st.floats(-1.5, 1.5, allow_nan=False))
    else:
        gamma = make_gamma(kind, shape, dim, dtype, "cpu", seed=seed + 1)
        gamma = draw(views(gamma)) if isinstance(gamma, Tensor) and gamma.dim() else gamma
    rows = [size for axis, size in enumerate(shape) if axis != dim % len(shape)]
    options: dict[str, Any] = {"dim": dim, "direction": draw(st.sampled_from(["left", "right"]))}
    if draw(st.booleans()):
        options["initial"] = draw(views(make(rows, dtype, seed=seed + 2))) if rows else make((), dtype)
    if draw(st.booleans()):
        options["reset"] = draw(views(make_reset(shape, seed=seed + 3)))
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 12))
    return x, gamma, options


@RELAXED
@given(call=calls())
def test_any_call(device: str, call: Any) -> None:
    x, gamma, options = to_device(call, device)
    y = discounted_cumsum(x, gamma, **options)
    assert_is_scan(y, x, gamma, **options)
    if device == "cpu":
        assert y.stride() == torch.empty_like(x).stride()


@RELAXED
@given(call=calls(dtypes=[torch.float64, torch.complex128]), seed=st.integers(0, 1000))
def test_the_adjoint_is_the_transpose(device: str, call: Any, seed: int) -> None:
    """⟨v, scan(x)⟩ = ⟨backward(v), x⟩ for whatever linear map the options make of the scan."""
    x, gamma, options = to_device(call, device)
    options.pop("initial", None)
    x = x.detach().clone().requires_grad_()
    v = make(x.shape, x.dtype, device, seed=seed)
    y = discounted_cumsum(x, gamma, **options)
    (backward,) = torch.autograd.grad(y, x, v)
    y = y.detach()
    left, right = (v.conj() * y).sum(), (backward.conj() * x.detach()).sum()
    scale = float((v.abs() * y.abs()).sum() + (backward.abs() * x.detach().abs()).sum()) + 1e-300
    assert abs(left - right).item() <= 1e-11 * scale


@RELAXED
@given(call=calls(dtypes=[torch.float64]), data=st.data())
def test_splitting_anywhere_changes_nothing(device: str, call: Any, data: Any) -> None:
    x, gamma, options = to_device(call, device)
    dim, length = options["dim"], x.size(options["dim"])
    options.pop("window", None)
    whole = discounted_cumsum(x, gamma, **options)
    cut = data.draw(st.integers(0, length))
    parts = [slice(0, cut), slice(cut, length)]
    first, second = parts if options["direction"] == "left" else parts[::-1]

    def part(tensor: Any, where: slice) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dim() < x.dim() or tensor.size(dim) == 1 != length:
            return tensor
        return tensor.narrow(dim, where.start, where.stop - where.start)

    results = {}
    carry = options.pop("initial", None)
    reset = options.pop("reset", None)
    for where in (first, second):
        y = discounted_cumsum(part(x, where), part(gamma, where), initial=carry, reset=part(reset, where), **options)
        results[where.start if where.stop > where.start else -1] = y
        if y.size(dim):
            carry = y.select(dim, y.size(dim) - 1 if options["direction"] == "left" else 0)
    joined = torch.cat([results[start] for start in sorted(results) if start >= 0], dim) if length else whole
    torch.testing.assert_close(joined, whole, rtol=1e-11, atol=1e-11)


def to_device(call: Any, device: str) -> Any:
    x, gamma, options = call
    move = (lambda t: t.to(device)) if device != "cpu" else (lambda t: t)
    return (
        move(x),
        move(gamma) if isinstance(gamma, Tensor) else gamma,
        {k: move(v) if isinstance(v, Tensor) else v for k, v in options.items()},
    )
