"""`dcs::_cross_entropy_rows_` for its tests: its implementations, its definitions in float64, its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the libraries)
from torch_dcs_ops import _native
from torch_dcs_ops.reference.linear_cross_entropy.rows import RowsCall

from support.triton_modules import triton_module

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
OP = torch.ops.dcs._cross_entropy_rows_.default
KERNELS = ["triton-cpu"] if INTERPRETED else ["op-cpu"] + (["op-cuda", "triton-cuda"] if GPU else [])
KINDS = (
    "plain", "bias", "weight", "smoothing", "weighted-smoothing", "softcap", "scale", "negative-scale", "z-loss",
    "grad-loss", "one-grad-loss", "grad-lse", "grad-entropy", "everything", "no-cap",
)  # fmt: skip


class Results(NamedTuple):
    loss: Tensor
    lse: Tensor
    predictions: Tensor
    entropy: Tensor


class Kernel:
    """An implementation: called with the op's arguments, by name; what is not given is off, but for the results."""

    def __init__(self, name: str, run: Callable[..., tuple[Tensor, ...]]) -> None:
        self.name, self.run = name, run
        self.device = name.rpartition("-")[2]
        # The reference rounds p_t before it takes log p_t: it is 0 for a certain target.
        self.is_reference = name == "op-cpu" and not _native.CPU_LIBRARY.loaded

    def __call__(self, logits: Tensor, target: Tensor, **keywords: Any) -> Results:
        results = {"gradient": True, "predictions": True, "entropy": True}
        return Results(*self.run(*RowsCall(logits, target, **results | keywords)))


def make_kernel(name: str) -> Kernel:
    if name.startswith("op"):
        return Kernel(name, OP)
    pytest.importorskip("triton")
    launchers = triton_module("linear_cross_entropy.rows")
    return Kernel(name, lambda *args: launchers.cross_entropy_rows_(RowsCall(*args)))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def values(
    logits: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, ignore_index: int,
    label_smoothing: float, softcap: float, logit_scale: float, z_loss: float,
) -> Results:  # fmt: skip
    """The definitions, differentiable, in the dtype of `logits`."""
    u = logit_scale * (logits if linear_bias is None else logits + linear_bias)
    z = softcap * torch.tanh(u / softcap) if softcap else u
    lse, log_p = z.logsumexp(1), z.log_softmax(1)
    w = torch.ones_like(z[0]) if weight is None else weight
    even = label_smoothing / z.size(1)
    if target.is_floating_point():
        valid = torch.ones_like(lse, dtype=torch.bool)
        q = (1 - label_smoothing) * target + even
    else:
        valid = target != ignore_index
        hot = torch.nn.functional.one_hot(torch.where(valid, target, 0), z.size(1)).to(z.dtype)
        q = (1 - label_smoothing) * hot + even
    loss = -(w * q * log_p).sum(1) + z_loss * lse * lse
    entropy = -(log_p.exp() * log_p).sum(1)
    return Results(
        *(torch.where(valid, value, 0) for value in (loss, lse)), z.argmax(1), torch.where(valid, entropy, 0)
    )


def oracle(dtype: torch.dtype, logits: Tensor, target: Tensor, options: dict[str, Any]) -> tuple[Results, Tensor]:
    """`values` and the gradient of their sum as the op defines it, all arithmetic in `dtype`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    options = {name: cast(value) for name, value in options.items()}
    grads = [options.get(name) for name in ("grad_loss", "grad_lse", "grad_entropy")]
    leaf = logits.to(dtype).clone().requires_grad_()
    results = values(
        leaf, cast(target), options.get("linear_bias"), options.get("weight"), options.get("ignore_index", -100),
        options.get("label_smoothing", 0.0), options.get("softcap", 0.0), options.get("logit_scale", 1.0),
        options.get("z_loss", 0.0),
    )  # fmt: skip
    total = (results.loss * (1 if grads[0] is None else grads[0])).sum()
    for grad, value in ((grads[1], results.lse), (grads[2], results.entropy)):
        if grad is not None:
            total = total + (grad * value).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return Results(*(value.detach() for value in results)), gradient


def error(value: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    norm = float(expected.double().norm())
    return float((value.double() - expected.double()).norm()) / (norm if norm > 0 else 1.0)


def make_logits(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    return (3 * torch.randn(rows, columns)).to(dtype).to(device)


def make_target(rows: int, columns: int, device: str) -> Tensor:
    target = torch.randint(columns, (rows,))
    target[rows // 2] = -100
    return target.to(device)


def make_options(kind: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(wide(dtype)).to(device)

    bias, weight = numbers(columns), numbers(columns).abs()
    table: dict[str, dict[str, Any]] = {
        "plain": {},
        "bias": {"linear_bias": bias},
        "weight": {"weight": weight},
        "smoothing": {"label_smoothing": 0.1},
        "weighted-smoothing": {"weight": weight, "label_smoothing": 0.3},
        "softcap": {"softcap": 5.0},
        "scale": {"logit_scale": 0.37},
        "negative-scale": {"logit_scale": -1.5},
        "z-loss": {"z_loss": 1e-2},
        "grad-loss": {"grad_loss": numbers(rows)},
        "one-grad-loss": {"grad_loss": numbers(1)},
        "grad-lse": {"grad_lse": numbers(rows)},
        "grad-entropy": {"grad_entropy": numbers(rows)},
        "everything": {
            "linear_bias": bias,
            "weight": weight,
            "label_smoothing": 0.2,
            "softcap": 8.0,
            "logit_scale": 1.3,
            "z_loss": 1e-3,
            "grad_loss": numbers(rows),
            "grad_lse": numbers(rows),
            "grad_entropy": numbers(rows),
        },
    }
    table["no-cap"] = {**table["everything"], "softcap": 0.0}
    return table[kind]
