"""Rows of a file that may be larger than memory, some at a time: Parquet, CSV, .npz and .npy.

What a file holds is read as everywhere else (`apfl.data.sources`): the same columns, names of classes and checks. How
many rows come at a time depends on the caller alone, not on how the file is laid out.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from apfl.data.columns import Chosen, choose_features
from apfl.data.sources import existing
from apfl.data.sources.arrays import npy_header
from apfl.data.sources.features import array_names, checked_features, coded_labels
from apfl.data.sources.npy import labels_beside, no_labels, read_npy
from apfl.data.sources.vectors import DEFAULT_LABEL, labels_in, values_in
from apfl.data.tables import csv_reader, listed
from apfl.errors import InputError, optional

__all__ = ["ENDINGS", "Batch", "RowFile", "open_rows"]

CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ENDINGS = (".parquet", ".npz", ".npy", *CSV)
LABELS_AT_A_TIME = 2**18


class Batch(NamedTuple):
    """Some rows in the order of the file."""

    features: Tensor  # (n, l), float32
    codes: np.ndarray  # (n,), int64: places in `names`
    names: tuple[str, ...]


Chunk = tuple[np.ndarray | None, np.ndarray]  # features (n, l) unless not asked for, and labels (n,)


class _File(Protocol):
    """One kind of file: chunks of at most so many rows, with or without the features."""

    def chunks(self, size: int, features: bool) -> Iterator[Chunk]: ...


@dataclass(frozen=True, eq=False)
class RowFile:
    """A file of rows; each iteration reads it anew."""

    path: Path
    file: _File
    scale: np.ndarray | None = None  # (l,), of an .npz
    class_names: np.ndarray | None = None  # (c,), of an .npz: what its labels stand for

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows, ``size`` at a time; fewer only at the end."""
        at = 0
        for features, labels in _in_batches(self.file.chunks(size, True), size):
            where = _where(self.path, at)
            codes, names = coded_labels(where, labels, self.class_names)
            yield Batch(checked_features(where, features, self.scale), codes, names)
            at += len(labels)
        if not at:
            raise InputError(f"{self.path} has no rows")

    def labels(self) -> Iterator[tuple[np.ndarray, tuple[str, ...]]]:
        """Codes and what they stand for, without a look at the features."""
        at = 0
        for _, labels in self.file.chunks(LABELS_AT_A_TIME, False):
            yield coded_labels(_where(self.path, at), labels, self.class_names)
            at += len(labels)


def open_rows(
    path: str | Path,
    *,
    label_column: str | None = None,
    feature_column: str | None = None,
    features: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
) -> RowFile:
    """The file, to be read some rows at a time. The options are those of a table."""
    path = existing(path)
    ending = next((each for each in ENDINGS if path.name.lower().endswith(each)), None)
    if ending is None:
        raise InputError(f"{path} given; rows are read some at a time from {', '.join(ENDINGS)}")
    given = [label_column, feature_column, features, drop]
    if ending in (".npz", ".npy") and any(each is not None for each in given):
        raise InputError(f"{path} has no columns to be named; leave the options of tables out")
    if ending == ".npz":
        return _open_npz(path)
    if ending == ".npy":
        return RowFile(path, _Npy(path))
    label = label_column or DEFAULT_LABEL

    def choose(empty: Any) -> Chosen:
        if label not in empty.column_names:
            have = listed(empty.column_names)
            raise InputError(f"{path} has no column '{label}' (it has: {have}); name the labels with --label-column")
        return replace(choose_features(path, empty, label, feature_column, features, drop), unchosen=())

    return RowFile(path, (_Parquet if ending == ".parquet" else _Csv)(path, label, choose))


def _where(path: Path, at: int) -> Path:
    """What a message calls rows that are counted from here."""
    return path if not at else Path(f"{path}, from row {at} on")


def _in_batches(chunks: Iterator[Chunk], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of any lengths as batches of ``size`` rows."""
    waiting: list[Chunk] = []
    n = 0
    for chunk in chunks:
        waiting.append(chunk)
        n += len(chunk[1])
        while n >= size:
            features, labels = _joined(waiting)
            yield features[:size], labels[:size]
            waiting, n = [(features[size:], labels[size:])], n - size
    if n:
        yield _joined(waiting)


def _joined(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    features = [each for each, _ in chunks if each is not None]
    if len(chunks) == 1:
        return features[0], chunks[0][1]
    return np.concatenate(features), np.concatenate([labels for _, labels in chunks])


# ------------------------------------------------------------------------------------------------------- tables


def _of_tables(
    path: Path, tables: Iterator[Any], label: str, chosen: Chosen | None
) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
    at = 0
    for table in tables:
        if table.num_rows:
            where = _where(path, at)
            yield None if chosen is None else values_in(where, table, chosen), _labels(where, table, label)
            at += table.num_rows


def _labels(path: Path, table: Any, name: str) -> np.ndarray:
    """Integers as they are, without a Python object for each; all else is looked at one by one."""
    column = table.column(name)
    if optional("pyarrow.types", "tables").is_integer(column.type) and not column.null_count:
        return np.asarray(column.to_numpy())
    return labels_in(path, table, name)


class _Parquet:
    """A Parquet file; its row groups are read one after the other, and only the columns that are needed."""

    def __init__(self, path: Path, label: str, choose: Callable[[Any], Chosen]) -> None:
        self.path, self.label = path, label
        with self._reading() as file:
            self.chosen = choose(file.schema_arrow.empty_table())

    def chunks(self, size: int, features: bool) -> Iterator[Chunk]:
        columns = [self.label, *_columns(self.chosen)] if features else [self.label]
        yield from _of_tables(self.path, self._tables(size, columns), self.label, self.chosen if features else None)

    def _tables(self, size: int, columns: list[str]) -> Iterator[Any]:
        arrow = optional("pyarrow", "tables")
        with self._reading() as file:
            try:
                for batch in file.iter_batches(batch_size=size, columns=columns):
                    yield arrow.Table.from_batches([batch])
            except (OSError, arrow.ArrowException) as error:
                raise InputError(f"{self.path} cannot be read as parquet ({error})") from error

    def _reading(self) -> Any:
        arrow = optional("pyarrow", "tables")
        try:
            # Piece by piece: otherwise all columns of a row group are in memory at once, with all their rows.
            return optional("pyarrow.parquet", "tables").ParquetFile(self.path, buffer_size=2**16, pre_buffer=False)
        except (OSError, arrow.ArrowException) as error:
            raise InputError(f"{self.path} cannot be read as parquet ({error})") from error


class _Csv:
    """A CSV; the first rows say which columns are numbers, and all others must agree."""

    def __init__(self, path: Path, label: str, choose: Callable[[Any], Chosen]) -> None:
        self.path, self.label = path, label
        self.open = csv_reader(path)
        with self.open(None, ()) as reader:
            self.chosen = choose(reader.schema.empty_table())

    def chunks(self, size: int, features: bool) -> Iterator[Chunk]:
        numbers = self.chosen.numbers if features else ()
        yield from _of_tables(
            self.path, self._tables([self.label, *numbers], numbers), self.label, self.chosen if features else None
        )

    def _tables(self, columns: list[str], numbers: Sequence[str]) -> Iterator[Any]:
        arrow = optional("pyarrow", "tables")
        try:
            with self.open(columns, numbers) as reader:
                for batch in reader:
                    yield arrow.Table.from_batches([batch])
        except (OSError, arrow.ArrowException) as error:
            raise InputError(f"{self.path} cannot be read as CSV ({error})") from error


def _columns(chosen: Chosen) -> list[str]:
    return list(chosen.numbers) if chosen.vector is None else [chosen.vector]


# ------------------------------------------------------------------------------------------------------- arrays


class _Npy:
    """``NAME.npy`` with its labels beside it; both are mapped, not read."""

    def __init__(self, path: Path) -> None:
        labels = labels_beside(path)
        if labels is None:
            raise no_labels(path)
        self.features, self.labels = read_npy(path), read_npy(labels)
        _check_lengths(path, len(self.features), len(self.labels))

    def chunks(self, size: int, features: bool) -> Iterator[Chunk]:
        for start in range(0, len(self.labels), size):
            rows = slice(start, start + size)
            yield np.array(self.features[rows]) if features else None, np.array(self.labels[rows])


class _Npz:
    """The arrays ``features`` and ``labels`` of an .npz, unpacked no further than they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def chunks(self, size: int, features: bool) -> Iterator[Chunk]:
        labels = _members(self.path, "labels", size)
        if not features:
            yield from ((None, each) for each in labels)
            return
        yield from zip(_members(self.path, "features", size), labels, strict=True)


def _open_npz(path: Path) -> RowFile:
    have = array_names(path)
    for name in ("features", "labels"):
        if name not in have:
            raise InputError(f"{path} has no array '{name}' (it has: {', '.join(sorted(have))})")
    shapes = [next(_members(path, name, 0)) for name in ("features", "labels")]
    _check_lengths(path, int(shapes[0][0]), int(shapes[1][0]))
    with np.load(path, allow_pickle=False) as file:
        small = {name: file[name] for name in ("scale", "class_names") if name in have}
    return RowFile(path, _Npz(path), small.get("scale"), small.get("class_names"))


def _members(path: Path, name: str, size: int) -> Iterator[np.ndarray]:
    """The rows of one array, ``size`` at a time; with 0, its shape."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
            shape, fortran, dtype = npy_header(stream)
            if not size:
                yield np.array(shape if shape else (0,))
                return
            if fortran and len(shape) > 1:
                raise InputError(f"{path}: '{name}' is stored column by column; save it with numpy.ascontiguousarray")
            each = int(np.prod(shape[1:])) * dtype.itemsize
            for start in range(0, shape[0], size):
                n = min(size, shape[0] - start)
                data = stream.read(n * each)
                if len(data) < n * each:
                    raise ValueError(f"'{name}' ends after {start} of {shape[0]} rows")
                yield np.frombuffer(data, dtype).reshape(n, *shape[1:])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as .npz ({error}): truncated, or not from numpy.savez") from error


def _check_lengths(path: Path, n: int, n_labels: int) -> None:
    if n != n_labels:
        raise InputError(f"{path} has {n} features but {n_labels} labels; there must be one for each")
