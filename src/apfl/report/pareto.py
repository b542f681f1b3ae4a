"""Who is on the front: accuracy up, bytes down, exchanges down. A method is off it if another one is at least as good
in all three and better in one.

Means over seeds decide, so a lead within the spread of the seeds may be luck: the table has the spread beside the mean.
Not in the running are settings that were found on test rows, and `central`, which has everyone's rows in one place.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from apfl.experiments.headline import HEADLINES, Headline
from apfl.report.sheet import Column, Row, Sheet
from apfl.report.units import human_bytes

__all__ = ["PARETO_FORMATS", "Point", "front", "pareto_csv", "pareto_markdown", "pareto_terminal", "points", "standing"]

NOT_FEDERATED = ("central",)
HEADINGS = ("bytes, each client", "exchanges", "front")


def headings(sheet: Sheet) -> tuple[str, ...]:
    """Of the table; what is up or down depends on the target."""
    first = sheet.headline
    return "method", f"{first.word} in %" if first.percent else first.word, *HEADINGS


@dataclass(frozen=True, eq=False)
class Point:
    """One method on one federation: means over its seeds."""

    row: Row
    accuracy: float  # mean over clients; of other targets than classes their own headline
    spread: float | None  # standard deviation over seeds
    bytes: float  # up and down, each client
    exchanges: float
    n_seeds: int
    headline: Headline = HEADLINES["classification"]

    def beats(self, other: Point) -> bool:
        """Whether it is at least as good in all three, and better in one."""
        own, their = self._costs(), other._costs()
        return own != their and all(a <= b for a, b in zip(own, their, strict=True))

    def _costs(self) -> tuple[float, float, float]:
        return -self.headline.sign * self.accuracy, self.bytes, self.exchanges


def points(sheet: Sheet, column: Column) -> list[Point]:
    """The methods that compete on one federation, the most accurate first."""
    found = []
    for row, records in sheet.records(column).items():
        if not row.competes or row.method in NOT_FEDERATED:
            continue
        accuracies = [record.score for record in records]
        found.append(
            Point(
                row,
                float(np.mean(accuracies)),
                float(np.std(accuracies, ddof=1)) if len(records) > 1 else None,
                float(np.mean([(record.bytes_up + record.bytes_down) / record.n_clients for record in records])),
                float(np.mean([record.rounds for record in records])),
                len(records),
                records[0].headline,
            )
        )
    return sorted(found, key=lambda point: -point.headline.sign * point.accuracy)


def front(competing: Sequence[Point]) -> list[Point]:
    """Those that no other one beats, in their order."""
    return [point for point in competing if not any(other.beats(point) for other in competing)]


def standing(sheet: Sheet) -> list[str]:
    """In words: who is on the front of each federation, and of how many of them."""
    fronts = {column: front(points(sheet, column)) for column in sheet.columns}
    said = [f"{column.label}: on the front {_names(on)}." for column, on in fronts.items() if on]
    if len(fronts) > 1:
        often = {row: sum(row in [point.row for point in on] for on in fronts.values()) for row in sheet.rows}
        ranked = sorted((row for row in often if often[row]), key=lambda row: -often[row])
        said.append(f"Of {len(fronts)} fronts: {', '.join(f'{row.label} {often[row]}' for row in ranked)}.")
    return said


def _names(on: Sequence[Point]) -> str:
    each = [f"{point.row.label} ({_words(point)})" for point in on]
    return f"is {each[0]}" if len(each) == 1 else f"are {', '.join(each[:-1])} and {each[-1]}"


def _words(point: Point) -> str:
    sent = f"{human_bytes(point.bytes)} in {point.exchanges:g}" if point.bytes else "nothing sent"
    return f"{point.headline.said(point.accuracy)}, {sent}"


def _cells(point: Point, on: Sequence[Point], digits: int) -> tuple[str, ...]:
    spread = "" if point.spread is None else f" ± {point.headline.write(point.spread, digits)}"
    accuracy = f"{point.headline.write(point.accuracy, digits)}{spread}"
    return point.row.label, accuracy, human_bytes(point.bytes), f"{point.exchanges:g}", "yes" if point in on else ""


def pareto_markdown(sheet: Sheet, digits: int = 1) -> str:
    """A table for each federation, and its front in words."""
    parts = []
    for column in sheet.columns:
        competing = points(sheet, column)
        on = front(competing)
        heads = headings(sheet)
        lines = [heads, ("---",) * len(heads), *(_cells(point, on, digits) for point in competing)]
        parts.append(f"**{column.label}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in standing(sheet))]) + "\n"


def pareto_csv(sheet: Sheet, digits: int = 1) -> str:
    """One line for each method and federation, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = sheet.headline.key
    writer.writerow(["federation", "method", first, "spread", "bytes_each_client", "exchanges", "seeds", "front"])
    for column in sheet.columns:
        competing = points(sheet, column)
        on = front(competing)
        for each in competing:
            spread = "" if each.spread is None else each.spread
            numbers = (each.accuracy, spread, each.bytes, each.exchanges, each.n_seeds)
            writer.writerow([column.label, each.row.label, *numbers, int(each in on)])
    return text.getvalue()


def pareto_terminal(sheet: Sheet, digits: int = 1) -> RenderableType:
    """For people: the front is bold."""
    shown: list[RenderableType] = []
    for column in sheet.columns:
        competing = points(sheet, column)
        on = front(competing)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(column.label), title_justify="left")
        for heading in headings(sheet):
            table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for point in competing:
            style = "bold" if point in on else "dim"
            table.add_row(*(Text(cell) for cell in _cells(point, on, digits)), style=style)
        shown.append(table)
    return Group(*shown, *(Text(line) for line in standing(sheet)))


PARETO_FORMATS: dict[str, Callable[[Sheet, int], str]] = {"markdown": pareto_markdown, "csv": pareto_csv}
