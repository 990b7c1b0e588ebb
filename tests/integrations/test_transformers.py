"""integrations.transformers: the loss and every gradient of the unpatched model, and the model as it was afterwards.

`exact` is the unpatched model in float64, its loss too; an error may be FACTOR times what the unpatched float32 model
makes against it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linear_cross_entropy.oracle import assert_within_budget, relative_error

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

from integrations.models import (  # noqa: E402
    BATCH,
    FACTOR,
    MODELS,
    STEPS,
    VOCABULARY,
    batch,
    build,
    check,
    exactly,
    has_own_loss,
    results,
    shifted,
)
from linear_cross_entropy.test_memory import peak  # noqa: E402
from support.selection import slow  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    model = build(name).train()
    check(model, **batch())
    wide = exactly(model)
    exact = results(wide, **batch())
    del wide._loss_function
    with fused_loss(wide):
        found = results(wide, **batch())
        assert wide(**batch()).logits is None
    assert max(map(relative_error, found, exact)) < 1e-10


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights(name: str, tied: bool) -> None:
    model = build(name, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    check(model, **batch())


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "num_items_in_batch": lambda: batch(num_items_in_batch=31),
    "num_items_in_batch tensor": lambda: batch(num_items_in_batch=torch.tensor(31)),
    "ignore_index": lambda: batch(labels=batch()["labels"].masked_fill(batch()["labels"] == -100, 7), ignore_index=7),
    "shift_labels": lambda: batch(shift_labels=shifted(batch()["labels"]).flip(-1)),
    "shift_labels and num_items_in_batch": lambda: batch(shift_labels=batch()["labels"], num_items_in_batch=9),
    "logits_to_keep": lambda: batch(logits_to_keep=5, labels=batch()["labels"][:, -5:]),
    "logits_to_keep positions": lambda: batch(
        logits_to_keep=torch.tensor([0, 4, 5, 9]), labels=batch()["labels"][:, [0, 4, 5, 9]]
    ),
    "logits_to_keep of each sample": lambda: batch(
        logits_to_keep=torch.tensor([[0, 4, 5], [1, 2, 9]]), labels=batch()["labels"][:, 4:7]
    ),
    "logits_to_keep mask": lambda: batch(
        logits_to_keep=batch()["labels"] != -100, shift_labels=shifted(batch()["labels"])[batch()["labels"] != -100]
    ),
    "without attention": lambda: {k: v for k, v in batch().items() if k != "attention_mask"},
    "use_cache": lambda: batch(use_cache=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_calls(name: str, call: str) -> None:
    model = build(name)
    if "logits_to_keep" in call and "logits_to_keep" not in inspect.signature(model.forward).parameters:
        pytest.skip(f"{name} of transformers {transformers.__version__} has no logits_to_keep")
    if call.endswith(("sample", "mask")) and not hasattr(transformers.modeling_utils, "slice_logits_to_keep"):
        pytest.skip(f"transformers {transformers.__version__} keeps the same positions of every sample")
    check(model, **CALLS[call]())


def test_num_items_and_labels_may_be_on_the_cpu(device: str) -> None:
    model = build().to(device)
    inputs = {name: value.to(device) for name, value in batch().items()}
    own, exact = (
        results(model, **inputs, num_items_in_batch=17),
        results(exactly(model), **inputs, num_items_in_batch=17),
    )
    with fused_loss(model):
        found = results(model, **inputs, shift_labels=shifted(batch()["labels"]), num_items_in_batch=torch.tensor(17))
    assert_within_budget(found, own, exact, [FACTOR] * len(own))


def test_no_valid_label_is_nan_as_it_was() -> None:
    model = build()
    with fused_loss(model):
        assert model(**batch(labels=torch.full((BATCH, STEPS), -100))).loss.isnan()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("training", [False, True])
def test_outputs(training: bool, name: str) -> None:
    model = build(name, attn_implementation="eager").train(training)
    inputs = batch(output_hidden_states=True, output_attentions=True, use_cache=True)
    own = model(**inputs)
    with fused_loss(model):
        found = model(**inputs)
        as_tuple = model(**inputs, return_dict=False)
        positional = model(inputs.pop("input_ids"), **inputs)
        with pytest.raises(TypeError, match="multiple values"):
            model(inputs["labels"], input_ids=inputs["labels"], **inputs)
    assert type(found) is type(own)
    assert [name for name in own if name != "logits" or not training] == list(found)
    assert found.logits is None if training else torch.equal(found.logits, own.logits)
    torch.testing.assert_close((found.hidden_states, found.attentions), (own.hidden_states, own.attentions))
    assert found.past_key_values.get_seq_length() == STEPS
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(found)
    torch.testing.assert_close(as_tuple[0], found.loss)
    torch.testing.assert_close(positional.loss, found.loss)


def test_without_labels_the_models_own_forward_runs() -> None:
    model = build().eval()
    inputs = {"input_ids": batch()["input_ids"][:, :6]}
    generate = functools.partial(model.generate, **inputs, max_new_tokens=4, do_sample=False)
    own, tokens = model(**inputs).logits, generate()
    with fused_loss(model):
        assert torch.equal(model(**inputs).logits, own)
        assert torch.equal(generate(), tokens)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_gradient_checkpointing() -> None:
    model = build().train()
    inputs = batch(use_cache=False)
    own, exact = results(model, **inputs), results(exactly(model), **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with fused_loss(model):
        found = results(model, **inputs)
    assert_within_budget(found, own, exact, [FACTOR] * len(own))


@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_bfloat16(half: str) -> None:
    model = build("Gemma2ForCausalLM")
    exact = results(exactly(model.bfloat16() if half == "weights" else model), **batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        own = results(model, **batch())
        with fused_loss(model):
            found = results(model, **batch())
    assert found[0].dtype == own[0].dtype == torch.float32
    assert_within_budget(found, own, exact, [FACTOR] * len(own))


def test_options() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, inputs = build(), batch()
    labels = inputs.pop("labels")
    smoothed = LabelSmoother(epsilon=0.1)(model(**inputs), labels, shift_labels=True)
    lse = model(**inputs).logits.logsumexp(-1)[shifted(labels) != -100]
    with fused_loss(model, label_smoothing=0.1, memory_budget=1000):
        torch.testing.assert_close(model(**batch()).loss, smoothed)
    plain = model(**batch()).loss
    with fused_loss(model, z_loss=0.01):
        torch.testing.assert_close(model(**batch()).loss, plain + 0.01 * lse.square().mean())


def test_memory_does_not_grow_with_the_logits() -> None:
    vocabulary, rows = 20000, 512
    model = build(vocab_size=vocabulary, hidden_size=16, intermediate_size=16, head_dim=8, max_position_embeddings=rows)
    ids = torch.randint(vocabulary, (1, rows))
    logits = rows * vocabulary * 4

    def step() -> int:
        return peak(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())

    step()  # the parameters' gradients
    assert step() > 2 * logits
    with fused_loss(model, memory_budget=1 << 20):
        assert step() < logits / 2


# --- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        slow("LlamaForCausalLM", "inductor"),
        ("Gemma2ForCausalLM", "aot_eager"),
        slow("GPT2LMHeadModel", "aot_eager"),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(name: str, backend: str) -> None:
    model = build(name)
    inputs = batch(num_items_in_batch=torch.tensor(17))
    own, exact = results(model, **inputs), results(exactly(model), **inputs)
    with fused_loss(model):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        found = compiled(**inputs)
        assert found.logits is None
        gradients = torch.autograd.grad(found.loss, list(model.parameters()))
    assert_within_budget([found.loss, *gradients], own, exact, [FACTOR] * len(own))


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_follows(in_place: bool) -> None:
    """fused_loss after torch.compile, of what that made; restore() after that; twice."""
    model = build()
    own, exact = model(**batch()).loss, exactly(model)
    if in_place:
        model.compile(fullgraph=True, backend="eager")
    compiled = model if in_place else torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        assert has_own_loss(compiled)
        with fused_loss(compiled):
            found = compiled(**batch())
            assert found.logits is None
            torch.testing.assert_close(found.loss, own)
            for keep in (STEPS - 1, STEPS - 3):  # the second length makes the graph dynamic
                shorter = {name: value[:, :keep] for name, value in batch().items()}
                torch.testing.assert_close(compiled(**shorter).loss, exact(**shorter).loss.float())
    assert has_own_loss(compiled)


# --- training -------------------------------------------------------------------------------------------------------


def train(model: Any) -> list[Tensor]:
    """As Trainer does it: gradients accumulate over micro-batches, whose losses are divided by all labels of the step.

    Returns the losses of all steps in one tensor, then the parameters.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (3, BATCH, STEPS), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
    num_items_in_batch = (labels[..., 1:] != -100).sum()
    losses = []
    for _ in range(4):
        step = torch.zeros(())
        for micro_ids, micro_labels in zip(ids, labels, strict=True):
            loss = model(input_ids=micro_ids, labels=micro_labels, num_items_in_batch=num_items_in_batch).loss
            loss.backward()
            step = step + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step)
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_training_loop(name: str) -> None:
    model = build(name, tie_word_embeddings=True)
    patched, exact = copy.deepcopy(model), train(exactly(model))
    own = train(model)
    with fused_loss(patched, memory_budget=5 * VOCABULARY * 4):
        found = train(patched)
    assert found[0][-1] < found[0][0]
    assert_within_budget(found, own, exact, [FACTOR] * len(own))


# --- what the model is left as --------------------------------------------------------------------------------------


def test_restored_exactly() -> None:
    model = build()
    forward, attributes, state = model.forward, set(model.__dict__), model.state_dict()
    fused = fused_loss(model)
    assert fused.model is model
    assert set(model.__dict__) == attributes | {"forward"}
    assert list(model.state_dict()) == list(state)
    with pytest.raises(IndexError), fused:
        model(**batch(labels=torch.full((BATCH, STEPS), VOCABULARY)))
    assert model.forward == forward
    assert set(model.__dict__) == attributes
    fused.restore()
    again = fused_loss(model)
    fused.restore()
    assert not has_own_loss(model), "a handle restores only what it did itself"
    again.restore()
    assert has_own_loss(model)


def test_copies() -> None:
    model = build()
    with fused_loss(model):
        duplicate = copy.deepcopy(model)
        nn.init.zeros_(duplicate.lm_head.weight)
        torch.testing.assert_close(duplicate(**batch()).loss, torch.tensor(VOCABULARY).log())
        read = pickle.loads(pickle.dumps(model))
        assert has_own_loss(read)
    assert has_own_loss(duplicate)
    for other in (duplicate, read):
        with fused_loss(other):
            assert not has_own_loss(other)
        assert "forward" not in other.__dict__


def test_a_forward_wrapped_afterwards_stays() -> None:
    model, calls = build(), []
    with fused_loss(model):
        inner = model.forward.__func__

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            return inner(self, *args, **kwargs)

        model.forward = MethodType(outer, model)
        assert not has_own_loss(model)
    assert has_own_loss(model)
    assert calls == [model, model]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("LlamaForCausalLM", None), ("Gemma2ForCausalLM", None), ("LlamaForCausalLM", "aot_eager"),
        slow("Gemma2ForCausalLM", "aot_eager"),
    ],
)  # fmt: skip
def test_predictions_and_token_accuracy(name: str, backend: str | None) -> None:
    model = build(name).train()
    tokens = batch()
    with torch.no_grad():
        wanted = model(**tokens).logits.argmax(-1)
    labels = tokens["labels"]
    labels[:, 1::2] = wanted[:, :-1:2].where(labels[:, 1::2] != -100, labels[:, 1::2])  # predictions that are right
    following = shifted(labels)
    counts = following != -100
    with fused_loss(model, predictions=True) as fused:
        assert fused.predictions is None
        assert fused.token_accuracy is None
        called = model if backend is None else torch.compile(model, backend=backend)
        called(**tokens).loss.backward()
        assert fused.predictions is not None
        assert torch.equal(fused.predictions[counts], wanted[counts])
        accuracy = (wanted == following)[counts].double().mean()
        assert 0.3 < accuracy < 0.8
        assert fused.token_accuracy is not None
        torch.testing.assert_close(fused.token_accuracy.double(), accuracy, rtol=1e-6, atol=0)
    with fused_loss(model) as fused:
        model(**tokens)
        assert fused.predictions is None
        assert fused.token_accuracy is None
