"""A decoder-only transformer trained for some wall-clock seconds, for its last hidden states and its head.

What is wanted is a head of some thousand features as concentrated as those of real models, in the time that a benchmark
can wait. A head of D features takes 6·D·V operations a token, beside which a small body's are nothing. So most of the
time goes to a narrow head, the embedding's weight. Then it is widened: `up` (features, width) has orthonormal columns
and `head` = embedding·upᵀ, so that no logit changes, and all of it is trained on, the embedding apart from the head.

The body: RMS norms, rotary positions, norms of queries and keys, squared ReLU. Its matrices are Muon's, embedding and
head AdamW's. Parameters are float32; a forward pass on a GPU casts them to bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy

from linear_cross_entropy.real_logits.tokens import Tokens

REPORT_SECONDS = 5.0
WARM_UP_STEPS = 50
WIDE_WARM_UP_STEPS = 20  # AdamW's averages of the wide head start anew
BY_CLASS_RATE = 0.5  # AdamW's learning rate, of Muon's
LOGITS_BYTES = 8 << 30  # there is room for all of them, and one chunk is the fastest
LAST_RATE = 0.05  # of the learning rate, to which it falls linearly


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    features: int  # of the wide head
    length: int  # of a sequence, in tokens


@dataclass(frozen=True)
class Schedule:
    seconds: float
    narrow: float  # the part of the seconds before the head is widened
    sequences: int  # a step
    learning_rate: float
    compile: bool


@dataclass(frozen=True)
class Snapshot:
    """hidden (N, features) and head (V, features) in bfloat16, target (N,) int64, and how they came to be."""

    hidden: Tensor
    head: Tensor
    target: Tensor
    record: dict[str, Any]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"hidden": self.hidden, "head": self.head, "target": self.target, "record": self.record}, path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Snapshot:
        return cls(**torch.load(path, map_location=device))


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Without a bias; the weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int, *, zero: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.0 if zero else inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x (..., T, d) with rotary positions (Su et al., 2021); angles (T, d / 2)."""
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Block(nn.Module):
    """Pre-norm causal self-attention and an MLP, both of which add nothing at first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.attention_output = Linear(width, width, zero=True)
        self.inner = Linear(width, 4 * width)
        self.outer = Linear(4 * width, width, zero=True)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:  # (B, T, width)
        y = norm(x)
        query, key, value = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = rotated(norm(query), angles), rotated(norm(key), angles)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        return x + self.outer(functional.relu(self.inner(norm(x))).square())


class Model(nn.Module):
    """`up` and `head` are None until `widen`: the embedding is the head."""

    angles: Tensor

    def __init__(self, vocabulary: int, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.up: Linear | None = None
        self.head: nn.Parameter | None = None
        half = shape.width // shape.heads // 2
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(shape.length).unsqueeze(1) * frequencies)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.angles.is_cuda else torch.float32

    def widen(self, features: int) -> None:
        """A head of its own, of so many features, that makes the logits the embedding made."""
        weight = self.embedding.weight.detach()
        self.up = Linear(weight.size(1), features).to(weight.device)
        nn.init.orthogonal_(self.up.weight)
        self.head = nn.Parameter(weight @ self.up.weight.detach().t())

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, T, D) of tokens (B, T), and the head (V, D), in the compute dtype."""
        dtype = self.compute_dtype
        x = norm(self.embedding(tokens)).to(dtype)
        for block in self.blocks:
            x = block(x, self.angles)
        x = norm(x)
        if self.up is None or self.head is None:
            return x, self.embedding.weight.to(dtype)
        return self.up(x), self.head.to(dtype)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean loss of the tokens (B, T) behind the first of every row, in nats."""
        hidden, head = self(tokens)
        loss: Tensor = linear_cross_entropy(hidden, head, tokens, shift=True, memory_budget=LOGITS_BYTES)
        return loss


def batches(ids: Tensor, length: int, sequences: int, generator: torch.Generator) -> Iterator[Tensor]:
    """(sequences, length) windows that cover `ids` once an epoch, in another order and from another offset in each."""
    if ids.numel() < (sequences + 1) * length:
        raise RuntimeError(f"{ids.numel()} tokens are fewer than {sequences} sequences of {length} need")
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        rows = ids[offset:].unfold(0, length, length)
        order = torch.randperm(rows.size(0), generator=generator).to(ids.device)
        for start in range(0, rows.size(0) - sequences + 1, sequences):
            yield rows[order[start : start + sequences]]


class _Optimizers:
    """Muon for the body's matrices, AdamW for what is as long as the vocabulary."""

    def __init__(self, model: Model, learning_rate: float) -> None:
        rate = BY_CLASS_RATE * learning_rate
        by_class = [model.embedding.weight, *([] if model.head is None else [model.head])]
        body = [p for p in model.parameters() if all(p is not other for other in by_class)]
        groups: list[dict[str, Any]] = [{"params": by_class[:1], "lr": rate}]
        if model.head is not None:
            # One step of AdamW moves a logit by the rate times the sum of |x|: root(features) for x of the same norm.
            narrow, wide = model.embedding.weight.size(1), model.head.size(1)
            groups.append({"params": [model.head], "lr": rate * (narrow / wide) ** 0.5})
        self.all: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(body, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
        )
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.all]

    def step(self, factor: float) -> None:
        for optimizer, rates in zip(self.all, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            optimizer.step()
            optimizer.zero_grad()


@dataclass
class _Progress:
    """The clock starts after the first step: what is loaded or compiled once is not training."""

    seconds: float
    start: float | None = None
    reported: float = 0.0
    steps: int = 0

    @property
    def elapsed(self) -> float:
        return 0.0 if self.start is None else time.perf_counter() - self.start

    def count(self, loss: Callable[[], float]) -> None:
        self.steps += 1
        if self.start is None:
            loss()  # waits for the device
            self.start = time.perf_counter()
        elif self.elapsed - self.reported >= REPORT_SECONDS:
            self.reported = self.elapsed
            print(f"{self.elapsed:7.1f} s  step {self.steps:6d}  loss {loss():.4f}", flush=True)


def _train(
    model: Model, data: Iterator[Tensor], progress: _Progress, until: float, learning_rate: float, warm_up: int
) -> None:
    """Steps until the clock shows `until` seconds, one at least."""
    optimizers = _Optimizers(model, learning_rate)
    first, previous = progress.steps, None
    while progress.steps == first or progress.elapsed < until:
        loss = model.loss(next(data))
        loss.backward()
        left = 1 - (1 - LAST_RATE) * min(progress.elapsed / progress.seconds, 1.0)
        optimizers.step(min((progress.steps - first + 1) / warm_up, 1.0) * left)
        if previous is not None:
            previous.item()  # one step behind: Python never queues further ahead, so that the clock means something
        previous = loss.detach()
        progress.count(previous.item)


@torch.no_grad()
def held_out_loss(model: Model, ids: Tensor, length: int, sequences: int) -> float:
    """Nats per token over windows that lie evenly in the held-out `ids`."""
    windows = _even_windows(ids, length, sequences)
    losses = [model.loss(part).float() * part.size(0) for part in windows.split(8)]
    return float(torch.stack(losses).sum() / windows.size(0))


@torch.no_grad()
def last_states(model: Model, ids: Tensor, length: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (rows, D), target (rows,) and the head (V, D) over held-out `ids`, bfloat16."""
    windows = _even_windows(ids, length + 1, -(-rows // length))
    hidden, head = zip(*(model(part[:, :-1]) for part in windows.split(8)), strict=True)
    target = windows[:, 1:].flatten()[:rows].contiguous()
    return torch.cat(hidden).flatten(0, 1)[:rows].bfloat16().contiguous(), target, head[0].bfloat16()


def _even_windows(ids: Tensor, length: int, count: int) -> Tensor:
    """Distinct ones, as many as there are up to `count`."""
    rows = ids.unfold(0, length, length)
    return rows[torch.linspace(0, rows.size(0) - 1, min(count, rows.size(0)), device=ids.device).round().long()]


def train(
    tokens: Tokens,
    shape: Shape,
    schedule: Schedule,
    *,
    seed: int,
    rows: int,
    device: torch.device,
) -> Snapshot:
    """Train a model; the hidden states of `rows` held-out tokens, and its head."""
    torch.manual_seed(seed)
    ids = torch.from_numpy(tokens.ids.astype("int64")).to(device)
    training, held_out = ids[: tokens.held_out], ids[tokens.held_out :]
    model = Model(tokens.source.vocabulary, shape).to(device)
    if schedule.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    generator = torch.Generator().manual_seed(seed)
    data = batches(training, shape.length, schedule.sequences, generator)
    progress = _Progress(schedule.seconds)

    if schedule.narrow > 0:
        _train(model, data, progress, schedule.narrow * schedule.seconds, schedule.learning_rate, WARM_UP_STEPS)
        print(f"{progress.elapsed:7.1f} s  {progress.steps} steps; the head gets {shape.features} features", flush=True)
    narrow_steps = progress.steps
    model.widen(shape.features)
    warm_up = WIDE_WARM_UP_STEPS if narrow_steps else WARM_UP_STEPS
    _train(model, data, progress, schedule.seconds, schedule.learning_rate, warm_up)

    hidden, target, head = last_states(model, held_out, shape.length, rows)
    logits_loss = linear_cross_entropy(hidden, head, target)
    record = {
        "loss": float(logits_loss),
        "held_out_loss": held_out_loss(model, held_out, shape.length, 4 * -(-rows // shape.length)),
        "seed": seed,
        "steps": progress.steps,
        "narrow_steps": narrow_steps,
        "tokens_seen": progress.steps * schedule.sequences * shape.length,
        "seconds": round(progress.elapsed, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": target.numel(),
        "shape": asdict(shape),
        "schedule": asdict(schedule),
        "tokens": {**asdict(tokens.source), "training": training.numel(), "held_out": held_out.numel()},
    }
    return Snapshot(hidden, head, target, record)
