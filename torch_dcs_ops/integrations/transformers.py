"""The loss of Hugging Face transformers' causal language models by `linear_cross_entropy`, without their logits.

Such a model's forward is decoder -> lm_head -> (a scale or a softcap) -> cross entropy, and returns the logits beside
the loss, which is why no compiler may drop them. `fused_loss` puts another forward on one model, not on its class: with
labels the op takes the decoder's hidden states and lm_head's weight, and `logits` is None; without labels the model's
own forward runs.

Needs transformers >= 4.56; developed with 5.23.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

from ..ops.linear_cross_entropy.loss import linear_cross_entropy

__all__ = ["SUPPORTED", "FusedLoss", "fused_loss"]


class _Architecture(NamedTuple):
    """How a forward gets from lm_head to the logits, by the names of what it reads there."""

    decoder: str = "model"  # of the model
    softcap: str | None = None  # of the config, may be None
    logit_scale: str | None = None  # of the model
    logit_divisor: str | None = None  # of the config
    output: Any = CausalLMOutputWithPast
    fields: tuple[str, ...] = ("past_key_values", "hidden_states", "attentions")  # of output, beside loss and logits

    def reads(self) -> set[str]:
        configured = {f"config.{name}" for name in (self.softcap, self.logit_divisor) if name}
        return {self.decoder, *configured, *filter(None, [self.logit_scale])}


_PLAIN = _Architecture()
_SOFTCAP = _Architecture(softcap="final_logit_softcapping")
_SCALE = _Architecture(logit_scale="logit_scale")

# Each one is tested. Whatever release is installed, _refuse_unknown_forward holds its forward against the line here.
_ARCHITECTURES = {
    "ArceeForCausalLM": _PLAIN,
    "Cohere2ForCausalLM": _SCALE,
    "CohereForCausalLM": _SCALE,
    "GPT2LMHeadModel": _Architecture(
        "transformer",
        output=CausalLMOutputWithCrossAttentions,
        fields=(*_PLAIN.fields, "cross_attentions"),
    ),
    "Gemma2ForCausalLM": _SOFTCAP,
    "Gemma3ForCausalLM": _SOFTCAP,
    "GemmaForCausalLM": _PLAIN,
    "Glm4ForCausalLM": _PLAIN,
    "GlmForCausalLM": _PLAIN,
    "GraniteForCausalLM": _Architecture(logit_divisor="logits_scaling"),
    "LlamaForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "Olmo2ForCausalLM": _PLAIN,
    "OlmoForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "PhiForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen3ForCausalLM": _PLAIN,
    "SmolLM3ForCausalLM": _PLAIN,
    "StableLmForCausalLM": _PLAIN,
    "Starcoder2ForCausalLM": _PLAIN,
}
SUPPORTED = tuple(_ARCHITECTURES)

# What any of these forwards reads of its model and that does not enter the loss.
_NEUTRAL = {
    "config",
    "config._attn_implementation",
    "config.output_attentions",
    "config.output_hidden_states",
    "config.return_dict",
    "config.use_return_dict",
    "config.vocab_size",
    "lm_head",
    "loss_function",
    "model_parallel",  # refused where it is set
    "training",
    "vocab_size",
}


class FusedLoss:
    """What `fused_loss` did to `model`; `restore()`, or the end of a `with` block, undoes it."""

    def __init__(self, model: nn.Module, switch: dict[str, bool]) -> None:
        self.model = model
        self._switch = switch

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
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_filter_eps: float | None = None,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
) -> FusedLoss:
    """From here on `model(input_ids, labels=labels).loss` is computed without the logits, eager or compiled.

    The loss is the model's own: labels are shifted by one, or `shift_labels` are taken as they are; `ignore_index`
    (-100) and `num_items_in_batch` mean what transformers.loss.loss_utils.ForCausalLMLoss makes of them; the model's
    logit scale, softcap and lm_head's bias are read at every call. (Of a float64 model the loss is float64, where
    transformers rounds the logits to float32.) What comes back is the model's output class with `logits=None`; with
    `return_dict=False` a tuple in which the logits are missing. A call without labels, and so generate(), runs the
    model's own forward.

    The forward is an attribute of this model: its class, parameters and state dict stay as they are. A model that
    torch.compile has compiled already recompiles, and does again after `restore()`.

    Args:
        model: one of `SUPPORTED`, or what torch.compile made of it.
        label_smoothing, z_loss, grad_filter_eps, memory_budget, accumulate_dtype: as in
            :func:`torch_dcs_ops.linear_cross_entropy`. The defaults give the model's own loss and exact gradients.
            `label_smoothing` is the loss that Trainer's `label_smoothing_factor` makes of logits.

    Returns:
        A handle with `restore()`, which can also be used in a `with` statement.

    Raises:
        RuntimeError: the model is of another class, has a forward, a loss_function or an lm_head that is not the
            class's own (LoRA or quantization on lm_head, hooks), or has a fused loss already. The model is left as it
            was. Changed so afterwards, it raises when it is called with labels.

    Example::

        >>> with fused_loss(model):
        ...     model(input_ids, labels=input_ids).loss.backward()
    """
    model = getattr(model, "_orig_mod", model)
    architecture = _architecture(model)
    refused = _why_not_the_head(model) or _why_not_the_loss(model)
    if refused:
        raise _refused(refused)

    options = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "grad_filter_eps": grad_filter_eps,
        "memory_budget": memory_budget,
        "accumulate_dtype": accumulate_dtype,
    }
    original: Callable[..., Any] = type(model).forward
    signature = inspect.signature(original)
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    decoder_takes = _keywords_of(getattr(model, architecture.decoder))
    switch = {"on": True}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        # A call that binds an argument twice, or too many of them, is an error that the model's own forward raises.
        unbound = len(given) != len(args) + len(kwargs)
        if not switch["on"] or unbound or given.get("labels") is None:
            return original(self, *args, **kwargs)
        return _forward_with_loss(self, architecture, decoder_takes, options, given)

    # Trainer and generate() ask for the signature. Not __wrapped__: Accelerate unwraps a forward along it.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    forward._fused_loss = switch  # type: ignore[attr-defined]
    # A bound method: copy.deepcopy binds it to the copy, and Accelerate's wrapper takes its __func__.
    model.forward = MethodType(forward, model)
    return FusedLoss(model, switch)


def _forward_with_loss(
    model: Any,
    architecture: _Architecture,
    decoder_takes: frozenset[str] | None,
    options: dict[str, Any],
    given: dict[str, Any],
) -> Any:
    refused = _why_not_the_head(model)
    if refused:
        raise RuntimeError(f"fused_loss: {refused}; restore() the model to run it so")
    config = model.config
    return_dict = given.pop("return_dict", None)
    if return_dict is None:
        return_dict = config.return_dict and not getattr(config, "torchscript", False)
    labels, kept = given.pop("labels"), given.pop("logits_to_keep", 0)
    shift_labels, ignore_index = given.pop("shift_labels", None), given.pop("ignore_index", -100)
    num_items = given.pop("num_items_in_batch", None)
    if decoder_takes is not None:  # the rest would have gone to the loss, which takes anything
        given = {name: value for name, value in given.items() if name in decoder_takes}

    outputs = getattr(model, architecture.decoder)(**given, return_dict=True)
    hidden = _slice(outputs.last_hidden_state, kept)
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        hidden.flatten(0, -2),
        model.lm_head.weight,
        shift_labels.to(hidden.device).flatten(),
        linear_bias=model.lm_head.bias,
        reduction="mean" if num_items is None else "sum",
        ignore_index=ignore_index,
        softcap=getattr(config, architecture.softcap) if architecture.softcap else None,
        logit_scale=_logit_scale(model, architecture),
        **options,
    )
    if num_items is not None:
        loss = loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)

    fields = {name: getattr(outputs, name, None) for name in architecture.fields}
    output = architecture.output(loss=loss, **fields)
    return output if return_dict else output.to_tuple()


def _logit_scale(model: Any, architecture: _Architecture) -> float:
    if architecture.logit_divisor:
        return 1.0 / float(getattr(model.config, architecture.logit_divisor))
    return float(getattr(model, architecture.logit_scale)) if architecture.logit_scale else 1.0


def _slice(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """`logits_to_keep` of hidden states (B, T, D): the last ones, positions, positions a sample, or a mask of them."""
    if isinstance(kept, int):
        return hidden[:, -kept:] if kept else hidden
    if kept.ndim == 2:
        return hidden[kept] if kept.dtype == torch.bool else torch.take_along_dim(hidden, kept[..., None], dim=1)
    return hidden[:, kept]


def _architecture(model: nn.Module) -> _Architecture:
    """The line of the table that describes model's forward, or a sentence why there is none."""
    cls: Any = type(model)
    base: Any
    for base in cls.__mro__:
        if base.__name__ in _ARCHITECTURES and base.__module__.startswith("transformers.models."):
            break
    else:
        raise _refused(
            f"{cls.__name__} is not a class it knows; it takes transformers' {', '.join(SUPPORTED)}, and these "
            "themselves, not what wraps them"
        )
    architecture = _ARCHITECTURES[base.__name__]
    replaced = model.__dict__.get("forward")
    switch = _switch_of(replaced)
    if switch is not None and switch["on"]:
        raise _refused("the model has a fused loss already, restore() that first")
    # A pickled model comes back with the class's forward, bound, as its attribute.
    if replaced is not None and switch is None and getattr(replaced, "__func__", None) is not cls.forward:
        raise _refused("the model's forward was replaced, as Accelerate does it: fused_loss has to come before that")
    forward = inspect.unwrap(cls.forward)
    if cls.forward is not base.forward or forward.__module__ != base.__module__:
        raise _refused(f"{cls.__name__}.forward is that of {forward.__module__}, not of {base.__module__}")
    _refuse_unknown_forward(base.__name__, forward, architecture.reads())
    return architecture


def _refuse_unknown_forward(name: str, forward: Callable[..., Any], expected: set[str]) -> None:
    """Another release's forward may scale its logits, or add to the loss, by something that the table does not have.

    It would have to read that of its model or of the config.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError) as error:
        raise _refused(f"the source of {name}.forward, by which it knows what that does, cannot be read") from error
    paths = (ast.unparse(node).split(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    reads = {".".join(path[1 : 3 if path[1] == "config" else 2]) for path in paths if path[0] == "self"} - _NEUTRAL
    if reads != expected:
        raise _refused(
            f"{name}.forward of transformers {transformers.__version__} reads {sorted(reads)} of the model, where "
            f"{sorted(expected)} is what it knows"
        )


def _why_not_the_loss(model: Any) -> str | None:
    """Of what is asked when fused_loss is called, and not again."""
    head = model.lm_head
    if model.loss_function is not ForCausalLMLoss:
        return f"the model's loss_function is {_name_of(model.loss_function)}, not transformers' ForCausalLMLoss"
    if getattr(model, "model_parallel", False):
        return "the model was spread over devices by parallelize()"
    if is_traceable_wrapper_subclass(head.weight) or not head.weight.is_floating_point():
        kind = type(head.weight.data).__name__
        return f"lm_head.weight is a {kind} of {head.weight.dtype}, not a plain floating-point tensor"
    return None


def _why_not_the_head(model: Any) -> str | None:
    """Of what can change afterwards: it is asked at every call, and has to be something that Dynamo can follow."""
    head = model.lm_head
    if type(head) is not nn.Linear:
        return f"lm_head is a {type(head).__name__}, not torch.nn.Linear itself, and may do more than multiply"
    if "forward" in head.__dict__:
        return "lm_head's forward was replaced, and would not be called"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return "lm_head has hooks, which would not be called"
    if getattr(model, "_loss_function", ForCausalLMLoss) is not ForCausalLMLoss:
        return "the model's loss_function was replaced, and would not be called"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):  # None: the same, by default
        return f"the model's loss_type is {model.loss_type!r}, not 'ForCausalLM'"
    return None


def _refused(why: str) -> RuntimeError:
    return RuntimeError(f"fused_loss: {why}; the model is left as it was")


def _keywords_of(module: nn.Module) -> frozenset[str] | None:
    """The arguments of module's forward, None where it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _switch_of(forward: Any) -> dict[str, bool] | None:
    """That of a forward which fused_loss has put on a model."""
    return getattr(getattr(forward, "__func__", None), "_fused_loss", None)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
