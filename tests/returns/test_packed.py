"""Packed sequences (`cu_seqlens`) against a call for each of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from torch_dcs_ops import returns

from returns.oracle import make_batch
from support.selection import slow

# Empty sequences at both ends and in the middle, one of one step.
OFFSETS = (0, 0, 4, 5, 5, 11, 17, 17)
LENGTH, COUNT, ROWS = OFFSETS[-1], len(OFFSETS) - 1, 5
TIMED = ("rewards", "values", "next_values", "terminated", "truncated", "rhos")
Rollout = dict[str, Any]


def rollout(device: str, convention: str = "bootstrap", rates: str = "number", dim: int = 0) -> Rollout:
    batch = make_batch((LENGTH, ROWS), rates=rates)
    x: Rollout = {name: getattr(batch, name) for name in TIMED if name != "next_values" or convention == "next"}
    x |= {"gamma": batch.gamma, "lambda_": batch.trace}
    if convention == "bootstrap":
        x["bootstrap_value"] = torch.randn(COUNT, ROWS, dtype=torch.float64)
    x = {name: tensor.movedim(0, dim).to(device) for name, tensor in x.items()}
    if rates == "number":
        x |= {"gamma": 0.9, "lambda_": 0.8}
    if rates == "row":
        x |= {name: x[name].select(dim, 0) for name in ("gamma", "lambda_")}
    return x | {"time_dim": dim}


def offsets(device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(OFFSETS, device=device, dtype=dtype)


def gae(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name != "rhos"}
    return returns.gae(x.pop("rewards"), x.pop("values"), gae_lambda=x.pop("lambda_"), **x)


def td_lambda(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name != "rhos"}
    return (returns.td_lambda_returns(x.pop("rewards"), x.pop("values"), **x),)


def vtrace(x: Rollout) -> tuple[Tensor, ...]:
    x = dict(x)
    return returns.vtrace(x.pop("rewards"), x.pop("values"), x.pop("rhos"), **x)


def discounted(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name not in ("values", "lambda_", "rhos")}
    return (returns.discounted_returns(x.pop("rewards"), x.pop("gamma"), **x),)


def n_step(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name != "rhos"}
    return (returns.n_step_returns(x.pop("rewards"), x.pop("values"), n=3, **x),)


def upgo(x: Rollout) -> tuple[Tensor, ...]:
    x = {name: value for name, value in x.items() if name not in ("rhos", "lambda_")}
    return (returns.upgo_returns(x.pop("rewards"), x.pop("values"), **x),)


def retrace(x: Rollout) -> tuple[Tensor, ...]:
    x = dict(x)
    return (returns.retrace_returns(x.pop("rewards"), x.pop("values"), x.pop("rhos"), **x),)


FUNCTIONS: dict[str, Callable[[Rollout], tuple[Tensor, ...]]] = {
    "gae": gae, "td_lambda": td_lambda, "vtrace": vtrace, "discounted": discounted, "n_step": n_step,
    "upgo": upgo,
}  # fmt: skip


CONVENTIONS = [(name, convention) for name in FUNCTIONS for convention in ("bootstrap", "next")]
MASKED = ("gae", "td_lambda", "discounted")
# What the others have, and more.
SOME = ["vtrace", "discounted", "n_step", slow("gae"), slow("td_lambda")]


def loop(function: Callable[[Rollout], tuple[Tensor, ...]], x: Rollout) -> tuple[Tensor, ...]:
    dim, parts = x["time_dim"], []
    for index, (start, stop) in enumerate(itertools.pairwise(OFFSETS)):

        def part(name: str, value: Any, index: int = index, start: int = start, stop: int = stop) -> Any:
            if name == "bootstrap_value":
                return value.select(dim, index)
            has_time = isinstance(value, Tensor) and value.dim() == 2
            return value.narrow(dim, start, stop - start) if has_time else value

        parts.append(function({name: part(name, value) for name, value in x.items()}))
    return tuple(torch.cat(results, dim) for results in zip(*parts, strict=True))


@pytest.mark.parametrize("rates", ["number", "row", "step"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "convention"), [*CONVENTIONS, ("retrace", "next")])
def test_a_loop(device: str, name: str, dim: int, rates: str, convention: str) -> None:
    function = FUNCTIONS.get(name, retrace)
    x = rollout(device, convention, rates, dim)
    expected = loop(function, x)
    for dtype in (torch.int32, torch.int64):
        results = function(x | {"cu_seqlens": offsets(device, dtype)})
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    for changes in ({"truncated": None}, {"terminated": None}, {"time_dim": dim - 2}):
        one = x | changes
        results = function(one | {"cu_seqlens": offsets(device)})
        torch.testing.assert_close(results, loop(function, one), rtol=1e-12, atol=1e-12)


def test_without_any_bootstrap(device: str) -> None:
    x = rollout(device, "neither")
    results = discounted(x | {"cu_seqlens": offsets(device)})
    torch.testing.assert_close(results, loop(discounted, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_stays_in_its_sequence(device: str, name: str) -> None:
    """Also one in the value that an empty sequence would bootstrap with."""
    x = rollout(device) | {"terminated": None, "truncated": None}
    x["bootstrap_value"][[0, 3, 6]] = float("nan")
    x["rewards"][7] = float("nan")
    for result in FUNCTIONS[name](x | {"cu_seqlens": offsets(device)}):
        rows = result.isnan().any(1).nonzero().flatten().tolist()
        assert rows == [5, 6, 7]


@pytest.mark.parametrize("name", SOME)
def test_gradients(device: str, name: str) -> None:
    x = rollout(device, "bootstrap", "row") | {"cu_seqlens": offsets(device)}
    used = ["rewards", "bootstrap_value", "gamma"]
    used += [] if name == "discounted" else ["values", "lambda_"]
    used += ["rhos"] if name == "vtrace" else []
    if name == "vtrace":
        x["rhos"] = x["rhos"] * 1.01 + 0.003  # away from the bounds that they are cut to

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return FUNCTIONS[name](x | dict(zip(used, leaves, strict=True)))

    leaves = [x[n].clone().requires_grad_() for n in used]
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("name", SOME)
def test_compiled(device: str, name: str, fresh_compiler: None) -> None:
    x = rollout(device) | {"cu_seqlens": offsets(device)}
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for gamma in (0.9, 0.7):
        x["gamma"] = gamma
        torch.testing.assert_close(compiled(x), FUNCTIONS[name](x))
    leaves = [x["rewards"].clone().requires_grad_() for _ in range(2)]
    for function, leaf in zip((compiled, FUNCTIONS[name]), leaves, strict=True):
        function(x | {"rewards": leaf})[0].sin().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_meta_and_autocast(device: str, name: str) -> None:
    x = rollout(device) | {"cu_seqlens": offsets(device)}
    expected = FUNCTIONS[name](x)
    half = {n: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in x.items()}
    for results, dtype in ((FUNCTIONS[name](half), torch.bfloat16),):
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == dtype
            if name != "upgo":  # which turns where an error that is rounded changes its sign
                torch.testing.assert_close(result.double(), wanted, rtol=0.1, atol=0.1)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert all(r.dtype == torch.float32 for r in FUNCTIONS[name](half))
    meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in x.items()}
    assert all(r.is_meta and r.shape == (LENGTH, ROWS) for r in FUNCTIONS[name](meta))


def test_no_steps(device: str) -> None:
    x = torch.ones(0, 3, device=device)
    cu = torch.zeros(3, dtype=torch.int32, device=device)
    results = returns.gae(x, x, bootstrap_value=torch.ones(2, 3, device=device), terminated=None, cu_seqlens=cu)
    assert all(r.shape == (0, 3) for r in results)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sentences(name: str) -> None:
    x, cu = rollout("cpu"), offsets("cpu")
    op = name if name in ("gae", "vtrace") else f"{name}_returns"
    wrong: list[tuple[Rollout, type[Exception], str]] = [
        ({"cu_seqlens": list(OFFSETS)}, TypeError, "cu_seqlens must be a tensor or None, got list"),
        ({"cu_seqlens": cu.double()}, RuntimeError, "cu_seqlens must be int32 or int64, got float64"),
        ({"cu_seqlens": cu[:-2]}, RuntimeError, "cu_seqlens must end with the size along dim 0, 17, got 11"),
        (
            {"bootstrap_value": torch.ones(COUNT, dtype=torch.float64)},
            RuntimeError,
            "bootstrap_value must broadcast to rewards' shape with one for each sequence at dim 0, (7, 5), got (7,)",
        ),
        ({"truncated": x["truncated"][:4]}, RuntimeError, "truncated must have rewards' shape (17, 5), got (4, 5)"),
        ({"gamma": torch.ones(4)}, RuntimeError, "gamma must broadcast to rewards' shape without dim 0, (5,)"),
    ]
    for changes, exception, sentence in wrong:
        for masked in ({}, {"mask": x["terminated"]}) if name in MASKED else ({},):
            with pytest.raises(exception, match="^" + re.escape(f"{op}: {sentence}")):
                FUNCTIONS[name](x | {"cu_seqlens": cu} | masked | changes)


@pytest.mark.parametrize("convention", ["bootstrap", "next"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", MASKED)
def test_with_steps_that_do_not_count(device: str, name: str, dim: int, convention: str) -> None:
    x = rollout(device, convention, "number", dim)
    mask = torch.rand(LENGTH, ROWS, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0:4], mask[10], mask[11:16] = False, False, False  # a whole sequence, and the ends of others
    x["mask"] = mask.movedim(0, dim).to(device)
    for changed in ("rewards", "values"):
        x[changed] = x[changed].masked_fill(~x["mask"], float("nan"))
    results = FUNCTIONS[name](x | {"cu_seqlens": offsets(device)})
    for result, expected in zip(results, loop(FUNCTIONS[name], x), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert result[x["mask"]].isfinite().all()
