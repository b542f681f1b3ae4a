"""What a mean accuracy hides: a rare class that nobody finds, and clients that were not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from apfl.experiments.record import Record
from apfl.maths.bounds import widest

__all__ = ["in_words", "rarest_class", "rarest_recall", "too_wide", "unmeasured"]

NAMES_SHOWN = 6


def rarest_class(record: Record) -> int | None:
    """The class with fewest training rows, of those with test rows; None in records that have no counts."""
    counts = np.array(record.class_counts, dtype=float)
    if counts.ndim != 2 or counts.shape[1] != len(record.recall_per_class):
        return None
    tested = np.array([recall is not None for recall in record.recall_per_class])
    return int(np.where(tested, counts.sum(0), np.inf).argmin()) if tested.any() else None


def rarest_recall(record: Record) -> float | None:
    """The recall of `rarest_class`, over all clients' test rows of it."""
    rarest = rarest_class(record)
    return None if rarest is None else record.recall_per_class[rarest]


def in_words(records: Sequence[Record]) -> str:
    """The rarest class and its share of the training rows, for the caption of a table; empty if it is not known.

    Seeds may differ in it.
    """
    shares: dict[str, float] = {}
    for record in records:
        if (rarest := rarest_class(record)) is not None:
            totals = np.array(record.class_counts, dtype=float).sum(0)
            name = str(record.class_names[rarest]) if record.class_names else str(rarest)
            shares[name] = min(shares.get(name, 1.0), totals[rarest] / totals.sum())
    names = " or ".join(list(shares)[:NAMES_SHOWN])
    return f"{names}, {100 * min(shares.values()):.2g} % of the training rows" if shares else ""


def unmeasured(records: Iterable[Record]) -> str:
    """Which clients have no test rows and are missing from every mean; empty if there are none."""
    by_seed: dict[int, list[str]] = {}
    for record in records:
        # A client whose rows have none of several labels has no precision, but it has test rows.
        values = record.client_accuracies if record.target == "classification" else [n or None for n in record.n_test]
        pairs = zip(record.client_names, values, strict=False)
        by_seed.setdefault(record.seed, []).extend(name for name, value in pairs if value is None)
    named = {seed: list(dict.fromkeys(names)) for seed, names in by_seed.items()}
    if not any(named.values()):
        return ""
    different = len({tuple(names) for names in named.values()}) > 1
    parts = [f"{f'seed {seed}: ' if different else ''}{_listed(names)}" for seed, names in named.items() if names]
    return f"No test rows, so missing from every mean: {'; '.join(dict.fromkeys(parts))}."


def too_wide(records: Iterable[Record]) -> str:
    """That `apfl` used a wider map than masked sums between machines admit, in one line; empty if it did not."""
    for record in records:
        n, width = sum(record.n_train), record.chosen.get("d_primary", record.settings.get("d_primary"))
        if record.method == "apfl" and isinstance(width, int) and width > widest(n):
            return (
                f"apfl used {width} columns for {n} rows; between machines with masked sums at most {widest(n)} are "
                "admitted (a quarter of the rows)"
            )
    return ""


def _listed(names: Sequence[str]) -> str:
    kind, more = "client" if len(names) == 1 else "clients", len(names) - NAMES_SHOWN
    return f"{kind} {', '.join(names[:NAMES_SHOWN])}" + (f" and {more} more" if more > 0 else "")
