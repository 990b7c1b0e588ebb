"""`dcs::_cross_entropy_rows_`, the row kernels of linear_cross_entropy, against autograd in float64 and a wider type.

The op on every device that there is, and the Triton launcher: on a GPU for real, without one in Triton's interpreter,
which one test starts in a process of its own.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import _native
from torch_dcs_ops.ops.linear_cross_entropy.rows import check_rows
from torch_dcs_ops.reference.linear_cross_entropy.rows import RowsCall

from linear_cross_entropy.rows.exact import check_in_float64
from linear_cross_entropy.rows.oracle import (
    GPU,
    INTERPRETED,
    KERNELS,
    KINDS,
    OP,
    Kernel,
    error,
    make_kernel,
    make_logits,
    make_options,
    make_target,
    oracle,
    wide,
)
from support.sm_90 import compiled_for_sm_90, constants_behind_acc
from support.subprocesses import environment, run_in_the_interpreter, run_with_instruction_set

ALL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The interpreter takes some 10 ms a row.
DTYPES = (torch.float32, torch.bfloat16) if INTERPRETED else ALL_DTYPES
ROWS = 3 if INTERPRETED else 7
# Past 1024 columns a GPU's block takes a row, past 37888 16-bit logits a cluster of blocks, whose shared memory 900001
# of them overflow. Triton's blocks hold 8192.
SIZES = (1, 33, 9000) if INTERPRETED else (1, 2, 31, 33, 1000, 1025, 4099, 32_000)
LARGE_SIZES = (37_900, 50_257, 128_256, 256_001, 900_001) if GPU else ()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return make_kernel(str(request.param))


@pytest.mark.skipif(INTERPRETED or GPU, reason="the Triton kernel runs in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    """With test_kl_rows.py, in one process."""
    pytest.importorskip("triton")
    run_in_the_interpreter(__file__, str(Path(__file__).with_name("test_kl_rows.py")), "-m", marks)


@pytest.mark.skipif(INTERPRETED or not _native.CPU_LIBRARY.loaded, reason="there are no compiled kernels")
@pytest.mark.parametrize("isa", [pytest.param("default", marks=pytest.mark.slow), "avx2"])
def test_lesser_instruction_sets(isa: str) -> None:
    float64 = str(Path(__file__).with_name("test_rows_float64.py"))
    run_with_instruction_set(isa, __file__, float64, "-k", "op-cpu and (sizes or certain or 2500 or float64)")


def check(kernel: Kernel, logits: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    """Against float64; the budget is what torch makes of the same sums in float32, and one rounding to the dtype.

    float64 itself against more digits, by a budget of its own.
    """
    dtype, columns = logits.dtype, logits.size(1)
    expected, expected_gradient = oracle(torch.float64, logits, target, options)
    unit = torch.finfo(wide(dtype)).eps
    written = logits.clone()
    results = kernel(written, target, **options)
    if dtype == torch.float64:
        check_in_float64(results, written, logits, target, options)
    else:
        own, own_gradient = oracle(torch.float32, logits, target, options)
        rounding = error(expected_gradient.to(dtype), expected_gradient) if dtype != torch.float32 else 0.0
        # The interpreter cuts bfloat16 off where a GPU rounds.
        rounding = torch.finfo(dtype).eps if rounding and INTERPRETED else 1.05 * rounding
        for name in ("loss", "lse", "entropy"):
            value, right = getattr(results, name), getattr(expected, name)
            assert value.dtype == torch.float32
            budget = 2 * error(getattr(own, name), right) + 8 * unit
            assert error(value, right) <= budget, f"{name}: {error(value, right)} > {budget}"
        budget = 2 * error(own_gradient, expected_gradient) + 12 * unit + rounding
        assert error(written, expected_gradient) <= budget, f"gradient: {error(written, expected_gradient)} > {budget}"
    if columns > 1:
        assert torch.equal(results.predictions, expected.predictions)
    # Without the gradient the logits stay, and the results are the same.
    untouched = logits.clone()
    again = kernel(untouched, target, **options, gradient=False)
    assert torch.equal(untouched, logits)
    for value, other in zip(again, results, strict=True):
        assert error(value, other) <= 4 * unit
    # What is not asked for has no elements.
    silent = kernel(logits.clone(), target, **options, predictions=False, entropy=False)
    assert silent.predictions.numel() == silent.entropy.numel() == 0
    assert error(silent.loss, results.loss) <= 4 * unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [130] if INTERPRETED else [130, 2500])
@pytest.mark.each_pair
def test_options(kernel: Kernel, columns: int, kind: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16 and kind != "everything":
        pytest.skip("the same for Triton as float32")
    options = make_options(kind, ROWS, columns, dtype, kernel.device)
    check(kernel, make_logits(ROWS, columns, dtype, kernel.device), make_target(ROWS, columns, kernel.device), options)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", ["everything"] if INTERPRETED else ["plain", "weighted-smoothing", "everything"])
def test_class_probabilities(kernel: Kernel, kind: str, dtype: torch.dtype) -> None:
    logits = make_logits(ROWS, 1100, dtype, kernel.device)
    target = torch.softmax(2 * torch.randn(ROWS, 1100, dtype=wide(dtype)), 1).to(kernel.device)
    check(kernel, logits, target, make_options(kind, ROWS, 1100, dtype, kernel.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("columns", SIZES + LARGE_SIZES)
def test_sizes(kernel: Kernel, columns: int, kind: str, dtype: torch.dtype) -> None:
    options = make_options(kind, ROWS, columns, dtype, kernel.device)
    check(kernel, make_logits(ROWS, columns, dtype, kernel.device), make_target(ROWS, columns, kernel.device), options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33] if INTERPRETED else [1, 33, 1000, 2049])
@pytest.mark.parametrize(
    ("offset", "gap"), [(3, 1)] if INTERPRETED else [(0, 0), (0, 64), (1, 0), (3, 1), (8, 7), (5, 3)]
)
def test_writes_nothing_outside_the_rows(
    kernel: Kernel, offset: int, gap: int, columns: int, dtype: torch.dtype
) -> None:
    """Any row stride, any alignment of a row's first element."""
    rows, stride = 5, columns + gap
    memory = torch.full((offset + rows * stride + 64,), 77.0, dtype=dtype)
    logits = memory.as_strided((rows, columns), (stride, 1), offset)
    logits.copy_(make_logits(rows, columns, dtype, "cpu"))
    dense, poisoned = logits.clone().to(kernel.device), memory.to(kernel.device)
    view = poisoned.as_strided((rows, columns), (stride, 1), offset)
    target = make_target(rows, columns, kernel.device)
    expected = kernel(
        dense, target, softcap=0.0, grad_loss=torch.full((1,), 0.5, dtype=wide(dtype), device=dense.device)
    )
    results = kernel(view, target, grad_loss=torch.full((rows,), 0.5, dtype=wide(dtype), device=dense.device))
    torch.testing.assert_close(view, dense, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6)
    torch.testing.assert_close(results.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(results.predictions, expected.predictions)
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided((rows, columns), (stride, 1), offset).fill_(True)
    assert bool((poisoned.cpu()[~inside] == 77).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [31] if INTERPRETED else [31, 1500])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_rows(kernel: Kernel, ignore_index: int, columns: int, dtype: torch.dtype) -> None:
    """Their gradient is written, and is 0 whatever the logits are; the argmax is theirs all the same."""
    logits = make_logits(4, columns, dtype, kernel.device)
    logits[1, 5] = math.nan
    best = logits[[0, 2]].argmax(1)
    target = torch.tensor([ignore_index, ignore_index, ignore_index, 7], device=kernel.device)
    grad = torch.full((4,), 3.0, dtype=wide(dtype), device=kernel.device)
    for predictions in (True, False):
        written = logits.clone()
        results = kernel(written, target, ignore_index=ignore_index, label_smoothing=0.1, z_loss=0.1, grad_loss=grad,
                         grad_lse=grad, grad_entropy=grad, predictions=predictions)  # fmt: skip
        for value in (results.loss, results.lse, results.entropy, written):
            assert not bool(value[:3].any())
            assert bool(value[3].any())
        if predictions:
            assert torch.equal(results.predictions[[0, 2]], best)


def test_spread_of_400(kernel: Kernel) -> None:
    logits = torch.linspace(-200, 200, 999).roll(100).repeat(3, 1).to(kernel.device)
    target = torch.tensor([99, 100, 600], device=kernel.device)  # the most likely, the least, between
    check(kernel, logits, target, {"label_smoothing": 0.1})
    check(kernel, logits, target, {"grad_entropy": torch.ones(1, device=kernel.device)})


@pytest.mark.parametrize("offset", [2.0**24, -(2.0**24)])
def test_common_offset(kernel: Kernel, offset: float) -> None:
    """Costs the loss, the entropy and the gradient nothing: the logits are whole numbers, exact in float32."""
    steps = 2.0 * torch.randint(-4, 5, (5, 1300)).float()
    target = torch.arange(5) * 200
    expected, gradient = oracle(torch.float64, steps, target, {"label_smoothing": 0.1})
    written = (steps + offset).to(kernel.device)
    results = kernel(written, target.to(kernel.device), label_smoothing=0.1)
    assert error(results.loss.cpu(), expected.loss) < 1e-6
    assert error(results.entropy.cpu(), expected.entropy) < 2e-6
    assert error(written.cpu(), gradient) < 2e-6


@pytest.mark.parametrize("columns", [2, 1000, 3000])
@pytest.mark.parametrize("softcap", [0.0, 100.0])
def test_certain_targets(kernel: Kernel, softcap: float, columns: int) -> None:
    """p_t = 1 within half a unit in the last place of float32, and yet neither the loss nor p_t - 1 is 0."""
    if kernel.is_reference:
        pytest.skip("the reference's loss is 0 below 6e-8")
    logits = torch.randn(3, columns)
    target = torch.tensor([0, columns // 2, columns - 1])
    logits[torch.arange(3), target] = torch.tensor([20.0, 40.0, 70.0])
    with torch.no_grad():
        z = logits.double() if not softcap else softcap * torch.tanh(logits.double() / softcap)
        others = z.scatter(1, target[:, None], -math.inf)
        rest = (others - z.gather(1, target[:, None])).exp().sum(1)
    written = logits.clone().to(kernel.device)
    results = kernel(written, target.to(kernel.device), softcap=softcap)
    # An exponent of 70 in float32 is good to 4e-6.
    torch.testing.assert_close(results.loss.cpu().double(), rest.log1p(), rtol=2e-5, atol=0)
    slope = 1 - (z / softcap) ** 2 if softcap else torch.ones_like(z)
    at_target = written.cpu().double().gather(1, target[:, None]) / slope.gather(1, target[:, None])
    torch.testing.assert_close(at_target[:, 0], -rest / (1 + rest), rtol=2e-5, atol=0)
    assert bool((results.predictions.cpu() == target).all())


def test_nan_and_inf(kernel: Kernel) -> None:
    """Loss and gradient are NaN, inf or finite where F.cross_entropy's are, in their own rows only."""
    inf, nan = math.inf, math.nan
    cases: list[tuple[float, Any, int]] = [
        (nan, 700, 3), (nan, 3, 3), (inf, 700, 3), (inf, 3, 3), (-inf, 700, 3), (-inf, 3, 3), (-inf, slice(None), 3),
        (-inf, slice(4, None), 3), (-inf, slice(0, 900), 1000),
    ]  # fmt: skip
    for special, at, target in cases:
        logits = torch.randn(3, 1200)
        logits[1, at] = special
        targets = torch.tensor([5, target, 1199])
        leaf = logits.clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
        (gradient,) = torch.autograd.grad(expected.sum(), leaf)
        written = logits.clone().to(kernel.device)
        results = kernel(written, targets.to(kernel.device))
        torch.testing.assert_close(results.loss.cpu(), expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(written.cpu(), gradient, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert torch.equal(results.predictions.cpu(), logits.argmax(1))
        if special == -inf and at != slice(None):  # log 0 counts nothing in the entropy
            assert bool(results.entropy.isfinite().all())


def test_no_rows(kernel: Kernel) -> None:
    logits = torch.empty(0, 12, device=kernel.device)
    results = kernel(logits, torch.empty(0, dtype=torch.int64, device=kernel.device))
    assert [value.shape for value in results] == [(0,)] * 4


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_target_out_of_range(kernel: Kernel, wrong: int) -> None:
    if kernel.device == "cuda":
        pytest.skip("test_target_out_of_range_on_cuda")
    logits = torch.randn(3, 40)
    before = logits.clone()
    with pytest.raises(IndexError, match=rf"target must be in \[0, 39\] or ignore_index \(-100\), got {wrong}"):
        kernel(logits, torch.tensor([1, 2, wrong]))
    assert torch.equal(logits, before)


@pytest.mark.skipif(not GPU or INTERPRETED, reason="there is no CUDA device")
@pytest.mark.parametrize("columns", [40, 30_000, 128_256])
def test_target_out_of_range_on_cuda(columns: int) -> None:
    """A device-side assertion, after which the process's CUDA is lost."""
    code = f"""
import torch, torch_dcs_ops
logits = torch.randn(300, {columns}, device="cuda")
target = torch.full((300,), 5, device="cuda")
target[77] = {columns}
try:
    torch.ops.dcs._cross_entropy_rows_(
        logits, target, None, None, None, None, None, -100, 0., 0., 1., 0., True, True, True
    )
    torch.cuda.synchronize()
except RuntimeError as error:
    print("caught", error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert "caught" in done.stdout, done.stderr[-2000:]
    assert "device-side assert" in done.stdout, done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [700, 33_000] + ([128_256] if GPU else []))
def test_bits_are_the_same_in_every_run(kernel: Kernel, columns: int, dtype: torch.dtype) -> None:
    """On a CPU, with any number of threads."""
    if INTERPRETED:
        pytest.skip("there is nothing to order in the interpreter")
    logits, target = make_logits(20, columns, dtype, kernel.device), make_target(20, columns, kernel.device)
    runs, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            written = logits.clone()
            runs.append([*kernel(written, target, label_smoothing=0.1), written])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.skipif(not GPU or INTERPRETED, reason="there is no CUDA device")
@pytest.mark.slow
def test_addresses_past_two_to_the_31(kernel: Kernel) -> None:
    if kernel.device == "cpu":
        pytest.skip("for CUDA")
    rows, columns = 2**31 // 32_000 + 10, 32_000
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[-1] = make_logits(1, columns, torch.bfloat16, "cuda")[0]
    last, target = logits[-1:].clone(), torch.full((rows,), 17, device="cuda")
    results = kernel(logits, target)
    expected = kernel(last, target[-1:])
    assert torch.equal(results.loss[-1:], expected.loss)
    assert torch.equal(logits[-1:], last)


def bad_calls() -> dict[str, tuple[Any, ...]]:
    logits, target = torch.randn(3, 8), torch.tensor([0, 1, 2])
    half = torch.randn(8, dtype=torch.float16)
    none = (None,) * 5
    return {
        "integers": (torch.ones(3, 8, dtype=torch.int64), target, *none),
        "one dimension": (torch.randn(8), target, *none),
        "no classes": (torch.randn(3, 0), target, *none),
        "overlapping rows": (torch.randn(8).expand(3, 8), target, *none),
        "columns apart": (torch.randn(8, 3).t(), target, *none),
        "columns apart, rows far": (torch.randn(6, 16)[::2, ::2], target, *none),
        "int32 target": (logits, target.int(), *none),
        "short target": (logits, target[:2], *none),
        "half-precision probabilities": (logits, logits.half(), *none),
        "narrow probabilities": (logits, logits[:, :4], *none),
        "half-precision bias": (logits, target, half, None, None, None, None),
        "long weight": (logits, target, None, torch.ones(9), None, None, None),
        "double grad_loss": (logits, target, None, None, torch.ones(3, dtype=torch.float64), None, None),
        "long grad_lse": (logits, target, None, None, None, torch.ones(4), None),
        "square grad_entropy": (logits, target, None, None, None, None, torch.ones(1, 1)),
    }


@pytest.mark.skipif(INTERPRETED, reason="the launcher's arguments are validated already")
@pytest.mark.parametrize("name", bad_calls())
def test_sentences(name: str) -> None:
    """The compiled op says what the fake and the reference say."""
    tensors = bad_calls()[name]
    with pytest.raises(RuntimeError) as expected:
        check_rows(RowsCall(*tensors))
    with pytest.raises(RuntimeError) as raised:
        OP(*tensors, -100, 0.0, 0.0, 1.0, 0.0, True, True, True)
    assert str(expected.value) in str(raised.value)


@pytest.mark.skipif(INTERPRETED, reason="of the op")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    logits, target = make_logits(5, 40, dtype, device), make_target(5, 40, device)
    arguments = (logits, target, None, None, None, None, None, -100, 0.1, 0.0, 1.0, 0.0)
    for flags in ((True, True, True), (False, False, False)):
        torch.library.opcheck(OP, (*arguments, *flags), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
def test_triton_kernel_compiles_for_sm_90() -> None:
    """With all options on and in float64."""
    pytest.importorskip("triton")
    sys.path.insert(0, str(Path(__file__).parents[3]))
    try:
        kernel = importlib.import_module("triton_kernels.linear_cross_entropy.rows").cross_entropy_rows
    finally:
        sys.path.pop(0)
    constants = constants_behind_acc(kernel, BLOCK=1024, BY_CLASS=False)
    kinds = {"target_ptr": "*i64", "predictions_ptr": "*i64", "ignore_index": "i64"}
    assert compiled_for_sm_90(kernel, constants, kinds).asm["ptx"]
