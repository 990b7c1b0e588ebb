"""Vocabulary-parallel losses as every rank calls them; what they return is compared with one process's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy, linear_log_probs
from torch_dcs_ops.distributed import vocab_parallel_linear_cross_entropy, vocab_parallel_linear_log_probs
from torch_dcs_ops.distributed.common import Ranks
from torch_dcs_ops.distributed.linear_cross_entropy import kernel_ops
from torch_dcs_ops.distributed.linear_cross_entropy.input_sums import InputSum
from torch_dcs_ops.ops.linear_cross_entropy import alignment
from torch_dcs_ops.ops.linear_cross_entropy.weight_gradient import WeightGradient

from distributed.team import device, made_on_device, on_device, sentence_of

Case = dict[str, Any]
_OF_CLASSES = ("linear_weight", "linear_bias", "weight")


def bounds(sizes: list[int], rank: int) -> slice:
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


def operands(case: Case) -> dict[str, Any]:
    """The same on all ranks: of the whole vocabulary."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    lead, features, classes = case.get("lead", (7,)), 5, sum(case["sizes"])
    dtype = case.get("dtype", torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (*lead, case["ids"]) if "ids" in case else lead
    target = torch.randint(classes, shape, generator=generator)
    ignored = case.get("options", {}).get("ignore_index", -100)
    if case.get("ignores", True):
        target[torch.rand(shape, generator=generator) < 0.3] = ignored
    data = {
        "input": normal(*lead, features),
        "linear_weight": normal(classes, features),
        "target": target,
        "linear_bias": normal(classes) if case.get("bias") else None,
        "weight": torch.rand(classes, generator=generator, dtype=torch.float64) if case.get("weights") else None,
        "upstream": [torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3)],
    }
    return on_device(data)  # type: ignore[no-any-return]


def scalar(results: Any, upstream: list[Tensor], part: int = 0) -> Tensor:
    """A sum of the results, each entry with a factor of its own; `part`: of several that are equally long."""
    results = results if isinstance(results, tuple) else (results,)
    total = results[0].new_zeros((), dtype=torch.float64)
    for values, factors in zip(results, upstream, strict=False):
        if values.requires_grad:
            first = part * values.numel() if values.dim() else 0
            place = torch.arange(first, first + values.numel(), device=factors.device) % factors.numel()
            total = total + (values.double().reshape(-1) * factors[place]).sum()
    return total


def in_one_process(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    data = operands(case)
    leaves = {name: data[name].clone().requires_grad_() for name in case.get("grads", ("input", "linear_weight"))}
    if case.get("bias"):
        leaves["linear_bias"] = data["linear_bias"].clone().requires_grad_()
    given = {**data, **leaves}
    upstream = given.pop("upstream")
    if case.get("log_probs"):
        del given["weight"]
        results: Any = linear_log_probs(**given, **case.get("options", {}))
    else:
        results = linear_cross_entropy(**given, **case.get("options", {}))
    gradients = torch.autograd.grad(scalar(results, upstream), list(leaves.values())) if leaves else ()
    results = results if isinstance(results, tuple) else (results,)
    return [r.detach() for r in results], list(gradients)


def on_a_rank(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    data, rank, ranks, sizes = operands(case), dist.get_rank(), dist.get_world_size(), case["sizes"]
    mine, sequence = bounds(sizes, rank), case.get("sequence_parallel", False)
    rows: Any = ...
    if sequence:
        own = data["input"].size(0) // ranks
        rows = slice(rank * own, (rank + 1) * own)
    parts: dict[str, Any] = {
        "input": data["input"][rows],
        "target": data["target"][rows],
        **{name: None if data[name] is None else data[name][mine] for name in _OF_CLASSES},
    }
    leaves = {name: parts[name].clone().requires_grad_() for name in case.get("grads", ("input", "linear_weight"))}
    if case.get("bias"):
        leaves["linear_bias"] = parts["linear_bias"].clone().requires_grad_()
    parts |= leaves
    options: dict[str, Any] = dict(case.get("options", {}), sequence_parallel=sequence)
    if case.get("placed") or case.get("compiler"):
        options |= {"first_class": mine.start, "classes": sum(sizes)}
    function: Any = vocab_parallel_linear_cross_entropy
    if case.get("log_probs"):
        function = vocab_parallel_linear_log_probs
        del parts["weight"]
    call = function
    if case.get("compiler"):
        torch.compiler.reset()

        def call(**given: Any) -> Any:
            return function(**given, group=dist.group.WORLD, **options)

        call = torch.compile(call, backend=case["compiler"], fullgraph=True)
        results = call(**parts)
    else:
        results = call(**parts, group=dist.group.WORLD, **options)
    total = scalar(results, data["upstream"], rank if sequence else 0)
    gradients = torch.autograd.grad(total, list(leaves.values())) if leaves else ()
    results = results if isinstance(results, tuple) else (results,)
    return [r.detach() for r in results], list(gradients)


def many(cases: list[Case]) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [on_a_rank(case) for case in cases]


def chunk_by_chunk(case: Case) -> tuple[bool, list[str]]:
    """Whether the bits are those of one chunk after the other; and in which order chunks are made and ended."""
    found = on_a_rank(case)
    seen: list[str] = []
    end, columns = kernel_ops._end, kernel_ops.columns_of_slice
    budget = dict(case["options"], memory_budget=case["options"]["memory_budget"] // 2)
    with (
        mock.patch.object(kernel_ops, "_end", lambda *args: (seen.append("end"), end(*args))[1]),
        mock.patch.object(kernel_ops, "columns_of_slice", lambda *args: (seen.append("make"), columns(*args))[1]),
    ):
        on_a_rank(case)
    with mock.patch.object(kernel_ops, "_BUFFERS", 1):
        expected = on_a_rank({**case, "options": budget})
    pairs = zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs), seen


def calls_in_order(case: Case, run: Callable[[Case], Any] = on_a_rank) -> list[str]:
    """The products of a forward and a backward, by what they make, and when the ranks' collectives begin and end."""
    seen: list[str] = []

    def noting(said: str, function: Any) -> Any:
        def noted(*args: Any, **keywords: Any) -> Any:
            seen.append(said)
            found = function(*args, **keywords)
            return noting("wait", found) if callable(found) else found

        return noted

    with contextlib.ExitStack() as patches:
        for of, name, said in (
            (Ranks, "gathering", "gather"),
            (Ranks, "totaling", "sum"),
            (Ranks, "scattered_totaling", "scatter"),
            (alignment, "logits_product", "logits"),
            (alignment, "input_gradient_product", "dX"),
            (WeightGradient, "add", "dW"),
            (WeightGradient, "result", "dW ends"),
        ):
            patches.enter_context(mock.patch.object(of, name, noting(said, getattr(of, name))))
        run(case)
    return seen


def sums_by_themselves(case: Case, run: Callable[[Case], Any] = on_a_rank) -> bool:
    """Whether the bits are those of a sum that is waited for before linear_weight's last product."""
    found = run(case)
    begin = InputSum.begin

    def begin_and_wait(self: InputSum) -> None:
        begin(self)
        assert self.pending is not None
        total = self.pending()
        self.pending = lambda: total

    with mock.patch.object(InputSum, "begin", begin_and_wait):
        expected = run(case)
    first, second = ([*([of[0]] if isinstance(of[0], Tensor) else of[0]), *of[1]] for of in (found, expected))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def under_autocast() -> tuple[Tensor, ...]:
    """(loss, dX) under autocast, and those of the same call with bfloat16 operands; and of all of input's gradients."""
    data, rank = operands({"sizes": [4, 4], "dtype": torch.float32}), dist.get_rank()
    weight = data["linear_weight"][4 * rank : 4 * rank + 4]
    found: list[Tensor] = []
    for enabled in (True, False):
        x = data["input"].clone().requires_grad_()
        with torch.autocast(device(), torch.bfloat16, enabled=enabled):
            dtype = torch.float32 if enabled else torch.bfloat16
            loss = vocab_parallel_linear_cross_entropy(
                x.to(dtype), weight.to(dtype), data["target"], group=dist.group.WORLD
            )
        assert isinstance(loss, Tensor)
        found += [loss.detach(), *torch.autograd.grad(loss, x)]
    return tuple(found)


@made_on_device
def certain(rank_of_target: int, gap: float) -> tuple[Tensor, Tensor]:
    """float32: four classes, two a rank, of which the target's logit is `gap` above the others'."""
    rank, other = dist.get_rank(), 3 if rank_of_target == 0 else 0
    weight = torch.zeros(4, 1)
    weight[0 if rank_of_target == 0 else 3] = gap
    assert weight[other] == 0
    input = torch.ones(1, 1, requires_grad=True)
    part = weight[2 * rank : 2 * rank + 2].clone().requires_grad_()
    target = torch.tensor([0 if rank_of_target == 0 else 3])
    loss = vocab_parallel_linear_cross_entropy(input, part, target, group=dist.group.WORLD)
    assert isinstance(loss, Tensor)
    # d loss / d input = gap·(p - 1).
    return loss.detach(), torch.autograd.grad(loss, input)[0] / gap


def masked_slice() -> tuple[Tensor, ...]:
    data, rank = operands({"sizes": [3, 3], "bias": True, "ignores": False}), dist.get_rank()
    del data["upstream"], data["weight"]
    data["linear_bias"][3:] = -torch.inf
    data["target"] = data["target"] % 3
    mine, x, y = (
        slice(3 * rank, 3 * rank + 3),
        data["input"].clone().requires_grad_(),
        data["input"].clone().requires_grad_(),
    )
    parts = {
        "linear_weight": data["linear_weight"][mine].clone().requires_grad_(),
        "linear_bias": data["linear_bias"][mine],
    }
    whole = data["linear_weight"].clone().requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(x, target=data["target"], group=dist.group.WORLD, **parts)
    expected = linear_cross_entropy(y, whole, data["target"], linear_bias=data["linear_bias"])
    assert isinstance(loss, Tensor)
    found, wanted = torch.autograd.grad(loss, (x, parts["linear_weight"])), torch.autograd.grad(expected, (y, whole))
    both = (torch.cat([found[0], found[1]]), torch.cat([wanted[0], wanted[1][mine]]))
    return loss.detach(), both[0], expected.detach(), both[1]


@made_on_device
def differs(difference: str) -> None:
    """Rank 1 calls with something else."""
    second = dist.get_rank() == 1
    rows = 3 if second and difference == "input" else 4
    dtype = torch.float64 if second and difference == "dtype" else torch.float32
    input, weight = torch.ones(rows, 5, dtype=dtype), torch.ones(0 if difference == "none" else 3, 5, dtype=dtype)
    target = torch.zeros(rows, dtype=torch.int32 if second and difference == "target" else torch.int64)
    options: dict[str, Any] = {}
    if difference == "range":
        target = target + 6
    elif second and difference == "values":
        target[1] = 4
    elif second and difference == "range of one":
        target[2] = 7
    elif second and difference == "ignored":
        target[3] = -100
    elif difference == "softcap" and second:
        options["softcap"] = 2.0
    elif difference == "gradients":
        input.requires_grad_(second)
    elif difference == "first_class":
        options |= {"first_class": 4 if second else 0, "classes": 7}
    elif difference == "classes":
        options |= {"first_class": 3 * second, "classes": 6 + second}
    function: Any = vocab_parallel_linear_cross_entropy
    if difference == "function" and second:
        function = vocab_parallel_linear_log_probs
    function(input, weight, target, group=dist.group.WORLD, **options)


@made_on_device
def refusals() -> dict[str, tuple[str, str]]:
    """Sentences that all ranks get for calls that are wrong alike."""
    input, weight, target = torch.ones(4, 5, requires_grad=True), torch.ones(3, 5), torch.zeros(4, dtype=torch.int64)
    loss: Any = vocab_parallel_linear_cross_entropy
    group = dist.group.WORLD

    def twice() -> None:
        (first,) = torch.autograd.grad(loss(input, weight, target, group=group), input, create_graph=True)
        first.sum().backward()

    calls = {
        "group must be a torch.distributed.ProcessGroup, got str": lambda: loss(input, weight, target, group="world"),
        "logit_scale must be a number, got a tensor": lambda: loss(
            input, weight, target, group=group, logit_scale=torch.ones(())
        ),
        "target must be int64 (class indices), got float32": lambda: loss(input, weight, torch.ones(4, 3), group=group),
        "input must be a tensor, got list": lambda: loss([1], weight, target, group=group),
        "first_class and classes must be given together, got 0 and None": lambda: loss(
            input, weight, target, group=group, first_class=0
        ),
        "reduce_dtype must be None or float32 for float32 input, got torch.bfloat16": lambda: loss(
            input, weight, target, group=group, reduce_dtype=torch.bfloat16
        ),
        "derivatives must be of the first order, got a backward with create_graph=True": twice,
        "input must be a plain tensor, got one under a torch.func transform": lambda: torch.func.grad(
            lambda x: loss(x, weight, target, group=group)
        )(input.detach()),
        "derivatives must be taken in reverse mode, got forward mode": lambda: _in_forward_mode(loss, weight, target),
    }
    return {sentence: sentence_of(call) for sentence, call in calls.items()}


def _in_forward_mode(loss: Any, weight: Tensor, target: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(4, 5), torch.ones(4, 5))
        loss(x, weight, target, group=dist.group.WORLD)
