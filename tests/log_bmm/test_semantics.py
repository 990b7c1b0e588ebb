"""log_bmm as users call it: shapes as torch.matmul's, dtypes, autocast, FLOPs, every error message, random cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_dcs_ops import log_bmm, max_bmm, sample_bmm

from log_bmm.oracle import INF, exact, forward_error, gradient_budget, gradient_error, naive, product, spread

OPS: dict[str, Any] = {"log_bmm": log_bmm, "max_bmm": max_bmm, "sample_bmm": sample_bmm}
SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((6, 5, 2, 3), (6, 1, 3, 4)),
    ((6, 5, 2, 3), (3, 4)),
    ((2, 1, 1), (1, 1)),
    ((0, 2, 3), (3, 4)),
    ((5, 2, 0), (0, 4)),
    ((2, 0), (0,)),
    ((0,), (0,)),
    ((3, 0, 2), (2, 2)),
]


def definition(a: Tensor, b: Tensor) -> Tensor:
    """naive() with 1-D operands as torch.matmul takes them."""
    out = naive(a if a.dim() > 1 else a[None], b if b.dim() > 1 else b[:, None])
    out = out if b.dim() > 1 else out.squeeze(-1)
    return out if a.dim() > 1 else out.squeeze(-1 if b.dim() == 1 else -2)


@pytest.mark.parametrize(("first", "second"), SHAPES, ids=str)
def test_shapes(device: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a = torch.randn(first, device=device, dtype=torch.float64, requires_grad=True)
    b = torch.randn(second, device=device, dtype=torch.float64, requires_grad=True)
    out = log_bmm(a, b)
    assert out.shape == torch.matmul(a, b).shape
    assert out.is_contiguous()
    torch.testing.assert_close(out, definition(a, b))
    torch.testing.assert_close(torch.ops.dcs.log_bmm(a.detach(), b.detach()), out.detach())
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (a, b), grad)
    torch.testing.assert_close(got, torch.autograd.grad(definition(a, b), (a, b), grad))
    assert sample_bmm(a, b).shape == out.shape
    if first[-1]:
        values, indices = max_bmm(a, b)
        assert values.shape == indices.shape == out.shape


@pytest.mark.parametrize(("first", "second"), [((4, 5, 6), (6, 7)), ((5, 6), (4, 6, 7)), ((4, 5, 6), (1, 6, 7))])
def test_a_repeated_batch_is_not_copied(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    from torch_dcs_ops.ops.log_bmm.batch import as_matrices

    a, b = torch.randn(first), torch.randn(second)
    matrices = as_matrices(a, b)
    assert matrices[0].data_ptr() == a.data_ptr()
    assert matrices[1].data_ptr() == b.data_ptr()
    # One matrix b is one for all rows of all batches.
    assert matrices[0].size(0) == (1 if b.dim() == 2 else 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_widens_half_precision(device: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 4, device=device, dtype=dtype), torch.randn(4, 5, device=device)
    with pytest.raises(RuntimeError, match="b must have a's dtype"):
        log_bmm(a, b)
    with torch.autocast(device):
        assert log_bmm(a, b).dtype == torch.float32
        assert max_bmm(a, b)[0].dtype == torch.float32
        assert sample_bmm(a, b).dtype == torch.int64
        torch.testing.assert_close(log_bmm(a, b), naive(a.float(), b))
    assert log_bmm(a, b.to(dtype)).dtype == dtype


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = log_bmm(a.detach(), b.detach())
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        out = log_bmm(a, b)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 2 * 3 * 4 * 5
    for op in (max_bmm, sample_bmm):
        with FlopCounterMode(display=False) as counter:
            op(a.detach(), b.detach())
        assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "terms"),
    [
        ((4,), (4,), 4),
        ((4,), (4, 5), 4 * 5),
        ((3, 4), (4,), 3 * 4),
        ((3, 4), (4, 5), 3 * 4 * 5),
        ((2, 3, 4), (4,), 2 * 3 * 4),
        ((2, 3, 4), (4, 5), 2 * 3 * 4 * 5),
        ((3, 4), (2, 4, 5), 2 * 3 * 4 * 5),
        ((7, 1, 3, 4), (2, 4, 5), 7 * 2 * 3 * 4 * 5),
        ((4,), (2, 4, 5), 2 * 4 * 5),
    ],
    ids=str,
)
def test_flops_of_vectors_and_of_batches_that_broadcast(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], terms: int
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    a, b = torch.randn(shape_a), torch.randn(shape_b)
    for op in (log_bmm, max_bmm, sample_bmm):
        with FlopCounterMode(display=False) as counter:
            op(a, b)
        assert counter.get_total_flops() == 2 * terms
        with FlopCounterMode(display=False) as counter:  # recorded: that of the private op
            op(a.requires_grad_(), b)
        assert counter.get_total_flops() == 2 * terms
        a = a.detach()


def test_memory_is_quadratic() -> None:
    """The terms alone would be 256 times the result."""
    from torch.profiler import ProfilerActivity, profile

    a, b = torch.randn(256, 256), torch.randn(256, 256)
    log_bmm(a, b)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        log_bmm(a, b)
    allocated = sum(
        max(event.nbytes(), 0) for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    assert 0 < allocated < 12 * a.nbytes


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_matmul_precision(device: str, precision: str) -> None:
    """The CPU has but one; a GPU's lower ones have the errors that docs/log_bmm.md states."""
    a, b = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        out = log_bmm(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    budget = {"highest": 1e-5, "high": 1e-4, "medium": 5e-3}[precision if device == "cuda" else "highest"]
    assert forward_error(out, naive(a.double(), b.double()).cpu()) <= budget


ERRORS: dict[str, tuple[Any, Any, str]] = {
    "dtype": (torch.ones(2, 3).int(), torch.ones(3, 4), "a must be float16, bfloat16, float32 or float64, got int32"),
    "dtypes": (torch.ones(2, 3), torch.ones(3, 4).double(), "b must have a's dtype float32, got float64"),
    "complex": (torch.ones(2, 3) * 1j, torch.ones(3, 4), "a must be float16, .* got complex64"),
    "0-D a": (torch.ones(()), torch.ones(3, 4), "a must have at least one dimension, got a 0-D tensor"),
    "0-D b": (torch.ones(2, 3), torch.ones(()), "b must have at least one dimension, got a 0-D tensor"),
    "K": (
        torch.ones(2, 3),
        torch.ones(4, 5),
        r"b must have as many rows as a has columns, 3, got 4 \(a is \(2, 3\), b is \(4, 5\)\)",
    ),
    "K of a vector": (torch.ones(2, 3), torch.ones(4), "b must have as many rows as a has columns, 3, got 4"),
    "batch": (
        torch.ones(2, 1, 2, 3),
        torch.ones(3, 5, 3, 4),
        r"b must have batch dimensions that broadcast against a's \(2, 1\), got \(3, 5\)",
    ),
    "layout": (torch.ones(2, 3).to_sparse(), torch.ones(3, 4), "a must be a dense tensor, got the layout sparse_coo"),
    "device": (torch.ones(2, 3), torch.ones(3, 4, device="meta"), "b must be on a's device cpu, got meta"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("op", OPS)
def test_errors(op: str, name: str) -> None:
    a, b, sentence = ERRORS[name]
    with pytest.raises(RuntimeError, match=f"{op}: {sentence}"):
        OPS[op](a, b)


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_tensor(op: str) -> None:
    with pytest.raises(TypeError, match=f"{op}: b must be a tensor, got float"):
        OPS[op](torch.ones(2, 3), 1.0)
    with pytest.raises(TypeError, match=f"{op}: a must be a tensor, got list"):
        OPS[op]([1.0], torch.ones(2, 3))


def test_a_maximum_needs_a_term() -> None:
    with pytest.raises(RuntimeError, match=r"max_bmm: a must have at least one column .* got the shape \(2, 0\)"):
        max_bmm(torch.ones(2, 0), torch.ones(0, 3))


@pytest.mark.parametrize(
    ("uniforms", "sentence"),
    [
        (torch.ones(2, 4).double(), "uniforms must be float32 for float32 a, got float64"),
        (torch.ones(2, 3), r"uniforms must have the shape \(2, 4\), got \(2, 3\)"),
        (torch.ones(2, 4, device="meta"), "uniforms must be on a's device cpu, got meta"),
    ],
)
def test_errors_of_uniforms(uniforms: Tensor, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=f"sample_bmm: {sentence}"):
        torch.ops.dcs.sample_bmm(torch.ones(2, 3), torch.ones(3, 4), uniforms)


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)


PRIVATE_ERRORS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "dtype": ("_log_bmm", (torch.ones(2, 3, 4).int(), matrices()[1], "highest")),
    "dtypes": ("_log_bmm", (matrices()[0], matrices()[1].half(), "highest")),
    "2-D a": ("_log_bmm", (torch.ones(3, 4), matrices()[1], "highest")),
    "4-D b": ("_max_bmm", (matrices()[0], torch.ones(1, 2, 4, 5))),
    "batch": ("_max_bmm", (matrices()[0], torch.ones(1, 4, 5))),
    "K": ("_log_bmm", (matrices()[0], torch.ones(2, 3, 5), "highest")),
    "precision": ("_log_bmm", (*matrices()[:2], "low")),
    "device": ("_log_bmm", (matrices()[0], torch.ones(2, 4, 5, device="meta"), "highest")),
    "grad": ("_log_bmm_backward", (torch.ones(2, 3, 4), *matrices(), "highest", True, True)),
    "grad's dtype": ("_log_bmm_backward", (matrices()[2].half(), *matrices(), "highest", True, True)),
    "log_s": ("_log_bmm_backward", (matrices()[2], *matrices()[:2], matrices()[2].double(), "highest", True, True)),
    "over": ("_log_bmm_product", (*matrices(), None, None, None, 3)),
    "x": ("_log_bmm_product", (*matrices(), torch.ones(2, 3, 5), None, None, 1)),
    "y": ("_log_bmm_product", (*matrices(), None, torch.ones(2, 3, 5).double(), None, 0)),
    "z": ("_log_bmm_product", (*matrices(), None, None, torch.ones(2, 4), 1)),
    "no k": ("_max_bmm", (torch.ones(2, 3, 0), torch.ones(2, 0, 5))),
    "uniforms": ("_sample_bmm", (*matrices()[:2], torch.ones(2, 3, 4))),
}


@pytest.mark.parametrize("name", PRIVATE_ERRORS)
def test_private_ops_are_as_safe(device: str, name: str) -> None:
    """The kernels' sentences are the fakes'."""
    op, args = PRIVATE_ERRORS[name]
    packet = getattr(torch.ops.dcs, op)
    if name != "device":
        args = tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
    with pytest.raises(RuntimeError, match=f"{op}: ") as kernel:
        packet(*args)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(RuntimeError) as fake:
        packet(*(mode.from_tensor(x) if isinstance(x, Tensor) and x.device.type != "meta" else x for x in args))
    sentence = str(fake.value).splitlines()[0]
    # A C++ kernel has no name for the meta device.
    assert str(kernel.value).splitlines()[0] == sentence or name == "device"


def test_meta_tensors() -> None:
    a, b = torch.ones(5, 2, 3, device="meta", dtype=torch.float16), torch.ones(3, 4, device="meta", dtype=torch.float16)
    out = log_bmm(a, b)
    assert (out.shape, out.dtype, out.device.type) == ((5, 2, 4), torch.float16, "meta")
    assert max_bmm(a, b)[1].dtype == torch.int64


@st.composite
def problems(draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of any spread, with -inf planted in elements, rows, columns, and a gradient."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    batch, rows, depth, columns = (draw(st.integers(1, most)) for most in (2, 60, 70, 60))
    scale = 10 ** draw(st.floats(-3, 4.5))

    def operand(*shape: int) -> Tensor:
        numbers = scale * torch.randn(shape, generator=generator)
        numbers[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.9]))] = -INF
        for dim in (1, 2):
            whole = torch.rand(shape[dim], generator=generator) < draw(st.sampled_from([0.0, 0.2]))
            numbers = numbers.transpose(dim, 0)
            numbers[whole] = -INF
            numbers = numbers.transpose(dim, 0)
        return numbers

    grad = torch.randn(batch, rows, columns, generator=generator)
    return operand(batch, rows, depth), operand(batch, depth, columns), grad


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_random_problems(problem: tuple[Tensor, Tensor, Tensor]) -> None:
    a, b, grad = problem
    right = exact(a, b)
    a.requires_grad_()
    b.requires_grad_()
    out = log_bmm(a, b)
    assert forward_error(out, right.out) <= 1e-5
    gradients = torch.autograd.grad(out, (a, b), grad)
    budget = gradient_budget(torch.float32, spread(a, b))
    for gradient, over in zip(gradients, (2, 0), strict=True):
        assert not gradient.isnan().any()
        expected, magnitudes = (product(right.weights, None, g, None, over) for g in (grad, grad.abs()))
        assert gradient_error(gradient, expected, magnitudes) <= budget


def test_generators_that_are_none() -> None:
    for generator in (3, "cpu", torch.default_generator.get_state()):
        name = type(generator).__name__
        with pytest.raises(TypeError, match=f"^sample_bmm: generator must be a torch.Generator or None, got {name}$"):
            sample_bmm(torch.ones(2, 3), torch.ones(3, 2), generator=generator)  # type: ignore[arg-type]
