"""Texts in a table, for a sentence encoder: CSV, Parquet, JSON lines.

One column holds the texts, one the labels; every other column is kept, so that options can name clients and groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from apfl.data.columns import choose_features
from apfl.data.samples import Samples
from apfl.data.sources.features import file_sha256, plain_column
from apfl.data.tables import listed
from apfl.errors import InputError, optional, unknown

__all__ = ["text_of", "texts_of"]

DEFAULT_TEXT = "text"


def texts_of(
    path: Path, table: Any, text_column: str | None, label: str, labels: np.ndarray, class_names: tuple[str, ...]
) -> Samples | None:
    """The texts of a table and their labels; none if no column of it is for a sentence encoder."""
    text = _text_column(path, table, text_column, label)
    if text is None:
        return None
    column = table.column(text)
    rest = [name for name in table.column_names if name not in (text, label)]
    others = {name: plain_column(table.column(name).to_pylist()) for name in rest}
    return Samples(
        name=path.name,
        kind="texts",
        revision=file_sha256(path),
        labels=labels,
        class_names=class_names,
        fetch=lambda row: column[row].as_py(),
        decode=text_of,
        where=lambda row: f"{path}, row {row}",
        columns={name: values for name, values in others.items() if values is not None},
        settings={"text_column": text, "label_column": label},
    )


def text_of(stored: str | None) -> str:
    """The text itself; an empty one has no features."""
    if stored is None or not stored.strip():
        raise InputError("it has no text")
    return stored


def _text_column(path: Path, table: Any, given: str | None, label: str) -> str | None:
    """The column asked for, the one named text, or the only one of words in a table without numbers."""
    words = [name for name in _columns_of_words(table) if name != label]
    if given is not None:
        if given not in table.column_names:
            raise InputError(f"--text-column: {unknown(f'column in {path.name}', given, table.column_names)}")
        if given not in words:
            kind = "the labels" if given == label else table.schema.field(given).type
            raise InputError(f"--text-column {given} given, but it holds {kind}; columns of words: {listed(words)}")
        return given
    if DEFAULT_TEXT in words:
        return DEFAULT_TEXT
    if not words or _has_numbers(path, table, label):
        return None
    if len(words) > 1:
        raise InputError(f"{path}: which column holds the texts ({listed(words)})? name it with --text-column")
    return words[0]


def _columns_of_words(table: Any) -> list[str]:
    types = optional("pyarrow.types", "tables")
    kinds = {name: table.schema.field(name).type for name in table.column_names}
    return [name for name, kind in kinds.items() if types.is_string(kind) or types.is_large_string(kind)]


def _has_numbers(path: Path, table: Any, label: str) -> bool:
    try:
        choose_features(path, table, label)
    except InputError:
        return False
    return True
