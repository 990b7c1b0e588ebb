"""Log-probabilities, policy losses and divergences of heads beside their bare products, on a GPU:
`PYTHONPATH=benchmarks python -m linear_cross_entropy.policies [--output FILE]`.

Each is measured twice: begun on an idle GPU, and queued behind other work, as behind a model's layers, where the CPU's
launches do not show. `--kernels` adds what the GPU's time goes to, `--peers` other packages' functions (head_peers.py).

A head's work is counted in products of its size (rows x features x classes): log-probabilities with entropy take four
of them forward and backward, of one head without its gradient two, a policy loss three, a divergence of two heads with
a frozen teacher four, and six where every row has an upstream gradient of its own. Medians of runs in turns; peak
memory is what a step adds to its operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import environment

import torch_dcs_ops as dcs
from torch_dcs_ops.ops.linear_cross_entropy import valid_rows

SHAPES = ((4096, 4096, 131072), (8192, 4096, 151936), (2048, 2048, 50257))


QUEUED_CYCLES = 4_000_000  # of a GPU's clock: 2 ms, in which a step's launches are far ahead
KINDS = {"products": ("gemm", "nvjet", "cutlass", "splitk", "Kernel2"), "rows": ("cross_entropy", "kl_rows")}


def seconds(steps: dict[str, Callable[[], object]], turns: int, queued: bool) -> dict[str, float]:
    """Of each, the median; one after the other in every turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if queued:
                torch.cuda._sleep(QUEUED_CYCLES)
            first.record()
            step()
            last.record()
            last.synchronize()
            if turn >= 2:
                found[name].append(first.elapsed_time(last) / 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def kernels(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the GPU's kernels by kind, of one step, and how many there are."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = dict.fromkeys((*KINDS, "other"), 0.0) | {"launches": 0.0}
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((kind for kind, words in KINDS.items() if any(word in event.name for word in words)), "other")
        found[kind] += event.time_range.elapsed_us() / 1e3
        found["launches"] += 1
    return found


def added_bytes(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


Steps = dict[str, tuple[Callable[[], object], int]]  # and in how many products a step is counted


def steps_of(n: int, d: int, v: int, dtype: torch.dtype) -> Steps:
    x = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)
    w = (torch.randn(v, d, device="cuda", dtype=dtype) / d**0.5).requires_grad_()
    frozen = w.detach()
    teacher_x, teacher_w = torch.randn_like(x), torch.randn_like(w) / d**0.5
    ids = torch.randint(v, (n,), device="cuda")
    old, advantages, weights = (torch.randn(n, device="cuda") for _ in range(3))

    def product() -> object:
        return torch.mm(x.detach(), frozen.t())

    def pulled(loss: torch.Tensor, *of: torch.Tensor) -> object:
        return torch.autograd.grad(loss, of)

    def log_probs(weight: torch.Tensor, entropy: bool) -> object:
        found = dcs.linear_log_probs(x, weight, ids, need_entropy=entropy)
        loss = (found[0] * weights + 0.01 * found[1]).sum() if entropy else (found * weights).sum()
        return pulled(loss, x, *[weight] * weight.requires_grad)

    # Ratios from 0.8 to 1.2 and beyond, as after a few steps of a policy.
    with torch.no_grad():
        old = dcs.linear_log_probs(x, w, ids, need_entropy=False) + 0.2 * old

    def row_loss(
        log_probs: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        ratio = (log_probs - old).exp()
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def entropic_loss(
        log_probs: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        return row_loss(log_probs, entropy, old, advantages) - 0.01 * entropy

    def policy(**options: object) -> object:
        return pulled(dcs.linear_policy_loss(x, w, ids, row_loss, old, advantages, **options), x, w)

    def policy_with_entropy() -> object:
        return pulled(dcs.linear_policy_loss(x, w, ids, entropic_loss, old, advantages), x, w)

    def divergence(direction: str = "forward", weight: torch.Tensor = w) -> object:
        loss = dcs.linear_kl_div(x, weight, teacher_x, teacher_w, direction=direction)
        return pulled(loss, x, *[weight] * weight.requires_grad)

    def divergence_of_rows() -> object:
        rows = dcs.linear_kl_div(x, w, teacher_x, teacher_w, reduction="none")
        return pulled((rows * weights).sum(), x, w)

    def dense(step: Callable[[], object]) -> Callable[[], object]:
        """With ignored rows in the products, whose number nobody asks for."""

        def run() -> object:
            least, valid_rows.LEAST_PRODUCT = valid_rows.LEAST_PRODUCT, 1 << 62
            try:
                return step()
            finally:
                valid_rows.LEAST_PRODUCT = least

        return run

    return {
        "product": (product, 1),
        "log_probs and entropy": (lambda: log_probs(w, True), 4),
        "log_probs and entropy, dense": (dense(lambda: log_probs(w, True)), 4),
        "log_probs": (lambda: log_probs(w, False), 4),
        "log_probs, frozen weight": (lambda: log_probs(frozen, False), 2),
        "log_probs, frozen weight, dense": (dense(lambda: log_probs(frozen, False)), 2),
        "policy loss": (lambda: policy(need_entropy=False), 3),
        "policy loss, dense": (dense(lambda: policy(need_entropy=False)), 3),
        "policy loss, entropy made": (policy, 3),
        "policy loss with entropy": (policy_with_entropy, 3),
        "kl_div, frozen teacher": (divergence, 4),
        "kl_div, two frozen heads": (lambda: divergence(weight=frozen), 3),
        "reverse kl_div, frozen teacher": (lambda: divergence("reverse"), 4),
        "jsd, frozen teacher": (lambda: divergence("jsd"), 4),
        "kl_div of rows, frozen teacher": (divergence_of_rows, 6),
    }


def measure(n: int, d: int, v: int, dtype: torch.dtype, turns: int, with_kernels: bool) -> list[dict[str, Any]]:
    steps = steps_of(n, d, v, dtype)
    alone = {name: step for name, (step, _) in steps.items()}
    times, queued = (seconds(alone, turns, is_queued) for is_queued in (False, True))
    rows: list[dict[str, Any]] = []
    for name, (step, products) in steps.items():
        row: dict[str, Any] = {
            "case": f"{n}x{d}x{v}",
            "dtype": str(dtype).removeprefix("torch."),
            "name": name,
            "milliseconds": times[name] * 1e3,
            "milliseconds_queued": queued[name] * 1e3,
            "products": products,
            "over_products": times[name] / (products * times["product"]),
            "over_products_queued": queued[name] / (products * queued["product"]),
            "added_bytes": (added := added_bytes(step)),
        }
        if with_kernels:
            row["kernels"] = kernels(step)
        rows.append(row)
        print(
            f"{row['case']:>18} {name:31} {times[name] * 1e3:8.2f} ms {row['over_products']:.3f}, queued "
            f"{row['over_products_queued']:.3f} x {products}, {added / 2**30:.2f} GiB",
            *(f"{kind} {value:.2f}" for kind, value in row.get("kernels", {}).items()),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="also what the GPU's time goes to")
    parser.add_argument("--peers", action="store_true", help="also other packages' functions, where they are")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes, from the first")
    options = parser.parse_args()
    torch.manual_seed(0)
    facts: dict[str, Any] = {"environment": environment(options.commit), "rows": [], "peers": []}

    def keep(name: str, rows: list[dict[str, Any]]) -> None:
        facts[name] = [*facts[name], *rows]
        if options.output:  # after every part, as the rest may not be reached
            options.output.write_text(json.dumps(facts, indent=1) + "\n")

    for shape in SHAPES[: options.shapes]:
        keep("rows", measure(*shape, torch.bfloat16, options.turns, options.kernels))
    if options.peers:
        from linear_cross_entropy.head_peers import compare

        for shape in SHAPES[: min(options.shapes, 2)]:
            for row in compare(*shape, options.turns):
                keep("peers", [row])


if __name__ == "__main__":
    main()
