"""Softmax cross entropy of rows of logits, and the logits' gradient in their place: `cross_entropy_rows_`.

A program takes a row: one pass over its blocks finds the maximum and the sums relative to the largest so far, a second
(from L2, while that lasts) writes the gradient. The target is kept out of the sums: with R the sum of exp(z - max) over
the other classes and S over all, p_t - 1 is -R / S and the loss log1p(R) where the target is the largest, so that a
loss of 1e-20 keeps all its digits. What there is one of in a row is float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import float_bits, on_device
from .values import load_values, load_weights

if TYPE_CHECKING:
    from torch_dcs_ops.reference.linear_cross_entropy.rows import RowsCall

# Elements of a block; the larger, the fewer reductions over the threads, and 16 values a thread leave registers.
LARGEST_BLOCK = 8192


@triton.jit
def log_one_plus(x):
    """log(1 + x) for x >= 0 to the last digits (Kahan)."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1, y - 1)))


@triton.jit
def from_bits(bits):
    """A Python float comes as the bits of a float64: Triton makes a float argument a float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def row_target(target_ptr, ignore_index, V, BY_CLASS: tl.constexpr):
    """The row's class, or -1, and whether it counts."""
    if BY_CLASS:
        target = tl.full((), -1, tl.int32)
        valid = target < 0
    else:
        target = tl.load(target_ptr)
        valid = target != ignore_index
        # The launcher asserts that it is; a wrong one never leads out of the row.
        target = tl.where(valid & (target >= 0) & (target < V), target, -1).to(tl.int32)
    return target, valid


@triton.jit
def target_value(
    row, bias_ptr, at, V, scale, softcap, ACC: tl.constexpr, BY_CLASS: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """z of column `at`, and dz/dlogits there."""
    slope = scale
    z = scale
    if not BY_CLASS:
        z, slopes = load_values(row, bias_ptr, at + tl.arange(0, 1), V, scale, softcap, ACC, BIAS, SCALED, CAPPED)
        z = tl.sum(z, 0)
        if CAPPED:
            slope = tl.sum(slopes, 0)
    return z, slope


@triton.jit
def rescaling(largest, raised):
    """The step from one largest value up to the next, in float64, and the power of it by which sums shrink."""
    # Below exp(-1000) all is 0, and 0 times a longer way is not inf.
    rise = tl.where(raised > largest, largest - raised, 0.0).to(tl.float64)
    rise = tl.where(rise < -1000, -1000.0, rise)
    return rise, tl.exp(rise)


@triton.jit
def sum_row(
    row, bias_ptr, weight_ptr, probabilities, lanes, target, V, scale, softcap, keep, even,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BY_CLASS: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr, ENTROPIC: tl.constexpr, PREDICTIONS: tl.constexpr,
):  # fmt: skip
    """(m, S, E, D, W) over all columns but the target; over all, the first of the largest and the first NaN (V: none).

    m is their maximum, S the sum of exp(z - m), E of exp(z - m) * (z - m), D of w * (m - z) and W of w.
    """
    LOWEST: tl.constexpr = -1.7976931348623157e308 if ACC == tl.float64 else -3.4028234663852886e38  # noqa: SIM300
    largest = tl.full((), LOWEST, ACC)
    total = tl.full((), 0.0, tl.float64)
    weighted = total
    distance = total
    mass = total
    best = tl.full((), float("-inf"), ACC)
    best_at = tl.full((), 0, tl.int32)
    nan_at = best_at + V
    for start in range(0, V, BLOCK):
        index = start + lanes
        z, _ = load_values(row, bias_ptr, index, V, scale, softcap, ACC, BIAS, SCALED, CAPPED)
        if PREDICTIONS:
            block_best = tl.max(z, 0)
            first = tl.min(tl.where(z == block_best, index, V), 0)
            best_at = tl.where(block_best > best, first, best_at)
            best = tl.where(block_best > best, block_best, best)
            nan_at = tl.minimum(nan_at, tl.min(tl.where(z != z, index, V), 0))
        others = tl.where(index == target, float("-inf"), z)
        block_largest = tl.max(others, 0)
        # A NaN does not count: the sum of powers has it.
        raised = tl.where(block_largest > largest, block_largest, largest)
        rise, shrink = rescaling(largest, raised)
        powers = tl.exp(others - raised)
        if ENTROPIC:
            bounded = others - raised
            bounded = tl.where(bounded < -1000, -1000.0, bounded)
            weighted = shrink * (weighted + rise * total) + tl.sum(powers * bounded, 0).to(tl.float64)
        total = shrink * total + tl.sum(powers, 0).to(tl.float64)
        if MIXED:
            w = load_weights(weight_ptr, probabilities, index, V, keep, even, WEIGHTED, BY_CLASS, ACC)
            counted = (index < V) & (index != target)
            distance += tl.where(mass != 0, -rise * mass, 0.0)
            distance += tl.sum(tl.where(counted, w * (raised - z), 0.0), 0).to(tl.float64)
            mass += tl.sum(tl.where(counted, w, 0.0), 0).to(tl.float64)
        largest = raised
    return largest, total, weighted, distance, mass, best_at, nan_at


@triton.jit
def join_target(
    z, weight_ptr, at, smoothing, largest, total, weighted, distance, mass,
    WEIGHTED: tl.constexpr, MIXED: tl.constexpr, ENTROPIC: tl.constexpr,
):  # fmt: skip
    """The sums of `sum_row` with the target among them: (m, S without the target, E, D, W).

    Then of the target: m - z, exp(z - m), its weight, and that times its share that is not smoothed.
    """
    rise, shrink = rescaling(largest, z)
    if ENTROPIC:
        weighted = shrink * (weighted + rise * total)
    others_total = shrink * total
    largest = tl.where(z > largest, z, largest)
    gap = (largest - z).to(tl.float64)
    own = tl.exp(-gap)
    own_weight = tl.full((), 1.0, tl.float64)
    if WEIGHTED:
        own_weight = tl.load(weight_ptr + at).to(tl.float64)
    hit = (1 - smoothing) * own_weight
    if MIXED:
        distance += tl.where(mass != 0, -rise * mass, 0.0) + own_weight * gap
        mass += own_weight
    return largest, others_total, weighted, distance, mass, gap, own, own_weight, hit


@triton.jit
def write_gradient(
    row, bias_ptr, weight_ptr, probabilities, lanes, target, valid, V, scale, softcap, keep, even,
    largest, constant, linear, spread, at_target,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BY_CLASS: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr, GRAD_ENTROPY: tl.constexpr,
):  # fmt: skip
    """``exp(d) * (constant + linear * d) - spread * w`` for d = z - largest in the logits' place; `at_target` there."""
    for start in range(0, V, BLOCK):
        index = start + lanes
        z, slope = load_values(row, bias_ptr, index, V, scale, softcap, ACC, BIAS, SCALED, CAPPED)
        d = z - largest
        factor = constant
        if GRAD_ENTROPY:
            factor += linear * tl.where(d < -1000, -1000.0, d)
        g = tl.exp(d) * factor
        if MIXED:
            g -= spread * load_weights(weight_ptr, probabilities, index, V, keep, even, WEIGHTED, BY_CLASS, ACC)
        g = tl.where(index == target, at_target, g * slope)
        g = tl.where(valid, g, 0.0)
        tl.store(row + index, g.to(row.dtype.element_ty), mask=index < V)


@triton.jit(
    do_not_specialize=[
        "ignore_index", "smoothing_bits", "softcap_bits", "scale_bits", "z_loss_bits", "target_stride",
        "probabilities_stride", "grad_loss_stride", "grad_lse_stride", "grad_entropy_stride",
    ]
)  # fmt: skip
def cross_entropy_rows(
    logits_ptr, stride, target_ptr, target_stride, probabilities_ptr, probabilities_stride, bias_ptr, weight_ptr,
    grad_loss_ptr, grad_loss_stride, grad_lse_ptr, grad_lse_stride, grad_entropy_ptr, grad_entropy_stride,
    loss_ptr, lse_ptr, predictions_ptr, entropy_ptr, V,
    ignore_index: tl.int64, smoothing_bits: tl.int64, softcap_bits: tl.int64, scale_bits: tl.int64,
    z_loss_bits: tl.int64,
    BLOCK: tl.constexpr, ACC: tl.constexpr, BY_CLASS: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, Z_LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    GRAD_LOSS: tl.constexpr, GRAD_LSE: tl.constexpr, GRAD_ENTROPY: tl.constexpr, PREDICTIONS: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    MIXED: tl.constexpr = SMOOTHED or BY_CLASS
    ENTROPIC: tl.constexpr = ENTROPY or GRAD_ENTROPY
    index_of_row = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index_of_row * stride
    smoothing, z_loss = from_bits(smoothing_bits), from_bits(z_loss_bits)
    scale, softcap = from_bits(scale_bits).to(ACC), from_bits(softcap_bits).to(ACC)
    keep, even = (1 - smoothing).to(ACC), (smoothing / V).to(ACC)
    lanes = tl.arange(0, BLOCK)
    probabilities = probabilities_ptr
    if BY_CLASS:
        probabilities += index_of_row * probabilities_stride
    target, valid = row_target(target_ptr + index_of_row * target_stride, ignore_index, V, BY_CLASS)

    # Read before the sums, whose reductions keep all threads' stores behind it. A row without a valid target takes
    # column 0 for one; nothing of it is kept.
    at = tl.maximum(target, 0)
    z_target, target_slope = target_value(row, bias_ptr, at, V, scale, softcap, ACC, BY_CLASS, BIAS, SCALED, CAPPED)
    largest, total, weighted, distance, mass, best_at, nan_at = sum_row(
        row, bias_ptr, weight_ptr, probabilities, lanes, target, V, scale, softcap, keep, even,
        BLOCK, ACC, BY_CLASS, BIAS, WEIGHTED, CAPPED, SCALED, MIXED, ENTROPIC, PREDICTIONS,
    )  # fmt: skip
    if PREDICTIONS:
        tl.store(predictions_ptr + index_of_row, tl.where(nan_at < V, nan_at, best_at).to(tl.int64))

    # What there is one of in a row is float64 from here on.
    gap = tl.full((), 0.0, tl.float64)
    own = gap
    hit = gap
    own_weight = gap
    others_total = total
    is_largest = target < -1
    if not BY_CLASS:
        is_largest = z_target >= largest
        largest, others_total, weighted, distance, mass, gap, own, own_weight, hit = join_target(
            z_target, weight_ptr, at, smoothing, largest, total, weighted, distance, mass, WEIGHTED, MIXED, ENTROPIC
        )
    share = tl.full((), 1.0, tl.float64)
    if not BY_CLASS:
        share = smoothing / V
    total = others_total + own
    log_total = tl.where(is_largest, log_one_plus(others_total), tl.log(total))
    nll = gap + log_total
    lse = largest.to(tl.float64) + log_total
    loss = hit * nll
    if BY_CLASS:
        loss = tl.full((), 0.0, tl.float64)
    if MIXED:
        loss += share * (distance + mass * log_total)
    if Z_LOSS:
        loss += z_loss * lse * lse
    # An empty sum where own is 0: 0 times an infinite gap is no contribution.
    entropy = log_total - (weighted - tl.where(own > 0, own * gap, 0.0)) / total
    tl.store(loss_ptr + index_of_row, tl.where(valid, loss, 0.0).to(ACC))
    tl.store(lse_ptr + index_of_row, tl.where(valid, lse, 0.0).to(ACC))
    if ENTROPY:
        tl.store(entropy_ptr + index_of_row, tl.where(valid, entropy, 0.0).to(ACC))

    if GRADIENT:
        grad_loss = tl.full((), 1.0, tl.float64)
        if GRAD_LOSS:
            grad_loss = tl.load(grad_loss_ptr + index_of_row * grad_loss_stride).to(tl.float64)
        grad_lse = tl.full((), 0.0, tl.float64)
        if GRAD_LSE:
            grad_lse += tl.load(grad_lse_ptr + index_of_row * grad_lse_stride).to(tl.float64)
        if MIXED:
            grad_lse += grad_loss * share * mass
        if Z_LOSS:
            grad_lse += grad_loss * 2 * z_loss * lse
        grad_nll = grad_loss * hit
        constant = grad_lse + grad_nll
        at_target = -grad_nll * (others_total / total)
        own_factor = grad_lse
        linear = constant
        if GRAD_ENTROPY:
            grad_entropy = tl.load(grad_entropy_ptr + index_of_row * grad_entropy_stride).to(tl.float64)
            constant += grad_entropy * (log_total - entropy)
            own_factor += grad_entropy * (tl.where(nll > 1000, 1000.0, nll) - entropy)
            linear = (-grad_entropy / total).to(ACC)
        at_target += own / total * own_factor
        if MIXED:
            at_target -= grad_loss * share * own_weight
        at_target = (at_target * target_slope.to(tl.float64)).to(ACC)
        constant = (constant / total).to(ACC)
        spread = (grad_loss * share).to(ACC)
        write_gradient(
            row, bias_ptr, weight_ptr, probabilities, lanes, target, valid, V, scale, softcap, keep, even,
            largest, constant, linear, spread, at_target,
            BLOCK, ACC, BY_CLASS, BIAS, WEIGHTED, CAPPED, SCALED, MIXED, GRAD_ENTROPY,
        )  # fmt: skip


def cross_entropy_rows_(call: RowsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, predictions, entropy) of the rows of `logits` (n, V); with `gradient` they become their gradient.

    The meaning of ``dcs::_cross_entropy_rows_``, whose arguments are validated already; `linear_bias`, `weight` and the
    rows of `target` are contiguous. A class index out of range is an IndexError on the CPU (the interpreter), before
    anything is written, and a device-side assertion on CUDA.
    """
    logits, target, linear_bias, weight, grad_loss, grad_lse, grad_entropy = call[:7]
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = call[7:12]
    rows, classes = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss, lse = logits.new_empty(rows, dtype=wide), logits.new_empty(rows, dtype=wide)
    argmax = logits.new_empty(rows if call.predictions else 0, dtype=torch.int64)
    entropies = logits.new_empty(rows if call.entropy else 0, dtype=wide)
    if rows == 0:
        return loss, lse, argmax, entropies
    by_class = target.is_floating_point()
    if not by_class:
        _assert_in_range(target, ignore_index, classes)
    block = min(triton.next_power_of_2(classes), LARGEST_BLOCK if wide == torch.float32 else LARGEST_BLOCK // 4)
    smoothed = label_smoothing != 0

    def pointer(tensor: Tensor | None) -> Tensor:
        # Where a flag says that there is none, any tensor of the type stands for it.
        return loss if tensor is None else tensor

    def stride(tensor: Tensor | None) -> int:
        return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)

    with on_device(logits):
        cross_entropy_rows[(rows,)](
            logits, logits.stride(0),
            argmax if by_class else target, 0 if by_class else target.stride(0),
            target if by_class else loss, target.stride(0) if by_class else 0,
            pointer(linear_bias), pointer(weight),
            pointer(grad_loss), stride(grad_loss), pointer(grad_lse), stride(grad_lse),
            pointer(grad_entropy), stride(grad_entropy),
            loss, lse, argmax, entropies, classes,
            ignore_index, float_bits(label_smoothing), float_bits(softcap if softcap > 0 else 1.0),
            float_bits(logit_scale), float_bits(z_loss),
            BLOCK=block, ACC=tl.float64 if wide == torch.float64 else tl.float32, BY_CLASS=by_class,
            BIAS=linear_bias is not None, WEIGHTED=weight is not None, SMOOTHED=smoothed, CAPPED=softcap > 0,
            SCALED=logit_scale != 1.0, Z_LOSS=z_loss != 0, GRADIENT=call.gradient, GRAD_LOSS=grad_loss is not None,
            GRAD_LSE=grad_lse is not None, GRAD_ENTROPY=grad_entropy is not None, PREDICTIONS=call.predictions,
            ENTROPY=call.entropy, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return loss, lse, argmax, entropies


def _assert_in_range(target: Tensor, ignore_index: int, classes: int) -> None:
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.is_cuda:
        torch._assert_async(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(
            f"linear_cross_entropy: target must be in [0, {classes - 1}] or ignore_index ({ignore_index}), "
            f"got {int(target[wrong][0])}"
        )
