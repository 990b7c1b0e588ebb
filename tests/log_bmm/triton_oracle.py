"""Data for the Triton kernels of log_bmm, max_bmm and sample_bmm, and their check against float64."""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

INF, NAN = math.inf, math.nan

# Of float32 at "highest": forward relative to max(1, |out|), gradients to the largest of them. Data of a larger scale
# have the rounding of log_s, a float32, in every weight.
OUT_ERROR = 1e-5
LOG_S_ERROR = 1e-6
GRADIENT_ERROR = 1e-6
SPREAD_ERROR = 2.0**-23

# A TF32 number is rounded by 2^-11; two are multiplied in S, three make a gradient, with an S of its own error.
TF32_OUT_ERROR = 2 * 2.0**-11
TF32_GRADIENT_ERROR = 4 * 2.0**-11


class Problem(NamedTuple):
    a: Tensor
    b: Tensor
    scale: float = 1.0


def normal(shape: tuple[int, int, int, int], scale: float) -> Problem:
    batch, rows, columns, terms = shape
    return Problem(torch.randn(batch, rows, terms) * scale, torch.randn(batch, terms, columns) * scale, scale)


def masked(problem: Problem, share: float) -> Problem:
    """Planted -inf, and a row and a column of nothing else."""
    a, b, scale = problem
    a[torch.rand(a.shape) < share] = -INF
    b[torch.rand(b.shape) < share] = -INF
    a[:, a.size(1) // 2] = -INF
    b[:, :, b.size(2) // 3] = -INF
    return Problem(a, b, scale)


def disjoint(problem: Problem) -> Problem:
    """Rows and columns that share no term, beside others that do."""
    a, b, scale = problem
    half = a.size(2) // 2
    a[:, ::2, half:] = -INF
    b[:, :half, 1::2] = -INF
    return Problem(a, b, scale)


def data(name: str, shape: tuple[int, int, int, int]) -> Problem:
    torch.manual_seed(0)
    match name:
        case "N(0, 1)" | "N(0, 10²)" | "N(0, 20²)" | "N(0, 30²)" | "N(0, 50²)":
            scale = {"N(0, 1)": 1.0, "N(0, 10²)": 10.0, "N(0, 20²)": 20.0, "N(0, 30²)": 30.0, "N(0, 50²)": 50.0}
            return normal(shape, scale[name])
        case "U(±1e3)" | "U(±1e4)":
            scale = float(name[3:-1])
            a, b, _ = normal(shape, 1.0)
            return Problem(a.uniform_(-scale, scale), b.uniform_(-scale, scale), scale)
        case "antipodal":
            # Each row's maximum is at the first term, each column's at the last: S is exp(-200).
            a, b, _ = normal(shape, 1.0)
            a[:, :, 0] += 200
            b[:, -1] += 200
            return Problem(a, b, 200.0)
        case "chain":
            # After a long chain: all far from 0, the differences are not. 2^17 has room for them in a float32.
            a, b, _ = normal(shape, 1.0)
            return Problem(-(2.0**17) + (a * 64).round() / 64, b)
        case "chain, antipodal":
            a, b, scale = data("antipodal", shape)
            return Problem(-(2.0**17) + (a * 64).round() / 64, 2.0**16 + (b * 64).round() / 64, scale)
        case "masked":
            return masked(normal(shape, 1.0), 0.3)
        case "masked, wide":
            # Half of the finite powers are floored: S is 0, or what the floor makes it, where it is not to be.
            return masked(normal(shape, 200.0), 0.3)
        case "masked rows, wide":
            a, b, scale = normal(shape, 200.0)
            a[:, :, ::2] = -INF
            return Problem(a, b, scale)
        case "disjoint":
            return disjoint(normal(shape, 1.0))
        case "disjoint, wide":
            return disjoint(normal(shape, 50.0))
        case "-1e30" | "lowest":
            # Finite masks, in a alone: of terms that all have one, a float32 log_s does not tell how many they are.
            a, b, _ = normal(shape, 1.0)
            lowest = -1e30 if name == "-1e30" else torch.finfo(torch.float32).min
            a[:, a.size(1) // 2] = lowest
            a[:, ::3, :3] = lowest
            return Problem(a, b)
        case "specials":
            a, b, scale = masked(normal(shape, 10.0), 0.1)
            a[:, 1, 3], a[:, 4, 0], b[:, 0, 2], b[:, -1, -1] = INF, NAN, NAN, INF
            return Problem(a, b, scale)
    raise ValueError(name)


FINITE = [
    "N(0, 1)", "N(0, 10²)", "N(0, 20²)", "N(0, 30²)", "N(0, 50²)", "U(±1e3)", "U(±1e4)", "antipodal", "chain",
    "chain, antipodal",
]  # fmt: skip
MASKED = ["masked", "masked, wide", "masked rows, wide", "disjoint", "disjoint, wide", "-1e30", "lowest"]


class Expected(NamedTuple):
    out: Tensor
    log_s: Tensor
    weights: Tensor  # (B, I, K, J)


def expected(a: Tensor, b: Tensor) -> Expected:
    """What the contract says, term by term in float64; around the maxima, for what lies far from 0."""
    a, b = a.double(), b.double()
    if a.size(2) == 0:
        nothing = a.new_full((a.size(0), a.size(1), b.size(2)), -INF)
        return Expected(nothing, nothing, a.unsqueeze(3) + b.unsqueeze(1))
    plain = (a.unsqueeze(3) + b.unsqueeze(1)).logsumexp(2)
    r, c = largest(a, 2), largest(b, 1)
    terms = (a - r).unsqueeze(3) + (b - c).unsqueeze(1)
    usual = plain.isfinite()
    log_s = torch.where(usual, terms.logsumexp(2), torch.where(plain == -INF, plain, plain - r - c))
    # 0 without anything to weigh, and NaN beside inf or NaN.
    otherwise = torch.where(plain == -INF, 0.0, NAN).unsqueeze(2)
    weights = torch.where(usual.unsqueeze(2), (terms - log_s.unsqueeze(2)).exp(), otherwise)
    return Expected(torch.where(usual, r + c + log_s, plain), log_s, weights)


def largest(x: Tensor, dim: int) -> Tensor:
    top = x.amax(dim, keepdim=True)
    return torch.where(top == -INF, 0.0, top)


def gradients(weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    # Where there is no weight no gradient comes in either, a NaN included.
    terms = torch.where(weights == 0, 0.0, weights * grad.double().unsqueeze(2))
    return terms.sum(3), terms.sum(1)


def assert_close(actual: Tensor, reference: Tensor, allowed: Tensor | float) -> None:
    """Each error within `allowed`; NaN and infinities where the reference has them."""
    assert actual.shape == reference.shape
    actual = actual.cpu().double()
    assert torch.equal(actual.isnan(), reference.isnan())
    settled = (actual == reference) | actual.isnan()
    error = torch.where(settled, 0.0, (actual - reference).abs())
    wrong = error > allowed
    assert not wrong.any(), f"{(error / allowed)[wrong].max():.2f} times the error that is allowed"


def rounding(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one rounding to a half; the interpreter cuts bfloat16 off where a GPU rounds."""
    if dtype not in (torch.float16, torch.bfloat16):
        return torch.zeros_like(reference)
    unit = torch.finfo(dtype).eps * (1.0 if INTERPRETED else 0.5)
    return reference.abs().nan_to_num(0.0, 0.0, 0.0) * unit


def finite_largest(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def on_device(x: Tensor) -> Tensor:
    # Strides are kept: Tensor.to keeps those of dense tensors only.
    if not GPU:
        return x
    length = x.untyped_storage().nbytes() // x.element_size()
    storage = x.as_strided((length,), (1,), 0).to(DEVICE)
    return storage.as_strided(x.size(), x.stride(), x.storage_offset())


def check(
    launchers: ModuleType, problem: Problem, grad: Tensor | None = None, precision: str = "highest",
    needs: tuple[tuple[bool, bool], ...] = ((True, True),),
) -> None:  # fmt: skip
    """Forward and backward."""
    a, b, scale = problem
    dtype = a.dtype
    reference = expected(a, b)
    wide = dtype == torch.float64
    out_error, log_s_error, gradient_error = OUT_ERROR, LOG_S_ERROR, max(GRADIENT_ERROR, SPREAD_ERROR * scale)
    if wide:
        out_error, log_s_error, gradient_error = (
            error * 2.0**-29 for error in (out_error, log_s_error, gradient_error)
        )
    elif precision != "highest":
        out_error = log_s_error = TF32_OUT_ERROR
        gradient_error = max(TF32_GRADIENT_ERROR, gradient_error)

    moved_a, moved_b = on_device(a), on_device(b)
    out, log_s = launchers.log_bmm(moved_a, moved_b, precision)
    assert out.dtype == dtype
    assert log_s.dtype == (torch.float64 if wide else torch.float32)
    assert out.is_contiguous()
    assert log_s.is_contiguous()
    rounded = reference.out.to(dtype if wide else torch.float32)  # what is beyond float32 is infinite
    infinite = rounded.isinf() & reference.out.isfinite()
    reference_out = torch.where(infinite, rounded.double(), reference.out)
    assert_close(out, reference_out, out_error * reference_out.abs().clamp(min=1) + rounding(reference_out, dtype))
    assert_close(log_s, reference.log_s, log_s_error * reference.log_s.abs().clamp(min=1))

    grad = torch.randn(out.shape).to(dtype) if grad is None else grad
    both = gradients(reference.weights, grad)
    for need_a, need_b in needs:
        results = launchers.log_bmm_backward(on_device(grad), moved_a, moved_b, log_s, precision, need_a, need_b)
        for result, correct, needed in zip(results, both, (need_a, need_b), strict=True):
            assert result.dtype == dtype
            assert result.is_contiguous()
            if needed:
                assert_close(result, correct, gradient_error * finite_largest(correct) + rounding(correct, dtype))
            else:
                assert result.shape == (0,)
