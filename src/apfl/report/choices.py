"""How settings move the accuracy: the surface a method chose from, and sweeps over one setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from apfl.errors import InputError
from apfl.measure import Record
from apfl.report.gather import Column, Row, Sheet
from apfl.report.published import published
from apfl.report.style import BLUE, INK, LINES, MARKERS, ORANGE, Look, logarithmic

__all__ = ["gcv_curve", "sensitivity", "surface", "swept"]


def surface(axes: Axes, record: Record) -> None:
    """Left-out accuracy over beta and balance at the chosen tau; the star is what was chosen."""
    table: dict[str, Any] = record.chosen["table"]
    hits = np.array(table["hits"], dtype=float)  # (betas, balances, taus)
    place = _place(table, record)
    tau = int(hits.max((0, 1)).argmax()) if place is None else place[2]
    n_rows = sum(record.n_train) if place is None else hits[place] / record.chosen["left_out_accuracy"]
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
    axes.set_yticks(at, [f"{table['beta'][i]:.2g}" for i in at])
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
    axes.set(xlabel="gamma", ylabel="GCV score")


def swept(sheet: Sheet) -> list[str]:
    """Settings that some method has with three values or more in one federation."""
    values: dict[tuple[str, str, Column], set[str]] = {}
    for row, column in sheet.cells:
        for name, value in row.differs.items():
            values.setdefault((name, row.method, column), set()).add(repr(value))
    return list(dict.fromkeys(name for (name, _, _), seen in values.items() if len(seen) > 2))


def sensitivity(axes: Axes, sheet: Sheet, columns: Sequence[Column], name: str, looks: dict[Row, Look]) -> None:
    """Final accuracy against one setting: a line for each method, federation and combination of the others."""
    lines: dict[tuple[str, Column, str], dict[Any, tuple[Row, Sequence[Record]]]] = {}
    for (row, column), records in sheet.cells.items():
        if column in columns and name in row.differs:
            rest = ", ".join(
                f"{key}={value}" for key, value in row.differs.items() if key not in _moves_with(sheet, row, name)
            )
            lines.setdefault((row.method, column, rest), {})[row.differs[name]] = (row, records)
    if not lines:
        have = swept(sheet)
        raise InputError(
            f"no method has several values of '{name}' here; "
            + (f"settings that vary: {', '.join(have)}" if have else "no setting varies: run a sweep first")
        )
    words = any(isinstance(value, str | bool) for points in lines.values() for value in points)
    order = list(dict.fromkeys(value for points in lines.values() for value in points))
    place = {value: i if words else float(value) for i, value in enumerate(order if words else sorted(order))}
    colours = [look.colour for look in looks.values()]
    for i, ((method, column, rest), points) in enumerate(lines.items()):
        found = sorted((place[value], *each) for value, each in points.items())
        label = ", ".join(part for part in (method, *_apart(column, columns), rest) if part)
        means = [100 * np.mean([r.accuracy_client_mean for r in records]) for _, _, records in found]
        spreads = [
            100 * np.std([r.accuracy_client_mean for r in records], ddof=min(1, len(records) - 1))
            for _, _, records in found
        ]
        colour, x = colours[i % len(colours)], [at for at, _, _ in found]
        axes.errorbar(x, means, spreads, fmt=MARKERS[i % 10] + LINES[i % 4], color=colour, capsize=2, label=label, ms=5)
        _shared_stream(axes, found, colour, label)
        paper = [(at, published(row, column)) for at, row, _ in found]
        known = [(at, 100 * value) for at, value in paper if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), MARKERS[i % 10], mfc="none", color=colour, label=f"{label}: paper")
    if words:
        axes.set_xticks(list(place.values()), [str(value) for value in place], rotation=30, ha="right")
    elif min(place.values()) > 0 and max(place.values()) / min(place.values()) >= 16:
        logarithmic(axes.xaxis)
        axes.set_xticks(sorted(place.values()), [f"{value:g}" for value in sorted(place.values())])
    axes.set(xlabel=name, ylabel="accuracy, mean over clients (%)")


def _shared_stream(axes: Axes, found: Sequence[tuple[float, Row, Sequence[Record]]], colour: str, label: str) -> None:
    """The primary stream alone at the same settings, where it was recorded."""
    alone = [
        (at, 100 * float(np.mean([a for r in records for a in r.primary_accuracies if a is not None])))
        for at, _, records in found
        if all(r.primary_accuracies for r in records)
    ]
    if alone:
        axes.plot(*zip(*alone, strict=True), ":", color=colour, lw=1, label=f"{label}: primary alone")


def _moves_with(sheet: Sheet, row: Row, name: str) -> set[str]:
    """The setting itself, and those that always change together with it (both widths, say)."""
    own = [other.differs for other in sheet.rows if other.method == row.method]
    pairs = {key: {(repr(d[name]), repr(d[key])) for d in own} for key in row.differs}
    n = len({repr(d[name]) for d in own})
    return {key for key, seen in pairs.items() if len(seen) == n == len({b for _, b in seen})}


def _apart(column: Column, columns: Sequence[Column]) -> list[str]:
    shared = set.intersection(*(set(each.parts) for each in columns))
    return [part for part in column.parts if part not in shared]
