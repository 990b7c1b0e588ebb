"""fused_loss of all language model classes of transformers, and the page that says which are taken."""

from __future__ import annotations

import collections
import copy
import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from torch_dcs_ops.integrations.transformers import fused_loss  # noqa: E402

from integrations.every_class import KINDS, Outcome, classes, inputs, loss_and_gradients, model_types, outcome, tiny  # noqa: E402
from integrations.models import FACTOR  # noqa: E402
from support.selection import slow  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "transformers_classes.md"
COLUMNS = {
    "exact": "equal",
    "taken": "taken, not run",
    "refused": "refused",
    "not built": "not tried",
}
REPRESENTATIVE = (
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM", "ModernBertForMaskedLM",
    "OPTForCausalLM",
)  # fmt: skip


TYPES = model_types()


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_loss_and_gradients(name: str) -> None:
    if name not in TYPES:
        pytest.skip(f"transformers {transformers.__version__} lists no {name} among its language models")
    found = outcome("", name, TYPES[name][1])
    if found.what in ("not built", "taken", "refused") and not transformers.__version__.startswith("5.23"):
        pytest.skip(f"refused, or not for the small configuration, which is made for transformers 5.23: {found.why}")
    assert found.what == "exact", found


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM"])
def test_bfloat16(name: str) -> None:
    model = tiny(name, TYPES[name][1]).bfloat16()
    exact = loss_and_gradients(copy.deepcopy(model).double(), inputs())
    own = loss_and_gradients(model, inputs())
    with fused_loss(model):
        found = loss_and_gradients(model, inputs())

    def error(values: list[Tensor | None]) -> float:
        """Of all gradients as one vector."""
        pairs = [(v.double(), e) for v, e in zip(values[1:], exact[1:], strict=True) if v is not None and e is not None]
        return float(sum((v - e).square().sum() for v, e in pairs) / sum(e.square().sum() for _, e in pairs)) ** 0.5

    assert float(found[0]) == pytest.approx(float(exact[0]), rel=2**-8)  # type: ignore[arg-type]
    assert error(found) < FACTOR * error(own)


@pytest.mark.parametrize("name", [slow("BertForMaskedLM"), "BartForConditionalGeneration", slow("MixtralForCausalLM")])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_without_a_graph_break(name: str) -> None:
    model = tiny(name, TYPES[name][1])
    for part in model.modules():
        if hasattr(part, "layerdrop"):
            part.training = False  # its random layers are a graph break in some releases of torch
    own = loss_and_gradients(model, inputs())
    with fused_loss(model):
        found = torch.compile(model, backend="eager", fullgraph=name != "MixtralForCausalLM")(**inputs())
    assert found.logits is None
    torch.testing.assert_close(found.loss, own[0], rtol=1e-6, atol=0)


def page(outcomes: list[Outcome]) -> str:
    counts = collections.Counter((o.kind, o.what) for o in outcomes)
    kinds = [kind for kind in ("causal", "MoE", "VLM", "seq2seq", "MLM") if any(o.kind == kind for o in outcomes)]
    lines = [
        "# Which classes of transformers fused_loss takes",
        "",
        f"Made with transformers {transformers.__version__} by `tests/integrations/test_every_class.py`, from a tiny "
        "model of random weights of each class. Equal: the loss and all gradients are the model's own, to 2e-6 of the "
        "largest, in float32, or to 1e-6 in float64 for models that amplify rounding. Taken, not run: the forward is "
        "taken, but the test's small configuration or its inputs of tokens alone do not suit the model. Not tried: no "
        "model could be made.",
        "",
        f"| | {' | '.join(COLUMNS.values())} |",
        f"| --- |{' ---: |' * len(COLUMNS)}",
        *(f"| {kind} | {' | '.join(str(counts[kind, what]) for what in COLUMNS)} |" for kind in kinds),
    ]
    for what, title in COLUMNS.items():
        lines += ["", f"## {title.capitalize()}"]
        for kind in kinds:
            chosen = sorted((o for o in outcomes if (o.kind, o.what) == (kind, what)), key=lambda o: o.name)
            if not chosen:
                continue
            if what == "exact":
                lines += ["", f"{kind}: {', '.join(o.name for o in chosen)}."]
            else:
                lines += ["", f"{kind}:", "", *(f"- {o.name}: {_reason(o.why)}" for o in chosen)]
    return "\n".join([*lines, ""])


def _reason(why: str) -> str:
    return why.removeprefix("fused_loss: ").split("; torch.compile")[0].removesuffix("; the model is left as it was")


@pytest.mark.slow
def test_all_classes_and_their_page() -> None:
    """DCS_WRITE_DOCS=1 writes the page anew."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # These products are smaller than what threads wait for each other.
    try:
        outcomes = [outcome(*each) for each in classes()]
    finally:
        torch.set_num_threads(threads)
    assert not [o for o in outcomes if o.what == "wrong"]
    assert {o.kind for o in outcomes} == {*KINDS, "MoE"}
    made = page(outcomes)
    if os.environ.get("DCS_WRITE_DOCS"):
        PAGE.write_text(made)
    text = PAGE.read_text()
    if f"transformers {transformers.__version__} " in text:
        # Further libraries (torchvision) only move classes out of "not tried".
        for what, pattern in (("exact", r"(\w+)[,.](?= |$)"), ("refused", r"^- (\w+):")):
            names = {o.name for o in outcomes if o.what == what}
            section = text.split(f"## {COLUMNS[what].capitalize()}\n")[1].split("\n## ")[0]
            stale = [name for name in re.findall(pattern, section, re.M) if name not in names]
            assert not stale, f"run this test with DCS_WRITE_DOCS=1: {stale}"
