"""The nodes of the log-semiring family in autograd's graph, for both modes and any order of derivative.

With W the softmax over k (0 where everything is masked) and, for x like a, y like the result and z like b,

    A(y, z)[i, k] = sum_j W y z,   B(x, y)[k, j] = sum_i W x y,   C(x, z)[i, j] = sum_k W x z

(`_log_bmm_product` with `over` 2, 0 and 1), the gradients of log_bmm are A(g, 1) and B(1, g), its tangent is
C(da, 1) + C(1, db), and the derivatives of the three sums are made of the three sums again: see `_Sums`. log_s is a
function of a and b throughout, never an input of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from .._common.autograd import Node, apply, below, levels_below, primals, run_below, tracked


class _Sums(NamedTuple):
    """The three sums of a call's W, and the derivative of W in direction (ta, tb), which is W·(ta + tb - o)."""

    a: Tensor
    b: Tensor
    log_s: Tensor
    precision: str = "highest"

    def over_j(self, y: Tensor | None, z: Tensor | None) -> Tensor:
        return self.over(2, None, y, z)

    def over_i(self, x: Tensor | None, y: Tensor | None) -> Tensor:
        return self.over(0, x, y, None)

    def over_k(self, x: Tensor | None, z: Tensor | None) -> Tensor:
        return self.over(1, x, None, z)

    def over(self, over: int, x: Tensor | None, y: Tensor | None, z: Tensor | None) -> Tensor:
        if over == 2 and y is not None and z is None:
            return self.gradients(y, True, False)[0]
        if over == 0 and y is not None and x is None:
            return self.gradients(y, False, True)[1]
        result: Tensor = _registry.log_bmm_product(self.a, self.b, self.log_s, x, y, z, over)
        return result

    def gradients(self, y: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
        """(A(y, 1), B(1, y)): the op whose kernels are the fastest."""
        found: tuple[Tensor, Tensor] = _registry.log_bmm_backward(
            y, self.a, self.b, self.log_s, self.precision, need_a, need_b
        )
        return found

    def tangent(self, ta: Tensor | None, tb: Tensor | None) -> Tensor | None:
        """o, that of log_bmm's result."""
        parts = (None if ta is None else self.over_k(ta, None), None if tb is None else self.over_k(None, tb))
        return _sum(*parts)


class LogBmmFunction(Node):
    """(out, log_s). Saves a, b and log_s."""

    @staticmethod
    def forward(
        ctx: Any, keyset: torch._C.DispatchKeySet, a: Tensor, b: Tensor, precision: str
    ) -> tuple[Tensor, Tensor]:
        out, log_s = run_below(_registry.log_bmm_kernel, keyset, a, b, precision)
        ctx.set_materialize_grads(False)
        ctx.precision = precision
        ctx.mark_non_differentiable(log_s)
        ctx.save_for_backward(a, b, log_s)
        ctx.save_for_forward(a, b, log_s)
        return out, log_s

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 4
        _, need_a, need_b, _ = ctx.needs_input_grad
        a, b, log_s = ctx.saved_tensors
        grad_a, grad_b = _registry.log_bmm_backward(grad, a, b, log_s, ctx.precision, need_a, need_b)
        return None, grad_a if need_a else None, grad_b if need_b else None, None

    @staticmethod
    def jvp(ctx: Any, _: Any, ta: Tensor | None, tb: Tensor | None, __: Any) -> tuple[Any, Any]:
        with levels_below():
            return _Sums(*primals(ctx.saved_tensors)).tangent(ta, tb), None


class LogBmmBackwardFunction(Node):
    """(A(g, 1), B(1, g)), one of them without elements where it is not needed."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        grad: Tensor,
        a: Tensor,
        b: Tensor,
        log_s: Tensor,
        precision: str,
        need_a: bool,
        need_b: bool,
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = run_below(
            _registry.log_bmm_backward, keyset, grad, a, b, log_s, precision, need_a, need_b
        )
        ctx.set_materialize_grads(False)
        ctx.precision, ctx.needs = precision, (need_a, need_b)
        ctx.mark_non_differentiable(*(g for g, need in zip(found, ctx.needs, strict=True) if not need))
        ctx.save_for_backward(grad, a, b, log_s, *found)
        ctx.save_for_forward(grad, a, b, log_s, *found)
        return found

    @staticmethod
    def backward(ctx: Any, x: Tensor | None, z: Tensor | None) -> tuple[Any, ...]:
        need_a, need_b = ctx.needs
        x, z = x if need_a else None, z if need_b else None
        if x is None and z is None:
            return (None,) * 8
        _, need_grad, wants_a, wants_b, *_ = ctx.needs_input_grad
        g, a, b, log_s, grad_a, grad_b = ctx.saved_tensors
        sums = _Sums(a, b, log_s, ctx.precision)
        # The derivative of sum W x g + sum W g z: in g that of the tangent's form, which a's and b's need as well.
        in_g = sums.tangent(x, z)
        assert in_g is not None
        in_a = in_b = None
        if wants_a or wants_b:
            in_a, in_b = sums.gradients(-g * in_g, wants_a, wants_b)
        if wants_a:
            in_a = _sum(in_a, None if x is None else x * grad_a, None if z is None else sums.over_j(g, z))
        if wants_b:
            in_b = _sum(in_b, None if x is None else sums.over_i(x, g), None if z is None else z * grad_b)
        return (
            None, in_g if need_grad else None, in_a if wants_a else None, in_b if wants_b else None,
            None, None, None, None,
        )  # fmt: skip

    @staticmethod
    def jvp(
        ctx: Any, _: Any, tg: Tensor | None, ta: Tensor | None, tb: Tensor | None, *rest: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        need_a, need_b = ctx.needs
        with levels_below():
            g, a, b, log_s, grad_a, grad_b = primals(ctx.saved_tensors)
            sums = _Sums(a, b, log_s, ctx.precision)
            o = sums.tangent(ta, tb)
            in_y = _sum(tg, None if o is None else -g * o)
            first: Tensor | None = None
            second: Tensor | None = None
            if in_y is not None:
                first, second = sums.gradients(in_y, need_a, need_b)
            if need_a:
                first = _sum(first, None if ta is None else ta * grad_a, None if tb is None else sums.over_j(g, tb))
            if need_b:
                second = _sum(second, None if ta is None else sums.over_i(ta, g), None if tb is None else tb * grad_b)
            return first if need_a else None, second if need_b else None


class ProductFunction(Node):
    """One of the three sums. Its derivatives are those of the form sum W x y z, the upstream gradient in the result's
    place: A(y, z) in x, C(x, z) in y, B(x, y) in z, and through W, x·A(y, z) - A(y·C(x, z), 1) in a and
    z·B(x, y) - B(1, y·C(x, z)) in b."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        a: Tensor,
        b: Tensor,
        log_s: Tensor,
        x: Tensor | None,
        y: Tensor | None,
        z: Tensor | None,
        over: int,
    ) -> Tensor:
        result: Tensor = run_below(_registry.log_bmm_product, keyset, a, b, log_s, x, y, z, over)
        ctx.set_materialize_grads(False)
        ctx.over = over
        ctx.save_for_backward(a, b, log_s, x, y, z, result)
        ctx.save_for_forward(a, b, log_s, x, y, z, result)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Any, ...]:
        if upstream is None:
            return (None,) * 8
        _, need_a, need_b, _, need_x, need_y, need_z, _ = ctx.needs_input_grad
        a, b, log_s, x, y, z, result = ctx.saved_tensors
        sums, over = _Sums(a, b, log_s), ctx.over
        x, y, z = (upstream if over == index else t for index, t in ((2, x), (1, y), (0, z)))
        through_w = need_a or need_b
        # An operand in the result's place is not read.
        need_x, need_y, need_z = need_x and over != 2, need_y and over != 1, need_z and over != 0
        in_x: Any = result if over == 2 else sums.over_j(y, z) if need_x or need_a else None
        in_y: Any = result if over == 1 else sums.over_k(x, z) if need_y or through_w else None
        in_z: Any = result if over == 0 else sums.over_i(x, y) if need_z or need_b else None
        in_a: Any = None
        in_b: Any = None
        if through_w:
            in_a, in_b = sums.gradients(-_times(y, in_y), need_a, need_b)
        if need_a:
            in_a = in_a + _times(x, in_x)
        if need_b:
            in_b = in_b + _times(z, in_z)
        return (
            None, in_a if need_a else None, in_b if need_b else None, None, in_x if need_x else None,
            in_y if need_y else None, in_z if need_z else None, None,
        )  # fmt: skip

    @staticmethod
    def jvp(
        ctx: Any, _: Any, ta: Tensor | None, tb: Tensor | None, __: Any, tx: Tensor | None, ty: Tensor | None,
        tz: Tensor | None, ___: Any,
    ) -> Tensor | None:  # fmt: skip
        with levels_below():
            a, b, log_s, x, y, z, result = primals(ctx.saved_tensors)
            sums, over = _Sums(a, b, log_s), ctx.over
            parts = [
                None if tx is None or over == 2 else sums.over(over, tx, y, z),
                None if ty is None or over == 1 else sums.over(over, x, ty, z),
                None if tz is None or over == 0 else sums.over(over, x, y, tz),
            ]
            # Through W: the factor ta + tb - o, each part where the sum has its place, or in front of the sum.
            o = sums.tangent(ta, tb)
            if ta is not None:
                parts.append(ta * result if over == 2 else sums.over(over, _times(x, ta), y, z))
            if tb is not None:
                parts.append(tb * result if over == 0 else sums.over(over, x, y, _times(z, tb)))
            if o is not None:
                parts.append(-o * result if over == 1 else sums.over(over, x, _times(y, -o), z))
            return _sum(*parts)


def _times(operand: Tensor | None, factor: Tensor) -> Tensor:
    return factor if operand is None else operand * factor


def _sum(*parts: Tensor | None) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _register(name: str, op: Any, function: Any) -> None:
    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        return apply(function, keyset, *args) if tracked(*args) else below(op, keyset, *args)

    _registry.LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


_register("_log_bmm", _registry.log_bmm_kernel, LogBmmFunction)
_register("_log_bmm_backward", _registry.log_bmm_backward, LogBmmBackwardFunction)
_register("_log_bmm_product", _registry.log_bmm_product, ProductFunction)
