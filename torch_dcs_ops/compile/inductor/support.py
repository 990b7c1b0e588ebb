"""Which of the package's parts work with this torch, and what is said, once, of those that do not.

A part that does not is left out: the ops are plain calls in compiled graphs then.
"""

from __future__ import annotations

import functools
import logging

import torch

from . import probes, versions

logger = logging.getLogger("torch_dcs_ops")

# What a user misses without a part of `probes.PARTS`; of "tracing" nothing is said, as it is asked at every import.
_LOSSES = {
    "backend": 'backend="dcs" and compile.enable() do what the ordinary backend does',
    "passes": "linear + cross-entropy is not fused, and discounts are not known while compiling",
    "scans": "scans do not fuse with other operations",
}

# Why a graph was compiled without a part that this torch has what it needs for, and how many graphs were.
_failures: dict[str, list[str]] = {}


@functools.cache
def has(part: str) -> bool:
    """Whether this torch is a tested one and has all that a part needs."""
    return versions.is_tested() and not probes.missing(part)


def supports(part: str) -> bool:
    """`has`, and says what is missing, once."""
    if has(part):
        return True
    if versions.is_tested():
        _warn_of_missing(part)
    else:
        _warn_of_version()
    return False


def can_hook() -> bool:
    """Whether the compiler takes a pre-grad pass, and says what is missing, once. With an untested torch the pass is
    one that does nothing."""
    if not versions.is_tested():
        _warn_of_version()
    elif probes.missing("backend"):
        _warn_of_missing("backend")
    return not probes.missing("backend")


def failed(part: str, reason: BaseException | str) -> None:
    """Records that a graph was compiled without a part, and says so, once."""
    reasons = _failures.setdefault(part, [])
    if isinstance(reason, BaseException):
        reason = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}"
    reasons.append(reason)
    level = logging.WARNING if len(reasons) == 1 else logging.DEBUG
    logger.log(level, "%s in a graph under torch %s: %s", _LOSSES[part], torch.__version__, reason)


def hindrance(part: str) -> str | None:
    """Why a part is left out, as far as that is known without importing the compiler; None: it is not."""
    if not versions.is_tested():
        return f"tested with torch {versions.tested()}, this is {torch.__version__}"
    missing = probes.found_missing(part)
    return f"torch {torch.__version__} lacks {missing[0]}" if missing else None


def failures(part: str) -> str | None:
    """In how many graphs a part was left out and why in the first one; None: in none."""
    reasons = _failures.get(part)
    if not reasons:
        return None
    return f"not in {len(reasons)} {'graph' if len(reasons) == 1 else 'graphs'}: {reasons[0]}"


@functools.cache
def _warn_of_version() -> None:
    logger.warning(
        "torch_dcs_ops is tested with torch %s; under torch %s nothing is fused, its ops are plain calls",
        versions.tested(),
        torch.__version__,
    )


@functools.cache
def _warn_of_missing(part: str) -> None:
    missing = probes.missing(part)
    rest = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    logger.warning("%s: torch %s lacks %s%s", _LOSSES[part], torch.__version__, missing[0], rest)
