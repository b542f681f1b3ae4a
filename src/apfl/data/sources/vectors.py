"""Features in a table, or texts: CSV, Parquet, JSON lines.

A table has a label column and columns of numbers, or one column of vectors (Parquet); `apfl.data.columns` says which of
them are the features. Every other column of numbers, strings or dates is kept, so options can name clients, groups and
splits. One table may hold several datasets: columns that are not the default are part of the dataset's ``sha256``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.columns import Chosen, choose_features, is_number, words_error
from apfl.data.federation import Dataset, values_of
from apfl.data.missing import refuse_missing, rows_in_words
from apfl.data.raw import AUTO, Raw, encoding_of
from apfl.data.samples import Samples
from apfl.data.sources import Match, by_ending, existing
from apfl.data.sources._texts import texts_of
from apfl.data.sources.features import (
    checked_features,
    file_sha256,
    labels_of,
    plain_column,
    whole_labels,
    with_targets,
)
from apfl.data.tables import ENDINGS, listed, read_table
from apfl.data.targets import Targets, read_targets
from apfl.errors import InputError, optional, unknown
from apfl.maths.encoding import Encoding

DEFAULT_LABEL = "label"
READS = "a file .csv, .tsv, .jsonl (or one of these with .gz) or .parquet"


def accepts(source: str) -> Match:
    """Any file with the ending of a table."""
    return by_ending(source, *ENDINGS)


def load(
    source: str | Path,
    *,
    label_column: str | None = None,
    feature_column: str | None = None,
    features: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    text_column: str | None = None,
    encode: str | Encoding | None = None,
    categories: str | Sequence[str] | None = None,
    target: str | None = None,
    labels_optional: bool = False,
    for_backbone: bool = False,
) -> Dataset | Samples:
    """A CSV, Parquet or JSONL file. ``feature_column`` names the vectors, or the prefix of the numbered columns;
    ``features`` and ``drop`` name columns of numbers, ``text_column`` that of texts. ``encode`` takes columns of any
    kind, of which those in ``categories`` hold names. ``for_backbone``: if there are texts, they are meant."""
    path = existing(source)
    table = read_table(path)
    label, *others = _label_columns(path, table, label_column)
    _check_table(path, table, label, needs_labels=label_column is not None or not labels_optional)
    targets = targets_in(path, table, [label, *others], target) if label in table.column_names else None
    table = table.drop_columns(others) if others else table
    labels, class_names = _classes(path, table, label, targets)
    if for_backbone or text_column is not None:
        texts = texts_of(path, table, text_column, label, labels, class_names)
        if texts is not None:
            return texts
    if categories is not None and encode != AUTO:
        raise InputError("--categories given without --encode auto; an encoding from a file knows its columns")
    agreed = None if encode is None else encoding_of(encode)
    chosen = choose_features(path, table, label, feature_column, features, drop, encode if agreed is None else agreed)
    if chosen.raw:
        raw = Raw({name: table.column(name).to_pylist() for name in chosen.numbers}, _named(categories))
        made = _to_encode(path, table, label, chosen, raw, agreed, labels, class_names)
    else:
        made = Dataset(
            name=path.name,
            features=checked_features(path, values_in(path, table, chosen)),
            labels=torch.from_numpy(labels),
            class_names=class_names,
            columns=_other_columns(table, chosen, label),
            sha256=_identity(path, label, chosen.asked),
            feature_names=chosen.numbers,
        )
    return made if targets is None else with_targets(made, targets)


def _check_table(path: Path, table: Any, label: str, *, needs_labels: bool) -> None:
    """Refuse a table without the labels that it needs, or without rows."""
    if needs_labels and label not in table.column_names:
        raise InputError(
            f"{path} has no column '{label}' (it has: {listed(table.column_names)}); "
            "name the labels with --label-column"
        )
    if not table.num_rows:
        raise InputError(f"{path} has no rows")


def _label_columns(path: Path, table: Any, given: str | None) -> list[str]:
    """The columns to predict: one, or several that commas separate; a name may have a comma itself."""
    if given is None or given in table.column_names or "," not in given:
        return [given or DEFAULT_LABEL]
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in table.column_names:
            raise InputError(
                f"{path} has no column '{name}' (it has: {listed(table.column_names)}); name the columns to predict "
                "with --label-column A,B"
            )
    return list(dict.fromkeys(names))


def _classes(path: Path, table: Any, label: str, targets: Targets | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels and their names; of a table that has none, or targets in their place, those of rows without."""
    has_classes = label in table.column_names and targets is None
    return labels_of(path, {"labels": labels_in(path, table, label)} if has_classes else {}, table.num_rows)


def targets_in(path: Path, table: Any, names: Sequence[str], asked: str | None) -> Targets | None:
    """Numbers or several labels of a table, or None if its label column holds classes."""
    for name in names:
        refuse_missing(values_of(name, str(path)), table.column(name).to_pylist())
    columns = [plain_column(table.column(name).to_pylist()) for name in names]
    if any(column is None for column in columns) and (asked or len(names) > 1):
        raise InputError(f"{path}: columns to predict ({listed(list(names))}) must hold numbers")
    values = [column for column in columns if column is not None]
    return read_targets(str(path), np.stack(values, 1), asked, names) if values else None


def _named(categories: str | Sequence[str] | None) -> tuple[str, ...]:
    names = categories.split(",") if isinstance(categories, str) else categories or ()
    return tuple(name.strip() for name in names if name.strip())


def _to_encode(
    path: Path,
    table: Any,
    label: str,
    chosen: Chosen,
    raw: Raw,
    agreed: Encoding | None,
    labels: np.ndarray,
    class_names: tuple[str, ...],
) -> Dataset:
    """A dataset whose columns are encoded as agreed, or later, from the sums of training rows."""
    for name in raw.categories:
        if name not in raw.columns:
            raise unknown(f"column to take as categories in {path.name}", name, raw.columns)
    asked = chosen.asked | {"categories": list(raw.categories)}
    made = Dataset(
        path.name, torch.zeros(len(labels), len(chosen.numbers)), torch.from_numpy(labels), class_names,
        _other_columns(table, chosen, label), _identity(path, label, asked),
        feature_names=chosen.numbers, raw=raw,
    )  # fmt: skip
    if agreed is None:
        return made
    features = checked_features(path, agreed.transform(raw.columns).astype(np.float32))
    return replace(made, features=features, feature_names=tuple(agreed.feature_names), raw=None, encoding=agreed)


def _identity(path: Path, label: str, asked: dict[str, Any]) -> str:
    """The hash of the file, with the columns that would not have been chosen anyway."""
    chosen = {} if label == DEFAULT_LABEL else {"label_column": label}
    whole = file_sha256(path)
    chosen |= asked
    return whole if not chosen else hashlib.sha256(json.dumps([whole, chosen]).encode()).hexdigest()


def _other_columns(table: Any, chosen: Chosen, label: str) -> dict[str, np.ndarray]:
    """What options can name; a column of numbers among the features may still turn out to name the clients."""
    aside = {label, chosen.vector, *(chosen.numbers if chosen.embedding else ())}
    others = {name: plain_column(table.column(name).to_pylist()) for name in table.column_names if name not in aside}
    return {name: column for name, column in others.items() if column is not None}


def values_in(path: Path, table: Any, chosen: Chosen) -> np.ndarray:
    """The features (n, l), float32: what is too large for that becomes infinite, and is refused as such."""
    with np.errstate(over="ignore"):
        if chosen.vector is not None:
            return _stacked(path, table.column(chosen.vector), chosen.vector)
        _refuse_lost_numbers(path, table, chosen.unchosen)
        for name in chosen.numbers:
            if not _is_numeric(table.column(name).type):  # left out, it would be a feature silently lost
                raise words_error(path, table.column(name), name)
        values = np.stack([np.asarray(table.column(name), np.float32) for name in chosen.numbers], 1)
    _refuse_gaps(path, chosen.numbers, values)
    return values


def _is_numeric(kind: Any) -> bool:
    types = optional("pyarrow.types", "tables")
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _refuse_lost_numbers(path: Path, table: Any, unchosen: Sequence[str]) -> None:
    """A column of strings that are mostly numbers (one '?' or 'n.a.' makes it so) is a feature with an odd entry."""
    types = optional("pyarrow.types", "tables")
    for name in unchosen:
        words = types.is_string(table.column(name).type)
        entries = [entry for entry in table.column(name).to_pylist() if entry] if words else []
        if 2 * sum(map(is_number, entries)) > len(entries):
            raise words_error(path, table.column(name), name)


def _refuse_gaps(path: Path, names: Sequence[str], values: np.ndarray) -> None:
    gaps = np.isnan(values)
    if gaps.any():
        rows = np.flatnonzero(gaps.any(1))
        where = [f"{name} ({int(n)})" for name, n in zip(names, gaps.sum(0), strict=True) if n]
        raise InputError(
            f"{path}: {len(rows)} of {len(values)} rows have missing values (empty or NaN) in columns of numbers: "
            f"{listed(where)} ({rows_in_words(rows)}); remove these rows, or fill them in (a feature with its "
            "column's median, say; never a client or a group), or give --encode auto, or leave features out with --drop"
        )


def _stacked(path: Path, column: Any, name: str) -> np.ndarray:
    flat = column.combine_chunks().flatten()  # of all rows; without a missing one, row after row
    whole = len(flat) and not column.null_count and not flat.null_count and _is_numeric(flat.type)
    if whole and len(optional("pyarrow.compute", "tables").list_value_length(column).unique()) == 1:
        return np.asarray(flat.to_numpy(zero_copy_only=False), np.float32).reshape(len(column), -1)
    rows = column.to_pylist()
    lengths = {None if row is None else len(row) for row in rows}
    if len(lengths) > 1 or None in lengths:
        raise InputError(f"{path}: the vectors in '{name}' have different lengths or are missing; all must be equal")
    try:
        return np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: the vectors in '{name}' do not hold numbers alone ({error})") from error


def labels_in(path: Path, table: Any, name: str) -> np.ndarray:
    """The labels of a table: integers or strings, none of them missing."""
    column = table.column(name)
    values = column.to_pylist()
    refuse_missing(values_of(name, str(path)), values)
    labels = plain_column(values)
    if labels is None or optional("pyarrow.types", "tables").is_temporal(column.type):
        raise InputError(f"{path}: labels in '{name}' are {column.type}; expected integers or strings")
    return whole_labels(f"{path}: labels in '{name}'", labels)
