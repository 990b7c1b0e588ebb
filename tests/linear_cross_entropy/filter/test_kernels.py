"""The filter's Triton kernels where there is no GPU: run in the interpreter, and compiled for one that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from linear_cross_entropy.filter.kernel_oracle import GPU, GROUP_ROWS, INTERPRETED, load
from support.sm_90 import compiled_for_sm_90
from support.subprocesses import rare, run_in_the_interpreter

pytest.importorskip("triton")

FILES = [str(Path(__file__).with_name(f"test_{part}.py")) for part in ("columns", "tails", "products")]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run in this process")
@pytest.mark.parametrize("marks", ["not slow", "slow"])
def test_in_the_interpreter(marks: str) -> None:
    """All files in one process: each would take five seconds to start."""
    run_in_the_interpreter(*FILES, "-m", marks)


# Beside the pointers to half-precision numbers: what the kernels' arguments are.
KINDS = {
    "i1": ["valid_ptr"],
    "u8": ["alive_ptr", "own_valid_ptr"],
    "i32": ["slot_ptr", "index_ptr", "count_ptr", "counts_ptr", "since_ptr", "rank_ptr", "bounds_ptr"],
    "i64": ["target_ptr", "rows_ptr"],
    "fp32": [
        "lse_ptr",
        "own_lse_ptr",
        "bias_ptr",
        "a_ptr",
        "h_ptr",
        "mass_ptr",
        "sums_ptr",
        "parts_ptr",
        "factors_ptr",
        "single_ptr",
        "evens_ptr",
        "table_ptr",
        "softcap",
        "scale",
        "eps",
        "smallest",
    ],
}
# A small tile is compiled in a quarter of the time of one of 128 by 128.
PRODUCT_OPTIONS = {"PRECISION": "tf32", "DEPTH": 32, "COLUMNS": 32, "ROWS": 64, "BAND": 8, "PARTS": 4, "EVEN": False}


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        ("filter_columns", "sum_groups", {"ROWS": 4}),
        ("filter_columns", "mark_rows", {}),
        ("filter_columns", "count_alive", {}),
        ("filter_columns", "order_columns", {}),
        ("filter_tails", "rank_rows", {"ROWS": 16, "BLOCK": 512}),
        ("filter_tails", "take_rows", {"BLOCK": 2048, "EACH": 32}),
        ("filter_tails", "part_group", {"kinds": {"single_ptr": "bf16", "valid_ptr": "u8"}}),
        ("filter_tails", "weigh_rows", {"ROWS": 8, "BLOCK": 512, "kinds": {"index_ptr": "i64", "sums_ptr": "bf16"}}),
        ("filter_tails", "add_rows", {"ROWS": 8, "BLOCK": 512}),
        ("filter", "gather_rows", {"ROWS": 2, "WORD": 8}),
        ("filter", "pack_rows", {"ROWS": 1}),
        ("filter", "sum_kept", {"ROWS": 64, "BLOCK": 64}),
        ("compact_rows", "order_targets", {}),
        ("filter_products", "multiply_kept", PRODUCT_OPTIONS),
        ("filter_products", "add_products", PRODUCT_OPTIONS),
    ],
)
def test_compiles_for_sm_90(module: str, name: str, options: dict[str, Any]) -> None:
    """With all options on, where no GPU is: the interpreter knows nothing of types that must agree."""
    assert compiled(module, name, options).asm["ptx"]


WIDE_ROWS = ("kept_ptr", "weight_ptr", "weight_stride", "out_ptr", "out_stride", "D")


# The tile of a kernel with many aligned arguments and results of half precision; few, which take longer, are rare.
WIDE_KERNELS = (
    (
        ("filter_products_tma", "multiply_kept_in_bulk", "BULK_KEPT_TILE"),
        (("weight_ptr", "weight_stride", "D"), WIDE_ROWS[1:]),
    ),
    (
        ("filter_products_tma", "add_products_in_bulk", "BULK_TILE"),
        ((), ("total_ptr", "rest_ptr", "total_stride", "D")),
    ),
    (("filter_products", "multiply_kept", "WIDE"), ((), WIDE_ROWS)),
)
WIDE = [
    (pytest.param if aligned == alignments[-1] and total == "bf16" else rare)(*kernel, aligned, total)
    for kernel, alignments in WIDE_KERNELS
    for aligned in alignments
    for total in ("bf16", "fp32")
]


@pytest.mark.skipif(INTERPRETED, reason="compiled, not run")
@pytest.mark.parametrize(("module", "name", "tile", "aligned", "total"), WIDE)
def test_wide_tiles_fit(module: str, name: str, tile: str, aligned: tuple[str, ...], total: str) -> None:
    """Into the shared memory of the devices that they are chosen for, however much of it the compiler plans."""
    tiles = load("filter_tiles")
    sizes = getattr(tiles, tile)
    options = PRODUCT_OPTIONS | {"ROWS": sizes.rows, "COLUMNS": sizes.columns, "DEPTH": sizes.depth, "PARTS": 2}
    options |= {"STAGES": sizes.stages, "kinds": dict.fromkeys(("out_ptr", "total_ptr", "rest_ptr"), total)}
    assert compiled(module, name, options, sizes.warps, aligned).metadata.shared <= tiles.BULK_BYTES


def compiled(module: str, name: str, options: dict[str, Any], warps: int = 4, aligned: tuple[str, ...] = ()) -> Any:
    options = dict(options)
    kernel = getattr(load(module), name)
    names: list[str] = kernel.arg_names
    changed = options.pop("kinds", {})
    known = {"UNIT": 8, "GROUP_ROWS": GROUP_ROWS, "BLOCK": 1024, "BLOCKS": 128, **options}
    constants = {argument: known.get(argument, True) for argument in names if argument == argument.upper()}
    constants = {argument: value for argument, value in constants.items() if argument not in ("V", "D", "G", "K")}
    kinds = {argument: kind for kind, arguments in KINDS.items() for argument in arguments} | changed
    kinds = {argument: ("*" if argument.endswith("_ptr") else "") + kind for argument, kind in kinds.items()}
    blocks = {"kept": ("ROWS", "DEPTH"), "left": ("DEPTH", "ROWS"), "right": ("DEPTH", "COLUMNS")}
    for argument in blocks.keys() & set(names):
        kinds[argument] = "tensordesc<bf16[{}, {}]>".format(*(constants[of] for of in blocks[argument]))
    return compiled_for_sm_90(kernel, constants, kinds, pointer="*bf16", warps=warps, aligned=aligned)
