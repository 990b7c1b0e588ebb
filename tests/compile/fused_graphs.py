"""What the fusing pass makes of a function: Dynamo's graph, rewritten, run in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from torch_dcs_ops.compile.passes import linear_cross_entropy as fusing

from compile.linear_cross_entropy_graphs import Operands, T

LOSS = torch.ops.dcs.linear_cross_entropy.default


def rewritten(function: Callable[..., Any], *, dynamic: bool | None = None, minimum_logits: int = 0) -> Any:
    """`function` as Dynamo traces it, rewritten, run in eager mode; `fused` counts, `graphs` are the rewritten ones."""
    record = SimpleNamespace(fused=0, graphs=[])

    def backend(module: fx.GraphModule, _: Any) -> Any:
        record.fused += sum(found.fused for found in fusing.fuse_linear_cross_entropy(module.graph, minimum_logits))
        module.graph.lint()
        module.recompile()
        record.graphs.append(module.graph)
        return module

    record.run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return record


def assert_same(
    function: Callable[..., Tensor], o: Operands, record: Any, tolerance: float = 1e-12, around: Any = nullcontext,
    lengths: tuple[int, ...] = (T, 4),
) -> None:  # fmt: skip
    for x, y in ((o.x[:, :length], o.y[:, :length]) for length in lengths):
        with around():
            got, expected = record.run(o, x, y), function(o, x, y)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        upstream = torch.randn_like(expected)
        gradients = [torch.autograd.grad(loss, o.leaves(), upstream, allow_unused=True) for loss in (got, expected)]
        for value, wanted in ((got, expected), *zip(*gradients, strict=True)):
            assert (value is None) == (wanted is None)
            if wanted is not None:
                scale = max(1.0, float(wanted.detach().abs().max()))
                torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance * scale)
