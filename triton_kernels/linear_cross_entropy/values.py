"""A row's values as the loss sees them: logits with bias, scale and softcap, and the weights of their classes."""

import triton
import triton.language as tl


@triton.jit
def capped(u, softcap, ACC: tl.constexpr):
    """softcap·tanh(u / softcap) and its derivative in u.

    With e = exp(-2|v|): tanh|v| = 1 - 2e / (1 + e) and 1 - tanh² = 4e / (1 + e)². Small v in float32: Cephes' tanhf.
    """
    v = u / softcap
    size = tl.abs(v)
    e = tl.exp(-2 * size)
    inverse = 1 / (1 + e)
    value = 1 - 2 * e * inverse
    if ACC == tl.float32:  # noqa: SIM300
        square = v * v
        tail = -5.70498872745e-3 * square + 2.06390887954e-2
        tail = tail * square - 5.37397155531e-2
        tail = tail * square + 1.33314422036e-1
        tail = tail * square - 3.33332819422e-1
        value = tl.where(size < 0.625, tail * square * size + size, value)
    return softcap * tl.where(v < 0, -value, value), 4 * e * inverse * inverse


@triton.jit
def load_values(
    row, bias_ptr, index, V, scale, softcap, ACC: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """z of the columns `index`, -inf beyond the last, and dz/dlogits."""
    inside = index < V
    z = tl.load(row + index, mask=inside, other=0).to(ACC)
    if BIAS:
        z += tl.load(bias_ptr + index, mask=inside, other=0)
    slope = scale
    if SCALED:
        z *= scale
    if CAPPED:
        z, slope = capped(z, softcap, ACC)
        slope *= scale
    return tl.where(inside, z, float("-inf")), slope


@triton.jit
def load_weights(
    weight_ptr, probabilities, index, V, keep, even, WEIGHTED: tl.constexpr, BY_CLASS: tl.constexpr, ACC: tl.constexpr
):
    """w of the columns, for class probabilities w times the smoothed ones; 0 beyond the last."""
    inside = index < V
    w = tl.where(inside, 1.0, 0.0).to(ACC)
    if WEIGHTED:
        w = tl.load(weight_ptr + index, mask=inside, other=0)
    if BY_CLASS:
        w *= keep * tl.load(probabilities + index, mask=inside, other=0) + even
    return w
