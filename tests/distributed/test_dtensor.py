"""Ops with DTensors against the same calls with plain tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distributed.team import Team
from support.subprocesses import environment


def run(team: Team, name: str, *args: object) -> list[object]:
    # Importing the cases imports DTensor, which the package itself must not: here and not above.
    from distributed import dtensor_cases

    return team.run(getattr(dtensor_cases, name), *args)


@pytest.mark.parametrize("cases", ["lines", "matrices", "losses"])
def test_results_and_gradients_are_those_of_plain_tensors(two: Team, cases: str) -> None:
    assert run(two, cases) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["lines", "matrices", "losses"])
def test_on_four_ranks(four: Team, cases: str) -> None:
    assert run(four, cases) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["lines", "losses"])
def test_compiled(two: Team, cases: str) -> None:
    assert run(two, cases, "aot_eager") == [[], []]


def test_gradients_stay_where_they_are(two: Team) -> None:
    """input's is left for its consumer to reduce or to scatter."""
    for found in run(two, "layouts_of_results"):
        assert found == {"loss": True, "input": True, "weight": True}


def test_what_has_no_rule_is_refused_by_a_sentence(two: Team) -> None:
    for found in run(two, "refusals"):
        assert isinstance(found, dict)
        for sentence, said in found.items():
            assert sentence in said


CALL = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(2, 3)
y = torch_dcs_ops.softmax(distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()]))
torch.testing.assert_close(y.to_local(), x.softmax(-1))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import sys, torch, torch_dcs_ops; assert 'torch.distributed.tensor' not in sys.modules",
        "import torch.distributed.tensor, torch_dcs_ops",
    ],
)
def test_rules_come_with_dtensor_in_either_order(first: str) -> None:
    """Importing the package does not import DTensor, which takes half a second."""
    done = subprocess.run(
        [sys.executable, "-c", first + CALL], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
