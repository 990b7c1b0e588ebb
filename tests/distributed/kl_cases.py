"""Divergences of two heads whose classes are shared out, as every rank calls them, beside one process's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dcs_ops import linear_kl_div
from torch_dcs_ops.distributed import vocab_parallel_linear_kl_div

from distributed.loss_cases import Case, bounds, scalar
from distributed.team import made_on_device, on_device, sentence_of

_OPERANDS = ("input", "linear_weight", "teacher_input", "teacher_weight", "linear_bias", "teacher_bias")
_OF_ROWS = ("input", "teacher_input", "target")


def operands(case: Case) -> dict[str, Any]:
    """The same on all ranks: of the whole vocabulary."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    lead, classes = case.get("lead", (7,)), sum(case["sizes"])
    dtype, teacher = case.get("dtype", torch.float64), case.get("teacher_dtype", case.get("dtype", torch.float64))

    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    data: dict[str, Any] = {
        "input": normal(dtype, *lead, 5), "linear_weight": normal(dtype, classes, 5),
        "teacher_input": normal(teacher, *lead, 3), "teacher_weight": normal(teacher, classes, 3),
        "linear_bias": normal(dtype, classes) if case.get("bias") else None,
        "teacher_bias": normal(teacher, classes) if case.get("bias") else None,
        "target": None, "upstream": [torch.randn(64, generator=generator, dtype=torch.float64)],
    }  # fmt: skip
    if case.get("ignores", True):
        data["target"] = torch.where(torch.rand(lead, generator=generator) < 0.3, -100, 1)
    if case.get("offset"):
        data["input"], data["linear_weight"] = (
            torch.cat((t, torch.full_like(t[..., :1], case["offset"] ** 0.5)), -1)
            for t in (data["input"], data["linear_weight"])
        )
    if "masked" in case:
        for name in case["masked_heads"]:
            data[name][case["masked"]] = -torch.inf
    return on_device(data)  # type: ignore[no-any-return]


def _leaves(case: Case, data: dict[str, Any]) -> dict[str, Tensor]:
    names = case.get("grads", _OPERANDS)
    return {name: data[name].clone().requires_grad_() for name in names if data[name] is not None}


def in_one_process(case: Case) -> tuple[Tensor, list[Tensor]]:
    data = operands(case)
    upstream, leaves = data.pop("upstream"), _leaves(case, data)
    loss = linear_kl_div(**{**data, **leaves}, **case.get("options", {}))
    return loss.detach(), list(torch.autograd.grad(scalar(loss, upstream), list(leaves.values()))) if leaves else []


def own_part(case: Case, name: str, whole: Tensor, rank: int) -> Tensor:
    if name not in _OF_ROWS:
        return whole[bounds(case["sizes"], rank)]
    if not case.get("sequence_parallel"):
        return whole
    own = whole.size(0) // len(case["sizes"])
    return whole[rank * own : (rank + 1) * own]


def on_a_rank(case: Case) -> tuple[Tensor, list[Tensor]]:
    data, rank = operands(case), dist.get_rank()
    upstream = data.pop("upstream")
    parts = {name: None if t is None else own_part(case, name, t, rank) for name, t in data.items()}
    leaves = _leaves(case, parts)
    options: dict[str, Any] = dict(case.get("options", {}), sequence_parallel=case.get("sequence_parallel", False))
    if case.get("placed") or case.get("compiler"):
        options |= {"first_class": bounds(case["sizes"], rank).start, "classes": sum(case["sizes"])}

    def call(**given: Any) -> Tensor:
        return vocab_parallel_linear_kl_div(**given, group=dist.group.WORLD, **options)

    if case.get("compiler"):
        torch.compiler.reset()
        call = torch.compile(call, backend=case["compiler"], fullgraph=True)
    loss = call(**{**parts, **leaves})
    total = scalar(loss, upstream, rank if case.get("sequence_parallel") else 0)
    return loss.detach(), list(torch.autograd.grad(total, list(leaves.values()))) if leaves else []


def many(cases: list[Case]) -> list[tuple[Tensor, list[Tensor]]]:
    return [on_a_rank(case) for case in cases]


@made_on_device
def refusals() -> dict[str, tuple[str, str]]:
    x, w, group = torch.ones(4, 5, requires_grad=True), torch.ones(3, 5), dist.group.WORLD
    second = dist.get_rank() == 1
    kl: Any = vocab_parallel_linear_kl_div

    def twice() -> None:
        (first,) = torch.autograd.grad(kl(x, w, x, w * 2, group=group), x, create_graph=True)
        first.sum().backward()

    calls = {
        'reduction must be "none", "mean" or "sum", got "batchmean"': lambda: kl(
            x, w, x, w, group=group, reduction="batchmean"
        ),
        "teacher_weight must have as many classes as linear_weight, 3, got 2": lambda: kl(x, w, x, w[:2], group=group),
        "teacher_weight must have as many classes as linear_weight, 0, got 3": lambda: kl(x, w[:0], x, w, group=group),
        "teacher_logit_scale must be a number, got a tensor": lambda: kl(
            x, w, x, w, group=group, teacher_logit_scale=torch.ones(())
        ),
        "the shape of teacher_input must be the same on all ranks, got (4, 5) on rank 0 and (4, 4) on rank 1": lambda: (
            kl(x, w, x[:, : 4 if second else 5], w[:, : 4 if second else 5], group=group)
        ),
        "temperature must be the same on all ranks, got 1.0 on rank 0 and 2.0 on rank 1": lambda: kl(
            x, w, x, w, group=group, temperature=1.0 + second
        ),
        "derivatives must be of the first order, got a backward with create_graph=True": twice,
    }
    return {sentence: sentence_of(call) for sentence, call in calls.items()}
