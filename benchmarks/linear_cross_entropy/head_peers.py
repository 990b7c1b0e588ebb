"""Log-probabilities with entropy, cross entropy and divergences of heads, of other packages beside ours (policies.py).

Every function is checked before it is timed: its loss, and input's gradient of the first rows, against float64, and
linear_weight's beside ours. What is not installed is left out, what fails is a row that says why.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import reason_of
from torch import Tensor
from torch.nn import functional

import torch_dcs_ops as dcs

CHECKED_ROWS = 32
ENTROPY_WEIGHT = 0.01


class Operands(NamedTuple):
    x: Tensor
    w: Tensor
    ids: Tensor
    weights: Tensor  # of the rows' log-probabilities
    teacher_x: Tensor
    teacher_w: Tensor


Loss = Callable[[Operands], Tensor]


def weighted(log_probs: Tensor, entropy: Tensor, of: Operands) -> Tensor:
    return (log_probs * of.weights + ENTROPY_WEIGHT * entropy).sum()


def plain_log_probs(of: Operands) -> Tensor:
    log_p = functional.linear(of.x, of.w).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return weighted(log_p.gather(1, of.ids.unsqueeze(1)).squeeze(1), entropy, of)


def plain_divergence(of: Operands, kind: str) -> Tensor:
    log_p, log_q = (
        functional.linear(x, w).float().log_softmax(-1) for x, w in ((of.x, of.w), (of.teacher_x, of.teacher_w))
    )
    if kind == "forward":
        return functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    halves = (functional.kl_div(log_m, log, reduction="batchmean", log_target=True) for log in (log_p, log_q))
    total: Tensor = sum(halves) / 2  # type: ignore[assignment]
    return total


def exact(of: Operands, plain: Loss) -> tuple[Tensor, Tensor]:
    """input's gradient of the first rows in float64, of a loss that is a sum or a mean over rows, and their loss."""
    some = CHECKED_ROWS
    x = of.x[:some].detach().double().requires_grad_()
    wide = Operands(x, of.w.detach().double(), of.ids[:some], of.weights[:some].double(), of.teacher_x[:some].double(),
                    of.teacher_w.double())  # fmt: skip
    loss = plain(wide)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def has(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def compiled(plain: Loss) -> Loss:
    torch._dynamo.reset()
    return torch.compile(plain, dynamic=False)


def log_probs() -> Iterator[tuple[str, Callable[[], Loss]]]:
    yield "dcs", lambda: lambda of: weighted(*dcs.linear_log_probs(of.x, of.w, of.ids), of)
    yield "torch.compile", lambda: compiled(plain_log_probs)
    if has("liger_kernel"):
        yield "Liger, torch chunks", lambda: liger_scaled("_FusedLinearPPOFallbackFunction")
    if has("liger_kernel", "cutlass"):
        yield "Liger, SM90", lambda: liger_scaled("LigerFusedLinearScaledCrossEntropyFunction")


def liger_scaled(name: str) -> Loss:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = getattr(module, name)

    def loss(of: Operands) -> Tensor:
        if name.startswith("_"):
            nll, entropy = function.apply(of.x, of.w, of.ids, 1.0, -100, True)[:2]
        else:
            nll, entropy = function.apply(of.x, of.w, of.ids, return_entropy=True)
        return weighted(-nll, entropy, of)

    return loss


def plain_cross_entropy(of: Operands) -> Tensor:
    return functional.cross_entropy(functional.linear(of.x, of.w).float(), of.ids)


def cross_entropy() -> Iterator[tuple[str, Callable[[], Loss]]]:
    yield "dcs", lambda: lambda of: dcs.linear_cross_entropy(of.x, of.w, of.ids)
    yield "torch.compile", lambda: compiled(plain_cross_entropy)
    if has("liger_kernel"):
        yield "Liger, Triton", liger_cross_entropy
    if has("liger_kernel", "cutlass"):
        yield "Liger, SM90", liger_cross_entropy_sm90
    if has("quack", "cutlass"):
        yield "QuACK", quack_cross_entropy
    if has("cut_cross_entropy"):
        yield "CCE, exact", lambda: cut_cross_entropy("cce_exact")
        yield "CCE, filtered", lambda: cut_cross_entropy("cce")


def liger_cross_entropy() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda of: loss(of.w, of.x, of.ids)


def liger_cross_entropy_sm90() -> Loss:
    # Beside it, fused_linear_cross_entropy has the kernels of capability 10.0 alone.
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return lambda of: liger_fused_linear_cross_entropy_sm90(of.x, of.w, of.ids)


def quack_cross_entropy() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda of: chunked_linear_cross_entropy(of.x, of.w, of.ids)


def cut_cross_entropy(kind: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    if kind == "cce":
        return lambda of: linear_cross_entropy(of.x, of.w, of.ids)
    return lambda of: linear_cross_entropy(of.x, of.w, of.ids, filter_eps=None)


def divergences(kind: str) -> Iterator[tuple[str, Callable[[], Loss]]]:
    def own(of: Operands) -> Tensor:
        return dcs.linear_kl_div(of.x, of.w, of.teacher_x, of.teacher_w, direction=kind)

    yield "dcs", lambda: own
    yield "torch.compile", lambda: compiled(lambda of: plain_divergence(of, kind))
    if has("liger_kernel"):
        yield "Liger, Triton", lambda: liger_divergence(kind)


def liger_divergence(kind: str) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta={"forward": 0.0, "jsd": 0.5}[kind])
    return lambda of: loss(of.x, of.w, of.teacher_x, of.teacher_w, None)


TASKS: tuple[tuple[str, Callable[[], Iterator[tuple[str, Callable[[], Loss]]]], Loss, int], ...] = (
    ("log_probs and entropy", log_probs, plain_log_probs, 4),
    ("cross entropy", cross_entropy, plain_cross_entropy, 3),
    ("kl_div", lambda: divergences("forward"), lambda of: plain_divergence(of, "forward"), 4),
    ("jsd", lambda: divergences("jsd"), lambda of: plain_divergence(of, "jsd"), 4),
)  # fmt: skip


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compare(n: int, d: int, v: int, turns: int) -> Iterator[dict[str, Any]]:
    """A row for every task and package."""
    x = torch.randn(n, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(v, d, device="cuda", dtype=torch.bfloat16) / d**0.5).requires_grad_()
    ids = torch.randint(v, (n,), device="cuda")
    weights = torch.randn(n, device="cuda") / n
    of = Operands(x, w, ids, weights, torch.randn_like(x), torch.randn_like(w) / d**0.5)
    x_of_product, w_of_product = x.detach(), w.detach().t()
    for task, candidates, plain, products in TASKS:
        _, exact_gradient = exact(of, plain)
        if task != "log_probs and entropy":
            exact_gradient = exact_gradient * (CHECKED_ROWS / n)  # of a mean over fewer rows
        own: Tensor | None = None
        for name, make in candidates():
            row: dict[str, Any] = {"case": f"{n}x{d}x{v}", "task": task, "name": name}
            gc.collect()
            torch.cuda.empty_cache()
            try:
                loss = make()

                def step(loss: Loss = loss) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(loss(of), (x, w))

                step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                grad_x, grad_w = step()
                torch.cuda.synchronize()
                row["added_bytes"] = torch.cuda.max_memory_allocated() - before
                row["error_of_input_gradient"] = error_of(grad_x[:CHECKED_ROWS], exact_gradient)
                own = grad_w.detach() if own is None else own
                row["weight_gradient_from_ours"] = error_of(grad_w[:4096], own[:4096])
                del grad_x, grad_w
                row["milliseconds"], product = in_turn(step, lambda: x_of_product @ w_of_product, turns=turns)
                row["product_milliseconds"] = product
                row["over_products"] = row["milliseconds"] / (products * product)
            except Exception as error:  # what cannot do it says so in the table
                row["failed"] = reason_of(error)
            print(
                f"{row['case']:>18} {task:22} {name:20}",
                row.get("failed")
                or f"{row['milliseconds']:8.2f} ms {row['over_products']:.2f} x {products}, "
                f"{row['added_bytes'] / 2**30:.2f} GiB, dX {row['error_of_input_gradient']:.1e}, "
                f"dW {row['weight_gradient_from_ours']:.1e}",
                flush=True,
            )
            yield row


def in_turn(*steps: Callable[[], object], turns: int) -> list[float]:
    """Milliseconds of each, the median of single steps, each from an idle GPU, one after the other in every turn."""
    from linear_cross_entropy.policies import seconds

    named = {str(place): step for place, step in enumerate(steps)}
    return [1e3 * taken for taken in seconds(named, turns, False).values()]
