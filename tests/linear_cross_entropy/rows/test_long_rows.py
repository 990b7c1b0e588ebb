"""`dcs::_cross_entropy_rows_` on long rows without label smoothing or a bias: a GPU has a kernel for them.

Its blocks stay and take one row after another; with few rows several blocks share one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_cross_entropy.rows.oracle import (
    GPU,
    INTERPRETED,
    KERNELS,
    Kernel,
    error,
    make_kernel,
    make_logits,
    make_options,
    make_target,
    oracle,
    wide,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="blocks of rows are the same for Triton as in short ones")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of 24 KiB on, 8 without a gradient. Past 112 KiB a block is alone on an H200's multiprocessor, past 252 a row has
# two of them, past 504 four.
SHAPES = [(5, 12_288), (5, 13_001)]
if GPU:
    SHAPES += [
        (300, 4100),
        (300, 12_287),
        (600, 20_001),
        (3, 50_257),
        (280, 70_003),
        (150, 128_256),
        (140, 256_001),
        (67, 300_007),
    ]
KINDS = ("plain", "weight", "softcap", "scale", "z-loss", "grad-loss", "one-grad-loss", "grad-lse")
ENTROPIC_KINDS = ("plain", "weight", "scale", "z-loss", "grad-lse", "grad-entropy")


@pytest.fixture(params=[name for name in KERNELS if name.startswith("op")])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return make_kernel(str(request.param))


def without_targets(gradient: Tensor, target: Tensor) -> Tensor:
    """Beside p_t - 1 all others are small."""
    return gradient.double().scatter(1, target.clamp(min=0)[:, None], 0)


def check(kernel: Kernel, logits: Tensor, target: Tensor, options: dict[str, Any], *, entropy: bool = False) -> None:
    """As in test_cross_entropy_rows, and the gradient beside the targets too."""
    dtype, unit = logits.dtype, torch.finfo(wide(logits.dtype)).eps
    expected, expected_gradient = oracle(torch.float64, logits, target, options)
    own, own_gradient = oracle(wide(dtype), logits, target, options)
    predictions = not options.get("softcap")
    written = logits.clone()
    results = kernel(written, target, **options, predictions=predictions, entropy=entropy)
    for name in ("loss", "lse", *(["entropy"] if entropy else [])):
        value, right = getattr(results, name), getattr(expected, name)
        assert value.dtype == wide(dtype)
        budget = 2 * error(getattr(own, name), right) + 8 * unit
        assert error(value, right) <= budget, f"{name}: {error(value, right)} > {budget}"
    for part in (lambda gradient: gradient, lambda gradient: without_targets(gradient, target)):
        right = part(expected_gradient)
        rounding = 1.05 * error(part(expected_gradient.to(dtype)), right) if dtype != wide(dtype) else 0.0
        budget = 2 * error(part(own_gradient), right) + 12 * unit + rounding
        assert error(part(written), right) <= budget, f"gradient: {error(part(written), right)} > {budget}"
    if predictions:
        assert torch.equal(results.predictions, expected.predictions)
    untouched = logits.clone()
    again = kernel(untouched, target, **options, gradient=False, predictions=predictions, entropy=entropy)
    assert torch.equal(untouched, logits)
    for value, other in zip(again, results, strict=True):
        assert error(value, other) <= 4 * unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_shapes(kernel: Kernel, rows: int, columns: int, kind: str, dtype: torch.dtype) -> None:
    if kernel.device == "cpu" and rows > 5:
        pytest.skip("for CUDA")
    options = make_options(kind, rows, columns, dtype, kernel.device)
    check(kernel, make_logits(rows, columns, dtype, kernel.device), make_target(rows, columns, kernel.device), options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ENTROPIC_KINDS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_entropies(kernel: Kernel, rows: int, columns: int, kind: str, dtype: torch.dtype) -> None:
    """Asked for and not, with a gradient of their own and without."""
    if kernel.device == "cpu" and rows > 5:
        pytest.skip("for CUDA")
    options = make_options(kind, rows, columns, dtype, kernel.device)
    target = make_target(rows, columns, kernel.device)
    for entropy in (True, False):
        check(kernel, make_logits(rows, columns, dtype, kernel.device), target, options, entropy=entropy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropies_of_certain_and_masked_rows(kernel: Kernel, dtype: torch.dtype) -> None:
    """0 where one class has all; classes of -inf add nothing, though only one is left."""
    columns = 13_000
    logits = torch.full((4, columns), -math.inf)
    logits[:, 7], logits[2, 900], logits[3] = 3.0, 3.0, 0.0
    target = torch.tensor([7, -100, 900, 12_000])
    written = logits.to(dtype, copy=True).to(kernel.device)
    grad = torch.ones(4, device=kernel.device)
    results = kernel(written, target.to(kernel.device), grad_entropy=grad, predictions=False)
    wanted = torch.tensor([0.0, 0.0, math.log(2), math.log(columns)], device=kernel.device)
    torch.testing.assert_close(results.entropy, wanted, rtol=1e-5, atol=1e-6)
    # Of a uniform distribution the entropy has no gradient.
    expected = (torch.softmax(logits, 1) - torch.nn.functional.one_hot(target.clamp(0), columns)).to(kernel.device)
    expected[1] = 0
    torch.testing.assert_close(written.float(), expected.float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [30.0, 64.0])
def test_softcaps(kernel: Kernel, softcap: float, dtype: torch.dtype) -> None:
    """bfloat16 keeps tanh as 16 bits between its passes for the first of them."""
    logits = 10 * make_logits(7, 20_000, dtype, kernel.device)
    check(kernel, logits, make_target(7, 20_000, kernel.device), {"softcap": softcap, "logit_scale": 0.7})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "gap"), [(0, 64), (1, 0), (3, 1), (8, 7), (5, 3)])
def test_any_alignment(kernel: Kernel, offset: int, gap: int, dtype: torch.dtype) -> None:
    """Targets at both ends of a row; nothing outside the rows is written."""
    rows, columns = (300 if kernel.device == "cuda" else 5), 13_001
    stride = columns + gap
    memory = torch.full((offset + rows * stride + 64,), 77.0, dtype=dtype, device=kernel.device)
    view = memory.as_strided((rows, columns), (stride, 1), offset)
    view.copy_(make_logits(rows, columns, dtype, "cpu"))
    target = make_target(rows, columns, kernel.device)
    target[: rows // 3] = torch.arange(rows // 3, device=target.device) % 9
    target[-(rows // 3) :] = columns - 1 - torch.arange(rows // 3, device=target.device) % 9
    dense = view.clone(memory_format=torch.contiguous_format)
    for softcap in (0.0, 10.0):
        view.copy_(dense)
        expected, gradient = oracle(torch.float64, dense, target, {"softcap": softcap})
        results = kernel(view, target, softcap=softcap, predictions=not softcap, entropy=False)
        torch.testing.assert_close(results.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
        if not softcap:
            assert torch.equal(results.predictions, expected.predictions)
        rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
        assert error(without_targets(view, target), without_targets(gradient, target)) <= rounding
        torch.testing.assert_close(view.double(), gradient, rtol=4 * rounding, atol=1e-6)
    inside = torch.zeros(memory.shape, dtype=torch.bool, device=memory.device)
    inside.as_strided((rows, columns), (stride, 1), offset).fill_(True)
    assert bool((memory[~inside] == 77).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("predictions", [True, False])
def test_ignored_rows(kernel: Kernel, predictions: bool, dtype: torch.dtype) -> None:
    """One after another, at the end too; NaN in them goes nowhere."""
    rows, columns = (400 if kernel.device == "cuda" else 6), 12_800
    logits, target = make_logits(rows, columns, dtype, kernel.device), make_target(rows, columns, kernel.device)
    target[rows // 3 :: 2] = -100
    target[-2:] = -100
    logits[-1, 7] = math.nan
    best = logits[:-1].argmax(1)
    ignored = target == -100
    _, gradient = oracle(torch.float64, logits[~ignored], target[~ignored], {})
    results = kernel(logits, target, predictions=predictions, entropy=False)
    assert not bool(results.loss[ignored].any() or results.lse[ignored].any() or logits[ignored].any())
    assert error(logits[~ignored], gradient) <= 4 * torch.finfo(dtype).eps
    if predictions:
        assert torch.equal(results.predictions[:-1], best)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero(kernel: Kernel, sign: int, dtype: torch.dtype) -> None:
    """A common offset costs the loss and the gradient nothing, as long as the logits themselves have digits for it."""
    columns = 13_000
    if dtype == torch.float32:
        logits = 2.0 * torch.randint(-4, 5, (5, columns)).float() + sign * 2.0**24
    else:
        # The largest several times, the next ones far below.
        most = 6e4 if dtype == torch.float16 else 3e37
        logits = torch.full((5, columns), most if sign > 0 else -most / 2)
        logits[:, 5::7] *= 0.5 if sign > 0 else 2.0
    logits = logits.to(dtype)
    target = torch.arange(5) * 2600 + 3
    options = {"logit_scale": 100.0} if dtype == torch.float16 else {}
    expected, gradient = oracle(torch.float64, logits, target, options)
    written = logits.clone().to(kernel.device)
    results = kernel(written, target.to(kernel.device), **options, entropy=False)
    assert error(results.loss.cpu(), expected.loss) < 1e-6
    assert torch.equal(results.predictions.cpu(), expected.predictions)
    assert error(written.cpu(), gradient) < 2e-6 + torch.finfo(dtype).eps * (dtype != torch.float32)
    again = kernel(logits.clone().to(kernel.device), target.to(kernel.device), **options, entropy=False, gradient=False)
    assert error(again.loss.cpu(), expected.loss) < 1e-6


def test_certain_targets(kernel: Kernel) -> None:
    """p_t = 1 within half a unit in the last place of float32, and yet neither the loss nor p_t - 1 is 0."""
    if kernel.is_reference:
        pytest.skip("the reference's loss is 0 below 6e-8")
    columns = 13_000
    logits, target = torch.randn(3, columns), torch.tensor([0, columns // 2, columns - 1])
    logits[torch.arange(3), target] = torch.tensor([20.0, 40.0, 70.0])
    for dtype in (torch.float32, torch.bfloat16):
        rounded = logits.to(dtype)
        z = rounded.double().scatter(1, target[:, None], -math.inf)
        rest = (z - rounded.double().gather(1, target[:, None])).exp().sum(1)
        written = rounded.clone().to(kernel.device)
        results = kernel(written, target.to(kernel.device), entropy=False)
        torch.testing.assert_close(results.loss.cpu().double(), rest.log1p(), rtol=2e-5, atol=0)
        at_target = written.cpu().double().gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(at_target, -rest / (1 + rest), rtol=2e-5 if dtype == torch.float32 else 4e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf(kernel: Kernel, dtype: torch.dtype) -> None:
    """Loss and gradient are NaN, inf or finite where F.cross_entropy's are, in their own rows only."""
    inf, nan = math.inf, math.nan
    cases: list[tuple[float, Any, int]] = [
        (nan, 700, 3), (nan, 3, 3), (inf, 700, 3), (inf, 3, 3), (-inf, 700, 3), (-inf, 3, 3), (-inf, slice(None), 3),
        (-inf, slice(4, None), 3), (-inf, slice(0, 12_900), 13_000),
    ]  # fmt: skip
    for special, at, target in cases:
        logits = torch.randn(3, 13_003).to(dtype)
        logits[1, at] = special
        targets = torch.tensor([5, target, 13_002])
        leaf = logits.float().clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
        (gradient,) = torch.autograd.grad(expected.sum(), leaf)
        for wants_gradient in (True, False):
            written = logits.clone().to(kernel.device)
            results = kernel(written, targets.to(kernel.device), entropy=False, gradient=wants_gradient)
            entropic = kernel(logits.clone().to(kernel.device), targets.to(kernel.device), gradient=wants_gradient)
            torch.testing.assert_close(entropic.loss, results.loss, rtol=1e-5, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(results.loss.cpu(), expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
            assert torch.equal(results.predictions.cpu(), logits.argmax(1))
            if wants_gradient:
                tolerance = 1e-4 if dtype == torch.float32 else 1e-2
                torch.testing.assert_close(written.cpu().float(), gradient, rtol=tolerance, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33_000] + ([128_256, 256_000] if GPU else []))
def test_bits_are_the_same_in_every_run(kernel: Kernel, columns: int, dtype: torch.dtype) -> None:
    rows = 300 if kernel.device == "cuda" else 4
    logits, target = make_logits(rows, columns, dtype, kernel.device), make_target(rows, columns, kernel.device)
    runs = []
    for _ in range(3):
        written = logits.clone()
        results = kernel(written, target, entropy=False)
        again = logits.clone()
        entropic = kernel(again, target, grad_entropy=torch.ones_like(results.loss))
        runs.append([results.loss, results.lse, results.predictions, written, again, *entropic])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
