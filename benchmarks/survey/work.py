"""What a problem is made of: its tensors, the calls to time, and the bytes that they cannot do without."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Function
from torch import Tensor

from survey.draw import Problem

Call = Callable[..., Any]


class Lacking(Exception):
    """This build of the package has no such function."""


@dataclass
class Work:
    """`ours` and `theirs` (torch's own) are called with `inputs`; sizes are in bytes.

    `outputs` are the results, `again` what a backward reads besides their gradients. Both passes' floor is a copy of
    all bytes read and written, each once a pass, unless `floor` is a function: then `floor_calls` of it.
    """

    ours: Call
    inputs: Sequence[Any]
    outputs: int = 0
    again: int = 0
    theirs: Call | None = None
    floor: Function | None = None
    floor_name: str = "copy"
    floor_calls: int = 1

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.inputs if isinstance(value, Tensor)]

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def traffic(self, backward: bool) -> int:
        forward = size(*self.tensors) + self.outputs
        return forward + (self.outputs + self.again + size(*self.leaves) if backward else 0)


def size(*tensors: Tensor | None) -> int:
    """In bytes, of what is seen of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


class Data:
    """Draws a problem's tensors, on its device and in its dtype."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, device
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.generator = torch.Generator(device).manual_seed(problem.index + 1)

    @property
    def row_shape(self) -> list[int]:
        """Of one number a row."""
        return [number for dim, number in enumerate(self.problem.shape) if dim != self.problem.dim]

    def normal(self, shape: Sequence[int] | None = None, *, leaf: bool = True, scale: float = 1.0) -> Tensor:
        """By default of the problem's shape; a leaf has a gradient where the problem has a backward."""
        shape, padding = (self.problem.shape, self.problem.padding) if shape is None else (tuple(shape), 0)
        wide = torch.empty((*shape[:-1], shape[-1] + padding), device=self.device, dtype=self.dtype)
        wide.normal_(0, scale, generator=self.generator)
        return wide[..., : shape[-1]].requires_grad_(leaf and self.problem.backward)

    def gamma(self, kind: str, *, leaf: bool) -> float | Tensor:
        """A number, or a discount for every row (float32 with half precision) or step."""
        if kind == "number":
            return 0.99
        per_step = kind == "per step"
        shape = self.problem.shape if per_step else self.row_shape
        dtype = self.dtype if per_step else torch.promote_types(self.dtype, torch.float32)
        tensor = torch.empty(tuple(shape), device=self.device, dtype=dtype)
        tensor.uniform_(0.9, 0.999, generator=self.generator)
        return tensor.requires_grad_(leaf and self.problem.backward)

    def flags(self, share: float = 0.01) -> Tensor:
        draws = torch.empty(self.problem.shape, device=self.device, dtype=torch.float16)
        return draws.uniform_(generator=self.generator) < share

    def bytes(self, count: int) -> Tensor:
        return torch.randint(256, (count,), dtype=torch.uint8, device=self.device, generator=self.generator)


def public(name: str) -> Call:
    """A public function of the package, of `returns` too."""
    import torch_dcs_ops

    function = torch_dcs_ops
    for part in name.split("."):
        function = getattr(function, part, None)
        if function is None:
            raise Lacking(f"this build of torch_dcs_ops has no {name}")
    return function


MODULES = {"cumsum": "scan"}
MODULES |= dict.fromkeys(("max_bmm", "sample_bmm"), "log_bmm")


def work_of(problem: Problem, data: Data, compiled: bool) -> Work:
    """By the family's module; `compiled`: ours will be called under torch.compile(backend="dcs")."""
    module = importlib.import_module(f"survey.{MODULES.get(problem.family, problem.family)}")
    work: Work = module.work(problem, data, compiled)
    return work


def passes(call: Call, work: Work, backward: bool) -> Function:
    """The function to time: a forward, or a forward and a backward."""
    if not backward:
        return lambda: call(*work.inputs)
    grads = [torch.randn_like(output) for output in _outputs(call, work)]
    return lambda: torch.autograd.grad(_outputs(call, work), work.leaves, grads)


def _outputs(call: Call, work: Work) -> list[Tensor]:
    outputs = call(*work.inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def functions(problem: Problem, work: Work, data: Data, compiled: bool) -> dict[str, Callable[[], Function]]:
    """What makes each function to time; ours, the floor, torch's."""
    ours = torch.compile(work.ours, backend="dcs", dynamic=False) if compiled else work.ours
    made: dict[str, Callable[[], Function]] = {"dcs": lambda: passes(ours, work, problem.backward)}

    def copy() -> Function:
        source = data.bytes(math.ceil(work.traffic(problem.backward) / 2))
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    made[work.floor_name] = copy if work.floor is None else lambda: work.floor  # type: ignore[dict-item, return-value]
    if work.theirs is not None:
        made["torch"] = lambda: passes(work.theirs, work, problem.backward)  # type: ignore[arg-type]
    return made
