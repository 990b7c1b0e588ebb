"""Compiled graphs that save the logits' gradient for their backward, as a budget lets them: which ones, and how."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.ops.linear_cross_entropy import compiled as compiled_module
from torch_dcs_ops.ops.linear_cross_entropy.plan import make_plan, prefers_saved_gradient
from torch_dcs_ops.reference.linear_cross_entropy.loss import Options

from linear_cross_entropy.oracle import Problem, assert_within_budget, gradients, leaf, make, oracle, relative_error
from linear_cross_entropy.recorder import Recorder
from support.selection import slow

BF16 = torch.bfloat16
LOGITS = "dcs._linear_cross_entropy_logits.default"
ROOM = 1 << 20  # bytes, for all logits
saving = functools.partial(linear_cross_entropy, memory_budget=ROOM)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "bias, smoothing, softcap": {"linear_bias": True, "label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.7},
    "class weights, z_loss": {"weight": True, "z_loss": 0.1},
    "shift, ignore_index": {"shift": True, "ignore_index": -3},
    "probabilities": {"probabilities": True},
}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _cpus_save_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is the same on every device and for every size."""
    monkeypatch.setattr(compiled_module, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(compiled_module, "prefers_saved_gradient", lambda *_: True)


def loss_of(problem: Problem, options: dict[str, Any], function: Any) -> Any:
    options = dict(options)
    target = problem.probabilities if options.pop("probabilities", False) else problem.target
    has_bias = options.pop("linear_bias", False)
    weight = problem.weight if options.pop("weight", False) else None

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        wide = {"linear_bias": b if has_bias else None, "weight": None if weight is None else weight.to(row_dtype(x))}
        result = function(x, w, target.to(row_dtype(x)) if target.is_floating_point() else target, **wide, **options)
        value: Tensor = result[0] if isinstance(result, tuple) else result
        return value * 2 + 0 * b.sum()

    return loss


def row_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_value
def test_gradients(device: str, name: str, ignored: float) -> None:
    ignore_index = OPTIONS[name].get("ignore_index", -100)
    problem = make((3, 40), 32, 101, BF16, device, ignored=ignored, ignore_index=ignore_index)
    leaves = [leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)]
    recorder = Recorder()
    compiled = torch.compile(loss_of(problem, OPTIONS[name], saving), fullgraph=True, backend=recorder)
    by_torch = loss_of(problem, OPTIONS[name], oracle)
    losses, found = [], []
    for run, dtype in ((compiled, BF16), (by_torch, BF16), (by_torch, torch.float64)):
        operands = [leaf(tensor.to(dtype)) for tensor in leaves]
        losses.append(run(*operands))
        found.append(gradients(losses[-1], *operands))
    assert recorder.ops == [[LOGITS], []]
    torch.testing.assert_close(losses[0].double(), losses[2], rtol=4e-3, atol=0)
    assert [tensor.dtype for tensor in found[0]] == [BF16] * 3
    has_bias = OPTIONS[name].get("linear_bias", False)
    assert_within_budget(*found, factors=(1.2, 1.2, 1.2 if has_bias else None))


@pytest.mark.parametrize("upstream", [slow(1.0), -0.3])
def test_through_inductor(device: str, upstream: float) -> None:
    """A layer before it, a gradient of the loss other than 1, and the same weight used twice."""
    problem = make((64,), 32, 101, BF16, device)

    def step(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        value: Tensor = saving(torch.tanh(x), w, y) + (w[:5] ** 2).sum().float()
        return value

    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    exact_leaves = [leaf(tensor.double()) for tensor in leaves]
    exact_loss = (
        oracle(torch.tanh(exact_leaves[0]), exact_leaves[1], problem.target)[0] + (exact_leaves[1][:5] ** 2).sum()
    )
    exact = gradients(exact_loss, *exact_leaves, grad=exact_loss.new_tensor(upstream))
    loss = torch.compile(step, fullgraph=True)(*leaves, problem.target)
    for found, wanted in zip(gradients(loss, *leaves, grad=loss.new_tensor(upstream)), exact, strict=True):
        assert relative_error(found, wanted) <= 5 * 2**-9  # tanh and its derivative are rounded as well


def test_every_row_ignored(device: str) -> None:
    problem = make((8,), 32, 101, BF16, device, ignored=2.0)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    compiled = torch.compile(
        lambda x, w: saving(x, w, problem.target, reduction="sum"), fullgraph=True, backend="aot_eager"
    )
    assert not any(gradient.any() for gradient in gradients(compiled(*leaves), *leaves))


def test_the_lse_has_a_gradient_as_well(device: str) -> None:
    """The saved gradient is of the loss only: then all of them are made anew."""
    problem = make((40,), 32, 101, BF16, device)

    def step(x: Tensor, w: Tensor) -> Tensor:
        loss, lse = saving(x, w, problem.target, return_lse=True)
        value: Tensor = loss + lse.square().mean()
        return value

    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled(*leaves), *leaves), gradients(step(*leaves), *leaves))


REFUSED: dict[str, Any] = {
    "no budget": {"memory_budget": None},
    "a budget for fewer rows": {"memory_budget": 40 * 104 * 2 - 1},
    "accumulate_dtype": {"accumulate_dtype": BF16},
    "grad_filter_eps": {"grad_filter_eps": 0.5},
    "logits_dtype": {"logits_dtype": torch.float32},
}


def test_a_budget_that_just_holds_them(device: str) -> None:
    """Their rows are padded to 16 bytes."""
    problem = make((40,), 32, 101, BF16, device)
    recorder = Recorder()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=recorder)
    compiled(leaf(problem.input), leaf(problem.linear_weight), problem.target, memory_budget=40 * 104 * 2).backward()
    assert recorder.ops == [[LOGITS], []]


@pytest.mark.parametrize("name", [*REFUSED, "float32", "float16", "frozen weight", "frozen input", "dynamic"])
def test_others_have_their_gradients_in_forward(device: str, name: str) -> None:
    dtype = getattr(torch, name) if name.startswith("float") else BF16
    problem = make((40,), 32, 101, dtype, device)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    if name.startswith("frozen"):
        (w if name.endswith("weight") else x).requires_grad_(False)
    recorder = Recorder()
    compiled = torch.compile(saving, fullgraph=True, backend=recorder, dynamic=name == "dynamic")
    compiled(x, w, problem.target, **REFUSED.get(name, {})).backward()
    assert recorder.ops == [["dcs._linear_cross_entropy_forward.default"], []]


def test_eager_calls_have_their_gradients_in_forward(device: str) -> None:
    problem = make((40,), 32, 101, BF16, device)
    loss = saving(leaf(problem.input), leaf(problem.linear_weight), problem.target)
    saved = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert (40, 101) not in [tuple(tensor.shape) for tensor in saved if tensor is not None]


@pytest.mark.parametrize(
    ("rows", "features", "saved"),
    [
        (1024, 4096, False),  # a single chunk: nothing is summed
        (8192, 4096, False),  # "shared" has a single product as well
        (8192, 2048, True),
        (8320, 2048, False),  # more than a sum of 2·D rows and a chunk of 4096
        (9472, 4096, True),
        (9728, 4096, False),
    ],
)
def test_which_plans_save_the_gradient(rows: int, features: int, saved: bool) -> None:
    plan = make_plan(rows, features, 128256, BF16, BF16, "cuda", need_weight_grad=True)
    assert prefers_saved_gradient(rows, features, plan) == saved


def test_opcheck(device: str) -> None:
    problem = make((4, 10), 32, 101, BF16, device)
    options = Options()
    arguments = (problem.input, problem.linear_weight, problem.target, problem.linear_bias, problem.weight, *options)
    for wanted in (False, True):
        opcheck(torch.ops.dcs._linear_cross_entropy_logits.default, (*arguments, wanted, wanted))


def test_calls_that_have_no_gradient_to_save() -> None:
    problem = make((4,), 6, 11, BF16)
    options = (*Options()[1:], False, False)
    operands = (problem.linear_weight, problem.target, None, None)
    op = torch.ops.dcs._linear_cross_entropy_logits.default
    with pytest.raises(RuntimeError, match=r'reduction must be "mean" or "sum" .* got "none"'):
        op(problem.input, *operands, "none", *options)
    with pytest.raises(RuntimeError, match="must not require a gradient"):
        op(leaf(problem.input), *operands, "mean", *options)
    with pytest.raises(RuntimeError, match=r"logits_dtype must be None or input's dtype .* got float32"):
        op(problem.input, *operands, *Options(logits_dtype=torch.float32), False, False)


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    problem = make((40,), 32, 101, BF16)
    leaves = [leaf(problem.input), leaf(problem.linear_weight)]
    compiled = torch.compile(lambda x, w: saving(x, w, problem.target), backend="aot_eager")
    gradients(compiled(*leaves), *leaves)
    with FlopCounterMode(display=False) as counter:
        gradients(compiled(*leaves), *leaves)
    assert counter.get_total_flops() == 3 * 2 * math.prod((40, 32, 101))
