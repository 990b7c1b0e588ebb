"""Every language model class of transformers: a tiny model of random weights, its own loss and the fused one."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

VOCABULARY, BATCH, STEPS = 160, 2, 12
KINDS = {  # a class counts for the first kind that has it
    "MLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "VLM": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
# What a configuration's numbers become, by the name of the attribute: the first that matches.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(?!.*(image|video|audio|vision)).*vocab_size|num_embeddings", VOCABULARY),
    (r"embedding_size|word_embed_proj_dim", 32),
    (r"qk_head_dim", 32),
    (r"(v_|qk_.*|.*attention_|.*mamba_|.*linear_.*|.*global_)?head_dim|d_kv|kv_channels|attention_head_size", 16),
    (r".*(lora_rank|lora_dim)", 16),
    (r".*(intermediate|ffn|inner|feed_forward|ff)_?(hidden)?_?(size|dim|hidden)|d_ff|n_inner|ffn_hidden.*", 48),
    (r"num_key_value_heads|.*kv_heads", 2),
    (r"n_head", 4),
    (r".*(num_heads|n_heads?|attention_heads)|.*num.*_heads", 2),
    (r"num_kv_shared_layers", 0),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r".*num_.*layers|.*_layers|n_layers?|num_blocks|depth|num_hidden_layers", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"max_position_embeddings|n_positions|max_target_positions|max_source_positions|n_ctx|max_seq_len|seq_length", 64),
    (r"sliding_window|attention_window|.*chunk_size|window_size|max_window_layers", 8),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|.*hidden_(size|dim)|width|d_embed|emb_dim|model_dim", 32),
    (r"(partial_)?rotary_dim", 8),
    (r"image_size", 32),
    (r"patch_size", 16),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|forced_eos_token_id", 2),
    (r"(image|video|audio|vision|img|im|boi|eoi).*token.*(id|index)", 150),
)  # fmt: skip
# What follows from the number of layers, or is chosen anew.
DROPPED = re.compile(
    r"layer_types|.*layers_block_type|.*_layers_pattern|transformers_version|architectures|model_type|mlp_layer_types|.*_indices|deepstack.*"
)
FILLED = re.compile(
    r".*_token_id|vocab_size|head_dim|num_key_value_heads|n_group|topk_group|num_experts_per_tok|moe_topk"
)
RANDOM_FREE = re.compile(r".*(dropout|drop_rate|dropout_prob|pdrop|layerdrop|drop_path_rate|jitter_noise)$")


class Outcome(NamedTuple):
    kind: str
    name: str
    what: str  # "exact", "taken", "refused", "not built"
    why: str = ""


def model_types() -> dict[str, tuple[str, str]]:
    """(the table's kind, model type) of every class."""
    found: dict[str, tuple[str, str]] = {}
    for kind, table in KINDS.items():
        for model_type, names in getattr(modeling_auto, table).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, (kind, model_type))
    return found


def classes() -> Iterator[tuple[str, str, str]]:
    """(kind, class, model type); imports them all."""
    for name, (kind, model_type) in model_types().items():
        if hasattr(transformers, name):
            yield _kind(kind, name), name, model_type


def _kind(kind: str, name: str) -> str:
    source = inspect.getsource(getattr(transformers, name))
    if kind in ("causal", "VLM") and re.search(r"router_logits|num_experts", source):
        return "MoE"
    if kind == "MLM" and "ForConditionalGeneration" in name:
        return "seq2seq"
    return kind


def tiny_config(kind: Any, depth: int = 0) -> Any:
    """A configuration of this class with small numbers, its parts too."""
    default = kind()
    changes: dict[str, Any] = {}
    parts = getattr(kind, "sub_configs", {})
    for name, value in {**default.to_dict(), **{n: getattr(default, n, None) for n in parts}}.items():
        if name in parts:
            part = getattr(default, name, None)
            if part is not None:
                changes[name] = tiny_config(type(part), depth + 1).to_dict()
            continue
        if DROPPED.fullmatch(name):
            continue
        if RANDOM_FREE.fullmatch(name) and not isinstance(value, bool):
            changes[name] = type(value or 0.0)(0)
        elif name in ("initializer_range", "init_std", "initializer_factor"):
            changes[name] = 0.3 if "factor" not in name else 1.0
        elif (isinstance(value, int) and not isinstance(value, bool)) or value is None:
            found = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if found is not None and (value is not None or FILLED.fullmatch(name)):
                changes[name] = found
        elif name == "rope_parameters" and re.search(r"vl|glm|omni|ocr|cosmos", kind.model_type):
            section = [1, 1, 2] if "glm4v_moe" in kind.model_type else [2, 3, 3]
            changes[name] = {"rope_type": "default", "rope_theta": 1e4, **(value or {}), "mrope_section": section}
    config = kind(**changes)
    for name, value in (("output_router_logits", True), ("use_cache", False), ("decoder_start_token_id", 1)):
        if hasattr(config, name) or name == "decoder_start_token_id":
            setattr(config, name, value)
    return config


def config_class(name: str, model_type: str) -> Any:
    own = getattr(transformers, name).config_class
    return own or getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])


def tiny(name: str, model_type: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(config_class(name, model_type)))
    for key, part in model.named_parameters():
        if key.endswith("bias"):
            nn.init.normal_(part, std=0.1)
    return model.train()


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 140, (BATCH, STEPS), generator=generator)
    labels = ids.clone()
    labels[1, :4] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: Any, given: dict[str, Any]) -> list[Tensor | None]:
    torch.manual_seed(2)
    loss = model(**given).loss
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)]


def own_results(model: Any) -> list[Tensor | None]:
    try:
        return loss_and_gradients(model, inputs())
    except Exception:
        if not getattr(model.config, "output_router_logits", False):
            raise
        model.config.output_router_logits = False  # two layers have no router yet
        return loss_and_gradients(model, inputs())


def outcome(kind: str, name: str, model_type: str) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny(name, model_type)
        except Exception as error:
            return _checked_only(kind, name, model_type, error)
        try:
            fused_loss(model).restore()
        except RuntimeError as error:
            return Outcome(kind, name, "refused", str(error))
        try:
            own = own_results(model)
        except Exception as error:
            return Outcome(kind, name, "taken", _line(error))
        with fused_loss(model):
            found = loss_and_gradients(model, inputs())
        error = difference(own, found)
        if error >= 1e-6:  # The model amplifies rounding: once more in float64, where it has that.
            with contextlib.suppress(RuntimeError):
                own = loss_and_gradients(model.double(), inputs())
                with fused_loss(model):
                    error = difference(own, loss_and_gradients(model, inputs()))
        return Outcome(kind, name, "exact" if error < 2e-6 else "wrong", f"{error:.1e}")


def _checked_only(kind: str, name: str, model_type: str, error: Exception) -> Outcome:
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)(config_class(name, model_type)())
    except Exception:
        return Outcome(kind, name, "not built", _line(error))
    try:
        fused_loss(model).restore()
    except RuntimeError as refused:
        return Outcome(kind, name, "refused", str(refused))
    return Outcome(kind, name, "taken", _line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:150]


def difference(own: list[Tensor | None], found: list[Tensor | None]) -> float:
    """Of the loss, and of all gradients as one vector by its largest entry."""
    loss = abs(float(own[0]) - float(found[0])) / abs(float(own[0]))
    largest = max(float(g.abs().max()) for g in own[1:] if g is not None)
    gradients = 0.0
    for a, b in zip(own[1:], found[1:], strict=True):
        if (a is None) != (b is None):
            a, b = (torch.zeros(()) if a is None else a), (torch.zeros(()) if b is None else b)
        if a is not None and b is not None:
            gradients = max(gradients, float((a - b).abs().max()))
    return max(loss, gradients / largest)
