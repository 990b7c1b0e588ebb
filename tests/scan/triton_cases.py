"""Problems for the Triton scan kernels, and the plain recurrence in float64 that checks them."""

from __future__ import annotations

import itertools
import os
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.scan import ScanCall

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# Relative to 1 + the sum of the magnitudes of what is added: a few roundings of the result's dtype. The interpreter
# cuts float32 off to bfloat16 where the GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.int64: 0.0}


@numpy.errstate(all="ignore")
def recurrence(
    x: Tensor, gates: Tensor, dim: int, reverse: bool, shifted: bool, initial: Tensor | None, reset: Tensor | None,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Step by step, for every output its own window; `gates` in x's shape. In NumPy, where a step takes less time."""
    values, gates = (operand.movedim(dim, 0).numpy() for operand in (x, gates))
    cuts = None if reset is None else reset.movedim(dim, 0).numpy()
    if reverse:
        values, gates, cuts = values[::-1], gates[::-1], None if cuts is None else cuts[::-1]
    start = None if initial is None else initial.numpy()
    outputs: list[Any] = []
    for last in range(len(values)):
        carry = start
        first = 0
        if window is not None:
            first = max(0, last - window + 1)
            carry = start if last - window + 1 < 0 else None
        elif last > 0:
            first, carry = last, outputs[-1]
        for step in range(first, last + 1):
            gate = step - 1 if shifted else step
            if carry is None or gate < 0:
                carry = values[step]
            else:
                added = values[step] + gates[gate] * carry
                carry = added if cuts is None else numpy.where(cuts[gate], values[step], added)
        outputs.append(carry)
    stacked = torch.from_numpy(numpy.stack(outputs))
    return (stacked.flip(0) if reverse else stacked).movedim(0, dim)


def previous(output: Tensor, initial: Tensor | None, dim: int, reverse: bool) -> Tensor:
    first = torch.zeros_like(output.select(dim, 0)) if initial is None else initial
    if reverse:
        return torch.cat((output, first.unsqueeze(dim)), dim).narrow(dim, 1, output.size(dim))
    return torch.cat((first.unsqueeze(dim), output), dim).narrow(dim, 0, output.size(dim))


def expanded(gamma: Tensor | None, value: float, x: Tensor, dim: int) -> Tensor:
    """gamma in x's shape, in float64 (int64 for integers)."""
    wide = torch.int64 if x.dtype == torch.int64 else torch.float64
    if gamma is None:
        return torch.full(x.shape, value, dtype=wide)
    if gamma.dim() < x.dim():
        rows = x.shape[:dim] + x.shape[dim + 1 :]
        gamma = gamma.expand(rows).unsqueeze(dim)
    return gamma.to(wide).expand(x.shape)


class Case:
    """Random operands on the CPU, checked against `recurrence` in float64."""

    def __init__(
        self, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32, gates: str = "scalar",
        value: float = 0.9, started: bool = False, resets: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        rows = shape[:dim] + shape[dim + 1 :]
        self.dim, self.value = dim, 1.0 if gates == "sum" else value
        self.x = torch.randn(shape, generator=generator).to(dtype)
        self.grad = torch.randn(shape, generator=generator).to(dtype)
        self.gamma: Tensor | None = None
        if gates == "row":
            self.gamma = 0.5 + 0.5 * torch.rand(rows, generator=generator, dtype=torch.float64)
        elif gates == "step":
            self.gamma = (0.5 + 0.5 * torch.rand(shape, generator=generator)).to(dtype)
        self.initial = torch.randn(rows, generator=generator).to(dtype) if started else None
        self.reset = torch.rand(shape, generator=generator) < 0.05 if resets else None

    def scan(
        self, launchers: ModuleType, reverse: bool, shifted: bool, initial: Tensor | None, window: int | None
    ) -> Tensor:
        x, gamma, initial, reset = on_device(self.x, self.gamma, initial, self.reset)
        call = ScanCall(gamma, self.value, self.dim, reverse, shifted, initial, reset, window)
        output: Tensor = launchers.scan(x, call)
        return output

    def check(self, launchers: ModuleType, reverse: bool, shifted: bool = False, window: int | None = None) -> None:
        initial = None if shifted else self.initial
        output = self.scan(launchers, reverse, shifted, initial, window).cpu()
        gates = expanded(self.gamma, self.value, self.x, self.dim)
        wide_initial = None if initial is None else initial.double()
        arguments = (self.dim, reverse, shifted)
        expected = recurrence(self.x.double(), gates.double(), *arguments, wide_initial, self.reset, window)
        scale = recurrence(
            self.x.double().abs(), gates.double().abs(), *arguments,
            None if wide_initial is None else wide_initial.abs(), self.reset, window,
        )  # fmt: skip
        assert output.stride() == torch.empty_like(self.x).stride()
        assert_close(output, expected, scale)

    def check_non_finite(self, launchers: ModuleType, reverse: bool) -> None:
        """Infinities and NaNs are where the recurrence has them, and nowhere else."""
        output = self.scan(launchers, reverse, False, self.initial, None)
        gates = expanded(self.gamma, self.value, self.x, self.dim)
        initial = None if self.initial is None else self.initial.double()
        expected = recurrence(self.x.double(), gates.double(), self.dim, reverse, False, initial, self.reset)
        assert torch.equal(output.cpu().isfinite(), expected.isfinite())

    def check_backward(self, launchers: ModuleType, reverse: bool) -> None:
        gates = expanded(self.gamma, self.value, self.x, self.dim)
        wide_initial = None if self.initial is None else self.initial.double()
        values = recurrence(self.x.double(), gates, self.dim, reverse, False, wide_initial, self.reset)
        output = torch.empty_like(self.x).copy_(values)
        grad, of, gamma, initial, reset = on_device(self.grad, output, self.gamma, self.initial, self.reset)
        call = ScanCall(gamma, self.value, self.dim, reverse, False, initial, reset, None)
        grad_input, grad_gamma = (result.cpu() for result in launchers.scan_gradients(grad, of, call))
        arguments = (self.dim, not reverse, True, None, self.reset)
        expected = recurrence(self.grad.double(), gates, *arguments)
        scale = recurrence(self.grad.double().abs(), gates.abs(), *arguments)
        assert_close(grad_input, expected, scale)
        before = previous(output.double(), wide_initial, self.dim, reverse)
        terms, sizes = expected * before, scale * before.abs()
        if self.reset is not None:
            terms, sizes = (torch.where(self.reset, 0.0, value) for value in (terms, sizes))
        if self.gamma is None or self.gamma.dim() < self.x.dim():
            over = None if self.gamma is not None and not self.gamma.dim() else self.dim
            terms, sizes = terms.sum(over), sizes.sum(over)
            assert grad_gamma.dtype == (torch.float64 if self.x.dtype == torch.float64 else torch.float32)
        assert_close(grad_gamma, terms, sizes)


def on_device(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    # Strides are kept: Tensor.to keeps those of dense tensors only.
    moved: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or tensor.device.type == DEVICE:
            moved.append(tensor)
            continue
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        storage = tensor.as_strided((length,), (1,), 0).to(DEVICE)
        moved.append(storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return tuple(moved)


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor) -> None:
    assert actual.shape == expected.shape
    error = ((actual.double() - expected).abs() / (1 + scale)).max().item() if expected.numel() else 0.0
    assert error <= TOLERANCE[actual.dtype], f"error {error:.2e} of the sum of the magnitudes"


FORMS = [
    pytest.param(
        reverse, shifted, started, resets, id=f"{'right' if reverse else 'left'}{shifted:d}{started:d}{resets:d}"
    )
    for reverse, shifted, started, resets in itertools.product((False, True), repeat=4)
    if not (shifted and started)
]
