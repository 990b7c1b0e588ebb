"""Infinities, NaN and long sums of ones on a GPU, where they end up in the same steps as on the CPU."""

from __future__ import annotations

import pytest
import torch

from torch_dcs_ops import discounted_cumsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 64), (9, 104), (9, 256), (9, 400), (9, 1000), (9, 4096)], ids=str)
def test_rows_with_special_values(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    first = 0 if direction == "left" else -1
    bad = torch.full((shape[0], 1), 0.99, device="cuda")
    bad[4] = float("nan")
    y = discounted_cumsum(x, bad, direction=direction)
    assert int(y.isnan().sum()) == shape[1] - 1
    assert bool(y[4, first] == x[4, first])
    x[1, shape[1] // 2], x[2, 3], x[3, shape[1] - 2] = float("inf"), float("nan"), float("-inf")
    for gamma in (0.5, 0.95, torch.full((shape[0], 1), 0.9, device="cuda")):
        y = discounted_cumsum(x, gamma, direction=direction).double().cpu()
        on_cpu = gamma.double().cpu() if isinstance(gamma, torch.Tensor) else gamma
        expected = discounted_cumsum(x.double().cpu(), on_cpu, direction=direction)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(90, 60_000), (300, 4096), (1100, 264)], ids=str)
def test_columns_with_special_values(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """What is not finite stays in its column and goes as far as the recurrence takes it; the first gate has no part."""
    x = torch.randn(shape, device="cuda").to(dtype)
    first = 0 if direction == "left" else -1
    gates = torch.full_like(x, 0.95)
    gates[first] = float("nan")
    assert not discounted_cumsum(x, gates, dim=0, direction=direction).isnan().any()
    bad = torch.full((1, shape[1]), 0.99, device="cuda")
    bad[0, 7] = float("nan")
    y = discounted_cumsum(x, bad, dim=0, direction=direction)
    assert int(y.isnan().sum()) == shape[0] - 1
    assert bool(y[first, 7] == x[first, 7])
    x[shape[0] // 2, 5], x[3, 70], x[-2, 33] = float("inf"), float("nan"), float("-inf")
    y = discounted_cumsum(x, 0.95, dim=0, direction=direction).double().cpu()
    expected = discounted_cumsum(x.double().cpu(), 0.95, dim=0, direction=direction)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(90, 60_016), (300, 4112)], ids=str)
def test_columns_of_a_view(shape: tuple[int, int], dtype: torch.dtype, direction: str) -> None:
    """Between other columns, aligned to vectors and not, with batches before time, and gates expanded over it."""
    whole = torch.randn(shape, device="cuda").to(dtype)
    columns = shape[1] - 16
    gates = torch.rand(1, columns, device="cuda").to(dtype).expand(shape[0], columns)
    eps = torch.finfo(dtype).eps + 1e-6
    for start in (0, 3, 8):
        x = whole[:, start : start + columns]
        for gamma in (0.99, gates):
            y = discounted_cumsum(x, gamma, dim=0, direction=direction).double().cpu()
            on_cpu = gamma.double().cpu() if isinstance(gamma, torch.Tensor) else gamma
            expected = discounted_cumsum(x.double().cpu(), on_cpu, dim=0, direction=direction)
            assert (y - expected).abs().max() <= eps * expected.abs().max()
    batches = whole[:, :columns].unflatten(0, (2, -1))
    y = discounted_cumsum(batches, 0.99, dim=1, direction=direction).double().cpu()
    expected = discounted_cumsum(batches.double().cpu(), 0.99, dim=1, direction=direction)
    assert (y - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("gamma", [float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((9, 24), 1),
        ((9, 104), 1),
        ((9, 4096), 1),
        ((12, 60_000), 1),
        ((2, 50_001), 1),
        ((300, 4096), 0),
        ((90, 257), 0),
    ],
    ids=str,
)
def test_an_infinite_gamma(shape: tuple[int, int], dim: int, dtype: torch.dtype, gamma: float, direction: str) -> None:
    """It multiplies step after step: NaN from where it meets a 0 on, else infinite from the second step on."""
    x = torch.randn(shape, device="cuda").to(dtype)
    x[x == 0] = 1
    x.select(dim, 0 if direction == "left" else -1)[-1] = 0
    y = discounted_cumsum(x, gamma, dim=dim, direction=direction)
    rows, scanned = (x, y) if dim == 1 else (x.t(), y.t())
    if direction == "right":
        rows, scanned = rows.flip(1), scanned.flip(1)
    assert torch.equal(scanned[:, 0], rows[:, 0])
    assert bool(scanned[-1, 1:].isnan().all())
    signs = rows[:-1, :1].double() * gamma ** torch.arange(1, rows.shape[1], device="cuda", dtype=torch.float64)
    assert torch.equal(scanned[:-1, 1:].double(), signs)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(15_000, 11), (3000, 33), (200, 700), (40_000, 11)], ids=str)
@pytest.mark.parametrize("resets", [False, True], ids=["whole", "resets"])
def test_small_columns_of_any_gammas(shape: tuple[int, int], dtype: torch.dtype, direction: str, resets: bool) -> None:
    """What is finite is right, and nothing else is: of gammas that are 0, large, infinite or no numbers, too."""
    values = torch.tensor(
        [0.99, 0.0, float("inf"), -0.5, 1.5, float("nan"), 1.001, -3.0, 1e30, -float("inf"), -1e-30], device="cuda"
    )
    gamma = values.repeat(shape[1] // len(values) + 1)[: shape[1]]
    x = torch.randn(shape, device="cuda").to(dtype)
    x[shape[0] // 2, 0], x[3, 3], x[-2, 6] = float("inf"), float("nan"), float("-inf")
    reset = torch.rand(shape, device="cuda") < 0.01 if resets else None
    y = discounted_cumsum(x, gamma, dim=0, direction=direction, reset=reset).cpu()
    expected = discounted_cumsum(
        x.double().cpu(), gamma.double().cpu(), dim=0, direction=direction, reset=None if reset is None else reset.cpu()
    )
    finite = expected.to(dtype).isfinite()
    assert torch.equal(y.isfinite(), finite)
    found, wanted = (each.double().where(finite, 0.0) for each in (y, expected))
    if direction == "right":
        found, wanted = found.flip(0), wanted.flip(0)
    largest = wanted.abs().cummax(0).values
    assert bool(((found - wanted).abs() <= torch.finfo(dtype).eps * (wanted.abs() + largest)).all())


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16_384, 2), (8192, 100), (60_000, 3), (3000, 700)], ids=str)
@pytest.mark.parametrize("shift", [0, 128])
def test_columns_whose_gates_vanish_and_grow(
    shape: tuple[int, int], dtype: torch.dtype, direction: str, shift: int
) -> None:
    """What 1024 gates of 0.25 have taken below float64's range does not come back by gates of 2."""
    steps, columns = shape
    step = torch.arange(steps, device="cuda") % 2560 - shift
    x = (step == 1023 - shift).to(dtype)[:, None].repeat(1, columns)
    gates = torch.ones(steps, device="cuda")
    gates[(step > 1023) & (step <= 2047)] = 0.25
    gates[step > 2047 + shift] = 2.0
    gates = gates.to(dtype)[:, None].repeat(1, columns)
    if direction == "right":
        x, gates = x.flip(0), gates.flip(0)
    y = discounted_cumsum(x, gates, dim=0, direction=direction)
    expected = discounted_cumsum(x.double().cpu(), gates.double().cpu(), dim=0, direction=direction)
    assert torch.equal(y.double().cpu(), expected.to(dtype).double())


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [8, 16, 24, 64, 80, 120, 128, 240, 248, 256])
def test_short_rows_of_any_gates(length: int, dtype: torch.dtype, direction: str) -> None:
    """Each with another kind of gates, none infinite, or of values, beside the recurrence in float32."""
    x = torch.randn(40_000, length, device="cuda").to(dtype)
    gates = torch.rand(x.shape, device="cuda").to(dtype)
    where = torch.rand(x.shape, device="cuda") < 0.02
    first = 0 if direction == "left" else -1
    for kind, value in ((1, 0.0), (2, -1.0), (3, 3.0), (4, 1.0), (5, float("nan")), (6, -1e-4), (7, 60_000.0)):
        gates[kind::16][where[kind::16]] = value
    for kind, value in ((8, float("inf")), (9, float("nan")), (10, float("-inf")), (11, 60_000.0)):
        x[kind::16][where[kind::16]] = value
    gates[12::16] *= 2.5
    gates[13::16] *= -1
    gates[14::16] = 0.99
    gates[15::16, first] = float("nan")
    y = discounted_cumsum(x, gates, direction=direction)
    if direction == "right":
        x, gates, y = x.flip(1), gates.flip(1), y.flip(1)
    steps, sizes = [x[:, 0].float()], [x[:, 0].double().abs()]  # sizes: the same of magnitudes
    for t in range(1, length):
        value, gate = x[:, t].double(), gates[:, t].double()
        steps.append((value + gate * steps[-1].double()).float())
        sizes.append(value.abs() + gate.abs() * sizes[-1])
    expected, size = torch.stack(steps, 1), torch.stack(sizes, 1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.to(dtype).isinf())
    found, wanted = (each.double().where(y.isfinite(), 0.0) for each in (y, expected))
    budget = torch.finfo(dtype).eps * wanted.abs() + 1e-5 * size.where(size.isfinite(), 0.0) + 1e-7
    assert bool(((found - wanted).abs() <= budget).all())


@pytest.mark.parametrize("direction", ["left", "right"])
def test_a_long_column_of_ones(direction: str) -> None:
    """Nothing a carry in float alone would lose: sums of columns beyond what half precision is carried in float for,
    and digits of a gamma near 1."""
    for columns in (15_000, 256, 17_001, 17_002, 255):  # serial, shared by few warps, and of any alignment
        y = discounted_cumsum(torch.ones(5000, columns, device="cuda"), 0.999, dim=0, direction=direction)[:, ::50]
        y = y if direction == "left" else y.flip(0)
        expected = (1 - 0.999 ** torch.arange(1, 5001, dtype=torch.float64)) / (1 - 0.999)
        assert (y.double().cpu() - expected.unsqueeze(1)).abs().max() <= 3e-4
    for dtype in (torch.bfloat16, torch.float16):
        for length in (4096, 5000):
            x = torch.full((length, 30_016), 2.0**-4, dtype=dtype, device="cuda")
            y = discounted_cumsum(x, 1.0, dim=0, direction=direction)
            last = y[-1] if direction == "left" else y[0]
            assert bool((last == torch.tensor(length * 2.0**-4).to(dtype).cuda()).all())


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("special", ["inf", "nan", "zero gates", "large gates", "a NaN as the first gate"])
@pytest.mark.parametrize("length", [300_001, 400_000])
def test_long_rows_with_special_values(length: int, special: str, direction: str) -> None:
    """Two rows on many blocks: what is not finite goes as far as the recurrence takes it, and no farther."""
    x, gates = torch.randn(2, length, device="cuda"), torch.empty(2, length, device="cuda").uniform_(0.9, 0.999)
    first = 0 if direction == "left" else length - 1
    if special == "inf":
        x[0, length // 2] = float("inf")
    elif special == "nan":
        x[0, length // 3] = float("nan")
    elif special == "zero gates":
        gates[0, ::1000] = 0
        x[0, 777] = 1e30
    elif special == "large gates":
        x[0, 4000:6000] = 0
        gates[0, 4990:5030] = 1e3
    else:
        gates[0, first] = float("nan")
    y = discounted_cumsum(x, gates, direction=direction).double().cpu()
    expected = discounted_cumsum(x.double().cpu(), gates.double().cpu(), direction=direction)
    finite = expected.isfinite() & (expected.abs() < torch.finfo(torch.float32).max)
    if special == "large gates":
        # Behind an overflow of float32 its recurrence stays infinite, that of a carry in float64 comes back.
        assert not y.isnan().any()
        assert bool((y.isfinite() <= finite).all())
        assert bool(y[1].isfinite().all())
        lost = finite & ~y.isfinite()
        assert lost.sum() <= 64
        finite &= ~lost
    assert torch.equal(y.isfinite(), finite)
    assert ((y - expected).abs() / (1 + expected.abs()))[finite].max() <= 1e-5
