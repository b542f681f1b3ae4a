"""In the terminal: records as one table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from apfl.errors import printable
from apfl.experiments.record import Record
from apfl.report.caveats import in_words, rarest_recall, unmeasured
from apfl.report.units import human_bytes

__all__ = ["HEADS", "heads_of", "results_caption", "results_lines", "results_table", "results_title"]

HEADS = ("acc.", "bal.", "rare", "±seeds", "worst", "rounds", "up", "down", "sec.")
OF_TARGETS: Mapping[str, Mapping[str, str]] = {  # the columns of other targets, by what they are called
    "regression": {"RMSE": "rmse_client_mean", "R2": "r2_client_mean", "MAE": "mae_client_mean"},
    "multilabel": {"mAP": "map_client_mean", "micro": "micro_f1_client_mean", "macro": "macro_f1_client_mean"},
}
SAID = {
    "regression": "RMSE, R2 (in %), MAE: means over clients, each of the final model on the client's own test rows",
    "multilabel": "mAP, micro, macro: means over clients of the mean average precision and of F1 of the final model on "
    "the client's own test rows, in %",
}


def heads_of(records: Sequence[Record]) -> tuple[str, ...]:
    """The headings of these records' table."""
    own = OF_TARGETS.get(records[0].target)
    return HEADS if own is None else (*own, *HEADS[HEADS.index("±seeds") :])


def results_table(records: Sequence[Record]) -> Table:
    """One line for each method: means over seeds, and their spread."""
    table = Table(
        title=results_title(records),
        caption=escape(results_caption(records)),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for heading in heads_of(records):
        table.add_column(heading, justify="right", no_wrap=True)
    by_method = _by_method(records)
    sign = records[0].headline.sign
    means = {method: sign * np.mean([r.score for r in own]) for method, own in by_method.items()}
    for (method, _), (name, accuracy, *others) in zip(by_method.items(), results_lines(records), strict=True):
        best = means[method] == max(means.values())
        table.add_row(*([f"[bold]{name}[/bold]", f"[bold]{accuracy}[/bold]"] if best else [name, accuracy]), *others)
    return table


def results_caption(records: Sequence[Record]) -> str:
    """What the columns are, and which clients are missing from their means."""
    rarest = in_words(records)
    if told := SAID.get(records[0].target):
        missing = unmeasured(records)
        shared = "worst: mean of the worst tenth of the clients; up, down: bytes of all clients together"
        return f"{told}; {shared}" + (f". {printable(missing)}" if missing else "")
    parts = [
        "acc.: mean over clients of the final model's accuracy on the client's own test rows, in %",
        "bal.: the same of its recall, averaged over the client's classes",
        f"rare: recall of the rarest class{f' ({printable(rarest, 100)})' if rarest else ''}",
        "worst: mean of the worst tenth of the clients",
        "up, down: bytes of all clients together",
    ]
    missing = unmeasured(records)
    return "; ".join(parts) + (f". {printable(missing)}" if missing else "")


def results_lines(records: Sequence[Record]) -> list[list[str]]:
    """For each method its name and what `HEADS` names."""
    return [_line(method, own) for method, own in _by_method(records).items()]


def _by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record.method, []).append(record)
    return by_method


def results_title(records: Sequence[Record]) -> str:
    """Data, clients and seeds in a line."""
    first, seeds = records[0], sorted({record.seed for record in records})
    alpha = "" if first.alpha is None else f", alpha {first.alpha:g}"
    return f"{first.data}: {first.n_clients} clients, {first.partition}{alpha}, seeds {', '.join(map(str, seeds))}"


def _line(method: str, records: Sequence[Record]) -> list[str]:
    per_seed, first = [record.score for record in records], records[0].headline
    return [
        method,
        *_measured(records),
        first.write(float(np.std(per_seed, ddof=1))) if len(records) > 1 else "–",
        _worst(records),
        str(records[-1].rounds),
        _three_digits(human_bytes(np.mean([record.bytes_up for record in records]))),
        _three_digits(human_bytes(np.mean([record.bytes_down for record in records]))),
        f"{np.mean([record.seconds for record in records]):.2f}",
    ]


def _measured(records: Sequence[Record]) -> list[str]:
    """The first columns."""
    own = OF_TARGETS.get(records[0].target)
    if own is None:
        return [
            _percent([record.score for record in records]),
            _percent([each for record in records if (each := record.balanced_accuracy_client_mean) is not None]),
            _percent([recall for record in records if (recall := rarest_recall(record)) is not None]),
        ]
    return [
        _written(metric, [value for record in records if (value := record.measures.get(metric)) is not None])
        for metric in own.values()
    ]


def _worst(records: Sequence[Record]) -> str:
    if records[0].target == "classification":
        return _percent([each for record in records if (each := record.accuracy_worst_decile) is not None])
    metric = f"{records[0].headline.key}_worst_decile"
    return _written(metric, [value for record in records if (value := record.measures.get(metric)) is not None])


def _written(metric: str, values: Sequence[float]) -> str:
    if not metric.startswith(("rmse", "mae")):
        return _percent(values)
    return f"{np.mean(values):.4g}" if values else "–"


def _percent(fractions: Sequence[float]) -> str:
    return f"{100 * np.mean(fractions):.1f}".replace("100.0", "100") if fractions else "–"


def _three_digits(size: str) -> str:
    """Room in a narrow table.

    >>> _three_digits("216.1 kB"), _three_digits("51.2 kB")
    ('216 kB', '51.2 kB')
    """
    return re.sub(r"^(\d{3})\.\d", r"\1", size)
