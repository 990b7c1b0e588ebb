"""What multiplies a carry: a shared gamma in twice float32's precision, and products of many gates.

Gates (a constexpr): "sum" for gamma = 1, "scalar", "row" for a per-row gamma, "step" for one a step; "fading" for a
"scalar" of at most 1 in magnitude, but not 0, whose even powers stay above 0: an infinity stays one over many steps.
"""

import triton
import triton.language as tl

# The upper half of a float64 infinity.
INFINITE = tl.constexpr(0x7FF00000)


@triton.jit
def load_gamma(gamma_row, gamma_bits, GATES: tl.constexpr):
    """gamma in float64: a number for "scalar" and "sum", (P, 1) for "row".

    A number comes as the bits of a float64: Triton makes a float argument a float32.
    """
    if GATES == "row":
        return tl.load(gamma_row).to(tl.float64)
    else:
        return gamma_bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def split_gamma(gamma):
    """A float64 gamma as (float32, float32 rest), both of its sign: inf - inf would make a NaN of an infinite carry."""
    nearest = gamma.to(tl.float32)
    towards_zero = (nearest.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    excess = nearest.to(tl.float64) - gamma
    gate = tl.where(tl.where(gamma > 0, excess, -excess) > 0, towards_zero, nearest)
    return gate, (gamma - gate.to(tl.float64)).to(tl.float32)


@triton.constexpr_function
def rates(gamma_pointer, x_pointer, gates):
    """GATES for the steps of a group, from the types of the rows: "exact" for a shared gamma that has no rest, or is as
    good without it.

    Half precision would not show it: the weights of whole groups are exact, so that it does not add up.
    """
    is_half = x_pointer.element_ty.primitive_bitwidth == 16
    is_exact = is_half if gates == "scalar" else is_half or gamma_pointer.element_ty != tl.float64
    return "exact" if is_exact and gates in ("scalar", "row") else gates


@triton.jit
def discounted(value, carry, gate, gate_rest, GATES: tl.constexpr):
    """``value + gamma * carry`` with a gamma given to twice float32's precision, in two fused multiply-adds.

    Rounding gamma to float32 is the largest error of a long scan: 1.3e-2 at gamma = 0.999 and 10000 ones.
    """
    if GATES == "sum":
        return value + carry
    elif (GATES == "step") | (GATES == "exact") | (value.dtype == tl.float64):
        return gate * carry + value
    else:
        # An exact gamma has no rest, and 0 * inf would turn the inf of a carry into a NaN.
        return gate * carry + tl.where(gate_rest == 0, value, gate_rest * carry + value)


@triton.constexpr_function
def smallest(dtype):
    """The least number above 0."""
    return 2.0**-1074 if dtype == tl.float64 else 2.0**-149


@triton.jit
def weighted(value, weight, other, GATES: tl.constexpr, WIDE: tl.constexpr):
    """``value + weight * other`` for a product of gates. WIDE: where it may exceed float32's range."""
    if GATES == "sum":
        return value + other
    elif GATES == "fading":
        return tl.maximum(weight.to(value.dtype), tl.full((), smallest(value.dtype), value.dtype)) * other + value
    elif WIDE:
        return value + (weight * other.to(tl.float64)).to(value.dtype)
    else:
        return weight.to(value.dtype) * other + value


@triton.jit
def without_sign(a):
    """The upper half of a float64 without its sign: INFINITE for what is not finite, or more."""
    return (a.to(tl.int64, bitcast=True) >> 32).to(tl.int32) & 0x7FFFFFFF


@triton.jit
def bounded_product(a, b):
    """``a * b``, an overflow of finite factors cut to the largest number: inf * 0 would make a NaN of a finite sum.

    By integers: float64 comparisons and selections take three times as long.
    """
    product = a * b
    overflows = (without_sign(product) == INFINITE) & (tl.maximum(without_sign(a), without_sign(b)) < INFINITE)
    # The number before infinity, of either sign.
    return (product.to(tl.int64, bitcast=True) - overflows.to(tl.int64)).to(tl.float64, bitcast=True)


@triton.jit
def power_of_two_power(gamma, LENGTH: tl.constexpr, WIDE: tl.constexpr):
    """gamma ** LENGTH in float64, for a LENGTH that is a power of two."""
    if LENGTH == 1:
        return gamma
    elif WIDE:
        root = power_of_two_power(gamma, LENGTH // 2, WIDE)
        return bounded_product(root, root)
    else:
        root = power_of_two_power(gamma, LENGTH // 2, WIDE)
        return root * root


@triton.jit
def integer_power(gamma, exponent, BITS: tl.constexpr, WIDE: tl.constexpr):
    """gamma ** exponent in float64, elementwise, for 0 <= exponent < 2 ** BITS."""
    power = tl.where(exponent >= 0, 1.0, 1.0).to(tl.float64)
    square = gamma
    for bit in tl.static_range(BITS):
        chosen = ((exponent >> bit) & 1) != 0
        if WIDE:
            power = tl.where(chosen, bounded_product(power, square), power)
            square = bounded_product(square, square)
        else:
            power = tl.where(chosen, power * square, power)
            square = square * square
    return power
