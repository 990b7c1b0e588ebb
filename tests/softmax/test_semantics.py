"""dcs::softmax on every device: values, layouts, derivatives of any order, transforms, compilation, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from torch_dcs_ops import softmax

from scan.oracle import LAYOUTS, make
from softmax.oracle import DTYPES, assert_gradient, assert_softmax
from support.packages import load_package
from support.selection import slow

OP = torch.ops.dcs.softmax.default
BACKWARD = torch.ops.dcs._softmax_backward.default
SHAPES = [(), (0,), (1,), (5,), (0, 3), (3, 0), (2, 0, 3), (1, 1), (3, 700), (2, 3, 4), (40, 9)]


def dims(shape: tuple[int, ...]) -> range:
    return range(-max(len(shape), 1), max(len(shape), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for dim in dims(shape):
        x = (4 * make(shape, dtype, device)).requires_grad_()
        y = softmax(x, dim)
        assert y.dtype == dtype
        assert_softmax(y.detach(), x.detach(), dim)
        g = make(shape, dtype, device, seed=3)
        (dx,) = torch.autograd.grad(y, x, g)
        assert_gradient(dx, g, y.detach(), dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device: str, layout: str) -> None:
    """Those of empty_like, for the result and, like torch's accumulated gradients, for input's gradient."""
    x = LAYOUTS[layout](make((3, 4, 5), torch.float32, device)).detach().requires_grad_()
    for dim in range(3):
        y = softmax(x, dim)
        assert y.stride() == torch.empty_like(x).stride()
        assert_softmax(y.detach(), x.detach(), dim)
        g = LAYOUTS[layout](make((3, 4, 5), torch.float32, device, seed=4))
        dx = BACKWARD(g, y.detach(), dim)
        assert dx.stride() == torch.empty_like(y).stride()
        assert_gradient(dx, g, y.detach(), dim)
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_as_torch(device: str, dtype: torch.dtype) -> None:
    x, big, inf = make((9, 12), dtype, device), torch.finfo(dtype).max, float("inf")
    x[0, 3], x[1, 0], x[2] = float("nan"), inf, -inf
    x[3, :-1], x[4, ::2] = -inf, -inf
    x[5], x[6], x[7, 5], x[8, 0] = big, -big, big, -big
    for tensor, dim in ((x, 1), (x.t().contiguous(), 0)):
        y = softmax(tensor, dim)
        assert torch.equal(y.isnan(), torch.softmax(tensor, dim).isnan())
        assert_softmax(y, tensor, dim)


def test_a_constant_offset_changes_nothing(device: str) -> None:
    """No digits are lost to the offset: x is exact beside it."""
    x = torch.randint(-20, 20, (5, 300), device=device).float()
    assert torch.equal(softmax(x + 2**20), softmax(x))


@pytest.mark.parametrize("layout", [name if name in ("permuted", "expanded") else slow(name) for name in LAYOUTS])
def test_opcheck(device: str, layout: str) -> None:
    """All four tests; sizes are made symbolic as well."""
    x = LAYOUTS[layout](make((3, 4, 5), torch.float32, device)).detach().requires_grad_()
    y = LAYOUTS[layout](make((3, 4, 5), torch.float32, device, seed=2).softmax(1)).detach().requires_grad_()
    for op, args in ((OP, (x,)), (OP, (x, 1)), (BACKWARD, (x, y, 1)), (BACKWARD, (y, x, -1))):
        result = opcheck(op, args)
        assert set(result.values()) == {"SUCCESS"}, result
        assert len(result) == 4


@pytest.mark.parametrize("shape", [(), slow((0,)), (0, 5), slow((5, 0)), slow((1, 1))], ids=str)
def test_opcheck_of_degenerate_shapes(device: str, shape: tuple[int, ...]) -> None:
    x = make(shape, torch.bfloat16, device).requires_grad_()
    assert set(opcheck(OP, (x, 0)).values()) == {"SUCCESS"}
    assert set(opcheck(BACKWARD, (x, x.detach(), 0)).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((4,), 0), ((2, 5), -1), ((2, 3, 2), 1), ((0, 2), 1)], ids=str)
def test_gradcheck(device: str, shape: tuple[int, ...], dim: int) -> None:
    x = make(shape, torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: softmax(x, dim), (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda x: softmax(x, dim), (x,), check_fwd_over_rev=True)


def test_gradcheck_of_the_backward(device: str) -> None:
    g, y = (make((2, 4), torch.float64, device, seed=seed).requires_grad_() for seed in (1, 2))
    assert torch.autograd.gradcheck(lambda g, y: BACKWARD(g, y, 0), (g, y), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda g, y: BACKWARD(g, y, 1), (g, y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_differentiated(device: str, dtype: torch.dtype) -> None:
    """It is made of other operations than one that is not, and rounded once as well."""
    x, g = make((3, 50), dtype, device).requires_grad_(), make((3, 50), dtype, device, seed=3)
    y = softmax(x)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    assert dx.requires_grad
    assert_gradient(dx.detach(), g, y.detach(), 1)


def _functions() -> dict[str, Callable[[Callable[..., Tensor]], Callable[[Tensor], Any]]]:
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def loss(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (2 * f(x, -1)).sin().sum()

    return {
        "grad": lambda f: grad(loss(f)),
        "jvp": lambda f: lambda x: jvp(lambda x: f(x, 0), (x,), (x.cos(),)),
        "vjp": lambda f: lambda x: vjp(lambda x: f(x, 0), x)[1](x.cos()),
        "jacrev": lambda f: jacrev(lambda x: f(x, 1)),
        "jacfwd": lambda f: jacfwd(lambda x: f(x, 1)),
        "hessian": lambda f: hessian(loss(f)),
        "jacrev of jacfwd": lambda f: jacrev(jacfwd(loss(f))),
        "third": lambda f: grad(lambda x: grad(lambda x: grad(loss(f))(x).cos().sum())(x).sin().sum()),
        "vmap": lambda f: vmap(lambda x: f(x, 0)),
        "vmap of the last": lambda f: vmap(lambda x: f(x, -1), in_dims=1, out_dims=1),
        "vmap of 0-D": lambda f: vmap(vmap(lambda x: f(x, 0) * x)),
        "vmap of grad": lambda f: vmap(grad(loss(f))),
        "vmap of hessian": lambda f: vmap(hessian(loss(f))),
        "grad of vmap": lambda f: grad(lambda x: vmap(loss(f))(x).sum()),
    }


@pytest.mark.parametrize("name", _functions())
def test_functorch(device: str, name: str) -> None:
    x = make((3, 4), torch.float64, device)
    transform = _functions()[name]
    torch.testing.assert_close(transform(softmax)(x), transform(torch.softmax)(x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("dynamic", "backend"), [(False, "aot_eager"), (True, "inductor")], ids=["static", "dynamic"])
def test_compiled_training(device: str, dynamic: bool, backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (softmax(2 * x, 0) * softmax(x).sin()).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for size in (6, 9, 33) if dynamic else (6,):
        x = make((4, size), torch.float32, device).requires_grad_()
        torch.testing.assert_close(compiled(x), step(x))
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(step(x), x))


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return softmax(x * 2, 0) + softmax(x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export(device: str, dynamic: bool, tmp_path: Path) -> None:
    shapes = {"x": {1: torch.export.Dim("columns", min=2, max=100)}} if dynamic else None
    program = torch.export.export(Module(), (make((3, 5), torch.float32, device),), dynamic_shapes=shapes)
    assert [str(n.target) for n in program.graph.nodes].count("dcs.softmax.default") == 2
    torch.export.save(program, tmp_path / "softmax.pt2")
    loaded = torch.export.load(tmp_path / "softmax.pt2").module()
    for columns in (5, 9) if dynamic else (5,):
        x = make((3, columns), torch.float32, device)
        torch.testing.assert_close(loaded(x), Module()(x))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_aot_inductor(device: str, tmp_path: Path) -> None:
    x = make((3, 5), torch.float32, device)
    program = torch.export.export(Module(), (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "softmax.pt2"))
    torch.testing.assert_close(load_package(path, device)(x), Module()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_widens(device: str, dtype: torch.dtype) -> None:
    x = make((3, 50), dtype, device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = softmax(x)
        assert y.dtype == torch.float32
        if device == "cuda":  # on a CPU autocast leaves torch.softmax alone
            assert torch.softmax(x, -1).dtype == torch.float32
        assert OP(x.double()).dtype == torch.float64
        loss = y.square().sum()
    assert_softmax(y.detach(), x.detach().float(), -1)
    (dx,) = torch.autograd.grad(loss, x)
    assert dx.dtype == dtype


def test_flop_counter(device: str) -> None:
    x = make((4, 100), torch.float32, device).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        softmax(x).sum().backward()
    assert counter.get_total_flops() == 5 * 400 + 4 * 400


def test_meta_and_inference(device: str) -> None:
    x = make((4, 3, 6), torch.bfloat16, device).transpose(0, 2)
    meta = softmax(x.to("meta"), 1)
    assert (meta.shape, meta.dtype, meta.stride()) == (x.shape, x.dtype, softmax(x, 1).stride())
    with torch.inference_mode():
        assert_softmax(softmax(x, 1), x, 1)


def test_nothing_is_recorded_without_need(device: str) -> None:
    x = make((3, 4), torch.float32, device)
    assert not softmax(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not softmax(x).requires_grad
    assert not BACKWARD(x.detach(), softmax(x.detach()), 1).requires_grad


def test_saves_the_output_alone(device: str) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = make((3, 4), torch.float32, device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = softmax(x)
    assert [tensor.data_ptr() for tensor in saved] == [y.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_dtype_errors(device: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 4, device=device).to(dtype)
    kinds = "float16, bfloat16, float32 or float64"
    for tensor in (x, x.to("meta")):
        with pytest.raises(RuntimeError, match=rf"^softmax: input must be {kinds}, got {str(dtype)[6:]}$"):
            softmax(tensor)
        with pytest.raises(RuntimeError, match=rf"^_softmax_backward: grad must be {kinds}, got {str(dtype)[6:]}$"):
            BACKWARD(tensor, tensor, 0)


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 2), ((3, 4), -3), ((), 1), ((), -2), ((0,), 1)], ids=str)
def test_dim_errors(device: str, shape: tuple[int, ...], dim: int) -> None:
    bound = max(len(shape), 1)
    x = torch.zeros(shape, device=device)
    sentence = rf"softmax: dim must be in \[-{bound}, {bound - 1}\] for a {len(shape)}-D input, got {dim}"
    for tensor in (x, x.to("meta")):
        for leaf in (tensor, tensor.detach().requires_grad_()):
            with pytest.raises(IndexError, match=sentence):
                softmax(leaf, dim)
        with pytest.raises(IndexError, match="_" + sentence.replace("softmax", "softmax_backward")):
            BACKWARD(tensor, tensor, dim)


def test_backward_errors(device: str) -> None:
    g = torch.zeros(3, 4, device=device)
    same = r"_softmax_backward: output must have grad's dtype and shape float32 \(3, 4\), got "
    for other, found in ((g.double(), r"float64 \(3, 4\)"), (g[:2], r"float32 \(2, 4\)"), (g[0], r"float32 \(4,\)")):
        with pytest.raises(RuntimeError, match=same + found):
            BACKWARD(g, other, 0)
    if device != "cpu":
        with pytest.raises(RuntimeError, match=f"output must be on grad's device {device}:0, got cpu"):
            BACKWARD(g, g.cpu(), 0)


def test_layout_errors() -> None:
    with pytest.raises(RuntimeError, match=r"^softmax: input must be a dense tensor, got the layout sparse_coo$"):
        softmax(torch.zeros(3, 4).to_sparse())


@pytest.mark.parametrize(
    ("arguments", "exception", "sentence"),
    [
        (([1.0],), TypeError, "input must be a tensor, got list"),
        ((None,), TypeError, "input must be a tensor, got NoneType"),
        ((torch.ones(2), None), TypeError, "dim must be an integer, got NoneType"),
        ((torch.ones(2), 1.0), TypeError, "dim must be an integer, got float"),
        ((torch.ones(2), np.float32(0.5)), TypeError, "dim must be an integer, got float32"),
        (
            (torch.nested.nested_tensor([torch.ones(2)]),),
            RuntimeError,
            "input must be a dense tensor, got a nested one",
        ),
    ],
)
def test_arguments_of_other_types(arguments: tuple[Any, ...], exception: type[Exception], sentence: str) -> None:
    with pytest.raises(exception, match=f"^softmax: {sentence}$"):
        softmax(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [*DTYPES, torch.int32, torch.bool], ids=str)
def test_dtype_converts_first(device: str, source: torch.dtype, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 40) * 4).to(device, source)
    for dim in (0, 1):
        result = softmax(x, dim, dtype=dtype)
        assert result.dtype == dtype
        assert torch.equal(result, softmax(x.to(dtype), dim))
        torch.testing.assert_close(result, torch.softmax(x, dim, dtype=dtype))


def test_dtype_under_everything(device: str, fresh_compiler: None) -> None:
    x = torch.randn(3, 40, device=device, dtype=torch.bfloat16)

    def loss(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(x, -1, dtype=torch.float32).pow(3).sum()

    ours, theirs = ((lambda x, f=f: loss(f, x)) for f in (softmax, torch.softmax))
    got, expected = torch.func.grad(ours)(x), torch.func.grad(theirs)(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.func.vmap(ours)(x), torch.func.vmap(theirs)(x))
    tangents = (torch.func.jvp(f, (x,), (x,))[1] for f in (ours, theirs))
    torch.testing.assert_close(*tangents)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    compiled(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)
    assert softmax(x.to("meta"), dtype=torch.float64).dtype == torch.float64
    with torch.autocast(device, dtype=torch.bfloat16):
        assert softmax(x.float(), dtype=torch.float16).dtype == torch.float16
        assert softmax(x, dtype=torch.float64).dtype == torch.float64


def test_dtypes_that_are_none() -> None:
    with pytest.raises(RuntimeError, match="softmax: dtype must be float16, bfloat16, float32 or float64, got int64"):
        softmax(torch.ones(2), dtype=torch.int64)
    with pytest.raises(TypeError, match=r"softmax: dtype must be a torch\.dtype or None, got str"):
        softmax(torch.ones(2), dtype="float32")  # type: ignore[arg-type]
