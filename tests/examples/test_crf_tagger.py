"""examples/crf_tagger.py: its chain against a sum over all paths, Viterbi against the best, a short training."""

from __future__ import annotations

import itertools

import pytest
import torch

for package in ("rich", "tqdm"):
    pytest.importorskip(package)

crf = pytest.importorskip("torch_dcs_ops.examples.crf_tagger")

OUTLINES, TAGS, LENGTH = 5, 3, 6


@pytest.fixture
def tagger() -> object:
    model = crf.Tagger(OUTLINES, TAGS).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def test_against_all_paths(tagger: object) -> None:
    outlines = torch.randint(OUTLINES, (4, LENGTH))
    tags = torch.randint(TAGS, (4, LENGTH))
    paths = torch.tensor(list(itertools.product(range(TAGS), repeat=LENGTH)))
    scores = tagger.scores(outlines)
    every = scores.gather(2, paths.T.expand(4, -1, -1)).sum(1)
    every = every + tagger.transitions[paths[:, :-1], paths[:, 1:]].sum(1)
    own = scores.gather(2, tags.unsqueeze(2)).sum((1, 2)) + tagger.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
    right = (every.logsumexp(1) - own).mean() / LENGTH
    for product in (crf.log_bmm, crf.naive):
        torch.testing.assert_close(tagger.loss(outlines, tags, product), right)
    assert torch.equal(tagger.decode(outlines), paths[every.argmax(1)])


def test_a_short_training(capsys: pytest.CaptureFixture[str]) -> None:
    result = crf.train(steps=50, tokens=20_000, rows=8, length=24, progress=False)
    crf.check(result)
    assert result.naive_gradients_are_nan
    assert result.tags == crf.TAGS
    crf.show(result)
    shown = capsys.readouterr().out
    assert "Viterbi" in shown
    assert "NaN" in shown
    result.own.gradient_error = float("nan")
    with pytest.raises(RuntimeError, match="nan of the largest gradient"):
        crf.check(result)
    with pytest.raises(SystemExit, match="2"):
        crf.main(["--steps", "0"])
