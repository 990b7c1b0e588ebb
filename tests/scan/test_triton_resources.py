"""What the launchers would launch on other GPUs fits into the shared memory that a program has there.

The launchers run with CPU tensors and the limits of a GPU that need not be there; every kernel that they launch is
compiled for it, with the constants and the alignments that Triton sees in these tensors, and not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.selection import slow

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiled, not run")

LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
Launched = dict[str, int]
Record = Callable[[int], Launched]


def shared_memory(kernel: Any, capability: int, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Bytes that a launch with these arguments would ask for."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options.setdefault("debug", False)
    bound, specialization, given = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, given)
    source = ASTSource(kernel, signature, constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = {"target": target, **parsed.__dict__}
    code = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )  # fmt: skip
    for stage in ("ttir", "ttgir", "llir"):  # what shared memory holds is settled by then
        code = stages[stage](code, metadata)
    return int(metadata["shared"])


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """`record(capability)`: from then on launches are compiled for it; what each kernel needed at most."""
    from triton.runtime.jit import JITFunction

    from torch_dcs_ops.triton_kernels.common.launch import Device
    from torch_dcs_ops.triton_kernels.linear_cross_entropy import filter_products
    from torch_dcs_ops.triton_kernels.log_bmm import launch

    def start(capability: int) -> Launched:
        launched: Launched = {}

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            needed = shared_memory(kernel, capability, args, options)
            launched[kernel.__name__] = max(needed, launched.get(kernel.__name__, 0))

        monkeypatch.setattr(JITFunction, "run", run)
        device = Device(4, LIMITS[capability], tensor_memory=capability == 100)
        for module in (filter_products, launch):
            monkeypatch.setattr(module, "device_of", lambda _: device)
        return launched

    return start


def matrix(rows: int, columns: int, dtype: torch.dtype, apart: int = 0) -> Tensor:
    """`apart` elements between its rows."""
    return torch.zeros(rows, columns + apart, dtype=dtype)[:, :columns]


def check(launched: Launched, capability: int, *names: str) -> None:
    assert set(names) <= set(launched)
    assert max(launched.values()) <= LIMITS[capability], launched


@pytest.mark.parametrize("apart", [0, slow(1)])
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (89, torch.bfloat16),
        pytest.param(89, torch.float32, marks=pytest.mark.slow),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.slow)
            for capability in (80, 90, 100, 120)
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
)
def test_products(record: Record, capability: int, dtype: torch.dtype, apart: int) -> None:
    from torch_dcs_ops.triton_kernels.linear_cross_entropy import filter_products

    launched = record(capability)
    rows, classes, features = 1024, 2048, 1024
    kept, index = matrix(rows, classes, dtype, apart), torch.zeros(classes, dtype=torch.int32)
    filter_products.input_gradient(
        kept, index, index[:1], matrix(classes, features, dtype, apart), matrix(rows, features, dtype)
    )
    total = matrix(classes, features, dtype)
    filter_products.add_weight_gradient(
        kept, index, index[:1], matrix(rows, features, dtype, apart), total, total, index, 0
    )
    check(launched, capability)
    assert len(launched) == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("capability", list(LIMITS))
def test_log_bmm(record: Record, capability: int, precision: str) -> None:
    from torch_dcs_ops.triton_kernels.log_bmm import launch

    launched = record(capability)
    a, b = torch.zeros(2, 256, 256), torch.zeros(2, 256, 256)
    out, log_s = launch.log_bmm(a, b, precision)
    launch.log_bmm_backward(out, a, b, log_s, precision, True, True)
    check(launched, capability, "multiply", "multiply_gradient", "prepare", "scale_gradient")


# Shapes and the dimension of time: few columns, by look-back and in parts, whose words are fewer than a tile's threads
# or as many; rows; rows of strided steps; many columns; few of many outer rows.
SCANS = [
    ((400_000, 4), 0), ((100_000, 24), 0), ((3_000_000, 2), 0), ((27_175, 46), 0), ((200_000, 1), 0),
    ((3, 700_001), 1), ((2, 300_000), 1), ((5, 4096), 1), ((900, 77), 1), ((9000, 8, 7), 1), ((48, 15, 3), 1),
    ((64, 70_001), 0), ((2000, 513), 0), ((30, 500, 12), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "gates"),
    [
        (torch.float16, "number"),
        *(
            pytest.param(dtype, gates, marks=pytest.mark.slow)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
            for gates in ("number", "row", "step")
        ),
    ],
)
@pytest.mark.parametrize(("shape", "dim"), [*SCANS[:2], *(slow(*scan) for scan in SCANS[2:])], ids=str)
def test_scans(record: Record, shape: tuple[int, ...], dim: int, dtype: torch.dtype, gates: str) -> None:
    """The compiler takes them, too: the interpreter says nothing of layouts."""
    from torch_dcs_ops.reference.scan import ScanCall
    from torch_dcs_ops.triton_kernels.scan import launch

    launched = record(90)
    rows = shape[:dim] + shape[dim + 1 :]
    gamma = {"number": None, "row": torch.ones(rows, dtype=dtype), "step": torch.ones(shape, dtype=dtype)}[gates]
    x = torch.zeros(shape, dtype=dtype)
    for reset in (None, torch.zeros(shape, dtype=torch.bool)):
        call = ScanCall(gamma, 0.99, dim, reset is not None, False, torch.zeros(rows, dtype=dtype), reset, None)
        launch.scan(x, call)
        launch.scan_gradients(x, x, call)
    check(launched, 90)
    assert launched
