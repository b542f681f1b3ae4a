"""Figures by name, ready for a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apfl.errors import InputError, unknown
from apfl.report.figures import FIGURES, choices, curves, people
from apfl.report.figures.style import Look, drawing, legend_below, looks, shared_legend
from apfl.report.pareto import points
from apfl.report.sheet import Column, Row, Sheet

__all__ = ["all_gains", "drawn", "figure", "panel"]

Looks = dict[Row, Look]
Panel = tuple[str, Callable[[Axes], None]]  # a title and what is drawn
Panels = Callable[[Sheet, Column, Row | None, Looks], list[Panel]]  # of one federation, our row and all looks


def figure(name: str, sheet: Sheet, ours: Row | None, x: str | None = None) -> Figure:
    """A figure with a line of panels for each federation."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    look = looks(sheet.rows, ours)
    if name == "sensitivity":
        lines = [[("", drawn(choices.sensitivity, sheet, _setting(sheet, x), look))]]
    else:
        lines = [PANELS[name](sheet, column, ours, look) for column in sheet.columns]
    lines = [panels for panels in lines if panels]
    if not lines:
        raise InputError(f"these records do not have what figure '{name}' shows: {FIGURES[name]}")
    with drawing():
        return _arranged(lines)


def _setting(sheet: Sheet, x: str | None) -> str:
    """The setting to draw: the one given, or the only one that was swept."""
    swept = choices.swept(sheet)
    if x is None and len(swept) != 1:
        raise InputError(
            f"figure sensitivity needs --x, the setting to draw "
            f"({', '.join(choices.varying(sheet)) or 'none varies here'})"
        )
    return x or swept[0]


def _arranged(lines: Sequence[Sequence[Panel]]) -> Figure:
    wide = max(map(len, lines))
    shape = Figure(figsize=(4.2 * wide, 3.9 * len(lines)), layout="constrained")
    grid = shape.subplots(len(lines), wide, squeeze=False)
    for row, panels in zip(grid, lines, strict=True):
        for axes, (title, draw) in zip(row, panels, strict=False):
            draw(axes)
            axes.set_title("\n".join(wrap(title, 52)), loc="left")
        for axes in row[len(panels) :]:
            axes.set_axis_off()
    shared_legend(shape)
    return shape


def drawn(draw: Callable[..., None], *values: Any) -> Callable[[Axes], None]:
    """A drawing with all its values but the axes."""
    return lambda axes: draw(axes, *values)


def panel(draw: Callable[[Axes], None], height: float = 3.1) -> Figure:
    """One panel by itself, for the page."""
    with drawing():
        shape = Figure(figsize=(4.6, height))
        axes = shape.subplots()
        draw(axes)
        legend_below(axes)
        return shape


def _progress(*against: str) -> Panels:
    def panels(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
        return [(column.label, drawn(curves.progress, sheet, column, x, looks)) for x in against]

    return panels


def _costs(draw: Callable[[Axes, Sheet, Column, str, Looks], None]) -> Panels:
    def panels(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
        return [(column.label, drawn(draw, sheet, column, of, looks)) for of in ("seconds", "bytes")]

    return panels


def _pareto(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
    return [(column.label, drawn(curves.pareto, sheet, column, looks))] if points(sheet, column) else []


def _clients(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
    return [(column.label, drawn(people.distribution, sheet, column, looks))]


def _gains(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
    if ours is None:
        return []
    gains = all_gains(sheet, column, ours)
    return [
        (f"{ours.label}, {column.label}", drawn(people.gains, values, over, sheet.headline.difference))
        for over, values in gains.items()
    ]


def _partition(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
    records = (record for cell in sheet.records(column).values() for record in cell)
    counted = next((record for record in records if record.class_counts), None)
    if counted is None:
        return []
    return [(f"{column.label}, seed {counted.seed}", drawn(people.label_picture, counted))]


def _tuning(sheet: Sheet, column: Column, ours: Row | None, looks: Looks) -> list[Panel]:
    panels: list[Panel] = []
    for record, *_ in sheet.records(column).values():
        if "table" in record.chosen:
            panels.append((f"{record.method}, {column.label}", drawn(choices.surface, record)))
            if "gamma_path" in record.chosen:
                panels.append((f"{record.method}, gamma", drawn(choices.gcv_curve, record)))
    return panels


PANELS: dict[str, Panels] = {
    "curves": _progress("rounds", "seconds", "bytes"),
    "rounds": _progress("rounds"),
    "seconds": _progress("seconds"),
    "bytes": _progress("bytes"),
    "overhead": _costs(curves.overhead),
    "cost": _costs(curves.cost),
    "pareto": _pareto,
    "clients": _clients,
    "gains": _gains,
    "partition": _partition,
    "tuning": _tuning,
}


def all_gains(sheet: Sheet, column: Column, row: Row) -> dict[str, people.Floats]:
    """What the clients of one row gained, by what they are compared with."""
    by_row = sheet.records(column)
    if row not in by_row:
        return {}
    found = {"the primary stream": people.gains_over_primary(by_row[row])}
    for other, records in by_row.items():
        if other.method in people.ALONE:
            found[f"going alone ({other.label})"] = people.gains_over_alone(by_row[row], records)
    return {over: values for over, values in found.items() if len(values)}
