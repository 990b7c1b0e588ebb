"""opcheck, torch.compile, torch.export and AOTInductor of log_bmm, max_bmm and sample_bmm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from torch_dcs_ops import log_bmm, max_bmm, sample_bmm

from log_bmm.oracle import INF, LAYOUTS, naive
from support.packages import load_package
from support.selection import slow

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OPS = torch.ops.dcs


def check(op: Any, *args: Any) -> None:
    result = opcheck(op, args)
    assert set(result.values()) == {"SUCCESS"}, result
    assert len(result) == 4


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.parametrize("layout", ["contiguous", slow("permuted"), slow("expanded")])
def test_opcheck_of_layouts(device: str, layout: str) -> None:
    a = LAYOUTS[layout](draw(2, 3, 4, device=device)).requires_grad_()
    b = LAYOUTS[layout](draw(2, 4, 5, device=device)).requires_grad_()
    uniforms = LAYOUTS[layout](torch.rand(2, 3, 5, device=device))
    check(OPS.log_bmm.default, a, b)
    check(OPS.max_bmm.default, a, b)
    check(OPS.sample_bmm.default, a, b, uniforms)
    check(OPS._log_bmm.default, a, b, "highest")
    _, log_s = OPS._log_bmm(a.detach(), b.detach(), "highest")
    y = LAYOUTS[layout](draw(2, 3, 5, device=device)).requires_grad_()
    check(OPS._log_bmm_backward.default, y, a, b, log_s, "highest", True, True)
    over = ["contiguous", "permuted", "expanded"].index(layout)
    check(OPS._log_bmm_product.default, a, b, log_s, a.detach() + 1, y, b.detach() + 1, over)
    check(OPS._max_bmm.default, a, b)
    check(OPS._sample_bmm.default, a, b, uniforms)


@pytest.mark.parametrize(
    ("first", "second"),
    [((4,), (4,)), slow((6, 3, 4), (4, 5)), ((6, 1, 3, 4), (2, 4, 5)), slow((0, 3, 4), (0, 4, 5)), ((2, 3, 0), (0, 5)),
     slow((1, 1), (1, 1))],
    ids=str,
)  # fmt: skip
def test_opcheck_of_shapes(device: str, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a, b = draw(*first, device=device).requires_grad_(), draw(*second, device=device).requires_grad_()
    check(OPS.log_bmm.default, a, b)
    if first[-1]:
        check(OPS.max_bmm.default, a, b)
    check(OPS.sample_bmm.default, a, b, torch.rand(torch.matmul(a, b).shape, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float64)])
def test_opcheck_of_dtypes(device: str, dtype: torch.dtype) -> None:
    a = draw(2, 3, 4, device=device, dtype=dtype).requires_grad_()
    b = draw(2, 4, 5, device=device, dtype=dtype).requires_grad_()
    check(OPS.log_bmm.default, a, b)
    check(OPS.max_bmm.default, a, b)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    check(OPS.sample_bmm.default, a, b, torch.rand(2, 3, 5, device=device, dtype=wide))


def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = max_bmm(a, b)
    return log_bmm(2 * a, b).sin().sum() + values.cos().sum(), indices


@pytest.mark.parametrize(
    ("dynamic", "backend"), [slow(False, "aot_eager"), (True, "aot_eager"), slow(True, "inductor")]
)
def test_training(device: str, dynamic: bool, backend: str) -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (4, 7):
        a, b = draw(2, 3, n, 5, device=device).requires_grad_(), draw(3, 5, n + 1, device=device).requires_grad_()
        (total, indices), (right, others) = compiled(a, b), step(a, b)
        torch.testing.assert_close(total, right)
        assert torch.equal(indices, others)
        torch.testing.assert_close(torch.autograd.grad(total, (a, b)), torch.autograd.grad(right, (a, b)))


def test_one_graph_serves_all_sizes(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: log_bmm(a, b).exp(), fullgraph=True, dynamic=True, backend=counter)
    for n in (3, 4, 9, 20):
        a, b = draw(n, n + 1, n + 2, device=device), draw(n, n + 2, n + 3, device=device)
        torch.testing.assert_close(compiled(a, b), naive(a, b).exp())
    assert counter.frame_count == 1


def test_samples_in_a_graph(device: str) -> None:
    a, b = draw(3, 4, device=device), draw(4, 5, device=device)
    compiled = torch.compile(lambda a, b: sample_bmm(a, b) + 1, fullgraph=True)
    drawn = compiled(a, b)
    assert drawn.shape == (3, 5)
    assert bool(((drawn >= 1) & (drawn <= 4)).all())


def test_transforms_inside_a_compiled_function(device: str) -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return log_bmm(a, b).pow(3).sum()

    a, b = draw(2, 3, 4, device=device, dtype=torch.float64), draw(2, 4, 5, device=device, dtype=torch.float64)
    for function in (
        torch.func.vmap(torch.func.grad(loss, (0, 1))),
        lambda a, b: torch.func.jvp(loss, (a, b), (a + 1, b)),
    ):
        torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(a, b), function(a, b))


class Chain(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        return log_bmm(a, b), *max_bmm(a, b), sample_bmm(a, torch.zeros_like(b))


def exported(device: str) -> torch.export.ExportedProgram:
    batch, rows = torch.export.Dim("batch", min=2), torch.export.Dim("rows", min=2)
    args = (draw(2, 4, 5, device=device), draw(2, 5, 6, device=device))
    return torch.export.export(Chain(), args, dynamic_shapes=({0: batch, 1: rows}, {0: batch}))


def check_other_sizes(module: Any, device: str) -> None:
    args = (draw(3, 7, 5, device=device), draw(3, 5, 6, device=device))
    torch.testing.assert_close(tuple(module(*args))[:3], Chain()(*args)[:3])


def test_export(device: str) -> None:
    program = exported(device)
    names = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("dcs.")]
    assert names == ["dcs.log_bmm.default", "dcs.max_bmm.default", "dcs.sample_bmm.default"]
    check_other_sizes(program.module(), device)


@pytest.mark.slow
def test_aot_inductor(device: str, tmp_path: Path) -> None:
    path = torch._inductor.aoti_compile_and_package(exported(device), package_path=str(tmp_path / "chain.pt2"))
    check_other_sizes(load_package(path, device), device)


def test_precision_is_the_caller_s(device: str) -> None:
    """A graph is made again where the setting is another one, not run with the old one."""
    a, b = (draw(2, 40, 40, device=device).requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda a, b: log_bmm(a, b).sum(), fullgraph=True, backend="aot_eager")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            got = torch.autograd.grad(compiled(a, b), (a, b))
            torch.testing.assert_close(got, torch.autograd.grad(log_bmm(a, b).sum(), (a, b)))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_graph() -> None:
    """No case waits for the GPU: underflow, -inf and NaN are dealt with where they are found."""
    from support.cuda_graphs import captured

    a, b = draw(2, 96, 80, device="cuda").mul_(100), draw(2, 80, 64, device="cuda").mul_(100)
    grad, uniforms = draw(2, 96, 64, device="cuda"), torch.rand(2, 96, 64, device="cuda")
    a[0, 3], b[1, :, 4], b[0, 5, 5] = -INF, -INF, torch.nan

    def run() -> list[Tensor]:
        out, log_s = OPS._log_bmm(a, b, "highest")
        gradients = OPS._log_bmm_backward(grad, a, b, log_s, "highest", True, True)
        return [out, *gradients, *OPS._max_bmm(a, b), OPS._sample_bmm(a, b, uniforms)]

    graph, results = captured(run)
    a.copy_(draw(2, 96, 80, device="cuda"))
    graph.replay()
    for result, right in zip(results, run(), strict=True):
        torch.testing.assert_close(result, right, equal_nan=True, rtol=0, atol=0)
