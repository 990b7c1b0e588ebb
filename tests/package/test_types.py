"""The types that a user's checker sees: mypy over a call of every public name."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import torch_dcs_ops
from torch_dcs_ops.integrations import cleanrl, gymnasium, stable_baselines3, tianshou, verl

ROOT = Path(torch_dcs_ops.__file__).parents[1]
CODE = """
from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type
from torch import Tensor
import torch_dcs_ops
from torch_dcs_ops import compile, distributed, nn, returns
from torch_dcs_ops.integrations import cleanrl, gymnasium, stable_baselines3, tianshou, verl

x, w, t = torch.randn(2, 3), torch.randn(4, 3), torch.zeros(2, dtype=torch.long)
flag = bool(x.any())
Two = tuple[Tensor, Tensor]

loss = torch_dcs_ops.linear_cross_entropy
assert_type(loss(x, w, t), Tensor)
assert_type(loss(x, w, t, reduction="sum", softcap=30.0, shift=False, linear_bias=None), Tensor)
assert_type(loss(x, w, t, return_lse=True), Two)
assert_type(loss(x, w, t, return_predictions=True, z_loss=1e-4), Two)
assert_type(loss(x, w, t, return_lse=True, return_predictions=True), tuple[Tensor, Tensor, Tensor])
assert_type(loss(x, w, t, return_lse=flag), Tensor | tuple[Tensor, ...])
assert_type(loss(x, w, t, return_z_loss=True, shift=2, zero_if_empty=True), Two)
assert_type(loss(x, w, t, return_z_loss=True, return_lse=True), tuple[Tensor, Tensor, Tensor])
assert_type(loss(x, w, t, return_z_loss=True, return_predictions=True), tuple[Tensor, Tensor, Tensor])
four = loss(x, w, t, return_z_loss=True, return_lse=True, return_predictions=True)
assert_type(four, tuple[Tensor, Tensor, Tensor, Tensor])
assert_type(loss(x, w, t, return_z_loss=True, return_lse=flag), tuple[Tensor, ...])
loss(x, w, t, soft_cap=30.0)  # error
loss(x, w, t, softcap="30")  # error

assert_type(nn.LinearCrossEntropyLoss(3, 4)(x, t), Tensor)
assert_type(nn.LinearCrossEntropyLoss(3, 4, bias=True, shift=True, return_lse=True)(x, t), Two)
assert_type(nn.LinearCrossEntropyLoss(3, 4, return_predictions=True)(x, t), Two)
both = nn.LinearCrossEntropyLoss(3, 4, return_lse=True, return_predictions=True)
assert_type(both.forward(x, t), tuple[Tensor, Tensor, Tensor])
module: nn.LinearCrossEntropyLoss = nn.LinearCrossEntropyLoss(3, 4, device="cpu", dtype=torch.float64)
nn.LinearCrossEntropyLoss(3, 4, linear_bias=None)  # error

assert_type(torch_dcs_ops.discounted_cumsum(x, 0.9, direction="left", reset=x > 0), Tensor)
assert_type(torch_dcs_ops.discounted_cumsum_left(x, x), Tensor)
assert_type(torch_dcs_ops.discounted_cumsum_right(x, 1), Tensor)
assert_type(torch_dcs_ops.cumsum(x, 0, reverse=True), Tensor)
log_probs = torch_dcs_ops.linear_log_probs
assert_type(log_probs(x, w, t), Two)
assert_type(log_probs(x, w, t, need_entropy=False, softcap=30.0), Tensor)
assert_type(log_probs(x, w, t, return_lse=True), Tensor | tuple[Tensor, ...])
assert_type(torch_dcs_ops.linear_top_k(x, w, 2), Two)
policy = torch_dcs_ops.linear_policy_loss
assert_type(policy(x, w, t, lambda log_probs, entropy, a, b: a * log_probs, x, 2.0, softcap=30.0), Tensor)
assert_type(policy(x, w, t, lambda log_probs, entropy: log_probs, return_statistics=True), tuple[Tensor, ...])
assert_type(policy(x, w, t, torch.sub, return_statistics=flag), Tensor | tuple[Tensor, ...])
policy(x, w, t, lambda log_probs, entropy: 1.0)  # error
policy(x, w, t, torch.sub, advantages=x)  # error
assert_type(torch_dcs_ops.linear_kl_div(x, w, x, w, direction="jsd", beta=0.1, teacher_softcap=30.0), Tensor)
assert_type(torch_dcs_ops.log_bmm(x, w.t()), Tensor)
assert_type(torch_dcs_ops.max_bmm(x, w.t()), Two)
assert_type(torch_dcs_ops.sample_bmm(x, w.t()), Tensor)
assert_type(torch_dcs_ops.softmax(x), Tensor)
assert_type(torch_dcs_ops.__version__, str)
assert_type(str(torch_dcs_ops.info()), str)
compile.enable()
compile.disable()
found = compile.explain(lambda x: x)(x)
assert_type(str(found.losses[0].reason), str)
assert_type(found.graphs, int)
assert_type(compile.is_enabled(), bool)

group = torch.distributed.group.WORLD
assert group is not None
shared = distributed.vocab_parallel_linear_cross_entropy
assert_type(shared(x, w, t, group=group), Tensor)
assert_type(shared(x, w, t, group=group, return_lse=True, softcap=30.0), Two)
assert_type(shared(x, w, t, group=group, return_predictions=True), Two)
assert_type(shared(x, w, t, group=group, return_lse=True, return_predictions=True), tuple[Tensor, Tensor, Tensor])
assert_type(shared(x, w, t, group=group, return_lse=flag), Tensor | tuple[Tensor, ...])
shared(x, w, t)  # error
distributed.vocab_parallel_linear_kl_div, distributed.vocab_parallel_linear_log_probs
distributed.sequence_parallel_gae, distributed.context_parallel_targets
assert_type(distributed.sequence_parallel_discounted_cumsum(x, 0.9, group=group), Tensor)

a = x.numpy()
assert_type(cleanrl.compute_advantages(x, x, x, x, x), Two)
reveal = cleanrl.compute_advantages(a, x, a, a, x)
first: np.ndarray[Any, Any] = reveal[0]
assert_type(gymnasium.next_step_mask(x, x), Tensor)
mask: np.ndarray[Any, Any] = gymnasium.next_step_mask(a, a, time_dim=1)
assert_type(tianshou.gae(a, a, x, a, 0.99, 0.95), Tensor)
gymnasium.next_step_mask([0, 1], x)  # error
assert_type(verl.linear_cross_entropy(x, w, t), Two)
stable_baselines3.compute_returns_and_advantage

assert_type(returns.gae(x, x, next_values=x, terminated=None), Two)
assert_type(returns.vtrace(x, x, x, next_values=x, terminated=None), Two)
assert_type(returns.discounted_returns(x, 0.9), Tensor)
assert_type(returns.td_lambda_returns(x, next_values=x, terminated=None), Tensor)
assert_type(returns.n_step_returns(x, n=3, next_values=x, terminated=None), Tensor)
assert_type(returns.retrace_returns(x, x, x, next_values=x, terminated=None), Tensor)
assert_type(returns.upgo_returns(x, x, next_values=x, terminated=None), Tensor)
"""


@pytest.mark.slow  # and part of `make lint`
def test_types(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(CODE)
    # torch's types are looked at once: 15 s, and 2 s from the second run on.
    cache = getattr(pytestconfig, "cache", None)  # none under -p no:cacheprovider
    cache_folder = tmp_path if cache is None else cache.mkdir("mypy")
    command = [
        sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent", "--config-file=",
        f"--cache-dir={cache_folder}", str(snippet),
    ]  # fmt: skip
    variables = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path)
    found = {int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line}
    expected = {number for number, line in enumerate(CODE.splitlines(), 1) if line.endswith("# error")}
    assert found == expected, result.stdout + result.stderr


MODULES = (
    *(torch_dcs_ops, torch_dcs_ops.compile, torch_dcs_ops.distributed, torch_dcs_ops.nn, torch_dcs_ops.returns),
    *(cleanrl, gymnasium, stable_baselines3, tianshou, verl),  # whose libraries are not imported with them
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_names_are_documented_and_typed(module: types.ModuleType) -> None:
    public = [getattr(module, name) for name in module.__all__]
    functions = [entry for entry in public if isinstance(entry, types.FunctionType)]
    assert all(entry.__doc__ for entry in public)
    for function in functions:
        signature = inspect.signature(function)
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        for annotation in (*annotations, signature.return_annotation):
            assert annotation is not inspect.Signature.empty, function
            assert not re.search(r"\bAny\b", str(annotation)) or function is torch_dcs_ops.info, (
                function
            )  # nested dicts


def test_the_snippet_has_every_public_name() -> None:
    used = {node.attr for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.Attribute)}
    own = (torch_dcs_ops, torch_dcs_ops.compile, torch_dcs_ops.distributed, torch_dcs_ops.nn, torch_dcs_ops.returns)
    public = {name for module in own for name in module.__all__}
    modules = {name for name in public if isinstance(getattr(torch_dcs_ops, name, None), types.ModuleType)}
    assert public - modules <= used
