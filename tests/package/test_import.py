"""The package itself: what importing it costs, what it reports, how kernels are chosen."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_dcs_ops
from torch_dcs_ops import _info
from torch_dcs_ops.compile.inductor import probes, support, versions

from support.subprocesses import environment

ROOT = Path(__file__).parents[2]


def run(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in environment().items() if k != "TORCH_DCS_KERNELS"} | changes
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=ROOT)


def test_import_is_lean() -> None:
    """Nothing beyond what `import torch` imports: no triton, no compiler, no functorch compile modules."""
    code = (
        "import sys, torch; before = set(sys.modules); import torch_dcs_ops;"
        "print('\\n'.join(sorted(m for m in set(sys.modules) - before if not m.startswith('torch_dcs_ops'))))"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.split())
    heavy = ("triton", "torch._inductor", "torch._dynamo", "torch._functorch.aot", "functorch", "transformers", "numpy")
    assert not [m for m in imported if m.startswith(heavy)], imported
    assert len(imported) < 40, imported


@pytest.mark.slow
def test_import_without_numpy_warns_of_nothing() -> None:
    """And leaves the filters that torch sets, and the user's."""
    code = (
        "import sys, warnings; sys.modules['numpy'] = None;"
        "warnings.filterwarnings('ignore', message='Failed to initialize NumPy', category=UserWarning);"
        "before = list(warnings.filters); import {0};"
        "print([str(one) for one in warnings.filters], all(one in warnings.filters for one in before))"
    )
    results = [run(code.format(package)) for package in ("torch_dcs_ops", "torch")]
    assert results[0].stdout == results[1].stdout
    assert results[0].stdout.endswith(" True\n")
    result = run("import sys; sys.modules['numpy'] = None; import torch_dcs_ops")
    assert (result.returncode, result.stderr) == (0, "")


def test_public_names() -> None:
    assert set(torch_dcs_ops.__all__) == {
        "__version__",
        "compile",
        "cumsum",
        "discounted_cumsum",
        "discounted_cumsum_left",
        "discounted_cumsum_right",
        "distributed",
        "info",
        "linear_cross_entropy",
        "linear_kl_div",
        "linear_log_probs",
        "linear_policy_loss",
        "linear_top_k",
        "log_bmm",
        "max_bmm",
        "nn",
        "returns",
        "sample_bmm",
        "softmax",
    }
    assert all(getattr(torch_dcs_ops, name).__doc__ for name in torch_dcs_ops.__all__)
    assert (Path(torch_dcs_ops.__file__).parent / "py.typed").exists()


def test_info_is_complete_and_plain() -> None:
    info = torch_dcs_ops.info()
    assert json.loads(json.dumps(info)) == info
    assert set(info) == {"versions", "kernels", "libraries", "compile", "devices", "missing", "forced"}
    assert info["versions"]["torch"] == torch.__version__
    for device in ("cpu", "cuda"):
        assert info["kernels"][device]["kind"] in ("native", "triton", "reference")
        assert info["kernels"][device]["reason"]
        own = (device, info["kernels"][device]["kind"]) in (("cuda", "native"), ("cuda", "triton"), ("cpu", "triton"))
        assert info["kernels"][device]["left_to_torch"] == ([] if own else ["softmax"])
    text = str(info)
    for item in info["missing"]:
        assert item["name"] in text
        assert item["reason"] in text


def test_info_says_what_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "part of the kernels" in torch_dcs_ops.info()["compile"]["scans"]
    assert "one op" in torch_dcs_ops.info()["compile"]["losses"]
    assert not torch_dcs_ops.info()["compile"]["enabled"]
    torch_dcs_ops.compile.enable()
    assert torch_dcs_ops.info()["compile"]["enabled"]
    torch_dcs_ops.compile.disable()
    monkeypatch.setitem(support._failures, "scans", ["UnknownSourceError: why"])
    assert torch_dcs_ops.info()["compile"]["scans"].endswith("; not in 1 graph: UnknownSourceError: why")
    monkeypatch.setitem(probes._found, "scans", ("torch._inductor.ir.Scan",))
    assert torch_dcs_ops.info()["compile"]["scans"].endswith("lacks torch._inductor.ir.Scan")
    monkeypatch.setattr(versions, "TESTED_VERSIONS", ((2, 0),))
    for name in ("scans", "losses"):
        assert "calls of their own: tested with torch 2.0, this is" in torch_dcs_ops.info()["compile"][name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_info_says_native_only_where_a_library_is_loaded(device: str) -> None:
    info = torch_dcs_ops.info()
    library = {"cpu": "_C.so", "cuda": "_C_cuda.so"}[device]
    assert (info["kernels"][device]["kind"] == "native") == info["libraries"][library]["loaded"]


@pytest.mark.slow
def test_build_info_explains_a_missing_library(tmp_path: Path) -> None:
    """A copy of the package without libraries, beside the build's own account of why."""
    package = tmp_path / "torch_dcs_ops"
    source = Path(torch_dcs_ops.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__"))
    code = "import torch_dcs_ops as d; print(d.info()['kernels']['cpu']['kind'], [str(d.info())])"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}; {code}"]

    def report() -> str:
        variables = {k: v for k, v in os.environ.items() if k != "TORCH_DCS_KERNELS"}
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=variables).stdout

    assert "a pure-Python build, or a checkout that is not installed" in report()
    reason = "no room was left"
    part = {"built": False, "reason": reason, "compiler": None, "architectures": []}
    (package / "_build_info.json").write_text(json.dumps({"cpu": part, "cuda": part}))
    text = report()
    assert text.startswith("reference")
    assert f"_C.so was left out of the build: {reason}" in text
    assert "to get it: install the package where there is a C++ compiler" in text


@pytest.mark.parametrize(
    ("architecture", "major", "minor", "serves"),
    [
        ("90", 9, 0, True),
        ("90", 12, 0, True),  # with PTX
        ("90-real", 10, 0, False),
        ("80-real", 8, 9, True),
        ("90-real", 8, 0, False),
        ("100-virtual", 12, 0, True),
        ("100-virtual", 9, 0, False),
        ("90a-real", 9, 0, True),
    ],
)
def test_which_gpus_code_serves(architecture: str, major: int, minor: int, serves: bool) -> None:
    assert _info._serves(architecture, major, minor) == serves


def test_reference_kernels_by_name() -> None:
    code = (
        "import torch, torch_dcs_ops as d; info = d.info();"
        "assert {k['kind'] for k in info['kernels'].values()} == {'reference'}, info;"
        "assert info['forced'] == 'reference' and 'TORCH_DCS_KERNELS=reference' in str(info);"
        "x = torch.ones(2, 3, requires_grad=True); d.discounted_cumsum(x, 0.5).sum().backward();"
        "assert x.grad.tolist() == [[1, 1.5, 1.75]] * 2, x.grad;"
        "assert d.cumsum(torch.tensor([1, 2])).tolist() == [1, 3]"
    )
    result = run(code, TORCH_DCS_KERNELS="reference")
    assert result.returncode == 0, result.stderr


def test_an_unknown_kind_of_kernels_ends_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the module that reads it as it is imported, which needs no process of its own."""
    monkeypatch.setenv("TORCH_DCS_KERNELS", "fast")
    spec = importlib.util.find_spec("torch_dcs_ops._native")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="TORCH_DCS_KERNELS must be one of native, triton, reference, got 'fast'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_native_by_name_needs_the_libraries() -> None:
    code = "import torch_dcs_ops; print(torch_dcs_ops.info()['kernels']['cpu']['kind'])"
    result = run(code, TORCH_DCS_KERNELS="native")
    if any(Path(place, "_C.so").is_file() for place in torch_dcs_ops.__path__):
        assert result.stdout.split() == ["native"], result.stderr
    else:
        assert "ImportError: TORCH_DCS_KERNELS=native, but _C.so" in result.stderr
