"""Bad arguments: one sentence each, the same from the public function, the raw op, fakes and compiled graphs."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy, linear_kl_div, linear_log_probs, linear_policy_loss
from torch_dcs_ops.reference.linear_cross_entropy.loss import Options

from linear_cross_entropy.oracle import leaf

X = torch.ones(2, 3, 4)
W = torch.ones(5, 4)
Y = torch.zeros(2, 3, dtype=torch.int64)
Q = torch.ones(2, 3, 5)
OP = "linear_cross_entropy: "

TABLE: dict[str, tuple[dict[str, Any], str]] = {
    "integer input": (
        {"input": X.long()},
        "input must be float16, bfloat16, float32 or float64, got int64",
    ),
    "complex input": ({"input": X + 0j}, "input must be float16, bfloat16, float32 or float64, got complex64"),
    "0-D input": ({"input": torch.tensor(1.0)}, "input must have the shape (..., D), got a 0-D tensor"),
    "features": (
        {"linear_weight": torch.ones(5, 3)},
        "linear_weight must have the shape (V, D) with D = 4 as in input, got (5, 3)",
    ),
    "K-dimensional weight": (
        {"linear_weight": torch.ones(5, 2, 4)},
        "linear_weight must have the shape (V, D) with D = 4 as in input, got (5, 2, 4)",
    ),
    "no class": ({"linear_weight": torch.ones(0, 4)}, "linear_weight must have one class at least, got none"),
    "dtype of linear_weight": (
        {"linear_weight": W.double()},
        "linear_weight must have input's dtype float32, got float64",
    ),
    "sparse": ({"linear_weight": W.to_sparse()}, "linear_weight must be a dense tensor, got the layout sparse_coo"),
    "shape of target": (
        {"target": Y[0]},
        "target must have input's shape without its last dimension, (2, 3), got (3,)",
    ),
    "int32 target": (
        {"target": Y.int()},
        "target must be int64 (class indices) or floating-point (class probabilities), got int32",
    ),
    "integer one-hot target": (
        {"target": Q.long()},
        "target must be floating-point for class probabilities, (..., V), got int64",
    ),
    "shape of probabilities": (
        {"target": Q[..., :4]},
        "target must have the shape (2, 3, 5) for class probabilities, got (2, 3, 4)",
    ),
    "rows of probabilities": (
        {"target": Q[:1]},
        "target must have the shape (2, 3, 5) for class probabilities, got (1, 3, 5)",
    ),
    "ignore_index of probabilities": (
        {"target": Q, "ignore_index": 2},
        "ignore_index must be negative or None for class probabilities, got 2",
    ),
    "shape of linear_bias": (
        {"linear_bias": torch.ones(4)},
        "linear_bias must have the shape (5,), one entry a class, got (4,)",
    ),
    "dtype of linear_bias": (
        {"linear_bias": torch.ones(5).half()},
        "linear_bias must have input's dtype float32, got float16",
    ),
    "shape of weight": ({"weight": torch.ones(1)}, "weight must have the shape (5,), one entry a class, got (1,)"),
    "dtype of weight": ({"weight": torch.ones(5).long()}, "weight must be floating-point, got int64"),
    "reduction": ({"reduction": "avg"}, 'reduction must be "none", "mean" or "sum", got "avg"'),
    "label_smoothing": ({"label_smoothing": 1.5}, "label_smoothing must be in [0, 1], got 1.5"),
    "softcap": ({"softcap": 0.0}, "softcap must be a positive number or None, got 0.0"),
    "logit_scale": ({"logit_scale": float("nan")}, "logit_scale must be finite, got nan"),
    "z_loss": ({"z_loss": -0.1}, "z_loss must be a number >= 0, got -0.1"),
    "shift": (
        {"input": X[0, 0], "target": Y[0, 0], "shift": True},
        "input must have the shape (..., T, D) with T >= 1 for shift=1, got (4,)",
    ),
    "shift beyond the last step": (
        {"shift": 4},
        "input must have the shape (..., T, D) with T >= 4 for shift=4, got (2, 3, 4)",
    ),
    "shift back": ({"shift": -1}, "shift must be a number of steps >= 0, got -1"),
    "grad_filter_eps": (
        {"grad_filter_eps": -0.01},
        "grad_filter_eps must be None or a number >= 0 and < 1, got -0.01",
    ),
    "grad_filter_eps of 1": (
        {"grad_filter_eps": 1.0},
        "grad_filter_eps must be None or a number >= 0 and < 1, got 1.0",
    ),
    "grad_filter_eps that is no number": (
        {"grad_filter_eps": float("nan")},
        "grad_filter_eps must be None or a number >= 0 and < 1, got nan",
    ),
    "memory_budget": ({"memory_budget": 0}, "memory_budget must be at least 1 byte, got 0"),
    "accumulate_dtype": (
        {"accumulate_dtype": torch.bfloat16},
        "accumulate_dtype must be None or float32 for float32 input, got bfloat16",
    ),
    "accumulate_dtype of bfloat16": (
        {"input": X.bfloat16(), "linear_weight": W.bfloat16(), "accumulate_dtype": torch.float16},
        "accumulate_dtype must be None or bfloat16 or float32 for bfloat16 input, got float16",
    ),
}


# As in torch.nn.functional; all others are RuntimeErrors.
VALUE_ERRORS = ("shape of target", "reduction", "rows of probabilities")


def error_of(name: str, sentence: str) -> Any:
    return pytest.raises(ValueError if name in VALUE_ERRORS else RuntimeError, match=re.escape(OP + sentence))


def split(changes: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    call = {"input": X, "linear_weight": W, "target": Y} | changes
    return tuple(call.pop(name) for name in ("input", "linear_weight", "target")), call


@pytest.mark.parametrize("name", TABLE)
def test_sentences(name: str) -> None:
    changes, sentence = TABLE[name]
    args, options = split(changes)
    expected = error_of(name, sentence)
    with expected:
        linear_cross_entropy(*args, **options)
    with expected:
        torch.ops.dcs.linear_cross_entropy.default(*args, **options)
    with expected:
        linear_cross_entropy(args[0], args[1], args[2], return_lse=True, **options)
    if args[1].layout is torch.strided:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in args]
            tensors = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in options.items()}
            with expected:
                torch.ops.dcs.linear_cross_entropy.default(*fakes, **tensors)


@pytest.mark.parametrize("name", ["features", "shape of target", "reduction", "grad_filter_eps", "shift"])
def test_sentences_where_a_gradient_is_recorded(name: str) -> None:
    changes, sentence = TABLE[name]
    args, options = split(changes)
    with error_of(name, sentence):
        linear_cross_entropy(leaf(args[0]), *args[1:], **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    for op in (linear_cross_entropy, linear_log_probs):
        with pytest.raises(RuntimeError, match=f"^{op.__name__}: input must be a dense tensor, got a nested one$"):
            op(nested, W, Y)
    with pytest.raises(
        RuntimeError, match=r"linear_cross_entropy: logit_scale must be a dense tensor, got a nested one"
    ):
        linear_cross_entropy(X, W, Y, logit_scale=nested)


def test_log_probs_have_no_filter() -> None:
    with pytest.raises(TypeError, match="grad_filter_eps"):
        linear_log_probs(X, W, Y, grad_filter_eps=2**-12)  # type: ignore[call-arg]


def test_options_of_torch_are_refused() -> None:
    with pytest.raises(RuntimeError, match="linear_cross_entropy: options must be None, got object: memory_budget"):
        linear_cross_entropy(X, W, Y, options=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input": [1.0]}, "input must be a tensor, got list"),
        ({"target": 3}, "target must be a tensor, got int"),
        ({"linear_weight": None}, "linear_weight must be a tensor, got NoneType"),
        ({"linear_bias": 0.5}, "linear_bias must be a tensor or None, got float"),
        ({"weight": [1.0] * 5}, "weight must be a tensor or None, got list"),
        ({"memory_budget": 1e9}, "memory_budget must be an integer or None, got float"),
        ({"ignore_index": 0.5}, "ignore_index must be an integer or None, got float"),
        ({"accumulate_dtype": "float32"}, "accumulate_dtype must be a torch.dtype or None, got str"),
        ({"grad_filter_eps": "auto"}, "grad_filter_eps must be a number or None, got str"),
        ({"shift": "yes"}, "shift must be an integer or a bool, got str"),
        ({"shift": 2.5}, "shift must be an integer or a bool, got float"),
        ({"label_smoothing": "0.1"}, "label_smoothing must be a number, got str"),
        ({"softcap": "30"}, "softcap must be a number or None, got str"),
        ({"logit_scale": "2"}, "logit_scale must be a number or a tensor of one, got str"),
        ({"z_loss": None}, "z_loss must be a number, got NoneType"),
        ({"zero_if_empty": "yes"}, "zero_if_empty must be a bool, got str"),
        ({"zero_if_empty": None}, "zero_if_empty must be a bool, got NoneType"),
        ({"zero_if_empty": 3}, "zero_if_empty must be a bool, got 3"),
        ({"return_lse": "no"}, "return_lse must be a bool, got str"),
        ({"return_predictions": [1]}, "return_predictions must be a bool, got list"),
        ({"return_z_loss": torch.ones(2)}, "return_z_loss must be a bool, got Tensor"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_other_types(changes: Any, sentence: str) -> None:
    args, options = split(changes)
    with pytest.raises(TypeError, match=re.escape(OP + sentence)):
        linear_cross_entropy(*args, **options)


@pytest.mark.parametrize("wrong", [5, -1, -101, 2**40])
def test_out_of_range_targets(wrong: int) -> None:
    target = Y.clone()
    target[1, 1] = wrong
    sentence = re.escape(f"target must be in [0, 4] or ignore_index (-100), got {wrong}")
    for x in (X, leaf(X)):
        for run in (linear_cross_entropy, torch.ops.dcs.linear_cross_entropy):
            with pytest.raises(IndexError, match=OP + sentence):
                run(x, W, target)
        for options in ({}, {"need_entropy": False}, {"return_lse": True}):
            for ids in (target, target.unsqueeze(-1).expand(2, 3, 2)):
                with pytest.raises(IndexError, match=f"^linear_log_probs: {sentence}"):
                    linear_log_probs(x, W, ids, **options)
        for reduction in ("mean", "none"):
            with pytest.raises(IndexError, match=f"^linear_policy_loss: {sentence}"):
                linear_policy_loss(x, W, target, lambda log_probs, _: -log_probs, reduction=reduction)
    with pytest.raises(IndexError, match=sentence):
        linear_cross_entropy(X, W, target, weight=torch.ones(5), reduction="none")
    linear_cross_entropy(X, W, target, ignore_index=wrong)


@pytest.mark.parametrize("reduction", [None, 3, [1]])
def test_a_reduction_is_a_value_error(reduction: Any) -> None:
    """Of any type, as torch.nn.functional's."""
    calls: tuple[Any, ...] = (
        lambda: linear_cross_entropy(X, W, Y, reduction=reduction),
        lambda: linear_kl_div(X, W, X, W, reduction=reduction),
        lambda: linear_policy_loss(X, W, Y, lambda log_probs, _: -log_probs, reduction=reduction),
    )
    with pytest.raises(ValueError, match=re.escape(f"{reduction} is not a valid value for reduction")):
        functional.cross_entropy(X[0], Y[0], reduction=reduction)
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(f'reduction must be "none", "mean" or "sum", got {reduction}')):
            call()


def test_uint8_targets() -> None:
    """As F.cross_entropy takes them."""
    target = torch.tensor([[0, 4, 2], [3, 1, 1]])
    calls: tuple[Any, ...] = (
        lambda y: linear_cross_entropy(X, W, y, ignore_index=1),
        lambda y: linear_log_probs(X, W, y)[0],
        lambda y: linear_policy_loss(X, W, y, lambda log_probs, _: -log_probs, ignore_index=1),
        lambda y: linear_kl_div(X, W, X * 2, W, target=y, ignore_index=1),
    )
    for call in calls:
        torch.testing.assert_close(call(target.byte()), call(target), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="target must be int64"):
        calls[0](target.int())


def test_shifted_targets_are_checked_where_they_are_used() -> None:
    target = Y.clone()
    target[0, 0] = 77
    linear_cross_entropy(X, W, target, shift=True)
    target[0, 2] = 78
    with pytest.raises(IndexError, match="got 78"):
        linear_cross_entropy(X, W, target, shift=True)


def test_log_probs_sentences() -> None:
    with pytest.raises(RuntimeError, match=re.escape("linear_log_probs: target must be int64 (class indices), got")):
        linear_log_probs(X, W, Q)
    with pytest.raises(RuntimeError, match=r"linear_log_probs: softcap must be a positive number or None, got -1\.0"):
        linear_log_probs(X, W, Y, softcap=-1.0)
    with pytest.raises(TypeError, match="linear_log_probs: input must be a tensor, got list"):
        linear_log_probs([1.0], W, Y)  # type: ignore[arg-type]
    for target in (Q, Y.int()):
        with pytest.raises(RuntimeError, match=r"^linear_log_probs: target must be int64 \(class indices\), got \w+$"):
            linear_log_probs(X, W, target)
    for name in ("need_entropy", "return_lse", "return_predictions", "return_argmax_log_prob"):
        for value, found in (("no", "str"), (None, "NoneType"), (3, "3"), (2.5, "float"), (torch.int8, "dtype")):
            with pytest.raises(TypeError, match=f"^linear_log_probs: {name} must be a bool, got {found}$"):
                linear_log_probs(X, W, Y, **{name: value})
        for value in (numpy.True_, 1, 0, numpy.False_):
            linear_log_probs(X, W, Y, **{name: value})


def test_the_row_op_is_not_differentiable() -> None:
    logits = leaf(torch.ones(2, 5)).clone()
    with pytest.raises(RuntimeError, match="logits must not require a gradient"):
        torch.ops.dcs._cross_entropy_rows_(
            logits, Y[0, :2], None, None, None, None, None, -100, 0.0, 0.0, 1.0, 0.0, True, False, False
        )


def test_gradients_in_forward_need_a_reduced_loss() -> None:
    with pytest.raises(RuntimeError, match='reduction must be "mean" or "sum" for gradients in forward, got "none"'):
        torch.ops.dcs._linear_cross_entropy_forward(
            X, W, Y, None, None, *Options(reduction="none"), True, False, False, False, False
        )


def test_meta_tensors() -> None:
    loss, lse, predictions = linear_cross_entropy(
        X.to("meta"), W.to("meta"), Y.to("meta"), shift=True, reduction="none", return_lse=True, return_predictions=True
    )
    assert loss.shape == lse.shape == predictions.shape == (2, 2)
    assert loss.device.type == "meta"
