"""The scan kernel for few columns: a program holds whole columns, a thread successive steps of them in registers.

Programs that scan time serially (tiles.py) have too little on its way where the columns are few: 0.43 of a copy for
1024 steps of 4096 float32 columns on an H200. Here all of a column is loaded at once.
"""

import triton
import triton.language as tl

from .register_groups import column_order, discounted_columns


@triton.jit
def scan_tile(
    x_column, y_column, inside, begin, carry, gamma, order, T, x_time, y_time, V: tl.constexpr, INDEX: tl.constexpr,
    REVERSE: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """The steps from `begin` on, `order` (1, R) which of them; a carry (P, 1) from before them if CARRIED."""
    index = begin + order
    position = index
    if REVERSE:
        position = T - 1 - index
    position = position.to(INDEX)
    valid = inside & (index < T)
    value = tl.load(x_column + position * x_time, mask=valid, other=0).to(tl.float32)
    if CARRIED:
        value = tl.where(order == 0, (value + gamma * carry).to(tl.float32), value)
    result = discounted_columns(tl.zeros(value.shape, tl.float32), value, gamma, V)
    tl.store(y_column + position * y_time, result.to(y_column.dtype.element_ty), mask=valid)
    return result


@triton.jit(do_not_specialize=["gamma_bits"])
def scan_columns(
    x_ptr, y_ptr, initial_ptr, gamma_bits: tl.int64, T, inner,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, initial_outer, initial_inner,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, INDEX: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program: P neighboring columns, R steps at a time, V successive ones a thread's. WHOLE: T <= R.

    `gamma_bits`: of a float64 number, of at most 1 in magnitude.
    """
    block = tl.program_id(0).to(tl.int64)
    blocks = (inner + P - 1) // P
    outer_index = block // blocks
    column = (block % blocks) * P + tl.arange(0, P)[:, None]
    inside = column < inner
    order = column_order(tl.arange(0, R)[None, :], V)
    x_column = x_ptr + outer_index * x_outer + column * x_inner
    y_column = y_ptr + outer_index * y_outer + column * y_inner
    gamma = gamma_bits.to(tl.int64).to(tl.float64, bitcast=True)
    carry = tl.zeros((P, 1), tl.float64)
    if HAS_INITIAL:
        start = initial_ptr + outer_index * initial_outer + column * initial_inner
        carry = tl.load(start, mask=inside, other=0).to(tl.float64)
    if WHOLE:
        scan_tile(x_column, y_column, inside, 0, carry, gamma, order, T, x_time, y_time, V, INDEX, REVERSE, HAS_INITIAL)
    else:
        for begin in range(0, T, R):
            result = scan_tile(
                x_column, y_column, inside, begin, carry, gamma, order, T, x_time, y_time, V, INDEX, REVERSE, True
            )
            carry = tl.sum(tl.where(order == R - 1, result, 0), axis=1, keep_dims=True).to(tl.float64)
