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
    (r"d_model|n_embd|dim|embed_dim|.*hidden_(size|dim)(_global)?|width|d_embed|emb_dim|model_dim", 32),
    (r"(partial_)?rotary_dim", 8),
    (r"image_size", 32),
    (r"patch_size", 16),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|forced_eos_token_id", 2),
    (r"(image|video|audio|vision|img|im|boi|eoi).*token.*(id|index)", 150),
)  # fmt: skip
# What a configuration needs beyond small numbers, by its model type.
OWN: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 150}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 150, "<|extra_200|>": 151}},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "glm5_next_text": {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 159},
    "nemotron_h": {"n_groups": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "step3p5": {"sliding_window": 8},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 64, "attention_head_dim": 32,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# What follows from the number of layers, or is chosen anew.
DROPPED = re.compile(
    r"layer_types|.*layers_block_type|.*_layers_pattern|transformers_version|architectures|model_type|mlp_layer_types|.*_indices|deepstack.*|per_layer_config"
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
            changes[name] = type(0.0 if value is None else value)(0)
        elif name in ("initializer_range", "init_std", "initializer_factor"):
            changes[name] = 0.3 if "factor" not in name else 1.0
        elif (isinstance(value, int) and not isinstance(value, bool)) or value is None:
            found = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if found is not None and (value is not None or FILLED.fullmatch(name)):
                changes[name] = found
        elif name == "rope_parameters" and re.search(r"vl|glm|omni|ocr|cosmos", kind.model_type):
            sections = {"glm4v_moe": [1, 1, 2], "ernie4_5_vl_moe": [3, 3, 2]}
            section = next((s for name, s in sections.items() if name in kind.model_type), [2, 3, 3])
            changes[name] = {"rope_type": "default", "rope_theta": 1e4, **(value or {}), "mrope_section": section}
    config = kind(**{**changes, **OWN.get(kind.model_type, {})})
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


def inputs(name: str = "") -> dict[str, Any]:
    """Tokens and labels, and what the class of this name needs besides."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 140, (BATCH, STEPS), generator=generator)
    labels = ids.clone()
    labels[1, :4] = -100
    given: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if name in ("GitForCausalLM", "PPFormulaNetForConditionalGeneration"):
        given["pixel_values"] = torch.randn(BATCH, 3, 32, 32, generator=generator)
    if name == "UdopForConditionalGeneration":
        given["bbox"] = torch.zeros(BATCH, STEPS, 4)
    if name == "VoxtralRealtimeForConditionalGeneration":  # four frames of sound a token
        given["encoder_inputs_embeds"] = torch.randn(BATCH, 4 * STEPS, 32, generator=generator)
    if name == "Molmo2ForConditionalGeneration":
        given["mm_token_type_ids"] = torch.zeros(BATCH, STEPS, dtype=torch.long)
    return given


def loss_and_gradients(model: Any, given: dict[str, Any]) -> list[Tensor | None]:
    torch.manual_seed(2)
    loss = model(**given).loss
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)]


def own_results(model: Any) -> list[Tensor | None]:
    given = inputs(type(model).__name__)
    try:
        return loss_and_gradients(model, given)
    except Exception:
        if not getattr(model.config, "output_router_logits", False):
            raise
        model.config.output_router_logits = False  # two layers have no router yet
        return loss_and_gradients(model, given)


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
        given = inputs(name)
        with fused_loss(model):
            found = loss_and_gradients(model, given)
        error = difference(own, found)
        if error >= 1e-6:  # The model amplifies rounding: once more in float64, where it has that.
            with contextlib.suppress(RuntimeError):
                given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
                own = loss_and_gradients(model.double(), given)
                with fused_loss(model):
                    error = difference(own, loss_and_gradients(model, given))
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
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:150]


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
