"""Models of transformers compiled as they are: a function that returns their loss alone fuses by the pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from torch_dcs_ops.compile.passes import findings
from torch_dcs_ops.compile.passes import linear_cross_entropy as fusing

from support.selection import slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed (a development dependency)")
pytestmark = pytest.mark.usefixtures("fresh_compiler")

V = 128
SMALL = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "Llama, untied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    ),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)),
    "Gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL)),
    "Gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, final_logit_softcapping=0.5, attn_implementation="eager")
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    ),
}


def compiled(function: Callable[..., Any], counts: list[int], dynamic: bool | None = None) -> Callable[..., Any]:
    def backend(module: fx.GraphModule, _: Any) -> Any:
        counts.append(sum(found.fused for found in fusing.fuse_linear_cross_entropy(module.graph, 0)))
        module.graph.lint()
        module.recompile()
        return module

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("Gemma2", True),
        slow("Llama", True),
        *(slow(name, None) for name in MODELS),
    ],
)
def test_a_function_that_returns_the_loss(device: str, name: str, dynamic: bool | None) -> None:
    model = MODELS[name]().to(device).eval()
    if name == "GPT-2":
        model.loss_type = "ForCausalLM"  # Without one transformers warns, and Dynamo breaks a graph at a warning.
    counts: list[int] = []

    def loss(tokens: Tensor, items: Tensor | None = None) -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=items).loss
        return value

    run = compiled(loss, counts, dynamic)
    for shape, items in (((2, 12), None), ((3, 9), None), ((2, 12), torch.tensor(17, device=device))):
        tokens = torch.randint(1, V, shape, device=device)
        got, expected = run(tokens, items), loss(tokens, items)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)
        gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (got, expected)]
        for gradient, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max() + 1))
    assert counts
    assert set(counts) == {1}


def test_the_model_itself_returns_its_logits(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["Llama"]().to(device)
    tokens = torch.randint(1, V, (2, 12), device=device)
    findings._said.clear()
    counts: list[int] = []
    run = compiled(model, counts)
    for _ in range(2):
        torch._dynamo.reset()
        with caplog.at_level(logging.WARNING, "torch_dcs_ops"):
            output = run(input_ids=tokens, labels=tokens, use_cache=False)
    assert output.logits.shape == (2, 12, V)
    assert set(counts) == {0}
    (record,) = caplog.records
    assert "the compiled function also returns" in record.getMessage()
