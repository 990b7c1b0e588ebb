"""torch.export and AOTInductor of modules with the op, from a packaged artifact, static and with dynamic shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_dcs_ops
from torch_dcs_ops import discounted_cumsum, linear_cross_entropy, linear_kl_div, linear_log_probs, linear_top_k
from torch_dcs_ops.nn import LinearCrossEntropyLoss

from linear_cross_entropy.oracle import make
from support.packages import load_package

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FEATURES, CLASSES = 6, 11


class Evaluation(torch.nn.Module):
    """Loss, lse and predictions of a head with a bias, and a policy's values of the same logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, FEATURES)
        self.head = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.body(x)
        rows = linear_cross_entropy(
            hidden, self.head.weight, y, linear_bias=self.head.bias, shift=True, softcap=20.0, return_lse=True,
            return_predictions=True,
        )  # fmt: skip
        per_token = linear_cross_entropy(hidden, self.head.weight, y, reduction="none", label_smoothing=0.1)
        return (*rows, per_token, *linear_log_probs(hidden, self.head.weight, y))


def problem(steps: int, device: str) -> tuple[Tensor, Tensor]:
    made = make((2, steps), FEATURES, CLASSES, torch.float32, device)
    return made.input, made.target


def exported(
    module: torch.nn.Module, device: str, names: tuple[str, str], dynamic: bool
) -> torch.export.ExportedProgram:
    # From 3: shift's results have a step less, and torch's tracing tells a size of 1 from all others.
    length = torch.export.Dim("length", min=3, max=100)
    shapes = {name: {1: length} for name in names} if dynamic else None
    # A module that is exported for use keeps no graph: its parameters ask for no gradients.
    return torch.export.export(module.to(device).requires_grad_(False), problem(5, device), dynamic_shapes=shapes)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_saved_program(device: str, dynamic: bool, tmp_path: Path) -> None:
    model = Evaluation()
    program = exported(model, device, ("x", "y"), dynamic)
    ops = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("dcs.")]
    assert ops == ["dcs.linear_cross_entropy.aux", "dcs.linear_cross_entropy.default", "dcs.linear_log_probs.default"]
    torch.export.save(program, tmp_path / "loss.pt2")
    loaded = torch.export.load(tmp_path / "loss.pt2").module()
    for steps in (5, 9) if dynamic else (5,):
        torch.testing.assert_close(loaded(*problem(steps, device)), model(*problem(steps, device)))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_aot_inductor(device: str, dynamic: bool, tmp_path: Path) -> None:
    model = Evaluation()
    program = exported(model, device, ("x", "y"), dynamic)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    compiled = load_package(path, device)
    for steps in (5, 9) if dynamic else (5,):
        torch.testing.assert_close(tuple(compiled(*problem(steps, device))), model(*problem(steps, device)))


@pytest.mark.slow
def test_aot_inductor_of_the_loss_module(device: str, tmp_path: Path) -> None:
    model = LinearCrossEntropyLoss(FEATURES, CLASSES, bias=True, shift=True, z_loss=1e-3)
    program = exported(model, device, ("input", "target"), True)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    compiled = load_package(path, device)
    for steps in (4, 9):
        torch.testing.assert_close(compiled(*problem(steps, device)), model(*problem(steps, device)))


class PolicyLoss(torch.nn.Module):
    """Scans and a loss in one module: REINFORCE over the tokens of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, y: Tensor, rewards: Tensor, done: Tensor) -> Any:
        log_probs, entropy = linear_log_probs(x, self.head.weight, y, linear_bias=self.head.bias)
        returns = discounted_cumsum((rewards - 0.5) * 2, 0.9, reset=done) - 0.25
        loss = linear_cross_entropy(x, self.head.weight, y, linear_bias=self.head.bias)
        return -(log_probs * returns).mean() - 0.01 * entropy.mean() + loss


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "enabled"])
def test_aot_inductor_of_both_ops(device: str, enabled: bool, tmp_path: Path) -> None:
    def arguments(steps: int) -> tuple[Tensor, ...]:
        rewards = torch.rand(2, steps, device=device)
        return (*problem(steps, device), rewards, rewards > 0.8)

    model = PolicyLoss().to(device).requires_grad_(False)
    length = torch.export.Dim("length", min=3, max=100)
    program = torch.export.export(model, arguments(5), dynamic_shapes=({1: length},) * 4)
    if enabled:
        torch_dcs_ops.compile.enable()
    try:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "policy.pt2"))
    finally:
        torch_dcs_ops.compile.disable()
    compiled = load_package(path, device)
    for steps in (5, 9):
        values = arguments(steps)
        torch.testing.assert_close(compiled(*values), model(*values))


class Distillation(torch.nn.Module):
    """Log-probabilities at a teacher's classes, and the divergence from it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (torch.nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        top, classes = linear_top_k(x, self.teacher.weight, 3, linear_bias=self.teacher.bias)
        student = self.student.weight
        rows = linear_log_probs(x, student, classes, need_entropy=False, return_lse=True, return_argmax_log_prob=True)
        loss = linear_kl_div(x, student, x, self.teacher.weight, teacher_bias=self.teacher.bias, target=y)
        return (*rows, top, loss, linear_kl_div(x, student, x, self.teacher.weight, reduction="none", direction="jsd"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_saved_distillation(device: str, dynamic: bool, tmp_path: Path) -> None:
    model = Distillation()
    program = exported(model, device, ("x", "y"), dynamic)
    ops = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("dcs.")]
    assert ops == [
        "dcs.linear_top_k.default",
        "dcs.linear_log_probs.full",
        "dcs.linear_kl_div.reduced",
        "dcs.linear_kl_div.default",
    ]
    torch.export.save(program, tmp_path / "distillation.pt2")
    loaded = torch.export.load(tmp_path / "distillation.pt2").module()
    for steps in (5, 9) if dynamic else (5,):
        torch.testing.assert_close(tuple(loaded(*problem(steps, device))), model(*problem(steps, device)))


@pytest.mark.slow
def test_aot_inductor_of_a_distillation(device: str, tmp_path: Path) -> None:
    model = Distillation()
    program = exported(model, device, ("x", "y"), True)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    compiled = load_package(path, device)
    for steps in (5, 9):
        torch.testing.assert_close(tuple(compiled(*problem(steps, device))), model(*problem(steps, device)))
