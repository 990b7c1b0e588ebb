"""The same recurrence by other packages, where they are installed, and by torch itself; forward, scalar gamma."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from cell import Case, Measured
from torch import Tensor


def _combine(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def associative_scan(gates: Tensor, x: Tensor, dim: int, reverse: bool) -> Tensor:
    """torch's own scan operator; needs torch.compile, and a GPU in this mode."""
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    return scan(_combine, (gates, x), dim, reverse=reverse, combine_mode="pointwise")[1]


def python_loop(gates: Tensor, x: Tensor, dim: int, reverse: bool) -> Tensor:
    """One step of the recurrence at a time."""
    steps, factors = x.movedim(dim, 0), gates.movedim(dim, 0)
    y = torch.empty_like(steps)
    carry = torch.zeros_like(steps[0])
    order = range(len(steps))
    for t in reversed(order) if reverse else order:
        carry = steps[t] + factors[t] * carry
        y[t] = carry
    return y.movedim(0, dim)


def peer_functions(case: Case, dtype: torch.dtype, gamma: float) -> Iterator[Measured]:
    """The copy again, timed in the peers' loop, then each peer that is there."""
    x = torch.randn(case.shape, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    yield Measured("copy", lambda: y.copy_(x), 1.0, None)
    rows, length = case.shape if case.dim == -1 else case.shape[::-1]
    if length <= 64:
        gates = torch.full((), gamma, device="cuda").expand(case.shape)
        yield Measured("Python loop", lambda: python_loop(gates, x, case.dim, True), 1.0, None)
    if case.dim == -1 and dtype is torch.float32 and importlib.util.find_spec("torch_discounted_cumsum"):
        import torch_discounted_cumsum as seed

        yield Measured("torch-discounted-cumsum", lambda: seed.discounted_cumsum_right(x, gamma), 1.0, None)
    if (
        case.dim == -1
        and 32 <= length <= 65536
        and length & (length - 1) == 0
        and importlib.util.find_spec("accelerated_scan")
    ):
        from accelerated_scan.warp import scan

        gates = torch.full_like(x, gamma).unsqueeze(0)
        tokens = x.unsqueeze(0)
        yield Measured("accelerated-scan left", lambda: scan(gates, tokens), 1.5, None)
    if case.dim == 0 and importlib.util.find_spec("torchrl"):
        from torchrl.objectives.value.functional import reward2go

        done = torch.zeros(case.shape, dtype=torch.bool, device="cuda")
        done[-1] = True
        yield Measured("torchrl reward2go", lambda: reward2go(x, done, gamma, time_dim=0), 1.0, None)
    if rows * length <= 1 << 24:  # above, a compilation is not worth its time: it is 0.003 of a copy at 1e8
        torch._dynamo.reset()
        for reverse in (False, True):
            compiled = torch.compile(
                lambda x, reverse: associative_scan(torch.full_like(x, gamma), x, case.dim, reverse), dynamic=False
            )
            name = f"compiled associative_scan {'right' if reverse else 'left'}"
            yield Measured(name, lambda c=compiled, r=reverse: c(x, r), 1.0, None)
