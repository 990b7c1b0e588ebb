"""What the package's metadata say of its repository: README with absolute links, and Project-URLs.

The build asks for it (pyproject.toml, tool.dynamic-metadata). The address is TORCH_DCS_REPOSITORY_URL, which who
publishes a wheel sets; without it links stay relative, and there are no Project-URLs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")
PAGES = {"Documentation": "docs", "Changelog": "CHANGELOG.md", "Source": ""}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    url = os.environ.get("TORCH_DCS_REPOSITORY_URL", "").rstrip("/")
    text = with_absolute_links((ROOT / "README.md").read_text(), url)
    urls = {name: f"{url}/blob/main/{page}" if page else url for name, page in PAGES.items()} if url else {}
    return {"readme": {"content-type": "text/markdown", "text": text}, "urls": urls}


def with_absolute_links(text: str, url: str) -> str:
    """Markdown whose relative links lead into the repository at `url`; unchanged without one."""

    def absolute(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        return f"{image}{label}{url}/{'raw' if image else 'blob'}/main/{target})"

    return LINK.sub(absolute, text) if url else text
