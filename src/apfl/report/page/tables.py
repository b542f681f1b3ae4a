"""The page's tables, as plain values for the template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from apfl.experiments.headline import Headline
from apfl.experiments.record import Record
from apfl.report.figures import people
from apfl.report.formats import heading, others, points, written
from apfl.report.results import Cell, Metric, Results, metrics_of
from apfl.report.sheet import Column, Row
from apfl.report.summary import difference_notes, notes

__all__ = ["Values", "client_table", "tables"]

Values = dict[str, Any]


def tables(results: Results, source: str) -> list[Values]:
    """Results, differences, and every metric."""
    heads = ["method", *("\n".join(heading(column, results.columns)) for column in results.columns)]
    first = [
        {
            "ours": row is results.ours,
            "cells": [_cell(row.label), *(_result(results, row, column) for column in results.columns)],
        }
        for row in results.rows
    ]
    about = notes(results, ("Bold", "underlined"), source)
    title = "Accuracy" if results.metric.name.startswith("accuracy") else results.metric.name.replace("_", " ")
    result_tables = [
        _table("results", title, f"{title} {results.metric.unit}: {results.metric.says}", heads, first, about)
    ]
    if results.ours is not None and results.differences:
        apart = [
            {"ours": False, "cells": [_cell(row.label), *(_difference(results, row, c) for c in results.columns)]}
            for row in others(results)
        ]
        name = f"{results.ours.label} minus the others"
        result_tables.append(
            _table("differences", name, f"{name}, in {results.metric.points}", heads, apart, difference_notes(results))
        )
    return [*result_tables, _everything(results)]


def _table(
    name: str, title: str, caption: str, heads: Sequence[str], rows: Sequence[Values], about: Sequence[str] = (),
    words: Iterable[int] = (0,),
) -> Values:  # fmt: skip
    shown = {"id": name, "title": title, "caption": caption, "heads": heads, "rows": rows, "notes": about}
    return shown | {"words": set(words)}


def _cell(text: str, value: float | str | None = None, kind: str = "", paper: str = "") -> Values:
    return {"text": text, "value": "" if value is None else value, "kind": kind, "paper": paper}


def _result(results: Results, row: Row, column: Column) -> Values:
    cell: Cell | None = results.cells.get((row, column))
    if cell is None:
        return _cell("–")
    paper = "" if cell.published is None else results.metric.write(cell.published)
    return _cell(written(cell, results, 1), cell.mean, {1: "first", 2: "second"}.get(cell.place, ""), paper)


def _difference(results: Results, row: Row, column: Column) -> Values:
    difference = results.differences.get((row, column))
    return _cell(points(results, row, column), None if difference is None else difference.value)


def _everything(results: Results) -> Values:
    shown = [metric for metric in metrics_of(results.sheet.all[0].target) if metric.name != "bytes"]
    heads = ["method", "federation", "seeds", *(metric.name.replace("_", " ") for metric in shown)]
    rows = []
    for row in results.rows:
        for column in results.columns:
            if records := results.sheet.cells.get((row, column)):
                cells = [_cell(row.label), _cell(column.label, column.label), _count(len(records))]
                cells += [_mean(metric, records) for metric in shown]
                rows.append({"ours": row is results.ours, "cells": cells})
    about = ["Means over seeds. Bytes are of all clients together; seconds are training alone, on the device recorded."]
    return _table("everything", "Everything measured", "Every metric of every cell", heads, rows, about, (0, 1))


def _mean(metric: Metric, records: Sequence[Record]) -> Values:
    known = [value for value in map(metric.of, records) if value is not None]
    mean = float(np.mean(known)) if known else None
    return _cell("–" if mean is None else metric.write(mean), mean)


def client_table(results: Results, column: Column, name: str) -> Values:
    """Our clients of the first seed, beside the primary stream and going alone."""
    assert results.ours is not None
    own = results.sheet.records(column)[results.ours][0]
    beside = _beside(results, column, own)
    heads = ["client", "training rows", "test rows", *(["classes"] if own.class_counts else []), results.ours.label]
    heads += [head for other in beside for head in (other, f"gain over {other}")]
    rows = [{"ours": False, "cells": _client(own, k, list(beside.values()))} for k in range(len(own.client_names))]
    first = own.headline
    unit = " in %" if first.percent else ""
    caption = f"{column.label}: {first.word} of each client{unit}, gains in {first.difference}, seed {own.seed}"
    return _table(f"{name}-clients", "Clients", caption, heads, rows)


def _beside(results: Results, column: Column, own: Record) -> dict[str, Sequence[float | None]]:
    """What our clients' accuracies are compared with: the same clients, by what they had."""
    beside = {"primary stream": own.primary_accuracies} if own.primary_accuracies else {}
    for row, records in results.sheet.records(column).items():
        same = [r for r in records if r.seed == own.seed and list(r.n_test) == list(own.n_test)]
        if row.method in people.ALONE and same:
            beside[row.label] = same[0].client_scores
    return beside


def _client(own: Record, k: int, beside: Sequence[Sequence[float | None]]) -> list[Values]:
    """One line: the client, its rows and classes, its accuracy, and what it gained."""
    cells = [_cell(own.client_names[k]), _count(own.n_train[k]), _count(own.n_test[k])]
    if own.class_counts:
        cells.append(_count(sum(count > 0 for count in own.class_counts[k])))
    mine, first = own.client_scores[k], own.headline
    cells.append(_score(mine, first))
    for accuracies in beside:
        theirs = accuracies[k]
        gain = None if mine is None or theirs is None else first.sign * (mine - theirs)
        cells += [_score(theirs, first), _cell("–" if gain is None else first.apart(gain), gain)]
    return cells


def _count(n: int) -> Values:
    return _cell(str(n), n)


def _score(value: float | None, headline: Headline) -> Values:
    return _cell("–" if value is None else headline.write(value), value)
