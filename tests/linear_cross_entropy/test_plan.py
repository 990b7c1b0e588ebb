"""The planner of linear_cross_entropy: rows at a time within a budget, and how linear_weight's gradient is summed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torch_dcs_ops.ops.linear_cross_entropy.plan import make_plan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIB = 1 << 20


def plan(rows: int, features: int, classes: int, dtype: torch.dtype = BF16, **changes: Any) -> Any:
    arguments = {"gradient_dtype": dtype, "device_type": "cuda", "need_weight_grad": True} | changes
    return make_plan(rows, features, classes, dtype, **arguments)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_plan(device_type: str, dtype: torch.dtype) -> None:
    for rows, features, classes, budget in itertools.product(
        (0, 1, 100, 1000, 8192, 100_000), (64, 4096), (1, 100, 32000, 128256, 256003), (1, MIB, 100 * MIB, None)
    ):
        got = plan(rows, features, classes, dtype, memory_budget=budget, device_type=device_type)
        assert got.rows >= 1
        assert got.stride >= classes
        assert got.stride * dtype.itemsize % 16 == 0
        assert got.stride - classes < 16 // dtype.itemsize
        held = min(got.rows, rows) * got.stride * dtype.itemsize
        defaults = {"cpu": (32 * MIB, 64), "cuda": (256 * MIB, 1024)}[device_type]
        row = got.stride * dtype.itemsize
        limit = max(budget, row) if budget is not None else max(defaults[0], defaults[1] * row)
        if got.accumulation == "float32" and device_type == "cuda" and budget is None:
            limit = max(limit, min(6144 - features, 2 * features) * row)
        single = dtype != F32 and budget is None and got.rows >= rows
        # One chunk may hold a quarter more, the result included, than the better one of the other two plans.
        others = min(max(rows, features), 2 * features) * row + limit
        assert held <= max(limit, (1.25 * others - features * row) if single else 0)
        if rows > got.rows:
            assert got.accumulation in (("direct",) if dtype == F32 else ("shared", "float32"))
            assert -(-rows // got.rows) * row <= max(2 * rows * row * row // limit, 2 * row) + row  # no needless chunks


def test_known_plans() -> None:
    """D = 4096, V = 128256 and D = 2304, V = 256000 in bfloat16, where the defaults come from."""
    assert plan(8192, 4096, 128256) == (1024, 128256, "shared")
    assert plan(65536, 4096, 128256) == (1536, 128256, "float32")
    assert plan(16384, 4096, 128256) == (1536, 128256, "float32")
    assert plan(8192, 4096, 128256, accumulate_dtype=BF16) == (2048, 128256, "compact")
    assert plan(8192, 4096, 128256, accumulate_dtype=F32) == (1024, 128256, "shared")
    assert plan(8192, 2304, 256000) == (2816, 256000, "float32")
    assert plan(8192, 2048, 128256) == (4096, 128256, "float32")
    assert plan(8192, 8192, 128256) == (1024, 128256, "shared")
    # Up to a tenth more than a float32 sum of two results' bytes: 1.1 · (2·4096 + 1024) - 1024.
    assert plan(9088, 4096, 128256).accumulation == "shared"
    assert plan(9216, 4096, 128256).accumulation == "float32"
    # Logits and the result apart, for less than a quarter more.
    assert plan(2048, 4096, 128256) == (2048, 128256, "direct")
    assert plan(2560, 4096, 128256).accumulation == "shared"


def test_large_chunks_without_sums() -> None:
    """On a GPU without a budget: a forward alone, and a compact sum of no more features than rows of logits."""
    for options in ({"need_weight_grad": False, "is_forward": True}, {"accumulate_dtype": BF16}):
        assert plan(8192, 2304, 256000, **options).rows == 2048
        assert plan(8192, 4096, 128256, **options).rows == 2048
        assert plan(8192, 4096, 128256, memory_budget=1024 * 2 * 128256, **options).rows == 1024
        assert plan(8192, 4096, 128256, device_type="cpu", **options).rows <= 256
    assert plan(8192, 1024, 1 << 20, accumulate_dtype=BF16).rows == 1024
    assert plan(8192, 1024, 1 << 20, need_weight_grad=False).rows == 1024


def test_fast_chunks() -> None:
    """Of log-probabilities, policies and divergences on a GPU: of 2048 rows, summed as without."""
    for rows, features, classes, accumulation in ((4096, 4096, 131072, "shared"), (8192, 4096, 151936, "shared")):
        slow, fast = (plan(rows, features, classes, is_fast=is_fast) for is_fast in (False, True))
        assert slow == (1024, classes, accumulation)
        assert fast == (2048, classes, accumulation)
        budget = 1024 * 2 * classes
        assert plan(rows, features, classes, is_fast=True, memory_budget=budget).rows == 1024
        assert plan(rows, features, classes, is_fast=True, logits_dtype=F32).rows == 1024
        assert plan(rows, features, classes, is_fast=True, device_type="cpu").rows <= 128
    # What has larger chunks already keeps them, and two thousand rows are one.
    assert plan(8192, 2304, 256000, is_fast=True) == plan(8192, 2304, 256000)
    assert plan(1500, 512, 128256, is_fast=True) == (1500, 128256, "direct")


@pytest.mark.parametrize(
    ("rows", "gibibytes"), [(1024, 1.3), (2048, 1.6), (4096, 1.3), (8192, 2.4), (9088, 2.5), (16384, 2.5), (65536, 2.9)]
)
def test_memory_at_128256_classes(rows: int, gibibytes: float) -> None:
    """Of a bfloat16 training step with D = 4096, both gradients included, by what each plan holds."""
    features, classes = 4096, 128256
    got = plan(rows, features, classes)
    result, logits = features * classes, {"direct": 0, "shared": max(rows - features, 0), "float32": features}
    elements = result + (got.rows + logits[got.accumulation]) * got.stride + rows * features
    assert elements * 2 <= gibibytes * 2**30


def test_an_explicit_budget_is_kept() -> None:
    assert plan(2048, 4096, 128256, memory_budget=1024 * 2 * 128256) == (1024, 128256, "shared")


def test_without_a_weight_gradient_nothing_is_summed() -> None:
    for dtype in (BF16, F16, F32):
        assert plan(100_000, 64, 128256, dtype, need_weight_grad=False).accumulation == "direct"


def test_chunks_are_even() -> None:
    """1100 rows where 1024 fit: not 1024 and 76."""
    assert plan(1100, 64, 128256).rows == 640
    assert plan(10, 64, 1000, F32, memory_budget=9 * 4000).rows == 5


def test_a_budget_for_all_logits_is_one_gemm() -> None:
    assert plan(8192, 512, 128256, memory_budget=2 * 8192 * 128256) == (8192, 128256, "direct")


def test_float16_before_its_normalization_is_float32() -> None:
    assert plan(10, 64, 100, F16, gradient_dtype=F32).accumulation == "float32"
    assert plan(10, 64, 100, F16).accumulation == "direct"
    for gradient_dtype in (F16, F32):
        assert plan(10_000, 64, 100, F16, gradient_dtype=gradient_dtype, memory_budget=2000).accumulation == "float32"
        assert plan(100, 64, 100, F16, gradient_dtype=gradient_dtype, memory_budget=2000).accumulation == "shared"
