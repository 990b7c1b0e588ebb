"""The distribution of the survey: problems drawn at random, each by its own seed, so that one can be drawn again alone.

Nothing here needs torch. Sizes are not what kernels like: the number of elements is log-uniform, and so is the way it
is split over the dimensions, whatever the alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

DTYPES = {"float32": 0.40, "bfloat16": 0.35, "float16": 0.15, "float64": 0.10}
# Losses of models in float64 are rare.
LOSS_DTYPES = {"bfloat16": 0.60, "float32": 0.25, "float16": 0.15}
FEATURES = (512, 640, 768, 896, 1000, 1024, 1536, 1600, 2048, 2304, 2560, 3072, 3584, 4096, 5120)
CLASSES = (32_000, 32_001, 50_257, 50_304, 128_256, 151_643, 151_936)
RETURNS = {"gae": 0.35, "td_lambda_returns": 0.2, "vtrace": 0.2, "discounted_returns": 0.1, "n_step_returns": 0.15}
PRODUCTS = ("log_bmm", "max_bmm", "sample_bmm")


class Limits(NamedTuple):
    """What a device is asked: ranges are log-uniform, `operations` caps a loss in half precision."""

    elements: tuple[float, float]
    rows: tuple[float, float]
    classes: tuple[float, float]
    operations: float
    terms: tuple[float, float]


LIMITS = {
    "cuda": Limits((1e5, 1.2e8), (1e2, 2e4), (1e3, 2e5), 1e14, (1e6, 2e10)),
    "cpu": Limits((1e4, 4e6), (1e2, 1e3), (1e3, 1e4), 5e9, (1e4, 1e7)),
}


@dataclass(frozen=True)
class Problem:
    """One call: `kind` is its group in the tables, `padding` the elements between the rows of its inputs in memory."""

    family: str
    index: int
    kind: str
    shape: tuple[int, ...]
    dim: int
    dtype: str
    backward: bool
    padding: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family}/{self.index}"

    @property
    def elements(self) -> int:
        """Of the input; of the logits; of the terms of a product."""
        return math.prod(self.shape) if self.family != "linear_cross_entropy" else self.shape[0] * self.shape[2]

    @property
    def layout(self) -> str:
        if self.family == "linear_cross_entropy" or self.family in PRODUCTS:
            return "matrices"
        place = "last" if self.dim == len(self.shape) - 1 else "first" if self.dim == 0 else "middle"
        return place + (", padded" if self.padding else "")

    @property
    def work(self) -> str:
        return "forward + backward" if self.backward else "forward"

    def __str__(self) -> str:
        """Everything, in one line."""
        parts = ["x".join(map(str, self.shape))]
        if self.layout != "matrices":
            parts.append(f"dim={self.dim}")
        parts += [self.dtype, self.kind, self.work]
        if self.padding:
            parts.append(f"padding={self.padding}")
        parts += [name if value is True else f"{name}={value}" for name, value in self.options.items() if value]
        return f"{self.name}: {' '.join(parts)}"


def log_uniform(random: Random, least: float, most: float) -> float:
    return math.exp(random.uniform(math.log(least), math.log(most)))


def pick(random: Random, weights: Mapping[str, float]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]


def split(random: Random, elements: float, dims: int) -> list[int]:
    """Sizes whose product is about `elements`, uniform in their logarithms; in a quarter of the draws round ones."""
    edges = [0.0, *sorted(random.random() for _ in range(dims - 1)), 1.0]
    sizes = [round(elements ** (end - start)) for start, end in pairwise(edges)]
    sizes[-1] = max(1, round(elements / math.prod(sizes[:-1])))
    form = random.random()
    if form < 0.25:
        unit = 0 if form < 0.125 else 16
        sizes = [_rounded(size, unit) for size in sizes]
    return sizes


def _rounded(size: int, unit: int) -> int:
    """Down to a multiple of `unit`, or, 0, to a power of two; small sizes stay."""
    if size < 16:
        return size
    return 1 << size.bit_length() - 1 if unit == 0 else size // unit * unit


def _layout(random: Random, limits: Limits) -> tuple[tuple[int, ...], int, int]:
    """A shape, the dimension of time in it and the padding."""
    dims = 2 if random.random() < 0.7 else 3
    sizes = split(random, log_uniform(random, *limits.elements), dims)
    dim = random.randrange(dims)
    sizes[dim] = max(2, sizes[dim])
    is_padded, padding = random.random() < 0.15, random.randint(1, 17)
    return tuple(sizes), dim, min(padding, sizes[-1]) if is_padded else 0


def _scan(random: Random, limits: Limits) -> dict[str, Any]:
    shape, dim, padding = _layout(random, limits)
    gamma = pick(random, {"number": 0.5, "per row": 0.2, "per step": 0.3})
    reset, initial = (random.random() < 0.15 for _ in range(2))
    return {
        "kind": "reset" if reset else "initial" if initial else "plain" if gamma == "number" else gamma,
        "shape": shape, "dim": dim, "padding": padding, "dtype": pick(random, DTYPES),
        "backward": random.random() < 0.4,
        "options": {
            "gamma": gamma, "reset": reset, "initial": initial, "direction": random.choice(("left", "right")),
        },
    }  # fmt: skip


def _cumsum(random: Random, limits: Limits) -> dict[str, Any]:
    shape, dim, padding = _layout(random, limits)
    reverse = random.random() < 0.5
    return {
        "kind": "reverse" if reverse else "plain", "shape": shape, "dim": dim, "padding": padding,
        "dtype": pick(random, DTYPES), "backward": random.random() < 0.3, "options": {"reverse": reverse},
    }  # fmt: skip


def _returns(random: Random, limits: Limits) -> dict[str, Any]:
    shape, dim, padding = _layout(random, limits)
    kind = pick(random, RETURNS)
    options: dict[str, Any] = {
        "bootstrap": random.choice(("next_values", "bootstrap_value")),
        "terminated": random.random() < 0.9,
        "truncated": random.random() < 0.3,
        "gamma": pick(random, {"number": 0.8, "per row": 0.1, "per step": 0.1}),
    }
    n = round(log_uniform(random, 2, 32))
    if kind == "n_step_returns":
        options["n"] = n
    return {
        "kind": kind, "shape": shape, "dim": dim, "padding": padding, "dtype": pick(random, DTYPES),
        "backward": random.random() < 0.25, "options": options,
    }  # fmt: skip


def _softmax(random: Random, limits: Limits) -> dict[str, Any]:
    shape, dim, padding = _layout(random, limits)
    return {
        "kind": f"{len(shape)} dims", "shape": shape, "dim": dim, "padding": padding, "dtype": pick(random, DTYPES),
        "backward": random.random() < 0.5,
    }  # fmt: skip


def _loss(random: Random, limits: Limits) -> dict[str, Any]:
    rows, features = log_uniform(random, *limits.rows), random.choice(FEATURES)
    least, most = limits.classes
    common = [number for number in CLASSES if number <= most]
    classes = round(log_uniform(random, least, most))
    if random.random() < 0.4 and common:
        classes = random.choice(common)
    dtype = pick(random, LOSS_DTYPES)
    # float32 products without TF32 take ten times as long as those in half precision.
    operations = limits.operations / (10 if dtype == "float32" else 1)
    rows = max(limits.rows[0], min(rows, operations / (6 * features * classes)))
    return {
        "kind": "odd classes" if classes % 8 else "even classes", "shape": (round(rows), features, classes), "dim": 1,
        "dtype": dtype, "backward": random.random() < 0.9,
        "options": {"ignored": 0.3 if random.random() < 0.15 else 0.0},
    }  # fmt: skip


def _product(random: Random, limits: Limits) -> dict[str, Any]:
    """(batch, I, K, J), of which K are the terms of a sum; half of them near squares."""
    terms = log_uniform(random, *limits.terms)
    sizes = split(random, terms, 4)
    batch = round(log_uniform(random, 1, 64))
    sides = [(terms / batch) ** (1 / 3) * log_uniform(random, 0.6, 1.6) for _ in range(3)]
    largest = terms / min(sizes[1:])  # of the operands and the result
    if random.random() < 0.5 or largest > limits.elements[1]:
        sizes = [batch, *map(round, sides)]
    sizes[2] = max(2, sizes[2])
    scale = random.choice((1, 10, 50))
    return {
        "kind": f"N(0, {scale}^2)", "shape": tuple(sizes), "dim": 2, "dtype": pick(random, DTYPES),
        "backward": random.random() < 0.4, "options": {"scale": scale},
    }  # fmt: skip


FAMILIES: dict[str, Callable[[Random, Limits], dict[str, Any]]] = {
    "scan": _scan, "cumsum": _cumsum, "returns": _returns, "softmax": _softmax,
    "linear_cross_entropy": _loss, **dict.fromkeys(PRODUCTS, _product),
}  # fmt: skip
FORWARD_ONLY = ("max_bmm", "sample_bmm")


def draw(seed: int, family: str, index: int, limits: Limits, work: str = "both") -> Problem:
    """Problem `index` of a family. `work`, "forward", "backward" or "both", changes nothing else of it."""
    fields = FAMILIES[family](Random(f"{seed}/{family}/{index}"), limits)
    if work != "both":
        fields["backward"] = work == "backward"
    if family in FORWARD_ONLY:
        fields["backward"] = False
    return Problem(family, index, **fields)


def draw_all(seed: int, families: Sequence[str], indices: Sequence[int], limits: Limits, work: str) -> list[Problem]:
    """Every family in turn: what a deadline cuts off is alike for all."""
    return [draw(seed, family, index, limits, work) for index in indices for family in families]
