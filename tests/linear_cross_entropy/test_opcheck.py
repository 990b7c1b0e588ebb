"""torch.library.opcheck, all four tests, on the ops of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops.reference.linear_cross_entropy.kl_div import Divergence
from torch_dcs_ops.reference.linear_cross_entropy.log_probs import HeadOptions
from torch_dcs_ops.reference.linear_cross_entropy.loss import Options

from linear_cross_entropy.oracle import Problem, leaf, make
from support.selection import slow

LOSS = torch.ops.dcs.linear_cross_entropy.default
AUX = torch.ops.dcs.linear_cross_entropy.aux
LOG_PROBS = torch.ops.dcs.linear_log_probs.default
LOG_PROBS_FULL = torch.ops.dcs.linear_log_probs.full
LOG_PROBS_FORWARD = torch.ops.dcs._linear_log_probs_forward.default
LOG_PROBS_BACKWARD = torch.ops.dcs._linear_log_probs_backward.default
TOP_K = torch.ops.dcs.linear_top_k.default
KL_DIV = torch.ops.dcs.linear_kl_div.default
KL_DIV_REDUCED = torch.ops.dcs.linear_kl_div.reduced
KL_DIV_FORWARD = torch.ops.dcs._linear_kl_div_forward.default
KL_DIV_BACKWARD = torch.ops.dcs._linear_kl_div_backward.default
FORWARD = torch.ops.dcs._linear_cross_entropy_forward.default
BACKWARD = torch.ops.dcs._linear_cross_entropy_backward.default
ROWS = torch.ops.dcs._cross_entropy_rows_.default

LAYOUTS: dict[str, Any] = {
    "contiguous": lambda t: t,
    "permuted": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t[:1].expand(t.shape),
}


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# The derivatives of these ops are taken by func.vjp, which torch 2.11 cannot trace in functional graphs.
TRACEABLE = ALL[:3] if torch.__version__.startswith("2.11.") else ALL


def check(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, utilities: tuple[str, ...] = ALL
) -> None:
    result = opcheck(op, args, kwargs or {}, test_utils=utilities)
    assert set(result) == set(utilities)
    assert set(result.values()) == {"SUCCESS"}, result


def operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)


@pytest.mark.parametrize("layout", [slow("contiguous"), "permuted", slow("expanded")])
def test_layouts(device: str, layout: str) -> None:
    """opcheck runs with sizes made symbolic as well (test_aot_dispatch_dynamic)."""
    problem = Problem(*map(LAYOUTS[layout], make((3, 4), 6, 11, torch.float32, device)))
    x, w, b = operands(problem)
    check(LOSS, (x, w, problem.target), {"linear_bias": b, "weight": problem.weight, "shift": True})
    check(AUX, (x, w, problem.target), {"linear_bias": b, "reduction": "none", "shift": 2})
    check(AUX, (x, w, problem.target), {"linear_bias": b, "zero_if_empty": True})
    check(LOSS, (x, w, problem.probabilities), {"label_smoothing": 0.1})
    check(LOG_PROBS, (x, w, problem.target), {"linear_bias": b, "softcap": 3.0})


@pytest.mark.parametrize("needs", [(True, True), slow((False, False))], ids=str)
def test_ids(device: str, needs: tuple[bool, bool]) -> None:
    problem = make((3, 2), 6, 11, torch.float32, device)
    x, w, b = operands(problem)
    ids = torch.randint(11, (3, 2, 4), device=device)
    flags = dict(zip(("need_entropy", "need_predictions"), needs, strict=True))
    for target in (ids, problem.target):
        check(LOG_PROBS_FULL, (x, w, target), {"linear_bias": b, "softcap": 3.0, **flags})
    check(TOP_K, (x, w, 3), {"linear_bias": b})
    for target in (problem.target, problem.target.unsqueeze(-1)):
        check(LOG_PROBS_FORWARD, (x.detach(), w.detach(), target, b.detach(), *HeadOptions()))
    grads = [leaf(torch.randn(3, 2, 4, device=device)), leaf(torch.randn(3, 2, device=device)), None]
    check(LOG_PROBS_BACKWARD, (*grads, x, w, ids, b, *HeadOptions(), True, True, True), utilities=TRACEABLE)


@pytest.mark.parametrize("direction", [slow("forward"), slow("reverse"), "jsd"])
def test_divergences(device: str, direction: str) -> None:
    student, teacher = make((3, 2), 6, 11, torch.float32, device), make((3, 2), 4, 11, torch.float32, device)
    call = (*operands(student)[:2], *operands(teacher)[:2], leaf(student.linear_bias), None, student.target)
    check(KL_DIV, call, {"direction": direction, "softcap": 3.0})
    check(KL_DIV_REDUCED, call, {"direction": direction, "reduction": "sum" if direction == "jsd" else "mean"})
    grad = leaf(torch.randn(3, 2, device=device))
    needs = (True, True, False, True, True, False)
    detached = [None if t is None else t.detach() for t in call]
    check(KL_DIV_FORWARD, (*detached, *Divergence(direction="reverse"), True, *needs))
    check(KL_DIV_BACKWARD, (grad, *call, *Divergence(direction="jsd"), *needs), utilities=TRACEABLE)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0)], ids=str)
def test_degenerate_shapes(device: str, lead: tuple[int, ...]) -> None:
    problem = make(lead, 6, 11, torch.float32, device, ignored=0.0)
    x, w, b = operands(problem)
    for reduction in ("none", "sum"):  # a mean of nothing is nan, which opcheck does not compare
        check(AUX, (x, w, problem.target), {"linear_bias": b, "reduction": reduction})
    check(LOG_PROBS, (x, w, problem.target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    problem = make((5,), 6, 11, dtype, device)
    x, w, b = operands(problem)
    for reduction in ("mean", "none"):
        check(AUX, (x, w, problem.target), {"linear_bias": b, "weight": problem.weight, "reduction": reduction})


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False, False, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.each_value
def test_private_ops(device: str, dtype: torch.dtype, needs: tuple[bool, ...]) -> None:
    problem = make((3, 2), 6, 11, dtype, device)
    x, w, b = operands(problem)
    call = (x, w, problem.target, b, problem.weight)
    check(FORWARD, (*call, *Options(memory_budget=100), *needs, True, True), utilities=TRACEABLE)
    loss, rows = torch.tensor(2.0, device=device), torch.randn(3, 2, device=device)
    check(BACKWARD, (leaf(loss), leaf(rows), None, *call, *Options(), *needs), utilities=TRACEABLE)
    check(BACKWARD, (leaf(rows), None, leaf(rows), *call, *Options(reduction="none"), *needs), utilities=TRACEABLE)


def test_rows(device: str) -> None:
    problem = make((5,), 6, 11, torch.float32, device)
    wide = torch.randn(5, 16, device=device)[:, :11]
    numbers = (-100, 0.1, 3.0, 0.5, 0.2)
    bias, grad = problem.linear_bias, torch.randn(5, device=device)
    for target in (problem.target, problem.probabilities):
        for flags in ((True, True, True), (True, False, False), (False, False, True)):
            check(ROWS, (wide, target, bias, problem.weight, grad, None, grad[:1], *numbers, *flags))
