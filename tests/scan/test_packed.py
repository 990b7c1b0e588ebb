"""Packed sequences (`cu_seqlens`) against a loop over the sequences."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

from torch_dcs_ops import discounted_cumsum

# Empty sequences at both ends and in the middle, one of one step.
OFFSETS = (0, 0, 4, 5, 5, 5, 11, 17, 17)
LENGTH, COUNT, ROWS = OFFSETS[-1], len(OFFSETS) - 1, 3
DIRECTIONS = ("left", "right")


def operands(device: str, dim: int, gamma: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Of (ROWS, LENGTH) or its transpose; `initial` has the sequences in the place of time."""

    def placed(*shape: int) -> Tensor:
        drawn = torch.randn(shape, dtype=torch.float64).to(device, dtype)
        return drawn if dim == 1 or drawn.dim() == 1 else drawn.T

    rates: dict[str, Any] = {
        "number": 0.8, "0-D": placed(1)[0], "row": placed(ROWS), "step": placed(ROWS, LENGTH),
        "shared": placed(1, LENGTH), "time of 1": placed(ROWS, 1),
    }  # fmt: skip
    reset = torch.rand(ROWS, LENGTH, device=device) < 0.2
    return {
        "input": placed(ROWS, LENGTH), "gamma": rates[gamma], "initial": placed(ROWS, COUNT),
        "reset": reset if dim == 1 else reset.T, "dim": dim,
    }  # fmt: skip


def offsets(device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(OFFSETS, device=device, dtype=dtype)


def loop(input: Tensor, gamma: Any, dim: int, initial: Tensor | None, reset: Tensor | None, **options: Any) -> Tensor:
    parts = []
    for index, (start, stop) in enumerate(itertools.pairwise(OFFSETS)):

        def part(tensor: Any, start: int = start, stop: int = stop) -> Any:
            has_time = isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.size(dim) == LENGTH
            return tensor.narrow(dim, start, stop - start) if has_time else tensor

        first = None if initial is None else initial.select(dim, index)
        parts.append(discounted_cumsum(part(input), part(gamma), dim=dim, initial=first, reset=part(reset), **options))
    return torch.cat(parts, dim)


@pytest.mark.parametrize("given", ["neither", "initial", "reset", "both"])
@pytest.mark.parametrize("gamma", ["number", "0-D", "row", "step", "shared", "time of 1"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_loop(device: str, dim: int, direction: str, gamma: str, given: str) -> None:
    x = operands(device, dim, gamma)
    x |= {"initial": None} if given in ("neither", "reset") else {}
    x |= {"reset": None} if given in ("neither", "initial") else {}
    expected = loop(**x, direction=direction)
    for dtype in (torch.int32, torch.int64):
        result = discounted_cumsum(**x, direction=direction, cu_seqlens=offsets(device, dtype))
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    x["dim"] -= 2
    again = discounted_cumsum(**x, direction=direction, cu_seqlens=offsets(device))
    assert torch.equal(again, result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_dtypes(device: str, direction: str, dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = operands(device, 1, "row", dtype)
    expected = loop(**{n: v.to(wide) if isinstance(v, Tensor) and n != "reset" else v for n, v in x.items()},
                    direction=direction)  # fmt: skip
    result = discounted_cumsum(**x, direction=direction, cu_seqlens=offsets(device))
    assert result.dtype == dtype
    # A rounding of the sums to the input's dtype, and for float32 of each step.
    tolerance = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(result.to(wide), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_window(device: str, direction: str) -> None:
    x = operands(device, 1, "row") | {"initial": None}
    for window in (1, 2, 3, 100):
        result = discounted_cumsum(**x, direction=direction, window=window, cu_seqlens=offsets(device))
        torch.testing.assert_close(result, loop(**x, direction=direction, window=window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_nan_stays_in_its_sequence(device: str, direction: str) -> None:
    x = torch.ones(LENGTH, device=device)
    x[7] = float("nan")
    result = discounted_cumsum(x, 0.5, direction=direction, cu_seqlens=offsets(device))
    spoiled = result.isnan().nonzero().flatten().tolist()
    assert spoiled == (list(range(5, 8)) if direction == "right" else list(range(7, 11)))
    # What an empty sequence would begin with goes nowhere.
    initial = torch.zeros(COUNT, device=device)
    initial[[0, 3, 4, 7]] = float("nan")
    result = discounted_cumsum(
        torch.ones_like(x), 0.5, direction=direction, cu_seqlens=offsets(device), initial=initial
    )
    assert result.isfinite().all()


@pytest.mark.parametrize("gamma", ["row", "step"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_does_not_enter_is_in_no_gradient(device: str, direction: str, gamma: str) -> None:
    """A NaN that begins an empty sequence or meets a reset, and the discount of such a reset."""
    x = operands(device, 1, gamma)
    first = 4 if direction == "left" else 10
    x["reset"][:, first] = True
    if gamma == "step":
        x["gamma"][:, first] = float("nan")
    x["initial"][:, [0, 3, 4, 7, 2 if direction == "left" else 5]] = float("nan")
    leaves = [x[name].requires_grad_() for name in ("input", "gamma", "initial")]
    result = discounted_cumsum(**x, direction=direction, cu_seqlens=offsets(device))
    for gradient in torch.autograd.grad(result.sum(), leaves):
        assert gradient.isfinite().all()


def test_initial_is_not_rounded_to_half_precision(device: str) -> None:
    """The product with gamma is not either: what is left of it beside the first step is much smaller."""
    cu = torch.tensor([0, 1], device=device)
    initial = torch.tensor([[1.003]], device=device, dtype=torch.float16)
    first = -(0.9 * initial)
    result = discounted_cumsum(first, 0.9, initial=initial, cu_seqlens=cu)
    expected = discounted_cumsum(first.double(), 0.9, initial=initial[:, 0].double())
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("gamma", ["number", "row", "step"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.each_value
def test_gradients(device: str, direction: str, gamma: str) -> None:
    x = operands(device, 1, gamma)
    names = [name for name in ("input", "gamma", "initial") if isinstance(x[name], Tensor)]

    def function(*leaves: Tensor) -> Tensor:
        x_of = x | dict(zip(names, leaves, strict=True))
        return discounted_cumsum(**x_of, direction=direction, cu_seqlens=offsets(device))

    leaves = [x[name].clone().requires_grad_() for name in names]
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)
    used = torch.autograd.grad(function(*leaves).sum(), leaves[-1])[0].abs().sum(0)
    assert [bool(total) for total in used] == [b > a for a, b in itertools.pairwise(OFFSETS)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled(device: str, direction: str, fresh_compiler: None) -> None:
    def function(input: Tensor, gamma: Any, initial: Tensor, cu_seqlens: Tensor) -> Tensor:
        return discounted_cumsum(input, gamma, direction=direction, initial=initial, cu_seqlens=cu_seqlens)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    x = operands(device, 1, "row")
    for gamma in (0.5, 0.25):
        for cu in (offsets(device), torch.tensor([0, 3, 17], device=device, dtype=torch.int32)):
            initial = x["initial"][:, : cu.numel() - 1].clone(memory_format=torch.contiguous_format)
            leaves = [x["input"].clone().requires_grad_() for _ in range(2)]
            for f, leaf in zip((compiled, function), leaves, strict=True):
                f(leaf, gamma, initial, cu).sin().sum().backward()
            torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert counter.frame_count == 1


def test_vmap_and_meta(device: str) -> None:
    x, cu = operands(device, 1, "number"), offsets(device)
    rows = torch.func.vmap(lambda row, first: discounted_cumsum(row, 0.8, initial=first, cu_seqlens=cu))
    expected = discounted_cumsum(x["input"], 0.8, initial=x["initial"], cu_seqlens=cu)
    torch.testing.assert_close(rows(x["input"], x["initial"]), expected)
    meta = discounted_cumsum(x["input"].to("meta"), 0.8, initial=x["initial"].to("meta"), cu_seqlens=cu.to("meta"))
    assert meta.is_meta
    assert meta.shape == (ROWS, LENGTH)
    half = x["input"].to("meta", torch.bfloat16), x["initial"].to("meta", torch.bfloat16)
    assert discounted_cumsum(half[0], 0.8, initial=half[1], cu_seqlens=cu.to("meta")).dtype == torch.bfloat16


def test_no_steps_and_no_sequences(device: str) -> None:
    empty = torch.ones(2, 0, device=device)
    for numbers in ([0], [0, 0, 0]):
        cu = torch.tensor(numbers, device=device)
        initial = torch.ones(2, cu.numel() - 1, device=device)
        assert discounted_cumsum(empty, 0.5, initial=initial, cu_seqlens=cu).shape == (2, 0)


def test_autocast(device: str) -> None:
    x = operands(device, 1, "number", torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = discounted_cumsum(**x, cu_seqlens=offsets(device))
        mixed = discounted_cumsum(**x | {"input": x["input"].float()}, cu_seqlens=offsets(device))
    assert result.dtype == torch.float32
    assert torch.equal(mixed, result)


X, CU = torch.ones(3, 8), torch.tensor([0, 3, 8])


@pytest.mark.parametrize(
    ("changes", "exception", "sentence"),
    [
        ({"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be a tensor or None, got list"),
        ({"cu_seqlens": CU.float()}, RuntimeError, "cu_seqlens must be int32 or int64, got float32"),
        (
            {"cu_seqlens": CU[None]},
            RuntimeError,
            "cu_seqlens must be 1-D with at least one element, got the shape (1, 3)",
        ),
        ({"cu_seqlens": CU[:0]}, RuntimeError, "cu_seqlens must be 1-D with at least one element, got the shape (0,)"),
        (
            {"cu_seqlens": torch.nested.nested_tensor([CU])},
            RuntimeError,
            "cu_seqlens must be a dense tensor, got a nested one",
        ),
        ({"cu_seqlens": CU.to("meta")}, RuntimeError, "cu_seqlens must be on input's device cpu, got meta"),
        ({"cu_seqlens": CU + 1}, RuntimeError, "cu_seqlens must begin with 0, got 1"),
        ({"cu_seqlens": CU[:2]}, RuntimeError, "cu_seqlens must end with the size along dim 1, 8, got 3"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, RuntimeError, "cu_seqlens must not decrease, got 3 behind 5"),
        (
            {"initial": torch.ones(3)},
            RuntimeError,
            "initial must broadcast to input's shape with one for each sequence at dim 1, (3, 2), got (3,)",
        ),
        ({"initial": torch.ones(3, 2).double()}, RuntimeError, "initial must have input's dtype float32, got float64"),
        (
            {"initial": torch.ones(3, 2), "window": 2},
            RuntimeError,
            "window must be None with initial and cu_seqlens, got all of them",
        ),
        ({"gamma": "0.9"}, TypeError, "gamma must be a real number or a tensor, got str"),
        ({"reset": torch.ones(3, 8)}, RuntimeError, "reset must be bool, got float32"),
    ],
)
def test_sentences(changes: dict[str, Any], exception: type[Exception], sentence: str) -> None:
    arguments = {"input": X, "gamma": 0.9, "cu_seqlens": CU} | changes
    with pytest.raises(exception, match="^" + re.escape(f"discounted_cumsum: {sentence}")):
        discounted_cumsum(**arguments)  # type: ignore[arg-type]


def test_a_0_d_input() -> None:
    with pytest.raises(RuntimeError, match="input must have a dimension of time with cu_seqlens, got a 0-D tensor"):
        discounted_cumsum(torch.tensor(1.0), 0.9, cu_seqlens=CU)
