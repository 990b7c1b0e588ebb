"""Triton kernels of the filter, for their tests: where these run, operands, and what they compute in float64.

The kernels are those of filtered gradients (filter*.py of triton_kernels/linear_cross_entropy), step by step, and of
compacted rows. On a GPU they run for real; without one in Triton's interpreter, in a process that
test_kernels.py starts for all of their files.
"""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.reference.linear_cross_entropy.filter import Chunk

from support.triton_modules import triton_module

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
kernel_test = pytest.mark.skipif(not INTERPRETED and not GPU, reason="no GPU: runs in test_kernels.py")
gpu_test = pytest.mark.skipif(not GPU, reason="there is no CUDA device")
DTYPES = [torch.bfloat16, torch.float32] + ([] if INTERPRETED else [torch.float16])
GROUP_ROWS = 128
EPS = 2.0**-10
# rows, columns: one group and several, less than a block of columns and several, whole words and not.
SIZES = [(1, 1), (5, 33), (37, 1100), (3, 2048)] + ([(700, 50_257), (300, 128_256)] if GPU else [])


def load(name: str, family: str = "linear_cross_entropy") -> ModuleType:
    """A module of triton_kernels, installed or from the checkout."""
    return triton_module(f"{family}.{name}")


@pytest.fixture(name="steps")
def filter_steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """triton_kernels/linear_cross_entropy/filter.py."""
    if INTERPRETED:
        multiply_bfloat16(monkeypatch)
    return load("filter")


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as 16-bit integers, and its dot product multiplies these."""
    from triton.runtime import interpreter

    exact = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return exact(self, widened(a), widened(b), *arguments)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def unit(dtype: torch.dtype) -> float:
    """The error of one rounding; the interpreter cuts bfloat16 off where a GPU rounds."""
    return torch.finfo(dtype).eps * (1.0 if INTERPRETED else 0.5)


def assert_close(value: Tensor, expected: Tensor, tolerance: float, floor: float = 0.0) -> None:
    """Each within `tolerance` of itself, and of `floor`."""
    assert value.shape == expected.shape
    value, expected = value.double().cpu(), expected.double().cpu()
    worst = ((value - expected).abs() / (expected.abs() + floor)).nan_to_num(0).max() if expected.numel() else 0.0
    assert torch.equal(value.isnan(), expected.isnan())
    assert float(worst) <= tolerance, f"{float(worst)} > {tolerance}"


def sum_error(terms: int) -> float:
    """Of a float32 sum of products of either sign, each step's rounding on its own."""
    return 1e-6 + torch.finfo(torch.float32).eps / 2 * terms**0.5


def error(value: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    norm = float(expected.double().norm())
    return float((value.double().cpu() - expected.double().cpu()).norm()) / (norm if norm > 0 else 1.0)


class Problem:
    """Logits of a softmax that is concentrated, and what belongs to their rows; a third of the rows is ignored."""

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False, softcap: float = 0.0,
        scale: float = 1.0, stride: int | None = None, offset: int = 0,
    ) -> None:  # fmt: skip
        stride = columns if stride is None else stride
        memory = torch.full((offset + rows * stride + 64,), 77.0, dtype=dtype)
        self.outside = torch.ones(memory.shape, dtype=torch.bool)
        self.outside.as_strided((rows, columns), (stride, 1), offset).fill_(False)
        view = memory.as_strided((rows, columns), (stride, 1), offset)
        view.copy_(torch.randn(rows, columns) * 1.5 + 4 * torch.randn(columns))
        self.memory = memory.to(DEVICE)
        self.logits = self.memory.as_strided((rows, columns), (stride, 1), offset)
        self.bias = torch.randn(columns) if bias else None
        self.softcap, self.scale = softcap, scale
        self.valid = torch.rand(rows) > 0.3
        self.valid[0] = True
        self.target = torch.where(self.valid, torch.randint(columns, (rows,)), -100)
        self.a, self.h = torch.rand(rows), torch.rand(rows)
        self.settle()

    def settle(self) -> None:
        """lse, p and s of the logits and the valid rows as they are now."""
        z, self.slope = self.transformed()
        self.lse = torch.where(self.valid, z.logsumexp(1), 0).float()
        self.p = torch.where(self.valid[:, None], (z - self.lse[:, None].double()).exp(), 0)

    def transformed(self) -> tuple[Tensor, Tensor]:
        u = self.logits.cpu().double()
        u = (u if self.bias is None else u + self.bias) * self.scale
        if not self.softcap:
            return u, torch.ones_like(u)
        bent = torch.tanh(u / self.softcap)
        return self.softcap * bent, 1 - bent * bent

    def columns(self, steps: ModuleType, eps: float = EPS) -> tuple[Tensor, Tensor]:
        bias, lse, valid = on_device(self.bias, self.lse, self.valid)
        q = place_of_groups(self.logits)
        alive = torch.zeros(self.logits.size(1), dtype=torch.uint8, device=DEVICE)
        steps.columns(self.logits, lse, valid, bias, self.softcap, self.scale, eps, q, GROUP_ROWS, alive)
        return alive, q

    def keep(self, steps: ModuleType, alive: Tensor, most: int) -> tuple[Tensor, ...]:
        return keep(steps, alive.to(DEVICE), *on_device(self.target, self.valid), most)

    def gather(self, steps: ModuleType, alive: Tensor, index: Tensor, slot: Tensor, count: Tensor) -> Tensor:
        rows = on_device(self.lse, self.target, self.valid, self.a, self.h, self.bias)
        mass = torch.full((len(self.lse),), math.nan, device=DEVICE)
        chunk = Chunk(self.logits, *rows, self.softcap, self.scale)  # type: ignore[arg-type]
        steps.gather_(chunk, None, alive, index, slot, count, mass)
        return mass

    def gradient(self) -> Tensor:
        log_p = torch.where(self.valid[:, None], self.transformed()[0] - self.lse[:, None].double(), 0)
        hot = torch.nn.functional.one_hot(self.target.clamp(min=0), log_p.size(1)).bool()
        a, h = self.a.double()[:, None], self.h.double()[:, None]
        exact = torch.where(hot, h * log_p.expm1() + (a - h) * self.p, a * self.p) * self.slope
        return torch.where(self.valid[:, None], exact, 0)


def keep(steps: ModuleType, alive: Tensor, target: Tensor, valid: Tensor, most: int) -> tuple[Tensor, ...]:
    """(alive, index, slot, count) of one chunk, which is the first one."""
    steps.mark_targets(alive[None], target, valid, max(len(target), 1))
    since = torch.full_like(alive, 5, dtype=torch.int32)
    kept = steps.keep(alive, since, 3, most, steps.new_buffers(alive, len(alive)))
    assert torch.equal(since, 5 - 2 * alive.int())
    return alive, *kept


def place_of_groups(logits: Tensor) -> Tensor:
    """For q: rows of whole words of 16 bytes, and NaN before."""
    words = 16 // logits.element_size()
    stride = -(-logits.size(1) // words) * words
    return logits.new_full((-(-len(logits) // GROUP_ROWS), stride), math.nan)[:, : logits.size(1)]


def on_device(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 8.0},
    "everything": {"bias": True, "softcap": 8.0, "scale": -0.7, "stride": 1130, "offset": 3},
    "padded": {"stride": 1104},
    "halves of words": {"stride": 1108},
}


class Product:
    """Operands whose columns past the count, and rows that are not kept, are NaN: nothing of them may be used."""

    def __init__(
        self, rows: int, columns: int, features: int, count: int, dtype: torch.dtype, stride: int | None = None
    ) -> None:
        memory = torch.full((rows, columns if stride is None else stride), math.nan)
        memory[:, :count] = torch.randn(rows, count)
        self.index = torch.randperm(columns, dtype=torch.int32)
        self.kept_rows = self.index[:count].long()
        self.index[:count] = self.kept_rows.sort().values
        self.kept_rows = self.index[:count].long()
        weight = torch.full((columns, features), math.nan)
        weight[self.kept_rows] = torch.randn(count, features)
        self.features, self.columns, self.dtype = features, columns, dtype
        self.kept = memory.to(dtype).to(DEVICE)[:, :columns]
        self.count = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        self.on_device_index = self.index.to(DEVICE)
        self.weight = weight.to(dtype).to(DEVICE)
        self.input = torch.randn(rows, features).to(dtype).to(DEVICE)
        self.left = self.kept[:, :count].cpu().double()


def never(columns: int) -> Tensor:
    return torch.full((columns,), 2**31 - 1, dtype=torch.int32, device=DEVICE)
