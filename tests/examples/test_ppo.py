"""The PPO example: advantages of real episodes against the definition, its compiled update, its learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

for package in ("gymnasium", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(package)

ppo = pytest.importorskip("torch_dcs_ops.examples.ppo")
CARTPOLE = ppo.TASKS["CartPole-v1"]


@pytest.fixture(scope="module")
def rollout() -> object:
    """Steps of real episodes, a few of which end by a fall; the time limit is lowered so that some are truncated."""
    torch.manual_seed(0)
    collector = ppo.Collector(CARTPOLE, environments=4, steps=96, seed=0)
    collector.envs.unwrapped.max_episode_steps = 17
    rollout = collector.rollout(ppo.Networks(4, 2).policy)
    assert rollout.truncated.any()
    assert rollout.terminated.any()
    return rollout


def advantages_of_episodes(rollout: object, values: Tensor) -> Tensor:
    """One environment and one episode at a time; NaN at rows that are no transition."""
    steps, environments = rollout.rewards.shape
    result = torch.full((steps, environments), float("nan"))
    for b in range(environments):
        for start in range(steps):
            if rollout.reset[start, b]:
                continue
            total, weight = 0.0, 1.0
            for t in range(start, steps):
                after = 0.0 if rollout.terminated[t, b] else float(values[t + 1, b])
                total += weight * float(rollout.rewards[t, b] + ppo.GAMMA * after - values[t, b])
                weight *= ppo.GAMMA * ppo.GAE_LAMBDA
                if rollout.terminated[t, b] or rollout.truncated[t, b]:
                    break
            result[start, b] = total
    return result


def test_advantages_of_real_episodes(rollout: object) -> None:
    values = torch.rand(rollout.observations.shape[:2])
    advantages, _ = ppo.gae(
        rollout.rewards, values[:-1], next_values=values[1:], terminated=rollout.terminated,
        truncated=rollout.truncated, gamma=ppo.GAMMA, gae_lambda=ppo.GAE_LAMBDA,
    )  # fmt: skip
    expected = advantages_of_episodes(rollout, values)
    assert torch.equal(expected.isnan(), rollout.reset)
    torch.testing.assert_close(advantages[~rollout.reset], expected[~rollout.reset])


def test_the_row_after_an_end_resets(rollout: object) -> None:
    ends = rollout.terminated | rollout.truncated
    assert torch.equal(rollout.reset[1:], ends[:-1])


def learner() -> object:
    torch.manual_seed(1)
    return ppo.Learner(ppo.Networks(4, 2), compiled=False)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_update_is_the_eager_one(rollout: object, backend: str, fresh_compiler: None) -> None:
    numbers = torch.tensor(1e-3), torch.tensor(0.01)
    one, other = learner(), learner()
    one.step = torch.compile(one.step, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(one.step(rollout, *numbers), other.step(rollout, *numbers), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one.vector, other.vector, rtol=1e-3, atol=1e-5)


def test_adam_is_torchs(rollout: object) -> None:
    ours, networks = learner(), learner().networks.requires_grad_(True)
    adam = torch.optim.Adam(networks.parameters(), lr=1e-3, eps=1e-5)
    for _ in range(3):
        ours.step(rollout, torch.tensor(1e-3), torch.tensor(0.01))
        adam.zero_grad()
        networks(rollout, torch.tensor(0.01)).backward()
        torch.nn.utils.clip_grad_norm_(networks.parameters(), 0.5)
        adam.step()
    torch.testing.assert_close(ours.vector, torch.nn.utils.parameters_to_vector(networks.parameters()).detach())


def test_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = ppo.train(
        task=CARTPOLE, seed=1, rollouts=3, environments=8, steps=32, epochs=2, compiled=False, progress=False
    )
    assert result.updates == 3 * 2 * 4
    assert result.environment_steps == 3 * 8 * 32
    assert len(result.episode_returns) == len(result.episode_ends) > 0
    monkeypatch.setattr(ppo, "train", lambda **_: result)
    assert ppo.main(["--output", str(tmp_path / "deep" / "curve.png")]) == 0
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "not reached" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        ppo.main(["--rollouts", "0"])


def test_acrobot_runs() -> None:
    result = ppo.train(
        task=ppo.TASKS["Acrobot-v1"], rollouts=2, environments=4, steps=8, compiled=False, progress=False
    )
    assert result.environment_steps == 2 * 4 * 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", ppo.TASKS)
def test_solves(task: str, seed: int) -> None:
    result = ppo.train(task=ppo.TASKS[task], seed=seed, compiled=False, progress=False)
    assert result.solved
