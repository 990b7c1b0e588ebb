"""`fused_loss` under transformers.Trainer, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers.integrations import is_deepspeed_zero3_enabled

from .patch import FusedLoss, fused_loss


class FusedLossCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[FusedLossCallback()])`: `fused_loss(model)` before Trainer wraps the model.

    Args:
        backend: of torch.compile, which then compiles the model in place; None does not. Trainer's own
            `torch_compile_backend` takes only the backends that Accelerate lists, and "dcs" is not among them.
        options: keywords of `fused_loss`.

    Attributes:
        fused: the handle of `fused_loss`, once a Trainer was made with this callback.

    Raises (when the Trainer is made):
        RuntimeError: `fused_loss` refuses the model; Trainer would smooth the labels itself, run DataParallel or
            partition parameters by DeepSpeed's ZeRO stage 3.
    """

    def __init__(self, *, backend: str | Callable[..., Any] | None = None, **options: Any) -> None:
        self.fused: FusedLoss | None = None
        self._backend = backend
        self._options = options

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        refused = _why_not(args)
        if refused:
            raise RuntimeError(f"FusedLossCallback: {refused}")
        self.fused = fused_loss(model, **self._options)
        if self._backend is not None:
            model.compile(backend=self._backend)


def _why_not(args: Any) -> str | None:
    if args.label_smoothing_factor:
        return (
            f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}: Trainer smooths the labels of full "
            f"logits; FusedLossCallback(label_smoothing={args.label_smoothing_factor}) is the same loss without them"
        )
    if args.n_gpu > 1:
        return (
            f"Trainer would run torch.nn.DataParallel on {args.n_gpu} GPUs, whose replicas run the forward of the "
            "model they were made from: start it with torchrun"
        )
    if is_deepspeed_zero3_enabled():
        return (
            "DeepSpeed's ZeRO stage 3 gathers lm_head.weight only where lm_head is called: use stage 2, or FSDP2 "
            "(fsdp_version 2)"
        )
    return None
