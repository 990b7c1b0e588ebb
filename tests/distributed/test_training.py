"""Losses as people train: context parallelism, and a vocabulary-parallel head that is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcs_ops.distributed import context_parallel_targets

from distributed.team import Team


def test_context_parallel_batches(two: Team) -> None:
    """Targets are shifted and counted before time is dealt out; shift=True is refused where it would be wrong."""
    from distributed import training_cases

    for shift in (1, 3):
        for loss, gradient, expected, wanted, said, again in two.run(training_cases.of_context_parallel, shift):
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=1e-13)
            assert torch.equal(again, expected)
            assert "shift must be 0 inside context_parallel" in said[1], said


@pytest.mark.slow
@pytest.mark.parametrize("plain_target", [False, True])
def test_the_backend_fuses_a_vocabulary_parallel_head(two: Team, plain_target: bool) -> None:
    """What loss_parallel takes as logits of Shard(-1) is one op on the head's weight of Shard(0)."""
    from distributed import training_cases

    for found, expected, said in two.run(training_cases.of_compiled_logits, plain_target):
        assert any("fused 1 linear + cross_entropy" in line for line in said), said
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_wrong_labels() -> None:
    for labels, sentence in (
        (torch.ones(3), "labels must be int64, got float32"),
        (torch.ones((), dtype=torch.int64), "labels must have at least 1 steps for shift=1, got the shape"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            context_parallel_targets(labels)
    with pytest.raises(TypeError, match="labels must be a tensor, got list"):
        context_parallel_targets([1])


def test_targets_by_arguments_of_other_types() -> None:
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"shift": "a"}, "shift must be an integer, got str"),
        ({"ignore_index": "a"}, "ignore_index must be an integer or None, got str"),
    )
    for changes, sentence in others:
        with pytest.raises(TypeError, match=f"context_parallel_targets: {sentence}"):
            context_parallel_targets(torch.arange(4), **changes)
