"""The rows' pass of linear_kl_div: the Triton kernel and plain PyTorch, against autograd in float64.

On a GPU for real; without one in Triton's interpreter, where test_rows.py runs this file.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.distributed.linear_cross_entropy import kl_rows
from torch_dcs_ops.ops.linear_cross_entropy.weight_gradient import make_accumulator
from torch_dcs_ops.reference.linear_cross_entropy import kl_rows as reference
from torch_dcs_ops.reference.linear_cross_entropy import kl_slices as reference_of_slices
from torch_dcs_ops.reference.linear_cross_entropy.kl_div import divergence
from torch_dcs_ops.reference.linear_cross_entropy.kl_rows import HeadRows, KlRows

from linear_cross_entropy.rows.oracle import GPU, INTERPRETED, error, wide
from support.sm_90 import compiled_for_sm_90, constants_behind_acc
from support.triton_modules import triton_module

DIRECTIONS = ("forward", "reverse", "jsd")
KERNELS = ["triton-cpu"] if INTERPRETED else ["plain-cpu"] + (["triton-cuda"] if GPU else [])
# Triton's blocks hold 2048 columns.
SIZES = (1, 33, 5000) if INTERPRETED else (1, 2, 33, 1000, 2048, 9001)
LARGE_SIZES = (50_257, 131_072, 256_001) if GPU else ()
DTYPES = (torch.bfloat16,) if INTERPRETED else (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ROWS = 3


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> tuple[str, Callable[[KlRows], Tensor]]:
    name, _, device = str(request.param).rpartition("-")
    return device, reference.kl_rows_ if name == "plain" else head_module("kl_div").kl_rows_


@pytest.fixture(params=KERNELS)
def slices(request: pytest.FixtureRequest) -> tuple[str, Callable[[KlRows], Tensor]]:
    """The kernels for some of the classes, of three ranks one after the other; the last has none."""
    name, _, device = str(request.param).rpartition("-")
    module: Any = reference_of_slices if name == "plain" else head_module("kl_slices")

    def run(call: KlRows) -> Tensor:
        (rows, classes), beta = call.student.logits.shape, call.beta
        cut = classes // 3
        calls = [of_classes(call, part) for part in (slice(0, cut), slice(cut, classes))]
        columns = [kl_rows.slice_columns(of, rows, call.grad, call.direction, module) for of in (*calls, None)]
        known: Tensor = kl_rows.known_of(columns[0], call.direction, Together(columns))
        if call.direction == "jsd":
            sums = [module.mixture_sums(of, known) for of in calls]
            kl_rows.add_mixture_sums_(known, calls[0], Together(sums), module)
        for of in calls:
            module.gradients_(of, known)
        found = kl_rows.divergences(known, call.direction, beta)
        return found if call.valid is None else torch.where(call.valid, found, 0)

    return device, run


class Together:
    """The ranks of a process that has what all of them tell."""

    def __init__(self, every: list[Tensor]) -> None:
        self.every = every

    def gather(self, _: Tensor) -> Tensor:
        return torch.stack(self.every)


def of_classes(call: KlRows, part: slice) -> KlRows:
    def of(head: HeadRows) -> HeadRows:
        bias = None if head.linear_bias is None else head.linear_bias[part].contiguous()
        return head._replace(logits=head.logits[:, part], linear_bias=bias)

    return call._replace(student=of(call.student), teacher=of(call.teacher))


def head_module(name: str) -> Any:
    pytest.importorskip("triton")
    return triton_module(f"linear_cross_entropy.{name}")


def make_call(
    columns: int, direction: str, gradients: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype], device: str,
    rows: int = ROWS, **options: Any,
) -> KlRows:  # fmt: skip
    generator = torch.Generator().manual_seed(columns)
    acc = wide(dtypes[0])

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    heads = []
    for dtype, gradient, whose in zip(dtypes, gradients, ("", "teacher_"), strict=True):
        bias = draw(columns, dtype=acc) if options.get("bias") else None
        cap, scale = options.get(f"{whose}softcap"), options.get(f"{whose}logit_scale", 1.0)
        heads.append(HeadRows(3 * draw(rows, columns).to(dtype), bias, cap, scale, gradient))
    grad = draw(rows if options.get("grad_of_rows", True) else 1, dtype=acc)
    valid = torch.arange(rows, device=device) != 1 if options.get("masked") else None
    return KlRows(heads[0], heads[1], grad, valid, direction, options.get("beta", 0.5), options.get("temperature", 1.0))


def definition(call: KlRows, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The rows and the gradients of both logits, by autograd."""
    logits, log_p = [], []
    for head in (call.student, call.teacher):
        leaf = head.logits.to(dtype, copy=True).requires_grad_()
        z = leaf if head.linear_bias is None else leaf + head.linear_bias.to(dtype)
        z = z * head.logit_scale
        z = z if head.softcap is None else torch.tanh(z / head.softcap) * head.softcap
        logits.append(leaf)
        log_p.append((z / call.temperature).log_softmax(1))
    rows = divergence(log_p[0], log_p[1], call.direction, call.beta)
    rows = rows if call.valid is None else torch.where(call.valid, rows, 0)
    gradients = torch.autograd.grad((rows * call.grad.to(dtype)).sum(), logits)
    return rows.detach(), list(gradients)


def check(run: Callable[[KlRows], Tensor], call: KlRows) -> None:
    """The budget is what torch makes of the same in the rows' dtype, and one rounding to the logits'."""
    exact, exact_gradients = definition(call, torch.float64)
    own, own_gradients = definition(call, call.grad.dtype)
    before = [head.logits.clone() for head in (call.student, call.teacher)]
    rows = run(call)
    # float64's definition errs as well.
    unit = torch.finfo(call.grad.dtype).eps * (8 if call.grad.dtype == torch.float64 else 1)
    assert rows.dtype == call.grad.dtype
    # Near 0, as of one class, digits are lost to logarithms of about log V.
    assert float((rows - exact).abs().max()) <= 2 * float((own - exact).abs().max()) + 32 * unit
    pairs = zip((call.student, call.teacher), before, exact_gradients, own_gradients, strict=True)
    for head, logits, gradient, own_gradient in pairs:
        if not head.gradient:
            may_change = call.direction == "jsd" and call.student.gradient and run is not reference.kl_rows_
            assert may_change or torch.equal(head.logits, logits)
            continue
        dtype = head.logits.dtype
        # The interpreter cuts bfloat16 off where a GPU rounds.
        rounding = 0.0 if dtype == call.grad.dtype else torch.finfo(dtype).eps
        scale = max(float(gradient.abs().max()), unit)
        found = float((head.logits.double() - gradient).abs().max()) / scale
        budget = 2 * float((own_gradient - gradient).abs().max()) / scale + 32 * unit + rounding
        assert found <= budget, f"{found} > {budget}"
        if call.valid is not None:
            assert not bool(head.logits[~call.valid].any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradients", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("columns", SIZES + LARGE_SIZES)
@pytest.mark.each_pair
def test_sizes(kernel: Any, columns: int, direction: str, gradients: tuple[bool, bool], dtype: torch.dtype) -> None:
    device, run = kernel
    if INTERPRETED and columns > 1000 and gradients in ((False, True), (False, False)):
        pytest.skip("the same as with others")
    check(run, make_call(columns, direction, gradients, (dtype, dtype), device))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"softcap": 2.5, "logit_scale": 0.7},
        {"teacher_softcap": 2.0, "teacher_logit_scale": -0.6, "beta": 0.1},
        {"temperature": 2.5, "masked": True, "grad_of_rows": False},
        {"bias": True, "softcap": 3.0, "teacher_softcap": 4.0, "temperature": 0.7, "masked": True, "beta": 0.8},
    ],
    ids=str,
)
def test_options(kernel: Any, options: dict[str, Any], direction: str) -> None:
    device, run = kernel
    dtypes = (torch.float32, torch.bfloat16)
    for own, other in itertools.permutations(dtypes, 2):
        check(run, make_call(130, direction, (True, True), (own, other), device, **options))


@pytest.mark.parametrize("options", [{}, {"bias": True, "softcap": 3.0, "temperature": 0.7, "masked": True}], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_slices_make_the_whole(slices: Any, direction: str, options: dict[str, Any]) -> None:
    device, run = slices
    for dtype, columns in zip((torch.float32, torch.bfloat16, torch.float64), (130, 33, 7000), strict=True):
        if not (INTERPRETED and columns > 1000):
            check(run, make_call(columns, direction, (True, True), (dtype, dtype), device, **options))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_and_distant_heads(kernel: Any, direction: str) -> None:
    """0 exactly where the heads agree, whatever is common to all logits; -inf logits of both count nothing."""
    device, run = kernel
    call = make_call(40, direction, (True, True), (torch.float32, torch.float32), device)
    logits = call.student.logits + 1000
    logits[:, 30:] = -torch.inf
    heads = [head._replace(logits=logits.clone()) for head in (call.student, call.teacher)]
    rows = run(call._replace(student=heads[0], teacher=heads[1]))
    for values in (rows, heads[0].logits, heads[1].logits):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-6)
    heads = [head._replace(logits=head.logits * 30) for head in (call.student, call.teacher)]
    check(run, call._replace(student=heads[0], teacher=heads[1]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_strided_rows(kernel: Any, direction: str) -> None:
    """Rows that are padded, of which nothing outside is written; and expanded upstream gradients."""
    device, run = kernel
    call = make_call(33, direction, (True, True), (torch.float32, torch.float32), device)
    rooms = [torch.full((ROWS, 40), 77.0, device=device) for _ in range(2)]
    heads = []
    for head, room in zip((call.student, call.teacher), rooms, strict=True):
        room[:, :33] = head.logits
        heads.append(head._replace(logits=room[:, :33]))
    check(run, call._replace(student=heads[0], teacher=heads[1], grad=call.grad[:1].expand(ROWS)))
    assert all(bool((room[:, 33:] == 77).all()) for room in rooms)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_not_finite(kernel: Any, direction: str, value: float) -> None:
    """Rows and gradients are where the definition's are; other rows are as they were."""
    device, run = kernel
    for of_teacher in (False, True):
        call = make_call(50, direction, (True, True), (torch.float32, torch.float32), device)
        (call.teacher if of_teacher else call.student).logits[0, 7] = value
        exact, _ = definition(call, torch.float64)
        rows = run(call)
        assert torch.equal(rows.isfinite(), exact.isfinite())
        assert bool(rows[1:].isfinite().all())
        assert error(rows[1:], exact[1:]) < 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("rows", "features", "classes"), [(6, 4, 520), (5, 9, 333), (9, 2, 1604), (7, 3, 97)] + [(300, 64, 40_008)] * GPU
)
def test_written_to_slices(kernel: Any, rows: int, features: int, classes: int, direction: str) -> None:
    """The student's gradient is written to its slices without a copy: the same bits."""
    device, run = kernel
    if run is reference.kl_rows_:
        pytest.skip("of the kernel")
    call = make_call(classes, direction, (True, False), (torch.bfloat16,) * 2, device, rows, masked=True)
    x = torch.randn(rows, features, device=device).bfloat16()
    copied, written = (make_accumulator("shared", x, x.new_empty(classes, features), x.dtype) for _ in range(2))
    assert call.valid is not None
    for part in (slice(0, 4), slice(4, rows)):
        student, teacher = (head._replace(logits=head.logits[part]) for head in (call.student, call.teacher))
        of_part = call._replace(student=student, teacher=teacher, grad=call.grad[part], valid=call.valid[part])
        saved_slices = written.slice_arguments(part, can_write=True)
        assert saved_slices
        check(run, of_part._replace(student=student._replace(saved_slices=saved_slices)))
        copied.add(student.logits, part)
        written.add(student.logits, part)
    assert torch.equal(written.result(), copied.result())


def test_no_rows(kernel: Any) -> None:
    device, run = kernel
    call = make_call(5, "forward", (True, True), (torch.float32, torch.float32), device, rows=0)
    assert run(call).shape == (0,)


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["kl_rows", "kl_slices"])
def test_triton_kernel_compiles_for_sm_90(name: str, direction: str) -> None:
    """With all options on and in float64."""
    pytest.importorskip("triton")
    sys.path.insert(0, str(Path(__file__).parents[3]))
    try:
        module = importlib.import_module("triton_kernels.linear_cross_entropy.kl_div")
        slices = importlib.import_module("triton_kernels.linear_cross_entropy.kl_slices")
    finally:
        sys.path.pop(0)
    kernel = slices.kl_slices if name == "kl_slices" else module.kl_rows
    constants = constants_behind_acc(kernel, BLOCK=512, DIRECTION=module.DIRECTIONS[direction])
    constants |= {"VECTOR": 8} if name == "kl_rows" else {"KNOWN": direction != "forward"}
    halves = ("logits_ptr", "teacher_ptr", "within_ptr", "beside_ptr")
    kinds = {"valid_ptr": "*u8"} | dict.fromkeys(halves, "*bf16")
    assert compiled_for_sm_90(kernel, constants, kinds).asm["ptx"]
