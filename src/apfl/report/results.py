"""From records to numbers: mean and spread over seeds, places, and differences to one method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apfl.errors import InputError, unknown
from apfl.experiments.headline import HEADLINES
from apfl.experiments.record import Record
from apfl.report.caveats import rarest_recall
from apfl.report.compare import Difference, Pairs, holm, paired_difference
from apfl.report.published import published
from apfl.report.sheet import Column, Row, Sheet
from apfl.report.units import human_bytes

__all__ = ["METRICS", "Cell", "Metric", "Results", "metrics_of", "results"]

OURS = "apfl"


@dataclass(frozen=True)
class Metric:
    """One number of a record."""

    name: str
    says: str
    of: Callable[[Record], float | None]
    higher_is_better: bool = True
    percent: bool = True
    measure: bool = False  # of numbers or labels: no bytes, seconds or rounds

    @property
    def points(self) -> str:
        """What a difference is counted in."""
        return "points" if self.percent else self.name.partition("_")[0].upper()

    def apart(self, value: float, digits: int = 1) -> str:
        """A difference as text, with its sign."""
        return f"{100 * value:+.{digits}f}" if self.percent else f"{value:+.{digits + 2}g}"

    def write(self, value: float, digits: int = 1) -> str:
        """A value as text, without its unit."""
        if self.percent:
            return f"{100 * value:.{digits}f}"
        if self.measure:
            return f"{value:.{digits + 3}g}"
        return human_bytes(value) if self.name.startswith("bytes") else f"{value:.3g}"

    @property
    def unit(self) -> str:
        if self.measure and not self.percent:
            return "in the target's units, of several targets in standard deviations"
        return "in %" if self.percent else {"seconds": "in seconds", "rounds": "exchanges"}.get(self.name, "in bytes")


ON = "on the client's own test rows"
METRICS = {
    each.name: each
    for each in [
        Metric(
            "accuracy_client_mean",
            f"mean over clients of the final model's accuracy {ON}",
            lambda r: r.accuracy_client_mean,
        ),
        Metric(
            "accuracy_sample_mean", "the final models' accuracy over all test rows", lambda r: r.accuracy_sample_mean
        ),
        Metric(
            "accuracy_worst_decile",
            f"mean accuracy of the worst tenth of the clients, final models, {ON}",
            lambda r: r.accuracy_worst_decile,
        ),
        Metric(
            "balanced_accuracy_client_mean",
            "mean over clients of the final model's recall, averaged over the client's classes",
            lambda r: r.balanced_accuracy_client_mean,
        ),
        Metric(
            "auroc_client_mean",
            "mean over clients of the final model's one-vs-rest area under the ROC curve",
            lambda r: r.auroc_client_mean,
        ),
        Metric(
            "recall_rarest_class",
            "the final models' recall of the class with fewest training rows, over all test rows of it",
            rarest_recall,
        ),
        Metric("accuracy_client_std", "spread of the accuracy over clients", lambda r: r.accuracy_client_std, False),
        Metric("seconds", "training time, from features to models in memory", lambda r: r.seconds, False, False),
        Metric("bytes_up", "sent by all clients together", lambda r: r.bytes_up, False, False),
        Metric("bytes_down", "received by all clients together", lambda r: r.bytes_down, False, False),
        Metric("bytes", "both ways, all clients together", lambda r: r.bytes_up + r.bytes_down, False, False),
        Metric("rounds", "server to clients to server", lambda r: r.rounds, False, False),
    ]
}
WORDS = {
    "rmse": "root of the mean squared error", "mae": "mean absolute error", "r2": "R2",
    "map": "mean average precision", "micro_f1": "F1 over all labels together", "macro_f1": "F1, averaged over labels",
}  # fmt: skip
OVER = {
    "client_mean": "mean over clients of the final model's {} on the client's own test rows",
    "sample_mean": "the final models' {} over all test rows",
    "worst_decile": "mean of the worst tenth of the clients, final models, {} on the client's own test rows",
}


def _measure(name: str, over: str) -> Metric:
    """One of the measures of numbers or several labels."""
    key = f"{name}_{over}"
    percent, higher = name not in ("rmse", "mae"), name not in ("rmse", "mae")
    return Metric(key, OVER[over].format(WORDS[name]), lambda r: r.measures.get(key), higher, percent, measure=True)


METRICS |= {each.name: each for each in (_measure(name, over) for name in WORDS for over in OVER)}
OF_CLASSES = [name for name in METRICS if name.startswith(("accuracy", "balanced", "auroc", "recall"))]


def metrics_of(target: str) -> list[Metric]:
    """Those that records of this kind of target have."""
    own = {"regression": ("rmse", "mae", "r2"), "multilabel": ("map", "micro_f1", "macro_f1")}.get(target, ())
    return [
        metric
        for name, metric in METRICS.items()
        if (name.startswith(own) if metric.measure else target == "classification" or name not in OF_CLASSES)
    ]


@dataclass(frozen=True)
class Cell:
    """One method on one federation."""

    mean: float
    std: float | None  # over seeds, n - 1; None with one
    seeds: tuple[int, ...]
    place: int = 0  # 1 best, 2 second best, 0 neither
    published: float | None = None


@dataclass(frozen=True, eq=False)
class Results:
    """A sheet in numbers."""

    sheet: Sheet
    metric: Metric
    rows: Sequence[Row]  # best first
    cells: Mapping[tuple[Row, Column], Cell]
    ours: Row | None  # the method that the others are compared with
    differences: Mapping[tuple[Row, Column], Difference]  # ours minus the row's
    why_no_differences: str | None = None

    @property
    def columns(self) -> Sequence[Column]:
        return self.sheet.columns

    @property
    def has_published(self) -> bool:
        return any(cell.published is not None for cell in self.cells.values())

    @property
    def usual_seeds(self) -> tuple[int, ...]:
        """The seeds that most cells have."""
        return Counter(cell.seeds for cell in self.cells.values()).most_common(1)[0][0] if self.cells else ()

    @property
    def usual_compared(self) -> int:
        """The number of seeds that most differences have."""
        return Counter(each.n_seeds for each in self.differences.values()).most_common(1)[0][0]


def results(sheet: Sheet, metric: str | None = None, against: str | None = None) -> Results:
    """Numbers of a sheet; ``against`` is a row's label, or a method that has one row. ``metric``: see `METRICS`.

    By default it is the one that the records' kind of target is judged by first: accuracy_client_mean for classes.
    """
    first = sheet.headline if sheet.cells else HEADLINES["classification"]
    metric = first.metric if metric is None else metric
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    what = METRICS[metric]
    cells = {
        (row, column): cell for column in sheet.columns for row, cell in _column_cells(sheet, column, what).items()
    }
    ours, why = _ours(sheet, against)
    differences: dict[tuple[Row, Column], Difference] = {}
    if metric not in (first.metric, "accuracy_sample_mean"):
        why = why or f"no differences for {metric}: their intervals need its values of clients"
    elif ours is not None:
        for column in sheet.columns:
            differences |= _differences(sheet, ours, column, weighted=metric == "accuracy_sample_mean")
    return Results(sheet, what, _best_first(sheet, cells, what), cells, ours, differences, why)


def _column_cells(sheet: Sheet, column: Column, metric: Metric) -> dict[Row, Cell]:
    """The measured rows of one column, with their places and the paper's values."""
    measured = {row: cell for row, records in sheet.records(column).items() if (cell := _cell(records, metric))}
    places = _places({row: cell.mean for row, cell in measured.items() if row.competes}, metric)
    in_paper = metric.name == "accuracy_client_mean"
    return {
        row: replace(
            cell,
            place=places.get(row, 0),
            published=published(row, column, sheet.cells[row, column]) if in_paper else None,
        )
        for row, cell in measured.items()
    }


def _places(means: Mapping[Row, float], metric: Metric) -> dict[Row, int]:
    """1 for the best and 2 for the second best rows, ties included; none if nobody competes with a row."""
    levels = sorted({_rounded(mean) for mean in means.values()}, reverse=metric.higher_is_better)[:2]
    if len(means) < 2:
        return {}
    return {row: levels.index(_rounded(mean)) + 1 for row, mean in means.items() if _rounded(mean) in levels}


def _rounded(mean: float) -> float:
    return float(f"{mean:.10g}")  # equal accuracies that were added up in another order are equal


def _cell(records: Sequence[Record], metric: Metric) -> Cell | None:
    measured = [(record.seed, metric.of(record)) for record in records]
    known = [(seed, value) for seed, value in measured if value is not None]
    if not known:
        return None
    values = [value for _, value in known]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Cell(float(np.mean(values)), spread, tuple(seed for seed, _ in known))


def _best_first(sheet: Sheet, cells: Mapping[tuple[Row, Column], Cell], metric: Metric) -> list[Row]:
    """Rows in the order of the first column, then of the second where the first has none, and so on."""
    sign = -1 if metric.higher_is_better else 1

    def order(row: Row) -> list[float]:
        own = [cells.get((row, column)) for column in sheet.columns]
        return [float("inf") if cell is None else sign * cell.mean for cell in own]

    return sorted(sheet.rows, key=order)


def _ours(sheet: Sheet, against: str | None) -> tuple[Row | None, str | None]:
    """The row that the others are compared with, or why there is none: by label, then by method."""
    wanted = against or OURS
    by_label = {row.label: row for row in sheet.rows}
    of_method = [row for row in sheet.rows if row.method == wanted]
    default = next((row for row in of_method if row.defaults), None)
    if row := by_label.get(wanted, default):
        return row, None
    labels = [row.label for row in of_method]
    if against is not None:
        raise _refused(against, labels, by_label)
    if labels:
        return None, f"no differences: {wanted} is here with several settings; name one with --against '{labels[0]}'"
    return None, f"no differences: there is no record of {wanted}; name another method with --against"


def _refused(against: str, labels: Sequence[str], by_label: Mapping[str, Row]) -> InputError:
    if labels:
        return InputError(f"--against {against} given, which is here with several settings: {'; '.join(labels)}")
    return unknown("row", against, by_label)


def _differences(sheet: Sheet, ours: Row, column: Column, weighted: bool) -> dict[tuple[Row, Column], Difference]:
    """Ours minus every other row of one column, with Holm over them."""
    by_row = sheet.records(column)
    if ours not in by_row:
        return {}
    paired: dict[Row, Difference] = {}
    for row, theirs in by_row.items():
        if row is ours or not row.competes:
            continue
        same = column.partition == "given"
        pairs = _pairs(by_row[ours], theirs, weighted, same)
        if pairs:
            paired[row] = paired_difference(pairs, same_clients=same)
    adjusted = holm([each.p for each in paired.values()])
    return {(row, column): replace(each, p_holm=p) for (row, each), p in zip(paired.items(), adjusted, strict=True)}


def _pairs(ours: Sequence[Record], theirs: Sequence[Record], weighted: bool, same_clients: bool) -> list[Pairs]:
    """The seeds both have. The same seed deals out the same clients, which is checked."""
    by_seed = {record.seed: record for record in theirs}
    both = [(own, by_seed[own.seed]) for own in ours if own.seed in by_seed]
    pairs = [_client_pairs(own, other, weighted, same_clients) for own, other in both]
    return [each for each in pairs if each is not None]


def _client_pairs(own: Record, other: Record, weighted: bool, same_clients: bool) -> Pairs | None:
    """The accuracies of one seed, client by client; None with fewer than two clients to compare.

    A client without test rows is left out; where clients are the same in all seeds it keeps its place, without weight.
    """
    _refuse_other_clients(own, other)
    every = [
        (0.0, 0.0, 0.0) if a is None or b is None else (a, b, n if weighted else 1.0)
        for a, b, n in zip(own.client_scores, other.client_scores, own.n_test, strict=True)
    ]
    measured = [client for client in every if client[2]]
    if len(measured) < 2:
        return None
    taken = every if same_clients else measured
    return Pairs(*(np.array(values, dtype=float) for values in zip(*taken, strict=True)))


def _refuse_other_clients(own: Record, other: Record) -> None:
    if list(own.n_test) != list(other.n_test) or list(own.client_names) != list(other.client_names):
        raise InputError(
            f"{own.method} and {other.method} with seed {own.seed} on {own.data} have different clients, so they "
            "cannot be compared client by client: the rows were dealt out by different versions; run one again"
        )
