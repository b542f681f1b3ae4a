"""Accuracy against what it costs: after every round, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from apfl.experiments.record import Record
from apfl.report.figures.style import INK, Look, logarithmic
from apfl.report.pareto import front, points
from apfl.report.sheet import Column, Row, Sheet
from apfl.report.units import human_bytes

__all__ = ["Curve", "cost", "curve", "overhead", "pareto", "progress"]

Floats = npt.NDArray[np.float64]
WRITE = {"seconds": "{:g}".format, "bytes": lambda value: human_bytes(value).replace(".0 ", " ")}
AXES = {"rounds": "rounds", "seconds": "seconds of training", "bytes": "bytes up and down, each client"}


@dataclass(frozen=True, eq=False)
class Curve:
    """Means over seeds after each round."""

    rounds: Floats
    seconds: Floats
    bytes: Floats  # each client's
    accuracy: Floats  # in %, or what else the headline is
    spread: Floats  # over seeds


def curve(records: Sequence[Record]) -> Curve:
    """The seeds' curves as one, as long as the shortest; a record without a curve has its last point."""
    each = [record.curve or [(record.seconds, record.bytes_up + record.bytes_down, record.score)] for record in records]
    n = min(map(len, each))
    stacked = np.array([points[:n] for points in each], dtype=float)  # (seeds, rounds, 3)
    mean = stacked.mean(0)
    rounds = np.arange(1, n + 1, dtype=float) if n > 1 else np.array([float(records[0].rounds)])
    spread = stacked[:, :, 2].std(0, ddof=1) if len(each) > 1 else np.zeros(n)
    factor = records[0].headline.factor
    return Curve(rounds, mean[:, 0], mean[:, 1] / records[0].n_clients, factor * mean[:, 2], factor * spread)


def progress(axes: Axes, sheet: Sheet, column: Column, against: str, looks: dict[Row, Look]) -> None:
    """Accuracy after each round against rounds, seconds or bytes; a method that is measured once is one point."""
    for row, records in sheet.records(column).items():
        look, own = looks[row], curve(records)
        x = getattr(own, against)
        if len(x) > 1 and x[-1] > 0:
            axes.fill_between(
                x, own.accuracy - own.spread, own.accuracy + own.spread, color=look.colour, alpha=0.15, lw=0
            )
            axes.plot(
                x, own.accuracy, look.line, color=look.colour, lw=look.width, marker=look.marker, ms=look.size,
                markevery=max(1, len(x) // 6), label=row.label,
            )  # fmt: skip
        elif against != "rounds" and x[-1] <= 0:  # nothing is sent: the same height everywhere
            axes.axhline(own.accuracy[-1], ls=":", color=look.colour, lw=look.width)
            axes.annotate(
                row.label, (0.99, own.accuracy[-1]), xycoords=("axes fraction", "data"), xytext=(0, 1),
                textcoords="offset points", ha="right", va="bottom", fontsize=7, color=INK,
            )  # fmt: skip
        else:
            axes.errorbar(
                x,
                own.accuracy,
                own.spread,
                fmt=look.marker,
                color=look.colour,
                ms=look.size,
                label=row.label,
                capsize=2,
            )
    if against == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        logarithmic(axes.xaxis, WRITE[against])
    axes.set(xlabel=AXES[against], ylabel=sheet.headline.axis)


def overhead(axes: Axes, sheet: Sheet, column: Column, of: str, looks: dict[Row, Look]) -> None:
    """What has been spent after each round; a method that is measured once stays where it is."""
    curves = {row: curve(records) for row, records in sheet.records(column).items()}
    last = max([own.rounds[-1] for own in curves.values()] + [1])
    for row, own in curves.items():
        look, y = looks[row], getattr(own, of)
        if y[-1] <= 0:
            continue
        x = own.rounds
        if len(x) == 1:
            x, y = np.array([max(x[0], 1), last]), np.array([y[0], y[0]])
        axes.plot(
            x, y, look.line, color=look.colour, lw=look.width, marker=look.marker, ms=look.size,
            markevery=max(1, len(x) // 6), label=row.label,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="rounds", ylabel=AXES[of])
    logarithmic(axes.yaxis, WRITE[of])


def cost(axes: Axes, sheet: Sheet, column: Column, of: str, looks: dict[Row, Look]) -> None:
    """Final accuracy against the whole cost, one point for each method; up and to the left is better."""
    spent = {row: getattr(curve(records), of)[-1] for row, records in sheet.records(column).items()}
    least = min([each for each in spent.values() if each > 0], default=1.0)
    for row, records in sheet.records(column).items():
        look, accuracies = looks[row], [sheet.headline.factor * record.score for record in records]
        spread = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0
        axes.errorbar(
            spent[row] or least / 10, float(np.mean(accuracies)), spread, fmt=look.marker, color=look.colour,
            ms=look.size + 2, capsize=2, label=row.label,
        )  # fmt: skip
    logarithmic(axes.xaxis, WRITE[of])
    nothing = "; leftmost: nothing sent" if of == "bytes" and 0 in spent.values() else ""
    axes.set(xlabel=AXES[of] + nothing, ylabel=sheet.headline.axis)


def pareto(axes: Axes, sheet: Sheet, column: Column, looks: dict[Row, Look]) -> None:
    """Final accuracy against bytes, the number of exchanges beside each point; the front is joined, the rest faint."""
    competing = points(sheet, column)
    on = front(competing)
    least = min([point.bytes for point in competing if point.bytes], default=1.0) / 10  # of those who send nothing
    for point in competing:
        look, factor = looks[point.row], point.headline.factor
        place = (point.bytes or least, factor * point.accuracy)
        axes.errorbar(
            *place, factor * (point.spread or 0), fmt=look.marker, color=look.colour, ms=look.size + 1, capsize=2,
            alpha=1 if point in on else 0.45, label=point.row.label,
        )  # fmt: skip
        text = f"{point.row.label}, {point.exchanges:g}" if point in on else f"{point.exchanges:g}"
        right = point.bytes > (least * max(each.bytes for each in competing)) ** 0.5  # no room beyond it
        axes.annotate(
            text, place, xytext=(-5 if right else 5, 3), textcoords="offset points", ha="right" if right else "left",
            fontsize=7, color=INK,
        )  # fmt: skip
    reached = sorted((point.bytes or least, point.headline.factor * point.accuracy) for point in on)
    axes.plot(*zip(*reached, strict=True), ls=":", color=INK, lw=0.8, zorder=0)
    logarithmic(axes.xaxis, WRITE["bytes"])
    nothing = "; leftmost: nothing sent" if any(point.bytes == 0 for point in competing) else ""
    axes.set(
        xlabel=f"{AXES['bytes']}{nothing}\nnamed: the front; numbers: exchanges",
        ylabel=sheet.headline.axis,
    )
