"""That the list of small scans (cuda_cases.py) leaves out no kernel's name, and that each takes those it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scan.cuda_cases import PROBLEMS, Problem
from support.launched_kernels import has_132_multiprocessors, launched_kernels

SOURCES = Path(__file__).parents[2] / "csrc/cuda"


def sources_of(name: str, seen: set[Path]) -> set[Path]:
    path = SOURCES / name
    if path.exists() and path not in seen:
        seen.add(path)
        for included in re.findall(r'#include "(.+)"', path.read_text()):
            sources_of(included, seen)
    return seen


def test_every_kernel_that_scans_is_among_them() -> None:
    paths: set[Path] = set()
    for name in (
        "scan/instance.cu.in",
        "scan/windows.cu",
        "scan/rows/instance.cu.in",
        "scan/columns/instance.cu.in",
        "scan/totals.cu",
    ):
        sources_of(name, paths)
    kernels = {name for path in paths for name in re.findall(r"__global__[^{;]*?(\w+_kernel)\(", path.read_text())}
    assert {"bulk_stream_kernel", "tile_rows_kernel", "total_kernel"} <= kernels
    listed = {name for problem in PROBLEMS for name in problem.kernels.split()}
    assert kernels - {"compiled_for_kernel"} == listed  # that one is never launched


@pytest.mark.skipif(
    not has_132_multiprocessors(),
    reason="which kernel a scan takes depends on the GPU: the list is for 132 multiprocessors of 9.0",
)
@pytest.mark.parametrize(
    "problem", PROBLEMS, ids=lambda problem: f"{problem.kernels}-{problem.shape}-{problem.dtype}-{problem.gamma}"
)
def test_launches_its_kernels(problem: Problem) -> None:
    """The first that is named in both directions, in the backward too where no other is named."""
    launched = launched_kernels(problem.run)
    scans, *others = problem.kernels.split()
    assert launched[scans] >= (4 if problem.backward and not others else 2)
    assert all(launched[name] >= 2 for name in others)
