"""Bad arguments: one sentence each, the same from the public function, the raw op, fakes and compiled graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_dcs_ops
from torch_dcs_ops import cumsum, discounted_cumsum

X = torch.ones(4, 8)
GAMMA = torch.tensor(0.9)
OP = "discounted_cumsum: "


def call(**changes: Any) -> dict[str, Any]:
    return {"input": X, "gamma": GAMMA} | changes


# (arguments, exception, sentence)
TABLE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "integer input": (
        call(input=torch.ones(4, 8, dtype=torch.int64)),
        RuntimeError,
        "input must be floating-point or complex, got int64",
    ),
    "narrow integer input": (
        call(input=torch.ones(4, 8, dtype=torch.int8)),
        RuntimeError,
        "input must be floating-point or complex, got int8",
    ),
    "bool input": (call(input=X > 0), RuntimeError, "input must be floating-point or complex, got bool"),
    "dim too large": (call(dim=2), IndexError, "dim must be in [-2, 1] for a 2-D input, got 2"),
    "dim too small": (call(dim=-3), IndexError, "dim must be in [-2, 1] for a 2-D input, got -3"),
    "dim of a 0-D input": (
        call(input=torch.tensor(1.0), dim=1),
        IndexError,
        "dim must be in [-1, 0] for a 0-D input, got 1",
    ),
    "direction": (call(direction="up"), RuntimeError, 'direction must be "left" or "right", got "up"'),
    "integer gamma": (
        call(gamma=torch.tensor(1)),
        RuntimeError,
        "gamma must be a floating-point or complex tensor, got int64",
    ),
    "bool gamma": (
        call(gamma=torch.tensor(True)),
        RuntimeError,
        "gamma must be a floating-point or complex tensor, got bool",
    ),
    "complex gamma": (
        call(gamma=torch.tensor(0.9j)),
        RuntimeError,
        "gamma must be real for a real input of dtype float32, got complex64",
    ),
    "row gamma": (
        call(gamma=torch.ones(3)),
        RuntimeError,
        "gamma must broadcast to input's shape without dim 1, (4,), to give one discount a row, got (3,); a per-step "
        "gamma needs input's number of dimensions (2)",
    ),
    "a (T,) gamma": (
        call(gamma=torch.ones(8), dim=-1),
        RuntimeError,
        "gamma must broadcast to input's shape without dim 1, (4,), to give one discount a row, got (8,); a per-step "
        "gamma needs input's number of dimensions (2)",
    ),
    "row gamma of another dim": (
        call(gamma=torch.ones(4), dim=0),
        RuntimeError,
        "gamma must broadcast to input's shape without dim 0, (8,), to give one discount a row, got (4,); a per-step "
        "gamma needs input's number of dimensions (2)",
    ),
    "step gamma": (
        call(gamma=torch.ones(4, 7)),
        RuntimeError,
        "gamma must broadcast to input's shape (4, 8), got (4, 7)",
    ),
    "gamma of too many dimensions": (
        call(gamma=torch.ones(1, 4, 8)),
        RuntimeError,
        "gamma must have at most input's number of dimensions (2), got 3",
    ),
    "reset dtype": (call(reset=X), RuntimeError, "reset must be bool, got float32"),
    "reset shape": (
        call(reset=torch.ones(4, 7, dtype=torch.bool)),
        RuntimeError,
        "reset must have input's shape (4, 8), got (4, 7)",
    ),
    "reset that would broadcast": (
        call(reset=torch.ones(8, dtype=torch.bool)),
        RuntimeError,
        "reset must have input's shape (4, 8), got (8,)",
    ),
    "initial dtype": (
        call(initial=torch.ones(4, dtype=torch.float64)),
        RuntimeError,
        "initial must have input's dtype float32, got float64",
    ),
    "initial shape": (
        call(initial=torch.ones(3)),
        RuntimeError,
        "initial must broadcast to input's shape without dim 1, (4,), got (3,)",
    ),
    "initial with the dim": (
        call(initial=torch.ones(4, 1)),
        RuntimeError,
        "initial must broadcast to input's shape without dim 1, (4,), got (4, 1)",
    ),
    "window of 0": (call(window=0), RuntimeError, "window must be at least 1, got 0"),
    "negative window": (call(window=-2), RuntimeError, "window must be at least 1, got -2"),
    "gamma's device": (
        call(gamma=torch.ones(4, device="meta")),
        RuntimeError,
        "gamma must be on input's device cpu, got meta",
    ),
    "initial's device": (
        call(initial=torch.ones(4, device="meta")),
        RuntimeError,
        "initial must be on input's device cpu, got meta",
    ),
    "reset's device": (
        call(reset=torch.ones(4, 8, dtype=torch.bool, device="meta")),
        RuntimeError,
        "reset must be on input's device cpu, got meta",
    ),
}


def public(input: Tensor, gamma: Any, **options: Any) -> Tensor:
    return discounted_cumsum(input, gamma, **options)


def with_gradient(input: Tensor, gamma: Any, **options: Any) -> Tensor:
    if input.is_floating_point():
        input = input.detach().requires_grad_()
    return discounted_cumsum(input, gamma, **options)


def raw(input: Tensor, gamma: Any, **options: Any) -> Tensor:
    y: Tensor = torch.ops.dcs.discounted_cumsum(input, gamma, **options)
    return y


def without_autograd(input: Tensor, gamma: Any, **options: Any) -> Tensor:
    with torch.inference_mode():
        return raw(input, gamma, **options)


def fake(input: Tensor, gamma: Any, **options: Any) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def convert(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) and value.device.type == "cpu" else value

        return raw(convert(input), convert(gamma), **{k: convert(v) for k, v in options.items()})


ROUTES: dict[str, Callable[..., Tensor]] = {
    "public": public,
    "with a gradient": with_gradient,
    "raw": raw,
    "without autograd": without_autograd,
    "fake": fake,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", TABLE)
def test_sentence(case: str, route: str) -> None:
    arguments, exception, sentence = TABLE[case]
    if "device" in case and route not in ("fake",):
        pytest.skip("needs a kernel that sees two devices; the CUDA cases are below")
    with pytest.raises(exception, match=f"^{re.escape(OP + sentence)}$"):
        ROUTES[route](**arguments)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", [name for name in TABLE if "device" not in name])
def test_sentence_in_a_compiled_graph(case: str) -> None:
    """Dynamo puts its own words around the sentence, which stays whole."""
    arguments, _, sentence = TABLE[case]
    with pytest.raises(Exception, match=re.escape(sentence)):
        torch.compile(public, backend="eager", fullgraph=True)(**arguments)


@pytest.mark.parametrize(
    ("gamma", "exception", "sentence"),
    [
        (True, TypeError, "gamma must be a real number or a tensor, got bool"),
        ("0.9", TypeError, "gamma must be a real number or a tensor, got str"),
        ([0.9], TypeError, "gamma must be a real number or a tensor, got list"),
        (None, TypeError, "gamma must be a real number or a tensor, got NoneType"),
        (0.5j, RuntimeError, "gamma must be a tensor to be complex, got the number 0.5j"),
    ],
)
def test_numbers_that_are_no_discount(gamma: Any, exception: type[Exception], sentence: str) -> None:
    with pytest.raises(exception, match=re.escape(OP + sentence)):
        discounted_cumsum(X, gamma)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(OP + sentence)):
        torch.compile(lambda x: discounted_cumsum(x, gamma), backend="eager", fullgraph=True)(X)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_cumsum_names_itself() -> None:
    with pytest.raises(IndexError, match=re.escape("cumsum: dim must be in [-2, 1] for a 2-D input, got 5")):
        cumsum(X, 5)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        sentence = f"cumsum: input must be floating-point or complex, got {str(dtype).removeprefix('torch.')}"
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            cumsum(torch.empty(4, 8, dtype=dtype))
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            cumsum(X, dtype=dtype)
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            cumsum(torch.empty(4, 8, dtype=dtype, device="meta"))


def test_private_ops_are_checked_as_well() -> None:
    with pytest.raises(RuntimeError, match="initial must be None for a shifted scan, got a tensor"):
        torch.ops.dcs._scan(X, GAMMA, 1.0, 1, True, True, X[:, 0], None, None)
    integers = torch.ones(4, 8, dtype=torch.int64)
    for x in (integers, integers.to("meta")):
        for gamma, number in ((None, 0.5), (GAMMA, 1.0)):
            with pytest.raises(RuntimeError, match="input must be floating-point or complex, got int64"):
                torch.ops.dcs._scan(x, gamma, number, 1, True, False, None, None, None)
    assert torch.ops.dcs._scan(integers, None, 1.0, 1, True, False, None, None, None)[0, 0] == 8
    with pytest.raises(IndexError, match="dim must be in"):
        torch.ops.dcs._scan(X, GAMMA, 1.0, 2, True, False, None, None, None)
    with pytest.raises(
        RuntimeError, match=re.escape("output must have grad's dtype and shape (4, 8), got float32 (4, 7)")
    ):
        torch.ops.dcs._scan_gradients(X, X[:, :7], GAMMA, 1.0, 1, True, None, None)
    with pytest.raises(RuntimeError, match="reset must be bool"):
        torch.ops.dcs._scan_gradients(X, X, GAMMA, 1.0, 1, True, None, X)


def test_other_devices_are_refused() -> None:
    """There is no such device here; the check itself is what the reference, the kernel of every device, begins with."""
    from torch_dcs_ops.ops.scan.validate import check_scan

    class Elsewhere:
        dtype, device, ndim, shape = torch.float32, torch.device("mps"), 2, (4, 8)

    with pytest.raises(RuntimeError, match="discounted_cumsum: input must be on a CPU or CUDA device, got mps"):
        check_scan("discounted_cumsum", Elsewhere(), None, 0, None, None, None)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="two devices")
def test_operands_on_another_device() -> None:
    x = X.cuda()
    for changes, sentence in (
        ({"gamma": torch.ones(4)}, "gamma must be on input's device cuda:0, got cpu"),
        ({"initial": torch.ones(4)}, "initial must be on input's device cuda:0, got cpu"),
        ({"reset": X > 0}, "reset must be on input's device cuda:0, got cpu"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            discounted_cumsum(**({"input": x, "gamma": 0.9} | changes))
    with pytest.raises(RuntimeError, match="gamma must be on input's device cpu, got cuda:0"):
        discounted_cumsum(X, GAMMA.cuda())
    torch.testing.assert_close(discounted_cumsum(x, GAMMA), discounted_cumsum(x, 0.9))  # a 0-D CPU gamma is welcome


def test_seed_names_say_the_same() -> None:
    with pytest.raises(RuntimeError, match="to give one discount a row"):
        torch_dcs_ops.discounted_cumsum_left(X, torch.ones(8))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"initial": 1.0}, "initial must be a tensor or None, got float"),
        ({"reset": [True]}, "reset must be a tensor or None, got list"),
        ({"window": 2.0}, "window must be an integer or None, got float"),
        ({"dim": 1.0}, "dim must be an integer, got float"),
        ({"input": [1.0]}, "input must be a tensor, got list"),
        ({"window": 2**63}, "window must be below 2**63, got 9223372036854775808"),
        ({"window": -(2**63) - 1}, "window must be at least 1, got -9223372036854775809"),
        ({"dim": 2**63}, "dim must be in [-2, 1] for a 2-D input, got 9223372036854775808"),
        ({"input": torch.eye(3).to_sparse()}, "input must be a dense tensor, got the layout sparse_coo"),
        ({"gamma": 10**400}, "gamma must be within the range of a float, got a larger int"),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_arguments_of_other_types(arguments: dict[str, Any], sentence: str, with_gradient: bool) -> None:
    call: dict[str, Any] = {"input": torch.ones(4, 8, requires_grad=with_gradient), "gamma": 0.9} | arguments
    with pytest.raises((IndexError, TypeError, RuntimeError), match=re.escape(f"discounted_cumsum: {sentence}")):
        discounted_cumsum(**call)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"input": None}, "input must be a tensor, got NoneType"),
        ({"input": [1.0]}, "input must be a tensor, got list"),
        ({"dim": "time"}, "dim must be an integer, got str"),
        ({"dim": 2**63}, "dim must be in [-2, 1] for a 2-D input, got 9223372036854775808"),
        ({"dim": np.float32(0.5)}, "dim must be an integer, got float32"),  # which a schema would round
        ({"dim": True}, "dim must be an integer, got bool"),
        ({"reverse": "no"}, "reverse must be a bool, got str"),
        ({"reverse": 2.5}, "reverse must be a bool, got float"),
        ({"reverse": None}, "reverse must be a bool, got NoneType"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype or None, got str"),
        ({"dtype": torch.qint8}, "dtype must be floating-point, complex, integer or bool, got qint8"),
        ({"dtype": torch.bits8}, "dtype must be floating-point, complex, integer or bool, got bits8"),
        ({"input": torch.eye(3).to_sparse()}, "input must be a dense tensor, got the layout sparse_coo"),
    ],
    ids=str,
)
def test_arguments_of_other_types_to_cumsum(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((IndexError, TypeError, RuntimeError), match=re.escape(f"cumsum: {sentence}")):
        cumsum(**({"input": X} | arguments))


def test_integers_and_flags_of_numpy() -> None:
    assert torch.equal(cumsum(X, np.int64(0), reverse=np.bool_(True)), cumsum(X, 0, reverse=True))
    assert torch.equal(discounted_cumsum(X, 0.9, dim=np.int32(0)), discounted_cumsum(X, 0.9, dim=0))
    with pytest.raises(TypeError, match="discounted_cumsum: dim must be an integer, got float64"):
        discounted_cumsum(X, 0.9, dim=np.float64(0.5))
    with pytest.raises(TypeError, match='discounted_cumsum: direction must be "left" or "right", got ndarray'):
        discounted_cumsum(X, 0.9, direction=np.ones(3))


def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for arguments in ({"input": nested}, {"gamma": nested}):
        name = next(iter(arguments))
        with pytest.raises(RuntimeError, match=f"discounted_cumsum: {name} must be a dense tensor, got a nested one"):
            discounted_cumsum(**call(**arguments))
    with pytest.raises(RuntimeError, match="cumsum: input must be a dense tensor, got a nested one"):
        cumsum(nested)
