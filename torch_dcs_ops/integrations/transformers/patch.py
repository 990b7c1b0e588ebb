"""`fused_loss`: another forward on one model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from .expressions import Helpers, Refused
from .head import linear_of, why_not
from .logits import Logits, Seen, Settings, causal_loss, criterion, cross_entropy, masked_loss
from .rewrite import rewritten

_LOSSES: dict[Any, Callable[..., Any]] = {ForCausalLMLoss: causal_loss, ForMaskedLMLoss: masked_loss}
_CURE = 'torch.compile(lambda **batch: model(**batch).loss, backend="dcs") may fuse it without fused_loss'
_LOGITS = ("eval", "train", "never")


class FusedLoss:
    """What `fused_loss` did to `model`; `restore()`, or the end of a `with` block, undoes it."""

    def __init__(self, model: nn.Module, switch: dict[str, bool], seen: Seen | None = None) -> None:
        self.model = model
        self._switch = switch
        self._seen = seen

    @property
    def predictions(self) -> torch.Tensor | None:
        """The most likely token after each position, of the last loss: int64, of its labels' shape, shifted as those.

        None before the first loss, and without `predictions=True`.
        """
        return None if self._seen is None else self._seen.predictions

    @property
    def token_accuracy(self) -> torch.Tensor | None:
        """The share of the last loss's labels that are its predictions, 0-dimensional; nan where none counts."""
        if self._seen is None or self._seen.is_right is None or self._seen.counts is None:
            return None
        return self._seen.is_right.sum() / self._seen.counts.sum()

    def restore(self) -> None:
        """Gives the model its own forward back; a second call does nothing.

        Deep copies made meanwhile compute their own loss again as well. So does a model whose forward was wrapped once
        more after `fused_loss` (Accelerate's mixed precision does): the wrapper is left in place.
        """
        self._switch["on"] = False
        if _switch_of(self.model.__dict__.get("forward")) is self._switch:
            del self.model.forward

    def __enter__(self) -> FusedLoss:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def fused_loss(
    model: nn.Module,
    *,
    logits: str = "eval",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_filter_eps: float | None = None,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    predictions: bool = False,
) -> FusedLoss:
    """From here on `model(input_ids, labels=labels).loss` is computed without the logits, eager or compiled.

    The loss is the model's own, whatever its forward adds to the cross entropy (a router's loss) included: labels are
    shifted, or `shift_labels` taken as they are, as the forward does it; `ignore_index` (-100) and
    `num_items_in_batch` mean what transformers' loss functions make of them; a scale, a softcap and biases of the
    logits are read at every call. (Of a float64 model the loss is float64, where transformers rounds the logits to
    float32.) What comes back is the model's output class with `logits=None`; with `return_dict=False` a tuple in which
    the logits are missing. A call without labels, and so generate(), runs the model's own forward.

    The forward is an attribute of this model: its class, parameters and state dict stay as they are. A model that
    torch.compile has compiled already recompiles, and does again after `restore()`.

    Args:
        model: a language model of transformers, or what torch.compile, PEFT or DistributedDataParallel made of it.
        logits: when a call with labels forms them as well: "eval" while `model.training` is False, as what computes
            metrics of predictions needs them; "train" in training too, which saves no memory; or "never".
        label_smoothing, z_loss, grad_filter_eps, memory_budget, accumulate_dtype: as in
            :func:`torch_dcs_ops.linear_cross_entropy`. The defaults give the model's own loss and exact gradients.
            `label_smoothing` is the loss that Trainer's `label_smoothing_factor` makes of logits.
        predictions: whether the handle has `predictions` and `token_accuracy` of the last loss, found chunk by chunk
            without the logits. Of a model with several losses they are of the one that it computes last.

    Returns:
        A handle with `restore()`, which can also be used in a `with` statement.

    Raises:
        ValueError: logits is none of "eval", "train" and "never".
        RuntimeError: the model's forward does with its logits what is not known, its loss_function is not one of
            transformers' causal and masked ones, its head does more than multiply (quantization, hooks), or it has a
            fused loss already. The model is left as it was. Changed so afterwards, it raises when it is called with
            labels.

    Example::

        >>> with fused_loss(model):
        ...     model(input_ids, labels=input_ids).loss.backward()
    """
    if logits not in _LOGITS:
        raise ValueError(f'fused_loss: logits must be "eval", "train" or "never", got {logits!r}')
    options = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "grad_filter_eps": grad_filter_eps,
        "memory_budget": memory_budget,
        "accumulate_dtype": accumulate_dtype,
    }
    model = _unwrapped(model)
    _check_model(model)
    seen = Seen() if predictions else None
    settings = Settings(options, logits, seen)
    fused = _fused_forward(model, settings)

    original: Callable[..., Any] = type(model).forward
    signature = inspect.signature(original)
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    switch = {"on": True}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if not switch["on"] or given.get("labels") is None:
            return original(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    # Trainer and generate() ask for the signature. Not __wrapped__: Accelerate unwraps a forward along it.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    forward._fused_loss = switch  # type: ignore[attr-defined]
    # A bound method: copy.deepcopy binds it to the copy, and Accelerate's wrapper takes its __func__.
    model.forward = MethodType(forward, model)
    return FusedLoss(model, switch, seen)


def _unwrapped(model: Any) -> Any:
    """The model that torch.compile, DistributedDataParallel and PEFT have wrapped."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _check_model(model: Any) -> None:
    kind = type(model)
    if not isinstance(model, PreTrainedModel):
        raise _refused(f"{kind.__name__} is not a transformers.PreTrainedModel: give it the model that this wraps")
    replaced = model.__dict__.get("forward")
    switch = _switch_of(replaced)
    if switch is not None and switch["on"]:
        raise _refused("the model has a fused loss already, restore() that first")
    # A pickled model comes back with the class's forward, bound, as its attribute.
    if replaced is not None and switch is None and getattr(replaced, "__func__", None) is not kind.forward:
        raise _refused("the model's forward was replaced, as Accelerate does it: fused_loss has to come before that")
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise _refused(f"{kind.__name__}.forward takes no labels")
    if getattr(model, "model_parallel", False):
        raise _refused("the model was spread over devices by parallelize()")


def _fused_forward(model: Any, settings: Settings) -> Callable[..., Any]:
    """The forward of model's class with its logits deferred.

    Raises:
        RuntimeError: it is refused.
    """
    head = model.get_output_embeddings()
    losses: list[Callable[..., Any]] = []
    own_loss, loss_type = getattr(model, "_loss_function", None), getattr(model, "loss_type", None)

    def defer(head: nn.Module, hidden: torch.Tensor) -> Logits:
        return Logits(settings, head, hidden)

    def loss_function(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(self, "_loss_function", None) is not own_loss:
            raise RuntimeError("fused_loss: the model's loss_function was replaced, and would not be called")
        if getattr(self, "loss_type", None) != loss_type:
            raise RuntimeError(f"fused_loss: the model's loss_type was {loss_type!r} and is {self.loss_type!r} now")
        result: torch.Tensor = losses[0](*args, **kwargs)
        return result

    helpers = Helpers(defer, loss_function, criterion, cross_entropy)
    try:
        function, found = rewritten(model, head, helpers)
    except Refused as refused:
        try:
            function, found = rewritten(model, None, helpers)
        except Refused:
            raise _refused(f"{refused}; {_CURE}") from refused
    for module in found.heads:
        _check_head(model, module)
    if found.calls_loss_function:
        wanted = model.loss_function
        if wanted not in _LOSSES:
            raise _refused(
                f"the model's loss_function is {_name_of(wanted)}, not transformers' ForCausalLMLoss or ForMaskedLMLoss"
            )
        losses.append(_LOSSES[wanted])
    return function


def _check_head(model: nn.Module, head: Any) -> None:
    refused = why_not(head)
    if refused:
        raise _refused(refused)
    weight = linear_of(head).weight
    # fully_shard's is a plain tensor within forward.
    sharded = any(hasattr(module, "_get_fsdp_state") for module in (model, head))
    if not weight.is_floating_point() or (is_traceable_wrapper_subclass(weight) and not sharded):
        kind = type(weight.data).__name__
        raise _refused(f"lm_head.weight is a {kind} of {weight.dtype}, not a plain floating-point tensor")


def _refused(why: str) -> RuntimeError:
    return RuntimeError(f"fused_loss: {why}; the model is left as it was")


def _switch_of(forward: Any) -> dict[str, bool] | None:
    """That of a forward which fused_loss has put on a model."""
    return getattr(getattr(forward, "__func__", None), "_fused_loss", None)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
