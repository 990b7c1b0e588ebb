"""integrations.trl: values, gradients and training runs of TRL's own function, which is not called meanwhile."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.models import FACTOR, build
from linear_cross_entropy.oracle import assert_within_budget, relative_error
from support.selection import slow

# 1.15 has the function for GPUs alone.
trl = pytest.importorskip("trl", minversion="1.16", reason="needs trl >= 1.16")

from trl.trainer import utils  # noqa: E402

from torch_dcs_ops.integrations import trl as integration  # noqa: E402

NAME = "_ChunkedLogProbFunction"
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TRAINERS = {"DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "SFTTrainer"}
DOCS = Path(__file__).parents[2] / "docs" / "trl.md"
WORDS = [f"w{index}" for index in range(90)]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    own = getattr(utils, NAME)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        integration.disable()
    assert getattr(utils, NAME) is own


def operands(dtype: torch.dtype, device: str, rows: int = 40, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Logits with a deviation of 1.4, of 2.6 behind the scale and the temperature."""
    tensors = [torch.randn(rows, 24), torch.randn(70, 24) / 24**0.5, torch.randn(70)]
    tensors = [tensor.to(device, dtype).requires_grad_() for tensor in tensors[: 2 + bias]]
    return tensors, torch.randint(70, (rows,), device=device)


def results(function: Any, tensors: list[Tensor], targets: Tensor, softcap: float | None, outputs: Any) -> list[Tensor]:
    """log_probs, what was asked for, and the gradients of a loss over log_probs and entropy."""
    x, w, b = (*tensors, None)[:3]
    found = [value for value in function.apply(x, w, b, targets, 0.7, 16, softcap, 1.3, outputs) if value is not None]
    assert [value.dtype for value in found if value.dtype != torch.bool] == [torch.float32] * sum(
        value.dtype != torch.bool for value in found
    )
    weights = torch.linspace(-1, 2, targets.numel(), device=targets.device)
    loss = (found[0] * weights).sum()
    if "entropy" in outputs:
        loss = loss + (found[1] * weights.flip(0)).sum()
    return [*found, *torch.autograd.grad(loss, tensors)]


def formula(tensors: list[Tensor], targets: Tensor, softcap: float | None) -> list[Tensor]:
    """In float64: everything that TRL's function can return, and the gradients of the same loss."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    x, w, b = (*wide, None)[:3]
    z = torch.nn.functional.linear(x, w, b) * 1.3
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.7
    log_p = z.log_softmax(-1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    weights = torch.linspace(-1, 2, targets.numel(), device=targets.device).double()
    loss = (log_probs * weights).sum() + (entropy * weights.flip(0)).sum()
    others = [(2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets]
    return [log_probs, entropy, *others, *torch.autograd.grad(loss, wide)]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_output_and_gradient(device: str, dtype: torch.dtype, bias: bool, softcap: float | None) -> None:
    tensors, targets = operands(dtype, device, bias=bias)
    targets[:10] = (tensors[0] @ tensors[1].T).argmax(-1)[:10]
    own = results(getattr(utils, NAME), tensors, targets, softcap, OUTPUTS)
    with integration.enable():
        found = results(getattr(utils, NAME), tensors, targets, softcap, OUTPUTS)
    exact = formula(tensors, targets, softcap)
    assert torch.equal(found.pop(4), own.pop(4))
    del exact[4]
    assert_within_budget(found, own, exact, [FACTOR] * len(exact))
    if dtype == torch.float32:
        assert max(map(relative_error, found, own)) < 1e-6


@pytest.mark.parametrize(
    "outputs", [("log_probs",), ("log_probs", "entropy"), ("is_top1", "entropy"), ("mean_logits",)]
)
def test_what_is_not_asked_for_is_none(outputs: tuple[str, ...]) -> None:
    (x, w, b), targets = operands(torch.float32, "cpu")
    arguments = (x, w, b, targets, 0.7, 16, None, 1.3, outputs)
    own = getattr(utils, NAME).apply(*arguments)
    with integration.enable():
        found = getattr(utils, NAME).apply(*arguments)
    assert len(found) == len(own) == 5
    for value, expected in zip(found, own, strict=True):
        assert (value is None) == (expected is None)
        if expected is not None:
            assert value.requires_grad == expected.requires_grad
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_float32_weights_under_autocast(device: str) -> None:
    """bfloat16 products, float32 results and gradients, each within one rounding more than TRL's."""
    tensors, targets = operands(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        own = results(getattr(utils, NAME), tensors, targets, None, OUTPUTS)
        with integration.enable():
            found = results(getattr(utils, NAME), tensors, targets, None, OUTPUTS)
    exact = formula(tensors, targets, None)
    for got, reference, wide in zip(found, own, exact, strict=True):
        assert got.dtype == reference.dtype
        if got.dtype == torch.bool:  # nearly equal logits may be equal after rounding
            continue
        assert relative_error(got, wide) <= FACTOR * relative_error(reference, wide) + torch.finfo(torch.bfloat16).eps


def test_hidden_states_wider_than_the_head() -> None:
    """cast_lm_head_to_fp32 with a head that is shared with half-precision embeddings."""
    (x, w, b), targets = operands(torch.bfloat16, "cpu")
    tensors = [x.detach().float().requires_grad_(), w, b]
    own = results(getattr(utils, NAME), tensors, targets, None, ("entropy",))
    with integration.enable():
        found = results(getattr(utils, NAME), tensors, targets, None, ("entropy",))
    for got, reference in zip(found, own, strict=True):
        assert got.dtype == reference.dtype
        torch.testing.assert_close(got, reference, rtol=1e-6 if got.dtype == torch.float32 else 2**-7, atol=1e-5)


def test_no_rows() -> None:
    tensors, targets = operands(torch.float32, "cpu", rows=0)
    with integration.enable():
        found = results(getattr(utils, NAME), tensors, targets, None, OUTPUTS)
    assert [tuple(value.shape) for value in found] == [(0,)] * 5 + [(0, 24), (70, 24), (70,)]
    assert not found[-2].any()


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph() -> None:
    tensors, targets = operands(torch.float32, "cpu")

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        log_probs, entropy, *_ = utils._ChunkedLogProbFunction.apply(x, w, b, targets, 0.7, 16, None, 1.0, OUTPUTS[:1])
        return (log_probs + entropy).sum()

    with integration.enable():
        expected = torch.autograd.grad(loss(*tensors), tensors)
        found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    torch.testing.assert_close(found, expected)


def test_enable_and_disable() -> None:
    own = getattr(utils, NAME)
    integration.disable()  # nothing was enabled: nothing happens
    integration.enable()
    ours = getattr(utils, NAME)
    assert ours is not own
    with integration.enable():
        assert getattr(utils, NAME) is ours
    assert getattr(utils, NAME) is ours  # it was enabled before the block
    results(ours, *operands(torch.float32, "cpu"), None, ("log_probs",))
    integration.disable()
    assert getattr(utils, NAME) is own
    with pytest.raises(ZeroDivisionError), integration.enable():
        getattr(utils, NAME).apply(*operands(torch.float32, "cpu")[0], torch.zeros(40).long(), 0, 16)
    assert getattr(utils, NAME) is own


def test_no_effect_is_said() -> None:
    integration.enable()
    with pytest.warns(UserWarning, match=r"trl.disable: no log-probabilities were computed since enable\(\)"):
        integration.disable()


def test_another_replacement_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.enable()
    with monkeypatch.context() as patch:
        patch.setattr(utils, NAME, SimpleNamespace())
        with pytest.raises(RuntimeError, match=r"trl.disable: .*must be what enable\(\) put there, got namespace"):
            integration.disable()


class _FunctionOf114(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last_hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (None, rf"got none \(?.*in trl {re.escape(trl.__version__)}"),
        (_FunctionOf114, r"must take \(hidden, .*, outputs\).* got \(last_hidden, weight, bias, targets\) in trl"),
    ],
)
def test_other_functions_are_refused(monkeypatch: pytest.MonkeyPatch, function: Any, sentence: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(utils, NAME, function)
        with pytest.raises(RuntimeError, match=sentence):
            integration.enable()
        assert getattr(utils, NAME) is function


def test_other_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.kernels import chunked_logprob

    with monkeypatch.context() as patch:
        patch.setattr(chunked_logprob, "OPTIONAL_OUTPUTS", ("entropy",))
        with pytest.raises(RuntimeError, match=r"got the outputs \('entropy',\) instead of"):
            integration.enable()


def test_partitioned_heads_are_refused() -> None:
    (x, w, b), targets = operands(torch.float32, "cpu")
    w.ds_status = "not available"  # type: ignore[attr-defined]
    with integration.enable():
        results(getattr(utils, NAME), *operands(torch.float32, "cpu"), None, ("log_probs",))
        with pytest.raises(RuntimeError, match="must be whole in the backward pass, got a parameter that DeepSpeed"):
            results(getattr(utils, NAME), [x, w, b], targets, None, ("log_probs",))


def test_which_trainers_use_the_function() -> None:
    """docs/trl.md names every trainer of the installed release, and those whose module gives models the forward."""
    folder = Path(trl.__file__).parent / "trainer"
    using, others = set(), set()
    for path in folder.glob("*_trainer.py"):
        tree = ast.parse(path.read_text())
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer")}
        (using if "add_fused_lm_head" in calls else others).update(names - {"_BaseTrainer"})
    assert using == TRAINERS
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    assert all(name in rows[2] for name in using)
    assert not [name for name in others if not any(name in row and "no effect" in row for row in rows)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Llama of random weights with a tokenizer of words, as trainers take it by its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(path)
    build(vocab_size=len(vocabulary)).save_pretrained(path)
    return str(path)


def sentence(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [
        len(set(text.split())) + sum(int(word[1:]) for word in text.split() if word in WORDS) / 90
        for text in completions
    ]


SAMPLED = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.8, "beta": 0.1}


def trainer(name: str, folder: str, output: Path) -> Any:
    """Three steps of four sequences; SGD, so that no optimizer divides by the rounding of a small gradient."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts, texts = ([sentence(seed, 3 + seed % 4) for seed in range(start, start + 12)] for start in (0, 100))
    columns: dict[str, list[Any]] = {"prompt": prompts}
    extra: dict[str, Any] = SAMPLED
    if name == "SFTTrainer":
        columns, extra = {"prompt": prompts, "completion": texts}, {}
    elif name == "DPOTrainer":
        columns, extra = {"prompt": prompts, "chosen": texts, "rejected": texts[::-1]}, {}
    elif name == "KTOTrainer":
        columns, extra = {"prompt": prompts, "completion": texts, "label": [True, False] * 6}, {}
    functions = {"reward_funcs": reward} if extra else {}
    common = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.05,
    }
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    config = getattr(trl, name.replace("Trainer", "Config"))(str(output), **common, **quiet, **extra)
    return getattr(trl, name)(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=config, **functions,
        train_dataset=Dataset.from_dict(columns), processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip


def curve(trained: Any) -> list[dict[str, float]]:
    slow = ("time", "runtime", "per_second", "tflops", "mfu")
    return [
        {
            key: value
            for key, value in entry.items()
            if isinstance(value, float) and not any(part in key for part in slow)
        }
        for entry in trained.state.log_history
        if "loss" in entry
    ]


@pytest.mark.filterwarnings("ignore")  # of the trainers
@pytest.mark.parametrize(
    "name",
    [name if name == "GRPOTrainer" else slow(name) for name in sorted(TRAINERS)],
)
def test_training(name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/trl.md with each trainer: every number that it logs, every parameter after three steps."""
    own = trainer(name, folder, tmp_path / "own")
    own.train()
    expected = curve(own)
    assert len(expected) == 3

    def refuse(*arguments: Any) -> None:
        raise AssertionError("TRL's own function was called")

    monkeypatch.setattr(getattr(utils, NAME), "forward", refuse)
    monkeypatch.setattr(integration, "_why_not", lambda function: None)
    ours = trainer(name, folder, tmp_path / "ours")
    block = re.search(r"^```py\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert block
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="trl.disable")
        exec(block[1], {"trainer": ours})
    for found, reference in zip(curve(ours), expected, strict=True):
        # Divergences are differences of sums of some 40 nats, which float32 has to 4e-6.
        assert found == pytest.approx(reference, rel=1e-5, abs=1e-5)
        assert found["entropy"] > 0
    for parameter, reference in zip(ours.model.parameters(), own.model.parameters(), strict=True):
        assert relative_error(parameter, reference) < 1e-6
