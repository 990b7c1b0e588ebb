"""What a survey found: tables of groups, the slowest cells, the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import Row, Skipped, report

from survey.draw import Problem

LARGE = 2_000_000
SLOWER = 1.05
WORST = 20


@dataclass(frozen=True)
class Cell:
    """One problem; `fraction` is the floor's time over ours, `torch` ours over torch's."""

    problem: Problem
    milliseconds: float
    fraction: float
    floor_name: str
    torch: float | None

    def __str__(self) -> str:
        beside = "" if self.torch is None else f"  {self.torch:.2f} of torch's time"
        return f"{self.fraction:6.3f} of {self.floor_name:<15}{self.milliseconds:10.4f} ms{beside:<24}  {self.problem}"


def content(facts: Mapping[str, object], options: Mapping[str, object], problems: Sequence[Problem],
            rows: list[Row], skipped: list[Skipped]) -> dict[str, Any]:  # fmt: skip
    """The harness's record, with what was drawn by whom; a row's case is the name of its problem."""
    drawn = {problem.name: asdict(problem) for problem in problems}
    return {**report(facts, rows, skipped), "survey": dict(options), "problems": drawn}


def cells(record: Mapping[str, Any]) -> list[Cell]:
    """Of a record, new or read from a file."""
    by_problem: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        by_problem.setdefault(row["case"], {})[row["name"]] = row
    found = []
    for name, rows in by_problem.items():
        fields = record["problems"][name]
        ours, theirs = rows["dcs"]["milliseconds"], rows.get("torch")
        (floor_name,) = rows.keys() - {"dcs", "torch"}
        beside = ours / theirs["milliseconds"] if theirs else None
        problem = Problem(**{**fields, "shape": tuple(fields["shape"])})
        found.append(Cell(problem, ours, rows["dcs"]["fraction"], floor_name, beside))
    return found


def tenth_percentile(values: Sequence[float]) -> float:
    """Between the two nearest ranks."""
    ordered = sorted(values)
    place = 0.1 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _row(name: str, group: Sequence[Cell]) -> str:
    fractions = [cell.fraction for cell in group]
    large = [cell for cell in group if cell.problem.elements > LARGE]
    worst = min(large, key=lambda cell: cell.fraction) if large else None
    beside = [cell.torch for cell in group if cell.torch is not None]
    slower = f"{sum(ratio > SLOWER for ratio in beside) / len(beside):8.0%} of {len(beside):<4}" if beside else ""
    return (
        f"{name:<54}{len(group):>6}{statistics.geometric_mean(fractions):>9.3f}{tenth_percentile(fractions):>9.3f}"
        f"{f'{worst.fraction:.3f}' if worst else '-':>14} {worst.problem.name if worst else '':<24}{slower}"
    )


def print_table(title: str, found: Sequence[Cell], key: Callable[[Cell], str]) -> None:
    groups: dict[str, list[Cell]] = {}
    for cell in found:
        groups.setdefault(f"{cell.problem.family}, {key(cell)}, {cell.problem.work}", []).append(cell)
    header = f"{title:<54}{'count':>6}{'geomean':>9}{'10th %':>9}{'worst, large':>14}{'':<25}{'slower':>8} than torch"
    print(f"\n{header}\n{'-' * len(header)}")
    for name in sorted(groups):
        print(_row(name, groups[name]))


def print_report(record: Mapping[str, Any], repeat: str) -> None:
    """`repeat` is the command that, with --only and a problem's name, measures it again."""
    found = cells(record)
    if found:
        print("\nfractions of the floor: a copy of the same bytes; of losses bare GEMMs, of products the unsafe one;")
        print(f"worst, large: of more than {LARGE} elements; slower than torch: by more than {SLOWER - 1:.0%}")
        print_table("family, kind", found, lambda cell: cell.problem.kind)
        print_table("family, layout of the dimension", found, lambda cell: cell.problem.layout)
        print_table("family, dtype", found, lambda cell: cell.problem.dtype)
    for floor_name in dict.fromkeys(cell.floor_name for cell in found):
        group = sorted((cell for cell in found if cell.floor_name == floor_name), key=lambda cell: cell.fraction)
        print(f"\nthe slowest of {len(group)} beside their {floor_name}")
        for cell in group[:WORST]:
            print(cell)
    if found:
        print(f"\none again: {repeat} --only {min(found, key=lambda cell: cell.fraction).problem.name}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for skip in record["skipped"]:
        reasons.setdefault((skip["name"], skip["reason"]), []).append(skip["case"])
    for (name, reason), cases in reasons.items():
        shown = ", ".join(cases[:8]) + (f" and {len(cases) - 8} more" if len(cases) > 8 else "")
        print(f"skipped: {name}: {reason}: {shown}")
