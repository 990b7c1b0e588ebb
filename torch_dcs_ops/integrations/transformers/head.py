"""What a head multiplies with: an nn.Linear, PEFT's wrappers of one, or one that FSDP2 shards by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_Loss = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]  # of hidden states, weight and bias


def with_operands(head: Any, hidden: Tensor, loss: _Loss) -> Tensor:
    """`loss` of what `head(hidden)` would multiply.

    Raises:
        RuntimeError: that is more than one product with floating-point weights.
    """
    refused = why_not(head)
    if refused:
        raise RuntimeError(f"fused_loss: {refused}; restore() the model to run it so")
    if is_fsdp(head):
        return _inside(head, hidden, loss)
    return loss(*_operands(head, hidden))


def why_not(head: Any) -> str | None:
    """Why the product of head cannot be taken out of it, None if it can. Dynamo has to be able to follow."""
    if type(head) is not nn.Linear and not is_fsdp(head):
        return _why_not_wrapped(head)
    if hasattr(head.weight, "ds_id"):  # before its hooks, which DeepSpeed has set
        return (
            "lm_head.weight is partitioned by DeepSpeed's ZeRO stage 3, which gathers it only where lm_head is called: "
            "use stage 2, or FSDP2's fully_shard"
        )
    return why_not_bypassed("lm_head", head, 1 if is_fsdp(head) else 0)  # FSDP2's own are called


def why_not_bypassed(name: str, module: Any, hooks: int = 0) -> str | None:
    """Why module's parts cannot be used without calling it, None if they can."""
    if "forward" in module.__dict__:
        return f"{name}'s forward was replaced, and would not be called"
    if max(len(module._forward_hooks), len(module._forward_pre_hooks)) > hooks or (
        module._backward_hooks or module._backward_pre_hooks
    ):
        return f"{name} has hooks, which would not be called"
    return None


def _why_not_wrapped(head: Any) -> str | None:
    if is_saved(head):
        return why_not(_trained(head))
    if not is_lora(head):
        kind = type(head)
        name = f"{kind.__name__} of {kind.__module__}"
        cure = ": leave the head out of target_modules, or put plain LoRA on it" if "peft." in name else ""
        return f"lm_head is a {name}, not torch.nn.Linear itself, and may do more than multiply{cure}"
    if getattr(head, "lora_variant", None) or any(getattr(head, "use_dora", {}).values()):
        return "lm_head has a variant of LoRA (DoRA or another one): use plain LoRA on it, or modules_to_save"
    return why_not(head.base_layer)


def is_fsdp(head: Any) -> bool:
    """Whether head is what torch.distributed.fsdp.fully_shard makes of an nn.Linear."""
    return hasattr(head, "_get_fsdp_state") and type(head).__mro__[2] is nn.Linear


def is_saved(head: Any) -> bool:
    kind = type(head)
    return kind.__name__ == "ModulesToSaveWrapper" and kind.__module__.startswith("peft.")


def is_lora(head: Any) -> bool:
    kind = type(head)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def linear_of(head: Any) -> Any:
    """The nn.Linear inside PEFT's wrappers."""
    if is_saved(head):
        return linear_of(_trained(head))
    return linear_of(head.base_layer) if is_lora(head) else head


def _trained(head: Any) -> Any:
    """The copy that modules_to_save trains, or the original where no adapter is active."""
    active = head.active_adapters
    if head.disable_adapters or not active or any(adapter not in head._adapters for adapter in active):
        return head.original_module
    return head.modules_to_save[active[0]]


def _operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    if is_saved(head):
        return _operands(_trained(head), hidden)
    if not is_lora(head):
        return hidden, head.weight, head.bias
    if head.disable_adapters and head.merged:
        head.unmerge()
    base = head.base_layer
    if head.disable_adapters or head.merged:
        return hidden, base.weight, base.bias
    # x·Wᵀ + s·(x·Aᵀ)·Bᵀ is one product, of [x, s·x·Aᵀ] with [W, B]. Adding s·B·A to W would round it to W's dtype.
    inputs, weights, bias = [hidden], [base.weight], base.bias
    for adapter in head.active_adapters:
        if adapter not in head.lora_A:
            continue
        down, up, scaling = head.lora_A[adapter], head.lora_B[adapter], head.scaling[adapter]
        low = down(head.lora_dropout[adapter](hidden.to(down.weight.dtype))) * scaling
        inputs.append(low.to(hidden.dtype))
        weights.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            added = (up.bias * scaling).to(base.weight.dtype)
            bias = added if bias is None else bias + added
    return torch.cat(inputs, -1), torch.cat(weights, 1), bias


def _inside(head: Any, hidden: Tensor, loss: _Loss) -> Tensor:
    """In head's own call, whose hooks gather its weight and reduce the gradient of that."""

    def forward(rows: Tensor) -> Tensor:
        return loss(rows, head.weight, head.bias)

    head.forward = forward
    try:
        result: Tensor = head(hidden)
    finally:
        del head.forward
    return result
