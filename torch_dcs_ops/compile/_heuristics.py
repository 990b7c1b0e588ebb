"""Launch configurations of the generated kernels that hold a scan.

The source of such a kernel imports this module in the place of Inductor's `triton_heuristics`, in the processes that
compile kernels as well as in the one that runs them; it is imported nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import HeuristicType, ReductionHint


class Tile(NamedTuple):
    """What a block takes at a time: rows, steps of each, and the warps to do it with. Rows and steps: powers of 2."""

    rows: int
    steps: int
    num_warps: int


# Timed beside Inductor's own. Time-major: a thread has two rows, so a warp with 64 rows or more needs no other thread's
# steps, and takes as many as fit its registers; the tiles of fewer rows and more steps are for few columns. Estimates.
TILES = {
    "time-major": (
        Tile(64, 8, 1),
        Tile(64, 16, 1),
        Tile(128, 16, 2),
        Tile(256, 8, 4),
        Tile(32, 32, 2),
        Tile(32, 64, 4),
        Tile(16, 64, 4),
        Tile(8, 128, 4),
    ),
    "batch-major": (Tile(1, 1024, 4), Tile(1, 2048, 4), Tile(2, 1024, 8), Tile(1, 4096, 8)),
}

# Rows of a block and its warps, where a block holds whole rows. Estimates.
WHOLE_ROWS = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 2), (4, 4), (8, 4), (16, 4))


def reduction(
    size_hints: Any,
    reduction_hint: Any = False,
    triton_meta: Any = None,
    filename: str | None = None,
    inductor_meta: Any = None,
) -> Any:
    """The decorator of a kernel that loops over time."""
    arguments: dict[str, Any] = {"triton_meta": triton_meta, "inductor_meta": inductor_meta, "filename": filename}
    if set(size_hints) != {"x", "r0_"} or _chooses_without_timing(inductor_meta):
        return triton_heuristics.reduction(size_hints, reduction_hint, **arguments)
    configs = triton_heuristics.reduction(size_hints, reduction_hint, return_configs=True, **arguments)
    layout = "batch-major" if reduction_hint == ReductionHint.INNER else "time-major"
    return triton_heuristics.cached_autotune(
        size_hints,
        configs=[*(_config(tile, size_hints) for tile in TILES[layout]), *configs],
        heuristic_type=HeuristicType.REDUCTION,
        **arguments,
    )


def persistent_reduction(
    size_hints: Any,
    reduction_hint: Any = False,
    triton_meta: Any = None,
    filename: str | None = None,
    inductor_meta: Any = None,
) -> Any:
    """The decorator of a kernel that holds whole rows."""
    arguments: dict[str, Any] = {"triton_meta": triton_meta, "inductor_meta": inductor_meta, "filename": filename}
    if set(size_hints) != {"x", "r0_"} or _chooses_without_timing(inductor_meta):
        return triton_heuristics.persistent_reduction(size_hints, reduction_hint, **arguments)
    configs = triton_heuristics.persistent_reduction(size_hints, reduction_hint, return_configs=True, **arguments)
    return triton_heuristics.cached_autotune(
        size_hints,
        configs=[*_whole_row_configs(size_hints), *configs],
        heuristic_type=HeuristicType.PERSISTENT_REDUCTION,
        **arguments,
    )


def _whole_row_configs(size_hints: dict[str, int]) -> list[Any]:
    """Tiles that give a thread from 4 to 16 elements."""
    configs = []
    for rows, num_warps in WHOLE_ROWS:
        if rows <= size_hints["x"] and 4 <= rows * size_hints["r0_"] // (32 * num_warps) <= 16:
            configs.append(triton_heuristics.InductorConfig({"XBLOCK": rows}, num_warps=num_warps, num_stages=1))
    return configs


def _config(tile: Tile, size_hints: dict[str, int]) -> Any:
    blocks = {"XBLOCK": min(tile.rows, size_hints["x"]), "R0_BLOCK": min(tile.steps, size_hints["r0_"])}
    return triton_heuristics.InductorConfig(blocks, num_warps=tile.num_warps, num_stages=1, dynamic_scale_rblock=False)


def _chooses_without_timing(inductor_meta: Any) -> bool:
    """Whether results must not depend on what ran faster: the tiles decide in which order a scan rounds."""
    return any(
        inductor_meta.get(key)
        for key in ("deterministic", "are_deterministic_algorithms_enabled", "force_filter_reduction_configs")
    )
