"""The survey of benchmarks/: what it draws, what it says about it, and a run of it on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torch_dcs_ops

from support.subprocesses import environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="not a source checkout")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"survey.{name}")


@pytest.fixture
def draw(load: Any) -> ModuleType:
    module: ModuleType = load("draw")
    return module


def drawn(draw: ModuleType, family: str, count: int = 400, device: str = "cuda", work: str = "both") -> list[Any]:
    problems: list[Any] = draw.draw_all(3, [family], range(count), draw.LIMITS[device], work)
    return problems


def test_problems_depend_on_the_seed_and_their_index_alone(draw: ModuleType) -> None:
    limits = draw.LIMITS["cuda"]
    families = list(draw.FAMILIES)
    problems = draw.draw_all(7, families, range(5), limits, "both")
    assert problems == draw.draw_all(7, families, range(5), limits, "both")
    assert problems != draw.draw_all(8, families, range(5), limits, "both")
    for problem in problems:
        assert draw.draw(7, problem.family, problem.index, limits) == problem
    assert len({problem.name for problem in problems}) == len(problems)


@pytest.mark.parametrize("work", ["forward", "backward"])
def test_passes_change_nothing_else_of_a_problem(draw: ModuleType, work: str) -> None:
    for free, forced in zip(drawn(draw, "scan", 50), drawn(draw, "scan", 50, work=work), strict=True):
        assert forced.backward == (work == "backward")
        assert replace(forced, backward=free.backward) == free
    assert not any(problem.backward for problem in drawn(draw, "max_bmm", 20, work=work))


def test_scans_of_every_kind_layout_and_dtype(draw: ModuleType) -> None:
    problems = drawn(draw, "scan")
    assert {problem.kind for problem in problems} == {"plain", "per row", "per step", "reset", "initial"}
    places = ("first", "middle", "last")
    assert {problem.layout for problem in problems} == {f"{place}{end}" for place in places for end in ("", ", padded")}
    assert {problem.options["direction"] for problem in problems} == {"left", "right"}
    assert {problem.backward for problem in problems} == {True, False}
    shares = Counter(problem.dtype for problem in problems)
    for dtype, share in draw.DTYPES.items():
        assert shares[dtype] / len(problems) == pytest.approx(share, abs=0.08)


def test_sizes_are_of_any_alignment_and_spread_evenly(draw: ModuleType) -> None:
    problems = drawn(draw, "softmax")
    least, most = draw.LIMITS["cuda"].elements
    counts = sorted(problem.elements for problem in problems)
    assert least / 8 < counts[0] < 2 * least  # round sizes are rounded down
    assert most / 2 < counts[-1] < 3 * most
    assert counts[len(counts) // 2] == pytest.approx((least * most) ** 0.5, rel=0.5)
    odd = [problem for problem in problems if problem.shape[-1] % 8]
    assert 0.5 < len(odd) / len(problems) < 0.9
    steps = [problem.shape[problem.dim] for problem in problems]
    assert min(steps) >= 2
    for low, high in ((2, 100), (100, 10_000), (10_000, 1e9)):
        assert sum(low <= number < high for number in steps) > 0.15 * len(steps)


def test_returns_losses_and_products(draw: ModuleType) -> None:
    returns = drawn(draw, "returns")
    assert {problem.kind for problem in returns} == set(draw.RETURNS)
    assert {problem.options["bootstrap"] for problem in returns} == {"next_values", "bootstrap_value"}
    assert {problem.options["truncated"] for problem in returns} == {True, False}
    losses = drawn(draw, "linear_cross_entropy")
    assert {50_257, 151_936} <= {problem.shape[2] for problem in losses}
    assert {problem.kind for problem in losses} == {"odd classes", "even classes"}
    limit = draw.LIMITS["cuda"].operations
    for rows, features, classes in (problem.shape for problem in losses):
        assert 100 <= rows <= 20_000
        assert 6 * rows * features * classes <= 1.01 * limit
    for problem in drawn(draw, "log_bmm"):
        assert problem.elements / min(problem.shape[1:]) < 1.5 * draw.LIMITS["cuda"].elements[1]


def record(draw: ModuleType, fractions: list[float]) -> dict[str, Any]:
    """Of scans of one kind that take 1 ms, torch 1.5 ms in the first."""
    problems = [
        draw.Problem("scan", index, "plain", (1000, 4000), 1, "float32", False) for index in range(len(fractions))
    ]
    rows = [
        {"case": problem.name, "name": name, "milliseconds": time, "fraction": fraction}
        for problem, fraction in zip(problems, fractions, strict=True)
        for name, time in (("dcs", 1.0), ("copy", fraction), ("torch", 1.5 if problem.index == 0 else 0.5))
    ]
    described = {problem.name: json.loads(json.dumps(vars(problem))) for problem in problems}
    return {"rows": rows, "skipped": [], "problems": described}


def test_the_report(load: Any, draw: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report = load("report")
    assert report.tenth_percentile([1.0]) == 1.0
    assert report.tenth_percentile([10.0 * n for n in range(11, 0, -1)]) == pytest.approx(20.0)
    found = report.cells(record(draw, [0.2, 0.8, 0.8, 0.8]))
    assert [cell.problem.shape for cell in found] == [(1000, 4000)] * 4
    assert [cell.torch for cell in found] == pytest.approx([2 / 3, 2, 2, 2])
    report.print_report(record(draw, [0.2, 0.8, 0.8, 0.8]), "again")
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("scan, plain, forward"))
    # 0.2^(1/4) 0.8^(3/4); the percentile lies between 0.2 and 0.8.
    assert row.split()[3:] == ["4", "0.566", "0.380", "0.200", "scan/0", "75%", "of", "4"]
    slowest = printed[printed.index("the slowest of 4") :].splitlines()
    assert "scan/0: 1000x4000 dim=1 float32 plain forward" in slowest[1]
    assert "again --only scan/0" in printed


def test_an_older_build_is_measured_as_it_is(load: Any, draw: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load("measure")
    problem = draw.draw(0, "softmax", 0, draw.LIMITS["cpu"])
    monkeypatch.delattr(torch_dcs_ops, "softmax")
    rows, skipped = measure.measure(problem, measure.Settings("cpu"), measure.Clock("cpu"))
    assert rows == []
    assert [skip.reason for skip in skipped] == ["this build of torch_dcs_ops has no softmax"]


class FakeTimer:
    """Of a GPU: a call returns the milliseconds that it takes, a negative number if it cannot be captured."""

    def once(self, call: Any) -> float:
        return abs(call())

    def medians(self, calls: dict[str, Any]) -> dict[str, str]:
        return dict.fromkeys(calls, "single")

    def graph_medians(self, calls: dict[str, Any]) -> dict[str, str]:
        if any(call() < 0 for call in calls.values()):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return dict.fromkeys(calls, "replayed")


def test_small_problems_are_replayed_where_they_can_be(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load("measure")
    clock = measure.Clock("cpu")
    clock.cuda = FakeTimer()
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    calls = {"dcs": lambda: 0.01, "copy": lambda: 0.002, "torch": lambda: 50.0}
    assert clock.medians(calls, False) == ({"dcs": "single", "copy": "single", "torch": "single"}, set())
    assert clock.medians(calls, True) == (
        {"dcs": "replayed", "copy": "replayed", "torch": "single"}, {"dcs", "copy"},
    )  # fmt: skip
    calls["dcs"] = lambda: -0.01
    assert clock.medians(calls, True) == ({"dcs": "single", "copy": "single", "torch": "single"}, set())


def run_survey(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(BENCHMARKS)
    command = [sys.executable, str(BENCHMARKS / "run.py"), "survey", "--device", "cpu", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_survey_on_the_cpu(tmp_path: Path, draw: ModuleType) -> None:
    output = tmp_path / "survey.json"
    done = run_survey("--seed", "5", "--count", "2", "--elements", "1e3", "1e4", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(output.read_text())
    assert content["survey"]["seed"] == 5
    assert content["environment"]["commit"]
    rows: dict[str, dict[str, Any]] = {}
    for row in content["rows"]:
        rows.setdefault(row["case"], {})[row["name"]] = row
    assert content["problems"].keys() == {f"{family}/{index}" for family in draw.FAMILIES for index in range(2)}
    # What this build lacks is said to be so; everything else is measured.
    for skip in content["skipped"]:
        assert "this build of torch_dcs_ops has no" in skip["reason"], skip
    assert rows.keys() | {skip["case"] for skip in content["skipped"]} == content["problems"].keys()
    for cell in rows.values():
        (floor,) = cell.keys() - {"dcs", "torch"}
        assert cell["dcs"]["fraction"] == pytest.approx(cell["dcs"]["floor_milliseconds"] / cell["dcs"]["milliseconds"])
        assert cell["dcs"]["floor_milliseconds"] >= cell[floor]["milliseconds"] > 0
    assert "torch" in rows["softmax/0"]
    again = run_survey("--seed", "5", "--elements", "1e3", "1e4", "--families", "scan", "--only", "scan/1", "--list")
    assert again.stdout.count("\n") == 1
    assert again.stdout in done.stdout.replace("  (", "\n")


def test_wrong_arguments_are_refused() -> None:
    done = run_survey("--families", "scan,lse")
    assert done.returncode == 2
    assert "--families must be among scan, cumsum" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "scan"], "--only must have problems such as 17 or scan/17, of --families, got scan"),
        (["--only", "scan/-1"], "--only must have problems such as 17 or scan/17, of --families, got scan/-1"),
        (["--only", "3,softmax/1", "--families", "scan"], "--only must have problems .* of --families, got softmax/1"),
        (["--elements", "0", "9"], "--elements must be at least 1 and in order, got 0 9"),
        (["--elements", "10", "5"], "--elements must be at least 1 and in order, got 10 5"),
        (["--match", "["], r"--match must be a regular expression, got \[: "),
    ],
)
def test_wrong_options(load: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit):
        load("command").parse([*arguments, "--list"])
    assert re.search(f"run.py survey: error: {sentence}", capsys.readouterr().err)
