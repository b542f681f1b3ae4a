"""Which columns of a table are its features.

By default one column of vectors, or the numbered columns (``f0``, ``f1``, ...) if they are more than half of all
columns of numbers, or else every column of numbers but the label and identifiers (``id``, ``patient_id``, ``index``).
A column that names clients, groups or test rows is no feature either; `apfl.data.protocol` takes it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from apfl.data.raw import digest
from apfl.data.tables import listed
from apfl.errors import InputError, optional, unknown
from apfl.maths.encoding import Encoding

__all__ = ["Chosen", "choose_features", "is_identifier", "is_number", "words_error"]

IDENTIFIER = re.compile(r"(?i:id|index|unnamed: 0|)|.*([_ .-](?i:id)|[a-z]I[dD])")


@dataclass(frozen=True)
class Chosen:
    """The features of a table: one column of vectors, or columns of numbers in this order."""

    vector: str | None
    numbers: tuple[str, ...] = ()
    embedding: bool = False  # the columns are numbered alike: none of them is a client or a group
    asked: dict[str, Any] = field(default_factory=dict)  # what had to be asked for, as part of the data's identity
    raw: bool = False  # the columns are encoded, whatever they hold
    unchosen: tuple[str, ...] = ()  # columns that the default leaves out and that nobody has dropped


@dataclass(frozen=True)
class _Columns:
    """The columns of a table that could be its features."""

    all: list[str]  # but the label
    vectors: list[str]  # columns of lists
    numbered: dict[str, list[tuple[int, str]]]  # what stands before the number -> number and column, in file order
    numeric: list[str]

    def of_prefix(self, prefix: str) -> tuple[str, ...]:
        return tuple(name for _, name in sorted(self.numbered[prefix]))

    @property
    def embedding(self) -> str | None:
        """The column of vectors, or the prefix of the numbered columns, to take without being asked. A prefix without
        one column of numbers (site1, site2: names) is no vector, and a few numbered columns of many are no embedding.
        """
        if self.vectors:
            return self.vectors[0] if len(self.vectors) == 1 else None
        for prefix, pairs in self.numbered.items():
            own = sum(name in self.numeric for _, name in pairs)
            if own and len(pairs) > 1 and 2 * own > len(self.numeric):
                return prefix
        return None

    @property
    def plain(self) -> tuple[str, ...]:
        return tuple(name for name in self.numeric if not is_identifier(name))


def is_identifier(name: str) -> bool:
    """Whether a column's name says that it numbers the rows, patients or orders.

    >>> [is_identifier(name) for name in ("id", "patient_id", "PassengerId", "", "humid", "acid")]
    [True, True, True, True, False, False]
    """
    return IDENTIFIER.fullmatch(name) is not None


def choose_features(
    path: Path,
    table: Any,
    label: str | None,
    feature_column: str | None = None,
    features: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    encode: str | Encoding | None = None,
) -> Chosen:
    """The features that were asked for, or the default; with ``encode`` columns of any kind."""
    if feature_column is not None and features is not None:
        raise InputError("--feature-column and --features given; name the features with one of them")
    columns = _columns(table, label)
    if encode is not None:
        return _to_encode(path, columns, feature_column, features, drop, encode)
    default = _default(columns)
    chosen = _named(path, columns, feature_column, features) or default
    dropped = [] if drop is None else _matching(path, columns, "--drop", drop)
    chosen = replace(chosen, numbers=tuple(name for name in chosen.numbers if name not in dropped))
    if chosen.vector is None and not chosen.numbers:
        raise _no_features(path, columns)
    by_default = feature_column is features is None and chosen.vector is None and not chosen.embedding
    used = {*chosen.numbers, *dropped}
    rest = tuple(name for name in columns.all if name not in used) if by_default else ()
    return replace(chosen, asked=_asked(chosen, default, feature_column), unchosen=rest)


def _to_encode(
    path: Path,
    columns: _Columns,
    feature_column: str | None,
    features: str | Sequence[str] | None,
    drop: str | Sequence[str] | None,
    encode: str | Encoding,
) -> Chosen:
    """The columns that are named; or those of the encoding; or all but vectors and identifiers."""
    if feature_column is not None:
        raise InputError("--feature-column and --encode given; vectors are features as they are: give one of them")
    dropped = [] if drop is None else _matching(path, columns, "--drop", drop)
    if isinstance(encode, Encoding):
        return _as_agreed(path, columns, encode, named=features is not None or bool(dropped))
    if features is not None:
        chosen = _matching(path, columns, "--features", features)
    else:
        chosen = [name for name in columns.all if name not in columns.vectors and not is_identifier(name)]
    chosen = [name for name in chosen if name not in dropped]
    if not chosen:
        raise _no_features(path, columns)
    return Chosen(None, tuple(chosen), raw=True, asked={"encode": encode, "features": chosen})


def _as_agreed(path: Path, columns: _Columns, agreed: Encoding, named: bool) -> Chosen:
    """The columns of an encoding; ``named``: options name columns too, which it does not allow."""
    absent = [name for name in agreed.names if name not in columns.all]
    if absent or named:
        why = f"{path} has no column '{absent[0]}'" if absent else "--features or --drop given"
        raise InputError(f"{why}, but the encoding says which columns it reads: {listed(agreed.names)}")
    return Chosen(None, tuple(agreed.names), raw=True, asked={"encode": digest(agreed)})


def _named(
    path: Path, columns: _Columns, feature_column: str | None, features: str | Sequence[str] | None
) -> Chosen | None:
    """The features that --features or --feature-column name, if either is given."""
    if features is not None:
        return Chosen(None, tuple(_matching(path, columns, "--features", features)))
    return None if feature_column is None else _embedding(path, columns, feature_column)


def _default(columns: _Columns) -> Chosen:
    if columns.embedding is not None:
        name = columns.embedding
        return Chosen(name) if name in columns.vectors else Chosen(None, columns.of_prefix(name), embedding=True)
    return Chosen(None, () if columns.vectors else columns.plain)


def _embedding(path: Path, columns: _Columns, given: str) -> Chosen:
    """The column of vectors, or the columns of the prefix, that --feature-column names."""
    if given in columns.vectors:
        return Chosen(given)
    if given in columns.numbered:
        return Chosen(None, columns.of_prefix(given), embedding=True)
    if given in columns.numeric:
        return Chosen(None, (given,))
    prefixes = [f"{prefix}{pairs[0][0]}..." for prefix, pairs in columns.numbered.items()]
    raise InputError(
        f"{path}: features asked for in '{given}', but it has columns of vectors: {listed(columns.vectors)}; numbered "
        f"columns: {listed(prefixes)}; name one, or the part before its number, with --feature-column, or any columns "
        "of numbers with --features"
    )


def _asked(chosen: Chosen, default: Chosen, feature_column: str | None) -> dict[str, Any]:
    if (chosen.vector, chosen.numbers) == (default.vector, default.numbers):
        return {}
    whole = feature_column is not None and (chosen.vector is not None or chosen.embedding)
    return {"feature_column": feature_column} if whole else {"features": list(chosen.numbers)}


def _matching(path: Path, columns: _Columns, option: str, given: str | Sequence[str]) -> list[str]:
    """The columns of these names; in a text, names are separated by commas and may be patterns such as 'mean *'."""
    if not isinstance(given, str):
        wanted = [(name, [name] if name in columns.all else []) for name in given]
    else:
        parts = [part.strip() for part in given.split(",") if part.strip()]
        wanted = [(part, _of_pattern(part, columns.all)) for part in parts]
    option = option if isinstance(given, str) else "features"  # a list is a model's, or from Python
    for name, found in wanted:
        if not found:
            raise InputError(f"{option}: {unknown(f'column in {path.name}', name, columns.all)}")
    return list(dict.fromkeys(name for _, found in wanted for name in found))


def _of_pattern(pattern: str, names: list[str]) -> list[str]:
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def _no_features(path: Path, columns: _Columns) -> InputError:
    if len(columns.vectors) > 1:
        return InputError(
            f"{path}: which columns are the features? it has columns of vectors: {listed(columns.vectors)}; "
            "name one with --feature-column"
        )
    return InputError(
        f"{path}: no column of numbers is left for the features (it has: {listed(columns.all)}); name them with "
        "--features, and encode words as numbers (for each word a column of 0 and 1); texts need --backbone, for "
        "example --backbone all-minilm-l6-v2"
    )


def _columns(table: Any, label: str | None) -> _Columns:
    types = optional("pyarrow.types", "tables")
    kinds = {name: table.schema.field(name).type for name in table.column_names if name != label}

    def of_kind(*tests: Callable[[Any], bool]) -> list[str]:
        return [name for name, kind in kinds.items() if any(test(kind) for test in tests)]

    vectors = of_kind(types.is_list, types.is_large_list, types.is_fixed_size_list)
    numbered: dict[str, list[tuple[int, str]]] = {}
    for name in kinds:
        if name not in vectors and (match := re.fullmatch(r"(.*?)(\d+)", name)):
            numbered.setdefault(match[1], []).append((int(match[2]), name))
    return _Columns(list(kinds), vectors, numbered, of_kind(types.is_integer, types.is_floating, types.is_decimal))


def words_error(path: Path, column: Any, name: str) -> InputError:
    """A feature that is not a column of numbers: its first entry that is none, or the first of all."""
    rows = column.to_pylist()
    row = next((row for row, value in enumerate(rows) if not is_number(value)), 0)
    shown = "nothing" if rows[row] is None else repr(rows[row])
    return InputError(
        f"{path}: column '{name}', row {row} holds {shown}, but features must be numbers; correct it, encode words as "
        f"numbers (for each word a column of 0 and 1), or say with --drop '{name}' that it is no feature"
    )


def is_number(value: Any) -> bool:
    """Whether an entry is a number, also one in a string."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)
