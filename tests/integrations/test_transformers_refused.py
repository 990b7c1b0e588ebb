"""integrations.transformers: models whose loss it does not know are refused, with what it looked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

from integrations.every_class import inputs, tiny  # noqa: E402
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
    "loss_type": (with_attribute("loss_type", lambda m: "ForTokenClassification"), "the model's loss_"),
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


class Head(nn.Module):
    """A part of a model that ends in its head, as BERT's is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden: Any) -> Any:
        return self.decoder(hidden).log_softmax(-1)


class Model(transformers.LlamaPreTrainedModel):  # type: ignore[name-defined,misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.cls = Head(config)
        self.scaled = True


class Entropy(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return CausalLMOutput(loss=loss - entropy.mean(), logits=logits)


class Masked(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits[..., 3] = 0
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Fewer(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)[..., :9]
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class CappedTwice(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = torch.tanh(logits / 3.0) * 3.0
        logits = logits * 2.0
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class OtherCap(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = torch.tanh(logits / 3.0) * 2.0
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Sometimes(Model):
    def forward(self, input_ids: Any, labels: Any = None, other: Any = None) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = other
        if other is None:
            logits = self.lm_head(hidden)
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Softmaxed(Model):
    def get_output_embeddings(self) -> Any:
        return self.cls.decoder

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.cls(self.model(input_ids).last_hidden_state)
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Chosen(Model):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        if self.scaled:
            logits = self.lm_head(hidden) / 2.0
        else:
            logits = self.cls(hidden)
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


STATEMENTS = {
    Entropy: r"entropy = -\(logits\.softmax",
    Masked: r"logits\[\.\.\., 3\] = 0",
    Fewer: r"logits = self\.lm_head\(.*\[\.\.\., :9\]",
    CappedTwice: r"logits = logits \* 2\.0",
    OtherCap: r"logits = torch\.tanh\(logits / 3\.0\) \* 2\.0|computes no cross entropy",
    Sometimes: r"return CausalLMOutput",
    Softmaxed: r"return self\.decoder\(hidden\)\.log_softmax",
}


@pytest.mark.parametrize("kind", STATEMENTS)
def test_what_is_done_to_the_logits_is_quoted(kind: Any) -> None:
    model = kind(build().config)
    with pytest.raises(RuntimeError, match=rf"fused_loss: .*{STATEMENTS[kind]}.*the model is left as it was"):
        fused_loss(model)
    assert "forward" not in model.__dict__


def test_a_choice_of_the_model_is_held() -> None:
    model = Chosen(build().config)
    model.loss_type = "ForCausalLM"
    inputs = {name: batch()[name] for name in ("input_ids", "labels")}
    own = model(**inputs).loss
    with fused_loss(model):
        torch.testing.assert_close(model(**inputs).loss, own)
        model.scaled = False
        with pytest.raises(RuntimeError, match=r"fused_loss: self\.scaled was True and has changed"):
            model(**inputs)


def test_hooks_of_a_part_that_ends_in_the_head_are_refused() -> None:
    model = tiny("BertForMaskedLM", "bert")
    with fused_loss(model):
        hook = model.cls.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="fused_loss: BertOnlyMLMHead has hooks"):
            model(**inputs())
        hook.remove()
        assert model(**inputs()).logits is None
    model.cls.predictions.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="fused_loss: BertLMPredictionHead has hooks"):
        fused_loss(model)
