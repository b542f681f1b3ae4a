"""Tables as they are: words, gaps and dates as numbers, from sums that clients add up. No row leaves a client.

    numbers  (x - mean) / std, a gap at the mean; and a column of 0 and 1 that says where gaps were, if there are any
    words    a column of 0 and 1 for each category, one for gaps, and one for all that are rare
    dates    days since 1970 as a number, sine and cosine of the day of the year and of the week, and of the hour if
             there are hours; a gap at the mean, and at zero

A client's `Summary` has for each column how many rows it has, how many gaps, sum and sum of squares, or the counts of
its categories. They add, and `settle` makes the `Encoding` of the sum, which is what scikit-learn's `SimpleImputer`,
`StandardScaler`, `MissingIndicator` and `OneHotEncoder` learn from all rows in one place (tested). The mean is shifted
by nothing, so a column whose mean is a billion times its spread loses digits; such a column is an identifier.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np

from apfl.errors import InputError, printable

__all__ = ["MIN_CLIENTS", "MIN_ROWS", "ColumnSummary", "Encoded", "Encoding", "Summary", "settle", "summarise"]

Kind = Literal["numbers", "words", "dates", "empty"]
MIN_ROWS = 10  # of a category, over all clients; with fewer it is one of the others
MIN_CLIENTS = 2  # that have a category, unless there is one client only: the name of one client's own is not published
MOST_OTHERS = 0.5  # share of rows in rare categories beyond which a column of words is text, and left out
DAY = 86_400.0
EPOCH = datetime.datetime(1970, 1, 1)
GAP, OTHER = "(missing)", "(other)"


@dataclass(frozen=True)
class ColumnSummary:
    """What one column of some rows adds up to."""

    kind: Kind
    n_missing: int = 0
    total: float = 0.0  # of numbers, or of days since 1970
    squares: float = 0.0
    hours: bool = False  # whether a date has a time of day
    rows: Mapping[str, int] = field(default_factory=dict)  # of each category
    clients: Mapping[str, int] = field(default_factory=dict)  # that have the category
    n_withheld: int = 0  # rows of categories that a client does not name

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        if "empty" not in (self.kind, other.kind) and self.kind != other.kind:
            raise InputError(f"it has {self.kind} at one client and {other.kind} at another")
        return ColumnSummary(
            self.kind if other.kind == "empty" else other.kind,
            self.n_missing + other.n_missing,
            self.total + other.total,
            self.squares + other.squares,
            self.hours or other.hours,
            _added(self.rows, other.rows),
            _added(self.clients, other.clients),
            self.n_withheld + other.n_withheld,
        )


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in (*a, *(name for name in b if name not in a))}


@dataclass(frozen=True)
class Summary:
    """What a client says of its columns, or the sum over clients."""

    n_rows: int
    n_clients: int
    columns: Mapping[str, ColumnSummary]

    def __add__(self, other: Summary) -> Summary:
        mine, theirs = set(self.columns), set(other.columns)
        if mine != theirs:
            raise InputError(
                f"a client lacks the column '{printable(min(mine ^ theirs))}' that another one has; all need the same"
            )
        columns = {}
        for name, own in self.columns.items():
            try:
                columns[name] = own + other.columns[name]
            except InputError as error:
                raise InputError(f"column '{printable(name)}' cannot be encoded: {error}; leave it out") from None
        return Summary(self.n_rows + other.n_rows, self.n_clients + other.n_clients, columns)

    def to_json(self) -> str:
        return json.dumps({"format": "apfl summary 1", **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Summary:
        given = _opened(text, "apfl summary 1", "what `apfl encoding describe` wrote")
        try:
            columns = {str(name): ColumnSummary(**each) for name, each in given["columns"].items()}
            made = Summary(int(given["n_rows"]), int(given["n_clients"]), columns)
            _check_summary(made)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"a summary of columns is damaged ({error}); have it made again") from error
        return made


def _check_summary(made: Summary) -> None:
    """Numbers that no rows add up to are refused: they would decide everyone's encoding."""
    for name, each in made.columns.items():
        numbers = (each.total, each.squares)
        n_known = made.n_rows - each.n_missing
        within = 0 <= each.n_missing <= made.n_rows and sum(each.rows.values()) + each.n_withheld <= n_known
        least = each.total**2 / n_known if n_known > 0 else 0.0
        sane = (
            all(map(math.isfinite, numbers))
            and each.squares >= least * (1 - 1e-9)
            and min([0, *each.rows.values()]) == 0
        )
        if made.n_rows < 1 or made.n_clients < 1 or not within or not sane:
            raise InputError(f"a summary says of column '{printable(name)}' what no rows can add up to; refuse it")


def summarise(columns: Mapping[str, Sequence[Any]], categories: Sequence[str] = (), withhold: int = 1) -> Summary:
    """One client's columns; those in ``categories`` are words even if they are numbers.

    Categories of fewer than ``withhold`` rows are counted, not named.
    """
    n_rows = {len(column) for column in columns.values()}
    if len(n_rows) != 1:
        raise InputError("columns of different lengths or none at all given; a table has the same rows in each")
    for name in categories:
        if name not in columns:
            raise InputError(f"no column '{name}' to take as categories (have: {', '.join(map(str, columns))})")
    made = {name: _of_column(name, column, name in categories, withhold) for name, column in columns.items()}
    return Summary(n_rows.pop(), 1, made)


def _of_column(name: str, column: Sequence[Any], as_words: bool, withhold: int) -> ColumnSummary:
    values = [value for value in column if not is_gap(value)]
    n_missing = len(column) - len(values)
    kind = _kind(name, values, as_words)
    if kind == "words":
        words = [word_of(value) for value in values]
        counts = {word: words.count(word) for word in sorted(set(words))} if len(words) < 1000 else _counted(words)
        named = {word: n for word, n in counts.items() if n >= withhold}
        return ColumnSummary(
            kind, n_missing, rows=named, clients=dict.fromkeys(named, 1), n_withheld=len(words) - sum(named.values())
        )
    numbers = np.array([days_of(value) if kind == "dates" else float(value) for value in values], np.float64)
    if not np.isfinite(numbers).all():
        raise InputError(f"column '{name}' has an infinite number; leave the row out, or the column")
    hours = kind == "dates" and bool((numbers % 1 != 0).any())
    return ColumnSummary(kind, n_missing, float(numbers.sum()), float(np.square(numbers).sum()), hours)


def _counted(words: Sequence[str]) -> dict[str, int]:
    names, counts = np.unique(np.array(words), return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def _kind(name: str, values: Sequence[Any], as_words: bool) -> Kind:
    if not values:
        return "empty"
    if as_words or all(isinstance(value, str) for value in values):
        return "words"
    if all(isinstance(value, (datetime.date, np.datetime64)) for value in values):
        return "dates"
    if all(isinstance(value, (Real, np.bool_)) for value in values):
        return "numbers"
    odd = next(value for value in values if type(value) is not type(values[0]))
    raise InputError(
        f"column '{name}' mixes {values[0]!r} and {odd!r}: numbers, words or dates alone can be encoded; "
        "mend it, or leave it out with --drop"
    )


def is_gap(value: Any) -> bool:
    """Whether a value is missing: None, NaN, NaT, NA or an empty text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas' NA cannot say
        return True


def word_of(value: Any) -> str:
    """The name of a category; numbers that are whole have no decimal point."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def days_of(value: Any) -> float:
    """Days since 1970, as the clock on the wall says; time zones are left out."""
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]").item()
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    return float((value.replace(tzinfo=None) - EPOCH).total_seconds() / DAY)


# ------------------------------------------------------------------------------------------------------- the encoding


@dataclass(frozen=True)
class Encoded:
    """How one column becomes numbers."""

    name: str
    kind: Kind
    mean: float = 0.0
    std: float = 1.0
    gaps: bool = False  # whether a column says where they are
    hours: bool = False
    categories: tuple[str, ...] = ()
    others: bool = False  # whether there is a column for all other categories

    @property
    def feature_names(self) -> list[str]:
        name = self.name
        if self.kind == "words":
            ends = [*self.categories, *([GAP] if self.gaps else []), *([OTHER] if self.others else [])]
            return [f"{name}={end}" for end in ends]
        cycles = ["year", "week", *(["day"] if self.hours else [])] if self.kind == "dates" else []
        parts = [f"{name} {turn} of the {cycle}" for cycle in cycles for turn in ("sine", "cosine")]
        return [name, *parts, *([f"{name}={GAP}"] if self.gaps else [])]

    def transform(self, column: Sequence[Any]) -> np.ndarray:
        """The column as (n, features), float64."""
        gone = np.array([is_gap(value) for value in column], bool)
        if self.kind == "words":
            return self._words(column, gone)
        try:
            values = np.array(
                [math.nan if gap else self._number(value) for value, gap in zip(column, gone, strict=True)]
            )
        except (TypeError, ValueError, AttributeError):
            odd = next(value for value, gap in zip(column, gone, strict=True) if not gap and not self._fits(value))
            raise InputError(
                f"column '{self.name}' has {printable(odd, 60)}; the encoding expects {self.kind}"
            ) from None
        parts = [(np.where(gone, self.mean, values) - self.mean) / self.std]
        if self.kind == "dates":
            parts += [np.where(gone, 0.0, part) for part in self._cycles(np.where(gone, 0.0, values))]
        return np.stack([*parts, *([gone.astype(float)] if self.gaps else [])], 1)

    def _number(self, value: Any) -> float:
        if not self._fits(value):
            raise TypeError
        return days_of(value) if self.kind == "dates" else float(value)

    def _fits(self, value: Any) -> bool:
        allowed = (datetime.date, np.datetime64) if self.kind == "dates" else (Real, np.bool_)
        return isinstance(value, allowed)

    def _words(self, column: Sequence[Any], gone: np.ndarray) -> np.ndarray:
        place = {word: i for i, word in enumerate(self.categories)}
        made = np.zeros((len(column), len(self.feature_names)))
        for row, (value, gap) in enumerate(zip(column, gone, strict=True)):
            at = len(place) if gap and self.gaps else None if gap else place.get(word_of(value))
            if at is None and self.others:
                at = made.shape[1] - 1
            if at is not None:
                made[row, at] = 1.0
        return made

    def _cycles(self, days: np.ndarray) -> list[np.ndarray]:
        whole = np.floor(days)
        of_year = (whole.astype("datetime64[D]") - whole.astype("datetime64[D]").astype("datetime64[Y]")).astype(float)
        shares = [
            of_year / 365.25,
            (whole + 3) % 7 / 7,
            *([days - whole] if self.hours else []),
        ]  # 1970 began on a Thursday
        return [turn(2 * np.pi * share) for share in shares for turn in (np.sin, np.cos)]


@dataclass(frozen=True)
class Encoding:
    """How the columns of a table become features; the same at every client.

    >>> site = {"age": [40, None, 60], "blood": ["A", "B", "A"]}
    >>> encoding = settle(summarise(site), min_rows=1)
    >>> encoding.feature_names
    ['age', 'age=(missing)', 'blood=A', 'blood=B']
    >>> encoding.transform(site).round(2).tolist()
    [[-1.22, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.22, 0.0, 1.0, 0.0]]
    """

    columns: tuple[Encoded, ...]
    left_out: tuple[str, ...] = ()  # columns of words that hardly repeat, of gaps alone, or of one value

    @property
    def names(self) -> list[str]:
        """The columns that it reads."""
        return [each.name for each in self.columns]

    @property
    def feature_names(self) -> list[str]:
        return [name for each in self.columns for name in each.feature_names]

    def transform(self, columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Features (n, l), float64."""
        for name in self.names:
            if name not in columns:
                raise InputError(
                    f"no column '{printable(name)}', which the encoding reads (have: {', '.join(map(str, columns))})"
                )
        return np.concatenate([each.transform(columns[each.name]) for each in self.columns], 1)

    def to_dict(self) -> dict[str, Any]:
        columns = [
            {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(each).items()} for each in self.columns
        ]
        return {"format": "apfl encoding 1", "columns": columns, "left_out": list(self.left_out)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Encoding:
        try:
            columns = tuple(Encoded(**{**each, "categories": tuple(each["categories"])}) for each in given["columns"])
            made = Encoding(columns, tuple(given["left_out"]))
            if not columns or not all(math.isfinite(each.mean) and each.std > 0 for each in columns):
                raise ValueError("no columns, or scales that are not above 0")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"an encoding is damaged ({error}); have it settled again") from error
        return made

    @staticmethod
    def from_json(text: str) -> Encoding:
        return Encoding.from_dict(_opened(text, "apfl encoding 1", "what `apfl encoding settle` wrote"))


def settle(summary: Summary, *, min_rows: int = MIN_ROWS, min_clients: int = MIN_CLIENTS) -> Encoding:
    """The encoding of the summed columns. A category of fewer rows, or of fewer clients, is one of the others."""
    made, left_out, fewest = [], [], min(min_clients, summary.n_clients)
    for name, own in summary.columns.items():
        encoded = _settled(name, own, summary, min_rows, fewest)
        if encoded is None:
            left_out.append(name)
        else:
            made.append(encoded)
    if not made:
        raise InputError(
            f"no column can be encoded ({', '.join(map(printable, left_out)) or 'none given'}): numbers and dates need "
            f"two different values, words a category with at least {min_rows} rows at {fewest} clients or more; give "
            "more rows, or other columns"
        )
    return Encoding(tuple(made), tuple(left_out))


def _settled(name: str, own: ColumnSummary, summary: Summary, min_rows: int, min_clients: int) -> Encoded | None:
    if own.kind == "empty" or summary.n_rows == own.n_missing:
        return None
    if own.kind == "words":
        return _settled_words(name, own, summary.n_rows, min_rows, min_clients)
    return _settled_numbers(name, own, summary.n_rows)


def _settled_words(name: str, own: ColumnSummary, n_rows: int, min_rows: int, min_clients: int) -> Encoded | None:
    """A column of categories; None if it repeats too few words, or only one."""
    kept = tuple(sorted(w for w, n in own.rows.items() if n >= min_rows and own.clients.get(w, 0) >= min_clients))
    n_others, gaps = n_rows - own.n_missing - sum(own.rows[word] for word in kept), own.n_missing > 0
    if n_others > MOST_OTHERS * n_rows or not kept or (len(kept) == 1 and not n_others and not gaps):
        return None
    return Encoded(name, "words", gaps=gaps, categories=kept, others=n_others > 0)


def _settled_numbers(name: str, own: ColumnSummary, n_rows: int) -> Encoded | None:
    """A column of numbers or dates, to be standardised; None if it is one number throughout."""
    n_known, gaps = n_rows - own.n_missing, own.n_missing > 0
    mean = own.total / n_known
    # Gaps at the mean add nothing to the squares, and count as rows: as scikit-learn scales what it has imputed.
    variance = max(own.squares - n_known * mean**2, 0.0) / n_rows
    moves = variance > 1e-14 * max(mean**2, 1e-300)
    if not moves and not gaps and own.kind == "numbers":
        return None
    return replace(Encoded(name, own.kind, mean, math.sqrt(variance) if moves else 1.0, gaps), hours=own.hours)


def _opened(text: str, kind: str, made_by: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"not JSON ({error}); give {made_by}") from error
    if not isinstance(given, dict) or given.get("format") != kind:
        raise InputError(f"a file of another kind given; give {made_by}")
    return given
