"""Sizes for cuBLAS's fast kernels, whose matrices have rows of whole words of 16 bytes, at multiples of them.

Their number of elements counts, not only where they start: with V = 50257 (D = 1536, 7777 rows, bfloat16, H200) the
logits take 12.4 ms, 12.3 in padded rows, and 1.59 for 50256 classes and 0.03 for the last one. Products in float32
proper take the same time for every size.

Where V or D is no multiple of a word, and a GPU's products are large enough to tell:

* V: the logits' rows are padded in memory anyway (plan.py). The products that run over the classes of linear_weight,
  to logits and to input's gradient, take the whole words of them and then the classes that remain. linear_weight's
  gradient has rows for whole words, the last of which nobody sees.
* D: input and linear_weight are copied to rows of whole words, padded with 0, and the gradients from such rows: N·D and
  V·D elements at a time beyond what the plan holds. So are operands of whole words that start elsewhere. (4096 rows
  of 4095 and V = 32000: 1.4 ms a product instead of 7 to 8, and 0.7 for the copies.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BYTES = 16
_WIDE_BYTES = 8 << 20  # of linear_weight's classes in float32 at a time, for float32 logits on a CPU
_HALF = (torch.float16, torch.bfloat16)
_LEAST_PRODUCT = 1 << 31  # N·V·D from which on another launch is small beside a GEMM
_LEAST_COPIED_ROWS = 256  # N from which on copies of linear_weight and its gradient are


def word(rows: int, linear_weight: Tensor) -> int:
    """Elements of a word, where sizes are to be multiples of it; else 1."""
    classes, features = linear_weight.shape
    dtype, device_type = linear_weight.dtype, linear_weight.device.type
    has_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _word(rows * classes * features, dtype, device_type, has_tf32)


def _word(product: int, dtype: torch.dtype, device_type: str, has_tf32: bool) -> int:
    is_fast = dtype in _HALF or (dtype == torch.float32 and has_tf32)
    return _WORD_BYTES // dtype.itemsize if device_type == "cuda" and is_fast and product >= _LEAST_PRODUCT else 1


def padded(size: int, word: int) -> int:
    return -(-size // word) * word


def whole(size: int, word: int) -> int:
    return size // word * word


def operands(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    """input (N, D) and linear_weight (V, D), or copies of them with rows of whole words."""
    rows, features = input.shape
    words = word(rows, linear_weight) if _copies_pay(rows) else 1
    if words == 1:
        return input, linear_weight
    columns = padded(features, words)
    return _with_columns(input, columns), _with_columns(linear_weight, columns)


def copies_weight(rows: int, linear_weight: Tensor) -> bool:
    """Whether `operands` makes a copy of linear_weight for so many rows of input."""
    words = word(rows, linear_weight) if _copies_pay(rows) else 1
    return words > 1 and not _is_whole(linear_weight, padded(linear_weight.size(1), words))


def _copies_pay(rows: int) -> bool:
    return rows >= _LEAST_COPIED_ROWS


def _with_columns(matrix: Tensor, columns: int) -> Tensor:
    if _is_whole(matrix, columns):
        return matrix
    features = matrix.size(1)
    copy = matrix.new_empty(matrix.size(0), columns)
    copy[:, :features].copy_(matrix)
    copy[:, features:] = 0
    return copy


def _is_whole(matrix: Tensor, columns: int) -> bool:
    strides = sorted(matrix.stride())
    return (
        matrix.size(1) == columns
        and strides[0] == 1
        and (strides[1] * matrix.itemsize) % _WORD_BYTES == matrix.data_ptr() % _WORD_BYTES == 0
    )


def widened(matrix: Tensor, columns: int) -> Tensor:
    """`matrix` (n, V) together with the padding behind its rows, up to `columns`."""
    return matrix if matrix.size(1) == columns else matrix.as_strided((matrix.size(0), columns), matrix.stride())


def logits_product(rows: Tensor, linear_weight: Tensor, word: int, out: Tensor | None) -> Tensor:
    """rows (n, D) times linear_weight (V, D) transposed, to `out`, which may be float32 for half-precision factors."""
    if out is None:
        return torch.mm(rows, linear_weight.t())
    classes = linear_weight.size(0)
    middle = whole(classes, word)
    _logits(rows, linear_weight[:middle], out[:, :middle])
    if middle < classes:
        _logits(rows, linear_weight[middle:], out[:, middle:])
    return out


def _logits(rows: Tensor, linear_weight: Tensor, out: Tensor) -> None:
    if out.dtype == rows.dtype:
        torch.mm(rows, linear_weight.t(), out=out)
    elif rows.device.type == "cuda":
        torch.mm(rows, linear_weight.t(), out_dtype=out.dtype, out=out)
    else:
        rows = rows.to(out.dtype)
        step = max(_WIDE_BYTES // max(linear_weight.size(1) * out.dtype.itemsize, 1), 1)
        for part in (slice(start, start + step) for start in range(0, linear_weight.size(0), step)):
            torch.mm(rows, linear_weight[part].to(out.dtype).t(), out=out[:, part])


def input_gradient_product(logits_gradient: Tensor, linear_weight: Tensor, word: int, out: Tensor) -> None:
    """logits_gradient (n, V) times linear_weight (V, D), to `out`, which may be float32 for half-precision factors.

    The classes behind the whole words come first: what is rounded twice is their few products.
    """
    classes = linear_weight.size(0)
    middle = whole(classes, word)
    if middle < classes:
        _product(logits_gradient[:, middle:], linear_weight[middle:], out, accumulate=False)
    _product(logits_gradient[:, :middle], linear_weight[:middle], out, accumulate=middle < classes)


def _product(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool) -> None:
    if out.dtype == left.dtype:
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif left.device.type == "cuda":
        if accumulate:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    elif accumulate:
        out += torch.mm(left, right)
    else:
        out.copy_(torch.mm(left, right))
