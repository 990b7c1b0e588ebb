"""Returns under autograd, torch.func, opcheck, autocast and the FLOP counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from torch_dcs_ops import returns

from returns.oracle import make_batch
from scan.oracle import LAYOUTS

OP = torch.ops.dcs._temporal_difference_scan.default
SHAPE = (6, 3)


def operands(device: str, rates: str = "row") -> dict[str, Tensor]:
    batch = make_batch(SHAPE, seed=4)
    tensors: dict[str, Tensor] = {name: tensor.to(device) for name, tensor in batch._asdict().items()}
    tensors["rhos"] = tensors["rhos"] * 1.01 + 0.003  # away from the bounds that they are cut to
    if rates == "row":
        tensors |= {"gamma": tensors["gamma"][0].clone(), "trace": tensors["trace"][0].clone()}
    return tensors


def ends(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"terminated": x["terminated"], "truncated": x["truncated"]}


# name: (function of operands, the operands that it differentiates)
FUNCTIONS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "discounted": (
        lambda x: returns.discounted_returns(x["rewards"], x["gamma"], bootstrap_value=x["bootstrap_value"], **ends(x)),
        ("rewards", "gamma", "bootstrap_value"),
    ),
    "gae": (
        lambda x: returns.gae(
            x["rewards"], x["values"], bootstrap_value=x["bootstrap_value"], gamma=x["gamma"], gae_lambda=x["trace"],
            **ends(x),
        ),
        ("rewards", "values", "bootstrap_value", "gamma", "trace"),
    ),
    "td_lambda": (
        lambda x: returns.td_lambda_returns(
            x["rewards"], next_values=x["next_values"], gamma=x["gamma"], lambda_=x["trace"], **ends(x)
        ),
        ("rewards", "next_values", "gamma", "trace"),
    ),
    "n_step": (
        lambda x: returns.n_step_returns(
            x["rewards"], n=3, next_values=x["next_values"], gamma=x["gamma"], lambda_=x["trace"], **ends(x)
        ),
        ("rewards", "next_values", "gamma", "trace"),
    ),
    "vtrace": (
        lambda x: returns.vtrace(
            x["rewards"], x["values"], x["rhos"], next_values=x["next_values"], gamma=x["gamma"], lambda_=x["trace"],
            clip_rho_threshold=1.1, clip_pg_rho_threshold=1.3, **ends(x),
        ),
        ("rewards", "values", "rhos", "next_values", "gamma", "trace"),
    ),
    "retrace": (
        lambda x: returns.retrace_returns(
            x["rewards"], x["values"], x["rhos"], next_values=x["next_values"], gamma=x["gamma"], lambda_=x["trace"],
            **ends(x),
        ),
        ("rewards", "values", "rhos", "next_values", "gamma", "trace"),
    ),
    "upgo": (
        lambda x: returns.upgo_returns(
            x["rewards"], x["values"], next_values=x["next_values"], gamma=x["gamma"], **ends(x)
        ),
        ("rewards", "next_values", "gamma"),
    ),
}  # fmt: skip


def of_leaves(name: str, x: dict[str, Tensor]) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The function of the operands that it differentiates alone, and these."""
    function, names = FUNCTIONS[name]
    return lambda *leaves: function(x | dict(zip(names, leaves, strict=True))), tuple(x[n] for n in names)


@pytest.mark.parametrize("rates", ["row", "step"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(device: str, name: str, rates: str) -> None:
    function, leaves = of_leaves(name, operands(device, rates))
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=rates == "row")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(device: str, name: str) -> None:
    function, leaves = of_leaves(name, operands(device))
    assert gradgradcheck(function, tuple(leaf.clone().requires_grad_() for leaf in leaves))


def test_the_derivative_in_lambda_at_1(device: str) -> None:
    """There the factor of the next values is 0, and its derivative is not."""
    x = operands(device)
    x["trace"] = torch.ones_like(x["trace"])
    function, leaves = of_leaves("td_lambda", x)
    assert gradcheck(function, tuple(leaf.clone().requires_grad_() for leaf in leaves))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_under_gradients_are_those_without(device: str, name: str) -> None:
    function, leaves = of_leaves(name, operands(device))
    with_graph = function(*(leaf.clone().requires_grad_() for leaf in leaves))
    with torch.no_grad():
        without = function(*leaves)
    torch.testing.assert_close(with_graph, without, rtol=1e-12, atol=1e-12)


def test_flags_cut_gradients_of_what_is_not_a_number(device: str) -> None:
    rewards = torch.ones(4, 1, device=device)
    values = torch.tensor([[1.0], [1.0], [float("nan")], [1.0]], device=device, requires_grad=True)
    done = torch.tensor([[False], [True], [False], [False]], device=device)
    advantages, _ = returns.gae(rewards, values, bootstrap_value=values.detach()[0], terminated=done)
    (gradient,) = torch.autograd.grad(advantages[:2].sum(), values)
    assert gradient[:2].isfinite().all()
    assert not gradient[2:].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func(device: str, name: str) -> None:
    function, leaves = of_leaves(name, operands(device))

    def loss(*args: Tensor) -> Tensor:
        results = function(*args)
        return sum(r.pow(2).sum() for r in (results if isinstance(results, tuple) else (results,)))  # type: ignore[return-value]

    everything = tuple(range(len(leaves)))
    gradients = func.grad(loss, everything)(*leaves)
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*tracked), tracked))
    tangents = tuple(torch.ones_like(leaf) for leaf in leaves)
    value, tangent = func.jvp(loss, leaves, tangents)
    torch.testing.assert_close(value, loss(*leaves))
    torch.testing.assert_close(tangent, sum((g.sum() for g in gradients), torch.zeros((), device=device).double()))
    with forward_ad.dual_level():
        dual = loss(*(forward_ad.make_dual(leaf, t) for leaf, t in zip(leaves, tangents, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize("rates", ["row", "step"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(device: str, name: str, rates: str) -> None:
    x = operands(device, rates)
    function, leaves = of_leaves(name, x)
    batches = [torch.stack([leaf, leaf * 0.5, leaf * 0.25], dim=k % 2) for k, leaf in enumerate(leaves)]
    for batched in (range(len(leaves)), (0,), (len(leaves) - 1,)):
        dims = tuple(k % 2 if k in batched else None for k in range(len(leaves)))
        args = [batches[k] if k in batched else leaf for k, leaf in enumerate(leaves)]
        results = func.vmap(function, in_dims=dims)(*args)
        for i in range(3):
            alone = function(*(a.select(d, i) if d is not None else a for a, d in zip(args, dims, strict=True)))
            torch.testing.assert_close(
                tuple(r[i] for r in results) if isinstance(results, tuple) else results[i], alone
            )


def test_vmap_of_flags_and_of_gradients(device: str) -> None:
    x = operands(device)
    flags = torch.stack([x["terminated"], x["truncated"], torch.zeros_like(x["truncated"])])

    def loss(values: Tensor, done: Tensor) -> Tensor:
        return returns.gae(x["rewards"], values, bootstrap_value=values[0], terminated=done)[0].pow(2).sum()

    gradients = func.vmap(func.grad(loss), in_dims=(None, 0))(x["values"], flags)
    for i in range(3):
        torch.testing.assert_close(gradients[i], func.grad(loss)(x["values"], flags[i]))


@pytest.mark.each_value
@pytest.mark.parametrize(("dim", "layout"), [(k % 2, layout) for k, layout in enumerate(LAYOUTS)])
@pytest.mark.parametrize("number", range(3))
def test_opcheck(device: str, number: int, dim: int, layout: str) -> None:
    """All four tests; sizes are made symbolic as well."""
    change = LAYOUTS[layout]

    def leaf(*size: int, positive: bool = False) -> Tensor:
        drawn = torch.rand(size) if positive else torch.randn(size)
        return change(drawn.to(device)).detach().requires_grad_()

    shape, rows = (4, 5), (5 - dim,)
    flags = [change((torch.rand(shape) < 0.3).to(device)) for _ in range(2)]
    calls: list[tuple[Any, ...]] = [
        (leaf(*shape), leaf(*shape), None, leaf(*rows), *flags, leaf(*rows), 1.0, leaf(*shape, positive=True), 1.0,
         leaf(*shape, positive=True), 1.1, 1.0, 1.3, dim, True, True, True),
        (leaf(*shape), None, leaf(*shape), None, flags[0].float(), None, None, 0.9, None, 1.0, None, 1.0, 1.0, 1.0, dim,
         False, True, False),
        (leaf(*shape).detach(), leaf(*shape).detach(), None, None, None, flags[1], None, 0.9, None, 0.9, None, 1.0, 1.0,
         1.0, dim, True, False, False),
    ]  # fmt: skip
    result = opcheck(OP, calls[number])
    assert set(result.values()) == {"SUCCESS"}, result
    assert len(result) == 4


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (3, 0), (1, 1)], ids=str)
def test_opcheck_of_degenerate_shapes(device: str, shape: tuple[int, ...]) -> None:
    x, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    last = torch.randn(shape[1:], device=device)
    for call in ((x, v, None, last), (x.detach(), v.detach(), v.detach(), None)):
        result = opcheck(
            OP, (*call, x > 0, None, None, 0.9, None, 0.9, v.detach().exp(), 1.0, 1.0, 1.0, 0, True, True, True)
        )
        assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_widens(device: str, dtype: torch.dtype) -> None:
    rewards, values = torch.randn(5, 3, device=device), torch.randn(5, 3, device=device, dtype=dtype)
    with torch.autocast(device, dtype=dtype if device == "cuda" else torch.bfloat16):
        advantages, targets = returns.gae(rewards.to(dtype), values, bootstrap_value=values[0], terminated=None)
    assert advantages.dtype == targets.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        mixed, _ = returns.gae(rewards, values, bootstrap_value=values[0], terminated=None)
    expected, _ = returns.gae(rewards, values.float(), bootstrap_value=values[0].float(), terminated=None)
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("name", ["n_step_returns", "retrace_returns", "upgo_returns"])
def test_autocast_widens_what_is_more_than_the_fused_op(device: str, name: str) -> None:
    batch = make_batch((5, 3), seed=7)
    x, v, n, rhos = (t.to(device, torch.bfloat16) for t in (batch[0], batch[1], batch[2], batch[8]))
    done = torch.zeros(5, 3, device=device, dtype=torch.bfloat16)
    done[2, 1] = 1

    def call(x: Tensor, v: Tensor, n: Tensor, rhos: Tensor, done: Tensor) -> Tensor:
        arguments: dict[str, tuple[Any, ...]] = {"retrace_returns": (x, v, rhos)}
        options = {"n": 3} if name == "n_step_returns" else {}
        function: Callable[..., Tensor] = getattr(returns, name)
        return function(*arguments.get(name, (x, v)), next_values=n, terminated=done, **options)

    expected = call(*(t.float() for t in (x, v, n, rhos, done)))
    with torch.autocast(device, dtype=torch.bfloat16):
        # All in half precision, and a value in float32 as a float32 critic gives it.
        for result in (call(x, v, n, rhos, done), call(x, v, n.float(), rhos, done)):
            assert result.dtype == torch.float32
            torch.testing.assert_close(result, expected)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x, v, n, rhos, done)
    torch.testing.assert_close(compiled, expected)


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(5, 3)
    with FlopCounterMode(display=False) as counter:
        returns.gae(x, x, bootstrap_value=x[0], terminated=x > 1)
    assert counter.get_total_flops() == 6 * 15


def test_subclasses_and_modes_see_the_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.randn(5, 3)
    with Watch():
        returns.gae(x, x, bootstrap_value=x[0], terminated=None)
    assert OP in seen
    results = returns.gae(x.to("meta"), x.to("meta"), bootstrap_value=x[0].to("meta"), terminated=None)
    assert all(r.is_meta and r.shape == x.shape for r in results)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_meta_tensors(name: str) -> None:
    function, names = FUNCTIONS[name]
    x = {key: tensor.to("meta") for key, tensor in operands("cpu").items()}
    for recorded in (False, True):
        leaves = {key: x[key].requires_grad_(recorded) for key in names}
        results = function(x | leaves)
        results = results if isinstance(results, tuple) else (results,)
        assert all(r.is_meta and r.shape == SHAPE and r.dtype == torch.float64 for r in results)
        assert all(r.requires_grad == recorded for r in results)
