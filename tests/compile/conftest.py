from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_dcs_ops.compile.passes import findings, match_steps


@pytest.fixture
def nothing_said() -> Iterator[None]:
    """No reason has been given for a loss that is left alone: each is given once."""
    for known in (findings._said, match_steps._softcaps):
        known.clear()
    yield
    for known in (findings._said, match_steps._softcaps):
        known.clear()
