"""The losses of docs/policy_losses.md against formulas over plain log-probabilities, one sequence after another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torch_dcs_ops import linear_policy_loss

from linear_cross_entropy.oracle import leaf

PAGE = Path(__file__).parents[2] / "docs" / "policy_losses.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not a source checkout")
B, T, D, V = 6, 9, 5, 17


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The page's functions."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


class Batch(NamedTuple):
    hidden: Tensor
    head: Tensor
    targets: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor

    @property
    def lengths(self) -> Tensor:
        return (self.targets != -100).sum(1)


@pytest.fixture
def batch(device: str) -> Batch:
    """The policies are far enough apart that ratios are bounded on either side."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device)

    targets = torch.randint(V, (B, T), device=device)
    targets[:, 0], targets[2, 4:], targets[3, 2:] = -100, -100, -100
    hidden, head, advantages = normal(B, T, D), normal(V, D), normal(B)
    old, ref = (tokens(hidden + 0.3 * normal(B, T, D), head, targets)[0] for _ in range(2))
    return Batch(leaf(hidden), leaf(head), targets, old, ref, advantages)


def tokens(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropy) of every token, 0 where there is none."""
    policy = torch.distributions.Categorical(logits=hidden @ head.t())
    mask = targets != -100
    return torch.where(mask, policy.log_prob(targets.clamp(min=0)), 0), torch.where(mask, policy.entropy(), 0)


def same(batch: Batch, got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(loss, (batch.hidden, batch.head)) for loss in (got, wanted)]
    torch.testing.assert_close(*gradients)
    assert all(bool(g.any()) for g in gradients[0])


def over_tokens(batch: Batch, of_token: Callable[..., Tensor]) -> list[list[Tensor]]:
    """of_token(log-probability, entropy, old, reference, advantage) of every sequence's tokens."""
    log_probs, entropy = tokens(batch.hidden, batch.head, batch.targets)
    return [
        [
            of_token(log_probs[b, t], entropy[b, t], batch.old[b, t], batch.ref[b, t], batch.advantages[b])
            for t in range(T)
            if batch.targets[b, t] != -100
        ]
        for b in range(B)
    ]


def clipped(ratio: Tensor, advantage: Tensor, low: float = 0.8, high: float = 1.2) -> Tensor:
    """The four cases of PPO's objective, negated."""
    bound = high if advantage > 0 else low
    is_bounded = ratio > bound if advantage > 0 else ratio < bound
    return -advantage * bound if is_bounded else -advantage * ratio


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def joined(sequences: list[list[Tensor]]) -> list[Tensor]:
    return [value for sequence in sequences for value in sequence]


def run(batch: Batch, fn: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    loss: Tensor = linear_policy_loss(*batch[:3], fn, *args, memory_budget=10 * V * 8, **options)
    return loss


def test_ppo(batch: Batch, page: dict[str, Any]) -> None:
    got = run(batch, page["ppo"], batch.old, batch.advantages.unsqueeze(1))
    terms = joined(over_tokens(batch, lambda p, h, old, ref, a: clipped((p - old).exp(), a) - 0.01 * h))
    same(batch, got, mean(terms))
    ratios = joined(over_tokens(batch, lambda p, h, old, ref, a: (p - old).exp()))
    assert any(ratio > 1.2 for ratio in ratios)
    assert any(ratio < 0.8 for ratio in ratios)


def test_grpo(batch: Batch, page: dict[str, Any]) -> None:
    advantages, weights = batch.advantages.unsqueeze(1), 1 / (B * batch.lengths.unsqueeze(1))
    got = run(batch, page["grpo"], batch.old, batch.ref, advantages, weights, reduction="sum", need_entropy=False)

    def token(p: Tensor, h: Tensor, old: Tensor, ref: Tensor, a: Tensor) -> Tensor:
        return clipped((p - old).exp(), a) + 0.04 * ((ref - p).exp() - (ref - p) - 1)

    same(batch, got, mean([mean(sequence) for sequence in over_tokens(batch, token)]))


def test_dr_grpo(batch: Batch, page: dict[str, Any]) -> None:
    args = batch.old, batch.advantages.unsqueeze(1), 1 / (B * 20)
    got = run(batch, page["dr_grpo"], *args, reduction="sum", need_entropy=False)
    terms = joined(over_tokens(batch, lambda p, h, old, ref, a: clipped((p - old).exp(), a)))
    same(batch, got, torch.stack(terms).sum() / B / 20)


def test_dapo(batch: Batch, page: dict[str, Any]) -> None:
    got = run(batch, page["dapo"], batch.old, batch.advantages.unsqueeze(1), need_entropy=False)
    terms = joined(over_tokens(batch, lambda p, h, old, ref, a: clipped((p - old).exp(), a, high=1.28)))
    same(batch, got, mean(terms))


def test_cispo(batch: Batch, page: dict[str, Any]) -> None:
    def cispo(*args: Tensor) -> Tensor:
        bounded: Tensor = page["cispo"](*args, most=1.1)
        return bounded

    got = run(batch, cispo, batch.old, batch.advantages.unsqueeze(1), need_entropy=False)

    def token(p: Tensor, h: Tensor, old: Tensor, ref: Tensor, a: Tensor) -> Tensor:
        return -min(float((p - old).exp().detach()), 1.1) * a * p

    same(batch, got, mean(joined(over_tokens(batch, token))))


def test_gspo(batch: Batch, page: dict[str, Any]) -> None:
    """The sum of a sequence's differences over its tokens is bounded, as one ratio."""
    mask = batch.targets != -100
    ours = page["linear_log_probs"](*batch[:3], need_entropy=False)
    got = page["gspo"](ours, batch.old, mask, batch.advantages, low=0.02, high=0.03)
    terms = []
    for sequence, a in zip(over_tokens(batch, lambda p, h, old, ref, a: p - old), batch.advantages, strict=True):
        terms.append(clipped(mean(sequence).exp(), a, 0.98, 1.03))
    same(batch, got, mean(terms))


def sums(batch: Batch, page: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Of the page's function as pairs, and of plain log-probabilities."""
    ours = page["sequence_log_probs"](*batch[:3])
    return ours.view(2, B // 2), [torch.stack(s).sum() for s in over_tokens(batch, lambda p, *_: p)]


def test_dpo(batch: Batch, page: dict[str, Any]) -> None:
    ours, plain = sums(batch, page)
    reference = batch.ref.sum(1)
    ratios = [p - r for p, r in zip(plain, reference, strict=True)]
    terms = [-functional.logsigmoid(0.3 * (ratios[i] - ratios[i + B // 2])) for i in range(B // 2)]
    same(batch, page["dpo"](ours, reference.view(2, -1), beta=0.3), mean(terms))


def test_orpo(batch: Batch, page: dict[str, Any]) -> None:
    ours, plain = sums(batch, page)
    means = [p / n for p, n in zip(plain, batch.lengths, strict=True)]
    odds = [p.exp() / (1 - p.exp()) for p in means]
    terms = [-means[i] + 0.2 * (1 + odds[i + B // 2] / odds[i]).log() for i in range(B // 2)]
    same(batch, page["orpo"](ours, batch.lengths.view(2, -1), factor=0.2), mean(terms))


def test_simpo(batch: Batch, page: dict[str, Any]) -> None:
    ours, plain = sums(batch, page)
    means = [p / n for p, n in zip(plain, batch.lengths, strict=True)]
    terms = [-torch.sigmoid(2.5 * means[i] - 2.5 * means[i + B // 2] - 1.4).log() for i in range(B // 2)]
    same(batch, page["simpo"](ours, batch.lengths.view(2, -1), beta=2.5, margin=1.4), mean(terms))


def test_kto(batch: Batch, page: dict[str, Any]) -> None:
    ours, plain = sums(batch, page)
    reference, point = batch.ref.sum(1), torch.tensor(0.3, dtype=torch.float64, device=batch.ref.device)
    desirable = torch.arange(B, device=batch.ref.device) % 3 == 0
    terms = []
    for b in range(B):
        ratio = plain[b] - reference[b]
        value = torch.sigmoid(0.2 * (ratio - point)) if desirable[b] else torch.sigmoid(0.2 * (point - ratio))
        terms.append(1 - value)
    same(batch, page["kto"](ours.flatten() - reference, desirable, point, beta=0.2), mean(terms))
