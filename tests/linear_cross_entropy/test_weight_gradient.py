"""The sums of linear_weight's gradient over chunks of rows, each against one GEMM over all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import _native, _registry, linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy.plan import Accumulation, make_plan
from torch_dcs_ops.ops.linear_cross_entropy.weight_gradient import in_whole_waves, make_accumulator

from linear_cross_entropy.oracle import leaf, make, relative_error
from linear_cross_entropy.test_memory import peak, peak_inside_gemms

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# (N, D, V): N on either side of D and of 2·D; V odd, a last slice that is longer than the others, below one slice, one.
SHAPES = [
    (64, 32, 1000),
    (70, 32, 1001),
    (20, 64, 777),
    (64, 64, 1025),
    (300, 128, 5003),
    (64, 32, 100),
    (3, 8, 3),
    (1, 8, 1),
]


def chunks(whole: Tensor, rows: int) -> Any:
    """Each chunk in a buffer whose padding behind the last class is nan."""
    count, classes = whole.shape
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        buffer = whole.new_full((rows, -(-classes // 8) * 8), torch.nan)[: part.stop - start, :classes]
        yield buffer.copy_(whole[part]), part


@pytest.fixture
def sums_in_float32(device: str) -> Iterator[None]:
    """By default cuBLAS may round the parts of a split sum to bfloat16 on their way, in every GEMM of torch."""
    if device == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    if device == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize(
    ("dtype", "result"), [(BF16, BF16), (F16, F16), (F16, F32)], ids=["bfloat16", "float16", "float16 to float32"]
)
@pytest.mark.parametrize("accumulation", ["shared", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_rounding(
    device: str,
    shape: tuple[int, int, int],
    accumulation: Accumulation,
    dtype: torch.dtype,
    result: torch.dtype,
    sums_in_float32: None,
) -> None:
    rows, features, classes = shape
    x = torch.randn(rows, features, device=device).to(dtype)
    g = torch.randn(rows, classes, device=device).to(dtype)
    total = make_accumulator(accumulation, x, x.new_empty(classes, features), result)
    for chunk, part in chunks(g, 7):
        total.add(chunk, part)
    got, exact = total.result(), g.double().t() @ x.double()
    assert got.dtype == result
    # Half a unit in the last place of every number, and a float32 sum's own error, relative to its largest terms.
    sums = torch.finfo(F32).eps * rows**0.5 * (g.double().abs().t() @ x.double().abs())
    rounding = exact.abs() * torch.finfo(result).eps / 2 + torch.finfo(result).smallest_normal
    assert ((got.double() - exact).abs() <= rounding + sums).all()


@pytest.mark.parametrize("accumulation", get_args(Accumulation))
def test_no_rows(accumulation: Accumulation) -> None:
    x = torch.randn(0, 8, dtype=BF16)
    assert torch.equal(make_accumulator(accumulation, x, x.new_empty(5, 8), BF16).result(), x.new_zeros(5, 8))


def test_shared_is_one_gemm_bit_for_bit() -> None:
    """In a whole step, on a CPU, where a number does not depend on the columns around it."""
    problem = make((512,), 256, 1003, BF16, ignored=0.0)
    results = []
    for budget in (2 * 1008 * 512, 2 * 1008 * 64):
        x, w = leaf(problem.input), leaf(problem.linear_weight)
        linear_cross_entropy(x, w, problem.target, memory_budget=budget).backward()
        results.append((x.grad, w.grad))
    single, shared = results
    plans = [make_plan(512, 256, 1003, BF16, BF16, "cpu", True, 2 * 1008 * n).accumulation for n in (512, 64)]
    assert plans == ["direct", "shared"]
    assert torch.equal(shared[1], single[1])
    assert relative_error(shared[0], single[0]) < torch.finfo(BF16).eps


def test_slices_fill_the_gpu() -> None:
    for features in (1024, 2048, 2304, 4096, 5120, 8192):
        some = (64 << 20) // (2 * features)
        classes = in_whole_waves(some, features, 132)
        tiles = classes // 128 * -(-features // 256)
        assert classes % 128 == 0
        assert tiles >= 0.97 * 132 * -(-tiles // 132)
        assert abs(classes - some) <= 0.07 * some
    assert in_whole_waves(8192, 4096, 132) == 8448
    assert in_whole_waves(1000, 512, 132) == 1000  # less than a wave
    assert in_whole_waves(200, 132 * 256, 64) == 200  # a tile of classes is more than one


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_shared_memory(ratio: float) -> None:
    """The gradient of all logits and linear_weight's take the room of the larger one of them."""
    features, classes, chunk = 128, 8192, 16
    rows = int(ratio * features)
    problem = make((rows,), features, classes, BF16, ignored=0.0)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    budget = 2 * classes * chunk
    assert make_plan(rows, features, classes, BF16, BF16, "cpu", True, budget).accumulation == "shared"
    used = peak(lambda: linear_cross_entropy(x, w, problem.target, memory_budget=budget).backward())
    logits = 2 * rows * classes
    # A chunk, and what the last eighth of the classes takes beside the result.
    beside = w.nbytes // 8 * min(rows / features, 1)
    inside = peak_inside_gemms(rows, features, classes, chunk, BF16)
    assert used <= max(logits, w.nbytes) + x.nbytes + budget + beside + inside + (1 << 16)
    assert used - inside < logits + w.nbytes


def test_float32_memory() -> None:
    """A bfloat16 result and its float32 sum take 4 bytes an element, not 6."""
    rows, features, classes, chunk = 320, 64, 16_384, 16
    problem = make((rows,), features, classes, BF16, ignored=0.0)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    budget = 2 * classes * chunk
    assert make_plan(rows, features, classes, BF16, BF16, "cpu", True, budget).accumulation == "float32"
    used = peak(lambda: linear_cross_entropy(x, w, problem.target, memory_budget=budget).backward())
    # A chunk, and a float32 copy of it.
    inside = peak_inside_gemms(rows, features, classes, chunk, BF16)
    assert used <= 2 * w.nbytes + x.nbytes + 3 * budget + inside + (1 << 16)
    assert used - inside < 3 * w.nbytes


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("rows", "features", "classes", "options"),
    [
        (300, 64, 13_000, {}),
        (300, 64, 13_001, {}),  # elements behind the last vector
        (64, 32, 70_000, {"softcap": 30.0}),
        (100, 64, 128_256, {}),  # few rows: clusters
        (300, 128, 260_000, {}),
        (300, 64, 20_000, {"label_smoothing": 0.1}),  # another kernel, and a copy
        (70, 32, 1001, {}),
        (20, 64, 777, {}),
    ],
    ids=str,
)
def test_written_by_the_row_op(
    device: str, rows: int, features: int, classes: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    """On CUDA a chunk's gradient gets to its second place without a copy: the same bits."""
    if device != "cuda" or _native.CUDA.kind != "native":
        pytest.skip("of the CUDA kernels")
    x = torch.randn(rows, features, device=device).to(dtype)
    logits = torch.randn(rows, classes, device=device).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    target[::5], target[:3] = -100, torch.tensor([0, classes - 1, -100], device=device)
    copied = make_accumulator("shared", x, x.new_empty(classes, features), dtype)
    written = make_accumulator("shared", x, x.new_empty(classes, features), dtype)
    for chunk, part in chunks(logits, 150):
        other = torch.empty_strided(chunk.shape, chunk.stride(), dtype=dtype, device=device).copy_(chunk)
        fixed = (-100, options.get("label_smoothing", 0.0), options.get("softcap", 0.0), 1.0, 0.0, True, False, False)
        saved_slices = written.slice_arguments(part, can_write=True)
        assert saved_slices
        _registry.cross_entropy_rows_(chunk, target[part], *(None,) * 5, *fixed, *saved_slices)
        _registry.cross_entropy_rows_(other, target[part], *(None,) * 5, *fixed)
        assert torch.equal(chunk, other)
        written.add(chunk, part)
        copied.add(other, part)
    assert torch.equal(written.result(), copied.result())
