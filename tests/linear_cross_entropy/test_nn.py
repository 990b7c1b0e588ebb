"""nn.LinearCrossEntropyLoss, and calls written for torch.nn.functional.linear_cross_entropy."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.nn import functional

import torch_dcs_ops
from torch_dcs_ops.nn import LinearCrossEntropyLoss

from linear_cross_entropy.oracle import gradients, leaf, make

has_torch_op = pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="F.linear_cross_entropy came with torch 2.13"
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "ignore_index None": {"ignore_index": None},
    "label_smoothing": {"label_smoothing": 0.1},
    "options None": {"options": None},
}


@has_torch_op
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lead", [(), (6,)], ids=str)
@pytest.mark.parametrize("by_class", [False, True])
def test_calls_written_for_torch(device: str, by_class: bool, lead: tuple[int, ...], name: str) -> None:
    options = OPTIONS[name]
    if by_class and options.get("ignore_index"):
        return
    problem = make(lead, device=device, ignored=0.0)
    target = problem.probabilities if by_class else problem.target
    results = []
    for f in (torch_dcs_ops.linear_cross_entropy, functional.linear_cross_entropy):
        x, w, b = leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)
        loss = f(x, w, target, linear_bias=b, weight=problem.weight, **options)
        results.append([loss, *gradients(loss.sum(), x, w, b)])
    torch.testing.assert_close(*results, equal_nan=True)  # a mean over no valid target


@has_torch_op
def test_the_signature_covers_torchs() -> None:
    ours = inspect.signature(torch_dcs_ops.linear_cross_entropy).parameters
    theirs = inspect.signature(functional.linear_cross_entropy).parameters
    assert set(theirs) <= set(ours)
    assert [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert set(inspect.signature(torch.nn.LinearCrossEntropyLoss).parameters) <= set(
        inspect.signature(LinearCrossEntropyLoss).parameters
    )


@has_torch_op
@pytest.mark.parametrize("bias", [False, True])
def test_torchs_state_dict_loads(bias: bool) -> None:
    theirs = torch.nn.LinearCrossEntropyLoss(7, 13, bias=bias, weight=torch.rand(13), label_smoothing=0.1)
    ours = LinearCrossEntropyLoss(7, 13, bias=bias, weight=torch.ones(13), label_smoothing=0.1)
    ours.load_state_dict(theirs.state_dict())
    problem = make((6,), dtype=torch.float32)
    torch.testing.assert_close(ours(problem.input, problem.target), theirs(problem.input, problem.target))


def test_module(device: str) -> None:
    problem = make(dtype=torch.float32, device=device)
    module = LinearCrossEntropyLoss(
        7, 13, bias=True, device=device, shift=True, softcap=5.0, return_predictions=True, memory_budget=1000
    )
    loss, predictions = module(problem.input, problem.target)
    loss.backward()
    assert predictions.shape == (3, 4)
    assert all(p.grad is not None for p in module.parameters())
    assert "softcap=5.0" in repr(module)
    assert "memory_budget=1000" in repr(module)


def test_sentences() -> None:
    with pytest.raises(RuntimeError, match=r"LinearCrossEntropyLoss: out_features must be \(\), got \(3,\)"):
        LinearCrossEntropyLoss(7, 13, out_features=(3,))
    with pytest.raises(RuntimeError, match=r"LinearCrossEntropyLoss: weight must have the shape \(13,\)"):
        LinearCrossEntropyLoss(7, 13, weight=torch.ones(12))
    with pytest.raises(RuntimeError, match="LinearCrossEntropyLoss: options must be None"):
        LinearCrossEntropyLoss(7, 13, options=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "error", "sentence"),
    [
        ({"reduction": "avg"}, ValueError, 'reduction must be "none", "mean" or "sum", got "avg"'),
        ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing must be in [0, 1], got 1.5"),
        ({"softcap": -1.0}, RuntimeError, "softcap must be a positive number or None, got -1.0"),
        ({"shift": -1}, RuntimeError, "shift must be a number of steps >= 0, got -1"),
        ({"memory_budget": 0}, RuntimeError, "memory_budget must be at least 1 byte, got 0"),
        ({"shift": "yes"}, TypeError, "shift must be an integer or a bool, got str"),
        ({"accumulate_dtype": "float32"}, TypeError, "accumulate_dtype must be a torch.dtype or None, got str"),
        ({"reduction": None}, ValueError, 'reduction must be "none", "mean" or "sum", got None'),
        ({"weight": [1.0, 2.0]}, TypeError, "weight must be a tensor or None, got list"),
        ({"weight": "a"}, TypeError, "weight must be a tensor or None, got str"),
        ({"accumulate_dtype": torch.int8}, RuntimeError, "accumulate_dtype must be None or bfloat16 or float32 or"),
        ({"logits_dtype": torch.int8}, RuntimeError, "logits_dtype must be None or float16 or bfloat16 or float32 or"),
        ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got str"),
        ({"return_z_loss": None}, TypeError, "return_z_loss must be a bool, got NoneType"),
        ({"zero_if_empty": 3}, TypeError, "zero_if_empty must be a bool, got 3"),
        ({"bias": "no"}, TypeError, "bias must be a bool, got str"),
        ({"out_features": 3}, RuntimeError, "out_features must be (), got 3"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype or None, got str"),
        ({"dtype": torch.int32}, RuntimeError, "dtype must be float16, bfloat16, float32 or float64, got int32"),
    ],
    ids=str,
)
def test_keywords_are_checked_at_once(keywords: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(f"LinearCrossEntropyLoss: {sentence}")):
        LinearCrossEntropyLoss(7, 13, **keywords)
    with pytest.raises(TypeError, match="LinearCrossEntropyLoss: in_features must be an integer, got float"):
        LinearCrossEntropyLoss(7.0, 13)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="LinearCrossEntropyLoss: in_features must be at least 0, got -1"):
        LinearCrossEntropyLoss(-1, 13)
    with pytest.raises(RuntimeError, match="LinearCrossEntropyLoss: num_classes must be at least 1, got 0"):
        LinearCrossEntropyLoss(7, 0)


def test_attributes_are_read_by_a_call() -> None:
    """As torch's own losses read them."""
    problem = make((6,), dtype=torch.float32)
    module = LinearCrossEntropyLoss(7, 13, bias=True)
    values: dict[str, Any] = {
        "reduction": "none", "ignore_index": int(problem.target[0]), "label_smoothing": 0.1, "softcap": 3.0,
        "logit_scale": 2.0, "z_loss": 0.1, "return_lse": True,
    }  # fmt: skip
    for name, value in values.items():
        setattr(module, name, value)
    wanted = LinearCrossEntropyLoss(7, 13, bias=True, **values)
    wanted.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(problem.input, problem.target), wanted(problem.input, problem.target))
    assert repr(module) == repr(wanted)
    module.reduction = "avg"
    with pytest.raises(ValueError, match='reduction must be "none", "mean" or "sum", got "avg"'):
        module(problem.input, problem.target)
