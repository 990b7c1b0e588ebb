"""A compiled graph's log-probabilities whose memory_budget has room for all logits: the backward takes the forward's.

Three products with both gradients, for any number of ids and with the entropy, and for what is made of them: the
compiled policy loss. By default, and eagerly, nothing is saved, and a backward makes the logits again. Ignored rows are
multiplied with the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs
from .._common import flops
from .._common.autograd import any_requires_grad, below
from .._common.validate import fail
from . import id_ops
from . import ids as driver
from .ids import IdUpstream
from .kernel_ops import gemm_flops
from .plan import single_chunk

_OPTIONS = len(HeadOptions._fields)
Results = tuple[Tensor, ...]


def _forward(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any) -> Results:
    options, (need_entropy, need_predictions) = HeadOptions(*rest[:_OPTIONS]), rest[_OPTIONS:]
    id_ops.check_call(input, linear_weight, target, linear_bias, options)
    ids, _ = id_ops.with_ids(input, target)
    saved: list[Tensor] = []
    with torch._C._AutoDispatchBelowAutograd():
        log_probs, *results = driver.forward(
            input, linear_weight, ids, linear_bias, options, need_entropy, need_predictions, saved
        )
    return log_probs.view(target.shape), *results, *saved


def _forward_fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any
) -> Results:
    options, (need_entropy, need_predictions) = HeadOptions(*rest[:_OPTIONS]), rest[_OPTIONS:]
    results = id_ops.full_fake(
        input, linear_weight, target, linear_bias=linear_bias, need_entropy=need_entropy,
        need_predictions=need_predictions, **options._asdict(),
    )  # fmt: skip
    rows, classes, dtype = input.shape[:-1].numel(), linear_weight.size(0), options.logits_dtype or input.dtype
    room = input.new_empty((rows, single_chunk(rows, classes, dtype).stride), dtype=dtype)
    return *results, room[:, :classes]


def _backward(grad_log_probs: Any, grad_entropy: Any, grad_lse: Any, logits: Tensor, *rest: Any) -> Results:
    upstream, (input, linear_weight, ids, linear_bias) = IdUpstream(grad_log_probs, grad_entropy, grad_lse), rest[:4]
    options, needs = HeadOptions(*rest[4 : 4 + _OPTIONS]), Needs(*rest[4 + _OPTIONS :])
    id_ops.check_backward(upstream, input, linear_weight, ids, linear_bias, options)
    if logits.shape != (input.shape[:-1].numel(), linear_weight.size(0)):
        fail(id_ops.OP, f"logits must be those of every row, got the shape {tuple(logits.shape)}")
    with torch._C._AutoDispatchBelowAutograd():
        return driver.backward(upstream, input, linear_weight, ids, linear_bias, options, needs, logits)


def _backward_fake(*args: Any) -> Results:
    return id_ops.backward_fake(*args[:3], *args[4:])


def _autograd(op: Any) -> Any:
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if any_requires_grad(*args):
            fail(id_ops.OP, "tensors must not require a gradient here: linear_log_probs is the differentiable op")
        return below(op, keyset, *args)

    return kernel


def _forward_flops(input_shape: Any, linear_weight_shape: Any, *args: Any, **keywords: Any) -> int:
    return gemm_flops(input_shape, linear_weight_shape)


def _backward_flops(*args: Any, out_shape: Any = None, **keywords: Any) -> int:
    needs = Needs(*args[-3:])
    return (needs.input + needs.linear_weight) * gemm_flops(args[4], args[5])


for _name, _kernel, _fake, _op, _formula in (
    ("_linear_log_probs_logits", _forward, _forward_fake, _registry.linear_log_probs_logits, _forward_flops),
    ("_linear_log_probs_of_logits", _backward, _backward_fake, _registry.linear_log_probs_of_logits, _backward_flops),
):
    _registry.LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _autograd(_op), "Autograd", with_keyset=True)
    flops.register(getattr(torch.ops.dcs, _name), _formula)
