"""What the scan kernels share: a tile of rows is cut into groups of V successive steps, one group a thread.

A group is scanned step by step in registers, the totals of the groups over lanes (lanes.py).

Layouts (a constexpr), how a tile's steps come from memory and go there:
"vectors": rows in time whose groups of V steps are aligned: a thread loads its group.
"elements": rows of any alignment. Neighboring threads load neighboring steps, which shared memory brings to the
threads that they belong to (`in_groups`).
"columns": some steps of neighboring columns, in the same way.
"serial": neighboring threads take neighboring columns, each loads its steps one by one.
"""

import triton
import triton.language as tl

from .gamma import bounded_product, discounted


@triton.jit
def unpack(tile, P: tl.constexpr, J: tl.constexpr, V: tl.constexpr):
    """(P, J, V) tile -> V tiles (P, J), one for each step of the groups. Free: a thread holds a whole group."""
    if V == 1:
        return (tl.reshape(tile, (P, J)),)
    else:
        even, odd = tl.split(tl.reshape(tile, (P, J, V // 2, 2)))
        evens = unpack(even, P, J, V // 2)
        odds = unpack(odd, P, J, V // 2)
        steps = ()
        for i in tl.static_range(V // 2):
            steps = steps + (evens[i], odds[i])
        return steps


@triton.jit
def pack(steps, P: tl.constexpr, J: tl.constexpr, V: tl.constexpr):
    """The inverse of `unpack`."""
    if V == 1:
        return tl.reshape(steps[0], (P, J, 1))
    else:
        evens = ()
        odds = ()
        for i in tl.static_range(V // 2):
            evens = evens + (steps[2 * i],)
            odds = odds + (steps[2 * i + 1],)
        return tl.reshape(tl.join(pack(evens, P, J, V // 2), pack(odds, P, J, V // 2)), (P, J, V))


@triton.jit
def backwards(steps, V: tl.constexpr):
    flipped = ()
    for i in tl.static_range(V):
        flipped = flipped + (steps[V - 1 - i],)
    return flipped


@triton.jit
def in_groups(tile, pin):
    """A tile (P, J, V) with the V steps of each group in one thread. `pin`: a pointer to aligned memory, and False.

    By a load that never happens, of such groups: the compiler lays a tile out for its loads. Left to itself it takes
    the halves, quarters ... of an `unpack` through shared memory one by one.
    """
    P: tl.constexpr = tile.shape[0]
    J: tl.constexpr = tile.shape[1]
    V: tl.constexpr = tile.shape[2]
    group = tl.arange(0, P)[:, None, None] * J + tl.arange(0, J)[None, :, None]
    offsets = group * V + tl.arange(0, V)[None, None, :]
    # Fewer than the widest load has, for a narrow dtype.
    offsets = tl.max_contiguous(offsets, [1, 1, V])
    return tl.load(pin[0].to(tl.pointer_type(tile.dtype)) + offsets, mask=pin[1], other=tile)


@triton.jit
def as_loaded(tile, pin):
    """A tile (P, J) laid out as the steps of columns are loaded, by a load that never happens, as in `in_groups`.

    The compiler leaves a carry as the scan over groups has it otherwise, and takes every step to it through shared
    memory, and back.
    """
    P: tl.constexpr = tile.shape[0]
    J: tl.constexpr = tile.shape[1]
    offsets = tl.arange(0, P)[:, None] + P * tl.arange(0, J)[None, :]
    return tl.load(pin[0].to(tl.pointer_type(tile.dtype)) + offsets, mask=pin[1], other=tile)


@triton.jit
def opaque(tile):
    """What is computed from it is computed anew, not kept."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=1)


@triton.jit
def opaque_steps(steps, N: tl.constexpr):
    """Steps that their conversions to float64 would hold twice the registers for."""
    anew = ()
    for i in tl.static_range(N):
        anew = anew + (opaque(steps[i]) if steps[i].dtype.primitive_bitwidth == 32 else steps[i],)
    return anew


@triton.jit
def load_steps(
    row, position, valid, stride_time, other, pin, P: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    REVERSE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """V tiles (P, J) in scan order. `position`, `valid`: see `positions`; `other` for steps that are not valid.

    `pin`: see `in_groups`.
    """
    if LAYOUT == "serial":
        step = row + position[0] * stride_time
        steps = ()
        for i in tl.static_range(V):
            steps = steps + (tl.load(step, mask=is_step(valid, i), other=other),)
            step += -stride_time if REVERSE else stride_time
        return steps
    else:
        tile = tl.load(row + position[0] * stride_time, mask=valid[0], other=other)
        if LAYOUT == "columns":
            tile = tl.trans(tile)
        tile = tl.reshape(tile, (P, J, V))
        if LAYOUT != "vectors":
            tile = in_groups(tile, pin)
        steps = unpack(tile, P, J, V)
        if REVERSE:
            steps = backwards(steps, V)
        return steps


@triton.jit
def store_steps(
    row, position, valid, stride_time, steps, P: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    REVERSE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_steps`."""
    if LAYOUT == "serial":
        step = row + position[0] * stride_time
        for i in tl.static_range(V):
            tl.store(step, steps[i].to(row.dtype.element_ty), mask=is_step(valid, i))
            step += -stride_time if REVERSE else stride_time
    else:
        if REVERSE:
            steps = backwards(steps, V)
        tile = pack(steps, P, J, V).to(row.dtype.element_ty)
        if LAYOUT == "columns":
            STEPS: tl.constexpr = position[0].shape[0]
            tile = tl.trans(tl.reshape(tile, (P * J * V // STEPS, STEPS)))
        else:
            tile = tl.reshape(tile, (P, J * V))
        tl.store(row + position[0] * stride_time, tile, mask=valid[0])


@triton.jit
def positions(
    begin, segment, row_valid, T, Q: tl.constexpr, J: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Where the steps of a tile lie: (positions in time, whether they exist, indices in scan order), a tuple each.

    `begin`: the tile's first step in scan order; `segment` (P, 1): the part of the tile, J * V steps, that a row of the
    tile holds, of Q. "serial": of each group (P, J) the first step; which of its steps exist, from one of the first two
    on and how many (`is_step`). "columns": one (Q * J * V, 1) entry, `row_valid` (1, R). Else one (P, J * V) entry. The
    latter two are in the order of memory; in a reversed scan the groups are mirrored and a group's steps are not, so
    that a thread's load stays one vector.
    """
    if LAYOUT == "serial":
        first = begin + (segment * J + tl.arange(0, J)[None, :]) * V
        left = tl.where(row_valid, tl.minimum(T - first, V), 0).to(tl.int32)
        if REVERSE:
            return (T - 1 - first,), (tl.zeros(left.shape, tl.int32), left), (first,)
        else:
            return (first,), (tl.zeros(left.shape, tl.int32), left), (first,)
    else:
        if LAYOUT == "columns":
            n = tl.arange(0, Q * J * V)[:, None]
            segment = 0
        else:
            n = tl.arange(0, J * V)[None, :]
        if REVERSE:
            time = T - begin - (segment * J + n // V + 1) * V + n % V
            scan_index = T - 1 - time
            return (time,), ((time >= 0) & row_valid,), (scan_index,)
        else:
            time = begin + segment * (J * V) + n
            return (time,), ((time < T) & row_valid,), (time,)


@triton.jit
def is_step(valid, i: tl.constexpr):
    """Whether the step `i` of each group exists, for "serial"."""
    return (valid[1] > i) & (valid[0] == 0) if i == 0 else valid[1] > i


@triton.jit
def within(valid, index, LOWEST: tl.constexpr, highest, LAYOUT: tl.constexpr):
    """`valid`, where also ``LOWEST <= index < highest``; LOWEST is 0 or 1."""
    if LAYOUT == "serial":
        low = valid[0]
        if LOWEST:
            low = (index[0] == 0).to(tl.int32)
        return low, tl.minimum(valid[1], highest - index[0]).to(tl.int32)
    else:
        return (valid[0] & (index[0] >= LOWEST) & (index[0] < highest),)


@triton.jit
def widened(steps, dtype: tl.constexpr, N: tl.constexpr):
    wide = ()
    for i in tl.static_range(N):
        wide = wide + (steps[i].to(dtype),)
    return wide


@triton.jit
def group_totals(
    values, gates, gate_rest, resets, ACC: tl.constexpr, V: tl.constexpr, GATES: tl.constexpr, RESET: tl.constexpr
):
    """The scan over the V steps of each group: (sum, product of the gates in float64, whether there is a reset)."""
    total = values[0].to(ACC)
    product = total
    eight = total
    cut = total
    if GATES == "step":
        product = gates[0].to(tl.float64)
    if RESET:
        cut = resets[0].to(tl.int32)
    for i in tl.static_range(1, V):
        value = values[i].to(ACC)
        joined = discounted(value, total, gates[i if GATES == "step" else 0].to(ACC), gate_rest, GATES)
        if RESET:
            joined = tl.where(resets[i] != 0, value, joined)
            cut = cut | resets[i].to(tl.int32)
        total = joined
        if GATES == "step":
            gate = gates[i].to(tl.float64)
            # Eight float32 numbers below 2^128 have a product below 2^1024.
            eight = gate if i % 8 == 0 else eight * gate
            if gates[i].dtype == tl.float64:
                product = bounded_product(product, gate)
            elif i < 8:
                product *= gate
            elif i % 8 == 7 or i == V - 1:
                product = bounded_product(product, eight)
    return total, product, cut


@triton.jit
def replay(
    values, gates, gate_rest, resets, carry, first, ACC: tl.constexpr, V: tl.constexpr, GATES: tl.constexpr,
    RESET: tl.constexpr, SELECT_FIRST: tl.constexpr,
):  # fmt: skip
    """The recurrence over the V steps of each group, from `carry`. SELECT_FIRST: where `first`, nothing is carried."""
    results = ()
    for i in tl.static_range(V):
        value = values[i].to(ACC)
        result = discounted(value, carry, gates[i if GATES == "step" else 0].to(ACC), gate_rest, GATES)
        if RESET:
            result = tl.where(resets[i] != 0, value, result)
        if SELECT_FIRST and i == 0:
            result = tl.where(first, value, result)
        results = results + (result,)
        carry = result
    return results


@triton.jit
def gate_gradients(
    grads, previous, initial, resets, index, T, V: tl.constexpr, HAS_INITIAL: tl.constexpr, RESET: tl.constexpr
):
    """``grad_input[t] * y[prev(t)]`` for each step. `index` (P, J): the adjoint's index of each group's first step.

    The adjoint runs the other way, so y[prev(t)] is the output one step further on, and `initial` after the last.
    """
    products = ()
    for i in tl.static_range(V):
        product = tl.where(index + i < T - 1, grads[i] * previous[i], 0)
        if HAS_INITIAL:
            product = tl.where(index + i == T - 1, grads[i] * initial, product)
        if RESET:
            product = tl.where(resets[i] != 0, 0, product)
        products = products + (product,)
    return products


@triton.jit
def summed(steps, P: tl.constexpr, V: tl.constexpr):
    """V tiles (P, J) -> their sum over steps and lanes, (P, 1), in a fixed order."""
    total = steps[0]
    for i in tl.static_range(1, V):
        total += steps[i]
    return tl.reshape(tl.sum(total, axis=1), (P, 1))
