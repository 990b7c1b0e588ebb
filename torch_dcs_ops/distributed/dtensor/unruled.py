"""Ops that have no rule: a sentence in place of DTensor's."""

from __future__ import annotations

from typing import Any, NoReturn

from ...ops._common.validate import fail
from .rules import rule


@rule(
    *("sample_bmm", "_sample_bmm", "_linear_cross_entropy_logits", "_cross_entropy_rows_", "_scale"),
    *("_linear_log_probs_logits", "_linear_log_probs_of_logits"),
    *("_vocab_parallel_forward", "_vocab_parallel_backward", "_vocab_parallel_kl_div"),
)
def refused(name: str, op: Any, bound: dict[str, Any]) -> NoReturn:
    fail(name, "operands must be plain tensors, got DTensors, for which this op has no rule")
