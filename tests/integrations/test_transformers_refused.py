"""integrations.transformers: models whose loss it does not know are refused, with what it looked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

from integrations.models import (  # noqa: E402
    VOCABULARY,
    batch,
    build,
    exact_loss,
)


def with_attribute(path: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, model)
        setattr(owner, name, value(owner))

    return change


class LowRankLinear(nn.Linear):
    pass


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "head class": (with_attribute("lm_head", lambda m: LowRankLinear(32, VOCABULARY)), "lm_head is a LowRankLinear"),
    "head hooks": (lambda m: m.lm_head.register_forward_hook(lambda *_: None), "lm_head has hooks"),
    "head forward": (with_attribute("lm_head.forward", lambda m: m.forward), "lm_head's forward was replaced"),
    "loss_function": (with_attribute("loss_function", lambda m: exact_loss), "the model's loss_function"),
    "loss_type": (with_attribute("loss_type", lambda m: "ForCTC"), "the model's loss_"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_and_at_a_call(case: str) -> None:
    change, sentence = REFUSED[case]
    model = build()
    with fused_loss(model):
        change(model)
        with pytest.raises(RuntimeError, match=f"fused_loss: {sentence}"):
            model(**batch())
    model = build()
    change(model)
    with pytest.raises(RuntimeError, match=f"fused_loss: {sentence}.*the model is left as it was"):
        fused_loss(model)
    assert "forward" not in model.__dict__


def test_refused_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithForward(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return super().forward(input_ids, labels=labels)

    class Named(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
        pass

    llama = build()
    with fused_loss(Named(llama.config)):
        pass
    with pytest.raises(RuntimeError, match=r"fused_loss: WithForward\.forward uses __class__ .* as super\(\) does"):
        fused_loss(WithForward(llama.config))
    for other in (nn.Linear(2, 2), nn.Sequential(llama)):
        with pytest.raises(RuntimeError, match=rf"{type(other).__name__} is not a transformers.PreTrainedModel"):
            fused_loss(other)
    with fused_loss(llama), pytest.raises(RuntimeError, match="has a fused loss already"):
        fused_loss(llama)
    llama.forward = functools.partial(type(llama).forward, llama)
    with pytest.raises(RuntimeError, match="the model's forward was replaced"):
        fused_loss(llama)
    del llama.forward
