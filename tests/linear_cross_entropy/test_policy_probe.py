"""Losses of sequences in place of losses of rows: linear_policy_loss refuses what mixes rows anywhere in a call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_log_probs, linear_policy_loss
from torch_dcs_ops.ops.linear_cross_entropy import row_probe

from linear_cross_entropy.oracle import leaf, make

SEQUENCES, STEPS, V = 8, 6, 13
ROWS = SEQUENCES * STEPS
REFUSED = "linear_policy_loss: loss_fn must give the loss of a row from that row alone.*got a loss that changes with"


@pytest.fixture(autouse=True)
def _nothing_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this test for another device."""
    monkeypatch.setattr(row_probe, "_probed", weakref.WeakKeyDictionary())


def _of_sequences(values: Tensor, sequence: Tensor) -> Tensor:
    """The sum over each row's sequence."""
    return torch.zeros_like(values[:1]).expand(SEQUENCES).index_add(0, sequence, values)[sequence]


def _gspo(log_probs: Tensor, _: Any, old: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
    ratio = (_of_sequences(log_probs - old, sequence) / STEPS).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


# Losses of (log_probs, entropy, old, advantages, sequence).
MIXING: dict[str, Any] = {
    "a ratio of sequences": _gspo,
    "a detached ratio of sequences": lambda p, _, old, a, s: a * p * _of_sequences(p.detach() - old, s).exp(),
    "a mean over sequences": lambda p, _, old, a, s: a * p / _of_sequences(torch.ones_like(p), s),
    "an entropy of sequences": lambda p, h, old, a, s: a * p - _of_sequences(h, s),
    "the row after the next": lambda p, _, old, a, s: a * p + 0.01 * p.roll(2),
    "the first row": lambda p, _, old, a, s: a * p - p[0],
    "a rare case": lambda p, _, old, a, s: torch.where(s == 1, p * p.mean(), p),
    "next to nothing": lambda p, _, old, a, s: p + 1e-9 * p.cumsum(0),
}
APART: dict[str, Any] = {
    "the ratio of every row": lambda p, h, old, a, s: -(p - old).exp().clamp(0.8, 1.2) * a - 0.01 * h,
    "nan and inf in some": lambda p, h, old, a, s: (
        p * torch.where(s == 1, torch.nan, torch.where(s == 2, torch.inf, a))
    ),
    "nan among its gradients": lambda p, h, old, a, s: p + (p - p.detach()).sqrt(),
    "a table": lambda p, h, old, a, s: (p[:, None] * torch.stack((old, a), 1)).logsumexp(1),
    "a look-up": lambda p, h, old, a, s: p * torch.arange(1.0, 9.0, dtype=p.dtype, device=p.device)[s],
    "numbers near each other": lambda p, h, old, a, s: (old * 1e-7).exp() - old * 1e-7 - 1 + 0 * p,
}


def call(device: str, fn: Any, *, by_time: bool = False, budget: int | None = None, reduction: str = "mean") -> Tensor:
    """Rows in the order of sequences or of time, of a policy that is the old one."""
    problem = make((ROWS,), device=device, ignored=0.0)
    sequence = torch.arange(ROWS, device=device)
    sequence = sequence % SEQUENCES if by_time else sequence // STEPS
    x, w, target = leaf(problem.input), problem.linear_weight, problem.target
    old = linear_log_probs(x.detach(), w, target, need_entropy=False)
    args = old, problem.input[:, 0], sequence
    loss: Tensor = linear_policy_loss(x, w, target, fn, *args, memory_budget=budget, reduction=reduction)
    return loss


@pytest.mark.parametrize("chunk", [ROWS, 8, 1])
@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("name", MIXING)
def test_rows_of_a_sequence_mix(device: str, name: str, by_time: bool, chunk: int) -> None:
    """In chunks too of which each has one row of a sequence, and once more after the first refusal."""
    fn = MIXING[name]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            call(device, fn, by_time=by_time, budget=chunk * V * 8)


@pytest.mark.parametrize("name", MIXING)
def test_rows_of_a_sequence_mix_where_all_come_at_once(device: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED + ".*must come in row_args, or the loss be made of"):
        call(device, MIXING[name], reduction="none")


@pytest.mark.parametrize("chunk", [ROWS, 8, 1])
@pytest.mark.parametrize("name", APART)
def test_rows_that_do_not_mix(device: str, name: str, chunk: int) -> None:
    for by_time in (False, True):
        assert call(device, APART[name], by_time=by_time, budget=chunk * V * 8).requires_grad


def test_rows_that_mix_are_told_of_many(device: str) -> None:
    """As many rows as are looked at across chunks, and more."""
    count = 2 * row_probe._SPREAD_ROWS + 3
    problem = make((count,), dtype=torch.float32, device=device, ignored=0.0)
    sequence = torch.arange(count, device=device) % 4000

    def mean(log_probs: Tensor, _: Tensor, sequence: Tensor) -> Tensor:
        return log_probs.new_zeros(4000).index_add(0, sequence, log_probs)[sequence]

    with pytest.raises(RuntimeError, match=REFUSED):
        linear_policy_loss(
            leaf(problem.input), problem.linear_weight, problem.target, mean, sequence, memory_budget=2000 * V * 4
        )


def test_a_function_that_is_defined_anew_is_looked_at_once(device: str) -> None:
    """Its code is the same; one with another flag, or around another function, is not."""
    calls: list[None] = []  # a number in a loss's closure would count as what it is made with

    def made(clip: float, mixes: bool, inner: Any = None) -> Any:
        def loss(log_probs: Tensor, _: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
            calls.append(None)
            rows = (
                -((log_probs - old).exp().clamp(1 - clip, 1 + clip) * advantages) if inner is None else inner(log_probs)
            )
            return rows - rows.mean() if mixes else rows

        return loss

    def calls_of(loss: Any) -> int:
        before = len(calls)
        call(device, loss)
        return len(calls) - before

    assert calls_of(made(0.2, False)) > calls_of(made(0.3, False)) == 1
    with pytest.raises(RuntimeError, match=REFUSED):
        call(device, made(0.3, True))
    assert calls_of(made(0.2, False, torch.exp)) > 1
    with pytest.raises(RuntimeError, match=REFUSED):
        call(device, made(0.2, False, lambda log_probs: log_probs.cumsum(0)))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 12, 31, 64, 100])
def test_splits_part_any_two_rows(count: int) -> None:
    splits = torch.stack(list(row_probe._splits(count, torch.device("cpu")))).double()
    assert splits.size(0) <= 2 * (count - 1).bit_length() + 1
    with_and_without = splits.t() @ (1 - splits)
    assert bool((with_and_without.fill_diagonal_(1) > 0).all())


class Aggregation(enum.Enum):
    TOKEN = 0
    SEQUENCE = 1


@dataclasses.dataclass
class Trainer:
    """Not hashable, and another one's losses have the same code."""

    aggregation: Aggregation
    steps: int = 0

    def __call__(self, log_probs: Tensor, _: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
        self.steps += 1
        if self.aggregation is Aggregation.SEQUENCE:
            return _gspo(log_probs, _, old, advantages, sequence)
        return -advantages * (log_probs - old).exp()

    def method(self, *args: Tensor) -> Tensor:
        return self(*args)


@pytest.mark.parametrize("kind", ["object", "method", "partial", "closure", "config"])
def test_what_a_loss_is_made_with_counts(device: str, kind: str) -> None:
    """Losses with the same code: looked at once each, whoever calls them."""

    def loss_of(trainer: Trainer) -> Any:
        config = {"aggregation": trainer.aggregation}

        def by_config(*args: Tensor) -> Tensor:
            trainer.steps += 1
            return Trainer(config["aggregation"])(*args)

        return {
            "object": trainer,
            "method": trainer.method,
            "partial": functools.partial(Trainer.__call__, trainer),
            "closure": lambda *args: trainer(*args),
            "config": by_config,
        }[kind]

    first = Trainer(Aggregation.TOKEN)
    call(device, loss_of(first))
    before = first.steps
    call(device, loss_of(first))
    assert first.steps == before + 1
    with pytest.raises(RuntimeError, match=REFUSED):
        call(device, loss_of(Trainer(Aggregation.SEQUENCE)))


def test_a_number_that_changes_in_every_step_is_not_looked_at_for_ever(device: str) -> None:
    calls = []

    def made(step: int) -> Any:
        def loss(log_probs: Tensor, _: Any, old: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
            calls.append(step)
            return -advantages * log_probs / (1 + step)

        return loss

    for step in range(row_probe._MOST_KEYS + 2):
        call(device, made(step))
    assert calls.count(row_probe._MOST_KEYS - 1) > calls.count(row_probe._MOST_KEYS + 1) == 1


@pytest.mark.parametrize("budget", [None, 8 * V * 8])
def test_checkpointed(device: str, budget: int | None) -> None:
    """The looks are no part of what is saved and made again."""
    from torch.utils.checkpoint import checkpoint

    problem = make((ROWS,), device=device, ignored=0.0)
    x = leaf(problem.input)

    def loss_fn(log_probs: Tensor, _: Tensor) -> Tensor:
        return -log_probs * (log_probs.detach() / 7).exp()

    def step(hidden: Tensor) -> Tensor:
        loss: Tensor = linear_policy_loss(
            hidden * 1.0, problem.linear_weight, problem.target, loss_fn, memory_budget=budget
        )
        return loss

    checkpoint(step, x, use_reentrant=False).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.autograd.grad(step(x), x)[0])


def test_anomalies_of_other_values(device: str) -> None:
    """The looks have differences of two arguments that are negative."""
    problem = make((ROWS,), device=device, ignored=0.0)
    low = torch.linspace(0.1, 1, ROWS, device=device, dtype=problem.input.dtype)
    with torch.autograd.set_detect_anomaly(True):
        loss = linear_policy_loss(
            leaf(problem.input), problem.linear_weight, problem.target,
            lambda log_probs, _, low, high: ((high - low) * -log_probs).sqrt(), low, low + 0.05,
        )  # fmt: skip
        loss.backward()
    assert bool(loss.isfinite())


def test_compiled_losses_round_in_their_own_way(device: str) -> None:
    """The difference of two numbers near each other, all of it rounding: another one for another number of rows."""
    problem = make((ROWS,), dtype=torch.float32, device=device, ignored=0.0)
    x, w, target = leaf(problem.input), problem.linear_weight, problem.target
    old = linear_log_probs(x.detach(), w, target, need_entropy=False)

    def loss(log_probs: Tensor, _: Tensor, old: Tensor) -> Tensor:
        difference = old - log_probs
        return difference.expm1() - difference

    compiled = torch.compile(loss)
    assert linear_policy_loss(x, w, target, compiled, old + 1e-4 * torch.randn_like(old)).requires_grad


def test_errors_of_a_few_rows(device: str) -> None:
    sentence = "linear_policy_loss: loss_fn must take some rows at a time, got an error for 4 of them or for 1: "
    with pytest.raises(RuntimeError, match=sentence + "index 30 is out of bounds"):
        call(device, lambda p, h, old, a, s: p + 0 * p[30])
