"""A linear-chain CRF that tells what the tokens of Python sources are from their outlines alone.

The text is the standard library's own, cut by `tokenize`. Of a token the tagger sees the outline: how long it is,
whether it is made of letters, and how much space is before it. What it is to find is the token's type: keyword, name,
comma and so on. Much of that is in the context, so the tags of a row are decoded together.

* The partition function is the product of a chain of T - 1 matrices in the log semiring: log2(T) batched calls of
  torch_dcs_ops.log_bmm. The same chain by torch.logsumexp over all terms is taken beside it, and both are compared with
  float64.
* Viterbi's algorithm is a loop of torch_dcs_ops.max_bmm.
* Then a hidden Markov model of logical lines whose states can only move forward, -inf in all other transitions: most
  products have elements that no path leads to. Its gradients are finite; those of torch.logsumexp are NaN.
"""

from __future__ import annotations

import argparse
import copy
import io
import keyword
import statistics
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_dcs_ops import log_bmm, max_bmm

Product = Callable[[Tensor, Tensor], Tensor]

AVERAGED_STEPS = 10
MEASURED = 7
# Of the loss, relative, and of the gradients, relative to the largest. A tree's products are rounded on each level, and
# the weights of the level above move by as much as the numbers do: 6 * 2^-24 of log Z's some 500 nats.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-4
TAGS = 28


@dataclass
class Corpus:
    """Outlines and tags of consecutive tokens, and where logical lines begin."""

    outlines: Tensor
    tags: Tensor
    names: list[str]  # of the tags
    outline_count: int
    lines: list[int]


def read_corpus(tokens: int) -> Corpus:
    """The first tokens of the standard library's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    outlines: list[tuple[str, int, int]] = []
    names: list[str] = []
    lines = [0]
    for path in sorted(folder.glob("*.py")):
        end = (1, 0)
        for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
            if token.type in (tokenize.ENCODING, tokenize.ENDMARKER):
                continue
            space = token.start[1] - end[1] if token.start[0] == end[0] else 0
            end = token.end
            outlines.append(outline(token.string, space))
            names.append(tag_name(token))
            if token.type == tokenize.NEWLINE:
                lines.append(len(names))
        if len(names) >= tokens:
            break
    if not names:
        raise RuntimeError(f"the standard library's sources are needed to train on, and {folder} has no *.py files")
    outlines, names = outlines[:tokens], names[:tokens]
    frequent = [name for name, _ in sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))[: TAGS - 1]]
    kept = {name: index for index, name in enumerate(frequent)}
    seen = {value: index for index, value in enumerate(sorted(set(outlines)))}
    return Corpus(
        torch.tensor([seen[value] for value in outlines]),
        torch.tensor([kept.get(name, len(kept)) for name in names]),
        [*frequent, "other"],
        len(seen),
        [line for line in lines if line < len(names)],
    )


def outline(text: str, space: int) -> tuple[str, int, int]:
    """Letters, digits, blank or anything else; how long; how much space before."""
    kind = "letters" if text[:1].isalpha() or text[:1] == "_" else "digits" if text[:1].isdigit() else "other"
    return "blank" if not text.strip() else kind, min(len(text), 12), min(space, 3)


def tag_name(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return "KEYWORD" if keyword.iskeyword(token.string) else "NAME"
    return tokenize.tok_name[token.exact_type]


def naive(a: Tensor, b: Tensor) -> Tensor:
    """log_bmm with all terms in memory."""
    return torch.logsumexp(a.unsqueeze(-1) + b.unsqueeze(-3), dim=-2)


def chain(matrices: Tensor, product: Product) -> Tensor:
    """The product of (B, T, S, S) along T, in about log2(T) batched calls: (B, S, S)."""
    while matrices.size(1) > 1:
        even = matrices.size(1) // 2 * 2
        paired = product(matrices[:, 0:even:2], matrices[:, 1:even:2])
        matrices = torch.cat((paired, matrices[:, even:]), 1)
    return matrices[:, 0]


class Tagger(nn.Module):
    """Scores of the tags: of a token's outline and of its neighbors', and of every pair of tags in a row."""

    def __init__(self, outlines: int, tags: int) -> None:
        super().__init__()
        self.emissions = nn.ModuleList(nn.Embedding(outlines, tags) for _ in range(3))
        self.transitions = nn.Parameter(torch.zeros(tags, tags))
        for table in self.emissions:
            nn.init.zeros_(table.weight)

    def scores(self, outlines: Tensor) -> Tensor:
        """(B, T) to (B, T, S)."""
        before, after = outlines.roll(1, 1), outlines.roll(-1, 1)
        own, left, right = (table(x) for table, x in zip(self.emissions, (outlines, before, after), strict=True))
        total: Tensor = own + left + right
        return total

    def potentials(self, scores: Tensor) -> Tensor:
        """(B, T - 1, S, S): a tag, the tag behind it."""
        steps = self.transitions + scores[:, 1:, None, :]
        return torch.cat((steps[:, :1] + scores[:, :1, :, None], steps[:, 1:]), 1)

    def loss(self, outlines: Tensor, tags: Tensor, product: Product) -> Tensor:
        """Negative log-likelihood of the tags, a token, in nats."""
        scores = self.scores(outlines)
        log_z = chain(self.potentials(scores), product).logsumexp((1, 2))
        path = scores.gather(2, tags.unsqueeze(2)).sum((1, 2)) + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return (log_z - path).mean() / tags.size(1)

    @torch.no_grad()
    def decode(self, outlines: Tensor) -> Tensor:
        """The most likely tags, (B, T): Viterbi's algorithm."""
        steps = self.potentials(self.scores(outlines))
        best = steps.new_zeros(len(outlines), 1, steps.size(-1))
        back = []
        for t in range(steps.size(1)):
            best, came_from = max_bmm(best, steps[:, t])
            back.append(came_from.squeeze(1))
        path = [best.squeeze(1).argmax(1, keepdim=True)]
        for came_from in reversed(back):
            path.append(came_from.gather(1, path[-1]))
        return torch.cat(path[::-1], 1)


class Lines(nn.Module):
    """A hidden Markov model of how lines begin: it starts in state 0 and stays or moves to one of the next two."""

    def __init__(self, states: int, tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(states, states))
        self.emissions = nn.Parameter(0.1 * torch.randn(states, tags))
        distance = torch.arange(states) - torch.arange(states)[:, None]
        self.register_buffer("allowed", (distance >= 0) & (distance <= 2), persistent=False)

    def loss(self, tags: Tensor, product: Product) -> Tensor:
        """Negative log-likelihood, a token, in nats."""
        allowed: Tensor = self.allowed  # type: ignore[assignment]
        transitions = torch.where(allowed, self.transitions, -torch.inf).log_softmax(1)
        emissions = self.emissions.log_softmax(1).T[tags]  # (B, T, S)
        start = torch.full_like(transitions[:1], -torch.inf)
        start[:, 0] = 0
        whole = chain(transitions + emissions[:, 1:, None, :], product)
        ends = product(start + emissions[:, :1], whole)
        return -ends.logsumexp((1, 2)).mean() / tags.size(1)


@dataclass
class Measured:
    """A loss and its gradients against float64, and their time."""

    loss_error: float  # relative
    gradient_error: float  # relative to the largest gradient
    seconds: float  # the median


@dataclass
class Result:
    """What both models did, and how log_bmm compares with all terms in memory."""

    losses: list[float]
    accuracy: float
    without_transitions: float
    own: Measured
    naive: Measured
    line_losses: list[float]
    naive_gradients_are_nan: bool
    tags: int
    tokens: int


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def compare(model: Tagger, outlines: Tensor, tags: Tensor) -> tuple[Measured, Measured]:
    """Loss and gradients by log_bmm and by all terms."""
    exact = copy.deepcopy(model).double()
    right_loss = exact.loss(outlines, tags, naive)
    right = gradients(right_loss, exact)
    scale = max(float(gradient.abs().max()) for gradient in right)

    products = (log_bmm, naive)
    seconds: tuple[list[float], list[float]] = ([], [])
    found: list[tuple[Tensor, list[Tensor]]] = []
    # In turns: what else the machine does then slows both. Medians, of which the first, longer calls are no part.
    for _ in range(MEASURED):
        found = []
        for product, times in zip(products, seconds, strict=True):
            start = time.perf_counter()
            loss = model.loss(outlines, tags, product)
            found.append((loss, gradients(loss, model)))
            times.append(time.perf_counter() - start)

    def measured(loss: Tensor, own: list[Tensor], times: list[float]) -> Measured:
        loss_error = abs(float(loss.detach() / right_loss.detach()) - 1)
        apart = max(float((a - b).abs().max()) for a, b in zip(own, right, strict=True))
        return Measured(loss_error, apart / scale, statistics.median(times))

    own, terms = (measured(*pair, times) for pair, times in zip(found, seconds, strict=True))
    return own, terms


def train(
    *, seed: int = 0, steps: int = 150, tokens: int = 60_000, rows: int = 16, length: int = 64, progress: bool = True
) -> Result:
    """Train the tagger on all but the last tenth of the tokens and decode that; then the model of lines."""
    from tqdm import tqdm

    torch.manual_seed(seed)
    corpus = read_corpus(tokens)
    split = len(corpus.tags) * 9 // 10
    if progress:
        print(
            f"{len(corpus.tags)} tokens of {len(corpus.names)} types with {corpus.outline_count} outlines", flush=True
        )

    tagger = Tagger(corpus.outline_count, len(corpus.names))
    optimizer = torch.optim.Adam(tagger.parameters(), lr=0.1)
    losses = []
    with tqdm(total=steps, desc="CRF tagger", unit="step", mininterval=0.5, disable=not progress) as bar:
        for index in range(steps):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - 0.9 * index / steps)
            places = torch.randint(split - length, (rows, 1)) + torch.arange(length)
            loss = tagger.loss(corpus.outlines[places], corpus.tags[places], log_bmm)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    comparison = compare(tagger, corpus.outlines[places], corpus.tags[places])

    count = (len(corpus.tags) - split) // length
    held_out = slice(split, split + count * length)
    outlines, tags = corpus.outlines[held_out].view(count, length), corpus.tags[held_out].view(count, length)
    accuracy = float((tagger.decode(outlines) == tags).float().mean())
    alone = float((tagger.scores(outlines).argmax(2) == tags).float().mean())

    line_losses, naive_is_nan = _train_lines(corpus, steps, progress)
    return Result(losses, accuracy, alone, *comparison, line_losses, naive_is_nan, len(corpus.names), count * length)


def _train_lines(corpus: Corpus, steps: int, progress: bool) -> tuple[list[float], bool]:
    """The losses, and whether torch.logsumexp's gradients of the same loss are NaN."""
    from tqdm import tqdm

    length = 12
    starts = torch.tensor([line for line in corpus.lines if line + length <= len(corpus.tags)])
    model = Lines(16, len(corpus.names))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for index in tqdm(range(steps), desc="HMM of lines", unit="step", mininterval=0.5, disable=not progress):
        chosen = starts[torch.randint(len(starts), (64,))]
        tags = corpus.tags[chosen.unsqueeze(1) + torch.arange(length)]
        loss = model.loss(tags, log_bmm)
        found = gradients(loss, model)
        if not all(bool(gradient.isfinite().all()) for gradient in found):
            raise RuntimeError(f"a gradient of the model of lines is not finite in step {index}")
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, any(bool(gradient.isnan().any()) for gradient in gradients(model.loss(tags, naive), model))


def averages(losses: list[float]) -> tuple[float, float]:
    """Over the first and the last steps."""
    first, last = losses[:AVERAGED_STEPS], losses[-AVERAGED_STEPS:]
    return sum(first) / len(first), sum(last) / len(last)


def check(result: Result) -> None:
    """The chain is right within rounding, both losses fell, and transitions are worth having."""
    error, gradient_error = result.own.loss_error, result.own.gradient_error
    if not error <= LOSS_TOLERANCE or not gradient_error <= GRADIENT_TOLERANCE:
        raise RuntimeError(
            f"log_bmm's chain is off by {error:.1e} of the loss, of which rounding explains {LOSS_TOLERANCE:.0e}, and "
            f"by {gradient_error:.1e} of the largest gradient, of which it explains {GRADIENT_TOLERANCE:.0e}"
        )
    for name, losses in (("the tagger", result.losses), ("the model of lines", result.line_losses)):
        first, last = averages(losses)
        if not last < first:
            raise RuntimeError(
                f"{name}'s loss did not fall: {first:.3f} over the first steps, {last:.3f} over the last"
            )
    if not result.accuracy > result.without_transitions:
        raise RuntimeError(
            f"Viterbi's tags are right for {result.accuracy:.3f} of the tokens, the scores' alone for "
            f"{result.without_transitions:.3f}"
        )


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"CRF tagger of the standard library's tokens, {result.tags} types")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    first, last = averages(result.losses)
    table.add_row(f"loss per token, first and last {AVERAGED_STEPS} steps", f"{first:.3f} → {last:.3f} nats")
    table.add_row(f"right of {result.tokens} unseen tokens, Viterbi", f"{result.accuracy:.1%}")
    table.add_row("right without transitions", f"{result.without_transitions:.1%}")
    table.add_section()
    for name, measured in (("log_bmm", result.own), ("torch.logsumexp", result.naive)):
        table.add_row(f"forward and backward, {name}, median", f"{1e3 * measured.seconds:.1f} ms")
        table.add_row("error of the loss¹", f"{measured.loss_error:.1e}")
        table.add_row("error of the gradients²", f"{measured.gradient_error:.1e}")
    table.add_section()
    first, last = averages(result.line_losses)
    table.add_row("HMM of lines, loss per token", f"{first:.3f} → {last:.3f} nats")
    table.add_row("its gradients by torch.logsumexp", "NaN" if result.naive_gradients_are_nan else "finite")
    table.caption = "¹ against float64   ² of the largest"
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="crf_tagger",
        description="Train a CRF tagger and a hidden Markov model on the Python standard library's tokens.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="training steps of each model (default 150)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    result = train(seed=options.seed, steps=options.steps)
    show(result)
    check(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
