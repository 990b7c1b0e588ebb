"""GRPO from nothing: a small network learns to add two digits by a checker's word alone, by linear_policy_loss.

A prompt is "a+b=", an answer some digits and a stop; answers to one prompt are compared with each other. The first
steps run again with TRL's formula over a plain log-softmax and the same seed: losses differ by float32's rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_dcs_ops import linear_log_probs, linear_policy_loss
from torch_dcs_ops.examples.curves import draw

TITLE = "GRPO on sums of two digits"
SYMBOLS = "0123456789+=."  # a full stop ends an answer, and fills what is behind it
STOP, PROMPT, ANSWER = 12, 4, 3
GROUP, PROMPTS, EPOCHS, BOUNDS, ENTROPY = 16, 48, 2, (0.8, 1.28), 0.06
CHECKED_STEPS, TOLERANCE = 10, 1e-5


class Policy(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.symbols = nn.Embedding(len(SYMBOLS), width)
        self.cells = nn.GRU(width, 2 * width, batch_first=True)
        self.head = nn.Parameter(torch.randn(len(SYMBOLS), 2 * width) * (2 * width) ** -0.5)

    @torch.no_grad()
    def answers(self, prompts: Tensor, *, greedy: bool = False) -> Tensor:
        """Answers to prompts (B, PROMPT)."""
        symbols, answers, state = prompts, prompts[:, :0], None
        for _ in range(ANSWER):
            hidden, state = self.cells(self.symbols(symbols), state)
            logits = hidden[:, -1] @ self.head.T
            symbols = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
            symbols = symbols.masked_fill((answers == STOP).any(1, keepdim=True), STOP)
            answers = torch.cat((answers, symbols), 1)
        return answers


def prompts_of(a: Tensor, b: Tensor) -> Tensor:
    plus, equals = (torch.full_like(a, SYMBOLS.index(symbol)) for symbol in "+=")
    return torch.stack((a, plus, b, equals), 1)


def checked(prompts: Tensor, answers: Tensor) -> Tensor:
    """1 for the right sum, 0.1 for another number, 0 for what is no number."""
    first, second, end = answers.unbind(1)
    is_number = (first < 10) & ((second == STOP) | ((first > 0) & (second < 10) & (end == STOP)))
    total = torch.where(second == STOP, first, 10 * first + second)
    return is_number * torch.where(total == prompts[:, 0] + prompts[:, 2], 1.0, 0.1)


def grpo(log_probs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    clipped = -torch.minimum(ratio * advantages, ratio.clamp(*BOUNDS) * advantages)
    return weights * (clipped - ENTROPY * entropy)


def fused_loss(hidden: Tensor, head: Tensor, targets: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    weights = 1 / (len(targets) * (targets != -100).sum(1, keepdim=True))
    return linear_policy_loss(hidden, head, targets, grpo, old, advantages, weights, reduction="sum")


def plain_loss(hidden: Tensor, head: Tensor, targets: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """As in TRL: all logits, and means over sequences."""
    mask, log_p = targets != -100, (hidden @ head.T).log_softmax(-1)
    ratio = torch.exp(log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - old)
    per_token = -torch.min(ratio * advantages, torch.clamp(ratio, *BOUNDS) * advantages)
    per_token = per_token + ENTROPY * (log_p.exp() * log_p).sum(-1)
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    right: float = 0.0  # of all 100 sums, by the likeliest answers
    seconds: float = 0.0


def train(loss_of: Callable[..., Tensor], *, seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    policy, run, start = Policy(), Run(), time.perf_counter()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = prompts_of(*torch.randint(10, (2, PROMPTS)).unbind()).repeat_interleave(GROUP, 0)
        answers = policy.answers(prompts)
        rewards = checked(prompts, answers).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        # The first symbol is written by the last one of the prompt; what is behind the first stop is none.
        targets = answers.masked_fill((answers == STOP).cumsum(1) - (answers == STOP).long() > 0, -100)
        text, old = torch.cat((prompts, answers[:, :-1]), 1), None
        for _ in range(EPOCHS):
            hidden = policy.cells(policy.symbols(text))[0][:, PROMPT - 1 :]
            if old is None:
                old = linear_log_probs(hidden.detach(), policy.head.detach(), targets, need_entropy=False)
            loss = loss_of(hidden, policy.head, targets, old, advantages.view(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.losses.append(float(loss.detach()))
        run.rewards.append(float(rewards.mean()))
    every = prompts_of(torch.arange(100) // 10, torch.arange(100) % 10)
    run.right = float((checked(every, policy.answers(every, greedy=True)) == 1).float().mean())
    run.seconds = time.perf_counter() - start
    return run


def show(run: Run, error: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("steps", "reward", title=TITLE)
    for first in range(0, len(run.rewards), part := max(len(run.rewards) // 10, 1)):
        some = run.rewards[first : first + part]
        table.add_row(f"{first + 1} to {first + len(some)}", f"{sum(some) / len(some):.3f}")
    Console().print(table)
    print(f"right of all 100 sums: {run.right:.0%}, after {run.seconds:.0f} s")
    print(f"losses of {CHECKED_STEPS} steps beside TRL's formula: up to {error:.0e} apart")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo", description="Learn to add by GRPO.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="batches of answers (default 400)")
    parser.add_argument("--output", type=Path, default=Path("grpo.png"), help="the picture's file")
    options = parser.parse_args(arguments)
    if options.steps < CHECKED_STEPS:
        parser.error(f"--steps must be at least {CHECKED_STEPS}, got {options.steps}")
    torch.set_num_threads(1)  # The tensors are tiny: on a busy machine the threads' barriers double the time.
    run = train(fused_loss, seed=options.seed, steps=options.steps)
    plain = train(plain_loss, seed=options.seed, steps=CHECKED_STEPS)
    if not (error := max(abs(a - b) for a, b in zip(run.losses, plain.losses, strict=False))) <= TOLERANCE:
        raise RuntimeError(f"the losses of the first steps differ from TRL's formula by {error:.1e}")
    show(run, error)
    draw(options.output, {"GRPO": run.rewards}, 1, TITLE, "mean reward")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
