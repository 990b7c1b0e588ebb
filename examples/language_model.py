"""A small transformer language model of the Python standard library; torch.ops.dcs.linear_cross_entropy is its loss.

The training step is compiled: `LanguageModel.loss` is traced whole (fullgraph=True), `backward()` runs the backward
graph that torch.compile made with it, and AdamW's fused update is a third graph. The same steps on the same batches
from the same seed are then done with F.linear + F.cross_entropy. Both make the same sums in another order, so the
losses differ by rounding; what differs is the memory, of which the logits of a large vocabulary take the most.

A token is a byte or one of the most frequent pieces of the text: words, numbers, runs of punctuation, line ends with
the indentation behind them. A piece that is not in the vocabulary is cut into the longest ones that are.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torch_dcs_ops  # noqa: F401  (registers torch.ops.dcs)

AVERAGED_STEPS = 10
WARM_UP_STEPS = 20
# Nats. A float32 mean of a thousand losses of 9 nats, summed in another order, is off by some 1e-5; the parameters of
# both runs drift apart by such errors from step to step, the faster the higher the learning rate.
FIRST_TOLERANCE = 5e-5
LATER_TOLERANCE = 1e-2
PIECE = re.compile(rb" ?_*[A-Za-z]+|[0-9]+|\n *| +|[^\sA-Za-z0-9]+|.", re.DOTALL)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
# What the profiler's library writes to standard error at every start and stop, whatever its log level.
PROFILER_LINE = re.compile(rb"(STAGE|USDT|INFO):\d{4}-\d\d-\d\d ")


def read_corpus(max_bytes: int) -> bytes:
    """The source text of the standard library's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise RuntimeError(f"the standard library's sources are needed to train on, and {folder} has no *.py files")
    return text[:max_bytes]


class Tokenizer:
    """The 256 bytes and the most frequent pieces of a text."""

    def __init__(self, text: bytes, size: int) -> None:
        counts = Counter(piece for piece in PIECE.findall(text) if len(piece) > 1)
        # By name where the counts are the same: the vocabulary depends on the text alone.
        ordered = sorted(counts, key=lambda piece: (-counts[piece], piece))
        self.pieces = [bytes([value]) for value in range(256)] + ordered[: size - 256]
        self.tokens = {piece: token for token, piece in enumerate(self.pieces)}
        self.longest = max(map(len, self.pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: bytes) -> Tensor:
        cuts: dict[bytes, list[int]] = {}
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            if piece not in cuts:
                cuts[piece] = self._cut(piece)
            tokens += cuts[piece]
        return torch.tensor(tokens)

    def decode(self, tokens: Tensor) -> bytes:
        return b"".join(self.pieces[token] for token in tokens.tolist())

    def _cut(self, piece: bytes) -> list[int]:
        tokens = []
        while piece:
            length = min(len(piece), self.longest)
            while piece[:length] not in self.tokens:
                length -= 1
            tokens.append(self.tokens[piece[:length]])
            piece = piece[length:]
        return tokens


class Block(nn.Module):
    """Pre-norm causal self-attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, D / heads) each
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """A transformer whose head is its embedding's weight."""

    def __init__(self, vocabulary: int, *, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, tokens: Tensor, loss: Loss) -> Tensor:
        """Mean loss of the tokens (B, T) behind the first of every row, in nats."""
        x = self.blocks(self.embedding(tokens) + self.position)
        return loss(self.norm(x), self.embedding.weight, tokens)


def fused_loss(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """Step t predicts the token of step t + 1; logits exist for a few rows at a time."""
    return torch.ops.dcs.linear_cross_entropy(hidden, head, tokens, shift=True, memory_budget=8 << 20)


def plain_loss(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """The same through all logits, (B * (T - 1), V)."""
    logits = F.linear(hidden[:, :-1], head)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    """One training run with one of the losses."""

    losses: Numbers  # of every step, nats per token
    compile_seconds: float
    step_seconds: Numbers  # of every step after the first
    memory: Numbers  # bytes that a step holds beyond the parameters and AdamW's state, at each allocation and release

    @property
    def peak_bytes(self) -> int:
        return int(self.memory.max())

    @property
    def median_seconds(self) -> float:
        """Of a step; 0 of a run of one."""
        return float(np.median(self.step_seconds)) if len(self.step_seconds) else 0.0


@dataclass
class Result:
    """Both runs on the same batches from the same parameters."""

    fused: Run
    plain: Run
    vocabulary: int
    tokens_per_step: int

    @property
    def first_difference(self) -> float:
        """Of the first step's losses, where both models are the same."""
        return abs(float(self.fused.losses[0] - self.plain.losses[0]))

    @property
    def largest_difference(self) -> float:
        """Of one step's losses; rounding differences grow with the steps."""
        return float(np.abs(self.fused.losses - self.plain.losses).max())


def averages(losses: Numbers) -> tuple[float, float]:
    """Over the first and the last steps."""
    return float(losses[:AVERAGED_STEPS].mean()), float(losses[-AVERAGED_STEPS:].mean())


@contextmanager
def without_profiler_lines() -> Iterator[None]:
    """Keeps the profiler's own lines from standard error; all others are written behind the block."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as written:
            os.dup2(written.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
                written.seek(0)
                os.write(2, b"".join(line for line in written if not PROFILER_LINE.match(line)))
    finally:
        os.close(kept)


def memory_of(step: Callable[[], Any]) -> Numbers:
    """The bytes of tensors that `step` adds to what there was, at each allocation and release, by the allocator's
    record; 0 before the first one."""
    with without_profiler_lines(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return np.cumsum([0.0, *sizes])


def train_one(
    name: str,
    loss: Loss,
    model: LanguageModel,
    batches: Tensor,
    *,
    learning_rate: float,
    compiled: bool,
    progress: bool,
) -> Run:
    """One step a batch of (steps, B, T), the learning rate falling linearly behind a short warm-up."""
    from tqdm import tqdm

    # A tensor: the compiled update takes it as an input, where a float would be compiled in.
    rate = torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    loss_of: Callable[[Tensor, Loss], Tensor] = model.loss
    update: Callable[[], Any] = optimizer.step
    if compiled:
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)
        update = torch.compile(update, dynamic=False)
        # The optimizer marks its step for profilers; that the compiler leaves the mark out is no news.
        quiet = logging.getLogger("torch._dynamo.variables.ctx_manager")
        quiet.addFilter(lambda record: not str(record.msg).startswith("Profiler record function"))
    steps = len(batches)

    def step(index: int) -> float:
        rate.fill_(learning_rate * min((index + 1) / WARM_UP_STEPS, 1.0 - 0.9 * index / steps))
        optimizer.zero_grad()
        value = loss_of(batches[index], loss)
        value.backward()
        update()
        return float(value.detach())

    if progress:
        print(f"compiling the training step with {name} ...", flush=True)
    start = time.perf_counter()
    losses = [step(0)]
    compile_seconds = time.perf_counter() - start

    seconds = []
    with tqdm(total=steps, initial=1, desc=name, unit="step", mininterval=0.5, disable=not progress) as bar:
        for index in range(1, steps):
            start = time.perf_counter()
            losses.append(step(index))
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(f"loss {np.mean(losses[-AVERAGED_STEPS:]):.3f}", refresh=False)
            bar.update()
    optimizer.zero_grad()
    memory = memory_of(lambda: step(steps - 1))
    return Run(np.array(losses), compile_seconds, np.array(seconds), memory)


def train(
    *,
    seed: int = 0,
    steps: int = 100,
    vocabulary: int = 8192,
    rows: int = 8,
    length: int = 128,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    learning_rate: float = 3e-3,
    corpus_bytes: int = 4 << 20,
    compiled: bool = True,
    progress: bool = True,
) -> Result:
    """Train with either loss on the same batches of (rows, length) tokens, from the same parameters."""
    text = read_corpus(corpus_bytes)
    tokenizer = Tokenizer(text, vocabulary)
    tokens = tokenizer.encode(text)
    if progress:
        print(f"{len(text)} bytes of Python are {len(tokens)} tokens of a vocabulary of {len(tokenizer)}", flush=True)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length + 1, (steps, rows, 1), generator=generator)
    batches = tokens[starts + torch.arange(length)]

    def run(name: str, loss: Loss) -> Run:
        torch.manual_seed(seed)
        model = LanguageModel(len(tokenizer), length=length, width=width, layers=layers, heads=heads)
        return train_one(name, loss, model, batches, learning_rate=learning_rate, compiled=compiled, progress=progress)

    return Result(
        run("dcs.linear_cross_entropy", fused_loss),
        run("F.cross_entropy", plain_loss),
        len(tokenizer),
        rows * (length - 1),
    )


def check(result: Result) -> None:
    """The losses of both runs are equal within rounding, and they fell."""
    if not result.first_difference <= FIRST_TOLERANCE or not result.largest_difference <= LATER_TOLERANCE:
        raise RuntimeError(
            f"the losses differ by {result.first_difference:.1e} in the first step, of which rounding explains "
            f"{FIRST_TOLERANCE:.0e}, and by up to {result.largest_difference:.1e}, of which it explains "
            f"{LATER_TOLERANCE:.0e}"
        )
    first, last = averages(result.fused.losses)
    if not last < first:
        raise RuntimeError(f"the loss did not fall: {first:.3f} over the first steps, {last:.3f} over the last")


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    runs = (result.fused, result.plain)
    table = Table(title=f"Language model of the standard library, {result.vocabulary} tokens")
    table.add_column("quantity")
    table.add_column("linear_cross_entropy", justify="right")
    table.add_column("F.cross_entropy", justify="right")
    firsts, lasts = zip(*(averages(run.losses) for run in runs), strict=True)
    table.add_row(f"loss per token, first {AVERAGED_STEPS} steps", *(f"{first:.5f} nats" for first in firsts))
    table.add_row(f"loss per token, last {AVERAGED_STEPS} steps", *(f"{last:.5f} nats" for last in lasts))
    table.add_row("steps", *(str(len(run.losses)) for run in runs))
    table.add_row("tokens predicted a step", *[str(result.tokens_per_step)] * 2)
    table.add_row("first step, compilation included", *(f"{run.compile_seconds:.1f} s" for run in runs))
    table.add_row("a step after it, median", *(f"{1e3 * run.median_seconds:.1f} ms" for run in runs))
    table.add_section()
    table.add_row("peak memory of a step¹", *(f"{run.peak_bytes / 2**20:.1f} MiB" for run in runs))
    table.caption = (
        f"Losses differ by {result.first_difference:.1e} in the first step, by at most {result.largest_difference:.1e} "
        "in any.\n¹ beyond the parameters and AdamW's state; the gradients are in it"
    )
    Console().print(table)


def plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, memory) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    styles = (
        {"color": "tab:blue", "linewidth": 2.5, "alpha": 0.6},
        {"color": "black", "linewidth": 0.8, "linestyle": "--"},
    )
    names = ("dcs.linear_cross_entropy", "F.linear + F.cross_entropy")
    for name, run, style in zip(names, (result.fused, result.plain), styles, strict=True):
        loss.plot(run.losses, label=name, **style)
        # A step of each has another number of allocations: both are drawn over the same width.
        through = np.linspace(0, 1, len(run.memory))
        memory.plot(through, run.memory / 2**20, label=f"{name}: {run.peak_bytes / 2**20:.0f} MiB", **style)
    loss.set(xlabel="step", ylabel="loss per token, nats", title="Language model of the Python standard library")
    memory.set(xlabel="allocations of one step, first to last", ylabel="MiB", title="Memory of a step")
    memory.set_ylim(bottom=0)
    for axes in (loss, memory):
        axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="language_model", description="Train a small language model on the Python standard library, twice."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run (default 100)")
    parser.add_argument("--output", type=Path, default=Path("language_model.png"), help="the curves' PNG file")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    result = train(seed=options.seed, steps=options.steps)
    show(result)
    plot(result, options.output)
    print(f"loss and memory: {options.output}")
    check(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
