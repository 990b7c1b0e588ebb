"""`make hub`: the kernels library loads the repository from its folder, without a network, in a process of its own.

The wheel is one made here of this installation's files; `make hub` takes that of `make wheel`, with the same names.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import torch_dcs_ops
import torch_dcs_ops.triton_kernels

from support.subprocesses import environment

ROOT = Path(__file__).parents[2]
MAKE = ROOT / ".ci" / "hub.py"
pytestmark = pytest.mark.skipif(not MAKE.is_file(), reason="not a source checkout")
VERSION = "9.8.7"
SYSTEM = f"{platform.machine()}-{platform.system().lower()}"
NO_EDITABLE_INSTALL = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]"
LOAD = """
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path({!r}), backend="cpu")
"""
USE = """
import torch
from torch.nn.functional import cross_entropy
x, w, t = torch.randn(9, 8), torch.randn(20, 8, requires_grad=True), torch.randint(20, (9,))
torch.testing.assert_close(kernel.linear_cross_entropy(x, w, t), cross_entropy(x @ w.T, t))
log_probs, entropy = kernel.linear_log_probs(x, w, t)
torch.testing.assert_close(-log_probs, cross_entropy(x @ w.T, t, reduction="none"))
log_probs.sum().backward()
assert w.grad.abs().sum() > 0
assert kernel.discounted_cumsum(torch.ones(3), 0.5).tolist() == [1.75, 1.5, 1]
import torch_dcs_ops
assert torch_dcs_ops is kernel.torch_dcs_ops
import torch_dcs_ops.returns, torch_dcs_ops.triton_kernels
print(torch_dcs_ops.__version__, torch_dcs_ops.returns.__file__, torch_dcs_ops.triton_kernels.__file__)
print(torch_dcs_ops.info()["kernels"]["cpu"]["kind"])
"""


def wheel(folder: Path, facts: dict[str, Any] | None, version: str, whole: bool) -> Path:
    """With the libraries that facts, `_build_info.json`, says are built; an empty one for CUDA.

    Of the modules all, or the first alone: what a process loads that has the package already.
    """
    path = folder / f"torch_dcs_ops-{version}-py3-none-any.whl"
    packages = {"torch_dcs_ops": torch_dcs_ops, "torch_dcs_ops/triton_kernels": torch_dcs_ops.triton_kernels}
    with zipfile.ZipFile(path, "w") as archive:
        for name, package in packages.items():
            # An editable install also looks in the checkout, for the examples; its virtual environment is in there too.
            for place in (place for place in package.__path__ if not Path(place, "pyproject.toml").is_file()):
                for file in Path(place).rglob("*.py" if whole else "__init__.py"):
                    inside = f"{name}/{file.relative_to(place)}"
                    if inside not in archive.namelist():
                        archive.write(file, inside)
        if facts is not None:
            archive.writestr("torch_dcs_ops/_build_info.json", json.dumps(facts))
            (library,) = libraries()
            archive.write(library, "torch_dcs_ops/_C.so")
            if facts["cuda"]["built"]:
                archive.writestr("torch_dcs_ops/_C_cuda.so", "")
        metadata = f"Metadata-Version: 2.1\nName: torch_dcs_ops\nVersion: {version}\n"
        archive.writestr(f"torch_dcs_ops-{version}.dist-info/METADATA", metadata)
    return path


def libraries() -> list[Path]:
    return [Path(place, "_C.so") for place in torch_dcs_ops.__path__ if Path(place, "_C.so").is_file()]


def build_info(cuda: bool = False) -> dict[str, Any]:
    if not libraries():
        pytest.skip("a pure-Python build")
    built = {"built": True, "reason": None, "compiler": "nvcc 13.0.88", "architectures": ["80-real", "90a-real", "100"]}
    left_out = {"built": False, "reason": "left out", "compiler": None, "architectures": []}
    cpu = {"built": True, "reason": None, "compiler": "GNU 12.2.0"}
    return {"version": VERSION, "needs_torch": "2.11", "cpu": cpu, "cuda": built if cuda else left_out}


def make(folder: Path, of: dict[str, Any] | None, version: str = VERSION, *, whole: bool = False) -> Path:
    made = wheel(folder, of, version, whole)
    subprocess.run([sys.executable, str(MAKE), str(made), str(folder / "hub")], check=True, timeout=60)
    return folder / "hub"


def run(folder: Path, *code: str) -> subprocess.CompletedProcess[str]:
    variables = {**environment(), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    for name in ("TORCH_DCS_KERNELS", "TRITON_INTERPRET"):
        variables.pop(name, None)
    command = [sys.executable, "-c", "\n".join(code)]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("pure", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["library", "pure"])
def test_load_and_use(tmp_path: Path, pure: bool) -> None:
    pytest.importorskip("kernels", reason="the kernels library is not installed")
    hub = make(tmp_path, None if pure else build_info(), whole=True)
    done = run(tmp_path, NO_EDITABLE_INSTALL, LOAD.format(str(hub)), USE)
    assert done.returncode == 0, done.stderr
    version, *files, kind = done.stdout.split()
    (variant,) = (hub / "build").iterdir()
    assert version == VERSION
    assert [Path(file).is_relative_to(variant) for file in files] == [True, True]
    assert kind == ("reference" if pure else "native")


def entry(hub: Path) -> Any:
    """What get_local_kernel does once it has found the variant."""
    (variant,) = (hub / "build").iterdir()
    spec = importlib.util.spec_from_file_location("_hub_entry", variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_version_a_process(tmp_path: Path) -> None:
    """In this process, which has imported the installed package."""
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    kernel = entry(make(tmp_path / "same", None, torch_dcs_ops.__version__))
    assert kernel.linear_log_probs is torch_dcs_ops.linear_log_probs
    got = f"got {torch_dcs_ops.__version__} of {torch_dcs_ops.__file__}, imported already, and {VERSION} of "
    with pytest.raises(ImportError, match=re.escape(f"torch_dcs_ops: a process must use one version, {got}")):
        entry(make(tmp_path / "other", None))


@pytest.mark.slow
def test_an_editable_install_is_not_mixed_in(tmp_path: Path) -> None:
    if not any("Redirecting" in type(finder).__name__ for finder in sys.meta_path):
        pytest.skip("torch_dcs_ops is not installed in editable mode")
    (variant,) = (make(tmp_path, None) / "build").iterdir()
    done = run(tmp_path, f"import runpy; runpy.run_path({str(variant / '__init__.py')!r})")
    assert "torch_dcs_ops: its modules must be those of" in done.stderr


def test_variants(tmp_path: Path) -> None:
    """Names as kernels.variants parses them; the CUDA library is in the variant of its toolkit alone."""
    hub = make(tmp_path, build_info(cuda=True))
    cpu, cuda = f"torch-stable-abi211-cpu-{SYSTEM}", f"torch-stable-abi211-cu130-{SYSTEM}"
    assert {path.name for path in (hub / "build").iterdir()} == {cpu, cuda}
    metadata = [json.loads((hub / "build" / name / "metadata.json").read_text()) for name in (cpu, cuda)]
    assert [entry["backend"] for entry in metadata] == [
        {"type": "cpu"},
        {"type": "cuda", "archs": ["8.0", "9.0a", "10.0+PTX"]},
    ]
    assert metadata[0]["id"] != metadata[1]["id"]
    shared = [{path.name for path in (hub / "build" / name / "torch_dcs_ops").glob("*.so")} for name in (cpu, cuda)]
    assert shared == [{"_C.so"}, {"_C.so", "_C_cuda.so"}]
