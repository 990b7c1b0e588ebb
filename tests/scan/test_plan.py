"""Which CUDA kernel takes a scan (dcs::scan_plan, `info --plan`), for the limits of an H200: no GPU is asked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import torch_dcs_ops
from torch_dcs_ops import _native, _plan

pytestmark = pytest.mark.skipif(not _native.CPU_LIBRARY.loaded, reason="the compiled library makes the plan")


def plan(shape: list[int], dtype: torch.dtype = torch.float32, dim: int = -1, **options: Any) -> dict[str, Any]:
    flags = [options.pop(name, False) for name in ("reset", "initial", "reverse")]
    gamma, window = options.pop("gamma", "number"), options.pop("window", 0)
    limits = {**_plan.H200._asdict(), **options}
    limits.pop("name")
    text = torch.ops.dcs.scan_plan(shape, dtype, dim, gamma, *flags, window, *limits.values())
    return dict(json.loads(text))


@pytest.mark.parametrize(
    ("kernel", "shape", "options"),
    [
        ("aligned", [4096, 4096], {}),
        ("aligned", [1024, 4096], {"dim": 0}),
        ("resident_columns", [4096, 4096], {"dim": 0, "gamma": "row"}),  # another round of steps, which blocks wait for
        ("lookback_columns", [4096, 4096], {"dim": 0}),
        ("lookback_columns", [4096, 4096], {"dim": 0, "dtype": torch.bfloat16, "initial": True}),
        ("lookback_columns", [300, 10_201], {"dim": 0, "dtype": torch.float16}),
        ("lookback_columns", [100, 300_001], {"dim": 0}),  # before threads with whole columns
        ("lookback_columns", [60, 10_201], {"dim": 0}),
        ("lookback_columns", [100_000, 40], {"dim": 0, "dtype": torch.bfloat16}),
        ("resident_columns", [100_000, 40], {"dim": 0, "dtype": torch.bfloat16, "cluster": 0}),
        ("resident_columns", [100_000, 39], {"dim": 0, "dtype": torch.float64}),
        ("aligned", [512, 65_536], {"dim": 0}),
        ("aligned", [4096, 4096], {"dim": 0, "dtype": torch.bfloat16}),
        ("small_columns", [256, 4096], {"dim": 0}),
        ("lookback_columns", [1152, 576], {"dim": 0, "dtype": torch.float16}),
        ("aligned", [1024, 4096], {"dim": 0, "dtype": torch.bfloat16}),
        ("aligned", [64, 65536], {"dim": 0}),
        ("serial_columns", [32, 65536], {"dim": 0}),
        ("flat_rows", [100_000, 520], {}),  # segments in half
        ("small_rows", [100, 1024], {}),
        ("aligned", [1000, 1024], {}),
        ("flat_rows", [100_000, 80], {}),
        ("flat_rows", [4096, 4096], {"reset": True}),
        ("flat_rows", [4096, 4096], {"initial": True}),
        ("flat_rows", [4096, 1024], {"dtype": torch.float64}),
        ("small_rows", [100, 1000], {"reset": True}),
        ("small_rows", [30000, 13], {"gamma": "step"}),
        ("flat_rows", [100000, 13], {"gamma": "step"}),  # more than threads are on the GPU at once
        ("small_rows", [100, 1000], {"dtype": torch.float64}),
        ("flat_rows", [300, 1000], {"dtype": torch.float64}),
        ("small_rows", [7, 16384], {"initial": True}),  # clusters
        ("flat_rows", [7, 5000], {"initial": True, "cluster": 0}),
        ("long_rows", [4096, 4096], {"dtype": torch.float64}),
        ("resident_columns", [4096, 4096], {"dtype": torch.complex128}),
        ("flat_rows", [12345, 1234], {}),
        ("flat_rows", [12345, 1234], {"reverse": True, "gamma": "step"}),
        ("flat_rows", [4096, 4104], {"gamma": "step"}),  # the last segment would be in part
        ("long_rows", [7, 9591321], {}),
        ("stream_columns", [10_000_000, 2], {"dim": 0}),
        ("stream_columns", [130, 30_001, 3], {"dim": 1, "dtype": torch.bfloat16, "initial": True}),
        ("resident_columns", [130, 30_001, 4], {"dim": 1, "dtype": torch.bfloat16, "initial": True}),
        ("resident_columns", [1000000, 7], {"dim": 0}),
        ("resident_columns", [1000000, 7], {"dim": 0, "gamma": "step"}),
        ("resident_columns", [1000000, 7], {"dim": 0, "reset": True}),
        ("resident_columns", [10_000_000, 2], {"dim": 0, "cluster": 0}),
        ("resident_columns", [1000000, 33], {"dim": 0}),
        ("resident_columns", [4_000_000, 2], {"dim": 0}),  # too few elements
        ("small_columns", [200_000, 7], {"dim": 0}),  # whose time all multiprocessors share
        ("small_columns", [15_000, 7], {"dim": 0}),
        ("small_columns", [64, 4096], {"dim": 0, "dtype": torch.bfloat16}),  # in float, by few blocks
        ("aligned", [64, 4096], {"dim": 0, "dtype": torch.bfloat16, "gamma": "row"}),
        ("aligned", [64, 16_384], {"dim": 0, "dtype": torch.bfloat16}),
        ("small_columns", [2000, 33], {"dim": 0, "gamma": "step", "reset": True}),
        ("small_columns", [16_000, 16], {"dim": 0, "gamma": "step", "dtype": torch.bfloat16}),
        ("small_columns", [30_000, 7], {"dim": 0}),  # of more steps
        ("small_columns", [15_000, 7], {"dim": 0, "cluster": 0}),
        ("resident_columns", [2000, 33], {"dim": 0, "dtype": torch.float64}),
        ("serial_columns", [14, 1050061], {"dim": 0}),
        ("serial_columns", [46, 10_201], {"dim": 0}),  # floats of a shared gamma; of more steps blocks take them
        ("aligned", [47, 10_201], {"dim": 0}),
        ("aligned", [46, 10_201], {"dim": 0, "gamma": "step"}),
        ("few_steps", [5, 1050061], {"dim": 0}),
        ("staged_columns", [30000, 100, 3], {"dim": 1}),
        ("staged_columns", [30000, 100, 3], {"dim": 1, "gamma": "row", "reset": True, "dtype": torch.bfloat16}),
        ("staged_columns", [15_000, 500, 2], {"dim": 1, "dtype": torch.bfloat16}),  # in parts, as are the next ones
        ("staged_columns", [2000, 3000, 6], {"dim": 1, "gamma": "row", "reset": True, "initial": True}),
        ("staged_columns", [264, 100_001, 3], {"dim": 1, "reset": True}),
        ("resident_columns", [263, 100_001, 3], {"dim": 1, "reset": True}),  # too few outer rows
        ("serial_columns", [30000, 100, 3], {"dim": 1, "gamma": "step"}),
        ("serial_columns", [30000, 100, 3], {"dim": 1, "dtype": torch.complex64}),
        ("serial_columns", [2, 2**31 + 1], {"dim": 0}),  # threads of few steps count in 31 bits
        ("flat_rows", [1000000, 3], {}),
        ("few_steps", [1000000, 3], {"gamma": "row"}),
        ("few_steps", [1000000, 7], {"initial": True, "dtype": torch.bfloat16}),
        ("flat_rows", [1000000, 7], {"initial": True}),
        ("small_rows", [4096, 80], {"gamma": "row"}),
        ("flat_rows", [40960, 80], {"gamma": "row"}),
        ("direct_window", [4096, 4096], {"window": 64}),
        ("composed_window", [4096, 4096], {"window": 65}),
        ("aligned", [4096, 4096], {"window": 4096}),  # reaches beyond no row's first step
        ("flat_rows", [5], {"dtype": torch.int64}),
    ],
)
def test_kernel(kernel: str, shape: list[int], options: dict[str, Any]) -> None:
    facts = plan(shape, **options)
    assert facts["kernel"] == kernel
    chosen = [each["name"] for each in facts["candidates"] if each["chosen"]]
    assert chosen == [kernel]
    assert chosen == [each["name"] for each in facts["candidates"] if each["can"]][:1]
    assert ("aligned_kernel" in facts) == (kernel == "aligned")


@pytest.mark.parametrize(
    ("kernel", "shape", "options"),
    [
        ("thread_rows", [64, 8], {}),
        ("packed_rows", [4096, 64], {}),
        ("packed_rows", [4096, 64], {"gamma": "row"}),
        ("warp_rows", [4096, 256], {}),
        ("tile_rows", [4096, 4096], {}),
        ("tile_rows", [4096, 4096], {"gamma": "step"}),
        ("few_rows", [1, 65536], {}),
        ("bulk_stream", [64, 262144], {}),
        ("bulk_stream", [264, 262144], {}),
        ("warp_columns", [4096, 65536], {"dim": 0}),
        ("block_columns", [128, 65536], {"dim": 0, "gamma": "step"}),
        ("block_columns", [1024, 4096], {"dim": 0, "gamma": "step"}),
    ],
)
def test_kernel_of_aligned_operands(kernel: str, shape: list[int], options: dict[str, Any]) -> None:
    assert plan(shape, **options)["aligned_kernel"] == kernel


@pytest.mark.parametrize(("columns", "warps"), [(4201, 32), (10_201, 16), (20_001, 8)])
def test_more_blocks_of_columns_have_fewer_warps(columns: int, warps: int) -> None:
    facts = plan([700, columns], dtype=torch.bfloat16, dim=0, gamma="row")
    assert (facts["aligned_kernel"], facts["launch"]["warps"]) == ("block_columns", warps)


def test_clusters_of_lookback_columns() -> None:
    """As many blocks as have all of time; of more steps fewer, the more columns there are."""
    alone, cluster, wide, narrow = (
        plan([steps, columns], dim=0)["launch"]
        for steps, columns in ((200, 4001), (1500, 4001), (20_001, 4000), (200_001, 32))
    )
    assert (alone["cluster"], alone["chunks"], alone["workspace_bytes"]) == (1, 1, 0)
    assert (cluster["chunks"], cluster["workspace_bytes"]) == (1, 0)
    assert cluster["cluster"] * cluster["parts"] * cluster["steps"] >= 1500
    assert 1 <= wide["cluster"] < narrow["cluster"] == 8
    assert narrow["chunks"] * narrow["cluster"] * narrow["parts"] * narrow["steps"] >= 200_001
    assert narrow["workspace_bytes"] >= 16 * 32 * narrow["chunks"]
    # 64 columns of half precision in words; one less where some steps begin in the midst of them.
    spans = [plan([5000, columns], torch.float16, dim=0)["launch"]["span"] for columns in (640, 641)]
    assert spans == [64, 63]


def test_parts_of_staged_columns() -> None:
    """The fewer columns, the more parts; steps that do not fit come in pieces."""
    few = plan([264, 3000, 3], dim=1, reset=True)["launch"]
    many = plan([15_000, 500, 2], dim=1)["launch"]
    long = plan([264, 100_001, 3], dim=1, reset=True)["launch"]
    assert few["parts"] > many["parts"] > 1
    assert few["steps"] >= 3000
    assert many["steps"] >= 500
    assert long["steps"] < 100_001
    for launch in (few, many, long):
        assert launch["part_steps"] % 2 == 1
        assert launch["steps"] == launch["parts"] * launch["part_steps"]
        assert launch["threads"] <= 1024
        assert launch["shared_bytes"] <= 227 << 10


def test_dimensions_around_time_are_merged() -> None:
    facts = plan([2, 3, 50, 1, 7], dim=-3)
    assert (facts["outer"], facts["length"], facts["inner"]) == (6, 50, 7)


def test_tiles_cover_the_scan() -> None:
    launch = plan([12345, 1234])["launch"]
    assert launch["tile"] % 1234 == 0
    assert launch["tile"] * (launch["tiles"] - 1) < 12345 * 1234 <= launch["tile"] * launch["tiles"]
    long = plan([7, 9591321])["launch"]
    assert long["tile"] * (long["tiles"] - 1) < 7 * 9591321 + 16 <= long["tile"] * long["tiles"]
    assert long["blocks"] == 132
    assert long["shared_bytes"] <= 227 << 10
    assert long["blocks_run_together"]


def test_small_rows_are_all_on_the_gpu_at_once() -> None:
    """A multiprocessor has room for 32 warps; clusters of at most 16 blocks have 7 groups of 16 multiprocessors."""
    for rows in (10, 1000, 3000):
        launch = plan([rows, 170], gamma="step")["launch"]
        assert launch["group_rows"] * (launch["blocks"] - 1) < rows <= launch["group_rows"] * launch["blocks"]
        assert launch["blocks"] * launch["warps"] <= 132 * 32
    assert plan([14, 30_001], reset=True)["kernel"] == "small_rows"
    launch = plan([14, 30_001], reset=True)["launch"]
    assert (launch["cluster"], launch["warps"], launch["blocks"]) == (15, 16, 14 * 15)
    assert launch["blocks_run_together"]
    assert plan([15, 30_001], reset=True)["kernel"] == "flat_rows"


def test_small_lines_in_float() -> None:
    """Of one number and no reset: columns, and rows of which a block has one or a part, of not too many blocks."""
    for shape, options in (([1421, 145], {"dim": 0}), ([70_000, 3], {"dim": 0}), ([9, 9001], {}), ([96, 1945], {})):
        assert plan(shape, **options)["launch"]["in_float"]
        assert plan(shape, initial=True, **options)["launch"]["in_float"]
        for other in ({"gamma": "row"}, {"gamma": "step"}, {"reset": True}):
            assert not plan(shape, **options, **other)["launch"].get("in_float")
    assert not plan([3000, 13])["launch"]["in_float"]
    assert not plan([62, 6586])["launch"]["in_float"]


def test_small_columns_are_all_on_the_gpu_at_once() -> None:
    for columns, gamma in ((3, "number"), (100, "step"), (700, "row")):
        launch = plan([400, columns], dim=0, gamma=gamma, reset=True)["launch"]
        lanes = 1 << (launch["span"] - 1).bit_length()
        parts = launch["warps"] * launch.get("cluster", 1) * 32 // lanes
        assert launch["span"] * launch["spans"] >= columns
        assert parts * launch["steps"] >= 400
        assert launch["blocks"] * launch["warps"] <= 132 * 32


@pytest.mark.parametrize(("steps", "columns", "dtype"), [(30_000, 7, torch.float32), (100_000, 9, torch.bfloat16)])
def test_blocks_that_share_long_small_columns_are_one_a_multiprocessor(
    steps: int, columns: int, dtype: torch.dtype
) -> None:
    launch = plan([steps, columns], dtype, dim=0)["launch"]
    lanes = 1 << (launch["span"] - 1).bit_length()
    assert "cluster" not in launch
    assert 1 < launch["sharers"] <= 132 // launch["spans"]
    assert launch["blocks"] == launch["sharers"] * launch["spans"]
    assert launch["sharers"] * launch["warps"] * 32 // lanes * launch["steps"] >= steps
    assert launch["workspace_bytes"] == 16 * launch["blocks"] * launch["span"]


def test_small_columns_in_half_precision_are_narrower_where_they_are_few_and_long() -> None:
    """Clusters of eight columns are for all multiprocessors; those of 64 would not all be on the GPU at once."""
    for steps, columns, span, spans in ((5000, 16, 8, 2), (5000, 53, 8, 7), (5000, 64, 16, 4), (800, 16, 16, 1)):
        launch = plan([steps, columns], torch.bfloat16, dim=0)["launch"]
        assert (launch["span"], launch["spans"]) == (span, spans)
        assert launch["blocks"] <= 112  # of clusters, on groups of 16 and 18 multiprocessors


def test_long_small_columns_in_half_precision_are_narrower_with_gates() -> None:
    """A thread has 8 steps of a per-step gamma, 16 without: a cluster's threads reach through time of fewer columns."""
    for gamma, span in (("number", 8), ("step", 4)):
        launch = plan([10_000, 16], torch.bfloat16, dim=0, gamma=gamma, cluster=8)["launch"]
        assert (launch["span"], launch["spans"]) == (span, 16 // span)


def test_many_columns_tiles_hold_longer_parts() -> None:
    """More blocks than an H200 has room for have steps in shared memory too, as three blocks a multiprocessor."""
    few, many = (plan([steps, 99], dim=0, gamma="row")["launch"] for steps in (20_000, 1_000_000))
    assert few["early_steps"] == 0
    assert 0 < many["early_steps"] < many["part_steps"] <= 64
    assert many["shared_bytes"] <= (227 << 10) // 3


def test_columns_of_many_rounds_share_blocks() -> None:
    """Up to 64 of them where an H200 has two rounds of such blocks, three a multiprocessor; no column alone."""
    shapes = ([10_000, 300], [100_000, 300], [1_000_000, 60])
    once, often, few = (plan(shape, dim=0, gamma="row")["launch"] for shape in shapes)
    assert (once["span"], often["span"], few["span"]) == (30, 60, 30)
    # Two rounds of blocks of 32 columns are one of blocks of 64.
    wide = plan([200, 25_345], torch.bfloat16, dim=0, gamma="row", reset=True)
    assert wide["kernel"] == "resident_columns"
    assert wide["launch"]["span"] == 32
    assert often["span"] * often["parts"] <= 256
    assert often["spans"] * often["tiles"] >= 2 * 3 * 132


def test_blocks_that_share_small_columns_have_the_shared_memory_of_a_block() -> None:
    """What threads have read of inputs and gates waits there: 68 KB beside 20."""
    options = {"dim": 0, "gamma": "step", "multiprocessors": 40}
    launch = plan([161_994, 2], shared_bytes=99 << 10, **options)["launch"]
    assert 48 << 10 < launch["shared_bytes"] <= (99 - 20) << 10
    assert plan([161_994, 2], shared_bytes=64 << 10, **options)["kernel"] == "resident_columns"


def test_resident_columns_have_the_shared_memory_of_a_block() -> None:
    columns, options = [3_000_000, 2], {"dim": 0, "dtype": torch.float64, "cluster": 0}
    fits = plan(columns, shared_bytes=99 << 10, **options)  # of compute capability 8.6, 8.9 and 12.0
    assert fits["kernel"] == "resident_columns"
    assert fits["launch"]["shared_bytes"] > 48 << 10  # what needs no leave
    assert plan(columns, shared_bytes=64 << 10, **options)["kernel"] == "serial_columns"


@pytest.mark.parametrize(
    ("shape", "options", "sentence"),
    [
        ([4, 0], {}, r"scan_plan: shape must have sizes of at least 1, got \(4, 0\)"),
        ([1 << 40, 1 << 40], {}, r"scan_plan: shape must have at most 2\^58 elements, got "),
        ([4, 4], {"dim": 2}, r"scan_plan: dim must be in \[-2, 1\] for a 2-D input, got 2"),
        ([4, 4], {"dtype": torch.int32}, "scan_plan: dtype must be floating-point, complex or int64, got int32"),
        ([4, 4], {"dtype": torch.int64, "gamma": "row"}, "scan_plan: dtype int64 is for sums, without gamma, "),
        ([4, 4], {"gamma": "both"}, 'scan_plan: gamma must be "number", "row" or "step", got "both"'),
        ([4, 4], {"window": -1}, "scan_plan: window must be at least 1, or 0 for none, got -1"),
        ([4, 4], {"multiprocessors": 0}, r"scan_plan: multiprocessors must be in \[1, 2147483647\], got 0"),
    ],
)
def test_errors_of_the_op(shape: list[int], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=sentence):
        plan(shape, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("4096xx4096", "float32"), {}, "SHAPE must be sizes such as 4096x4096, got '4096xx4096'"),
        (("4096", "float31"), {}, "DTYPE must be one of float16, .*, int64, got 'float31'"),
        (("4096", "float32"), {"window": 0}, "--window must be at least 1, got 0"),
        (("4x0", "float32"), {}, r"shape must have sizes of at least 1, got \(4, 0\)$"),
        (("4x4", "float32"), {"dim": -3}, r"dim must be in \[-2, 1\] for a 2-D input, got -3$"),
    ],
)
def test_errors_of_the_command(arguments: tuple[str, str], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _plan.scan_plan(*arguments, **options)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(_native.CPU_LIBRARY, missing="_C.so is not in x: a pure-Python build")
    monkeypatch.setattr(_native, "CPU_LIBRARY", missing)
    with pytest.raises(ValueError, match=r"compiled library, which is missing: _C\.so is not in x: a pure"):
        _plan.scan_plan("4096", "float32")


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "current_limits", lambda: _plan.H200)
    text = str(_plan.scan_plan("2x3x50x7", "bfloat16", dim=-2, gamma="row"))
    assert text.startswith("2x3x50x7 bfloat16 along dim 2: 6 x 50 steps x 7\non an H200: 132 multiprocessors, ")
    marked = [line.split()[1] for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f"launch of {marked[0]}\n" in text


@pytest.mark.parametrize(
    ("capability", "architectures", "cluster"),
    [
        ((8, 0), (), 0),
        ((9, 0), (), 16),
        ((9, 0), ("native",), 16),
        ((9, 0), ("80-real", "90a-real"), 16),
        ((9, 0), ("80", "100-real"), 0),  # PTX for older GPUs
        ((10, 0), ("90-virtual",), 16),
        ((12, 0), ("90",), 8),
    ],
)
def test_clusters_of_a_gpu(capability: tuple[int, int], architectures: tuple[str, ...], cluster: int) -> None:
    assert _plan._cluster(*capability, architectures) == cluster


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")
def test_limits_of_this_gpu() -> None:
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    limits = _plan.current_limits()
    assert limits.multiprocessors == facts.multi_processor_count
    assert limits.shared_bytes >= facts.shared_memory_per_block
    assert torch_dcs_ops.info()["kernels"]["cuda"]["kind"] != "native" or limits.cluster in (0, 8, 16)


def test_few_steps_read_the_widest_words_of_columns() -> None:
    """Up to 16 bytes, of at most 4 steps; of more steps up to 8; all of them only where there are many columns."""
    for columns, dtype, unit in (
        (5_468_832, torch.float16, 8),
        (5_468_836, torch.float16, 4),
        (5_468_838, torch.bfloat16, 2),
        (5_468_831, torch.bfloat16, 1),
        (5_468_832, torch.float32, 4),
        (5_468_834, torch.float32, 2),
        (5_468_832, torch.float64, 1),
        (400_000, torch.float16, 4),
    ):
        launch = plan([2, columns], dtype, 0)["launch"]
        assert launch["unit"] == unit
        assert launch["cells"] * launch["blocks"] * 256 * unit >= columns
    assert plan([5, 5_468_832], torch.float16, 0, reset=True)["launch"]["unit"] == 4
    assert plan([5, 5_468_832], torch.float64, 0, reset=True)["launch"]["cells"] == 1
