"""Launch configurations of the generated kernels that hold a scan.

The source of such a kernel imports this module in the place of Inductor's `triton_heuristics`, in the processes that
compile kernels as well as in the one that runs them. Of this package only `codegen` imports it, for
the sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import HeuristicType, ReductionHint


class Tile(NamedTuple):
    """What a block takes at a time: rows, steps of each, and the warps to do it with. Rows and steps: powers of 2."""

    rows: int
    steps: int
    num_warps: int


# Measured on an H200 with GAE and plain scans, float32. Time-major: a thread has two columns, so a warp with 64 of them
# needs no other thread's steps (0.91 of the traffic of 1024 steps by 65536 columns; 256 by 8 with 4 warps 0.87 to 0.91,
# 32 by 32 0.72 to 0.80). Fewer columns leave multiprocessors without any: tiles of fewer columns and more steps share
# the steps among threads (1024 by 4096: 8 by 128 0.31 to 0.47, 64 by 16 0.14), or blocks hold whole columns.
MANY_COLUMNS = 16384
TILES = {
    "many columns": (Tile(64, 16, 1),),
    "few columns": (Tile(64, 16, 1), Tile(32, 64, 4), Tile(8, 128, 4)),
    "rows": (Tile(1, 4096, 8), Tile(1, 1024, 4)),
}

# Steps of the columns that a block holds whole, at least and at most. On an H200, GAE in float32: 1024 steps by 4096
# columns 0.94 of the traffic (0.50 by the library's kernel and two around it), 512 by 4096 1.21, 1024 by 1024 1.14,
# 2048 by 4096 0.69.
WHOLE_COLUMNS = (64, 2048)


class Column(NamedTuple):
    """What a thread takes of columns that a block holds whole: successive steps, and values of each operand in all."""

    steps: int
    values: tuple[int, ...]  # to choose from, by timing
    most_warps: int


# 32 steps are faster (GAE of 1024 steps of 4096 columns 0.94 of its traffic, with 16 steps 0.88), but ask for 64 values
# of each operand in a thread's registers. One choice for few operands: timings that lie near each other had the slower
# one taken, 0.77 and not 0.91.
# With 16 warps a thread has 128 registers: enough for one operand (2048 by 4096 0.75 and not 0.67), not for GAE's (1024
# by 4096 0.15 and not 0.75).
FEW_OPERANDS = 4
COLUMNS = {
    "one operand": Column(32, (64,), 16),
    "few operands": Column(32, (64,), 8),
    "many operands": Column(16, (64, 32), 8),
}


def columns_of(operands: int) -> str:
    """Which of COLUMNS a kernel with so many operands takes."""
    return "one operand" if operands == 1 else "few operands" if operands <= FEW_OPERANDS else "many operands"


# Elements of a thread, where a block holds whole rows, and its warps, where short rows leave the choice. All of 4 to 16
# elements are within a tenth of each other.
WHOLE_ROWS = ((8, 4), (16, 2))


def reduction(size_hints: Any, reduction_hint: Any = False, **arguments: Any) -> Any:
    """The decorator of a kernel that loops over time."""
    if _chooses_without_timing(size_hints, **arguments):
        return triton_heuristics.reduction(size_hints, reduction_hint, **arguments)
    columns = "many columns" if size_hints["x"] >= MANY_COLUMNS else "few columns"
    tiles = TILES["rows" if reduction_hint == ReductionHint.INNER else columns]
    configs = (_config(tile, size_hints) for tile in tiles)
    return _autotuned(size_hints, configs, HeuristicType.REDUCTION, **arguments)


def persistent_reduction(
    size_hints: Any, reduction_hint: Any = False, columns: str | None = None, **arguments: Any
) -> Any:
    """The decorator of a kernel that holds whole rows, or whole columns: `columns` is which ones."""
    if columns is not None:
        configs = _whole_column_configs(size_hints, COLUMNS[columns])
        if _chooses_without_timing(size_hints, **arguments):
            configs = itertools.islice(configs, 1)
    elif _chooses_without_timing(size_hints, **arguments):
        return triton_heuristics.persistent_reduction(size_hints, reduction_hint, **arguments)
    else:
        configs = _whole_row_configs(size_hints)
    return _autotuned(size_hints, configs, HeuristicType.PERSISTENT_REDUCTION, **arguments)


def _autotuned(
    size_hints: Any,
    configs: Iterable[Any],
    heuristic_type: HeuristicType,
    *,
    triton_meta: Any = None,
    filename: str | None = None,
    inductor_meta: Any = None,
) -> Any:
    different = {(*config.kwargs.items(), config.num_warps): config for config in configs}
    return triton_heuristics.cached_autotune(
        size_hints,
        configs=list(different.values()),
        triton_meta=triton_meta,
        inductor_meta=inductor_meta,
        heuristic_type=heuristic_type,
        filename=filename,
    )


def _whole_row_configs(size_hints: dict[str, int]) -> Iterator[Any]:
    for elements, num_warps in WHOLE_ROWS:
        rows = max(32 * num_warps * elements // size_hints["r0_"], 1)
        num_warps = min(max(num_warps, size_hints["r0_"] // (32 * 16)), 16)
        yield triton_heuristics.InductorConfig(
            {"XBLOCK": min(rows, size_hints["x"])}, num_warps=num_warps, num_stages=1
        )


def _whole_column_configs(size_hints: dict[str, int], column: Column) -> Iterator[Any]:
    steps = max(size_hints["r0_"], 1)
    num_warps = min(16 if steps >= 2048 else 8 if steps >= 512 else 4 if steps >= 256 else 2, column.most_warps)
    for values in column.values:
        columns = max(32 * num_warps * values // steps, 1)
        yield triton_heuristics.InductorConfig({"XBLOCK": columns}, num_warps=num_warps, num_stages=1)


def _config(tile: Tile, size_hints: dict[str, int]) -> Any:
    blocks = {"XBLOCK": min(tile.rows, size_hints["x"]), "R0_BLOCK": min(tile.steps, size_hints["r0_"])}
    return triton_heuristics.InductorConfig(blocks, num_warps=tile.num_warps, num_stages=1, dynamic_scale_rblock=False)


def _chooses_without_timing(size_hints: Any, *, inductor_meta: Any = None, **_: Any) -> bool:
    """Whether results must not depend on what ran faster: the tiles decide in which order a scan rounds.

    And kernels of more dimensions than rows and time, which these tiles are not for.
    """
    names = ("deterministic", "are_deterministic_algorithms_enabled", "force_filter_reduction_configs")
    return set(size_hints) != {"x", "r0_"} or any((inductor_meta or {}).get(name) for name in names)
