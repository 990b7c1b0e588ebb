"""Launchers of log_bmm, its backward, max_bmm and sample_bmm.

All take a (B, I, K) and b (B, K, J) of one dtype (float16, bfloat16, float32, float64) with any strides and give
contiguous results; a NotImplementedError leaves a case to the reference. Nothing waits for the GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import device_of, on_device
from .gradient import GROUP, multiply_gradient, scale_gradient, sum_gradient
from .max_sample import draw_term, largest_term
from .product import multiply, prepare, sum_terms

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LEAST = 16  # terms, rows and columns of a product; of fewer the sums are made term by term
DEPTH = 32  # terms of a product's step: K is padded to whole ones
BAND = 8  # tiles of successive programs: 8 rows of them share their other operand's columns in L2
PREPARED = (32, 64)  # lines and terms that a program of `prepare` has at once
DIRECT = 2048  # sums that a program has under way where it adds term by term
DRAWN = 16  # rows and columns of a program of `draw_term`


class Tile(NamedTuple):
    """rows × columns of a product, `stages` of whose steps are under way; what a product does not give, by parts."""

    rows: int
    columns: int
    warps: int
    stages: int
    part: tuple[int, int]


TILE = Tile(64, 64, 4, 3, (32, 32))
LARGE_TILE = Tile(128, 128, 8, 3, (32, 64))


class Operand:
    """a (B, I, K) or bᵀ (B, J, K), and what `prepare` finds out about its lines.

    Where all matrices of the batch are one (stride 0), that one is prepared.
    """

    def __init__(self, lines: Tensor) -> None:
        self.lines = lines
        self.shared = lines.stride(0) == 0
        batch, count, self.terms = lines.shape
        self.batch, self.count = 1 if self.shared else batch, count
        wide = torch.float64 if lines.dtype == torch.float64 else torch.float32
        self.top = lines.new_empty((self.batch, count), dtype=wide)
        self.kind = lines.new_empty((self.batch, count), dtype=torch.int8)
        self.powers: Tensor | None = None

    @property
    def strided(self) -> tuple[Any, ...]:
        return self.lines, *self.lines.stride()

    @property
    def top_batch(self) -> int:
        return 0 if self.shared else self.count

    @property
    def strided_powers(self) -> tuple[Any, ...]:
        """The exponentials (parts, batch, lines, terms) and their strides; any tensor where there are none."""
        if self.powers is None:
            return self.top, 0, 0, 0, 0
        parts, batch, *strides = self.powers.stride()
        return self.powers, parts, 0 if self.shared else batch, *strides


def log_bmm(a: Tensor, b: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """(out, log_s): out_ij = logsumexp_k(a_ik + b_kj) as torch.logsumexp has it, in a's dtype; log_s = out - R - C.

    R and C are the maxima of a's rows and b's columns, 0 for those of nothing but -inf; log_s, (B, I, J) in float32
    (float64 for float64), is not taken from a rounded out. `precision` is torch.get_float32_matmul_precision().
    """
    _check(a)
    batch, rows, terms = a.shape
    columns = b.size(2)
    out = a.new_empty((batch, rows, columns))
    log_s = out.new_empty(out.shape, dtype=_wide(a))
    if out.numel() == 0 or terms == 0:
        return out.fill_(-math.inf), log_s.fill_(-math.inf)
    left, right = Operand(a), Operand(b.mT)
    with on_device(a):
        if not _multiplies(a, rows, columns, terms):
            tile = _direct_tile(a, rows, columns, terms)
            sum_terms[(_programs(batch, rows, columns, *tile[:2]),)](
                *left.strided, *right.strided, out, log_s, rows, columns, terms,
                ACC=_acc(a), ROWS=tile[0], COLUMNS=tile[1], TERMS=tile[2], BAND=BAND, num_warps=_warps(tile),
            )  # fmt: skip
            return out, log_s
        padded = _whole(terms, DEPTH)
        offset = (126 - (terms - 1).bit_length()) // 2
        _prepare(
            left, right, (rows, columns, padded), offset, precision,
            left_shape=(rows, padded), right_shape=(columns, padded),
        )  # fmt: skip
        tile = _tile(a, batch, rows, columns)
        # 2^24 times what S·2^(2·offset) may lack: for each term a factor below 2^-126, or raised to 2^-60, times one of
        # 2^offset at most, from either side.
        multiply[(_programs(batch, rows, columns, tile.rows, tile.columns),)](
            *left.strided, *right.strided, left.top, left.kind, left.top_batch, *left.strided_powers[:3],
            right.top, right.kind, right.top_batch, *right.strided_powers[:3],
            out, log_s, rows, columns, terms, padded, offset,
            2.0 * terms * 2.0 ** (offset + 24 - 126), 2.0 * terms * 2.0 ** (offset + 24 - 60),
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=DEPTH, BAND=BAND, PARTS=_parts(a, precision),
            STAGES=tile.stages, PART_ROWS=tile.part[0], PART_COLUMNS=tile.part[1], num_warps=tile.warps,
        )  # fmt: skip
    return out, log_s


def log_bmm_backward(
    grad: Tensor, a: Tensor, b: Tensor, log_s: Tensor, precision: str, need_a: bool, need_b: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in a and b; with no elements, (0,), what is not needed.

    `grad` (B, I, J) in a's dtype, `log_s` that of `log_bmm`, both with any strides.
    """
    _check(a)
    _, rows, terms = a.shape
    columns = b.size(2)
    grad_a, grad_b = a.new_empty(a.shape if need_a else 0), b.new_empty(b.shape if need_b else 0)
    if grad.numel() == 0 or terms == 0:
        return grad_a.zero_(), grad_b.zero_()
    if not (need_a or need_b):
        return grad_a, grad_b
    left, right = Operand(a), Operand(b.mT)
    with on_device(a):
        if _multiplies(a, rows, columns, terms):
            _multiply_gradients(grad, left, right, log_s, precision, need_a, need_b, grad_a, grad_b)
        else:
            _prepare(left, right, (rows, columns, terms), 0, precision)
            if need_a:
                _sum_gradient(left, right, grad, log_s, grad_a)
            if need_b:
                _sum_gradient(right, left, grad.mT, log_s.mT, grad_b.mT)
    return grad_a, grad_b


def max_bmm(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of the largest a_ik + b_kj over k, as torch.max has them; half precision adds in float32."""
    _check(a)
    batch, rows, terms = a.shape
    columns = b.size(2)
    if terms == 0:
        raise NotImplementedError("max_bmm: K must be positive, got 0")
    values = a.new_empty((batch, rows, columns))
    indices = a.new_empty(values.shape, dtype=torch.int64)
    if values.numel():
        tile = _direct_tile(a, rows, columns, terms)
        with on_device(a):
            largest_term[(_programs(batch, rows, columns, *tile[:2]),)](
                a, *a.stride(), b, *b.mT.stride(), values, indices, rows, columns, terms,
                ACC=_acc(a), ROWS=tile[0], COLUMNS=tile[1], TERMS=tile[2], BAND=BAND, num_warps=_warps(tile),
            )  # fmt: skip
    return values, indices


def sample_bmm(a: Tensor, b: Tensor, uniforms: Tensor) -> Tensor:
    """A k for each i and j, of probability softmax_k(a_ik + b_kj), by inverting the distribution at `uniforms`.

    `uniforms` (B, I, J) in [0, 1), float32 (float64 for float64), with any strides. -1 where all terms are -inf, the
    first k whose term is NaN or inf where there is one.
    """
    _check(a)
    batch, rows, terms = a.shape
    columns = b.size(2)
    indices = a.new_empty((batch, rows, columns), dtype=torch.int64)
    if indices.numel() == 0 or terms == 0:
        return indices.fill_(-1)
    height, width = (min(DRAWN, triton.next_power_of_2(length)) for length in (rows, columns))
    with on_device(a):
        draw_term[(_programs(batch, rows, columns, height, width),)](
            a, *a.stride(), b, *b.mT.stride(), uniforms, *uniforms.stride(), indices, rows, columns, terms,
            ACC=_acc(a), ROWS=height, COLUMNS=width, BAND=BAND, num_warps=_warps((height, width)),
        )  # fmt: skip
    return indices


def _prepare(
    left: Operand,
    right: Operand,
    padded: tuple[int, int, int],
    offset: int,
    precision: str,
    *,
    left_shape: tuple[int, int] | None = None,
    right_shape: tuple[int, int] | None = None,
    transposed: bool = False,
) -> None:
    """Fills in `top` and `kind` of both; E and F too where they are given a shape, of lines or, transposed, of terms.

    `padded`: I, J and K with the zeros that are wanted behind them.
    """
    rows, columns, terms = padded
    parts = _parts(left.lines, precision)
    for operand, shape in ((left, left_shape), (right, right_shape)):
        if shape is not None:
            powers = operand.lines.new_empty((max(1, parts), operand.batch, *shape), dtype=torch.float32)
            operand.powers = powers.mT if transposed else powers
    left_blocks = left.batch * triton.cdiv(rows, PREPARED[0])
    right_blocks = right.batch * triton.cdiv(columns, PREPARED[0])
    prepare[(left_blocks + right_blocks,)](
        *left.strided, *right.strided, left.top, left.kind, *left.strided_powers,
        right.top, right.kind, *right.strided_powers,
        left.count, rows, right.count, columns, left.terms, terms, offset, left_blocks,
        ACC=_acc(left.lines), STORE_E=left_shape is not None, STORE_F=right_shape is not None, FLOORED=not transposed,
        PARTS=parts, LINES=PREPARED[0], TERMS=PREPARED[1], num_warps=4,
    )  # fmt: skip


def _multiply_gradients(
    grad: Tensor, left: Operand, right: Operand, log_s: Tensor, precision: str, need_a: bool, need_b: bool,
    grad_a: Tensor, grad_b: Tensor,
) -> None:  # fmt: skip
    batch, rows, columns = grad.shape
    terms, group = left.terms, GROUP.value
    rows_to, columns_to = _whole(rows, DEPTH), _whole(columns, DEPTH)
    _prepare(
        left, right, (rows_to, columns_to, terms), 0, precision, transposed=True,
        left_shape=(terms, rows_to) if need_b else None, right_shape=(terms, columns_to) if need_a else None,
    )  # fmt: skip
    groups, groups_across = triton.cdiv(rows, group), triton.cdiv(columns, group)
    parts = _parts(grad, precision)
    g, transposed = (
        left.top.new_empty((max(1, parts), batch, *shape) if needed else (1, 0))
        for shape, needed in (((rows, columns_to), need_a), ((columns, rows_to), need_b))
    )
    marks, transposed_marks = (
        left.kind.new_empty((batch, *shape) if needed else 0)
        for shape, needed in (((groups, columns_to), need_a), ((groups_across, rows_to), need_b))
    )
    scale_gradient[(batch * groups * groups_across,)](
        grad, *grad.stride(), log_s, *log_s.stride(),
        g, g.stride(0), marks, transposed, transposed.stride(0), transposed_marks,
        rows, rows_to, columns, columns_to,
        STORE=need_a, STORE_TRANSPOSED=need_b, PARTS=parts, num_warps=4,
    )  # fmt: skip
    if need_a:
        _multiply_gradient(left, right, grad, log_s, g, marks, grad_a, precision)
    if need_b:
        _multiply_gradient(right, left, grad.mT, log_s.mT, transposed, transposed_marks, grad_b.mT, precision)


def _multiply_gradient(
    left: Operand, right: Operand, grad: Tensor, log_s: Tensor, g: Tensor, marks: Tensor, out: Tensor, precision: str
) -> None:
    batch, rows, terms = out.shape
    tile = _tile(out, batch, rows, terms)
    # In float32: terms are added to what is stored.
    sums = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    multiply_gradient[(_programs(batch, rows, terms, tile.rows, tile.columns),)](
        *left.strided, *right.strided, left.top, left.top_batch, right.top, right.top_batch,
        *right.strided_powers[:3], g, g.stride(0), marks,
        grad, *grad.stride(), log_s, *log_s.stride(), sums, *sums.stride(),
        rows, right.count, terms, g.size(3),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=DEPTH, BAND=BAND, PARTS=_parts(out, precision),
        STAGES=tile.stages, PART_COLUMNS=tile.part[1], num_warps=tile.warps,
    )  # fmt: skip
    if sums is not out:
        out.copy_(sums)


def _sum_gradient(left: Operand, right: Operand, grad: Tensor, log_s: Tensor, out: Tensor) -> None:
    batch, rows, terms = out.shape
    tile = _direct_tile(out, rows, terms, right.count)
    sum_gradient[(_programs(batch, rows, terms, *tile[:2]),)](
        *left.strided, *right.strided, left.top, left.top_batch, right.top, right.top_batch,
        grad, *grad.stride(), log_s, *log_s.stride(), out, *out.stride(), rows, right.count, terms,
        ACC=_acc(out), ROWS=tile[0], COLUMNS=tile[1], TERMS=tile[2], BAND=BAND, num_warps=_warps(tile),
    )  # fmt: skip


def _check(a: Tensor) -> None:
    if a.dtype not in DTYPES:
        raise NotImplementedError(f"no Triton kernel for {a.dtype}")


def _wide(a: Tensor) -> torch.dtype:
    return torch.float64 if a.dtype == torch.float64 else torch.float32


def _acc(a: Tensor) -> tl.dtype:
    return tl.float64 if a.dtype == torch.float64 else tl.float32


def _multiplies(a: Tensor, rows: int, columns: int, terms: int) -> bool:
    return a.dtype != torch.float64 and min(rows, columns, terms) >= LEAST


def _parts(operand: Tensor, precision: str) -> int:
    """How many TF32 numbers stand for a factor; 0: the float32 itself, where there is no TF32."""
    if torch.version.hip is not None:
        return 0
    # One product's sums stay in tensor memory, from where Triton 3.6 and 3.7 fail to split them.
    return 2 if precision == "highest" or device_of(operand).tensor_memory else 1


def _whole(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def _programs(batch: int, rows: int, columns: int, height: int, width: int) -> int:
    return batch * triton.cdiv(rows, height) * triton.cdiv(columns, width)


def _tile(operand: Tensor, batch: int, rows: int, columns: int) -> Tile:
    device = device_of(operand)
    large = _programs(batch, rows, columns, LARGE_TILE.rows, LARGE_TILE.columns) >= device.multiprocessors
    # With tensor memory the large tile takes 240 KB of shared memory, not 192, and the small one 120.
    return LARGE_TILE if large and device.shared_memory >= 200 << 10 and not device.tensor_memory else TILE


def _direct_tile(operand: Tensor, rows: int, columns: int, terms: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and as many terms at a time as there is room beside them."""
    room = DIRECT if operand.dtype != torch.float64 else DIRECT // 2
    height, width = min(32, triton.next_power_of_2(rows)), min(room // 32, triton.next_power_of_2(columns))
    return height, width, max(1, min(room // (height * width), triton.next_power_of_2(terms)))


def _warps(tile: tuple[int, ...]) -> int:
    return max(1, min(4, math.prod(tile) // 256))
