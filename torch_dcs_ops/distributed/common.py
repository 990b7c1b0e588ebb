"""What the functions over several ranks share: collectives by a group's name, and that all ranks are asked the same.

The collectives are PyTorch's functional ones, called as ops, which torch.compile traces. Ranks that call them in
different orders or with different shapes wait for each other, or abort; so what ranks disagree on is found first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from ..ops._common.autograd import in_forward_mode

_FINGERPRINT_BYTES = 2048
_seen: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class Ranks(NamedTuple):
    """A group of processes, in what an op's schema can hold."""

    group: str
    size: int
    rank: int

    def gather(self, values: Tensor) -> Tensor:
        """(size, *shape), in the order of the ranks."""
        return self.gathering(values)()

    def gathering(self, values: Tensor) -> Callable[[], Tensor]:
        """`gather`, begun: its result, when it is called. Until then the device goes on with what it is given."""
        values = values.contiguous()
        if self.size == 1:
            return lambda: values.unsqueeze(0).clone()
        begun: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(
            values.view(torch.uint8) if values.dtype == torch.bool else values, self.size, self.group
        )

        def result() -> Tensor:
            found = torch.ops._c10d_functional.wait_tensor(begun).view(values.dtype)
            return found.view(self.size, *values.shape)  # type: ignore[no-any-return]

        return result

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on all of them."""
        return self.totaling(values)()

    def totaling(self, values: Tensor) -> Callable[[], Tensor]:
        """`total`, begun."""
        if self.size == 1:
            return lambda: values
        begun: Tensor = torch.ops._c10d_functional.all_reduce(values.contiguous(), "sum", self.group)
        return lambda: torch.ops._c10d_functional.wait_tensor(begun)

    def scattered_totaling(self, values: Tensor) -> Callable[[], Tensor]:
        """This rank's rows of the sum over the ranks of values (size·n, ...), begun."""
        if self.size == 1:
            return lambda: values
        begun: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(
            values.contiguous(), "sum", self.size, self.group
        )
        return lambda: torch.ops._c10d_functional.wait_tensor(begun)


def ranks_of(op: str, group: dist.ProcessGroup) -> Ranks:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return Ranks(group.group_name, group.size(), group.rank())


def agreed(
    op: str,
    group: dist.ProcessGroup,
    device: torch.device,
    same: Mapping[str, object],
    check: Callable[[], None],
    own: Mapping[str, object] | None = None,
    judge: Callable[[list[dict[str, str]]], None] | None = None,
    *,
    always: bool = False,
) -> None:
    """Returns once all ranks have said the same of the call (`same`), and `check` has passed on all of them.

    One all-gather of a fixed size where the group has not seen this call yet; in every call with `always`, or if
    TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL. What has been seen must be the same on all ranks, so `same` alone is
    looked at; `judge` gets what every rank says of itself (`own`). A rank whose `check` raises tells the others, who
    raise it too. A graph that is being compiled asks nobody: a rank that compiles alone would wait for ever.
    """
    if is_compiling():
        check()
        return
    failure: Exception | None = None
    try:
        check()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        failure = error
    said = _text({"call": op, **same})
    known = _seen.setdefault(group, set())
    is_debugged = dist.get_debug_level() != dist.DebugLevel.OFF  # type: ignore[attr-defined]
    if failure is None and said in known and not (always or is_debugged):
        return
    # What may be cut off comes last.
    parts = ("failed" if failure else "passed", _text(own or {}), said if failure is None else str(failure))
    texts = [other.split("\n\n", 2) for other in _exchanged("\n\n".join(parts), group, device)]
    for rank, (state, _, sentence) in enumerate(texts):
        if state == "failed":
            raise failure or RuntimeError(f"{sentence} (on rank {rank})")
    first, *others = (_fields(asked) for _, _, asked in texts)
    for rank, fields in enumerate(others, 1):
        for name in first:
            if fields.get(name) != first[name]:
                there = fields.get(name, "nothing")
                raise RuntimeError(
                    f"{op}: {name} must be the same on all ranks, got {first[name]} on rank 0 and {there} on rank "
                    f"{rank}"
                )
    if judge is not None:
        judge([_fields(of_rank) for _, of_rank, _ in texts])
    known.add(said)


def _text(fields: Mapping[str, object]) -> str:
    return "\n".join(f"{name}={value}" for name, value in fields.items())


def _fields(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def _exchanged(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    data = text.encode()
    if len(data) > _FINGERPRINT_BYTES:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: _FINGERPRINT_BYTES - len(digest)] + digest
    mine = torch.zeros(_FINGERPRINT_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = ranks_of("", group).gather(mine.to(device)).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found]


def check_plain(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if hasattr(tensor, "device_mesh"):
            raise TypeError(f"{op}: {name} must be this rank's plain tensor, got a DTensor")


def check_first_derivatives(op: str) -> None:
    """Communication is differentiated once, in reverse mode."""
    if is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: input must be a plain tensor, got one under a torch.func transform")
    if in_forward_mode():
        raise RuntimeError(f"{op}: derivatives must be taken in reverse mode, got forward mode")


def check_not_differentiated_again(op: str) -> None:
    """For the first line of a backward."""
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(f"{op}: derivatives must be of the first order, got a backward with create_graph=True")
