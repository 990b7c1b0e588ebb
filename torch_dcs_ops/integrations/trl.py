"""The log-probabilities of TRL's trainers by `linear_log_probs`.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers (AsyncGRPO and what derives from these too) put a forward on their model
that takes log-probabilities and entropy from `trl.trainer.utils._ChunkedLogProbFunction`, and read no logits.
`enable()` puts `linear_log_probs` in its place, for all models of the process, before or after a trainer is made.

Needs trl >= 1.15; developed with 1.16.
"""

from __future__ import annotations

import inspect
import warnings
from types import TracebackType
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer import utils

from ..ops.linear_cross_entropy.log_probs import linear_log_probs
from ._common import product_dtype

__all__ = ["Enabled", "disable", "enable"]

_NAME = "_ChunkedLogProbFunction"
_PATCH = f"trl.trainer.utils.{_NAME}"
_PARAMETERS = (
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _LogProbs:
    """Called as TRL's autograd function is; `own` is that function."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.used = False

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """(log_probs, *_OUTPUTS) of hidden (N, D), weight (V, D) and targets (N,); None what is not asked for."""
        if hasattr(weight, "ds_status"):
            raise RuntimeError(
                "trl.enable: lm_head must be whole in the backward pass, got a parameter that DeepSpeed ZeRO-3 "
                "partitions; disable() before training"
            )
        self.used = True
        dtype = product_dtype(hidden)
        x, w = hidden.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        # TRL divides by the temperature behind the softcap: c·tanh(s·y/c)/T is the softcap c/T of y·s/T.
        scale = logit_scale / temperature
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
        wants_entropy, wants_top = "entropy" in outputs, "is_top1" in outputs
        results: Any = linear_log_probs(
            x, w, targets, linear_bias=b, logit_scale=scale, softcap=softcap, need_entropy=wants_entropy,
            return_predictions=wants_top,
        )  # fmt: skip
        names = ["log_probs", *["entropy"] * wants_entropy, *["is_top1"] * wants_top]
        found: dict[str, Tensor] = dict(zip(names, results if len(names) > 1 else (results,), strict=True))
        found = {name: value == targets if name == "is_top1" else value.float() for name, value in found.items()}
        if "mean_logits" in outputs and softcap is None:
            found["mean_logits"] = _mean_logits(x, w, b, scale)
        rest = tuple(name for name in _OUTPUTS if name in outputs and name not in found)
        if rest:  # statistics without a gradient: one more product of TRL's own
            with torch.no_grad():
                _, *own = self.own.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, rest
                )
            found.update((name, value) for name, value in zip(_OUTPUTS, own, strict=True) if name in rest)
        return found["log_probs"], *map(found.get, _OUTPUTS)


@torch.no_grad()
def _mean_logits(input: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The mean of every row's logits is the product with the mean of the weight's rows."""
    with torch.autocast(input.device.type, enabled=False):
        mean = input.float() @ weight.mean(0, dtype=torch.float32)
    return scale * (mean if bias is None else mean + bias.float().mean())


_active: _LogProbs | None = None


class Enabled:
    """What `enable()` returns; the end of a `with` block gives TRL what it had when the block was entered."""

    def __init__(self, was_enabled: bool) -> None:
        self._was_enabled = was_enabled

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._was_enabled:
            disable()


def enable() -> Enabled:
    """From here on TRL's trainers take log-probabilities, entropy and token accuracy from `linear_log_probs`.

    The values and gradients are TRL's, within the rounding of the products; logits are held for some rows at a time,
    and `trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE` has no meaning. A second call does nothing. No effect on what
    does not use TRL's function: docs/trl.md has the trainers. `disable()` warns where nothing was computed this way.

    Returns:
        A handle for a `with` statement, at whose end `disable()` is called.

    Raises:
        RuntimeError: the function is missing from this release of TRL, or takes other arguments. A model that
            DeepSpeed ZeRO-3 partitions raises it when it is called.

    Example::

        >>> with enable():
        ...     trainer.train()
    """
    global _active
    if _active is not None:
        return Enabled(True)
    function = getattr(utils, _NAME, None)
    refused = _why_not(function)
    if refused:
        raise RuntimeError(
            f"trl.enable: {_PATCH} must take ({', '.join(_PARAMETERS)}), as in trl 1.15 and 1.16, got {refused} in trl "
            f"{trl.__version__}"
        )
    _active = _LogProbs(function)
    setattr(utils, _NAME, _active)
    return Enabled(False)


def disable() -> None:
    """Gives TRL its own function back; a call without an `enable()` before it does nothing.

    Warns:
        UserWarning: no log-probabilities were computed through it.

    Raises:
        RuntimeError: something else has replaced the function since `enable()`.
    """
    global _active
    if _active is None:
        return
    ended, found = _active, getattr(utils, _NAME, None)
    if found is not ended:
        raise RuntimeError(f"trl.disable: {_PATCH} must be what enable() put there, got {found!r}")
    _active = None
    setattr(utils, _NAME, ended.own)
    if not ended.used:
        warnings.warn(
            "trl.disable: no log-probabilities were computed since enable(), which had no effect on what ran; trainers "
            "that make logits themselves do not use it (docs/trl.md)",
            stacklevel=2,
        )


def _why_not(function: Any) -> str | None:
    if function is None:
        return "none (of trl 1.15, triton is not installed)" if trl.__version__.startswith("1.15") else "none"
    parameters = tuple(inspect.signature(getattr(function, "forward", function)).parameters)[1:]
    if parameters != _PARAMETERS:
        return f"({', '.join(parameters)})"
    known = getattr(inspect.getmodule(function), "OPTIONAL_OUTPUTS", None)
    return None if known == _OUTPUTS else f"the outputs {known} instead of {_OUTPUTS}"
