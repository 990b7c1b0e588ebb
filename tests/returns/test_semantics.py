"""Returns against definitions written out in float64: every convention, and every way that episodes end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import returns

from returns import oracle
from returns.oracle import Batch, arguments, every_pattern, make_batch, on_policy

CONVENTIONS = ("next", "bootstrap")


def placed(batch: Batch, device: str, time_dim: int) -> dict[str, Tensor]:
    return {name: getattr(batch, name).movedim(0, time_dim).to(device) for name in ("rewards", "values", "rhos")}


def discounted(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    gamma = k.pop("gamma")
    k.pop("lambda_")
    return returns.discounted_returns(x["rewards"], gamma, **k)


def gae(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    return returns.gae(x["rewards"], x["values"], gae_lambda=k.pop("lambda_"), **k)


def td_lambda(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    return returns.td_lambda_returns(x["rewards"], None if "next_values" in k else x["values"], **k)


def n_step(n: int, x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    return returns.n_step_returns(x["rewards"], None if "next_values" in k else x["values"], n=n, **k)


def vtrace(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    k = {"clip_rho_threshold": 1.1, "clip_pg_rho_threshold": 1.3} | k
    return returns.vtrace(x["rewards"], x["values"], x["rhos"], **k)


def retrace(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    return returns.retrace_returns(x["rewards"], x["values"], x["rhos"], **k)


def upgo(x: dict[str, Tensor], k: dict[str, Any]) -> Any:
    k.pop("lambda_")
    return returns.upgo_returns(x["rewards"], x["values"], **k)


def loops(convention: str, *functions: Callable[..., float]) -> Callable[[Batch], tuple[Tensor, ...]]:
    return lambda batch: tuple(batch.loop(function, convention) for function in functions)


# name: (function, convention, what is expected)
CASES: dict[str, tuple[Callable[..., Any], str, Callable[[Batch], tuple[Tensor, ...]]]] = {
    "discounted, next": (discounted, "next", loops("next", oracle.discounted)),
    "discounted, bootstrap": (
        discounted,
        "bootstrap",
        loops("bootstrap", lambda e, t: oracle.discounted(oracle.without_values(e), t)),
    ),
    "discounted, neither": (discounted, "neither", loops("neither", oracle.discounted)),
    "retrace": (retrace, "next", loops("next", oracle.retrace)),
}
for _name in CONVENTIONS:
    CASES[f"gae, {_name}"] = (
        gae,
        _name,
        lambda batch, name=_name: loops(name, oracle.advantage, oracle.target)(on_policy(batch)),  # type: ignore[misc]
    )
    CASES[f"td_lambda, {_name}"] = (td_lambda, _name, loops(_name, oracle.lambda_return))
    CASES[f"vtrace, {_name}"] = (vtrace, _name, loops(_name, oracle.target, oracle.pg_advantage))
    for _n in (1, 2, 3, 100):
        CASES[f"{_n}-step, {_name}"] = (
            functools.partial(n_step, _n),
            _name,
            loops(_name, functools.partial(oracle.n_step, n=_n)),
        )
CASES["upgo, bootstrap"] = (upgo, "bootstrap", loops("bootstrap", oracle.upgo))
CASES["upgo, next"] = (upgo, "next", loops("next", oracle.upgo))


def check(results: Any, expected: tuple[Tensor, ...], time_dim: int) -> None:
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.movedim(time_dim, 0).cpu(), wanted, rtol=1e-9, atol=1e-9)


@functools.cache
def planted() -> Batch:
    """Five steps with every of the 1024 ways that they may end in, so also first, last, and one after another."""
    return make_batch((5, 4**5), flags=every_pattern(5), seed=3)


@functools.cache
def expected_of_planted(name: str) -> tuple[Tensor, ...]:
    return CASES[name][2](planted())


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("flags", ["bool", "float"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.each_pair
def test_every_pattern_of_ends(device: str, name: str, flags: str, time_dim: int) -> None:
    function, convention, _ = CASES[name]
    keywords = arguments(planted(), convention, device, time_dim=time_dim)
    if flags == "float":
        keywords |= {key: keywords[key].double() for key in ("terminated", "truncated")}
    results = function(placed(planted(), device, time_dim), keywords)
    check(results, expected_of_planted(name), time_dim)


@pytest.mark.parametrize("rates", ["number", "row", "step"])
@pytest.mark.parametrize("shape", [(7,), (4, 3), (9, 2, 3), (1, 4), (33, 20)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.each_pair
def test_shapes_and_discounts(device: str, name: str, shape: tuple[int, ...], rates: str) -> None:
    function, convention, reference = CASES[name]
    batch = make_batch(shape, rates=rates, seed=len(shape))
    expected = reference(batch)
    for time_dim in range(len(shape)):
        keywords = arguments(batch, convention, device, rates=rates, time_dim=time_dim)
        check(function(placed(batch, device, time_dim), keywords), expected, time_dim)


@pytest.mark.parametrize("missing", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("name", CASES)
def test_flags_that_are_not_given(device: str, name: str, missing: str) -> None:
    function, convention, reference = CASES[name]
    batch = make_batch((9, 5), seed=8)
    keywords = arguments(batch, convention, device)
    names = ("terminated", "truncated") if missing == "both" else (missing,)
    keywords |= dict.fromkeys(names)
    absent = {key: torch.zeros_like(batch.terminated) for key in names}
    check(function(placed(batch, device, 0), keywords), reference(batch._replace(**absent)), 0)


def test_gae_returns_are_lambda_returns_where_values_agree(device: str) -> None:
    batch = make_batch((40, 6), rates="number")
    after = torch.cat((batch.values[1:], batch.bootstrap_value[None]))
    batch = batch._replace(next_values=after, truncated=torch.zeros_like(batch.truncated))
    by_next = gae(placed(batch, device, 0), arguments(batch, "next", device, rates="number"))
    by_last = gae(placed(batch, device, 0), arguments(batch, "bootstrap", device, rates="number"))
    lambda_returns = td_lambda(placed(batch, device, 0), arguments(batch, "next", device, rates="number"))
    torch.testing.assert_close(by_next, by_last)
    torch.testing.assert_close(by_next[1], lambda_returns)


def test_without_clipping_and_with_ratios_of_1_vtrace_is_gae(device: str) -> None:
    batch = on_policy(make_batch((40, 6)))
    x, keywords = placed(batch, device, 0), arguments(batch, "bootstrap", device)
    infinite = float("inf")
    targets, _ = returns.vtrace(
        x["rewards"], x["values"], x["rhos"], clip_rho_threshold=infinite, clip_pg_rho_threshold=infinite, **keywords
    )
    torch.testing.assert_close(targets, gae(x, keywords)[1])


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("clip_c", [0.4, 2.0, float("inf")])
def test_the_bound_of_the_trace(device: str, clip_c: float, recorded: bool) -> None:
    batch = make_batch((9, 20), seed=6)
    x = placed(batch, device, 0)
    x["values"].requires_grad_(recorded)
    results = vtrace(x, arguments(batch, "next", device) | {"clip_c_threshold": clip_c})
    functions = [functools.partial(f, clip_c=clip_c) for f in (oracle.target, oracle.pg_advantage)]
    check(tuple(r.detach() for r in results), loops("next", *functions)(batch), 0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_empty(device: str, name: str, shape: tuple[int, ...]) -> None:
    function, convention, _ = CASES[name]
    batch = make_batch(shape)
    results = function(placed(batch, device, 0), arguments(batch, convention, device))
    for result in results if isinstance(results, tuple) else (results,):
        assert result.shape == shape


def test_retrace_takes_lambda_of_the_step_and_the_ratio_of_the_next(device: str) -> None:
    q, after, rhos = (torch.tensor(x, device=device) for x in ([9.0, 2.0], [3.0, 5.0], [7.0, 0.25]))
    gamma, lambda_ = (torch.tensor(x, device=device) for x in ([0.5, 0.75], [0.8, 0.3]))
    result = returns.retrace_returns(
        torch.ones(2, device=device), q, rhos, next_values=after, terminated=None, gamma=gamma, lambda_=lambda_
    )
    last = 1 + 0.75 * 5
    expected = torch.tensor([1 + 0.5 * (3 + 0.8 * 0.25 * (last - 2)), last], device=device)
    torch.testing.assert_close(result, expected)
