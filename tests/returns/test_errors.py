"""Bad arguments of returns: one sentence each, the same from public functions, the raw op and fakes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_dcs_ops import returns

OP = torch.ops.dcs._temporal_difference_scan.default
X = torch.ones(4, 3)
LAST = torch.ones(3)
DONE = torch.zeros(4, 3, dtype=torch.bool)


def call(**changes: Any) -> dict[str, Any]:
    return {"rewards": X, "values": X, "bootstrap_value": LAST, "terminated": DONE} | changes


# (arguments of gae, exception, sentence); those of `raw` are the op's own too. The functions promote dtypes.
PROMOTED = {"values of another dtype", "flags of another float", "bootstrap_value of another dtype"}
TABLE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "integer rewards": (
        call(rewards=X.long()),
        RuntimeError,
        "rewards must be float16, bfloat16, float32 or float64, got int64",
    ),
    "bool rewards": (
        call(rewards=DONE),
        RuntimeError,
        "rewards must be float16, bfloat16, float32 or float64, got bool",
    ),
    "complex rewards": (
        call(rewards=X + 0j),
        RuntimeError,
        "rewards must be float16, bfloat16, float32 or float64, got complex64",
    ),
    "rewards without time": (
        call(rewards=X[0, 0], values=X[0, 0], terminated=DONE[0, 0]),
        RuntimeError,
        "rewards must have a dimension of time, got a 0-D tensor",
    ),
    "values of another dtype": (
        call(values=X.double()),
        RuntimeError,
        "values must have rewards' dtype float32, got float64",
    ),
    "values of another shape": (
        call(values=torch.ones(5, 3)),
        RuntimeError,
        "values must have rewards' shape (4, 3), got (5, 3)",
    ),
    "next_values of another shape": (
        call(next_values=torch.ones(3), bootstrap_value=None),
        RuntimeError,
        "next_values must have rewards' shape (4, 3), got (3,)",
    ),
    "flags of another shape": (
        call(terminated=DONE[:3]),
        RuntimeError,
        "terminated must have rewards' shape (4, 3), got (3, 3)",
    ),
    "flags of one environment": (
        call(truncated=DONE[:, :1]),
        RuntimeError,
        "truncated must have rewards' shape (4, 3), got (4, 1)",
    ),
    "integer flags": (
        call(terminated=DONE.int()),
        RuntimeError,
        "terminated must be bool or have rewards' dtype float32, got int32",
    ),
    "flags of another float": (
        call(truncated=DONE.double()),
        RuntimeError,
        "truncated must be bool or have rewards' dtype float32, got float64",
    ),
    "bootstrap_value of another shape": (
        call(bootstrap_value=torch.ones(4)),
        RuntimeError,
        "bootstrap_value must broadcast to rewards' shape without dim 0, (3,), got (4,)",
    ),
    "bootstrap_value of another dtype": (
        call(bootstrap_value=LAST.double()),
        RuntimeError,
        "bootstrap_value must have rewards' dtype float32, got float64",
    ),
    "time_dim too large": (call(time_dim=2), IndexError, "time_dim must be in [-2, 1] for 2-D rewards, got 2"),
    "time_dim too small": (call(time_dim=-3), IndexError, "time_dim must be in [-2, 1] for 2-D rewards, got -3"),
    "integer gamma": (
        call(gamma=torch.tensor([1, 1, 1])),
        RuntimeError,
        "gamma must be a floating-point tensor, got int64",
    ),
    "gamma of steps": (
        call(gamma=torch.ones(4)),
        RuntimeError,
        "gamma must broadcast to rewards' shape without dim 0, (3,), to be per row, got (4,); per step it needs "
        "rewards' number of dimensions (2)",
    ),
    "gamma of another shape": (
        call(gamma=torch.ones(4, 2)),
        RuntimeError,
        "gamma must broadcast to rewards' shape (4, 3), got (4, 2)",
    ),
    "gamma of too many dimensions": (
        call(gamma=torch.ones(1, 4, 3)),
        RuntimeError,
        "gamma must have at most rewards' number of dimensions (2), got 3",
    ),
    "gamma on another device": (
        call(gamma=torch.ones(3, device="meta")),
        RuntimeError,
        "gamma must be on rewards' device cpu, got ",
    ),
    "values on another device": (
        call(values=torch.ones(4, 3, device="meta")),
        RuntimeError,
        "values must be on rewards' device cpu, got ",
    ),
    "sparse rewards": (
        call(rewards=X.to_sparse()),
        RuntimeError,
        "rewards must be a dense tensor, got the layout sparse_coo",
    ),
}  # fmt: skip

FUNCTIONS_ONLY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both": (call(next_values=X), RuntimeError, "bootstrap_value must be None with next_values, got both"),
    "neither": (
        call(bootstrap_value=None),
        RuntimeError,
        "next_values or bootstrap_value must be given, got neither",
    ),
    "gamma above 1": (
        call(gamma=1.01),
        ValueError,
        "gamma must be in [0, 1] unless check_discounts=False, got 1.01",
    ),
    "gamma below 0": (call(gamma=-0.1), ValueError, "gamma must be in [0, 1] unless check_discounts=False, got -0.1"),
    "gamma not a number": (
        call(gamma=float("nan")),
        ValueError,
        "gamma must be in [0, 1] unless check_discounts=False, got nan",
    ),
    "lambda above 1": (
        call(gae_lambda=2),
        ValueError,
        "gae_lambda must be in [0, 1] unless check_discounts=False, got 2",
    ),
    "gamma a string": (call(gamma="0.9"), TypeError, "gamma must be a real number or a tensor, got str"),
    "gamma complex": (call(gamma=0.9j), RuntimeError, "gamma must be a tensor to be complex, got the number 0.9j"),
    "rewards a list": (call(rewards=[1.0]), TypeError, "rewards must be a tensor, got list"),
    "flags a list": (call(terminated=[False]), TypeError, "terminated must be a tensor or None, got list"),
    "time_dim a string": (call(time_dim="0"), TypeError, "time_dim must be an integer, got str"),
    "no values": (call(values=None), RuntimeError, "values must be given for all but lambda-returns, got None"),
    "lambda of another shape": (
        call(gae_lambda=torch.ones(2)),
        RuntimeError,
        "gae_lambda must broadcast to rewards' shape without dim 0, (3,), to be per row, got (2,)",
    ),
}


def raw(arguments: dict[str, Any]) -> tuple[Any, ...]:
    names = ("rewards", "values", "next_values", "bootstrap_value", "terminated", "truncated", "gamma")
    dim = arguments.get("time_dim", 0)
    return (*(arguments.get(name) for name in names), 1.0, None, 0.9, None, 1.0, 1.0, 1.0, dim, True, True, False)


@pytest.mark.parametrize("case", [case for case in TABLE | FUNCTIONS_ONLY if case not in PROMOTED])
def test_sentences(case: str) -> None:
    arguments, exception, sentence = (TABLE | FUNCTIONS_ONLY)[case]
    with pytest.raises(exception, match=f"^gae: {re.escape(sentence)}"):
        returns.gae(**arguments)


@pytest.mark.parametrize("case", TABLE)
def test_the_raw_op_says_the_same(case: str) -> None:
    arguments, exception, sentence = TABLE[case]
    if case == "sparse rewards":
        with pytest.raises((RuntimeError, NotImplementedError)):
            OP(*raw(arguments))
        return
    with pytest.raises(exception, match=re.escape(f"_temporal_difference_scan: {sentence}")):
        OP(*raw(arguments))


@pytest.mark.parametrize("case", [case for case in TABLE if "device" not in case and "sparse" not in case])
def test_fakes_say_the_same(case: str) -> None:
    arguments, exception, sentence = TABLE[case]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        with pytest.raises(exception, match=re.escape(sentence)):
            OP(*raw(fakes))


NESTED = torch.nested.nested_tensor([torch.ones(4), torch.ones(3)])
OTHERS: dict[str, tuple[Any, type[Exception], str]] = {
    "n of 0": (
        lambda: returns.n_step_returns(X, n=0, next_values=X, terminated=None),
        RuntimeError,
        "n_step_returns: n must be at least 1, got 0",
    ),
    "n a float": (
        lambda: returns.n_step_returns(X, n=1.0, next_values=X, terminated=None),  # type: ignore[arg-type]
        TypeError,
        "n_step_returns: n must be an integer, got float",
    ),
    "n-step without values": (
        lambda: returns.n_step_returns(X, n=2, bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "n_step_returns: values must be given with bootstrap_value, got None",
    ),
    "n-step, lambda": (
        lambda: returns.n_step_returns(X, n=2, next_values=X, terminated=None, lambda_=1.5),
        ValueError,
        "n_step_returns: lambda_ must be in [0, 1] unless check_discounts=False, got 1.5",
    ),
    "td_lambda without values": (
        lambda: returns.td_lambda_returns(X, bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "td_lambda_returns: values must be given with bootstrap_value, got None",
    ),
    "discounted, both": (
        lambda: returns.discounted_returns(X, 0.9, next_values=X, bootstrap_value=LAST),
        RuntimeError,
        "discounted_returns: bootstrap_value must be None with next_values, got both",
    ),
    "discounted, flags": (
        lambda: returns.discounted_returns(X, 0.9, terminated=DONE[0]),
        RuntimeError,
        "discounted_returns: terminated must have rewards' shape (4, 3), got (3,)",
    ),
    "vtrace, rhos": (
        lambda: returns.vtrace(X, X, X[0], bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "vtrace: rhos must have rewards' shape (4, 3), got (3,)",
    ),
    "vtrace, threshold": (
        lambda: returns.vtrace(X, X, X, bootstrap_value=LAST, terminated=None, clip_rho_threshold=None),  # type: ignore[arg-type]
        TypeError,
        "vtrace: clip_rho_threshold must be a real number (math.inf does not clip), got NoneType",
    ),
    "retrace, q_values": (
        lambda: returns.retrace_returns(X, X[:2], X, next_values=X, terminated=None),
        RuntimeError,
        "retrace_returns: q_values must have rewards' shape (4, 3), got (2, 3)",
    ),
    "retrace, next_values": (
        lambda: returns.retrace_returns(X, X, X, next_values=None, terminated=None),  # type: ignore[arg-type]
        RuntimeError,
        "retrace_returns: next_values must be given, got None",
    ),
    "vtrace, a tensor as threshold": (
        lambda: returns.vtrace(X, X, X, bootstrap_value=LAST, terminated=None, clip_rho_threshold=X[0, 0]),  # type: ignore[arg-type]
        TypeError,
        "vtrace: clip_rho_threshold must be a real number (math.inf does not clip), got a tensor",
    ),
    "vtrace, a string as threshold": (
        lambda: returns.vtrace(X, X, X, bootstrap_value=LAST, terminated=None, clip_c_threshold="1"),  # type: ignore[arg-type]
        TypeError,
        "vtrace: clip_c_threshold must be a real number (math.inf does not clip), got str",
    ),
    "n_step_returns, a large n": (
        lambda: returns.n_step_returns(X, n=2**63, next_values=X, terminated=None),
        RuntimeError,
        "n_step_returns: n must be below 2**63, got 9223372036854775808",
    ),
    "gae, a list as gae_lambda": (
        lambda: returns.gae(X, X, bootstrap_value=LAST, terminated=None, gae_lambda=[0.9]),  # type: ignore[arg-type]
        TypeError,
        "gae: gae_lambda must be a real number or a tensor, got list",
    ),
    "gae, nested": (
        lambda: returns.gae(NESTED, NESTED, bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "gae: rewards must be a dense tensor, got a nested one",
    ),
    "gae, nested values": (
        lambda: returns.gae(X, NESTED, bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "gae: values must be a dense tensor, got a nested one",
    ),
    "gae, nested gamma": (
        lambda: returns.gae(X, X, bootstrap_value=LAST, terminated=None, gamma=NESTED),
        RuntimeError,
        "gae: gamma must be a dense tensor, got a nested one",
    ),
    "upgo, nested": (
        lambda: returns.upgo_returns(NESTED, NESTED, bootstrap_value=LAST, terminated=None),
        RuntimeError,
        "upgo_returns: rewards must be a dense tensor, got a nested one",
    ),
    "upgo, neither": (
        lambda: returns.upgo_returns(X, X, terminated=None),
        RuntimeError,
        "upgo_returns: next_values or bootstrap_value must be given, got neither",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_sentences_of_other_functions(case: str) -> None:
    function, exception, sentence = OTHERS[case]
    with pytest.raises(exception, match=f"^{re.escape(sentence)}"):
        function()


def test_lambda_returns_are_all_there_is_without_values() -> None:
    arguments = (X, None, X, None, None, None, None, 0.9, None, 0.9, None, 1.0, 1.0, 1.0, 0, True, True, False)
    with pytest.raises(RuntimeError, match="values must be given for all but lambda-returns"):
        OP(*arguments)


def test_unchecked_discounts() -> None:
    result = returns.discounted_returns(torch.ones(3), -2.0, check_discounts=False)
    assert result.tolist() == [3.0, -1.0, 1.0]
    assert returns.discounted_returns(torch.ones(3), torch.tensor(2.0)).tolist() == [7.0, 3.0, 1.0]


@pytest.mark.parametrize("value", [0.0, "a", [1.0], np.ones(3)], ids=str)
@pytest.mark.parametrize("name", ["td_lambda_returns", "vtrace", "n_step_returns", "gae", "upgo_returns"])
def test_a_bootstrap_value_of_another_type(name: str, value: object) -> None:
    operands = (X, X, X) if name == "vtrace" else (X, X)
    keywords = {"n": 2} if name == "n_step_returns" else {}
    sentence = f"{name}: bootstrap_value must be a tensor or None, got {type(value).__name__}"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        getattr(returns, name)(*operands, bootstrap_value=value, terminated=None, **keywords)


def test_a_dimension_of_time_that_is_no_integer() -> None:
    arguments: dict[str, Any] = {"bootstrap_value": X[0], "terminated": None}
    for name, keywords in (("gae", {}), ("n_step_returns", {"n": 2})):
        with pytest.raises(TypeError, match=f"{name}: time_dim must be an integer, got float32"):
            getattr(returns, name)(X, X, time_dim=np.float32(0.9), **arguments, **keywords)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("vtrace", {"rhos": None}, "rhos must be given, got None"),
        (
            "vtrace",
            {"clip_rho_threshold": float("nan")},
            "clip_rho_threshold must be a number to compare with, got nan",
        ),
        (
            "vtrace",
            {"clip_pg_rho_threshold": float("nan")},
            "clip_pg_rho_threshold must be a number to compare with, got nan",
        ),
        ("vtrace", {"clip_c_threshold": float("nan")}, "clip_c_threshold must be a number to compare with, got nan"),
        ("retrace_returns", {"rhos": None}, "rhos must be given, got None"),
        ("retrace_returns", {"next_values": None}, "next_values must be given, got None"),
    ],
)
def test_ratios_and_thresholds(name: str, changes: dict[str, Any], sentence: str) -> None:
    arguments = {"rhos": X, "next_values": X, "terminated": DONE} | changes
    with pytest.raises(RuntimeError, match=re.escape(f"{name}: {sentence}")):
        getattr(returns, name)(X, X, **arguments)
