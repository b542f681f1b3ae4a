"""The page's drawings and facts, as plain values for the template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from apfl.experiments.record import Record
from apfl.report.caveats import unmeasured
from apfl.report.figures import choices, curves, people
from apfl.report.figures.draw import all_gains, drawn, panel
from apfl.report.figures.style import Look, themed
from apfl.report.page.tables import Values, client_table
from apfl.report.results import Results
from apfl.report.sheet import Column, Row, Sheet
from apfl.report.units import human_bytes

__all__ = ["federation", "overview", "settings", "sweeps"]


def overview(sheet: Sheet) -> dict[str, str]:
    """Where all this comes from."""
    records = sheet.all
    return {
        "records": str(len(records)),
        "of": f"{_several(len(sheet.rows), 'method')} on {_several(len(sheet.columns), 'federation')}",
        "seeds": ", ".join(map(str, sorted({record.seed for record in records}))),
        "data": "; ".join(sorted({f"{r.data} (sha256 {(r.data_sha256 or 'not known')[:12]})" for r in records})),
        "measured on": ", ".join(sorted({record.device for record in records})),
        "versions": "; ".join(sorted({_versions(record) for record in records})),
    }


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.versions.items() if value)


def _several(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def sweeps(sheet: Sheet, looks: dict[Row, Look]) -> list[Values]:
    """A drawing for every setting that was swept."""
    about = "Mean ± standard deviation over seeds."
    return [
        _figure(f"sweep-{x}-", f"{_title(sheet)} against {x}", about, drawn(choices.sensitivity, sheet, x, looks))
        for x in choices.swept(sheet)
    ]


def _title(sheet: Sheet) -> str:
    word = sheet.headline.word
    return word[0].upper() + word[1:] if word.islower() else word


def _figure(prefix: str, title: str, caption: str, draw: Callable[[Axes], None], height: float = 3.1) -> Values:
    safe = "".join(letter if letter.isalnum() else "-" for letter in prefix)
    return {"title": title, "caption": caption, "svg": themed(panel(draw, height), f"{title}. {caption}", f"{safe}-")}


def federation(results: Results, column: Column, name: str, looks: dict[Row, Look]) -> Values:
    """One federation: what it is, its drawings, its clients."""
    sheet, ours = results.sheet, results.ours
    by_row = sheet.records(column)
    records = [record for cell in by_row.values() for record in cell]
    counted = next((record for record in records if record.class_counts), None)
    gains = all_gains(sheet, column, ours) if ours is not None else {}
    return {
        "id": name,
        "label": column.label,
        "facts": _facts(records),
        "figures": [
            *_curves(sheet, column, name, looks),
            *_clients(sheet, column, name, looks),
            *([] if counted is None else [_labels(counted, name)]),
            *([] if ours is None else _gains(gains, ours, name, sheet.headline.difference)),
            *_chosen(by_row, name),
        ],
        "missing": _missing(counted, gains, ours in by_row, records[0].target == "classification"),
        "clients": client_table(results, column, name) if ours in by_row else None,
    }


def _gains(gains: Mapping[str, people.Floats], ours: Row, name: str, unit: str) -> list[Values]:
    figures = []
    for i, (over, values) in enumerate(gains.items()):
        title, caption = f"What each client gained over {over}", f"{ours.label}: {_gained(values, unit)}"
        figures.append(_figure(f"{name}-gain{i}", title, caption, drawn(people.gains, values, over, unit)))
    return figures


def _missing(counted: Record | None, gains: Mapping[str, people.Floats], has_ours: bool, classes: bool) -> list[str]:
    """What these records cannot show."""
    missing = []
    if counted is None and classes:
        missing.append("These records do not say how the classes are spread; runs of this version do.")
    if classes and has_ours and not any("primary" in over for over in gains):
        missing.append("The primary stream alone was not recorded here, so the gain over it is not known.")
    if not any("alone" in over for over in gains):
        missing.append(f"No record of a client going alone ({' or '.join(people.ALONE)}), so that gain is not known.")
    return missing


def _facts(records: Sequence[Record]) -> dict[str, str]:
    first = records[0]
    missing = unmeasured(records)
    without = f". {missing}" if missing else ""
    return {
        "data": first.data,
        "clients": f"{first.n_clients}{without}",
        "rows of a client": f"{min(first.n_train)} to {max(first.n_train)} for training, "
        f"{min(first.n_test)} to {max(first.n_test)} for testing (seed {first.seed})",
        {"regression": "targets", "multilabel": "labels"}.get(first.target, "classes"): _columns(first),
        "protocol": _compact(first.protocol),
    }


def _columns(record: Record) -> str:
    if record.target == "classification":
        return str(len(record.recall_per_class))
    return ", ".join(record.class_names[:12]) + (", ..." if len(record.class_names) > 12 else "")


def _compact(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)


def _curves(sheet: Sheet, column: Column, name: str, looks: dict[Row, Look]) -> list[Values]:
    tall = 3.1
    parts = []
    if any(len(record.curve) > 1 for cell in sheet.records(column).values() for record in cell):
        for x, words in (("rounds", "rounds"), ("seconds", "computing time"), ("bytes", "bytes sent")):
            about = (
                "After each round, mean over seeds; bands are ± one standard deviation. A single mark: no rounds to "
            )
            about += "follow, only the result."
            about += " Dotted: nothing is sent." if x == "bytes" else ""
            draw = drawn(curves.progress, sheet, column, x, looks)
            parts.append(_figure(f"{name}-{x}", f"{_title(sheet)} against {words}", about, draw, tall))
    for of, words in (("seconds", "time"), ("bytes", "bytes")):
        better = "up" if sheet.headline.higher_is_better else "down"
        about = f"At the end, mean ± standard deviation over seeds; {better} and to the left is better."
        draw = drawn(curves.cost, sheet, column, of, looks)
        parts.append(_figure(f"{name}-cost-{of}", f"Cost against {sheet.headline.word}: {words}", about, draw, tall))
    return parts


def _clients(sheet: Sheet, column: Column, name: str, looks: dict[Row, Look]) -> list[Values]:
    about = "One dot is one client with one seed. Box: quartiles and median; whiskers: extremes; diamond: mean."
    height = 1.1 + 0.27 * len(sheet.records(column))
    draw = drawn(people.distribution, sheet, column, looks)
    return [_figure(f"{name}-clients", f"{_title(sheet)} of every client", about, draw, height)]


def _labels(record: Record, name: str) -> Values:
    counts = np.array(record.class_counts)
    n_own = (counts > 0).sum(1)
    about = (
        f"Training rows, seed {record.seed}; the stronger the colour, the more (at most {counts.max()}). "
        f"A client has {n_own.min()} to {n_own.max()} of {counts.shape[1]} classes, {np.median(n_own):g} in the median."
    )
    height = min(5.5, max(2.4, 0.5 + 0.16 * len(counts)))
    return _figure(f"{name}-labels", "Who has which classes", about, drawn(people.label_picture, record), height)


def _gained(values: people.Floats, unit: str) -> str:
    form = "+.1f" if unit == "points" else "+.3g"
    up, down = int((values > 1e-9).sum()), int((values < -1e-9).sum())
    return (
        f"{up} of {len(values)} gained, {down} lost, {len(values) - up - down} unchanged (clients of all seeds); "
        f"mean {values.mean():{form}}, median {np.median(values):{form}}, worst {values.min():{form}} {unit}."
    )


def _chosen(by_row: Mapping[Row, Sequence[Record]], name: str) -> list[Values]:
    parts = []
    for i, (row, records) in enumerate(by_row.items()):
        record = records[0]
        if "table" in record.chosen:
            about = f"Seed {record.seed}, training rows only, each left out of both streams; the star is the choice."
            draw = drawn(choices.surface, record)
            parts.append(_figure(f"{name}-surface{i}", f"What {row.label} chose from", about, draw))
        if "gamma_path" in record.chosen:
            about = (
                f"Generalised cross-validation of the sums, seed {record.seed}; the star is the choice: the smallest "
            )
            about += "gamma near the lowest point whose score is within 3 % of it."
            draw = drawn(choices.gcv_curve, record)
            parts.append(_figure(f"{name}-gcv{i}", f"How {row.label} chose gamma", about, draw))
    return parts


def settings(results: Results) -> list[Values]:
    """Every cell's settings, what was chosen, where it ran."""
    parts = []
    for row in results.rows:
        for column in results.columns:
            records = results.sheet.cells.get((row, column), ())
            if records:
                parts.append({"label": f"{row.label}: {column.label}", "groups": _groups(records)})
    return parts


def _groups(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    first = records[0]
    chosen = {
        f"seed {record.seed}": ", ".join(
            f"{key} = {_short(value)}" for key, value in record.chosen.items() if _plain(value)
        )
        for record in records
    }
    ran = {
        f"seed {r.seed}": f"{r.rounds} rounds, {human_bytes(r.bytes_up)} up, {human_bytes(r.bytes_down)} down, "
        f"{r.seconds:.3g} s on {r.device}; {_versions(r)}"
        for r in records
    }
    return {
        "Settings": {key: _short(value) for key, value in first.settings.items()},
        "Chosen by itself": {key: value for key, value in chosen.items() if value},
        "Tuned": {key: _short(value) for key, value in first.tuning.items()},
        "Protocol": {key: _short(value) for key, value in first.protocol.items()},
        "Data": {
            "file": first.data,
            "sha256": str(first.data_sha256),
            **{k: _short(v) for k, v in first.provenance.items()},
        },
        "Ran": ran,
    }


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _short(value: Any) -> str:
    if value is None:
        return "not set"
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
