"""Losses and log-probabilities of a head whose vocabulary is shared out, beside one GPU's and bare products.

A fraction is the speed beside the same call on one GPU that holds the whole vocabulary; all that is compared is timed
in turns in one run. Input's gradient is summed over the ranks in every time. Peaks are those of the allocator, the
largest rank's.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Function, Row, Skipped, reason_of
from torch import Tensor, nn

from torch_dcs_ops import linear_log_probs
from torch_dcs_ops.distributed import vocab_parallel_linear_cross_entropy, vocab_parallel_linear_log_probs

from distributed.parts import Found
from distributed.ranks import Here, own_slice, relative_error
from linear_cross_entropy.functions import own, step

DTYPE = torch.bfloat16
LOSS_SPEED, LOG_PROBS_SPEED = 1.88, 1.85
# bfloat16: between two gradients that are each rounded to it, and made of the logits' gradient rounded to it.
ONE_ULP = 2.0**-7


@dataclass
class Operands:
    """A head's, the same on all ranks, and this rank's classes."""

    input: Tensor
    weight: Tensor
    target: Tensor
    slice: Tensor
    place: dict[str, Any]

    @property
    def case(self) -> str:
        return "x".join(map(str, (*self.input.shape, self.weight.size(0))))


def operands(here: Here, rows: int, features: int, classes: int) -> Operands:
    x = torch.randn(rows, features, device=here.device, dtype=DTYPE)
    w = torch.randn(classes, features, device=here.device, dtype=DTYPE).div_(features**0.5)
    y = torch.randint(classes, (rows,), device=here.device)
    here.same(x, w, y)
    mine = own_slice(here, classes)
    place = {"group": dist.group.WORLD, "first_class": mine.start, "classes": classes}
    return Operands(x.requires_grad_(), w.requires_grad_(), y, w.detach()[mine].clone().requires_grad_(), place)


def shape(here: Here) -> tuple[int, int, int]:
    return (64, 32, 1000) if here.is_small else (8192, 4096, 128_256)


def gemms(of: Operands, weight: Tensor) -> Function:
    """The three products of a step with so many classes."""
    x, w = of.input.detach(), weight.detach()
    g = torch.randn(x.size(0), w.size(0), device=x.device, dtype=x.dtype)

    def run() -> None:
        torch.mm(x, w.t())
        torch.mm(g, w)
        torch.mm(g.t(), x)

    return run


def loss_parallel_step(here: Here, of: Operands) -> tuple[Function, tuple[Tensor, ...]]:
    """torch's: a ColwiseParallel head and F.cross_entropy, compiled; input's gradient is all-reduced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh(here.device, (here.ranks,))
    head = nn.Linear(of.weight.size(1), of.weight.size(0), bias=False, device="meta")
    head.weight = nn.Parameter(of.weight.detach())
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    target = distribute_tensor(of.target, mesh, [Replicate()])
    # A graph's names of groups are another rank's in what torch finds in its cache.
    torch.compiler.config.force_disable_caches = True
    compiled = torch.compile(lambda x, y: F.cross_entropy(head(x).float(), y), dynamic=False)
    x = of.input

    def run() -> None:
        x.grad = head.weight.grad = None
        with loss_parallel():
            compiled(x, target).backward()

    return run, (x, head.weight)


def loss(here: Here) -> Found:
    of, found = operands(here, *shape(here)), Found()
    mine, sliced = own(), _sliced(of)
    steps: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
        "dcs, one GPU": (step(mine, of.input, of.weight, of.target), (of.input, of.weight)),
        "dcs": (step(sliced, of.input, of.slice, of.target), (of.input, of.slice)),
        "dcs, dX summed in bfloat16": (
            step(_sliced(of, reduce_dtype=DTYPE), of.input, of.slice, of.target), (of.input, of.slice)
        ),
        "three GEMMs, V": (gemms(of, of.weight), ()),
        f"three GEMMs, V/{here.ranks}": (gemms(of, of.slice), ()),
    }  # fmt: skip
    _check_loss(here, of, found)
    name = "loss_parallel, compiled"
    try:
        compared = loss_parallel_step(here, of)
        compared[0]()
        found.check(f"{name}: dX beside one GPU's", _input_error(of, compared[0]), ONE_ULP)
        steps[name] = compared
    except Exception as error:
        found.skipped.append(Skipped(of.case, "bfloat16", name, reason_of(error)))
    if importlib.util.find_spec("liger_kernel") is None:
        found.skipped.append(Skipped(of.case, "bfloat16", "Liger's tensor-parallel head", "it is not installed"))
    peaks = {name: here.peak_mebibytes(function, leaves) for name, (function, leaves) in steps.items()}
    calls = {name: function for name, (function, _) in steps.items()}
    here.warm()
    queued, idle = here.medians(calls), here.medians({"dcs": calls["dcs"]}, queued=False)
    one = queued["dcs, one GPU"].milliseconds
    for name, (_, leaves) in steps.items():
        row = Row(of.case, "bfloat16", name, queued[name].milliseconds, queued[name].repetitions)
        gradients = sum(leaf.numel() * leaf.element_size() for leaf in map(_local, leaves)) / 2**20
        if leaves:
            row.note = f"peak {peaks[name]:.0f} MiB, without gradients {peaks[name] - gradients:.0f} MiB"
        if name == "dcs":
            row.note += f"; begun on idle GPUs {idle[name].milliseconds:.2f} ms"
        found.rows.append(row.compare(one, LOSS_SPEED if name == "dcs" else None))
    return found


def _local(leaf: Any) -> Tensor:
    return leaf.to_local() if hasattr(leaf, "to_local") else leaf  # type: ignore[no-any-return]


def _sliced(of: Operands, **options: Any) -> Any:
    return lambda x, w, y: vocab_parallel_linear_cross_entropy(x, w, y, **of.place, **options)


def _input_error(of: Operands, run: Function) -> float:
    step(own(), of.input, of.weight, of.target)()
    wanted, of.input.grad = of.input.grad, None
    run()
    found, of.input.grad = of.input.grad, None
    assert found is not None
    assert wanted is not None
    return relative_error(found, wanted)


def _check_loss(here: Here, of: Operands, found: Found) -> None:
    """Beside one GPU."""
    mine = slice(of.place["first_class"], of.place["first_class"] + of.slice.size(0))
    expected = own()(of.input, of.weight, of.target)
    dx, dw = torch.autograd.grad(expected, (of.input, of.weight))
    value = _sliced(of)(of.input, of.slice, of.target)
    own_dx, own_dw = torch.autograd.grad(value, (of.input, of.slice))
    # Logits of a few units are rounded to 2**-9 of themselves, where another product of another shape rounds otherwise.
    off = abs(float(value.detach()) / float(expected.detach()) - 1)
    for name, error, budget in (
        ("loss", off, 2.0**-12),
        ("dX", relative_error(own_dx, dx), ONE_ULP),
        ("dW", relative_error(own_dw, dw[mine]), ONE_ULP),
    ):
        found.check(f"loss: {name} beside one GPU's", here.largest([error])[0], budget)
    same = here.said((float(value.detach()), own_dx.double().sum().item(), own_dx.double().norm().item()))
    found.check("loss: ranks with other bits", float(any(of_rank != same[0] for of_rank in same)), 0.0)


def log_probs(here: Here) -> Found:
    of, found = operands(here, *shape(here)), Found()
    a, b = here.same(*(torch.randn(of.target.shape, device=here.device) for _ in range(2)))

    def shared() -> tuple[Tensor, ...]:
        values = vocab_parallel_linear_log_probs(of.input, of.slice, of.target, **of.place)
        return (*values, *torch.autograd.grad((values[0] * a + values[1] * b).sum(), (of.input, of.slice)))

    def alone() -> tuple[Tensor, ...]:
        values = linear_log_probs(of.input, of.weight, of.target)
        return (*values, *torch.autograd.grad((values[0] * a + values[1] * b).sum(), (of.input, of.weight)))

    mine = slice(of.place["first_class"], of.place["first_class"] + of.slice.size(0))
    for name, got, wanted in zip(("log-probabilities", "entropy", "dX", "dW"), shared(), alone(), strict=True):
        error = relative_error(got.detach(), wanted.detach()[mine] if name == "dW" else wanted.detach())
        found.check(f"log_probs: {name} beside one GPU's", here.largest([error])[0], ONE_ULP)
    here.warm()
    times = here.medians({"log_probs and entropy, one GPU": alone, "log_probs and entropy": shared})
    one = times["log_probs and entropy, one GPU"].milliseconds
    for name, timing in times.items():
        row = Row(of.case, "bfloat16", name, timing.milliseconds, timing.repetitions)
        function = shared if name == "log_probs and entropy" else alone
        row.note = f"peak {here.peak_mebibytes(function, ()):.0f} MiB with gradients"
        found.rows.append(row.compare(one, LOG_PROBS_SPEED if function is shared else None))
    return found


def errors(here: Here) -> Found:
    """Of bfloat16's gradients of fewer rows against float64, where the sum over the ranks is in float32 and not."""
    rows, features, classes = shape(here)
    of, found = operands(here, max(rows // 8, 16), features, classes), Found()
    with torch.no_grad():
        x, w = of.input.double(), of.weight.double()
        g = (x @ w.t()).softmax(-1)
        g[torch.arange(x.size(0), device=here.device), of.target] -= 1
        exact = (g @ w).div_(x.size(0))
    del g, w
    loss = own()(of.input, of.weight, of.target)
    alone = relative_error(torch.autograd.grad(loss, of.input)[0], exact)
    found.check("dX on one GPU against float64", alone, ONE_ULP)
    # A CPU rounds every rank's products to bfloat16 before the sum.
    exactly = 1.1 if here.device == "cuda" else 2.0
    for dtype, budget in ((torch.float32, exactly), (torch.bfloat16, 2.0)):
        value = _sliced(of, reduce_dtype=dtype)(of.input, of.slice, of.target)
        error = relative_error(torch.autograd.grad(value, of.input)[0], exact)
        name = str(dtype).removeprefix("torch.")
        found.check(f"dX against float64 over one GPU's, summed in {name}", here.largest([error / alone])[0], budget)
    return found
