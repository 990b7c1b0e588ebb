"""examples/grpo.py and examples/distil.py: the checker, losses beside plain formulas, short runs, what they show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

for package in ("matplotlib", "rich"):
    pytest.importorskip(package)

grpo = pytest.importorskip("torch_dcs_ops.examples.grpo")
distil = pytest.importorskip("torch_dcs_ops.examples.distil")


def symbols(text: str) -> list[int]:
    return [grpo.SYMBOLS.index(symbol) for symbol in text]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("8..", 1.0), ("9..", 0.1), ("08.", 0.0), ("18.", 0.1), ("188", 0.0), ("...", 0.0), ("8+.", 0.0), ("=8.", 0.0)],
)
def test_the_checker(answer: str, reward: float) -> None:
    prompts = grpo.prompts_of(torch.tensor([3]), torch.tensor([5]))
    assert prompts.tolist() == [symbols("3+5=")]
    assert float(grpo.checked(prompts, torch.tensor([symbols(answer)]))) == pytest.approx(reward)


def test_two_digits() -> None:
    prompts = grpo.prompts_of(torch.tensor([7, 9]), torch.tensor([5, 9]))
    assert grpo.checked(prompts, torch.tensor([symbols("12."), symbols("18.")])).tolist() == [1.0, 1.0]


def test_answers_end_with_a_stop() -> None:
    policy = grpo.Policy()
    prompts = grpo.prompts_of(*torch.randint(10, (2, 200)).unbind())
    answers = policy.answers(prompts)
    stops = answers == grpo.STOP
    assert answers.shape == (200, grpo.ANSWER)
    assert bool((stops[:, 1:] >= stops[:, :-1]).all())
    assert torch.equal(policy.answers(prompts, greedy=True), policy.answers(prompts, greedy=True))


def test_both_losses_take_the_same_steps() -> None:
    runs = [grpo.train(loss, seed=3, steps=3) for loss in (grpo.fused_loss, grpo.plain_loss)]
    assert len(runs[0].losses) == 3 * grpo.EPOCHS
    torch.testing.assert_close(*(torch.tensor(run.losses) for run in runs), rtol=0, atol=grpo.TOLERANCE)


@pytest.mark.slow
def test_grpo_learns() -> None:
    run = grpo.train(grpo.fused_loss, seed=0, steps=350)
    assert run.rewards[0] < 0.1
    assert run.right >= 0.8


def test_grpo_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(["--steps", "10", "--output", str(tmp_path / "deep" / "curve.png")]) == 0
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "beside TRL's formula" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        grpo.main(["--steps", "2"])


def test_words_of_the_corpus() -> None:
    words = distil.read_corpus(100_000)
    assert words.unique().numel() <= distil.VOCABULARY
    assert words.numel() > 10_000
    text, targets = distil.batch(words, torch.Generator().manual_seed(0))
    assert text.shape == targets.shape == (distil.ROWS, distil.LENGTH)
    assert torch.equal(text[:, 1:], targets[:, :-1])


def test_distil_shows_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VOCABULARY": 200, "TEACHER": 32, "STUDENT": 8, "CORPUS_BYTES": 300_000, "LENGTH": 16}.items():
        monkeypatch.setattr(distil, name, value)
    runs = distil.train_all(0, distil.EVALUATED_EVERY)
    assert len(runs["teacher"].nats) == 2
    monkeypatch.setattr(distil, "train_all", lambda *_: runs)
    best = runs["student, distilled"].nats[-1]
    for other, is_better in ((best + 1, True), (best, False)):
        runs["student, cross-entropy"].nats[-1] = other
        arguments = ["--output", str(tmp_path / "deep" / "curve.png")]
        if is_better:
            assert distil.main(arguments) == 0
        else:
            with pytest.raises(RuntimeError, match="no better than the one without a teacher"):
                distil.main(arguments)
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "nats a word" in capsys.readouterr().out


@pytest.mark.slow
def test_a_teacher_helps() -> None:
    runs = distil.train_all(0, 100)
    assert runs["student, distilled"].nats[-1] < runs["student, cross-entropy"].nats[-1] - 0.1
