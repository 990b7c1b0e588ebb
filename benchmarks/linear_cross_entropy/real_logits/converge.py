"""Whether training with filtered gradients ends where training with exact ones does.

The demo's language model (examples/language_model.py) is trained from several seeds with either loss, a pair on the
same batches from the same parameters. The mean difference of the held-out losses is to lie within the spread of the
exact ones over the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.examples.language_model import LanguageModel
from torch_dcs_ops.ops.linear_cross_entropy.filter import LEAST_ODDS

from linear_cross_entropy.functions import Loss
from linear_cross_entropy.real_logits.gradients import kept_fraction, power_name
from linear_cross_entropy.real_logits.model import batches
from linear_cross_entropy.real_logits.tokens import Tokens

WARM_UP_STEPS = 20
HELD_OUT_SEQUENCES = 64


@dataclass(frozen=True)
class Setting:
    """The demo's sizes; the schedule is linear, behind a warm-up."""

    steps: int
    rows: int = 8
    length: int = 128
    width: int = 64
    layers: int = 2
    heads: int = 4
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class Outcome:
    loss: float  # held out, nats per token
    kept: float  # of the columns, in the first block of the held-out rows; 1 for the exact gradient


def shifted(eps: float | None) -> Loss:
    return lambda x, w, y: linear_cross_entropy(x, w, y, shift=True, grad_filter_eps=eps)


def train(tokens: Tokens, setting: Setting, eps: float | None, seed: int, device: torch.device) -> Outcome:
    """One run; `eps` None is the exact gradient."""
    ids = torch.from_numpy(tokens.ids.astype("int64")).to(device)
    torch.manual_seed(seed)
    model = LanguageModel(
        tokens.source.vocabulary,
        length=setting.length,
        width=setting.width,
        layers=setting.layers,
        heads=setting.heads,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(seed)
    data = batches(ids[: tokens.held_out], setting.length, setting.rows, generator)
    loss = shifted(eps)
    for step in range(setting.steps):
        rate = setting.learning_rate * min((step + 1) / WARM_UP_STEPS, 1.0 - 0.9 * step / setting.steps)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model.loss(next(data), loss).backward()
        optimizer.step()
    return _held_out(model, ids[tokens.held_out :], setting, eps)


@torch.no_grad()
def _held_out(model: LanguageModel, ids: Tensor, setting: Setting, eps: float | None) -> Outcome:
    windows = ids[: HELD_OUT_SEQUENCES * setting.length].unfold(0, setting.length, setting.length)
    seen: list[Tensor] = []

    def exact(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        return shifted(None)(x, w, y)

    losses = [model.loss(part, exact) * part.size(0) for part in windows.split(setting.rows)]
    kept = 1.0
    if eps is not None:
        x = seen[0][:, :-1].flatten(0, 1)
        kept = kept_fraction(x, model.embedding.weight, windows[: setting.rows, 1:].flatten(), eps)
    return Outcome(float(torch.stack(losses).sum()) / windows.size(0), kept)


def converge(
    tokens: Tokens, setting: Setting, seeds: Sequence[int], filters: Sequence[float], device: torch.device
) -> list[dict[str, Any]]:
    """A record of the exact runs, and one of each eps beside them; ValueError for an eps at which the op is exact."""
    least = LEAST_ODDS / tokens.source.vocabulary
    for eps in filters:
        if eps < least:
            raise ValueError(
                f"eps must be at least {LEAST_ODDS}/V = {least:.3g}, below which the gradient is exact, got {eps}"
            )
    exact = [_run(tokens, setting, None, seed, device).loss for seed in seeds]
    spread = max(exact) - min(exact)
    records: list[dict[str, Any]] = [{"eps": None, "losses": exact, "spread": spread}]
    for eps in filters:
        outcomes = [_run(tokens, setting, eps, seed, device) for seed in seeds]
        losses = [outcome.loss for outcome in outcomes]
        difference = statistics.mean(losses) - statistics.mean(exact)
        records.append(
            {
                "eps": eps,
                "losses": losses,
                "kept": statistics.mean(outcome.kept for outcome in outcomes),
                "difference": difference,
                "spread": spread,
                "within": abs(difference) <= spread,
            }
        )
    return records


def _run(tokens: Tokens, setting: Setting, eps: float | None, seed: int, device: torch.device) -> Outcome:
    outcome = train(tokens, setting, eps, seed, device)
    what = "exact" if eps is None else f"eps {power_name(eps)}, {outcome.kept:.1%} of the columns kept"
    print(f"seed {seed}: held-out loss {outcome.loss:.4f}  ({what})", flush=True)
    return outcome


def print_records(records: Sequence[dict[str, Any]]) -> None:
    for record in records[1:]:
        verdict = "within" if record["within"] else "outside"
        distance = f"{record['difference']:+.4f} nats from the exact runs' mean"
        print(
            f"eps {power_name(record['eps'])}: held-out loss {distance}, {verdict} their spread over the seeds, "
            f"{record['spread']:.4f}; {record['kept']:.1%} of the columns kept"
        )
