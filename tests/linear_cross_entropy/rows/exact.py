"""`dcs::_cross_entropy_rows_` with more digits than float64 has, and a budget for what float64 kernels round off.

torch's float64 is no oracle for float64: with label smoothing its log_softmax adds V equal terms for the sum of the
gradient; each addition is rounded the same way; V = 2500 makes up to 32 eps of it with AVX2's sums, 17 with AVX-512's.

The budget: kernels follow the formulas below, operation by operation; the error of each is carried on to the results.
An operation adds a relative error of at most u = eps / 2; exp, log and tanh, within one unit in the last place, of at
most 2 u. Errors of different operations are as good as independent (Higham and Mary, SIAM J. Sci. Comput. 41, 2019):
their variances add up, each at most u**2 / 3. A result may be off by six standard deviations (one value in 10**9 would
be further off, of some 10**6), and the norm of all of a kind by four (one in 10**4, of some 10**2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linear_cross_entropy.rows.oracle import Results

Wide = np.longdouble
U = torch.finfo(torch.float64).eps / 2
DEVIATIONS, DEVIATIONS_OF_NORM = 6, 4
# How many sums run beside one another at least: SSE2's registers hold two float64, and four of them add up the powers.
RUNNING_SUMS, RUNNING_POWERS = 2, 8


class Number:
    """Exact values, and the standard deviations of what a float64 kernel makes of them, in units of u."""

    def __init__(self, value: Any, deviation: Any = 0.0, ulps: float = 0.0) -> None:
        self.value = np.asarray(value, dtype=Wide)
        self.deviation = np.hypot(deviation, ulps / 3**0.5 * np.abs(self.value)).astype(np.float64)

    def __add__(self, other: Number) -> Number:
        return Number(self.value + other.value, np.hypot(self.deviation, other.deviation), ulps=1)

    def __neg__(self) -> Number:
        return Number(-self.value, self.deviation)

    def __sub__(self, other: Number) -> Number:
        return self + -other

    def __mul__(self, other: Number) -> Number:
        deviation = np.hypot(self.deviation * other.value, other.deviation * self.value)
        return Number(self.value * other.value, deviation, ulps=1)

    def __truediv__(self, other: Number) -> Number:
        ratio = self.value / other.value
        return Number(ratio, np.hypot(self.deviation, other.deviation * ratio) / np.abs(other.value), ulps=1)

    def exp(self) -> Number:
        power = np.exp(self.value)
        return Number(power, self.deviation * power, ulps=2)

    def log(self) -> Number:
        return Number(np.log(self.value), self.deviation / np.abs(self.value), ulps=2)

    def tanh(self) -> Number:
        tanh = np.tanh(self.value)
        return Number(tanh, self.deviation * (1 - tanh * tanh), ulps=2)

    def max(self) -> Number:
        """Of each row, as a column."""
        at = self.value.argmax(1)[:, None]
        return Number(np.take_along_axis(self.value, at, 1), np.take_along_axis(self.deviation, at, 1))

    def sum(self, running_sums: int = RUNNING_SUMS) -> Number:
        """Of each row, as a column. A running sum is rounded, relative to what it is by then, unless a 0 is added."""
        rows, columns = self.value.shape
        terms = np.pad(self.value, ((0, 0), (0, -columns % running_sums))).reshape(rows, -1, running_sums)
        roundings = np.where(terms != 0, terms.cumsum(1), 0).reshape(rows, -1)
        variance = (self.deviation**2).sum(1, keepdims=True) + (roundings**2).sum(1, keepdims=True) / 3
        return Number(self.value.sum(1, keepdims=True), np.sqrt(variance))

    def where(self, condition: Any) -> Number:
        return Number(np.where(condition, self.value, 0), np.where(condition, self.deviation, 0))


def _wide(tensor: Tensor) -> Any:
    return tensor.cpu().numpy().astype(Wide)


def exact_rows(logits: Tensor, target: Tensor, options: dict[str, Any]) -> dict[str, Number]:
    """loss, lse, entropy and gradient, as `oracle` has them."""
    if np.finfo(Wide).eps > U / 1000:
        pytest.skip("numpy.longdouble has no more digits here than float64")
    rows, columns = logits.shape

    def grad(name: str) -> Number:
        return Number(np.broadcast_to(_wide(options[name]).reshape(-1, 1), (rows, 1)))

    z, slope = Number(_wide(logits)), Number(np.ones((1, 1)))
    if "linear_bias" in options:
        z = z + Number(_wide(options["linear_bias"]))
    if "logit_scale" in options:
        scale = Number(options["logit_scale"])
        z, slope = z * scale, slope * scale
    if options.get("softcap"):
        softcap = Number(options["softcap"])
        tanh = (z / softcap).tanh()
        z, slope = tanh * softcap, slope * (Number(1) - tanh * tanh)

    if target.is_floating_point():
        valid, q = np.ones((rows, 1), dtype=bool), Number(_wide(target))
    else:
        valid = (target != options.get("ignore_index", -100)).cpu().numpy()[:, None]
        hot = np.arange(columns) == target.cpu().numpy()[:, None]
        q = Number(hot)
    if "label_smoothing" in options:
        smoothing = Wide(options["label_smoothing"])
        q = q * Number(1 - smoothing) + Number(smoothing / columns)
    if "weight" in options:
        q = q * Number(_wide(options["weight"]))

    largest = z.max()
    distance = z - largest
    power = distance.exp()
    total = power.sum(RUNNING_POWERS)
    log_total = total.log()
    p, log_p, lse = power / total, distance - log_total, largest + log_total
    loss = -(q * log_p).sum()
    entropy = log_total - (power * distance).sum(RUNNING_POWERS) / total
    share = q.sum()
    if "z_loss" in options:
        z_loss = Number(options["z_loss"])
        loss = loss + lse * lse * z_loss
        share = share + lse * z_loss * Number(2)
    gradient = p * share - q
    if "grad_loss" in options:
        gradient = gradient * grad("grad_loss")
    if "grad_lse" in options:
        gradient = gradient + p * grad("grad_lse")
    if "grad_entropy" in options:
        gradient = gradient - p * (log_p + entropy) * grad("grad_entropy")
    gradient = gradient * slope
    results = {"loss": loss, "lse": lse, "entropy": entropy, "gradient": gradient}
    return {name: number.where(valid) for name, number in results.items()}


def check_in_float64(
    results: Results, written: Tensor, logits: Tensor, target: Tensor, options: dict[str, Any]
) -> None:
    """Every element, and every kind's norm, within its budget."""
    for name, number in exact_rows(logits, target, options).items():
        value = written if name == "gradient" else getattr(results, name)
        assert value.dtype == torch.float64
        errors = np.abs(_wide(value).reshape(number.value.shape) - number.value) / U
        excess = errors - DEVIATIONS * number.deviation
        assert (excess <= 0).all(), f"{name}: {errors.flat[excess.argmax()]} u is {excess.max()} u too much"
        norm, budget = np.linalg.norm(errors), DEVIATIONS_OF_NORM * np.linalg.norm(number.deviation)
        assert norm <= budget, f"{name}: {norm} u > {budget} u"
