"""dcs::linear_cross_entropy with filtered gradients on the hidden states and the head of a trained model.

Errors are against the float32 gradient of the same bfloat16 input and head. Times are of forward and backward, beside
torch.compile's. The same on flat random input, which no filter is meant for: there the times are beside the exact op's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness import CpuTimer, CudaTimer, Function, Row, Skipped, print_rows
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy import filter_tails

from linear_cross_entropy.functions import Loss, eager, own, peak_gibibytes, peers, step
from linear_cross_entropy.real_logits.gradients import (
    Errors,
    Gradients,
    Sparsity,
    exact_gradients,
    power_name,
    sparsity,
)
from linear_cross_entropy.real_logits.model import Snapshot

TARGET_EPS = 2**-12  # of which the targets speak
REAL_TARGET = 1 / 0.5  # torch.compile's time over that of the filtered step
FLAT_TARGET = 1 / 1.25  # the exact op's time over that of the filtered step
SHARES = (0, 128, 64, 16)  # beside the op's own: one row in so many has an exact tail, 0 for none
EXACT = "dcs"


@dataclass(frozen=True)
class Outcome:
    case: str
    name: str
    errors: Errors
    peak_gibibytes: float | None  # None on a CPU


@dataclass
class Measurement:
    rows: list[Row]
    skipped: list[Skipped]
    outcomes: list[Outcome]
    sparsity: dict[str, list[Sparsity]]  # "real" and "flat"

    def report(self) -> dict[str, Any]:
        """What the JSON has beside the rows."""
        return {
            "gradients": [asdict(outcome) for outcome in self.outcomes],
            "sparsity": {name: [asdict(entry) for entry in entries] for name, entries in self.sparsity.items()},
        }


def filter_name(eps: float) -> str:
    return f"{EXACT}, eps {power_name(eps)}"


def _own_losses(filters: Sequence[float]) -> list[tuple[str, Loss]]:
    return [(EXACT, own()), *((filter_name(eps), own(grad_filter_eps=eps)) for eps in filters)]


def _with_shares(filters: Sequence[float]) -> Iterator[tuple[str, Loss]]:
    for eps, share in itertools.product(filters, SHARES):
        yield f"{filter_name(eps)}, {f'1/{share}' if share else 'no'} row exact", _with_share(eps, share)


def _with_share(eps: float, share: int) -> Loss:
    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        before, filter_tails.APART = filter_tails.APART, share
        try:  # a mean's gradients are formed here
            return linear_cross_entropy(x, w, y, grad_filter_eps=eps)
        finally:
            filter_tails.APART = before

    return loss


def _others(device: torch.device, with_peers: bool) -> Iterator[tuple[str, Loss]]:
    if device.type == "cuda":
        torch._dynamo.reset()
        yield "torch.compile", torch.compile(eager, dynamic=False)
        if with_peers:
            yield from peers()
    else:
        yield "eager", eager


def measure(
    snapshot: Snapshot, filters: Sequence[float], *, with_peers: bool, with_shares: bool, seed: int
) -> Measurement:
    """`seed` is the flat input's."""
    torch.set_float32_matmul_precision("highest")  # the reference's GEMMs: no TF32
    x, w, y = snapshot.hidden.requires_grad_(), snapshot.head.requires_grad_(), snapshot.target
    result = Measurement([], [], [], {})
    losses = _own_losses(filters)
    others = list(_others(x.device, with_peers))
    shares = list(_with_shares(filters)) if with_shares else []
    _measure_case(result, "real", (x, w, y), [*others, *losses, *shares], filters, REAL_TARGET)
    _measure_case(result, "flat", _flat(*x.shape, w.size(0), x.device, seed), losses, filters, FLAT_TARGET)
    return result


def _measure_case(
    result: Measurement,
    what: str,
    operands: tuple[Tensor, Tensor, Tensor],
    losses: Sequence[tuple[str, Loss]],
    filters: Sequence[float],
    target: float,
) -> None:
    """Errors, peaks and times on (x, w, y); the first of the losses is the floor."""
    x, w, y = operands
    case = f"{what} {x.size(0)}x{x.size(1)}x{w.size(0)}"
    with torch.no_grad():
        exact = exact_gradients(x, w, y)
        result.sparsity[what] = sparsity(x, w, y, filters)
    measured: dict[str, Function] = {}
    outcomes: dict[str, Outcome] = {}
    for name, loss in losses:
        function = step(loss, x, w, y)
        try:
            outcomes[name] = _outcome(case, name, function, x, w, exact)
        except Exception as error:  # what cannot do the shape says so in the table
            first = str(error).splitlines()[0][:160] if str(error) else ""
            result.skipped.append(Skipped(case, "bfloat16", name, f"{type(error).__name__}: {first}"))
        else:
            measured[name] = function
    del exact
    timer: CudaTimer | CpuTimer
    timer = CudaTimer(slow_milliseconds=math.inf) if x.is_cuda else CpuTimer()
    timings = timer.medians(measured)
    x.grad = w.grad = None
    floor = timings.get(losses[0][0])
    for name, timing in timings.items():
        row = Row(case, "bfloat16", name, timing.milliseconds, timing.repetitions, note=_note(outcomes[name]))
        if floor is not None:
            row.compare(floor.milliseconds, target if name == filter_name(TARGET_EPS) else None)
        result.rows.append(row)
    result.outcomes += outcomes.values()


def _outcome(case: str, name: str, function: Function, x: Tensor, w: Tensor, exact: Gradients) -> Outcome:
    peak = peak_gibibytes(function, (x, w)) if x.is_cuda else None
    function()
    assert x.grad is not None
    assert w.grad is not None
    errors = exact.errors(x.grad, w.grad)
    x.grad = w.grad = None
    return Outcome(case, name, errors, peak)


def _note(outcome: Outcome) -> str:
    errors = f"dX {outcome.errors.input:.1e} dW {outcome.errors.linear_weight:.1e}"
    return errors if outcome.peak_gibibytes is None else f"{errors} peak {outcome.peak_gibibytes:.2f} GiB"


def _flat(rows: int, features: int, classes: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """As in linear_cross_entropy/cuda.py: independent normal numbers, logits of variance 1."""
    torch.manual_seed(seed)
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, features, device=device, dtype=torch.bfloat16).div_(features**0.5).requires_grad_()
    return x, w, torch.randint(classes, (rows,), device=device)


def print_measurement(result: Measurement, record: dict[str, Any]) -> None:
    source = record["tokens"]
    print(
        f"model: {record['parameters'] / 1e6:.0f} million parameters, {record['tokens_seen'] / 1e6:.1f} million tokens "
        f"of {source['vocabulary']}, seed {record['seed']}; {record['loss']:.3f} nats on the rows measured, "
        f"{record['held_out_loss']:.3f} held out"
    )
    print("floor = torch.compile (eager on a CPU) on the real input, the exact op on the flat one")
    print_rows(result.rows, result.skipped)
    print(f"\n{'columns kept':<16}{'eps':>8}{'rows':>8}{'mean':>9}{'most':>9}{'tail mass':>12}{'90 %':>9}{'99 %':>9}")
    for name, entries in result.sparsity.items():
        for entry in entries:
            print(
                f"{name:<16}{power_name(entry.eps):>8}{entry.block_rows:>8}{entry.kept:>9.2%}"
                f"{entry.kept_most:>9.2%}{entry.tail_mean:>12.3%}"
                f"{entry.tail_quantiles[0.9]:>9.2%}{entry.tail_quantiles[0.99]:>9.2%}"
            )
