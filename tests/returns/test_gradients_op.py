"""`dcs::_returns_gradients`, which the nodes of returns call: on CUDA kernels, elsewhere torch's operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import torch_dcs_ops  # noqa: F401  (registers the op)
from torch_dcs_ops.reference.returns import GradientsCall

EPS = torch.finfo(torch.float64).eps
OP = torch.ops.dcs._returns_gradients.default
NEEDS = ("need_rewards", "need_values", "need_next_values", "need_bootstrap_value")
FLOATS = ("of_advantages", "of_targets", "of_pg", "gamma", "trace", "rhos")
# name: what differs from a call of GAE with next values and flags.
FORMS: dict[str, dict[str, Any]] = {
    "gae": {},
    "gae, bootstrap value": {"has_next_values": False, "need_next_values": False, "need_bootstrap_value": True},
    "vtrace": {"of_advantages": None, "of_pg": "step", "rhos": "step", "gamma": "step", "lacks_after": None},
    "td_lambda": {"of_advantages": None, "has_own_values": False, "need_values": False, "gamma": "row", "trace": "row"},
    "discounted": {"of_advantages": None, "has_own_values": False, "trace_value": 1.0, "ends": None,
                   "lacks_after": None, "has_next_values": False, "need_next_values": False},
    "n_step": {"of_advantages": None, "has_own_values": False, "need_values": False, "n": 3},
    "n_step, bootstrap value": {"of_advantages": None, "has_next_values": False, "need_next_values": False,
                                "need_bootstrap_value": True, "n": 4, "gamma": "row"},
    "n_step of all results": {"of_pg": "step", "rhos": "step", "n": 3},
}  # fmt: skip


def make(form: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float64) -> GradientsCall:
    """On the CPU. Factors are at most 1, and away from where ratios are cut."""
    rows = shape[:dim] + shape[dim + 1 :]
    given = {
        "of_advantages": "step", "of_targets": "step", "of_pg": None, "gamma": None, "trace": None, "rhos": None,
        "ends": "step", "lacks_after": "step", "gamma_value": 0.99, "trace_value": 0.9, "clip_rho": 1.1, "clip_c": 1.0,
        "clip_pg": 1.3, "dim": dim, "n": None, "has_own_values": True, "has_next_values": True, "need_rewards": True,
        "need_values": True, "need_next_values": True, "need_bootstrap_value": False,
    } | FORMS[form]  # fmt: skip
    for name in FLOATS:
        if given[name] is not None:
            size = shape if given[name] == "step" else rows
            number = torch.randn(size) if name.startswith("of_") else 0.9 + 0.095 * torch.rand(size)
            given[name] = (number if name != "rhos" else number * 1.3).to(dtype)
    for name in ("ends", "lacks_after"):
        if given[name] is not None:
            given[name] = torch.rand(shape) < 0.05
    if given["ends"] is not None and given["lacks_after"] is not None:
        given["lacks_after"] = given["lacks_after"] & given["ends"]
    return GradientsCall(**given)  # type: ignore[arg-type]


def changed(call: GradientsCall, change: Any) -> GradientsCall:
    return GradientsCall(*(change(value) if isinstance(value, Tensor) else value for value in call))


def permuted(tensor: Tensor) -> Tensor:
    """The same values in the other order in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


@pytest.mark.parametrize(("layout", "dim"), [("dense", 0), ("permuted", 1)])
@pytest.mark.parametrize("form", ["gae, bootstrap value", "vtrace", "td_lambda", "n_step"])
@pytest.mark.each_value
def test_opcheck(device: str, form: str, layout: str, dim: int) -> None:
    call = changed(make(form, (4, 5), dim, torch.float32), lambda t: t.to(device))
    call = changed(call, permuted) if layout == "permuted" else call
    assert call.of_targets is not None
    for leaf in (call.of_targets, call.of_targets.detach().clone().requires_grad_()):
        result = opcheck(OP, call._replace(of_targets=leaf))
        assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (3, 0), (1, 1)], ids=str)
def test_opcheck_of_degenerate_shapes(device: str, shape: tuple[int, ...]) -> None:
    for form in ("gae, bootstrap value", "n_step"):
        result = opcheck(OP, changed(make(form, shape, 0), lambda t: t.to(device)))
        assert set(result.values()) == {"SUCCESS"}, result


def test_no_steps_give_a_bootstrap_value_no_weight(device: str) -> None:
    call = changed(make("gae, bootstrap value", (0, 3), 0), lambda t: t.to(device))
    assert torch.equal(OP(*call)[3], torch.zeros(3, device=device, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_only_what_is_needed(device: str, form: str) -> None:
    call = changed(make(form, (7, 3), 0), lambda t: t.to(device))
    whole = OP(*call)
    for needs in itertools.product((False, True), repeat=4):
        fewer = {name: need and getattr(call, name) for name, need in zip(NEEDS, needs, strict=True)}
        for need, part, all_of_it in zip(fewer.values(), OP(*call._replace(**fewer)), whole, strict=True):
            assert need or part.shape == (0,)
            # Which kernels make them depends on what is asked for: the same terms, in another order.
            if need:
                torch.testing.assert_close(part, all_of_it, rtol=8 * EPS, atol=8 * EPS)


@pytest.mark.parametrize("form", FORMS)
def test_derivatives(device: str, form: str) -> None:
    call = changed(make(form, (5, 3), 0), lambda t: t.to(device))
    names = [name for name in FLOATS if getattr(call, name) is not None]
    leaves = [getattr(call, name).requires_grad_() for name in names]

    def gradients(*values: Tensor) -> list[Tensor]:
        return [g for g in OP(*call._replace(**dict(zip(names, values, strict=True)))) if g.numel()]

    assert gradcheck(gradients, leaves)
    assert gradgradcheck(gradients, leaves)


SHAPES = {
    "rows": ((37, 300), 1), "columns": ((300, 37), 0), "few steps": ((9, 700), 0), "a plane": ((3, 70, 20), 1),
    "short rows": ((3000, 8), 1), "a long row": ((1, 30_001), 1), "few columns": ((9000, 2), 0),
    "many columns": ((20, 9000), 0),
}  # fmt: skip


# Of so many elements that a GPU's kernels for them take these; columns of more than a word in half precision alone.
LARGE_SHAPES = {
    "few columns": ((150_001, 2), 0), "rows of few columns": ((2, 90_000, 5), 1), "two steps": ((2, 811_001), 0),
    "two steps of pairs": ((2, 1_100_002), 0), "more columns": ((130_000, 17), 0),
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(device: str, shape: str, dtype: torch.dtype) -> None:
    check_against_float64(device, SHAPES[shape], dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE_SHAPES)
def test_large_shapes_against_float64(shape: str, dtype: torch.dtype) -> None:
    if shape in ("two steps of pairs", "more columns") and dtype.itemsize > 2:
        pytest.skip("other kernels take these columns of wider elements, which smaller shapes test")
    check_against_float64("cuda", LARGE_SHAPES[shape], dtype, [form for form in FORMS if "n_step" not in form])


def check_against_float64(
    device: str, shape: tuple[tuple[int, ...], int], dtype: torch.dtype, forms: Iterable[str] = FORMS
) -> None:
    # Rounded when it is stored, and at each of the 100 steps that a factor of 0.99 reaches; an n-step sum is shorter.
    stored, arithmetic = (torch.finfo(d).eps / 2 for d in (dtype, torch.promote_types(dtype, torch.float32)))
    for form in forms:
        narrow = make(form, *shape, dtype)
        exact = OP(*changed(narrow, lambda t: t.double() if t.is_floating_point() else t))
        found = OP(*changed(narrow, lambda t: t.to(device)))
        for name, gradient, wanted in zip(NEEDS, found, exact, strict=True):
            assert gradient.dtype == dtype
            if wanted.numel():
                error = (gradient.cpu().double() - wanted).abs() - 1.01 * stored * wanted.abs()
                assert error.max() <= 200 * arithmetic * wanted.abs().max().clamp(min=1.0), (form, name)
            assert gradient.shape == wanted.shape


def test_values_that_are_not_read_have_no_gradient(device: str) -> None:
    """Selected away, not multiplied by 0."""
    call = changed(make("gae", (6, 3), 0), lambda t: t.to(device))
    assert call.of_targets is not None
    call.of_targets[2] = torch.inf
    call = call._replace(lacks_after=torch.ones_like(call.of_targets, dtype=torch.bool))
    assert not OP(*call)[2].any()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_window_is_as_long_as_its_row(device: str, dim: int) -> None:
    call = changed(make("n_step", (7, 6), dim), lambda t: t.to(device))
    whole = OP(*call._replace(n=(7, 6)[dim]))
    for n in (8, 2**31, 2**53, 2**53 + 3, 2**63 - 1):
        assert all(map(torch.equal, OP(*call._replace(n=n)), whole)), n


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_discount_that_is_not_finite_stays_in_its_windows(device: str, bad: float) -> None:
    call = make("n_step", (20, 3), 0)._replace(gamma=torch.full((20, 3), 0.9, dtype=torch.float64), n=4)
    call = call._replace(lacks_after=torch.ones(20, 3, dtype=torch.bool), ends=torch.zeros(20, 3, dtype=torch.bool))
    assert call.gamma is not None
    call.gamma[10] = bad
    found = OP(*changed(call, lambda t: t.to(device)))[0].cpu()
    reached = torch.zeros(20, dtype=torch.bool)
    reached[11:14] = True
    assert torch.equal(~found.isfinite(), reached[:, None].expand(20, 3))


def test_refusals(device: str) -> None:
    call = changed(make("gae", (4, 5), 0), lambda t: t.to(device))
    with pytest.raises(RuntimeError, match="the gradient of a result must be given, got None"):
        OP(*call._replace(of_advantages=None, of_targets=None))
    with pytest.raises(RuntimeError, match="the gradient must be float16, bfloat16, float32 or float64, got int64"):
        OP(*call._replace(of_advantages=torch.ones(4, 5, dtype=torch.int64, device=device)))
    with pytest.raises(IndexError, match=r"dim must be in \[-2, 1\] for a 2-D input, got 2"):
        OP(*call._replace(dim=2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_refusals_of_the_kernels() -> None:
    call = changed(make("gae", (4, 5), 0), Tensor.cuda)
    with pytest.raises(RuntimeError, match="of_targets must have"):
        OP(*call._replace(of_targets=torch.ones(4, 4, device="cuda", dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="ends must be bool, got"):
        OP(*call._replace(ends=torch.ones(4, 5, device="cuda", dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="n must be at least 1, got 0"):
        OP(*call._replace(n=0))
