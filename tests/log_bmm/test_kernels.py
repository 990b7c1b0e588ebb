"""`dcs::_log_bmm`, its gradients, `_max_bmm` and `_sample_bmm` against float64: the ops on every device that there is
(C++ on the CPU, CUDA C++ on a GPU), the references, and the Triton launchers: on a GPU for real, without one in
Triton's interpreter, which one test starts in a process of its own.
"""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the libraries)
from torch_dcs_ops import _native
from torch_dcs_ops.reference import log_bmm as reference

from log_bmm.kernels import GPU, HAS_LAUNCHERS, INTERPRETED, KERNELS, SIZE, SPECIAL, Kernel, check, plant
from log_bmm.oracle import (
    DATA,
    DTYPES,
    INF,
    LAYOUTS,
    exact,
    forward_budget,
    forward_error,
    gradient_budget,
    gradient_error,
    naive,
    product,
    spread,
    sum_dtype,
)
from support.subprocesses import run_in_the_interpreter, run_with_instruction_set
from support.triton_modules import triton_module

LARGE = [] if INTERPRETED else [256 if GPU else 128]
# The tiles' edges, K below what a product of exponentials pays for, vectors, a whole of several slices of k.
SHAPES = [(1, 1, 1), (3, 1, 1), (1, 7, 1), (1, 1, 9), (2, 3, 5), (13, 16, 33), (49, 70, 65)]
SHAPES += [] if INTERPRETED else [(1, 130, 257), (129, 200, 1), (50, 500, 40)]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    name = str(request.param)
    module: ModuleType = reference
    if name.startswith("triton"):
        module = triton_module("log_bmm.launch")
    return Kernel(name, module)


# Two minutes; test_triton.py runs the launchers in the interpreter every time.
@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="the Triton kernels run in this process")
@pytest.mark.skipif(not HAS_LAUNCHERS, reason="there is no triton, or no Triton kernel of log_bmm")
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__, "-k", "triton-cpu")


@pytest.mark.skipif(INTERPRETED or not _native.CPU_LIBRARY.loaded, reason="there are no compiled kernels")
@pytest.mark.parametrize("isa", ["default", "avx2"])
@pytest.mark.slow
def test_lesser_instruction_sets(isa: str) -> None:
    chosen = "op-cpu and (products or largest or (samples and N) or (shapes and dtype2) or (data_sets and 64- and N))"
    run_with_instruction_set(isa, __file__, "-k", chosen)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("size", [SIZE, *LARGE])
def test_data_sets(kernel: Kernel, size: int, name: str) -> None:
    if kernel.kind == "reference" and size > 64:
        pytest.skip("the reference forms every term: the smaller size is enough")
    check(kernel, *DATA[name](1 if size > 64 else 2, size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(kernel: Kernel, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds")
    if kernel.kind == "reference" and max(shape) > 200 and dtype != torch.float32:
        pytest.skip("the reference forms every term, in float32 or float64")
    rows, depth, columns = shape
    check(kernel, torch.randn(2, rows, depth).to(dtype), torch.randn(2, depth, columns).to(dtype))


@pytest.mark.parametrize("name", ["N(0, 50^2)", "antipodal", "masked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_of_wide_data(kernel: Kernel, dtype: torch.dtype, name: str) -> None:
    a, b = DATA[name](1, SIZE)
    check(kernel, a.to(dtype), b.to(dtype))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_layouts(kernel: Kernel, first: str, second: str) -> None:
    """Gradients of any strides too."""
    a, b = DATA["N(0, 50^2)"](3, 11)
    a, b = kernel.on(a[:, :7], b)
    a, b = LAYOUTS[first](a), LAYOUTS[second](b)
    dense = a.contiguous(), b.contiguous()
    out, log_s = kernel.forward(a, b, "highest")
    for value, other in zip((out, log_s), kernel.forward(*dense, "highest"), strict=True):
        torch.testing.assert_close(value, other, rtol=2e-6, atol=2e-6)
    (grad,) = kernel.on(torch.randn(3, 7, 11))
    for change in LAYOUTS.values():
        view = change(grad)
        got = kernel.backward(view, a, b, log_s, "highest", True, True)
        for gradient, other in zip(
            got, kernel.backward(view.contiguous(), *dense, log_s, "highest", True, True), strict=True
        ):
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)
    values, indices = kernel.largest(a, b)
    assert torch.equal(values, kernel.largest(*dense)[0])
    assert torch.equal(indices, kernel.largest(*dense)[1])
    (uniforms,) = kernel.on(torch.rand(3, 7, 11))
    assert torch.equal(kernel.sample(a, b, LAYOUTS[first](uniforms)), kernel.sample(*dense, LAYOUTS[first](uniforms)))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 4, 0), (2, 3, 0, 4), (0, 0, 0, 0)], ids=str)
def test_empty(kernel: Kernel, shape: tuple[int, int, int, int]) -> None:
    batch, rows, depth, columns = shape
    a, b = kernel.on(torch.randn(batch, rows, depth), torch.randn(batch, depth, columns))
    out, log_s = kernel.forward(a, b, "highest")
    assert torch.equal(out.cpu(), torch.full((batch, rows, columns), -INF))
    assert torch.equal(log_s.cpu(), out.cpu())
    gradients = kernel.backward(torch.ones_like(out), a, b, log_s, "highest", True, True)
    assert torch.equal(gradients[0], torch.zeros_like(a))
    assert torch.equal(gradients[1], torch.zeros_like(b))
    samples = kernel.sample(a, b, torch.rand_like(out))
    assert torch.equal(samples.cpu(), torch.full((batch, rows, columns), -1))
    if depth:
        assert kernel.largest(a, b)[1].shape == out.shape


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("where", ["a", "b", "both"])
@pytest.mark.parametrize("mask", [False, True])
def test_infinity_and_nan(kernel: Kernel, mask: bool, where: str, name: str) -> None:
    """As torch.logsumexp has them; the gradients of other rows and columns as if they were not there."""
    a, b = torch.randn(2, 6, 9), torch.randn(2, 9, 8)
    if mask:
        a[0, 2, ::2] = b[0, 1::2, 3] = a[0, 5] = b[0, :, 5] = -INF
    plant(a, b, where, name)
    on_device = kernel.on(a, b)
    out, log_s = kernel.forward(*on_device, "highest")
    assert forward_error(out, exact(a, b).out) <= forward_budget(torch.float32)
    (grad,) = kernel.on(torch.randn(2, 6, 8))
    grad_a, grad_b = kernel.backward(grad, *on_device, log_s, "highest", True, True)
    # Without the row and the column that are special; a gradient's sum over one of them may be NaN.
    plain_a, plain_b, plain_grad = a.clone(), b.clone(), grad.cpu().clone()
    plain_a[0, 1] = plain_b[0, :, 4] = -INF
    weights = exact(plain_a, plain_b).weights
    right_a, right_b = product(weights, None, plain_grad, None, 2), product(weights, None, plain_grad, None, 0)
    assert gradient_error(grad_a[1], right_a[1]) <= 1e-6
    assert gradient_error(grad_b[1], right_b[1]) <= 1e-6
    rows, columns = [0, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6, 7]
    if where == "a":
        assert gradient_error(grad_a[0, rows], product(exact(plain_a, b).weights, None, grad, None, 2)[0, rows]) <= 1e-6
    if where == "b":
        right = product(exact(a, plain_b).weights, None, grad, None, 0)[0][:, columns]
        assert gradient_error(grad_b[0][:, columns], right) <= 1e-6


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("where", ["a", "b", "both"])
@pytest.mark.parametrize("shape", [(6, 9, 8), (SIZE, SIZE, SIZE)], ids=str)
def test_gradients_beside_infinity_and_nan(kernel: Kernel, shape: tuple[int, int, int], where: str, name: str) -> None:
    """Those of torch.logsumexp: beside a +inf finite numbers weigh 0, its own k is NaN; beside a NaN all are."""
    if kernel.kind == "triton":
        pytest.skip("the Triton kernels' gradients beside a +inf are NaN too")
    rows, depth, columns = shape
    a, b, grad = torch.randn(2, rows, depth), torch.randn(2, depth, columns), torch.randn(2, rows, columns)
    plant(a, b, where, name)
    leaves = [x.double().requires_grad_() for x in (a, b)]
    right = torch.autograd.grad(naive(*leaves), leaves, grad.double())
    assert all(0 < int(r.isnan().sum()) < r.numel() for r in right)
    on_device = kernel.on(a, b)
    _, log_s = kernel.forward(*on_device, "highest")
    for gradient, r in zip(
        kernel.backward(*kernel.on(grad), *on_device, log_s, "highest", True, True), right, strict=True
    ):
        assert torch.equal(gradient.cpu().isnan(), r.isnan())
        assert gradient_error(gradient.nan_to_num(0), r.nan_to_num(0)) <= 1e-6


def test_masked_outputs_ignore_their_gradient(kernel: Kernel) -> None:
    a, b = torch.randn(1, 5, 6), torch.randn(1, 6, 7)
    a[0, 1] = b[0, :, 2] = -INF
    a, b = kernel.on(a, b)
    _, log_s = kernel.forward(a, b, "highest")
    (grad,) = kernel.on(torch.randn(1, 5, 7))
    expected = kernel.backward(grad, a, b, log_s, "highest", True, True)
    grad[0, 1], grad[0, :, 2] = torch.nan, INF
    for gradient, right in zip(kernel.backward(grad, a, b, log_s, "highest", True, True), expected, strict=True):
        assert not gradient.isnan().any()
        torch.testing.assert_close(gradient, right)
    assert not expected[0][0, 1].any()
    assert not expected[1][0, :, 2].any()


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_large_and_small_gradients(kernel: Kernel, scale: float) -> None:
    """Sums of 1 / S overflow where the gradient alone does not."""
    a, b = (torch.randn(1, 30, 30) * 10 for _ in range(2))
    a, b = kernel.on(a, b)
    _, log_s = kernel.forward(a, b, "highest")
    assert float(log_s.min()) < -15
    (grad,) = kernel.on(torch.randn(1, 30, 30))
    weights = exact(a, b).weights
    for gradient, over in zip(kernel.backward(grad * scale, a, b, log_s, "highest", True, True), (2, 0), strict=True):
        right = product(weights, None, grad.double() * scale, None, over)
        assert gradient_error(gradient, right) <= gradient_budget(torch.float32, spread(a, b))


def test_log_s_has_no_rounding_of_the_result(kernel: Kernel) -> None:
    """At the end of a long chain: out's rounding of 1e-3 would be the relative error of every gradient."""
    a, b = torch.randn(1, SIZE, SIZE) + 8192, torch.randn(1, SIZE, SIZE) + 8192
    a[0] += 100 * torch.arange(SIZE)[:, None]
    check(kernel, a, b, width=10)


def test_numbers_near_the_largest(kernel: Kernel) -> None:
    """No NaN from differences that overflow."""
    a, b = torch.randn(1, 8, 8), torch.randn(1, 8, 8)
    a[0, 0, 0], a[0, 0, 1], a[0, 1, 3], b[0, 0, 0], b[0, 1, 0], b[0, 2, 5] = 3e38, -3e38, -3e38, -3e38, 3e38, 2e38
    a, b = kernel.on(a, b)
    out, log_s = kernel.forward(a, b, "highest")
    assert forward_error(out, exact(a, b).out) <= 1e-5
    for gradient in kernel.backward(torch.ones_like(out), a, b, log_s, "highest", True, True):
        assert not gradient.isnan().any()


def test_the_same_bits(kernel: Kernel) -> None:
    a, b = kernel.on(*DATA["N(0, 30^2)"](2, SIZE))
    (grad,) = kernel.on(torch.randn(2, SIZE, SIZE))

    def run() -> list[Tensor]:
        out, log_s = kernel.forward(a, b, "highest")
        return [out, log_s, *kernel.backward(grad, a, b, log_s, "highest", True, True)]

    first = run()
    for _ in range(3):
        assert all(map(torch.equal, run(), first))
    if kernel.kind == "op" and kernel.device == "cpu" and not kernel.is_reference:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert all(map(torch.equal, run(), first))
        finally:
            torch.set_num_threads(threads)


PRODUCTS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize("name", ["N(0, 1)", "N(0, 50^2)", "masked"])
@pytest.mark.parametrize("over", [0, 1, 2])
def test_products(kernel: Kernel, over: int, name: str) -> None:
    if kernel.kind == "triton":
        pytest.skip("there is no Triton kernel of the products")
    a, b = DATA[name](2, 30)
    a, b = a[:, :, :25], b[:, :25, :23]
    expected = exact(a, b)
    a, b = kernel.on(a, b)
    _, log_s = kernel.forward(a, b, "highest")
    operands = kernel.on(torch.randn(2, 30, 25), torch.randn(2, 30, 23), torch.randn(2, 25, 23))
    for given in PRODUCTS:
        factors = [operand if use else None for operand, use in zip(operands, given, strict=True)]
        result = kernel.product(a, b, log_s, *factors, over)
        right = product(expected.weights, *factors, over)
        # A sum of numbers of both signs: relative to the sum of their magnitudes.
        scale = (
            product(expected.weights, *[None if f is None else f.abs() for f in factors], over).max()
            / right.abs().max()
        )
        assert gradient_error(result, right) <= gradient_budget(torch.float32, spread(a, b)) * max(float(scale), 1.0)
    views = [operand.transpose(1, 2).contiguous().transpose(1, 2) for operand in operands]
    again = kernel.product(LAYOUTS["strided"](a), LAYOUTS["transposed"](b), LAYOUTS["transposed"](log_s), *views, over)
    torch.testing.assert_close(again, kernel.product(a, b, log_s, *operands, over), rtol=1e-5, atol=1e-5)


# Few long sums, which make a warp each, and tiles of which each takes a part of k, or all.
SELECTED = [(2, *shape) for shape in SHAPES]
SELECTED += [] if INTERPRETED else [(1, 1, 5000, 1), (3, 1, 300, 50), (2, 20, 700, 40), (140, 33, 20, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SELECTED, ids=str)
def test_largest(kernel: Kernel, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Integers: sums are equal in many places, and the first counts."""
    batch, rows, depth, columns = shape
    a = torch.randint(-3, 4, (batch, rows, depth)).to(dtype)
    b = torch.randint(-3, 4, (batch, depth, columns)).to(dtype)
    a[torch.rand(a.shape) < 0.2] = -INF
    terms = a.double().unsqueeze(-1) + b.double().unsqueeze(-3)
    values, indices = (result.cpu() for result in kernel.largest(*kernel.on(a, b)))
    right = terms.amax(2)
    assert values.dtype == dtype
    assert torch.equal(values.double(), right)
    first = (terms == right.unsqueeze(2)).to(torch.uint8).argmax(2)
    assert torch.equal(indices, first)


def test_largest_of_nan_and_infinity(kernel: Kernel) -> None:
    a, b = torch.randn(1, 4, 6), torch.randn(1, 6, 5)
    a[0, 0, 3] = a[0, 0, 5] = torch.nan
    a[0, 1] = -INF
    a[0, 2, 2], b[0, 4, 1] = INF, torch.nan
    b[0, 2, 3] = -INF
    values, indices = (result.cpu() for result in kernel.largest(*kernel.on(a, b)))
    right = (a.unsqueeze(-1) + b.unsqueeze(-3)).max(2)
    torch.testing.assert_close(values, right.values, equal_nan=True, rtol=0, atol=0)
    assert indices[0, 0].tolist() == [3, 3, 3, 3, 3]
    assert indices[0, 1].tolist() == [0, 4, 0, 0, 0]
    assert indices[0, 2].tolist() == [2, 4, 2, 2, 2]


def check_samples(kernel: Kernel, a: Tensor, b: Tensor, uniforms: Tensor) -> None:
    """Of float64's cumulative sums around the sample, one is below the uniform number and the other is not."""
    dtype = a.dtype
    samples = kernel.sample(*kernel.on(a, b, uniforms)).cpu()
    assert samples.dtype == torch.int64
    # The terms as the sums' dtype has them: a wide term's rounding is no error of the sampling.
    wide = a.to(sum_dtype(dtype)).unsqueeze(-1) + b.to(sum_dtype(dtype)).unsqueeze(-3)
    possible = wide.amax(2) > -INF
    assert torch.equal(samples >= 0, possible)
    assert bool((samples[~possible] == -1).all())
    weights = wide.double().softmax(2).nan_to_num(0.0)
    sums = weights.cumsum(2)
    index = samples.clamp(min=0).unsqueeze(2)
    # By its distance, not its weight: a library linked with -ffast-math has the CPU take subnormal numbers as 0.
    below = (wide.amax(2, keepdim=True) - wide).gather(2, index).squeeze(2)
    assert bool((below < 746)[possible].all())
    after = sums.gather(2, index).squeeze(2)
    before = after - weights.gather(2, index).squeeze(2)
    slack = max(a.size(2), 64) * torch.finfo(sum_dtype(dtype)).eps
    assert bool((after[possible] >= uniforms.double()[possible] - slack).all())
    assert bool((before[possible] <= uniforms.double()[possible] + slack).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["N(0, 1)", "N(0, 10^2)", "U(+-1e4)", "masked"])
def test_samples(kernel: Kernel, name: str, dtype: torch.dtype) -> None:
    a, b = (x.to(dtype) for x in DATA[name](2, SIZE))
    uniforms = torch.rand(2, SIZE, SIZE, dtype=sum_dtype(dtype))
    uniforms[0, 0], uniforms[0, 2] = 0, 1 - torch.finfo(uniforms.dtype).eps / 2
    check_samples(kernel, a, b, uniforms)


@pytest.mark.skipif(INTERPRETED, reason="the Triton kernels make no difference of them")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 30, 50])
@pytest.mark.parametrize("shape", SELECTED[-4:], ids=str)
@pytest.mark.each_pair
def test_samples_of_any_shape(kernel: Kernel, shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    batch, rows, depth, columns = shape
    a, b = (scale * torch.randn(batch, *sides) for sides in ((rows, depth), (depth, columns)))
    b[torch.rand(b.shape) < 0.2] = -INF
    a[0, 0] = -INF
    uniforms = torch.rand(batch, rows, columns, dtype=sum_dtype(dtype))
    check_samples(kernel, a.to(dtype), b.to(dtype), uniforms)


def test_samples_of_nan_and_infinity(kernel: Kernel) -> None:
    a, b = torch.randn(1, 4, 6), torch.zeros(1, 6, 3)
    a[0, 0, 3], a[0, 1, 2], a[0, 1, 4] = torch.nan, INF, torch.nan
    a[0, 2] = -INF
    a[0, 2, 5] = torch.nan
    b[0, 3, 2] = -INF
    samples = kernel.sample(*kernel.on(a, b, torch.rand(1, 4, 3))).cpu()
    assert samples[0, 0].tolist() == [3, 3, 3]
    assert samples[0, 1].tolist() == [2, 2, 2]
    assert samples[0, 2].tolist() == [5, 5, 5]
    assert bool((samples[0, 3] >= 0).all())


def test_samples_follow_the_probabilities(kernel: Kernel) -> None:
    """Pearson's statistic over 20000 draws of each of 4 distributions over 10, against its 1e-6 quantile."""
    draws = 500 if INTERPRETED else 20_000
    logits = torch.randn(4, 10)
    logits[:, 3] = -INF
    a = torch.zeros(1, draws, 10)
    b = logits.T.unsqueeze(0).contiguous()
    samples = kernel.sample(*kernel.on(a, b, torch.rand(1, draws, 4))).cpu()[0]
    for column in range(4):
        counts = torch.bincount(samples[:, column], minlength=10).double()
        expected = draws * logits[column].double().softmax(0)
        assert counts[3] == 0
        keep = expected > 0
        statistic = float(((counts - expected)[keep] ** 2 / expected[keep]).sum())
        # Chi-square of 8 degrees of freedom exceeds 42.7 with probability 1e-6.
        assert statistic < 42.7
