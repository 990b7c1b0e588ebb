"""Curves of examples as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, curves: Mapping[str, Sequence[float]], every: int, title: str, of: str) -> None:
    """`curves` by their names, of a value each `every` steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in curves.items():
        axes.plot([every * (1 + index) for index in range(len(values))], values, label=name)
    axes.set(xlabel="step", ylabel=of, title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"learning curve: {path}")
