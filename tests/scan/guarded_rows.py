"""Scans of operands beside memory that must not be touched: a program of its own, for it would crash.

python tests/scan/guarded_rows.py [every]
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import torch
from torch import Tensor

import torch_dcs_ops  # noqa: F401  (loads the library)

PAGE = mmap.PAGESIZE
LENGTHS = (1, 2, 3, 5, 7, 9, 17, 33, 65, 130, 700)
# Less than a vector, whole ones and what is left, less and more than a tile; blocks of rows, whole and in part.
SOME_LENGTHS, ROWS, SOME_ROWS = (1, 3, 9, 33, 130, 700), (1, 5, 8, 13, 70), (1, 13, 70)
libc = ctypes.CDLL(None, use_errno=True)
kept: list[mmap.mmap] = []


def guarded(values: Tensor, at_end: bool) -> Tensor:
    """The same values between two pages that must not be touched, beside one of them."""
    size = values.numel() * values.element_size()
    inner = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, inner + 2 * PAGE)
    kept.append(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (address, address + PAGE + inner):
        assert libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
    offset = PAGE + (inner - size if at_end else 0)
    flat = torch.frombuffer(area, dtype=values.dtype, count=values.numel(), offset=offset)
    return flat.view(values.shape).copy_(values)


def rows_of(rows: int, length: int, padding: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """Rows that touch the page with their first or last element, padding between them."""
    wide = torch.randn(rows * (length + padding) - padding).to(dtype)
    return guarded(wide, at_end).as_strided((rows, length), (length + padding, 1))


def main(every: bool) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, rows, length in itertools.product(dtypes, *((ROWS, LENGTHS) if every else (SOME_ROWS, SOME_LENGTHS))):
        wide = torch.promote_types(dtype, torch.float32)
        for at_end, padding, reverse in itertools.product((False, True), (0, 3), (False, True)):
            x = rows_of(rows, length, padding, dtype, at_end)
            reset = rows_of(rows, length, padding, torch.float32, at_end) > 1.3
            reset = guarded(reset, at_end)
            initial, grad = guarded(torch.randn(rows).to(dtype), at_end), rows_of(rows, length, padding, dtype, at_end)
            for gamma in (None, guarded(torch.rand(rows, dtype=wide), at_end), rows_of(rows, length, 0, dtype, at_end)):
                for cut, start in itertools.product((None, reset), (None, initial)):
                    y = torch.ops.dcs._scan.default(x, gamma, 0.9, -1, reverse, False, start, cut, None)
                    saved = guarded(y, at_end)
                    torch.ops.dcs._scan_gradients.default(grad, saved, gamma, 0.9, -1, reverse, start, cut)
        kept.clear()
    print("untouched")


if __name__ == "__main__":
    main(sys.argv[1:] == ["every"])
