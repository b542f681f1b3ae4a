"""Embeddings in a table: CSV, Parquet.

A table has a label column and either one column of vectors (Parquet) or numbered columns (``f0``, ``f1``, ... or
``0``, ``1``, ...). Every other column of numbers or strings is kept, so options can name clients, groups and splits.
One table may hold several datasets: columns that are not the default are part of the dataset's ``sha256``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset, values_of
from apfl.data.missing import refuse_missing
from apfl.data.sources import Match, by_ending, existing
from apfl.data.sources.features import checked_features, coded_labels, file_sha256, plain_column
from apfl.errors import InputError, optional

DEFAULT_LABEL = "label"
READS = "a file .csv or .parquet"


def accepts(source: str) -> Match:
    """Any .csv or .parquet."""
    return by_ending(source, ".csv", ".parquet")


def load(source: str | Path, *, label_column: str | None = None, feature_column: str | None = None) -> Dataset:
    """A CSV or Parquet file. ``feature_column`` names the vectors, or the prefix of the numbered columns."""
    path = existing(source)
    table = _read_table(path)
    label = label_column or DEFAULT_LABEL
    if label not in table.column_names:
        raise InputError(
            f"{path} has no column '{label}' (it has: {_listed(table.column_names)}); "
            "name the labels with --label-column"
        )
    if not table.num_rows:
        raise InputError(f"{path} has no rows")
    labels, class_names = coded_labels(path, _labels(path, table, label))
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused as such
        vectors, used, asked = _features(path, table, label, feature_column)
    rest = [name for name in table.column_names if name not in {*used, label}]
    others = {name: plain_column(table.column(name).to_pylist()) for name in rest}
    return Dataset(
        name=path.name,
        features=checked_features(path, vectors),
        labels=torch.from_numpy(labels),
        class_names=class_names,
        columns={name: column for name, column in others.items() if column is not None},
        sha256=_identity(path, label, asked),
    )


def _read_table(path: Path) -> Any:
    arrow = optional("pyarrow", "tables")
    try:
        if path.suffix.lower() == ".csv":
            table = optional("pyarrow.csv", "tables").read_csv(path)
            _check_names(path, table.column_names)
            return table
        parquet = optional("pyarrow.parquet", "tables")
        _check_names(path, parquet.read_schema(path).names)
        return parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read as {path.suffix[1:]} ({error})") from error


def _check_names(path: Path, names: list[str]) -> None:
    twice = [repr(name) for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InputError(f"{path} has several columns of the name {_listed(twice)}; give each a name of its own")


def _identity(path: Path, label: str, features: str | None) -> str:
    """The hash of the file, with the columns that would not have been chosen anyway."""
    chosen = {} if label == DEFAULT_LABEL else {"label_column": label}
    chosen |= {} if features is None else {"feature_column": features}
    whole = file_sha256(path)
    return whole if not chosen else hashlib.sha256(json.dumps([whole, chosen]).encode()).hexdigest()


@dataclass(frozen=True)
class _Columns:
    """The columns of a table that could be its features."""

    vectors: list[str]  # columns of lists
    numbered: dict[str, list[tuple[int, str]]]  # what stands before the number -> number and column, in file order
    numeric: set[str]

    @property
    def candidates(self) -> list[str]:
        """What may be chosen without being asked for. A prefix without one column of numbers (site1, site2: names) is
        no vector."""
        prefixes = (p for p, pairs in self.numbered.items() if any(name in self.numeric for _, name in pairs))
        return [*self.vectors, *prefixes]

    @property
    def default(self) -> str | None:
        return self.candidates[0] if len(self.candidates) == 1 else None


def _features(path: Path, table: Any, label: str, given: str | None) -> tuple[np.ndarray, set[str], str | None]:
    """The vectors (n, l), the columns they came from, and what had to be asked for to get these."""
    columns = _columns(table, label)
    chosen = _chosen(path, columns, given)
    asked_for = None if chosen == columns.default else chosen
    if chosen in columns.vectors:
        return _stacked(path, table.column(chosen), chosen), {chosen}, asked_for
    names = [name for _, name in sorted(columns.numbered[chosen])]
    for name in names:
        if name not in columns.numeric:  # left out, it would be a feature silently lost
            raise _words(path, table.column(name), name, chosen)
    return np.stack([np.asarray(table.column(name), np.float32) for name in names], 1), set(names), asked_for


def _columns(table: Any, label: str) -> _Columns:
    types = optional("pyarrow.types", "tables")
    kinds = {name: table.schema.field(name).type for name in table.column_names if name != label}

    def of_kind(*tests: Callable[[Any], bool]) -> list[str]:
        return [name for name, kind in kinds.items() if any(test(kind) for test in tests)]

    vectors = of_kind(types.is_list, types.is_fixed_size_list)
    numbered: dict[str, list[tuple[int, str]]] = {}
    for name in kinds:
        if name not in vectors and (match := re.fullmatch(r"(.*?)(\d+)", name)):
            numbered.setdefault(match[1], []).append((int(match[2]), name))
    return _Columns(vectors, numbered, set(of_kind(types.is_integer, types.is_floating, types.is_decimal)))


def _chosen(path: Path, columns: _Columns, given: str | None) -> str:
    """The column of vectors, or the prefix of the numbered columns, to take."""
    chosen = columns.default if given is None else given
    if chosen is not None and (chosen in columns.vectors or chosen in columns.numbered):
        return chosen
    asked = "which columns are the features?" if chosen is None else f"features asked for in '{chosen}', but"
    prefixes = [f"{p}{columns.numbered[p][0][0]}..." for p in columns.candidates if p in columns.numbered]
    raise InputError(
        f"{path}: {asked} it has columns of vectors: {_listed(columns.vectors)}; numbered columns: "
        f"{_listed(prefixes)}; name one, or the part before its number, with --feature-column"
    )


def _words(path: Path, column: Any, name: str, prefix: str) -> InputError:
    """Where a column that should be of numbers is not: the first entry that is none, or the first of all."""
    rows = column.to_pylist()
    row = next((row for row, value in enumerate(rows) if not _is_number(value)), 0)
    shown = "nothing" if rows[row] is None else repr(rows[row])
    return InputError(
        f"{path}: column '{name}', row {row} holds {shown}, but the features '{prefix}...' must be numbers; "
        "correct it, rename the column if it is no feature, or choose others with --feature-column"
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _stacked(path: Path, column: Any, name: str) -> np.ndarray:
    rows = column.to_pylist()
    lengths = {None if row is None else len(row) for row in rows}
    if len(lengths) > 1 or None in lengths:
        raise InputError(f"{path}: the vectors in '{name}' have different lengths or are missing; all must be equal")
    try:
        return np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: the vectors in '{name}' do not hold numbers alone ({error})") from error


def _labels(path: Path, table: Any, name: str) -> np.ndarray:
    column = table.column(name)
    values = column.to_pylist()
    refuse_missing(values_of(name, str(path)), values)
    labels = plain_column(values)
    if labels is None or labels.dtype.kind == "f":
        raise InputError(f"{path}: labels in '{name}' are {column.type}; expected integers or strings")
    return labels


def _listed(names: list[str]) -> str:
    return "none" if not names else ", ".join(names[:12]) + (f", ... ({len(names)})" if len(names) > 12 else "")
