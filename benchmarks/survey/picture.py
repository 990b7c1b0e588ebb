"""Draws a survey, fractions of the floor by size: `PYTHONPATH=benchmarks python -m survey.picture in.json out.svg`.

Needs matplotlib. One panel a floor; a family has a color, a hollow mark is a forward and a backward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from picture import TEXT, save, set_style

from survey.draw import FAMILIES
from survey.report import Cell, cells

COLORS = dict(zip(FAMILIES, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]


def draw_floor(axes: Any, name: str, found: Sequence[Cell]) -> None:
    for family in dict.fromkeys(cell.problem.family for cell in found):
        for backward in (False, True):
            group = [cell for cell in found if cell.problem.family == family and cell.problem.backward == backward]
            if group:
                axes.scatter(
                    [cell.problem.elements for cell in group], [cell.fraction for cell in group], s=12, linewidths=0.8,
                    edgecolors=[COLORS[family]], facecolors="none" if backward else [COLORS[family]],
                    label=family + (", forward + backward" if backward else ""),
                )  # fmt: skip
    axes.set_xscale("log")
    axes.axhline(1, color=TEXT, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, max(1.2, 1.05 * max(cell.fraction for cell in found)))
    axes.set_xlabel("elements")
    axes.set_title(f"speed as a fraction of the {name}'s")
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=7, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_record(record: Mapping[str, Any], path: Path) -> None:
    found = cells(record)
    floors = list(dict.fromkeys(cell.floor_name for cell in found))
    if not floors:
        print("no problem was measured: there is nothing to draw")
        return
    set_style()
    figure, panels = pyplot.subplots(1, len(floors), figsize=(2 + 5 * len(floors), 4.2), squeeze=False)
    for axes, name in zip(panels[0], floors, strict=True):
        draw_floor(axes, name, [cell for cell in found if cell.floor_name == name])
    save(figure, path)


if __name__ == "__main__":
    draw_record(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
