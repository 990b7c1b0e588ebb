"""What only a GPU can show: capture, streams, bits from run to run, addresses past 2**31."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.cuda_checks import check_against_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

# One for each way through the kernels: a thread a row, rows that a warp and a block hold, a chain of tiles, odd rows,
# columns with blocks of their own, that warps scan serially, few, few of which a cluster has all steps; long rows that
# all blocks share, that a block takes; small rows in a block and in a cluster.
SHAPES = (
    ((32, 8), 1), ((300, 16), 1), ((300, 400), 1), ((7, 4096), 1), ((3, 100_000), 1), ((3, 9001), 1), ((300, 257), 0),
    ((40, 15_000), 0), ((2100, 264), 0), ((5000, 5), 0), ((20, 120_008), 1), ((130, 20_008), 1), ((999, 77), 1),
    ((3, 30_001), 1),
)  # fmt: skip


def problem(shape: tuple[int, int], dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, device="cuda")
    return x, torch.rand_like(x), torch.rand(shape, device="cuda") < 0.01


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_capture_and_replay(shape: tuple[int, int], dim: int) -> None:
    x, gates, reset = problem(shape, dim)

    def calls() -> list[torch.Tensor]:
        return [
            discounted_cumsum(x, 0.99, dim=dim),
            discounted_cumsum(x, gates, dim=dim, direction="left"),
            discounted_cumsum(x, 0.9, dim=dim, reset=reset),
            discounted_cumsum(x, 0.9, dim=dim, window=100),
        ]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for _ in range(3):
        x.normal_()
        for output in captured:
            output.fill_(float("nan"))
        graph.replay()
        for output, expected in zip(captured, calls(), strict=True):
            assert torch.equal(output, expected)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_the_bits_are_the_same_in_100_runs(shape: tuple[int, int], dim: int) -> None:
    x, gates, _ = problem(shape, dim)
    gates.requires_grad_()
    scalar = torch.tensor(0.99, device="cuda", requires_grad=True)

    def results() -> list[torch.Tensor]:
        number, step = discounted_cumsum(x, scalar, dim=dim), discounted_cumsum(x, gates, dim=dim)
        return [
            number.detach(),
            step.detach(),
            *torch.autograd.grad(number.sin().sum() + step.sin().sum(), (scalar, gates)),
        ]

    first = results()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("direction", ["left", "right"])
def test_gradients_with_resets(shape: tuple[int, int], dim: int, direction: str) -> None:
    """Also for memcheck: the adjoint takes the reset of the step before, and the first step has none."""
    x, gates, reset = problem(shape, dim)
    for gamma in (torch.tensor(0.9, device="cuda"), gates):
        leaves = [x.double().requires_grad_(), gamma.double().requires_grad_()]
        on_cpu = [leaf.detach().cpu().requires_grad_() for leaf in leaves]
        got = torch.autograd.grad(
            discounted_cumsum(*leaves, dim=dim, direction=direction, reset=reset).sin().sum(), leaves
        )
        expected = torch.autograd.grad(
            discounted_cumsum(*on_cpu, dim=dim, direction=direction, reset=reset.cpu()).sin().sum(), on_cpu
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


def in_float64(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """y[t] = x[t] + gates[t] * y[t - 1] of rows: segments of 1000 steps side by side, then one after the other."""
    rows, length = x.shape
    pad = -length % 1000
    values = torch.nn.functional.pad(x.double(), (0, pad)).view(rows, -1, 1000)
    factors = torch.nn.functional.pad(gates.double(), (0, pad), value=1.0).view(rows, -1, 1000)
    for t in range(1, 1000):
        values[..., t] += factors[..., t] * values[..., t - 1]
    products = factors.cumprod(2)
    carries = []
    for totals, weights in zip(values[..., -1].tolist(), products[..., -1].tolist(), strict=True):
        carry, of_row = 0.0, []
        for total, weight in zip(totals, weights, strict=True):
            of_row.append(carry)
            carry = total + weight * carry
        carries.append(of_row)
    values += products * torch.tensor(carries, dtype=torch.float64, device=x.device).unsqueeze(2)
    return values.view(rows, -1)[:, :length]


# Rows of more tiles than blocks run at once, of fewer, with ends inside a vector, tiles of two rows in a round; rows
# that a cluster of blocks takes, of two sizes; as many as fill an H200 once and nearly twice, which blocks take whole.
LONG = (
    (1, 6_000_001), (3, 2_500_004), (40, 100_008), (1, 100_001), (70, 65_536), (9, 40_008), (1, 9_001), (264, 20_004),
    (500, 9_004), (16, 300_008), (132, 70_008),
)  # fmt: skip


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_rows(shape: tuple[int, int], kind: str, dtype: torch.dtype, direction: str) -> None:
    """Output, and the gradients of input and gamma, against float64."""
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    size = {"number": (), "row": shape[:1], "step": shape}[kind]
    gamma = torch.empty(size, device="cuda").uniform_(0.9, 0.9995)
    gamma = (gamma.to(dtype) if kind == "step" else gamma).requires_grad_()
    grad = torch.randn(shape, device="cuda").to(dtype)
    y = discounted_cumsum(x, gamma, direction=direction)
    grad_x, grad_gamma = torch.autograd.grad(y, (x, gamma), grad)

    def flipped(rows: torch.Tensor) -> torch.Tensor:
        return rows.flip(1) if direction == "right" else rows

    eps = torch.finfo(dtype).eps + 1e-6
    gates = gamma.detach() if kind == "step" else gamma.detach().reshape(-1, 1).expand(shape)
    forward_gates = flipped(gates)
    expected = in_float64(flipped(x.detach()), forward_gates)
    scale = expected.abs().amax(1, keepdim=True)
    assert ((flipped(y.detach()).double() - expected).abs() <= eps * scale).all()
    adjoint = in_float64(flipped(grad).flip(1), forward_gates.roll(-1, 1).flip(1)).flip(1)
    adjoint_scale = adjoint.abs().amax(1, keepdim=True)
    assert ((flipped(grad_x).double() - adjoint).abs() <= eps * adjoint_scale).all()
    terms = adjoint[:, 1:] * expected[:, :-1]
    if kind == "step":
        errors = (flipped(grad_gamma)[:, 1:].double() - terms).abs()
        assert (errors <= 4 * eps * scale * adjoint_scale).all()
        assert not flipped(grad_gamma)[:, 0].any()
        return
    # Terms carry the rounding of the output and of the gradient, each on its own.
    bound = 8 * eps * terms.norm(dim=1)
    if kind == "number":
        assert (grad_gamma.double() - terms.sum()).abs() <= bound.norm()
        return
    errors = (grad_gamma.double() - terms.sum(1)).abs()
    assert (errors <= bound)[[0, -1]].all()
    # Of all rows some have so many neighboring terms of one sign that the rounding of their parts, floats, counts, too.
    assert (errors <= bound + 16 * 2**-24 * terms.abs().sum(1)).all()


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, -0.99, 1.0, 1.0000001])
def test_long_rows_of_one_number(gamma: float, direction: str) -> None:
    x = torch.randn(2, 3_000_004, device="cuda")
    y = discounted_cumsum(x, gamma, direction=direction)
    steps, got = (x, y) if direction == "left" else (x.flip(1), y.flip(1))
    expected = in_float64(steps, torch.full_like(steps, gamma, dtype=torch.float64))
    assert ((got.double() - expected).abs() <= 1e-6 * expected.abs().amax(1, keepdim=True)).all()


# Enough columns for pairs of them, and an odd number, of which there are none; times of less than a thread's steps, of
# one round and of several. Few columns, of which half a warp takes a segment of time: a part of a round, several. Rows
# of columns in whole vectors: as many as warps scan serially, with 8 and with 4 bytes a lane, of fewer segments than
# they keep on their way and of more, with idle lanes; few of them, whose warps wait all for each other or by groups,
# for a part of a round and for several.
MANY = (
    (5, 16_900), (37, 16_900), (130, 17_002), (300, 20_000), (130, 16_901), (300, 130), (2100, 70), (3, 65_536),
    (37, 60_008), (150, 60_000), (150, 30_008), (1024, 4096), (70, 4000), (2100, 72),
    (200, 264), (300, 264), (2100, 264),
)  # fmt: skip


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_columns(shape: tuple[int, int], kind: str, dtype: torch.dtype, direction: str) -> None:
    """Along the outer dimension: output, and the gradients of input and gamma, against float64."""
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    size = {"number": (), "row": (1, shape[1]), "step": shape}[kind]
    gamma = torch.empty(size, device="cuda").uniform_(0.9, 0.9995)
    gamma = (gamma.to(dtype) if kind == "step" else gamma).requires_grad_()
    grad = torch.randn(shape, device="cuda").to(dtype)
    y = discounted_cumsum(x, gamma, dim=0, direction=direction)
    got = torch.autograd.grad(y, (x, gamma), grad)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, gamma)]
    gates = leaves[1].expand(shape)
    rows: list[torch.Tensor] = []
    for t in range(shape[0]) if direction == "left" else reversed(range(shape[0])):
        rows.append(leaves[0][t] + gates[t] * rows[-1] if rows else leaves[0][t])
    expected = torch.stack(rows if direction == "left" else rows[::-1])
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    eps = torch.finfo(dtype).eps + 1e-6
    assert (y - expected).abs().max() <= eps * expected.abs().max()
    assert (got[0] - expected_grads[0]).abs().max() <= eps * expected_grads[0].abs().max()
    # A term carries the rounding of the output and of the gradient, a sum of n terms those of n, each on its own.
    terms = 1 if kind == "step" else shape[0] if kind == "row" else shape[0] * shape[1]
    bound = 8 * eps * terms**0.5 * expected.abs().max() * expected_grads[0].abs().max()
    assert (got[1].double() - expected_grads[1]).abs().max() <= bound


# Few neighboring columns of many outer rows: one that a block has no other of, few steps, several stages of them, the
# last one in part; steps of an even and of an odd number of words.
SLABS = ((20_000, 25, 2), (13_001, 70, 3), (7999, 300, 5), (2400, 130, 23), (70, 1100, 250))


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "row", "step"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("shape", SLABS, ids=str)
@pytest.mark.each_pair
def test_few_neighboring_columns(
    shape: tuple[int, int, int], padding: int, kind: str, dtype: torch.dtype, direction: str
) -> None:
    """With resets and initial values: output and gradients, against the CPU's kernels in double."""
    outer, steps, inner = shape
    drawn = torch.randn(outer, steps, inner + padding, device="cuda").to(dtype)
    x = drawn[..., :inner].requires_grad_()
    size = {"number": (), "row": (outer, 1, inner), "step": shape}[kind]
    gamma = torch.empty(size, device="cuda").uniform_(0.9, 0.9995)
    gamma = (gamma.to(dtype) if kind == "step" or dtype.itemsize > 4 else gamma).requires_grad_()
    initial = torch.randn(outer, inner, device="cuda").to(dtype).requires_grad_()
    reset = torch.rand(shape, device="cuda") < 0.02
    check_against_cpu(x, gamma, initial, reset, dim=1, direction=direction)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32, 8), (7, 16), (40, 32)], ids=str)
def test_short_rows_of_steps(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    x, gates = torch.randn(shape, device="cuda").to(dtype), torch.rand(shape, device="cuda").to(dtype)
    y = discounted_cumsum(x, gates, direction=direction)
    expected = discounted_cumsum(x.double().cpu(), gates.double().cpu(), direction=direction)
    eps = torch.finfo(dtype).eps
    assert (y.double().cpu() - expected).abs().max() <= eps * expected.abs().max()


# In vectors of 16 bytes: rows of which a warp's 32 hold one, several, or leave lanes idle; too few of them to be worth
# it (19, 35); rows that a warp holds whole in two, three and four readings, the last one partly; that a block holds.
VECTORS = (1, 2, 3, 8, 10, 19, 25, 32, 35, 50, 64, 90, 100, 128, 200, 999)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vectors", VECTORS)
def test_rows_of_whole_vectors(vectors: int, dtype: torch.dtype, direction: str) -> None:
    """Output, and the gradients of input and gamma, against float64: shared and per-row gammas of any sign and size."""
    length, rows = vectors * 16 // dtype.itemsize, 333 if vectors < 128 else 37
    x = torch.randn(rows, length, device="cuda").to(dtype)
    each = torch.empty(rows, 1, device="cuda")
    far = min(0.02, 3 / length)
    gammas = [
        torch.tensor(0.99, device="cuda", dtype=torch.float64), torch.tensor(-0.97, device="cuda"),
        torch.tensor(1 + far, device="cuda"), each.uniform_(0.9, 1).clone(), each.to(torch.bfloat16),
        each.uniform_(-1 - far, 1 + far).clone(), each.double().uniform_(0.99, 1), torch.zeros_like(each),
    ]  # fmt: skip
    for gamma in gammas:
        leaves = [x.clone().requires_grad_(), gamma.clone().requires_grad_()]
        on_cpu = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
        grad = torch.randn(x.shape, device="cuda").to(dtype)
        y = discounted_cumsum(*leaves, direction=direction)
        got = torch.autograd.grad(y, leaves, grad)
        expected = discounted_cumsum(*on_cpu, direction=direction)
        expected_grads = torch.autograd.grad(expected, on_cpu, grad.double().cpu())
        eps = torch.finfo(dtype).eps + 1e-6
        assert (y.double().cpu() - expected).abs().max() <= eps * expected.abs().max()
        assert (got[0].double().cpu() - expected_grads[0]).abs().max() <= eps * expected_grads[0].abs().max()
        # A sum of n terms carries their roundings, each on its own, and gamma's dtype.
        terms = length if gamma.dim() else length * rows
        bound = 8 * eps * terms**0.5 * expected.abs().max() * expected_grads[0].abs().max()
        bound = bound + torch.finfo(gamma.dtype).eps * expected_grads[1].abs().max()
        assert (got[1].double().cpu() - expected_grads[1]).abs().max() <= bound
        if gamma.dim() == 0:
            by_number = discounted_cumsum(x, float(gamma), direction=direction)
            assert (by_number - y).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1_100_001, 2, 2), (700_003, 3, 1), (300_001, 7, 3), (1_500_001, 1, 4)], ids=str)
def test_few_padded_columns(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Steps, columns, and elements between steps: copied first where they are many; nothing else is written."""
    steps, columns, gap = shape
    base = torch.randn(steps, columns + gap, device="cuda").to(dtype)
    x, before = base[:, :columns], base.clone()
    reset = torch.rand(steps, columns, device="cuda") < 1e-4
    initial = torch.randn(columns, device="cuda").to(dtype)
    eps = torch.finfo(dtype).eps + 1e-6
    for gates, options in (
        (torch.full((steps, columns), 0.99, dtype=torch.float64, device="cuda"), {}),
        (torch.where(reset, 0.0, 0.99).double(), {"reset": reset}),
    ):
        for direction in ("left", "right"):
            rows, factors = x.double().t(), gates.t()
            if direction == "right":
                rows, factors = rows.flip(1), factors.flip(1)
            expected = in_float64(rows, factors)
            got = discounted_cumsum(x, 0.99, dim=0, direction=direction, **options).double().t()
            got = got.flip(1) if direction == "right" else got
            assert ((got - expected).abs() <= eps * expected.abs().amax(1, keepdim=True)).all()
    y = discounted_cumsum(x, 0.99, dim=0, direction="left", initial=initial)
    first = torch.cat([(x[:1].double() + 0.99 * initial.double()), x[1:].double()])
    expected = in_float64(first.t(), torch.full((columns, steps), 0.99, dtype=torch.float64, device="cuda")).t()
    assert ((y.double() - expected).abs() <= eps * expected.abs().amax(0)).all()
    assert torch.equal(base, before)


def test_side_stream() -> None:
    x = torch.randn(64, 20_000, device="cuda")
    expected = discounted_cumsum(x, 0.99)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.mul_(2)
        output = discounted_cumsum(x, 0.99)
    stream.synchronize()
    torch.testing.assert_close(output, 2 * expected)


def test_a_green_context() -> None:
    """With fewer multiprocessors than the device has, blocks that have to run together find no room there."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts", reason="this torch has no green contexts")
    problems: list[tuple[torch.Tensor, float | torch.Tensor]] = []
    for shape in ((12, 200_000), (1, 100_000), (9, 70_000)):  # the streaming kernels and a cluster's
        x, rates = torch.randn(shape, device="cuda"), torch.full(shape, 0.99, device="cuda")
        problems += [(x, 0.99), (x, rates[:, :1].contiguous()), (x, rates)]
    torch.cuda.synchronize()
    context = green_contexts.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    context.set_context()
    try:
        results = [discounted_cumsum(x, gamma) for x, gamma in problems]
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    for (x, gamma), y in zip(problems, results, strict=True):
        expected = discounted_cumsum(x, gamma)
        assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", [(2**31 + 40,), (2**31 // 8 + 5, 8), (2**31 // 64 + 5, 64), (3, 2**30 + 8)])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_addresses_past_two_to_the_31(shape: tuple[int, ...], direction: str) -> None:
    x = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    y = discounted_cumsum(x, 0.5, direction=direction).flatten()
    length = shape[-1]
    distance = torch.arange(min(length, 32), device="cuda")
    expected = (2 - 0.5 ** distance.double()).to(torch.bfloat16)
    last = y[-length:]
    got = last[: distance.numel()] if direction == "left" else last[-distance.numel() :].flip(0)
    assert torch.equal(got, expected)
    assert float(y.float().min()) >= 1
    assert float(y.float().max()) <= 2


@pytest.mark.slow
def test_cumsum_past_two_to_the_31() -> None:
    x = torch.ones(2**31 + 40, dtype=torch.int64, device="cuda")
    y = cumsum(x, 0)
    assert int(y[-1]) == 2**31 + 40
    assert int(y[2**31]) == 2**31 + 1
