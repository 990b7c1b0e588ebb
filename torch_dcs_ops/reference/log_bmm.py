"""The log-semiring products in plain PyTorch: every term is formed, a chunk at a time. The oracle of the tests, the
fallback on every device, and what the ops mean.

All functions take a (B, I, K) and b (B, K, J) of one real dtype, with any strides. Sums are made in float32 for half
inputs, otherwise in the inputs' dtype, and rounded once. With

    R[i] = max_k a[i, k],  C[j] = max_k b[k, j]   (0 where that is -inf: a row or column that is masked as a whole;
                                                   0 where it is +inf: beside that a finite number weighs 0, not NaN)

the results of the forward are `out[i, j] = logsumexp_k(a[i, k] + b[k, j])` and `log_s = out - R - C`, formed as a
logsumexp of its own: subtracted from `out`, it would have out's rounding, which on a long chain of products is 1e-4 and
would be the relative error of every gradient. The weights, which are the softmax over k, are

    W[i, j, k] = exp((a[i, k] - R[i]) + (b[k, j] - C[j]) - log_s[i, j]),   0 where log_s is -inf

and every derivative of any order is made of the three sums of `W x y z` (see `log_bmm_product`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sums, of log_s and of the uniforms."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_bmm(a: Tensor, b: Tensor, precision: str = "highest") -> tuple[Tensor, Tensor]:
    """(out, log_s). No `precision` is below float32 here."""
    dtype = a.dtype
    a, b = _wide(a, b)
    out = a.new_empty(a.size(0), a.size(1), b.size(2))
    log_s = torch.empty_like(out)
    shifted_a, shifted_b = shifted(a, b)
    for tile in _tiles(a, b):
        out[tile.ij] = tile.terms(a, b).logsumexp(2)
        log_s[tile.ij] = tile.terms(shifted_a, shifted_b).logsumexp(2)
    return out.to(dtype), log_s


def log_bmm_backward(
    grad: Tensor, a: Tensor, b: Tensor, log_s: Tensor, precision: str, need_a: bool, need_b: bool
) -> tuple[Tensor, Tensor]:
    """(grad_a, grad_b), without elements what is not needed."""
    empty = a.new_empty(0)
    return (
        log_bmm_product(a, b, log_s, None, grad, None, 2) if need_a else empty,
        log_bmm_product(a, b, log_s, None, grad, None, 0) if need_b else empty,
    )


def log_bmm_product(
    a: Tensor, b: Tensor, log_s: Tensor, x: Tensor | None, y: Tensor | None, z: Tensor | None, over: int
) -> Tensor:
    """The sum of W[i, j, k] x[i, k] y[i, j] z[k, j] over i (0), k (1) or j (2), in a's dtype.

    The operand that has the result's place is not part of it: z for `over` 0, y for 1, x for 2. One that is None is 1.
    """
    dtype = a.dtype
    a, b = _wide(a, b)
    axes = ("kj", "ij", "ik")[over]
    result = torch.zeros_like((b, log_s, a)[over], dtype=a.dtype, memory_format=torch.contiguous_format)
    shifted_a, shifted_b = shifted(a, b)
    for tile in _tiles(a, b):
        sums = log_s[tile.ij].unsqueeze(2)
        terms = torch.where(sums == -torch.inf, 0, (tile.terms(shifted_a, shifted_b) - sums).exp())
        if x is not None and over != 2:
            terms *= x[tile.ik].unsqueeze(3)
        if y is not None and over != 1:
            # A masked weight is 0 whatever it is multiplied by.
            terms *= torch.where(sums == -torch.inf, 0, y[tile.ij].unsqueeze(2))
        if z is not None and over != 0:
            terms *= z[tile.kj].unsqueeze(1)
        result[getattr(tile, axes)] += terms.sum(over + 1)
    return result.to(dtype)


def max_bmm(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of max_k a[i, k] + b[k, j] as torch.max has them: the first of equals, a NaN is largest."""
    dtype = a.dtype
    a, b = _wide(a, b)
    values = a.new_empty(a.size(0), a.size(1), b.size(2))
    indices = torch.empty_like(values, dtype=torch.int64)
    for tile in _tiles(a, b):
        values[tile.ij], indices[tile.ij] = tile.terms(a, b).max(2)
    return values.to(dtype), indices


def sample_bmm(a: Tensor, b: Tensor, uniforms: Tensor) -> Tensor:
    """For every (i, j) the smallest k whose cumulative sum of exp(a + b) is above uniforms times the whole.

    -1 where every term is -inf; where one is NaN or +inf, the first that is.
    """
    a, b = _wide(a, b)
    samples = a.new_full((a.size(0), a.size(1), b.size(2)), -1, dtype=torch.int64)
    if a.size(2) == 0:
        return samples
    for tile in _tiles(a, b):
        terms = tile.terms(a, b)
        largest = terms.amax(2, keepdim=True)
        powers = (terms - torch.where(largest.isfinite(), largest, 0)).exp()
        sums = powers.cumsum(2)
        possible = powers > 0
        # Sums made in parallel may grow by a rounding at a term that is 0.
        above = possible & (sums > uniforms[tile.ij].unsqueeze(2) * sums[:, :, -1:])
        drawn = _first(above)
        drawn = torch.where(above.any(2), drawn, terms.size(2) - 1 - _first(possible.flip(2)))
        special = terms.isnan() | (terms == torch.inf)
        drawn = torch.where(special.any(2), _first(special), drawn)
        samples[tile.ij] = torch.where(largest.squeeze(2) == -torch.inf, -1, drawn)
    return samples


def shifted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - R and b - C."""
    return a - _largest(a, 2), b - _largest(b, 1)


def _largest(x: Tensor, dim: int) -> Tensor:
    if x.size(dim) == 0:
        return x.new_zeros(())
    largest = x.amax(dim, keepdim=True)
    return torch.where(largest.isinf(), 0, largest)


def _first(hits: Tensor) -> Tensor:
    return hits.to(torch.uint8).argmax(2)


def _wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = sum_dtype(a.dtype)
    return a.to(dtype), b.to(dtype)


class _Tile(NamedTuple):
    """A part of the terms: all k of some batches, rows and columns."""

    batches: slice
    rows: slice
    columns: slice

    @property
    def ij(self) -> tuple[slice, slice, slice]:
        return self.batches, self.rows, self.columns

    @property
    def ik(self) -> tuple[slice, slice]:
        return self.batches, self.rows

    @property
    def kj(self) -> tuple[slice, slice, slice]:
        return self.batches, slice(None), self.columns

    def terms(self, a: Tensor, b: Tensor) -> Tensor:
        """a[i, k] + b[k, j] as (batches, rows, K, columns)."""
        return a[self.ik].unsqueeze(3) + b[self.kj].unsqueeze(1)


def _tiles(a: Tensor, b: Tensor) -> Iterator[_Tile]:
    """All of the terms, CHUNK_BYTES at a time or one (i, j)'s."""
    batches, rows, depth = a.shape
    columns = b.size(2)
    room = max(CHUNK_BYTES // (max(depth, 1) * a.element_size()), 1)
    width = min(max(columns, 1), room)
    height = min(max(rows, 1), max(room // width, 1))
    count = max(room // (width * height), 1)
    for batch in range(0, batches, count):
        for row in range(0, rows, height):
            for column in range(0, columns, width):
                yield _Tile(slice(batch, batch + count), slice(row, row + height), slice(column, column + width))
