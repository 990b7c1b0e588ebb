"""What a part of the benchmarks finds: rows of times, and checks of what the timed calls return."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness import Row, Skipped


@dataclass
class Check:
    """A number that must not exceed its budget."""

    name: str
    value: float
    budget: float

    @property
    def holds(self) -> bool:
        return self.value <= self.budget


@dataclass
class Found:
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def check(self, name: str, value: float, budget: float) -> None:
        self.checks.append(Check(name, value, budget))
