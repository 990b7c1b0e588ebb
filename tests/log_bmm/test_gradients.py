"""Derivatives of log_bmm, its private ops and max_bmm, of any order, in both modes, and under torch.func."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from torch_dcs_ops import log_bmm, max_bmm, sample_bmm

from log_bmm.oracle import INF, naive
from support.selection import slow

BATCH = 3
Function = Callable[..., Tensor]


def operands(
    device: str, *, masked: bool = False, lead: tuple[int, ...] = (2,), sizes: tuple[int, int, int] = (3, 4, 5)
) -> tuple[Tensor, Tensor]:
    rows, terms, columns = sizes
    a = torch.randn(*lead, rows, terms, dtype=torch.float64)
    b = torch.randn(*lead, terms, columns, dtype=torch.float64)
    if masked:
        # A masked row and column, an element whose supports do not meet, and single ones.
        a[..., 1, :] = b[..., :, 2] = -INF
        a[..., 0, :2] = b[..., 2:, 0] = -INF
        a[..., 2, 3] = -INF
    return a.to(device).requires_grad_(), b.to(device).requires_grad_()


def private(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.dcs._log_bmm(a, b, "highest")[0]
    return out


def finite(f: Function) -> Function:
    """Without the results that are -inf, of which finite differences are NaN."""

    def run(*args: Tensor) -> Tensor:
        out = f(*args)
        return torch.where(out == -INF, 0, out)

    return run


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", [log_bmm, private])
def test_gradcheck(device: str, function: Function, masked: bool) -> None:
    args = operands(device, masked=masked)
    # Where an operand is -inf, a difference of it is none: the finite ones are looked at.
    places = [x.isfinite() for x in args]

    def of_finite(*values: Tensor) -> Tensor:
        return finite(function)(*(torch.where(p, v, -INF) for p, v in zip(places, values, strict=True)))

    values = tuple(torch.where(p, x.detach(), 0).requires_grad_() for p, x in zip(places, args, strict=True))
    assert gradcheck(of_finite, values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(of_finite, values, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


def test_masked_gradients_are_0(device: str) -> None:
    a, b = operands(device, masked=True)
    first = torch.autograd.grad(log_bmm(a, b).nan_to_num(neginf=0).pow(2).sum(), (a, b), create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (a, b))
    for gradients in (first, second):
        for gradient, operand in zip(gradients, (a, b), strict=True):
            assert not gradient.isnan().any()
            assert not gradient[operand == -INF].any()


GIVEN = list(itertools.product((False, True), repeat=3))


# By default every pair of two of them, given or not.
@pytest.mark.parametrize("over", [0, 1, 2])
@pytest.mark.parametrize("given", [given if sum(given) % 2 == 0 else slow(given) for given in GIVEN], ids=str)
@pytest.mark.each_value
def test_the_products_are_closed(device: str, given: tuple[bool, bool, bool], over: int) -> None:
    # A difference for every element, and for every pair of them.
    a, b = operands(device, sizes=(2, 3, 2))
    _, log_s = torch.ops.dcs._log_bmm(a.detach(), b.detach(), "highest")
    shapes = (a.shape, log_s.shape, b.shape)
    factors = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    leaves = [factor for factor, use in zip(factors, given, strict=True) if use]

    def function(a: Tensor, b: Tensor, *leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        # log_s of these very operands: it is a function of them, not an input.
        _, log_s = torch.ops.dcs._log_bmm(a, b, "highest")
        result: Tensor = torch.ops.dcs._log_bmm_product(a, b, log_s, *(next(rest) if g else None for g in given), over)
        return result

    assert gradcheck(function, (a, b, *leaves), check_forward_ad=True)
    assert gradgradcheck(function, (a, b, *leaves), check_fwd_over_rev=True)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_the_gradient_is_differentiable(device: str, needs: tuple[bool, bool]) -> None:
    a, b = operands(device, sizes=(2, 3, 2))
    grad = torch.randn(2, 2, 2, dtype=torch.float64, device=device, requires_grad=True)

    def function(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        _, log_s = torch.ops.dcs._log_bmm(a, b, "highest")
        both = torch.ops.dcs._log_bmm_backward(grad, a, b, log_s, "highest", *needs)
        return tuple(gradient for gradient, need in zip(both, needs, strict=True) if need)

    assert gradcheck(function, (grad, a, b), check_forward_ad=True)
    assert gradgradcheck(function, (grad, a, b), check_fwd_over_rev=True)


def test_third_derivative(device: str) -> None:
    a, b = operands(device)

    def third(f: Function) -> Any:
        first = torch.autograd.grad(f(a, b).pow(2).sum(), (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in second), (a, b))

    torch.testing.assert_close(third(log_bmm), third(naive))


def test_one_operand_alone(device: str) -> None:
    a, b = operands(device)
    for wanted in (a, b):
        fixed = [x if x is wanted else x.detach() for x in (a, b)]
        got = torch.autograd.grad(log_bmm(*fixed).pow(2).sum(), wanted)
        torch.testing.assert_close(got, torch.autograd.grad(naive(*fixed).pow(2).sum(), wanted))


def loss(f: Function) -> Function:
    return lambda *args: f(*args).pow(3).sum()


def squares(tensors: Any) -> Tensor:
    return sum(tensor.square().sum() for tensor in tensors)  # type: ignore[return-value]


def tangents(args: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(a.shape, generator=generator, dtype=a.dtype).to(a.device) for a in args)


def dual(f: Function, args: Any) -> Any:
    with forward_ad.dual_level():
        out = f(*[forward_ad.make_dual(a, t) for a, t in zip(args, tangents(args), strict=True)])
        return tuple(forward_ad.unpack_dual(out))


def reverse_over_dual(f: Function, args: Any) -> Any:
    args = [a.clone().requires_grad_() for a in args]
    with forward_ad.dual_level():
        out = f(*[forward_ad.make_dual(a, t) for a, t in zip(args, tangents(args), strict=True)])
        primal, tangent = forward_ad.unpack_dual(out)
        return torch.autograd.grad(tangent.square().sum() + primal.pow(3).sum(), args)


def jvp(f: Function, args: Any) -> Any:
    return func.jvp(f, tuple(args), tangents(args))


def unshifted(a: Tensor, b: Tensor) -> Tensor:
    """torch.logsumexp cannot be differentiated by autograd over dual numbers."""
    return (a.unsqueeze(-1) + b.unsqueeze(-3)).exp().sum(-2).log()


BOTH = (0, 1)
TRANSFORMS: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda f, x: func.grad(loss(f), BOTH)(*x),
    "grad of grad": lambda f, x: func.grad(lambda *y: sum(g.pow(2).sum() for g in func.grad(loss(f), BOTH)(*y)), BOTH)(
        *x
    ),
    "vjp": lambda f, x: func.vjp(f, *x)[1](naive(*x)),
    "jvp": jvp,
    "jvp of jvp": lambda f, x: func.jvp(lambda *y: jvp(f, y)[1], tuple(x), tangents(x)),
    "jvp of grad": lambda f, x: func.jvp(func.grad(loss(f), BOTH), tuple(x), tangents(x)),
    "grad of jvp": lambda f, x: func.grad(lambda *y: jvp(f, y)[1].pow(2).sum(), BOTH)(*x),
    "jacfwd": lambda f, x: func.jacfwd(f, BOTH)(*x),
    "jacrev": lambda f, x: func.jacrev(f, BOTH)(*x),
    "hessian": lambda f, x: func.hessian(loss(f), BOTH)(*x),
    "jacrev of jacfwd": lambda f, x: func.jacrev(func.jacfwd(loss(f), BOTH), BOTH)(*x),
    "linearize": lambda f, x: func.linearize(f, *x)[1](*tangents(x)),
    "dual numbers": dual,
    "autograd over dual numbers": reverse_over_dual,
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("function", [log_bmm, private])
def test_transforms(device: str, function: Function, name: str) -> None:
    args = tuple(x.detach() for x in operands(device))
    torch.testing.assert_close(TRANSFORMS[name](function, args), TRANSFORMS[name](unshifted, args))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_max_bmm(device: str, name: str) -> None:
    args = tuple(x.detach() for x in operands(device))

    def value(a: Tensor, b: Tensor) -> Tensor:
        return max_bmm(a, b)[0]

    torch.testing.assert_close(TRANSFORMS[name](value, args), TRANSFORMS[name](naive_max, args))


def test_max_bmm_gradcheck(device: str) -> None:
    args = operands(device)
    assert gradcheck(lambda a, b: max_bmm(a, b)[0], args, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda a, b: max_bmm(a, b)[0].pow(2), args)
    a, b = args
    values, indices = max_bmm(a[0], b)  # broadcast
    assert not indices.requires_grad
    right = (a[0].unsqueeze(-1) + b.unsqueeze(-3)).max(-2)
    assert torch.equal(indices, right.indices)
    got = torch.autograd.grad(values.pow(2).sum(), (a, b))
    torch.testing.assert_close(got, torch.autograd.grad(right.values.pow(2).sum(), (a, b)))
    private_values, _ = torch.ops.dcs._max_bmm(a, b)
    assert private_values.requires_grad


# Logical shapes under vmap, as torch.matmul takes them.
VMAP_SHAPES = [
    ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)),
    ((4,), (2, 4, 5)), ((2, 3, 4), (4,)), ((6, 1, 3, 4), (2, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), VMAP_SHAPES, ids=str)
@pytest.mark.parametrize("where", [(0, 0), (0, None), (None, 0), (-1, 1), (1, None)], ids=str)
def test_vmap(device: str, where: tuple[int | None, int | None], first: Any, second: Any) -> None:
    drawn = [torch.randn(BATCH, *shape, dtype=torch.float64, device=device) for shape in (first, second)]
    where = tuple(p if p != 1 or len(s) > 0 else 0 for p, s in zip(where, (first, second), strict=True))  # type: ignore[assignment]
    batched = [x[0] if p is None else x.movedim(0, p) for x, p in zip(drawn, where, strict=True)]
    samples = [[x[0] if p is None else x[i] for x, p in zip(drawn, where, strict=True)] for i in range(BATCH)]

    def together(f: Any) -> Any:
        return func.vmap(f, where)(*batched)

    torch.testing.assert_close(together(log_bmm), torch.stack([log_bmm(*s) for s in samples]))
    values, indices = together(max_bmm)
    torch.testing.assert_close(values, torch.stack([max_bmm(*s)[0] for s in samples]))
    assert torch.equal(indices, torch.stack([max_bmm(*s)[1] for s in samples]))
    uniforms = torch.rand(BATCH, *log_bmm(*samples[0]).shape, dtype=torch.float64, device=device)
    op = torch.ops.dcs.sample_bmm
    right = torch.stack([op(*s, u) for s, u in zip(samples, uniforms, strict=True)])
    assert torch.equal(func.vmap(op, (*where, 0))(*batched, uniforms), right)
    right = torch.stack([op(*s, uniforms[0]) for s in samples])
    assert torch.equal(func.vmap(op, (*where, None))(*batched, uniforms[0]), right)
    alone = func.vmap(op, (None, None, 0))(*samples[0], uniforms)
    assert torch.equal(alone, torch.stack([op(*samples[0], u) for u in uniforms]))


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap_with_other_transforms(device: str) -> None:
    a, b = (x.detach() for x in operands(device, lead=(BATCH, 2)))
    for f in (log_bmm, private):
        torch.testing.assert_close(
            func.vmap(func.grad(loss(f), BOTH))(a, b), func.vmap(func.grad(loss(naive), BOTH))(a, b)
        )
        if f is log_bmm:
            torch.testing.assert_close(func.vmap(func.vmap(f))(a, b), naive(a, b))
        right = func.vmap(func.hessian(loss(naive), BOTH))(a, b)
        torch.testing.assert_close(func.vmap(func.hessian(loss(f), BOTH))(a, b), right)
        per_sample = func.vmap(func.grad(lambda a, b, f=f: loss(f)(a, b)), (0, None))(a, b[0])
        torch.testing.assert_close(per_sample, func.vmap(func.grad(loss(naive)), (0, None))(a, b[0]))


def test_vmap_checks_the_logical_shapes(device: str) -> None:
    a = torch.randn(4, 2, 3, device=device)
    with pytest.raises(RuntimeError, match=r"log_bmm: b must have as many rows as a has columns, 3, got 2"):
        func.vmap(log_bmm)(a, a)
    with pytest.raises(RuntimeError, match=r"uniforms must have the shape \(2, 2\), got \(2,\)"):
        func.vmap(torch.ops.dcs.sample_bmm)(a, a.transpose(1, 2), torch.rand(4, 2, device=device))


def test_samples_have_no_gradient(device: str) -> None:
    a, b = operands(device)
    assert not sample_bmm(a, b).requires_grad
    assert func.jacrev(lambda a: log_bmm(a, b) + sample_bmm(a, b))(a).shape == (2, 3, 5, 2, 3, 4)


def test_samples_repeat(device: str) -> None:
    a, b = operands(device)

    def drawn(seed: int) -> Tensor:
        return sample_bmm(a, b.repeat(1, 1, 50), generator=torch.Generator(device).manual_seed(seed))

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(3)
    first = sample_bmm(a, b)
    torch.manual_seed(3)
    assert torch.equal(first, sample_bmm(a, b))


def test_max_bmm_saves_its_indices_alone(device: str) -> None:
    a, b = operands(device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        values, indices = max_bmm(a, b)
    # The views that give the operands three dimensions save nothing either.
    assert [(t.dtype, t.data_ptr()) for t in saved] == [(torch.int64, indices.data_ptr())]
    expected = torch.autograd.grad(naive_max(a, b).pow(2).sum(), (a, b))
    loss = values.pow(2).sum()
    with torch.no_grad():
        a.add_(1)
        b.zero_()
    torch.testing.assert_close(torch.autograd.grad(loss, (a, b)), expected)


def naive_max(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) + b.unsqueeze(-3)).amax(-2)
