"""How settings move the accuracy: the surface a method chose from, and sweeps over one setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from apfl.errors import InputError
from apfl.experiments.record import Record
from apfl.report.figures.style import BLUE, INK, LINES, MARKERS, ORANGE, Look, logarithmic
from apfl.report.published import published
from apfl.report.sheet import Column, Row, Sheet

__all__ = ["gcv_curve", "sensitivity", "surface", "swept", "varying"]


def surface(axes: Axes, record: Record) -> None:
    """Left-out accuracy over beta and balance at the chosen tau; the star is what was chosen."""
    table: dict[str, Any] = record.chosen["table"]
    hits = np.array(table["hits"], dtype=float)  # (betas, balances, taus)
    place = _place(table, record)
    tau = int(hits.max((0, 1)).argmax()) if place is None else place[2]
    n_rows = record.chosen.get("left_out_rows", sum(record.n_train))
    accuracy = 100 * hits[:, :, tau] / n_rows
    best = accuracy.max()
    shown = axes.imshow(
        accuracy, origin="lower", aspect="auto", cmap="cividis", vmin=max(accuracy.min(), best - 8), vmax=best,
        interpolation="nearest",
    )  # fmt: skip
    axes.figure.colorbar(shown, ax=axes, label="left-out accuracy (%)", extend="min")
    at = range(0, len(table["balance"]), max(1, len(table["balance"]) // 7))
    axes.set_xticks(at, [f"{table['balance'][i]:g}" for i in at])
    at = range(0, len(table["beta"]), max(1, len(table["beta"]) // 6))
    axes.set_yticks(at, [_short(table["beta"][i]) for i in at])
    if place is not None:
        axes.plot(place[1], place[0], "*", ms=15, mfc=ORANGE, mec="black")
    axes.grid(visible=False)
    axes.set(xlabel=f"balance (tau = {table['tau'][tau]:g})", ylabel="beta")


def _place(table: dict[str, Any], record: Record) -> tuple[int, int, int] | None:
    """Where the choice stands in the table; nowhere if every client has its own."""
    chosen = [record.chosen.get(name) for name in ("beta", "balance", "tau")]
    if any(value not in table[name] for value, name in zip(chosen, ("beta", "balance", "tau"), strict=True)):
        return None
    return table["beta"].index(chosen[0]), table["balance"].index(chosen[1]), table["tau"].index(chosen[2])


def gcv_curve(axes: Axes, record: Record) -> None:
    """Generalised cross-validation over gamma; the star is what was chosen."""
    path = record.chosen["gamma_path"]
    known = [(gamma, score) for gamma, score in zip(path["gamma"], path["gcv"], strict=True) if score is not None]
    axes.plot(*zip(*known, strict=True), "o-", color=BLUE, ms=4)
    at = [score for gamma, score in known if gamma == record.chosen.get("gamma")]
    if at:
        axes.plot(record.chosen["gamma"], at[0], "*", ms=15, mfc=ORANGE, mec=INK)
    logarithmic(axes.xaxis)
    axes.xaxis.set_major_locator(LogLocator(numticks=5))  # a path has eight decades: a label at each would overlap
    axes.set(xlabel="gamma", ylabel="GCV score")


def _short(value: float) -> str:
    """Three digits, written out.

    >>> _short(0.10512), _short(105.12), _short(10512)
    ('0.105', '105', '10500')
    """
    return f"{float(f'{value:.3g}'):g}"


def swept(sheet: Sheet) -> list[str]:
    """Settings that some method has with three values or more in one federation; one of those that move together."""
    values: dict[tuple[str, str, Column], set[str]] = {}
    moving: dict[str, set[str]] = {}
    for row, column in sheet.cells:
        for name, value in row.differs.items():
            values.setdefault((name, row.method, column), set()).add(repr(value))
            moving.setdefault(name, set()).update(_moves_with(sheet, row, name))
    names: list[str] = []
    for (name, _, _), seen in values.items():
        if len(seen) > 2 and name not in names and not moving[name] & set(names):
            names.append(name)
    return names


def varying(sheet: Sheet) -> list[str]:
    """Settings that can be drawn: some method has two values or more, everything else held."""
    return [name for name in dict.fromkeys(name for row in sheet.rows for name in row.differs) if _lines(sheet, name)]


@dataclass(frozen=True, eq=False)
class _Line:
    """One method on one federation, everything but the setting (and what moves with it) held."""

    label: str
    column: Column
    points: dict[Any, tuple[Row, Sequence[Record]]]  # by the setting's value

    @property
    def numbers(self) -> list[float]:
        return sorted(value for value in self.points if not isinstance(value, str | bool))


def sensitivity(axes: Axes, sheet: Sheet, name: str, looks: dict[Row, Look]) -> None:
    """Final accuracy against one setting: a line for each method, federation and combination of the others.

    Where the setting is a number, ``auto`` is a level of its own: the dash-dotted line.
    """
    lines = _lines(sheet, name)
    if not lines:
        have = varying(sheet)
        raise InputError(
            f"no method has several values of '{name}' here; "
            + (f"settings that vary: {', '.join(have)}" if have else "no setting varies: run a sweep first")
        )
    numeric = all(len(line.numbers) > 1 for line in lines)
    order = list(dict.fromkeys(value for line in lines for value in (line.numbers if numeric else line.points)))
    place = {value: float(value) if numeric else float(i) for i, value in enumerate(order)}
    colours = [look.colour for look in looks.values()]
    for i, line in enumerate(lines):
        _draw(axes, line, place, colours[i % len(colours)], i)
    _ticks(axes, place, numeric)
    axes.set(xlabel=name, ylabel=sheet.headline.axis)


def _ticks(axes: Axes, place: dict[Any, float], numeric: bool) -> None:
    """Words at their places; numbers on a logarithmic axis if they span four doublings or more."""
    if not numeric:
        axes.set_xticks(list(place.values()), [str(value) for value in place], rotation=30, ha="right")
    elif min(place.values()) > 0 and max(place.values()) / min(place.values()) >= 16:
        logarithmic(axes.xaxis)
        axes.set_xticks(sorted(place.values()), [f"{value:g}" for value in sorted(place.values())])


def _lines(sheet: Sheet, name: str) -> list[_Line]:
    points_of: dict[tuple[str, Column, str], dict[Any, tuple[Row, Sequence[Record]]]] = {}
    for (row, column), records in sheet.cells.items():
        if name in row.differs:
            fixed = [key for key in row.differs if key not in _moves_with(sheet, row, name)]
            rest = ", ".join(f"{key}={row.differs[key]}" for key in fixed)
            points_of.setdefault((row.method, column, rest), {})[row.differs[name]] = (row, records)
    kept = {key: points for key, points in points_of.items() if len(points) > 1}
    columns = list(dict.fromkeys(column for _, column, _ in kept))
    return [
        _Line(", ".join(part for part in (method, *_apart(column, columns), rest) if part), column, points)
        for (method, column, rest), points in kept.items()
    ]


def _draw(axes: Axes, line: _Line, place: dict[Any, float], colour: str, i: int) -> None:
    placed = sorted(
        ((place[value], *each) for value, each in line.points.items() if value in place), key=lambda f: f[0]
    )
    x = [at for at, _, _ in placed]
    means, spreads = zip(*(_mean_and_spread(records) for _, _, records in placed), strict=True)
    marker, style = MARKERS[i % len(MARKERS)], LINES[i % len(LINES)]
    axes.errorbar(x, means, spreads, fmt=marker + style, color=colour, capsize=2, label=line.label, ms=5)
    for value, (_, records) in line.points.items():
        if value not in place:
            axes.axhline(_mean_and_spread(records)[0], ls="-.", color=colour, lw=1, label=f"{line.label}: {value}")
    _shared_stream(axes, placed, colour, line.label)
    paper = [(at, published(row, line.column)) for at, row, _ in placed]
    known = [(at, 100 * value) for at, value in paper if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker, mfc="none", color=colour, label=f"{line.label}: paper")


def _mean_and_spread(records: Sequence[Record]) -> tuple[float, float]:
    values = [record.headline.factor * record.score for record in records]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _shared_stream(axes: Axes, placed: Sequence[tuple[float, Row, Sequence[Record]]], colour: str, label: str) -> None:
    """The primary stream alone at the same settings, where it was recorded."""
    alone = [
        (at, 100 * float(np.mean([a for r in records for a in r.primary_accuracies if a is not None])))
        for at, _, records in placed
        if all(r.primary_accuracies for r in records)
    ]
    if alone:
        axes.plot(*zip(*alone, strict=True), ":", color=colour, lw=1, label=f"{label}: primary alone")


def _moves_with(sheet: Sheet, row: Row, name: str) -> set[str]:
    """The setting itself, and those that always change together with it (both widths, say)."""
    own = [other.differs for other in sheet.rows if other.method == row.method]
    pairs = {key: {(repr(d.get(name)), repr(d.get(key))) for d in own} for key in row.differs}  # not all are tuned
    n = len({repr(d.get(name)) for d in own})
    return {key for key, seen in pairs.items() if len(seen) == n == len({b for _, b in seen})}


def _apart(column: Column, columns: Sequence[Column]) -> list[str]:
    shared = set.intersection(*(set(each.parts) for each in columns))
    return [part for part in column.parts if part not in shared]
