"""integrations of stable-baselines3, tianshou, cleanrl and gymnasium beside the libraries; examples/rl_libraries.py.

tests/returns/test_peers.py compares what the functions compute, test_torchrl.py is torchrl's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_dcs_ops import returns
from torch_dcs_ops.integrations import cleanrl, gymnasium, stable_baselines3, tianshou

np = pytest.importorskip("numpy", reason="NumPy is not installed")


@pytest.fixture(autouse=True)
def _own_again() -> Iterator[None]:
    yield
    stable_baselines3.disable()
    tianshou.disable()


@pytest.mark.parametrize("kind", ["RolloutBuffer", "DictRolloutBuffer"])
def test_stable_baselines3_buffers(kind: str) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="stable-baselines3 is not installed")
    spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is not installed")
    cls, box = getattr(buffers, kind), spaces.Box(-1, 1, (2,))
    generator, results = np.random.default_rng(0), []
    last_values, dones = torch.rand(6, 1), generator.random(6) < 0.3
    arrays = {name: generator.random((40, 6), np.float32) for name in ("rewards", "values")}
    arrays["episode_starts"] = (generator.random((40, 6)) < 0.1).astype(np.float32)
    own = buffers.RolloutBuffer.compute_returns_and_advantage
    for enabled in (False, True):
        if enabled:
            stable_baselines3.enable()
            stable_baselines3.enable()
        space = spaces.Dict({"a": box}) if kind == "DictRolloutBuffer" else box
        buffer = cls(40, space, spaces.Discrete(2), "cpu", 0.9, 0.97, 6)
        for name, array in arrays.items():
            setattr(buffer, name, array)
        buffer.compute_returns_and_advantage(last_values=last_values, dones=dones)
        results.append((buffer.advantages, buffer.returns))
    assert buffers.RolloutBuffer.compute_returns_and_advantage is not own
    for theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == ours.dtype == np.float32
        # Each of some 1 / (1 - 0.97 * 0.9) = 8 steps that a sum holds is rounded a few times.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * 8 * np.finfo(np.float32).eps * abs(theirs).max())
    stable_baselines3.disable()
    stable_baselines3.disable()
    assert buffers.RolloutBuffer.compute_returns_and_advantage is own


def test_a_method_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="stable-baselines3 is not installed")
    monkeypatch.setattr(buffers.RolloutBuffer, "compute_returns_and_advantage", lambda self, values: None)
    sentence = r"^stable_baselines3.enable: RolloutBuffer.compute_returns_and_advantage of .* must have the parameters "
    with pytest.raises(RuntimeError, match=sentence + r".*'dones'\], got \['self', 'values'\]$"):
        stable_baselines3.enable()
    monkeypatch.delattr(buffers.RolloutBuffer, "compute_returns_and_advantage")
    with pytest.raises(RuntimeError, match=r"got None$"):
        stable_baselines3.enable()


def _tianshou_function() -> tuple[Any, str]:
    pytest.importorskip("tianshou", reason="tianshou is not installed")
    found = [pair for pair in tianshou._PATCHED if importlib.util.find_spec(pair[0].rpartition(".")[0]) is not None]
    return importlib.import_module(found[0][0]), found[0][1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tianshou_gae(dtype: Any) -> None:
    module, name = _tianshou_function()
    own, generator = getattr(module, name), np.random.default_rng(0)
    v_s, v_s_ = (generator.random(200, dtype) for _ in range(2))
    rew, end_flag = generator.random(200), generator.random(200) < 0.05
    expected = own(v_s, v_s_, rew, end_flag, 0.97, 0.9)
    tianshou.enable()
    tianshou.enable()
    assert getattr(module, name) is tianshou.gae
    got = getattr(module, name)(v_s, v_s_, rew, end_flag, 0.97, 0.9)
    assert got.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    tianshou.disable()
    assert getattr(module, name) is own


def test_a_tianshou_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = _tianshou_function()
    monkeypatch.delattr(module, name)
    with pytest.raises(
        RuntimeError, match=rf"^tianshou.enable: {name} of tianshou .* must have the parameters .*got None$"
    ):
        tianshou.enable()


def test_cleanrl_by_numpy() -> None:
    """NumPy's float64 rewards, a network's float32 values, and flags of either kind."""
    rewards, dones = torch.rand(12, 4, dtype=torch.float64), torch.rand(12, 4) < 0.2
    values, next_value, next_done = torch.rand(12, 4), torch.rand(1, 4), torch.tensor([1.0, 0, 0, 1])
    expected = cleanrl.compute_advantages(rewards, values, dones.float(), next_value, next_done)
    wide = cleanrl.compute_advantages(rewards, values.double(), dones.double(), next_value.double(), next_done.double())
    torch.testing.assert_close(expected, wide, rtol=0, atol=0)
    arrays = (array.numpy() for array in (rewards, values, dones, next_value, next_done))
    for got, tensor in zip(cleanrl.compute_advantages(*arrays), expected, strict=True):
        assert isinstance(got, np.ndarray)
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, tensor.numpy())


def test_next_step_mask_of_real_environments() -> None:
    """CartPole rewards every transition by 1, resets by 0. The second rollout begins behind an episode's end."""
    gym = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    envs = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync", max_episode_steps=15)
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP
    envs.reset(seed=0)
    envs.action_space.seed(0)
    steps = [envs.step(envs.action_space.sample()) for _ in range(80)]
    envs.close()
    rewards, terminated, truncated = (np.stack([step[part] for step in steps]) for part in (1, 2, 3))
    done = terminated | truncated
    cut = np.flatnonzero(done.any(1))[2] + 1
    assert terminated.any()
    assert truncated.any()
    first = gymnasium.next_step_mask(terminated[:cut], truncated[:cut])
    second = gymnasium.next_step_mask(terminated[cut:], truncated[cut:], done[cut - 1])
    np.testing.assert_array_equal(np.concatenate((first, second)), rewards == 1.0)
    assert not second[0].all()
    turned = [torch.from_numpy(flags[cut:]).float().T for flags in (terminated, truncated)]
    mask = gymnasium.next_step_mask(*turned, torch.from_numpy(done[cut - 1]), time_dim=-1)
    assert torch.equal(mask, torch.from_numpy(second).T)


def test_advantages_of_a_next_step_rollout() -> None:
    """Whatever stands in the steps that reset, transitions have the advantages of their episodes alone."""
    rewards, values = torch.rand(9, dtype=torch.float64), torch.rand(10)
    terminated, truncated = torch.zeros(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)
    terminated[2], truncated[5] = True, True  # steps 3 and 6 reset
    mask = gymnasium.next_step_mask(terminated, truncated)
    assert mask.tolist() == [True, True, True, False, True, True, False, True, True]
    advantages, _ = returns.gae(
        rewards, values[:-1], next_values=values[1:], terminated=terminated, truncated=truncated
    )
    for steps, last in ((range(3), torch.zeros(())), (range(4, 6), values[6]), (range(7, 9), values[9])):
        episode, _ = returns.gae(rewards[steps], values[steps], bootstrap_value=last, terminated=None)
        torch.testing.assert_close(advantages[steps], episode, rtol=1e-12, atol=1e-12)


def test_next_step_mask_of_no_steps_and_its_sentences() -> None:
    none = torch.zeros(0, 3, dtype=torch.bool)
    assert gymnasium.next_step_mask(none, none).shape == (0, 3)
    assert gymnasium.next_step_mask(none, none, torch.ones(3)).shape == (0, 3)
    flags = torch.zeros(4, 3)
    with pytest.raises(RuntimeError, match=r"truncated must have terminated's shape \(4, 3\), got \(4,\)"):
        gymnasium.next_step_mask(flags, flags[:, 0])
    with pytest.raises(RuntimeError, match=r"previous_done must .* without dim 0, \(3,\), got \(1, 3\)"):
        gymnasium.next_step_mask(flags, flags, flags[:1])
    with pytest.raises(IndexError, match=r"time_dim must be in \[-2, 1\] for 2-D flags, got 2"):
        gymnasium.next_step_mask(flags, flags, time_dim=2)


@pytest.mark.parametrize("name", ["torchrl", "stable_baselines3", "tianshou", "cleanrl", "gymnasium"])
def test_examples(name: str) -> None:
    examples = pytest.importorskip("torch_dcs_ops.examples.rl_libraries", reason="the examples are not installed")
    assert set(examples.EXAMPLES) == {"torchrl", "stable_baselines3", "tianshou", "cleanrl", "gymnasium"}
    if name != "cleanrl":
        pytest.importorskip(name, reason=f"{name} is not installed")
    # Sums of some 1 / (1 - 0.99 * 0.95) = 17 steps of order 1 in float32.
    assert examples.EXAMPLES[name]() < 17 * 17 * torch.finfo(torch.float32).eps
