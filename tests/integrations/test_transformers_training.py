"""fused_loss under what trains: transformers.Trainer, DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from torch_dcs_ops.integrations.transformers import FusedLossCallback, fused_loss  # noqa: E402

from integrations.models import VOCABULARY, batch, build, has_own_loss  # noqa: E402
from support.subprocesses import environment  # noqa: E402


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    inputs = batch()
    rows = [{name: value[row] for name, value in inputs.items()} for row in (0, 1)]
    given = {name: options.pop(name) for name in ("callbacks", "compute_metrics") if name in options}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2,
        optim="sgd", learning_rate=0.05, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=rows * 8, eval_dataset=rows, **given)


def fit(model: Any, folder: Path, **options: Any) -> float:
    return float(trainer(model, folder, **options).train().training_loss)


def test_trainer(tmp_path: Path) -> None:
    model = build()
    patched, halved, called = (copy.deepcopy(model) for _ in range(3))
    loss = fit(model, tmp_path)
    with fused_loss(patched):
        assert fit(patched, tmp_path) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(patched.state_dict(), model.state_dict())
    with fused_loss(halved):
        assert fit(halved, tmp_path, bf16=True) == pytest.approx(loss, rel=2**-8)
    assert has_own_loss(halved), "Accelerate's autocast wraps the forward again"
    callback = FusedLossCallback()
    assert fit(called, tmp_path, callbacks=[callback]) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(called.state_dict(), model.state_dict())
    assert not has_own_loss(called.train())
    callback.fused.restore()
    assert has_own_loss(called)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_callback_compiles_in_place(tmp_path: Path) -> None:
    model = build()
    compiled = copy.deepcopy(model)
    calls: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(sum(node.target is torch.ops.dcs.linear_cross_entropy.default for node in graph.graph.nodes))
        return graph.forward

    loss = fit(model, tmp_path)
    callback = FusedLossCallback(backend=backend)
    assert fit(compiled, tmp_path, callbacks=[callback]) == pytest.approx(loss, rel=1e-5)
    assert 1 in calls


@pytest.mark.parametrize("logits", ["eval", "never"])
def test_metrics_get_predictions(tmp_path: Path, logits: str) -> None:
    model, seen = build(), []

    def accuracy(evaluated: Any) -> dict[str, float]:
        seen.append(evaluated.predictions)
        return {}

    own = trainer(model, tmp_path, compute_metrics=accuracy).evaluate()["eval_loss"]
    with fused_loss(model, logits=logits):
        found = trainer(model, tmp_path, compute_metrics=accuracy).evaluate()["eval_loss"]
    assert found == pytest.approx(own, rel=1e-6)
    assert seen[0].shape == (2, 12, VOCABULARY)
    if logits == "eval":
        assert (seen[1] == seen[0]).all()
    else:
        assert len(seen[1]) == 0, "compute_metrics has nothing to compute of"


def test_the_callback_refuses(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"FusedLossCallback: label_smoothing_factor must be 0, got 0\.1: .*=0\.1\)"):
        trainer(build(), tmp_path, callbacks=[FusedLossCallback()], label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match='fused_loss: logits must be "eval", "train" or "never", got \'always\''):
        trainer(build(), tmp_path, callbacks=[FusedLossCallback(logits="always")])


def test_logits_in_training() -> None:
    model = build().train()
    tokens = torch.randint(VOCABULARY, (2, 12))
    own = model(input_ids=tokens, labels=tokens)
    (own.loss + own.logits.square().mean()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with fused_loss(model, logits="train"):
        found = model(input_ids=tokens, labels=tokens)
        (found.loss + found.logits.square().mean()).backward()
    torch.testing.assert_close(found.logits, own.logits)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)


def test_weights_that_deepspeed_partitions_are_refused() -> None:
    model = build()
    with fused_loss(model):
        # As deepspeed.initialize leaves a head.
        model.lm_head.weight.ds_id = 0
        model.lm_head.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"ZeRO stage 3, .*: use stage 2, or FSDP2"):
            model(**batch())
    with pytest.raises(RuntimeError, match=r"ZeRO stage 3, .*: use stage 2, or FSDP2"):
        fused_loss(model)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_in_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_losses.py")
    done = subprocess.run(
        [sys.executable, str(script), str(port)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("as in one process") == 6
