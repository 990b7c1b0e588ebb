"""A small language model learns from a larger one's whole distributions, by linear_kl_div, and from the text alone.

The text is the Python standard library's, the tokens its most frequent words. The teacher is trained first, for longer
and on more of the text than the students see: two students of one shape and seed then see the same batches, one with
the teacher's divergence beside the cross-entropy, one with the cross-entropy alone. Neither the students' logits nor
the teacher's exist for all tokens at once.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_dcs_ops import linear_cross_entropy, linear_kl_div
from torch_dcs_ops.examples.curves import draw

TITLE = "Distillation of a language model"
VOCABULARY, ROWS, LENGTH = 2000, 16, 48
TEACHER, STUDENT = 192, 48  # features
CORPUS_BYTES = 6_000_000
STUDENT_PART = 0.02  # of the text
SHARE = 0.8  # of the divergence in the loss
EVALUATED_EVERY = 20


class Model(nn.Module):
    """A GRU over embeddings; the head is `head`, (V, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.cells = nn.GRU(width, width, batch_first=True)
        self.head = nn.Parameter(torch.randn(VOCABULARY, width) * width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        hidden: Tensor = self.cells(self.words(text))[0]
        return hidden


def read_corpus(size: int = CORPUS_BYTES) -> Tensor:
    """The words of the standard library's top-level modules; what is not frequent is word 0."""
    text, folder = [], Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        text.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, text)) > size:
            break
    words = re.findall(r"\w+|\n\s*|[^\w\s]", "".join(text))
    frequent = {word: 1 + place for place, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    return torch.tensor([frequent.get(word, 0) for word in words])


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH - 1, (ROWS, 1), generator=generator)
    rows = text[starts + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluated(model: Model, text: Tensor) -> float:
    """Nats a word of text that nobody has seen."""
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:128]
    return float(linear_cross_entropy(model(rows[:, :-1]), model.head, rows[:, 1:]))


@dataclass
class Run:
    nats: list[float]  # every EVALUATED_EVERY steps
    seconds: float


def train(model: Model, text: Tensor, unseen: Tensor, steps: int, teacher: Model | None = None) -> Run:
    """With a teacher SHARE of the loss is the divergence from it, and the rest cross-entropy."""
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.Adam(model.parameters(), lr=2e-3)
    nats, start = [], time.perf_counter()
    for step in range(steps):
        words, targets = batch(text, generator)
        hidden = model(words)
        loss = linear_cross_entropy(hidden, model.head, targets)
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(words)
            loss = (1 - SHARE) * loss + SHARE * linear_kl_div(hidden, model.head, taught, teacher.head.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVALUATED_EVERY == 0:
            nats.append(evaluated(model, unseen))
    return Run(nats, time.perf_counter() - start)


def train_all(seed: int, steps: int) -> dict[str, Run]:
    """The teacher, and the students without and with it."""
    text = read_corpus()
    middle = int(0.95 * len(text))
    seen, unseen = text[:middle], text[middle:]
    torch.manual_seed(seed)
    teacher = Model(TEACHER)
    runs = {"teacher": train(teacher, seen, unseen, 2 * steps)}
    for name, its_teacher in (("student, cross-entropy", None), ("student, distilled", teacher)):
        torch.manual_seed(seed + 1)
        runs[name] = train(Model(STUDENT), seen[: int(STUDENT_PART * len(seen))], unseen, steps, its_teacher)
    return runs


def show(runs: dict[str, Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "nats a word of unseen text", "time", title=TITLE)
    for name, run in runs.items():
        table.add_row(name, f"{run.nats[0]:.3f} → {run.nats[-1]:.3f}", f"{run.seconds:.0f} s")
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="distil", description="Distil a small language model from a larger one.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="of a student; the teacher has twice as many")
    parser.add_argument("--output", type=Path, default=Path("distil.png"), help="the learning curves' PNG file")
    options = parser.parse_args(arguments)
    if options.steps < EVALUATED_EVERY:
        parser.error(f"--steps must be at least {EVALUATED_EVERY}, got {options.steps}")
    runs = train_all(options.seed, options.steps)
    show(runs)
    curves = {name: run.nats for name, run in runs.items() if name != "teacher"}
    draw(options.output, curves, EVALUATED_EVERY, TITLE, "nats a word of unseen text")
    if not runs["student, distilled"].nats[-1] < runs["student, cross-entropy"].nats[-1]:
        raise RuntimeError("the distilled student is no better than the one without a teacher")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
