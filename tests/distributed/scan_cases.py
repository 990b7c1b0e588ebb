"""Sequence-parallel scans and advantages as every rank calls them; what they return is compared with one process's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dcs_ops import discounted_cumsum, returns
from torch_dcs_ops.distributed import sequence_parallel_discounted_cumsum, sequence_parallel_gae
from torch_dcs_ops.distributed.scan import head

from distributed.loss_cases import Case, bounds
from distributed.team import made_on_device, on_device

ROWS = 3


def steps_of(case: Case, rank: int) -> Tensor:
    """The numbers of a rank's steps."""
    sizes = case["sizes"]
    if not case.get("zigzag"):
        mine = bounds(sizes, rank)
        return torch.arange(mine.start, mine.stop)
    half, ranks = sizes[0] // 2, len(sizes)
    first, second = rank * half, (2 * ranks - 1 - rank) * half
    return torch.cat((torch.arange(first, first + half), torch.arange(second, second + half)))


def operands(case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    dtype, dim, total = case.get("dtype", torch.float64), case.get("dim", 0), sum(case["sizes"])
    shape = (total, ROWS) if dim == 0 else (ROWS, total)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    kinds = {
        "number": lambda: case.get("value", 0.9),
        "0-D": lambda: torch.tensor(0.8, dtype=torch.float64),
        "row": lambda: torch.rand(ROWS, generator=generator, dtype=torch.float64) - 0.3,
        "even": lambda: torch.ones(shape, dtype=dtype),  # gates that do not decay
        "step": lambda: normal(*shape, dtype=torch.promote_types(torch.float64, dtype)).abs().to(dtype).clamp(max=1),
        "complex": lambda: normal(*shape, dtype=torch.complex128) / 2,
    }
    data = {
        "input": normal(*shape),
        "gamma": kinds[case.get("gamma", "number")](),
        "initial": normal(ROWS) if case.get("initial") else None,
        "reset": torch.rand(shape, generator=generator) < 0.2 if case.get("reset") else None,
        "upstream": normal(*shape),
    }
    return on_device(data)  # type: ignore[no-any-return]


def in_one_process(case: Case) -> list[Tensor]:
    """The result, and the gradients of input, gamma and initial that there are."""
    data = operands(case)
    upstream = data.pop("upstream")
    leaves = {name: t.clone().requires_grad_() for name, t in data.items() if isinstance(t, Tensor) and name != "reset"}
    y = discounted_cumsum(**{**data, **leaves}, dim=case.get("dim", 0), direction=case.get("direction", "right"))
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), upstream)]


def part(case: Case, tensor: Any) -> Any:
    """What a rank holds of an operand: its steps, if it has any."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return tensor
    return tensor.index_select(case.get("dim", 0), steps_of(case, dist.get_rank()).to(tensor.device))


def on_a_rank(case: Case) -> list[Tensor]:
    data = {name: part(case, value) for name, value in operands(case).items()}
    upstream = data.pop("upstream")
    leaves = {name: t.clone().requires_grad_() for name, t in data.items() if isinstance(t, Tensor) and name != "reset"}
    if case.get("grads") is not None:
        leaves = {name: t for name, t in leaves.items() if name in case["grads"]}

    def call(**given: Any) -> Tensor:
        return sequence_parallel_discounted_cumsum(
            **given, group=dist.group.WORLD, dim=case.get("dim", 0), direction=case.get("direction", "right"),
            zigzag=case.get("zigzag", False),
        )  # fmt: skip

    if case.get("compiler"):
        torch.compiler.reset()
        call = torch.compile(call, backend=case["compiler"], fullgraph=True)
    y = call(**{**data, **leaves})
    if not leaves:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), upstream)]


def many(cases: list[Case]) -> list[list[Tensor]]:
    return [on_a_rank(case) for case in cases]


def special(case: Case) -> Tensor:
    """A value that is no number, or large or small factors, in one of the ranks' slices."""
    data = operands(case)
    for step, value in case["put"]:
        data["input"][step] = value
    if "cut" in case:
        data["reset"] = torch.zeros_like(data["input"], dtype=torch.bool)
        data["reset"][case["cut"]] = True
    del data["upstream"]
    if case.get("whole"):
        return discounted_cumsum(**data, dim=0, direction=case.get("direction", "right"))
    data = {name: part(case, value) for name, value in data.items()}
    return sequence_parallel_discounted_cumsum(
        **data, group=dist.group.WORLD, dim=0, direction=case.get("direction", "right")
    )


def mended_steps(case: Case) -> int:
    """How many steps a rank mends of its slice, in a forward."""
    counted, part = [0], head._part_of_carry

    def counting(y: Tensor, *args: Any) -> Any:
        counted[0] += args[-1].stop - args[-1].start
        return part(y, *args)

    with mock.patch.object(head, "_part_of_carry", counting):
        on_a_rank(case)
    return counted[0]


def gae_operands(case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    shape = (sum(case["sizes"]), ROWS)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    data: dict[str, Any] = {
        "rewards": uniform(*shape),
        "values": uniform(*shape),
        "terminated": uniform(*shape) < 0.2,
        "truncated": uniform(*shape) < 0.2 if case.get("truncated") else None,
        "gamma": {"number": 0.9, "row": uniform(ROWS), "step": uniform(*shape)}[case.get("gamma", "number")],
        "gae_lambda": {"number": 0.8, "row": uniform(ROWS)}[case.get("lambda", "number")],
    }
    name = "next_values" if case.get("next_values") else "bootstrap_value"
    data[name] = uniform(*(shape if case.get("next_values") else (ROWS,)))
    return on_device(data)  # type: ignore[no-any-return]


def advantages(case: Case, is_whole: bool) -> list[Tensor]:
    """Advantages and returns, and the gradients of rewards, values and what comes behind them."""
    data = gae_operands(case)
    rewards = data["rewards"]
    weights = torch.linspace(0.5, 2, rewards.numel(), dtype=torch.float64).view(rewards.shape).to(rewards.device)
    if not is_whole:
        data, weights = {name: part(case, value) for name, value in data.items()}, part(case, weights)
    names = [name for name in ("rewards", "values", "next_values", "bootstrap_value") if name in data]
    for name in names:
        data[name] = data[name].clone().requires_grad_()
    call: Any = returns.gae
    if not is_whole:

        def call(**given: Any) -> Any:
            return sequence_parallel_gae(**given, group=dist.group.WORLD, zigzag=case.get("zigzag", False))

        if case.get("compiler"):
            torch.compiler.reset()
            call = torch.compile(call, backend=case["compiler"], fullgraph=True)
    found = call(**data)
    total = ((found[0] + 2 * found[1]) * weights).sum()
    gradients = torch.autograd.grad(total, [data[name] for name in names], materialize_grads=True)
    return [*(f.detach() for f in found), *gradients]


def many_advantages(cases: list[Case]) -> list[list[Tensor]]:
    return [advantages(case, False) for case in cases]


@made_on_device
def differs(difference: str) -> None:
    second = dist.get_rank() == 1
    input, options = torch.ones(2, 3), {"dim": 0}
    if difference == "rows":
        input = torch.ones(2, 4 if second else 3)
    elif difference == "direction":
        options |= {"direction": "left" if second else "right"}
    elif difference == "reset":
        options |= {"reset": torch.ones(2, 3, dtype=torch.bool) if second else None}
    elif difference == "window":
        options |= {"window": 2}
    elif difference == "odd":
        options |= {"zigzag": True}
        input = torch.ones(3, 3)
    sequence_parallel_discounted_cumsum(
        input, 0.8 if second and difference == "gamma" else 0.9, group=dist.group.WORLD, **options
    )
