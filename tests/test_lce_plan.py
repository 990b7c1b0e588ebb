"""The planner of linear_cross_entropy: rows at a time within a budget, and how linear_weight's gradient is summed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torch_dcs_ops.ops._lce_plan import make_plan

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
        if dtype == BF16 and got.rows >= rows:
            limit += features * row  # what a pair would have taken
        assert held <= limit
        if rows > got.rows:
            assert got.accumulation == {F32: "direct", BF16: "pair", F16: "float32"}[dtype]
            assert -(-rows // got.rows) * row <= max(2 * rows * row * row // limit, 2 * row) + row  # no needless chunks


def test_known_plans() -> None:
    """D = 4096, V = 128256 and D = 2304, V = 256000 in bfloat16, where the defaults come from."""
    assert plan(8192, 4096, 128256) == (1024, 128256, "pair")
    assert plan(65536, 4096, 128256) == (1024, 128256, "pair")
    assert plan(8192, 4096, 128256, accumulate_dtype=BF16) == (1024, 128256, "compact")
    assert plan(8192, 4096, 128256, accumulate_dtype=F32) == (1024, 128256, "float32")
    assert plan(8192, 2304, 256000) == (1024, 256000, "pair")
    # A pair of 4096 rows' size more than a chunk: full logits are no more, and one GEMM.
    assert plan(5120, 4096, 128256) == (5120, 128256, "direct")
    assert plan(5121, 4096, 128256).accumulation == "pair"


def test_without_a_weight_gradient_nothing_is_summed() -> None:
    for dtype in (BF16, F16, F32):
        assert plan(100_000, 64, 128256, dtype, need_weight_grad=False).accumulation == "direct"


def test_chunks_are_even() -> None:
    """1100 rows where 1024 fit: not 1024 and 76."""
    assert plan(1100, 64, 128256).rows == 640
    assert plan(10, 64, 1000, F32, memory_budget=9 * 4000).rows == 5


def test_a_budget_for_all_logits_is_one_gemm() -> None:
    assert plan(8192, 512, 128256, memory_budget=2 * 8192 * 128256) == (8192, 128256, "direct")


def test_float16_before_its_normalisation_is_float32() -> None:
    assert plan(10, 64, 100, F16, gradient_dtype=F32).accumulation == "float32"
    assert plan(10, 64, 100, F16).accumulation == "direct"
    assert plan(10_000, 64, 100, F16, memory_budget=2000).accumulation == "float32"
