"""Scans over the last K steps: every output runs the recurrence over its own window, K steps, the values from cache."""

import triton
import triton.language as tl

from .gamma import discounted, load_gamma, split_gamma


@triton.jit(do_not_specialize=["gamma_bits", "window"])
def scan_window(
    x_ptr, y_ptr, gamma_ptr, initial_ptr, reset_ptr, gamma_bits: tl.int64, window, T, inner,
    x_outer, x_time, x_inner, y_outer, y_time, y_inner, gamma_outer, gamma_time, gamma_inner,
    initial_outer, initial_inner, reset_outer, reset_time, reset_inner,
    C: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr, GATES: tl.constexpr, REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr, HAS_INITIAL: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """One program: N steps of C neighboring rows. `initial` is one more step, before the first."""
    blocks = (inner + C - 1) // C
    parts = (T + N - 1) // N
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    outer_index = program // parts // blocks
    inner_index = (program // parts % blocks) * C + tl.arange(0, C)[None, :]
    row_valid = inner_index < inner
    index = part * N + tl.arange(0, N)[:, None]
    x_row = x_ptr + outer_index * x_outer + inner_index * x_inner
    if GATES == "step" or GATES == "row":
        gamma_row = gamma_ptr + outer_index * gamma_outer + inner_index * gamma_inner
    if GATES == "row":
        gamma = tl.load(gamma_row, mask=row_valid, other=0).to(tl.float64)
    elif GATES != "step":
        gamma = load_gamma(x_row, gamma_bits, GATES)
    if GATES != "step":
        gate, gate_rest = split_gamma(gamma)
        if ACC == tl.float64:  # noqa: SIM300
            gate = gamma
    if RESET:
        reset_row = reset_ptr + outer_index * reset_outer + inner_index * reset_inner
    start = tl.zeros((1, C), ACC)
    if HAS_INITIAL:
        row_initial = initial_ptr + outer_index * initial_outer + inner_index * initial_inner
        start = tl.load(row_initial, mask=row_valid, other=0).to(ACC)

    carry = tl.zeros((N, C), ACC)
    for step in range(window):
        source = index - (window - 1 - step)
        inside = (source >= 0) & (source < T) & row_valid
        gate_source = source - 1 if SHIFTED else source
        gate_inside = inside & (gate_source >= 0)
        if REVERSE:
            time = T - 1 - source
            gate_time = T - 1 - gate_source
        else:
            time = source
            gate_time = gate_source
        value = tl.load(x_row + time * x_time, mask=inside, other=0).to(ACC)
        if GATES == "step":
            gate = tl.load(gamma_row + gate_time * gamma_time, mask=gate_inside, other=0).to(ACC)
            gate_rest = gate
        joined = discounted(value, carry, gate, gate_rest, GATES)
        # A window's first step, and the row's, has nothing to carry.
        alone = step == 0
        if not HAS_INITIAL:
            alone = alone | (source == 0)
        if RESET:
            cut = tl.load(reset_row + gate_time * reset_time, mask=gate_inside, other=0)
            alone = alone | (cut != 0)
        joined = tl.where(alone, value, joined)
        carry = tl.where(source >= 0, joined, tl.where(source == -1, start, 0))
    if REVERSE:
        time = T - 1 - index
    else:
        time = index
    y_row = y_ptr + outer_index * y_outer + inner_index * y_inner
    tl.store(y_row + time * y_time, carry.to(y_ptr.dtype.element_ty), mask=(index < T) & row_valid)
