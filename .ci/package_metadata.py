"""What the package's metadata say of its repository: the version, README with absolute links, and Project-URLs.

The build asks for it (pyproject.toml, tool.dynamic-metadata). The version is that of the tag that git finds, `v1.2.3`.
The address is TORCH_DCS_REPOSITORY_URL or, where that is not set, what the checkout was cloned from by https or ssh;
without one links stay relative, and there are no Project-URLs.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")
FIRST = "0.1.0"  # what is developed until there is a tag
DESCRIPTION = re.compile(r"v(.*?)(\d+)-(\d+)-(g\w+?)(-dirty)?")  # git describe --long: tag, steps since, commit
# https://user:password@host/path.git, ssh://git@host/path.git, git@host:path.git; without what is before the host.
REMOTE = re.compile(
    r"(?:(?:https|ssh)://(?:[^@/]*@)?(?P<host>[\w.-]+)/|git@(?P<short>[\w.-]+):)(?P<path>[\w./-]+?)(?:\.git)?/?"
)
PAGES = {"Documentation": "docs", "Changelog": "CHANGELOG.md", "Source": ""}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    url = address_of(ROOT)
    text = with_absolute_links((ROOT / "README.md").read_text(), url)
    urls = {name: f"{url}/blob/main/{page}" if page else url for name, page in PAGES.items()} if url else {}
    return {"version": version_of(ROOT), "readme": {"content-type": "text/markdown", "text": text}, "urls": urls}


def version_of(folder: Path) -> str:
    """TORCH_DCS_VERSION; of a checkout the tag's, or a development version of the next one; of an sdist its own."""
    if named := os.environ.get("TORCH_DCS_VERSION"):
        return named
    about = folder / "PKG-INFO"
    if about.is_file():
        return next(line.split()[1] for line in about.read_text().splitlines() if line.startswith("Version: "))
    if not (folder / ".git").exists():  # an archive of the files, perhaps within another project's checkout
        return f"{FIRST}.dev0"
    found = DESCRIPTION.fullmatch(_git(folder, "describe", "--tags", "--long", "--dirty", "--match", "v[0-9]*"))
    if found is None:
        distance, commit = _git(folder, "rev-list", "--count", "HEAD"), _git(folder, "rev-parse", "--short", "HEAD")
        return f"{FIRST}.dev{distance}+g{commit}" if distance and commit else f"{FIRST}.dev0"
    before, last, distance, commit, dirty = found.groups()
    if distance == "0" and not dirty:
        return before + last
    return f"{before}{int(last) + 1}.dev{distance}+{commit}{'.dirty' if dirty else ''}"


def address_of(folder: Path) -> str:
    """The repository's page on the web, without a slash at its end; "" if there is none."""
    named = os.environ.get("TORCH_DCS_REPOSITORY_URL")
    if named is not None:
        return named.rstrip("/")
    origin = _git(folder, "remote", "get-url", "origin") if (folder / ".git").exists() else ""
    found = REMOTE.fullmatch(origin)
    return f"https://{found['host'] or found['short']}/{found['path']}" if found else ""


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; nothing where it is missing or refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def with_absolute_links(text: str, url: str) -> str:
    """Markdown whose relative links lead into the repository at `url`; unchanged without one."""

    def absolute(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        return f"{image}{label}{url}/{'raw' if image else 'blob'}/main/{target})"

    return LINK.sub(absolute, text) if url else text
