"""logit_scale as a tensor: a factor that is learned, as CLIP's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy, linear_log_probs, linear_top_k
from torch_dcs_ops.nn import LinearCrossEntropyLoss

from linear_cross_entropy.oracle import gradients, leaf, make, relative_error

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "softcap, z_loss": {"softcap": 3.0, "z_loss": 0.1},
    "chunks": {"reduction": "sum", "memory_budget": 200},
}


def expected(x: Tensor, w: Tensor, y: Tensor, b: Tensor, scale: Tensor, options: dict[str, Any]) -> Tensor:
    cap, z_loss = options.get("softcap"), options.get("z_loss", 0.0)
    z = functional.linear(x, w, b) * scale
    z = (z if cap is None else cap * torch.tanh(z / cap)).flatten(0, -2)
    rows = functional.cross_entropy(z, y.flatten(), reduction="none")
    rows = (rows + z_loss * torch.where(y.flatten() >= 0, z.logsumexp(-1), 0).square()).view(y.shape)
    reduction = options.get("reduction", "mean")
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / (y >= 0).sum()}[reduction]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("value", [0.7, -2.0, 0.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(device: str, name: str, value: float, shape: tuple[int, ...]) -> None:
    problem = make(device=device)
    leaves = [leaf(t) for t in (problem.input, problem.linear_weight, problem.linear_bias)]
    x, w, b = leaves
    scale = leaf(torch.full(shape, value, dtype=x.dtype, device=device))
    got = linear_cross_entropy(x, w, problem.target, linear_bias=b, logit_scale=scale, **OPTIONS[name])
    wanted = expected(x, w, problem.target, b, scale, OPTIONS[name])
    torch.testing.assert_close(got, wanted)
    grad = torch.randn_like(got)
    results = [torch.autograd.grad(loss, [*leaves, scale], grad) for loss in (got, wanted)]
    torch.testing.assert_close(*results)


def test_derivatives_and_transforms(device: str) -> None:
    problem = make((3,), 4, 5, device=device)
    scale = torch.tensor(0.8, dtype=torch.float64, device=device)

    def loss(s: Tensor) -> Tensor:
        return linear_cross_entropy(problem.input, problem.linear_weight, problem.target, logit_scale=s)

    def log_probs(s: Tensor) -> Any:
        return linear_log_probs(problem.input, problem.linear_weight, problem.target, logit_scale=s)

    def of_ids(s: Tensor) -> Any:
        ids = problem.target.unsqueeze(1).expand(-1, 2)
        return linear_log_probs(problem.input, problem.linear_weight, ids, logit_scale=s, need_entropy=False)

    def top(s: Tensor) -> Any:
        return linear_top_k(problem.input, problem.linear_weight, 2, logit_scale=s)[0]

    for f in (loss, log_probs, of_ids, top):
        assert gradcheck(f, (leaf(scale),), check_forward_ad=True)
        assert gradgradcheck(f, (leaf(scale),))
    torch.testing.assert_close(func.vmap(func.grad(loss))(scale.expand(2)), func.grad(loss)(scale).expand(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(device: str, dtype: torch.dtype) -> None:
    """A float32 scale beside half-precision operands: the error is of their roundings."""
    problem = make((64,), 16, 50, dtype, device, ignored=0.0)
    scale = leaf(torch.tensor(1.7, device=device))
    loss = linear_cross_entropy(problem.input, problem.linear_weight, problem.target, logit_scale=scale)
    wide = leaf(scale.double())
    exact = functional.cross_entropy(problem.input.double() @ problem.linear_weight.double().t() * wide, problem.target)
    eps = torch.finfo(dtype).eps
    assert loss.dtype == torch.float32
    assert relative_error(loss, exact) < eps
    assert relative_error(*gradients(loss, scale), *gradients(exact, wide)) < 2 * eps


def test_compiled(device: str, fresh_compiler: None) -> None:
    problem = make((5,), 4, 6, torch.float32, device)
    scale = leaf(torch.tensor(0.8, device=device))

    def loss(s: Tensor) -> Tensor:
        return linear_cross_entropy(problem.input, problem.linear_weight, problem.target, logit_scale=s)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled(scale), scale), gradients(loss(scale), scale))


def test_a_parameter_of_the_module(device: str) -> None:
    problem = make((5,), dtype=torch.float32, device=device)
    module = LinearCrossEntropyLoss(7, 13, logit_scale=nn.Parameter(torch.tensor(0.5))).to(device)
    assert {name for name, _ in module.named_parameters()} == {"linear.weight", "logit_scale"}
    module(problem.input, problem.target).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in module.parameters())
    assert "num_classes=13" in repr(module)


def test_sentences() -> None:
    x, w, y = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.long)
    for f in (linear_cross_entropy, linear_log_probs):
        for scale, end in ((torch.ones(2), "of one element, got the shape (2,)"), (torch.tensor(2), "got int64")):
            with pytest.raises(RuntimeError, match=f"^{f.__name__}: logit_scale must be .*{re.escape(end)}$"):
                f(x, w, y, logit_scale=scale)
        with pytest.raises(RuntimeError, match="input must be float16, bfloat16, float32 or float64, got int64"):
            f(x.long(), w, y, logit_scale=torch.tensor(2.0))
    with pytest.raises(RuntimeError, match=r"^LinearCrossEntropyLoss: logit_scale must be"):
        LinearCrossEntropyLoss(3, 4, logit_scale=torch.ones(2))
