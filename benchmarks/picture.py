"""Draws docs/images/speed.svg from committed results: `python benchmarks/picture.py`. Needs matplotlib.

Every bar is a number of a file in benchmarks/results; nothing is measured here. Gray text and no background: the
picture is read on light and dark pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
OURS, THEIRS, TEXT = "#2f81f7", "#a371a3", "#768390"

SCANS = "h200-scan-f39bd2b"
CUMSUM = "h200-95dabdb"
SHAPES = {
    "1x100000000": "1 x 100000000",
    "16x1048576": "16 x 1048576",
    "256x65536": "256 x 65536",
    "4096x4096": "4096 x 4096",
    "65536x256": "65536 x 256",
    "1048576x16": "1048576 x 16",
    "1024x4096 dim=0": "time first: 1024 x 4096",
    "1024x65536 dim=0": "time first: 1024 x 65536",
}
LOSS = "h200-lce-a935249"
LOSSES = {
    "dcs, fwd+bwd": "linear_cross_entropy",
    "dcs compact, fwd+bwd": "the same, accumulate_dtype=bfloat16",
    "torch.compile, fwd+bwd": "torch.compile",
    "eager, fwd+bwd": "eager, float32 logits",
    "Liger, fwd+bwd": "Liger",
    "cut_cross_entropy, fwd+bwd": "cut_cross_entropy",
}


def rows(result: str, dtype: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a result file by (case, name)."""
    content = json.loads((ROOT / "benchmarks" / "results" / f"{result}.json").read_text())
    return {(row["case"], row["name"]): row for row in content["rows"] if row["dtype"] == dtype}


def draw_scans(axes: Any) -> None:
    scans, cumsums = rows(SCANS, "float32"), rows(CUMSUM, "float32")
    ours = [scans[shape, "dcs right"]["fraction"] for shape in SHAPES]
    theirs = [cumsums[shape, "torch.cumsum"]["fraction"] for shape in SHAPES]
    for offset, values, color, name in ((-0.2, ours, OURS, "discounted_cumsum"), (0.2, theirs, THEIRS, "torch.cumsum")):
        places = [index + offset for index in range(len(SHAPES))]
        axes.barh(places, values, 0.38, color=color, label=name)
        for place, value in zip(places, values, strict=True):
            inside = value > 0.5
            axes.text(
                value + (-0.01 if inside else 0.01), place, f"{value:.2f}",
                va="center", ha="right" if inside else "left", fontsize=7, color="white" if inside else TEXT,
            )  # fmt: skip
    axes.set_yticks(range(len(SHAPES)), SHAPES.values())
    axes.axvline(1, color=TEXT, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.12)
    axes.set_title("Scans of float32 rows x steps on an H200,\nspeed as a fraction of a copy")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.07), ncols=2, frameon=False, labelcolor=TEXT)


def draw_losses(axes: Any) -> None:
    ((case, _), *_) = results = rows(LOSS, "bfloat16")
    for index, name in enumerate(LOSSES):
        row = results[case, name]
        peak = float(row["note"].removeprefix("peak ").removesuffix(" GiB"))
        axes.barh(index, peak, 0.6, color=OURS if name.startswith("dcs") else THEIRS)
        text = f"{peak:.2f} GiB, {row['milliseconds']:.1f} ms"
        axes.text(min(peak, 7.2) + 0.15, index, text, va="center", fontsize=8, color=TEXT if peak < 7 else "white")
    axes.set_yticks(range(len(LOSSES)), LOSSES.values())
    axes.set_title("Linear + cross-entropy on an H200,\npeak memory and time of forward and backward")


def set_style() -> None:
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "dcs", "font.size": 9, "axes.titlesize": 9}
        | {f"{part}.color": TEXT for part in ("text", "xtick", "ytick")}
        | {"axes.edgecolor": TEXT, "axes.labelcolor": TEXT, "font.family": "sans-serif"}
    )


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, transparent=True, metadata=metadata)
    print(f"written: {path}")


def main() -> None:
    set_style()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 0.9))
    draw_scans(left)
    draw_losses(right)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(length=0)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_xticks([])
    save(figure, ROOT / "docs" / "images" / "speed.svg")


if __name__ == "__main__":
    main()
