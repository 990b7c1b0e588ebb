"""Small models of every supported architecture, and their loss and gradients in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from linear_cross_entropy.oracle import assert_within_budget

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

FACTOR = 1.5
VOCABULARY, BATCH, STEPS = 160, 2, 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
CAPPED = {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ArceeForCausalLM": ("arcee", {}),
    "Cohere2ForCausalLM": ("cohere2", {"logit_scale": 0.3}),
    "CohereForCausalLM": ("cohere", {"logit_scale": 0.3}),
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "Gemma2ForCausalLM": ("gemma2", CAPPED),
    "Gemma3ForCausalLM": ("gemma3_text", CAPPED),
    "GemmaForCausalLM": ("gemma", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "GlmForCausalLM": ("glm", {}),
    "GraniteForCausalLM": ("granite", {"logits_scaling": 3.0}),
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "OlmoForCausalLM": ("olmo", {}),
    "Phi3ForCausalLM": ("phi3", {}),
    "PhiForCausalLM": ("phi", {}),  # its lm_head has a bias
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "StableLmForCausalLM": ("stablelm", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {}),
}


def build(name: str = "LlamaForCausalLM", **changes: Any) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model_type, own = MODELS.get(name, (name.removesuffix("ForCausalLM").lower(), {}))
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {} if model_type == "gpt2" else {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}
    # The usual 0.02 makes logits near 0, in which a wrong scale would hardly show.
    options = {**tokens, **sizes, "initializer_range": 0.3, **own, **changes}
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **options))
    if model.lm_head.bias is not None:
        nn.init.normal_(model.lm_head.bias)
    return model


def batch(**changes: Any) -> dict[str, Any]:
    """Token ids with a padded sample, and labels that ignore the padding and a prompt."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, STEPS), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, -3:] = mask[0, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **changes}


def shifted(labels: Tensor, ignore_index: int = -100) -> Tensor:
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def exact_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """ForCausalLMLoss without its rounding of float64 logits to float32."""
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(
        logits.flatten(0, -2), shift_labels.flatten(), ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def exactly(model: Any) -> Any:
    wide = copy.deepcopy(model).double()
    wide.loss_function = exact_loss
    return wide


def results(model: Any, **inputs: Any) -> list[Tensor]:
    """The loss and the gradient of every parameter."""
    loss = model(**inputs).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def check(model: Any, **inputs: Any) -> None:
    own, exact = results(model, **inputs), results(exactly(model), **inputs)
    with fused_loss(model):
        found = results(model, **inputs)
    assert found[0].dtype == own[0].dtype
    assert_within_budget(found, own, exact, [FACTOR] * len(own))


def has_own_loss(model: Any) -> bool:
    return model(**batch()).logits is not None
