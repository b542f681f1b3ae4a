"""Figures by name, ready for a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apfl.errors import InputError, unknown
from apfl.report.figures import FIGURES, choices, curves, people
from apfl.report.figures.style import Look, drawing, legend_below, looks, shared_legend
from apfl.report.sheet import Column, Row, Sheet

__all__ = ["all_gains", "figure", "panel"]

Panel = tuple[str, Callable[[Axes], None]]  # a title and what is drawn


def figure(name: str, sheet: Sheet, ours: Row | None, x: str | None = None) -> Figure:
    """A figure with a line of panels for each federation."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    look = looks(sheet.rows, ours)
    if name == "sensitivity":
        known = choices.swept(sheet)
        if x is None and len(known) != 1:
            raise InputError(
                f"figure sensitivity needs --x, the setting to draw "
                f"({', '.join(choices.varying(sheet)) or 'none varies here'})"
            )
        setting = x or known[0]
        lines = [[("", lambda axes: choices.sensitivity(axes, sheet, setting, look))]]
    else:
        lines = [panels for column in sheet.columns for panels in [_panels(name, sheet, column, ours, look)] if panels]
    if not lines:
        raise InputError(f"these records do not have what figure '{name}' shows: {FIGURES[name]}")
    with drawing():
        return _arranged(lines)


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


def panel(draw: Callable[[Axes], None], height: float = 3.1) -> Figure:
    """One panel by itself, for the page."""
    with drawing():
        shape = Figure(figsize=(4.6, height))
        axes = shape.subplots()
        draw(axes)
        legend_below(axes)
        return shape


def _panels(name: str, sheet: Sheet, column: Column, ours: Row | None, look: dict[Row, Look]) -> list[Panel]:
    where = column.label
    if name in ("curves", "rounds", "seconds", "bytes"):
        wanted = ("rounds", "seconds", "bytes") if name == "curves" else (name,)
        return [(where, lambda axes, x=x: curves.progress(axes, sheet, column, x, look)) for x in wanted]  # type: ignore[misc]
    if name in ("overhead", "cost"):
        draw = curves.overhead if name == "overhead" else curves.cost
        return [(where, lambda axes, of=of: draw(axes, sheet, column, of, look)) for of in ("seconds", "bytes")]  # type: ignore[misc]
    if name == "clients":
        return [(where, lambda axes: people.distribution(axes, sheet, column, look))]
    if name == "gains":
        return [
            (f"{row.label}, {where}", lambda axes, values=values, over=over: people.gains(axes, values, over))  # type: ignore[misc]
            for row in [ours]
            if row is not None
            for over, values in all_gains(sheet, column, row).items()
        ]
    records = [record for cell in sheet.records(column).values() for record in cell]
    if name == "partition":
        dealt = next((record for record in records if record.class_counts), None)
        return (
            [] if dealt is None else [(f"{where}, seed {dealt.seed}", lambda axes: people.label_picture(axes, dealt))]
        )
    chose = [cell[0] for row, cell in sheet.records(column).items() if "table" in cell[0].chosen]
    found: list[Panel] = []
    for record in chose:
        found.append((f"{record.method}, {where}", lambda axes, record=record: choices.surface(axes, record)))  # type: ignore[misc]
        if "gamma_path" in record.chosen:
            found.append((f"{record.method}, gamma", lambda axes, record=record: choices.gcv_curve(axes, record)))  # type: ignore[misc]
    return found


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
