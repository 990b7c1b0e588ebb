"""Returns in compiled code: a kernel each, together with what is around them.

The kernels run on a GPU, or in Triton's interpreter in a process that test_scan_lowering.py starts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import returns

from compile.generated_code import DEVICE, Kernels, lowering_test
from support.subprocesses import rare

pytest.importorskip("triton")

B, T = 5, 37


def inputs(time: int) -> dict[str, Tensor]:
    shape = (T, B) if time == 0 else (B, T)
    tensors = {
        "rewards": torch.randn(shape), "values": torch.randn(shape), "next_values": torch.randn(shape),
        "rhos": torch.randn(shape).exp(), "bootstrap_value": torch.randn(B), "terminated": torch.rand(shape) < 0.1,
        "truncated": torch.rand(shape) < 0.1, "gamma_row": torch.rand(B),
    }  # fmt: skip
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def ends(x: dict[str, Tensor], with_next: bool = False) -> dict[str, Tensor]:
    names = ["terminated", "truncated", "next_values" if with_next else "bootstrap_value"]
    return {name: x[name] for name in names}


FUNCTIONS = {
    "discounted_returns": lambda x, time, g: returns.discounted_returns(x["rewards"], g, **ends(x), time_dim=time),
    "gae": lambda x, time, g: returns.gae(x["rewards"], x["values"], **ends(x), gamma=g, time_dim=time),
    "gae of next_values": lambda x, time, g: returns.gae(
        x["rewards"], x["values"], **ends(x, True), gamma=g, time_dim=time
    ),
    "gae of a per-row gamma": lambda x, time, g: returns.gae(
        x["rewards"], x["values"], **ends(x), gamma=x["gamma_row"], time_dim=time
    ),
    "td_lambda_returns": lambda x, time, g: returns.td_lambda_returns(
        x["rewards"], **ends(x, True), gamma=g, time_dim=time
    ),
    "vtrace": lambda x, time, g: returns.vtrace(
        x["rewards"], x["values"], x["rhos"], **ends(x), gamma=g, lambda_=0.9, time_dim=time
    ),
    "retrace_returns": lambda x, time, g: returns.retrace_returns(
        x["rewards"], x["values"], x["rhos"], **ends(x, True), gamma=g, time_dim=time
    ),
    "upgo_returns": lambda x, time, g: returns.upgo_returns(
        x["rewards"], x["values"], **ends(x), gamma=g, time_dim=time
    ),
}  # fmt: skip


# The other layout for the two that are made otherwise: a scan of the differences, and one of what is carried. Without a
# GPU gae's other operands are slow, too.
LAYOUTS = [rare(name, k % 2) if name.startswith("gae of") else (name, k % 2) for k, name in enumerate(FUNCTIONS)]
LAYOUTS += [rare("gae", 0), rare("vtrace", 0)]


@lowering_test
@pytest.mark.parametrize(("name", "time"), LAYOUTS)
def test_one_kernel_with_what_is_around(kernels: Kernels, name: str, time: int) -> None:
    def function(x: dict[str, Tensor]) -> Any:
        scaled = x | {"rewards": x["rewards"] * 0.5 + 1}
        results = FUNCTIONS[name](scaled, time, 0.97)
        results = results if isinstance(results, tuple) else (results,)
        return [result * 2 for result in results]

    x = inputs(time)
    results = torch.compile(function, fullgraph=True)(x)
    wide = {key: value.double() if value.is_floating_point() else value for key, value in x.items()}
    torch.testing.assert_close(results, function(wide), check_dtype=False, rtol=1e-4, atol=1e-4)
    assert len(kernels.names()) == 1, kernels.names()
    assert kernels.extern_ops() == []


@lowering_test
def test_sizes_and_discounts_that_change(kernels: Kernels) -> None:
    counts = []
    compiled = torch.compile(returns.gae, fullgraph=True, dynamic=True)
    for batch, length, gamma in ((3, 20, 0.9), (5, 41, 0.95), (6, 17, 0.99), (4, 19, 0.5)):
        r, v = torch.randn(length, batch, device=DEVICE), torch.randn(length, batch, device=DEVICE)
        arguments: Any = {"bootstrap_value": v[0] * 2, "terminated": r > 1, "gamma": gamma}
        results = compiled(r, v, **arguments)
        torch.testing.assert_close(results, returns.gae(r, v, **arguments), rtol=1e-4, atol=1e-4)
        counts.append(len(kernels.graphs))
    assert counts[-1] <= 2, counts
    assert len(set(kernels.names())) <= 2
    assert kernels.extern_ops() == []


@lowering_test
def test_few_long_rows_are_left_to_the_library(kernels: Kernels) -> None:
    r, v = torch.randn(2, 10_000, device=DEVICE), torch.randn(2, 10_000, device=DEVICE)
    done, gamma = torch.rand(2, 10_000, device=DEVICE) < 0.01, torch.tensor([0.9, 0.99], device=DEVICE)

    def function(r: Tensor) -> tuple[Tensor, Tensor]:
        return returns.gae(
            r, v, bootstrap_value=v[:, 0], terminated=done, gamma=gamma, gae_lambda=gamma.clone(), time_dim=1
        )

    results = torch.compile(function, fullgraph=True)(r)
    torch.testing.assert_close(results, function(r), rtol=1e-4, atol=1e-4)
    assert [op for op in kernels.extern_ops() if "temporal_difference_scan" in op]
