"""Scans of one long sequence whose steps are shared out, beside one GPU that scans the whole.

A fraction is the speed beside that. A copy of the same steps, on one GPU and shared out, says what the memory allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Function, Row
from torch import Tensor

from torch_dcs_ops import discounted_cumsum
from torch_dcs_ops.distributed import sequence_parallel_discounted_cumsum

from distributed.parts import Found
from distributed.ranks import Here, own_slice

STEPS = 100_000_000  # a rank
DECAYING_SPEED, STEADY_SPEED = 1.5, 1.1
UNIT = 2.0**-24


def run(here: Here) -> Found:
    found, steps = Found(), (100_000 if here.is_small else STEPS) * here.ranks
    (x,) = here.same(torch.randn(1, steps, device=here.device))
    # Gates whose product stays near 1: every other one takes back what the one before it did.
    even = torch.rand(1, steps // 2, device=here.device) * 0.02 + 0.99
    (gates,) = here.same(torch.stack((even, 1 / even), -1).view(1, steps))
    del even
    mine = own_slice(here, steps)
    part, own_gates = x[:, mine].clone(), gates[:, mine].clone()
    cases: tuple[tuple[str, Any, Any, float], ...] = (
        ("gamma 0.99", 0.99, 0.99, DECAYING_SPEED),
        ("gates that do not decay", gates, own_gates, STEADY_SPEED),
        ("gamma 1", 1.0, 1.0, STEADY_SPEED),
    )
    functions: dict[str, Function] = {}
    targets: dict[str, float] = {}
    for name, whole, own, target in cases:
        functions[f"{name}, one GPU"] = _call(discounted_cumsum, x, whole, dim=1)
        functions[name] = _call(sequence_parallel_discounted_cumsum, part, own, dim=1, group=dist.group.WORLD)
        targets[name] = target
        _check(here, found, name, (x, whole), mine, (functions[f"{name}, one GPU"], functions[name]))
    whole_copy, part_copy = torch.empty_like(x), torch.empty_like(part)
    functions |= {"copy, one GPU": lambda: whole_copy.copy_(x), "copy": lambda: part_copy.copy_(part)}
    here.warm()
    queued, idle = here.medians(functions, 20), here.medians(functions, 20, queued=False)
    case = f"{here.ranks} x {steps // here.ranks}"
    for name, timing in queued.items():
        one = name if name.endswith(", one GPU") else f"{name}, one GPU"
        row = Row(case, "float32", name, timing.milliseconds, timing.repetitions)
        row.note = f"begun on idle GPUs {idle[name].milliseconds:.3f} ms"
        if one != name:
            row.note += f", {idle[one].milliseconds / idle[name].milliseconds:.2f} times one GPU's speed"
        found.rows.append(row.compare(queued[one].milliseconds, targets.get(name)))
    return found


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments, **options)


def _check(
    here: Here, found: Found, name: str, of_whole: tuple[Tensor, Any], mine: slice, calls: tuple[Function, Function]
) -> None:
    """Against float64: errors as parts of the largest value, of this rank's steps."""
    x, gamma = of_whole
    exact = discounted_cumsum(x.double(), gamma.double() if isinstance(gamma, Tensor) else gamma, dim=1)[:, mine]
    largest = float(exact.abs().max())
    alone, shared = calls[0](), calls[1]()
    assert isinstance(alone, Tensor)
    assert isinstance(shared, Tensor)
    off_alone, off = (
        float((y.double() - exact).abs().max()) / largest for y in (alone[:, mine], shared)
    )  # fmt: skip
    off_alone, off = here.largest([off_alone, off])
    found.check(f"{name}: largest error of one GPU", off_alone, 1e-3)
    # What is carried in is rounded once, beside the scan's own rounding of so many steps.
    found.check(f"{name}: largest error of shared-out time", off, 2 * off_alone + 8 * UNIT)
