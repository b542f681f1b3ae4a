"""The clients behind the mean: how they differ, what rows they have, what each gains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from apfl.experiments.record import Record
from apfl.report.figures.style import BLUE, INK, VERMILLION, Look
from apfl.report.sheet import Column, Row, Sheet

__all__ = ["ALONE", "distribution", "gains", "gains_over_alone", "gains_over_primary", "label_picture"]

Floats = npt.NDArray[np.float64]
ALONE = ("local_ridge", "local_head")  # methods in which a client learns from its own rows only
NAMED = 24  # up to so many clients or classes have their names beside the picture


def distribution(axes: Axes, sheet: Sheet, column: Column, looks: dict[Row, Look]) -> None:
    """Every client's accuracy, all seeds: box from quartile to quartile, whiskers to the extremes, a dot each."""
    by_row = sheet.records(column)
    pooled = {
        row: sheet.headline.factor * np.concatenate([_known(r.client_scores) for r in records])
        for row, records in by_row.items()
    }
    order = sorted(pooled, key=lambda row: sheet.headline.sign * float(pooled[row].mean()))
    rng = np.random.default_rng(0)  # of the dots' heights alone
    for height, row in enumerate(order):
        values, colour = pooled[row], looks[row].colour
        axes.plot(
            values, height + rng.uniform(-0.28, 0.28, len(values)), ".", color=colour, ms=2.5, alpha=0.45, zorder=1
        )
        axes.boxplot(
            values, positions=[height], orientation="horizontal", widths=0.62, whis=(0, 100), showmeans=True,
            manage_ticks=False,
            medianprops={"color": INK}, boxprops={"color": INK}, whiskerprops={"color": INK}, capprops={"color": INK},
            meanprops={"marker": "D", "markerfacecolor": colour, "markeredgecolor": INK, "markersize": 5},
        )  # fmt: skip
    axes.set_yticks(range(len(order)), [row.label for row in order])
    axes.set(xlabel=sheet.headline.of_one, ylim=(-0.7, len(order) - 0.3))
    axes.grid(axis="y", visible=False)


def _known(values: Sequence[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=float)


def label_picture(axes: Axes, record: Record) -> None:
    """Clients by classes; the darker, the more training rows (by their square root, so that few show)."""
    counts = np.array(record.class_counts, dtype=float)
    picture = np.zeros((*counts.shape, 4))
    picture[..., :3] = to_rgb("#3a96d6")  # between the blues of light and dark pages
    picture[..., 3] = np.where(counts > 0, 0.15 + 0.85 * np.sqrt(counts / max(counts.max(), 1)), 0)
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    if counts.shape[1] <= NAMED and record.class_names:
        axes.set_xticks(
            range(counts.shape[1]), list(record.class_names), rotation=90 if _long(record.class_names) else 0
        )
    if counts.shape[0] <= NAMED:
        axes.set_yticks(range(counts.shape[0]), list(record.client_names))
    axes.set(xlabel="class", ylabel="client")


def _long(names: Sequence[str]) -> bool:
    return sum(map(len, names)) > 40


def gains_over_primary(records: Sequence[Record]) -> Floats:
    """Each client's accuracy minus that of the shared stream alone on its rows, in points; empty if not recorded."""
    return _points([(r.client_accuracies, r.primary_accuracies) for r in records if r.primary_accuracies])


def gains_over_alone(records: Sequence[Record], alone: Sequence[Record]) -> Floats:
    """Each client's accuracy minus what it reaches by itself, on the seeds both have, in points."""
    by_seed = {record.seed: record for record in alone}
    pairs = [(r, by_seed[r.seed]) for r in records if r.seed in by_seed]
    same = [(a.client_scores, b.client_scores) for a, b in pairs if list(a.n_test) == list(b.n_test)]
    first = records[0].headline
    return _points(same) if first.percent else first.sign * _points(same) / 100


def _points(pairs: Sequence[tuple[Sequence[float | None], Sequence[float | None]]]) -> Floats:
    both = [(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    return np.array([100 * (a - b) for a, b in both if a is not None and b is not None])


def gains(axes: Axes, values: Floats, over: str, unit: str = "points") -> None:
    """Clients in the order of what they gained; below the line they lost."""
    values = np.sort(values)[::-1]
    axes.bar(range(len(values)), values, width=1.0, color=[BLUE if v >= 0 else VERMILLION for v in values], lw=0)
    axes.axhline(0, color=INK, lw=0.8)
    axes.set(xlabel="clients, all seeds, in order of gain", ylabel=f"{unit} gained over {over}")
    axes.grid(axis="x", visible=False)
