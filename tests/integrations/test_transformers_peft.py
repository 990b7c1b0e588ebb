"""fused_loss of models that PEFT has wrapped: the loss and the adapters' gradients of the wrapped model itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from linear_cross_entropy.oracle import assert_within_budget

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")
peft = pytest.importorskip("peft", reason="peft is not installed (a development dependency)")

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

from integrations.models import FACTOR, batch, build, exact_loss  # noqa: E402

ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj"]},
    "a saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "the head, rank-stabilized": {"target_modules": ["lm_head"], "use_rslora": True, "lora_alpha": 3},
    "the head with a bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "the head with dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.5},
}


def adapted(**options: Any) -> Any:
    name = "PhiForCausalLM" if options.get("lora_bias") else "LlamaForCausalLM"  # PEFT wants a bias below its own
    model = peft.get_peft_model(build(name), peft.LoraConfig(r=4, init_lora_weights=False, **options))
    return model.train()


def results(model: Any) -> list[torch.Tensor]:
    """The loss and the gradients of what is trained."""
    torch.manual_seed(3)
    loss = model(**batch()).loss
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def exactly(model: Any) -> Any:
    wide = copy.deepcopy(model).double()
    wide.get_base_model().loss_function = exact_loss
    return wide


@pytest.mark.parametrize("case", ADAPTERS)
def test_loss_and_gradients(case: str) -> None:
    model = adapted(**ADAPTERS[case])
    own = results(model)
    with fused_loss(model):
        found = results(model)
        assert model(**batch()).logits is None
    if case.endswith("dropout"):  # float64 draws another mask
        for gradient, wanted in zip(found, own, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    else:
        assert_within_budget(found, own, results(exactly(model)), [FACTOR] * len(own))
    assert model(**batch()).logits is not None


def test_bfloat16_weights_below_float32_adapters() -> None:
    model = peft.get_peft_model(
        build().bfloat16(), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head"])
    )
    assert model.get_base_model().lm_head.lora_A["default"].weight.dtype == torch.float32
    own, exact = results(model), results(exactly(model))
    with fused_loss(model):
        assert_within_budget(results(model), own, exact, [2.0] * len(own))


@pytest.mark.parametrize("saved", [False, True])
def test_disabled_and_merged_adapters(saved: bool) -> None:
    model = adapted(**ADAPTERS["a saved head" if saved else "the head"])
    with torch.no_grad():
        own = model(**batch()).loss
        with model.disable_adapter():
            without = model(**batch()).loss
        with fused_loss(model):
            torch.testing.assert_close(model(**batch()).loss, own)
            with model.disable_adapter():
                torch.testing.assert_close(model(**batch()).loss, without)
            model.merge_adapter()
            torch.testing.assert_close(model(**batch()).loss, own)
    assert not torch.isclose(own, without)


def test_several_adapters() -> None:
    model = adapted(**ADAPTERS["the head"])
    model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])
    own, exact = results(model), results(exactly(model))
    with fused_loss(model):
        assert_within_budget(results(model), own, exact, [FACTOR] * len(own))


def test_refused() -> None:
    dora = adapted(target_modules=["lm_head"], use_dora=True)
    with pytest.raises(RuntimeError, match=r"fused_loss: lm_head has a variant of LoRA .*: use plain LoRA on it"):
        fused_loss(dora)
    ia3 = peft.get_peft_model(build(), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(
        RuntimeError, match=r"fused_loss: lm_head is a Linear of peft\.\S*, not torch\.nn\.Linear itself"
    ):
        fused_loss(ia3)
