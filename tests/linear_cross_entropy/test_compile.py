"""torch.compile(fullgraph=True) and torch.export of linear_cross_entropy: one opaque node, its gradients in forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_dcs_ops import linear_cross_entropy, linear_log_probs, linear_policy_loss, linear_top_k
from torch_dcs_ops.ops.linear_cross_entropy import compiled as saved_for_backward

from linear_cross_entropy.oracle import gradients, leaf, make
from linear_cross_entropy.recorder import Recorder

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "shift": {"shift": True, "reduction": "none", "label_smoothing": 0.1, "z_loss": 0.1},
    "everything": {"reduction": "sum", "softcap": 3.0, "logit_scale": 0.5, "memory_budget": 500, "weight": True},
}


def train_step(options: dict[str, Any]) -> Any:
    options = dict(options)
    weighted = options.pop("weight", False)

    def step(x: Tensor, w: Tensor, b: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        loss, _, predictions = linear_cross_entropy(
            x.tanh(), w, y, linear_bias=b, weight=weight if weighted else None, return_lse=True,
            return_predictions=True, **options,
        )  # fmt: skip
        return loss.sum() * 3 + (predictions == 0).sum() * 0.0

    return step


def check_training(device: str, step: Any, **compile_options: Any) -> None:
    compiled = torch.compile(step, fullgraph=True, **compile_options)
    for lead in ((2, 4), (3, 5), (4, 7)):
        problem = make(lead, 6, 11, torch.float32, device)
        leaves = [leaf(problem.input), leaf(problem.linear_weight), leaf(problem.linear_bias)]
        results = []
        for run in (step, compiled):
            loss = run(*leaves, problem.target, problem.weight)
            results.append([loss, *gradients(loss, *leaves)])
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.each_value
def test_training_step_through_aot_autograd(device: str, name: str, dynamic: bool) -> None:
    check_training(device, train_step(CASES[name]), backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_step_through_inductor(device: str, dynamic: bool) -> None:
    check_training(device, train_step(CASES["shift"]), dynamic=dynamic)


def test_sizes_that_change_compile_twice(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    check_training(device, train_step({}), backend=counter)
    assert counter.frame_count <= 3


def test_log_probs(device: str) -> None:
    def step(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(x, w, y)
        return (log_probs * 2 - entropy).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((4,), (2, 3)):
        problem = make(lead, 6, 11, torch.float32, device)
        x, w = leaf(problem.input), leaf(problem.linear_weight)
        results = [gradients(run(x, w, problem.target), x, w) for run in (step, compiled)]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, ["dcs._linear_cross_entropy_forward.default"], []),
        (
            {"reduction": "none"},
            ["dcs._linear_cross_entropy_forward.default"],
            ["dcs._linear_cross_entropy_backward.default"],
        ),
    ],
    ids=["mean", "none"],
)
def test_graphs(options: Any, forward: list[str], backward: list[str]) -> None:
    """A reduced loss has its gradients formed in the forward graph; nothing of the op is left in the backward's."""
    recorder = Recorder()
    problem = make((4,), 6, 11, torch.float32)
    x, w = leaf(problem.input), leaf(problem.linear_weight)
    step = torch.compile(lambda a, b: linear_cross_entropy(a, b, problem.target, **options).sum(), backend=recorder)
    step(x, w).backward()
    assert recorder.ops == [forward, backward]


def test_inference_keeps_the_public_op() -> None:
    recorder = Recorder()
    problem = make((4,), 6, 11, torch.float32)
    step = torch.compile(lambda a, b: linear_cross_entropy(a, b, problem.target), backend=recorder, fullgraph=True)
    torch.testing.assert_close(step(*problem[:2]), linear_cross_entropy(*problem[:3]))
    assert recorder.ops == [["dcs.linear_cross_entropy.default"]]


def test_out_of_range_targets_in_compiled_code() -> None:
    problem = make((4,), 6, 11, torch.float32, ignored=0.0)
    compiled = torch.compile(lambda x, w, y: linear_cross_entropy(x, w, y), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"target must be in \[0, 10\] or ignore_index \(-100\), got 11"):
        compiled(leaf(problem.input), problem.linear_weight, torch.full_like(problem.target, 11))


def test_functorch_in_compiled_code(device: str) -> None:
    problem = make((4,), 6, 11, torch.float32, device)

    def per_sample(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        def loss(a: Tensor, t: Tensor) -> Tensor:
            value: Tensor = linear_cross_entropy(a.unsqueeze(0), w, t.unsqueeze(0), reduction="sum")
            return value

        grads: Tensor = torch.func.vmap(torch.func.grad(loss))(x, y)
        return grads

    compiled = torch.compile(per_sample, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*problem[:3]), per_sample(*problem[:3]))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.body(x)
        loss = linear_cross_entropy(hidden, self.head.weight, y, linear_bias=self.head.bias, shift=True)
        return loss, linear_log_probs(hidden, self.head.weight, y)


def test_export(device: str) -> None:
    model = Model().to(device)
    problem = make((2, 5), 6, 11, torch.float32, device)
    length = torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(
        model, (problem.input, problem.target), dynamic_shapes={"x": {1: length}, "y": {1: length}}
    )
    for steps in (5, 9):
        other = make((2, steps), 6, 11, torch.float32, device)
        torch.testing.assert_close(program.module()(other.input, other.target), model(other.input, other.target))


LOSSES: dict[str, Any] = {
    "mean": linear_cross_entropy,
    "sum": lambda x, w, y: linear_cross_entropy(x, w, y, reduction="sum"),
    "none": lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none").sum(),
    "log_probs": lambda x, w, y: linear_log_probs(x, w, y, need_entropy=False).sum(),
    "entropy": lambda x, w, y: linear_log_probs(x, w, y)[1].sum(),
    "ids": lambda x, w, y: linear_log_probs(x, w, y.unsqueeze(-1).expand(-1, 2))[0].sum(),
    "top_k": lambda x, w, y: linear_top_k(x, w, 2)[0].sum(),
    "policy": lambda x, w, y: linear_policy_loss(x, w, y, lambda log_probs, entropy: log_probs.exp() - entropy),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.each_value
def test_a_gradient_penalty_is_refused_as_that_of_a_compiled_cross_entropy_is(
    device: str, name: str, frozen: bool
) -> None:
    problem = make((5,), 6, 11, torch.float32, device)
    x, w = leaf(problem.input), problem.linear_weight.clone().requires_grad_(not frozen)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return LOSSES[name](x, w, problem.target)

    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w)
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (value + grad.square().sum()).backward()


def test_a_compiled_backward_takes_an_operand(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that, versions of torch that have no other means refuse a gradient penalty."""
    monkeypatch.setattr(saved_for_backward, "_REFUSES_BY_ITSELF", False)
    problem = make((5,), 6, 11, torch.float32, device)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, problem.target)

    for with_weight in (True, False):
        x, w = leaf(problem.input), problem.linear_weight.clone().requires_grad_(with_weight)
        value = torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")(x, w)
        saved = [t for t in value.grad_fn.saved_tensors if t.requires_grad]  # type: ignore[union-attr]
        assert [t.shape for t in saved] == [w.shape if with_weight else x.shape]
        torch.testing.assert_close(gradients(value, x), gradients(loss(x, w), x))
