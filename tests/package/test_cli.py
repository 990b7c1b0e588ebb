"""python -m torch_dcs_ops {info,demo,bench}."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dcs_ops
from torch_dcs_ops import _native, _plan, cli
from torch_dcs_ops.cli import commands

from support.subprocesses import environment


def test_info_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "torch_dcs_ops", "info"]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    for word in ("torch", "triton", "cpu", "cuda"):
        assert word in done.stdout


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["kernels"]) == {"cpu", "cuda"}


needs_library = pytest.mark.skipif(not _native.CPU_LIBRARY.loaded, reason="the compiled library makes the plan")


@needs_library
def test_info_of_a_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_plan, "current_limits", lambda: _plan.H200)
    assert cli.main(["info", "--plan", "10000000x2", "float32", "--dim", "-2"]) == 0
    assert "\n> stream_columns " in capsys.readouterr().out
    arguments = ["info", "--plan", "4096x4096", "float16", "--gamma", "step", "--reset", "--initial", "--reverse"]
    assert cli.main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kernel"] == "flat_rows"
    assert cli.main(["info", "--plan", "4096x4096", "float16", "--window", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] == "direct_window"


@needs_library
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plan", "4096by4096", "float32"], "SHAPE must be sizes such as 4096x4096, got '4096by4096'"),
        (["--plan", "4x4", "float32", "--dim", "5"], "dim must be in [-2, 1] for a 2-D input, got 5"),
        (["--plan", "4x4", "float32", "--gamma", "all"], "invalid choice: 'all'"),
        (["--reset"], "--plan SHAPE DTYPE is missing"),
    ],
)
def test_info_refuses_a_plan(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", *arguments])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["info", "--fast"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["ppo"]])
def test_demo_names_what_is_missing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_DEMO_NEEDS", ("numpy", "no_such_package_dcs"))
    assert cli.main(["demo", *arguments]) == 1
    assert "no_such_package_dcs missing; pip install 'torch_dcs_ops[demo]'" in capsys.readouterr().err


def test_demo_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "_DEMO_NEEDS", ("no_such_package_dcs",))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["demo", "--help"])
    printed = capsys.readouterr().out
    assert "{ppo,reinforce," in printed
    assert "torch_dcs_ops[demo]" in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"torch_dcs_ops {torch_dcs_ops.__version__}\n"
    assert torch_dcs_ops.info()["versions"]["torch_dcs_ops"] == torch_dcs_ops.__version__


@pytest.mark.slow
def test_a_reader_that_stops_reading() -> None:
    """`info | head -1`: a pipe whose other end is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torch_dcs_ops", "info"]
    done = subprocess.run(command, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert "BrokenPipeError" not in done.stderr


@pytest.mark.parametrize(
    ("part", "option"),
    [
        ("ppo", "--task"),
        ("reinforce", "--updates"),
        ("language-model", "--steps"),
        ("crf-tagger", "--steps"),
        ("grpo", "--steps"),
        ("distil", "--steps"),
    ],
)
def test_demo_passes_the_options_of_a_part_on(part: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    if any(importlib.util.find_spec(name) is None for name in commands._DEMO_NEEDS):
        pytest.skip("the demo's packages are not installed")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["demo", part, "--help"])
    assert option in capsys.readouterr().out


def test_demo_runs_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []

    def run(part: str, arguments: list[str]) -> int:
        ran.append((part, arguments))
        return len(ran) - 1

    monkeypatch.setattr(commands, "_DEMO_NEEDS", ())
    monkeypatch.setattr(commands, "_run_example", run)
    assert cli.main(["demo", "--seed", "3"]) == 2
    assert ran == [(part, ["--seed", "3"]) for part in ("ppo", "language-model", "crf-tagger")]
    assert cli.main(["demo", "language-model", "--steps", "2"]) == 3
    assert ran[3:] == [("language-model", ["--steps", "2"])]


@pytest.mark.parametrize("arguments", [["fly"], ["--steps", "2"], ["--seed", "x"]])
def test_demo_refuses_options_of_no_part(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_DEMO_NEEDS", ())
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", *arguments])
    assert "{ppo,reinforce,language-model,crf-tagger,grpo,distil}" in capsys.readouterr().err


def test_bench_outside_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "site-packages" / "torch_dcs_ops" / "cli" / "commands.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench"]) == 1
    assert "run this in a source checkout" in capsys.readouterr().err


def test_bench_passes_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    if commands.find_benchmarks() is None:
        pytest.skip("not a source checkout")
    assert cli.main(["bench", "--device", "cpu", "--only", "^no such case$"]) == 0
