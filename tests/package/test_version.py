"""The version of a build: by the tags of git, by an sdist's metadata, as it is told. And its address."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "package_metadata.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not a source checkout")


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable in ("TORCH_DCS_VERSION", "TORCH_DCS_REPOSITORY_URL", "GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(variable, raising=False)
    spec = importlib.util.spec_from_file_location("package_metadata", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *named, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_tags(tmp_path: Path, metadata: ModuleType) -> None:
    git(tmp_path, "init", "-q")
    assert metadata.version_of(tmp_path) == "0.1.0.dev0"  # no commit yet
    file = tmp_path / "file"
    for text in ("a", "b"):
        file.write_text(text)
        git(tmp_path, "add", "file")
        git(tmp_path, "commit", "-q", "-m", text)
    assert re.fullmatch(r"0\.1\.0\.dev2\+g[0-9a-f]+", metadata.version_of(tmp_path))
    git(tmp_path, "tag", "other")
    git(tmp_path, "tag", "v1.2.3rc1")
    assert metadata.version_of(tmp_path) == "1.2.3rc1"
    file.write_text("c")
    assert re.fullmatch(r"1\.2\.3rc2\.dev0\+g[0-9a-f]+\.dirty", metadata.version_of(tmp_path))
    git(tmp_path, "commit", "-q", "-a", "-m", "c")
    assert re.fullmatch(r"1\.2\.3rc2\.dev1\+g[0-9a-f]+", metadata.version_of(tmp_path))
    git(tmp_path, "tag", "v1.2.3")
    assert metadata.version_of(tmp_path) == "1.2.3"


def test_without_tags(tmp_path: Path, metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metadata.version_of(tmp_path) == "0.1.0.dev0"  # an archive of the files
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: torch_dcs_ops\nVersion: 4.5.6\n\nVersion: 7\n")
    assert metadata.version_of(tmp_path) == "4.5.6"  # an sdist
    monkeypatch.setenv("TORCH_DCS_VERSION", "7.8.9")
    assert metadata.version_of(tmp_path) == "7.8.9"
    assert metadata.dynamic_metadata({}, {})["version"] == "7.8.9"


def test_without_git(tmp_path: Path, metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metadata.version_of(tmp_path) == "0.1.0.dev0"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_address(tmp_path: Path, metadata: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    assert metadata.address_of(tmp_path) == ""
    git(tmp_path, "remote", "add", "origin", "/somewhere/else")
    for origin, address in (
        ("/somewhere/else", ""),
        ("https://name:secret@host.example/owner/name.git", "https://host.example/owner/name"),
        ("https://host.example/owner/name/", "https://host.example/owner/name"),
        ("git@host.example:owner/a-name.git", "https://host.example/owner/a-name"),
        ("ssh://git@host.example/owner/name", "https://host.example/owner/name"),
    ):
        git(tmp_path, "remote", "set-url", "origin", origin)
        assert metadata.address_of(tmp_path) == address
    monkeypatch.setenv("TORCH_DCS_REPOSITORY_URL", "https://named.example/name/")
    assert metadata.address_of(tmp_path) == "https://named.example/name"
