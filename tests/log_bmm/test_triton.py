"""The Triton kernels of log_bmm, its backward, max_bmm and sample_bmm against all terms in float64.

On a GPU for real; without one in Triton's interpreter, which one test starts in a process of its own. Whatever the
launchers allocate is filled with NaN first, and so is the memory around strided operands.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from log_bmm.triton_oracle import (
    DEVICE,
    FINITE,
    GPU,
    GRADIENT_ERROR,
    INF,
    INTERPRETED,
    LOG_S_ERROR,
    MASKED,
    NAN,
    OUT_ERROR,
    SPREAD_ERROR,
    Problem,
    assert_close,
    check,
    data,
    expected,
    finite_largest,
    gradients,
    on_device,
    rounding,
)
from support.subprocesses import rare, run_in_the_interpreter
from support.triton_modules import triton_module

pytest.importorskip("triton")
pytestmark = pytest.mark.each_value

kernel_test = pytest.mark.skipif(not INTERPRETED and not GPU, reason="no GPU: runs in test_in_the_interpreter")
gpu_test = pytest.mark.skipif(not GPU, reason="more than the interpreter does in a minute")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marks: str) -> None:
    run_in_the_interpreter(__file__, "-m", marks)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """triton_kernels/log_bmm/launch.py, installed or from the checkout; all that it allocates is poisoned."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(NAN if tensor.is_floating_point() else 77)

    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poisoned(new_empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poisoned(empty_like(*args, **options)))
    return triton_module("log_bmm.launch")


# B, I, J, K: enough terms for a product, and too few.
PRODUCT = (1, 17, 16, 16)
DIRECT = (2, 11, 9, 5)
LARGE = (2, 300, 141, 257)
SHAPES = [PRODUCT, DIRECT] + ([LARGE] if GPU else [])
# Data between those that are tested without a GPU too.
BETWEEN = ("N(0, 10²)", "N(0, 30²)", "U(±1e3)", "chain", "masked", "disjoint", "-1e30")


@kernel_test
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [rare(name) if name in BETWEEN else name for name in FINITE + MASKED])
def test_every_kind_of_data(launchers: ModuleType, name: str, shape: tuple[int, int, int, int]) -> None:
    check(launchers, data(name, shape))


@kernel_test
@pytest.mark.parametrize("shape", SHAPES)
def test_specials_stay_in_their_rows_and_columns(launchers: ModuleType, shape: tuple[int, int, int, int]) -> None:
    a, b, scale = data("specials", shape)
    check(launchers, Problem(a, b, scale))
    out, _ = launchers.log_bmm(on_device(a), on_device(b), "highest")
    ordinary = out.cpu()[:, 5:, 3:-1]
    assert not ordinary.isnan().any()
    assert not (ordinary == INF).any()


@kernel_test
@pytest.mark.parametrize("shape", [PRODUCT, DIRECT])
def test_what_is_not_needed_is_not_made(launchers: ModuleType, shape: tuple[int, int, int, int]) -> None:
    check(launchers, data("antipodal", shape), needs=((True, False), (False, True), (False, False)))


@kernel_test
@pytest.mark.parametrize("terms", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("name", ["N(0, 10²)", "masked"])
def test_terms(launchers: ModuleType, name: str, terms: int) -> None:
    check(launchers, data(name, (1, 17, 16, terms)))


@kernel_test
@pytest.mark.parametrize("shape", [(3, 1, 7, 33), (2, 21, 1, 40), (1, 1, 1, 130), (2, 15, 40, 20), (1, 1, 1, 1)])
@pytest.mark.parametrize("name", ["N(0, 10²)", "U(±1e4)"])
def test_vectors(launchers: ModuleType, name: str, shape: tuple[int, int, int, int]) -> None:
    check(launchers, data(name, shape))


@kernel_test
@pytest.mark.parametrize("tile", ["TILE", "LARGE_TILE"])
@pytest.mark.parametrize("name", ["N(0, 10²)", "antipodal"])
def test_tiles(launchers: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, tile: str) -> None:
    """More than a tile of every size, and more than a part of one."""
    chosen = getattr(launchers, tile)
    if GPU and launchers.device_of(torch.empty(0, device=DEVICE)).shared_memory < 200 << 10 and tile == "LARGE_TILE":
        pytest.skip("not enough shared memory for the large tile, which is not chosen here")
    monkeypatch.setattr(launchers, "_tile", lambda *_: chosen)
    a, b, scale = data("N(0, 10²)", (1, 70, 133, 16) if tile == "TILE" else (1, 133, 70, 16))
    if name == "antipodal":
        # A few elements, in different parts of the tiles, are to be summed term by term.
        a[:, ::65, 0] = 300.0
        b[:, -1, ::67] = 300.0
        scale = 300.0
    check(launchers, Problem(a, b, scale))


@kernel_test
@pytest.mark.parametrize(
    ("name", "precision"),
    [("N(0, 10²)", "high"), ("N(0, 10²)", "medium"), rare("N(0, 50²)", "high"), rare("disjoint, wide", "high")],
)
def test_tf32(launchers: ModuleType, name: str, precision: str) -> None:
    check(launchers, data(name, PRODUCT), precision=precision)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [PRODUCT, DIRECT])
@pytest.mark.parametrize("name", ["N(0, 10²)", "masked, wide"])
def test_dtypes(launchers: ModuleType, name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    a, b, scale = data(name, shape)
    check(launchers, Problem(a.to(dtype), b.to(dtype), scale))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in another layout, amid NaN."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "batch last":
        return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if layout == "shared":
        return x[:1].expand(x.shape)
    if layout == "one column":
        return x[:, :, :1].expand(x.shape)
    batch, rows, columns = x.shape
    memory = x.new_full((batch, rows * 3 + 2, columns * 2 + 3), NAN)
    view = memory[:, 1 : rows * 3 : 3, 3 : columns * 2 + 3 : 2]
    return view.copy_(x)


LAYOUTS = [
    ("transposed", "transposed"), ("apart", "apart"), ("shared", "batch last"), ("batch last", "shared"),
    ("one column", "shared"),
]  # fmt: skip


@kernel_test
@pytest.mark.parametrize("shape", [(2, 17, 16, 16), (2, 9, 8, 3)])
@pytest.mark.parametrize(("left", "right"), LAYOUTS)
def test_strides(launchers: ModuleType, left: str, right: str, shape: tuple[int, int, int, int]) -> None:
    a, b, scale = data("N(0, 30²)", shape)
    grad = laid_out(torch.randn(shape[:3]), left)
    check(launchers, Problem(laid_out(a, left), laid_out(b, right), scale), grad)


@kernel_test
@pytest.mark.parametrize(("left", "right"), LAYOUTS)
def test_strides_of_max_and_sample(launchers: ModuleType, left: str, right: str) -> None:
    a, b, _ = data("N(0, 30²)", (2, 5, 6, 4))
    a, b = laid_out(a, left), laid_out(b, right)
    values, indices = launchers.max_bmm(on_device(a), on_device(b))
    most = (a.unsqueeze(3) + b.unsqueeze(1)).max(2)
    assert torch.equal(values.cpu(), most.values)
    assert torch.equal(indices.cpu(), most.indices)
    check_sample(launchers, a, b, laid_out(torch.rand(2, 5, 6), right))


@kernel_test
@pytest.mark.parametrize("shape", [PRODUCT, DIRECT])
def test_gradients_that_are_special(launchers: ModuleType, shape: tuple[int, int, int, int]) -> None:
    """0, those too large for a product, inf and NaN, and NaN where nothing is weighed; small ones beside a small S."""
    a, b, _ = data("N(0, 1)", shape)
    a[:, :, 0] += 90
    b[:, -1] += 90
    check(launchers, Problem(a, b, 90.0), torch.randn(shape[:3]) * 1e-20)
    shape = (2, *shape[1:])
    problem = data("masked", shape)
    grad = torch.randn(shape[:3])
    grad[:, 2] = 0
    # As much as no gradient overflows with, but products do.
    grad[:, 3] = 1
    grad[:, 3] *= 2e38 / max(finite_largest(x) for x in gradients(expected(*problem[:2]).weights[:, 3:4], grad[:, 3:4]))
    check(launchers, problem, grad)
    grad = torch.randn(shape[:3])
    grad[:, shape[1] // 2] = NAN
    grad[:, :, shape[2] // 3] = INF
    check(launchers, problem, grad)
    grad[0, 4, 7] = NAN
    a, b, _ = problem
    _, log_s = launchers.log_bmm(on_device(a), on_device(b), "highest")
    grad_a, grad_b = launchers.log_bmm_backward(
        on_device(grad), on_device(a), on_device(b), log_s, "highest", True, True
    )
    for result, correct in zip((grad_a, grad_b), gradients(expected(a, b).weights, grad), strict=True):
        # Of what has no weight beside a NaN either is right.
        assert (result.cpu().isnan() >= correct.isnan()).all()
    assert not grad_a[0, :4].isnan().any()
    assert not grad_a[1].isnan().any()


@kernel_test
@pytest.mark.parametrize("shape", [(0, 20, 20, 20), (2, 0, 20, 20), (2, 20, 0, 20), (2, 20, 17, 0), (0, 0, 0, 0)])
def test_nothing(launchers: ModuleType, shape: tuple[int, int, int, int]) -> None:
    check(launchers, data("N(0, 1)", shape))
    a, b, _ = data("N(0, 1)", shape)
    uniforms = torch.rand(shape[:3])
    sample = launchers.sample_bmm(on_device(a), on_device(b), on_device(uniforms))
    assert torch.equal(sample.cpu(), torch.full(shape[:3], -1))
    if shape[3]:
        values, indices = launchers.max_bmm(on_device(a), on_device(b))
        assert values.shape == indices.shape == shape[:3]
    else:
        with pytest.raises(NotImplementedError):
            launchers.max_bmm(on_device(a), on_device(b))


@kernel_test
def test_other_dtypes_are_left_to_the_reference(launchers: ModuleType) -> None:
    for dtype in (torch.int64, torch.complex64):
        x = torch.zeros(1, 2, 2, dtype=dtype, device=DEVICE)
        for attempt in (
            lambda x=x: launchers.log_bmm(x, x, "highest"),
            lambda x=x: launchers.log_bmm_backward(x, x, x, x, "highest", True, True),
            lambda x=x: launchers.max_bmm(x, x),
            lambda x=x: launchers.sample_bmm(x, x, x),
        ):
            with pytest.raises(NotImplementedError):
                attempt()


@kernel_test
@pytest.mark.parametrize("shape", [PRODUCT, DIRECT, (3, 1, 7, 65), (2, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_max(launchers: ModuleType, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    for name in ("N(0, 10²)", "specials" if min(shape[1:3]) > 4 else "masked"):
        a, b, _ = data(name, shape)
        a, b = a.round().to(dtype), b.round().to(dtype)  # equals there are many
        values, indices = launchers.max_bmm(on_device(a), on_device(b))
        wide = torch.promote_types(dtype, torch.float32)
        most = (a.to(wide).unsqueeze(3) + b.to(wide).unsqueeze(1)).max(2)
        assert values.dtype == dtype
        assert_close(values, most.values.double(), rounding(most.values.double(), dtype) + 1e-300)
        assert indices.dtype == torch.int64
        # torch.max does not say which of equals it takes; the first is ours.
        terms = a.to(wide).unsqueeze(3) + b.to(wide).unsqueeze(1)
        found = (terms == most.values.unsqueeze(2)) | terms.isnan()
        assert torch.equal(indices.cpu(), found.to(torch.uint8).argmax(2))


def check_sample(launchers: ModuleType, a: Tensor, b: Tensor, uniforms: Tensor, allowed: float = 1e-5) -> Tensor:
    """Of each element the drawn k is where its uniform lies in the exact distribution, and has a probability."""
    drawn = launchers.sample_bmm(on_device(a), on_device(b), on_device(uniforms)).cpu()
    assert drawn.dtype == torch.int64
    reference = expected(a, b)
    terms = a.double().unsqueeze(3) + b.double().unsqueeze(1)
    strange = ~(terms < INF)
    assert torch.equal(drawn[strange.any(2)], strange.to(torch.uint8).argmax(2)[strange.any(2)])
    assert (drawn[reference.out == -INF] == -1).all()
    at = drawn.clamp(min=0).unsqueeze(2)
    upto = reference.weights.cumsum(2).gather(2, at).squeeze(2)
    own = reference.weights.gather(2, at).squeeze(2)
    usual = reference.out.isfinite()
    assert (drawn[usual] >= 0).all()
    assert (own[usual] > 0).all()
    assert (uniforms.double() <= upto + allowed)[usual].all()
    assert (uniforms.double() >= upto - own - allowed)[usual].all()
    return drawn


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_sample(launchers: ModuleType, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    for name in ("N(0, 50²)", "masked", "specials", "chain, antipodal"):
        if name.startswith("chain") and dtype not in (torch.float32, torch.float64):
            continue  # beyond float16, and bfloat16 has no room for the differences
        a, b, _ = data(name, (1, 17, 9, 8))
        uniforms = torch.rand(1, 17, 9, dtype=wide)
        check_sample(launchers, a.to(dtype), b.to(dtype), uniforms)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_sample_of_probability_zero(launchers: ModuleType, dtype: torch.dtype) -> None:
    """Terms of no weight at either end, with uniforms at the ends of [0, 1)."""
    below_one = 1 - torch.finfo(dtype).eps / 2
    a, b, _ = data("N(0, 1)", (1, 33, 34, 13))
    a[:, :, :3] = -INF
    b[:, 10:] -= 2000  # exp of it is 0
    for uniform in (0.0, below_one):
        drawn = check_sample(launchers, a.to(dtype), b.to(dtype), torch.full((1, 33, 34), uniform, dtype=dtype))
        assert drawn.min() >= 3
        assert drawn.max() < 10


@kernel_test
def test_sample_frequencies(launchers: ModuleType) -> None:
    """Uniforms at equal distances are drawn as often as the probabilities say, but for one at either end."""
    count = 64
    a, b, _ = data("N(0, 1)", (1, 1, 1, 6))
    uniforms = ((torch.arange(count) + 0.5) / count).reshape(1, 1, count)
    drawn = launchers.sample_bmm(on_device(a), on_device(b.expand(1, 6, count)), on_device(uniforms)).cpu()
    frequencies = torch.bincount(drawn.flatten(), minlength=6) / count
    weights = expected(a, b).weights.flatten()
    assert (frequencies - weights).abs().max() <= 1.01 / count
    assert (drawn.flatten().diff() >= 0).all()


@gpu_test
@pytest.mark.parametrize("name", ["N(0, 1)", "N(0, 30²)", "masked, wide"])
def test_the_same_bits_every_time(launchers: ModuleType, name: str) -> None:
    a, b, _ = data(name, (4, 500, 300, 400))
    a, b = a.to(DEVICE), b.to(DEVICE)
    out, log_s = launchers.log_bmm(a, b, "highest")
    first = (out, log_s, *launchers.log_bmm_backward(out.sin(), a, b, log_s, "highest", True, True))
    for _ in range(5):
        out, log_s = launchers.log_bmm(a, b, "highest")
        again = (out, log_s, *launchers.log_bmm_backward(out.sin(), a, b, log_s, "highest", True, True))
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@gpu_test
@pytest.mark.parametrize("terms", [1, 16])
def test_results_past_2_to_the_31(launchers: ModuleType, monkeypatch: pytest.MonkeyPatch, terms: int) -> None:
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("needs 64 GiB of free memory")
    monkeypatch.undo()  # poison takes time, and tails are looked at alone
    a, b, _ = data("N(0, 1)", (1, 65_537, 32_769, terms))
    out, log_s = launchers.log_bmm(a.to(DEVICE), b.to(DEVICE), "highest")
    tail = expected(a[:, -40:], b)
    assert_close(out[:, -40:], tail.out, OUT_ERROR * tail.out.abs().clamp(min=1))
    assert_close(log_s[:, -40:], tail.log_s, LOG_S_ERROR * tail.log_s.abs().clamp(min=1))
    del log_s
    values, indices = launchers.max_bmm(a.to(DEVICE), b.to(DEVICE))
    most = (a[:, -40:].unsqueeze(3) + b.unsqueeze(1)).max(2)
    assert torch.equal(values[:, -40:].cpu(), most.values)
    assert torch.equal(indices[:, -40:].cpu(), most.indices)


@gpu_test
@pytest.mark.parametrize("terms", [5, 17])
def test_operands_past_2_to_the_31(launchers: ModuleType, terms: int) -> None:
    """Rows 2^27 elements apart."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    memory = torch.empty(20 * 2**27 + 40, dtype=torch.bfloat16, device=DEVICE)
    a, b, scale = data("N(0, 30²)", (1, 20, 16, terms))
    far = memory.as_strided((1, 20, terms), (0, 2**27, 1))
    far.copy_(a.to(torch.bfloat16))
    out, log_s = launchers.log_bmm(far, b.to(torch.bfloat16).to(DEVICE), "highest")
    a, b = a.bfloat16(), b.bfloat16()
    near = expected(a, b)
    assert_close(out, near.out, OUT_ERROR * near.out.abs().clamp(min=1) + rounding(near.out, torch.bfloat16))
    assert_close(log_s, near.log_s, LOG_S_ERROR * near.log_s.abs().clamp(min=1))
    grad = torch.randn(1, 20, 16).bfloat16()
    results = launchers.log_bmm_backward(grad.to(DEVICE), far, b.to(DEVICE), log_s, "highest", True, True)
    for result, correct in zip(results, gradients(near.weights, grad), strict=True):
        allowed = max(GRADIENT_ERROR, SPREAD_ERROR * scale) * finite_largest(correct)
        assert_close(result, correct, allowed + rounding(correct, torch.bfloat16))
