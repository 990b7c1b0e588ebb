"""examples/reinforce_cartpole.py: its returns against a loop over real episodes, the compiled step, the learning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

for package in ("gymnasium", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(package)

demo = pytest.importorskip("torch_dcs_ops.examples.reinforce_cartpole")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As `make demo`: the tensors are tiny, and on a busy machine the threads' barriers cost more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_compiled_step_matches_eager(rollout: object, fresh_compiler: None) -> None:
    learner = demo.Learner()
    weight = torch.tensor(0.01)
    expected = learner.loss(rollout, weight)
    expected_gradients = torch.autograd.grad(expected, list(learner.parameters()))
    loss = torch.compile(learner.loss, fullgraph=True, dynamic=False)(rollout, weight)
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
