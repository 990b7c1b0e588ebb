"""What torch.compile generates for a GPU, on a machine that has one or has none.

`recorded_kernels` keeps the generated code. `emulated_gpu` also lets Inductor take CPU tensors for those of a GPU with
132 multiprocessors of compute capability 9.0: it writes Triton kernels for them, in loops as for a GPU, which then run
in Triton's interpreter (TRITON_INTERPRET=1, from the start of the process). It replaces private functions of torch, so
it belongs into a process of its own.

The test files of lowerings run their tests where there is a GPU; where there is none, a test of each runs the file
again in such a process. They import the fixture `kernels` from here.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import discounted_cumsum
from torch_dcs_ops.compile.inductor import versions

from support.compiler import no_cached_graphs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# What an emulated kernel takes at a time: less than the sizes that are tested, and not a divisor of them.
BLOCKS = {"XBLOCK": 4, "YBLOCK": 2, "R0_BLOCK": 8}

lowering_test = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: runs in test_in_the_interpreter"
)


def starts_the_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Decorates the test that runs the others of its file in the interpreter."""
    for is_skipped, reason in (
        (INTERPRETED or torch.cuda.is_available(), "the kernels run in this process"),
        (
            not versions.is_tested(),
            f"the GPU is emulated with torch {versions.tested()}, this is {torch.__version__}",
        ),
    ):
        test = pytest.mark.skipif(is_skipped, reason=reason)(test)
    return test


class Kernels:
    """The code that was generated since the last `clear`: a text for every graph."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def clear(self) -> None:
        self.graphs.clear()

    @property
    def source(self) -> str:
        return "\n".join(self.graphs)

    def names(self) -> list[str]:
        """The generated kernels, in the order of their launches."""
        return re.findall(r"^ +(triton_\w+)\.run\(", self.source, re.MULTILINE)

    def extern_ops(self) -> list[str]:
        """The operators that are called and not generated."""
        return re.findall(r"torch\.ops\.([\w.]+)\(|(?<=extern_kernels\.)\w+(?=\()", self.source)


@contextlib.contextmanager
def recorded_kernels() -> Iterator[Kernels]:
    from torch._inductor.graph import GraphLowering

    kernels = Kernels()
    generate = GraphLowering.codegen

    def codegen(self: Any) -> Any:
        code, kernel_code = generate(self)
        kernels.graphs.append(code.value)
        return code, kernel_code

    with mock.patch.object(GraphLowering, "codegen", codegen), no_cached_graphs():
        torch._dynamo.reset()
        yield kernels
    torch._dynamo.reset()


@contextlib.contextmanager
def emulated_gpu() -> Iterator[Kernels]:
    import torch._inductor.config as inductor_config
    from torch._inductor import ir, scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties = DeviceProperties(
        type="cpu", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip
    patches: list[Any] = [
        inductor_config.patch(cpu_backend="triton"),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: properties)),
        mock.patch.object(AsyncCompile, "triton", lambda self, name, source, **_: InterpretedKernel(name, source)),
        mock.patch.object(driver, "_active", _Driver()),
        mock.patch.object(driver, "_default", _Driver()),
    ]
    patches += [mock.patch.object(module, "is_gpu", _is_gpu(module)) for module in (ir, scheduler)]
    if hasattr(scheduler, "_is_gpu_triton_backend"):  # from torch 2.14 on
        patches.append(mock.patch.object(scheduler, "_is_gpu_triton_backend", return_value=True))
    for node in vars(scheduler).values():
        if isinstance(node, type) and issubclass(node, scheduler.BaseSchedulerNode):
            patches += [
                mock.patch.object(node, name, lambda self, answer=answer: answer)
                for name, answer in (("is_cpu", False), ("is_gpu", True))
                if name in vars(node)
            ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield stack.enter_context(recorded_kernels())


@pytest.fixture(name="kernels")
def lowered_scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """torch.compile with the lowerings of scans switched on, and the code that it generates for DEVICE."""
    import torch._inductor.config as inductor_config

    from torch_dcs_ops.compile import scan_lowering
    from torch_dcs_ops.compile.graph_pass import Hook
    from torch_dcs_ops.compile.inductor import lowering, support

    if not support.has("scans"):
        pytest.skip(f"there are no scan lowerings for torch {torch.__version__}")
    scan_lowering.install()
    monkeypatch.setattr(lowering, "GENERATED_DEVICES", (DEVICE,))
    context = emulated_gpu() if INTERPRETED else recorded_kernels()
    with context as recorded, inductor_config.patch(pre_grad_custom_pass=Hook()):
        yield recorded


class _Driver:
    """A GPU for Triton to know about."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0


def _is_gpu(module: Any) -> Callable[[Any], bool]:
    """`is_gpu` says yes to the functions that choose loops and fusions, and the truth to others."""
    original = module.is_gpu
    callers = {
        "torch._inductor.ir": {"simplify_and_reorder"},
        "torch._inductor.scheduler": {"_compute_attrs", "__init__", "is_gpu", "merge_loops"},
    }[module.__name__]

    def is_gpu(device_type: str) -> bool:
        return sys._getframe(1).f_code.co_name in callers or bool(original(device_type))

    return is_gpu


class InterpretedKernel:
    """A generated kernel, as the generated code launches it."""

    def __init__(self, name: str, source: str) -> None:
        from torch._inductor.codecache import PyCodeCache

        self.kernel = getattr(PyCodeCache.load(source), name).fn

    def run(self, *args: Any, stream: Any) -> None:
        names = list(inspect.signature(self.kernel.fn).parameters)
        blocks = {name: BLOCKS[name] for name in names if name in BLOCKS}
        sizes = dict(zip(names, args, strict=False))
        grid = [-(-sizes.get(f"{axis}numel", 1) // blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xy"]
        self.kernel[tuple(grid)](*args, **blocks)


def compiled_for_a_gpu(source: str, **options: int) -> list[int]:
    """Compiles the kernels in what Inductor wrote for sm_90, which no GPU is needed for; the interpreter takes more.

    `options`: XBLOCK and num_warps. Returns the number of changes of layout in each kernel.
    """
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, *(f"{name}={value}" for name, value in options.items())], input=source, text=True,
        check=True, env=environment, stdout=subprocess.PIPE,
    )  # fmt: skip
    return [int(line.split()[-1]) for line in done.stdout.splitlines()]


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def assert_one_kernel(kernels: Kernels) -> None:
    assert len(kernels.names()) == 1, kernels.names()
    assert kernels.extern_ops() == []


# Kernels against the recurrence in float64. Negated inputs and outputs are operations to fuse with that round nothing.
def negated_scan(x: Tensor, gamma: Any, initial: Tensor | None, **options: Any) -> Tensor:
    return -discounted_cumsum(-x, gamma, initial=None if initial is None else -initial, **options)
