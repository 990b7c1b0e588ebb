"""The examples: the returns of REINFORCE against a loop over real episodes, its compiled step, its learning; the
language model's tokens, its losses with and without logits, its memory, the check that the losses are equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.selection import slow

for package in ("gymnasium", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(package)

demo = pytest.importorskip("torch_dcs_ops.examples.reinforce_cartpole")
language_model = pytest.importorskip("torch_dcs_ops.examples.language_model")


@pytest.fixture(scope="module")
def rollout() -> object:
    """Steps of real episodes, a few of which end by a fall; the time limit is lowered so that some are truncated."""
    torch.manual_seed(0)
    collector = demo.Collector(environments=4, steps=96, seed=0)
    collector.envs.unwrapped.max_episode_steps = 17
    rollout = collector.rollout(demo.Learner().policy)
    assert rollout.was_truncated.any()
    assert (rollout.reset & ~rollout.was_truncated).any()
    return rollout


def episode_returns(rollout: object, values: Tensor, last_value: Tensor) -> Tensor:
    """The definition, one environment and one step at a time; NaN at rows that are no transition."""
    steps, environments = rollout.rewards.shape
    returns = torch.full((steps, environments), float("nan"))
    for b in range(environments):
        carry = 0.0 if rollout.last_terminated[b] else float(last_value[b])
        for t in reversed(range(steps)):
            if rollout.reset[t, b]:
                carry = float(values[t, b]) if rollout.was_truncated[t, b] else 0.0
            else:
                carry = float(rollout.rewards[t, b]) * (1 - demo.GAMMA) + demo.GAMMA * carry
                returns[t, b] = carry
    return returns


def test_returns_of_real_episodes(rollout: object) -> None:
    values = torch.rand(rollout.rewards.shape)
    last_value = torch.rand(rollout.rewards.shape[1])
    expected = episode_returns(rollout, values, last_value)
    actual = demo.bootstrapped_returns(rollout, values, last_value)
    real = ~rollout.reset
    torch.testing.assert_close(actual[real], expected[real])
    assert torch.equal(expected.isnan(), rollout.reset)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_compiled_step_matches_eager(rollout: object, backend: str, fresh_compiler: None) -> None:
    learner = demo.Learner()
    weight = torch.tensor(0.01)
    expected = learner.loss(rollout, weight)
    expected_gradients = torch.autograd.grad(expected, list(learner.parameters()))
    loss = torch.compile(learner.loss, fullgraph=True, dynamic=False, backend=backend)(rollout, weight)
    gradients = torch.autograd.grad(loss, list(learner.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


def test_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = demo.train(seed=1, updates=4, environments=8, steps=32, compiled=False, progress=False)
    assert result.updates == 4
    assert result.environment_steps == 4 * 8 * 32
    assert result.episode_returns
    monkeypatch.setattr(demo, "train", lambda **_: result)
    assert demo.main(["--output", str(tmp_path / "deep" / "curve.png")]) == 0
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "average return" in capsys.readouterr().out


def test_seconds_limit_ends_the_training() -> None:
    result = demo.train(updates=10_000, seconds=0.5, environments=2, steps=8, compiled=False, progress=False)
    assert 1 < result.updates < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_learns(seed: int) -> None:
    result = demo.train(seed=seed, compiled=False, progress=False)
    assert result.before < 50
    assert result.after >= 150


SMALL = {"vocabulary": 600, "rows": 4, "length": 33, "width": 16, "layers": 1, "heads": 2, "corpus_bytes": 100_000}


@pytest.fixture(scope="module")
def language_result() -> object:
    return language_model.train(steps=40, compiled=False, progress=False, **SMALL)


def test_tokens_give_the_text_back() -> None:
    text = language_model.read_corpus(50_000)
    tokenizer = language_model.Tokenizer(text[:20_000], 700)
    assert len(tokenizer) == 700
    for every in (text, bytes(range(256)) * 2, "naïve_name = 'ß'\n\t x".encode(), b""):
        assert tokenizer.decode(tokenizer.encode(every)) == every
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_language_model_learns_the_same_with_either_loss(language_result: object) -> None:
    language_model.check(language_result)
    first, last = language_model.averages(language_result.fused.losses)
    assert last < first - 0.2
    assert len(language_result.plain.losses) == 40
    assert language_result.tokens_per_step == 4 * 32
    assert 0 < language_result.fused.peak_bytes < language_result.plain.peak_bytes
    for run in (language_result.fused, language_result.plain):
        assert len(run.step_seconds) == 39
        assert run.step_seconds.min() <= run.median_seconds <= run.step_seconds.max()


def test_memory_of_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    """A megabyte that is there when two more come and go; of the profiler nothing is written, of others all."""

    def step() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        torch.empty(1 << 21, dtype=torch.uint8)
        print("of a user", file=sys.stderr)
        del first

    memory = language_model.memory_of(step)
    assert memory.max() == 3 << 20
    assert (memory[0], memory[-1]) == (0, 0)
    assert capfd.readouterr().err == "of a user\n"


@pytest.mark.parametrize("loss", ["fused_loss", slow("plain_loss")])
def test_language_model_loss_compiles_whole(loss: str, fresh_compiler: None) -> None:
    model = language_model.LanguageModel(300, length=9, width=8, layers=1, heads=2)
    arguments = torch.randint(300, (2, 9)), getattr(language_model, loss)
    expected = model.loss(*arguments)
    actual = torch.compile(model.loss, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_language_model_compiled_step(fresh_compiler: None) -> None:
    """Two steps: the second loss is that of parameters which a compiled step updated."""
    steps = {"steps": 2, "progress": False, **SMALL}
    compiled, eager = language_model.train(**steps), language_model.train(compiled=False, **steps)
    np.testing.assert_allclose(compiled.fused.losses, eager.fused.losses, rtol=1e-5)
    np.testing.assert_allclose(compiled.plain.losses, eager.plain.losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([6.0, 5.0, 4.0], None),
        ([6.0001, 5.0, 4.0], "differ by 1.0e-04 in the first step"),
        ([6.0, 5.0, 4.1], "by up to 1.0e-01"),
        ([float("nan"), 5.0, 4.0], "differ by nan"),
        ([6.0, float("nan"), 4.0], "by up to nan"),
    ],
)
def test_language_model_check(losses: list[float], message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "AVERAGED_STEPS", 1)
    runs = [
        language_model.Run(np.array(values), 1.0, np.ones(2), np.array([0.0, 2.0**20]))
        for values in (losses, [6.0, 5.0, 4.0])
    ]
    result = language_model.Result(*runs, 100, 10)
    if message is None:
        language_model.check(result)
    else:
        with pytest.raises(RuntimeError, match=message):
            language_model.check(result)


def test_language_model_check_of_a_loss_that_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "AVERAGED_STEPS", 1)
    run = language_model.Run(np.array([4.0, 5.0]), 1.0, np.ones(1), np.array([0.0, 2.0**20]))
    with pytest.raises(RuntimeError, match="the loss did not fall"):
        language_model.check(language_model.Result(run, run, 100, 10))


def test_language_model_shows_and_draws(
    language_result: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "train", lambda **_: language_result)
    assert language_model.main(["--output", str(tmp_path / "deep" / "curve.png")]) == 0
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "peak memory" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        language_model.main(["--steps", "0"])
