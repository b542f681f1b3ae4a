"""Tables on disk: CSV with the usual delimiters and JSON lines, also compressed, and Parquet."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apfl.errors import InputError, optional

__all__ = ["ENDINGS", "csv_reader", "listed", "read_table"]

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")  # of JSON, an object each
ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", *LINES)
DELIMITERS = ",;\t|"
DECIMAL_COMMA = r"^\s*[+-]?\d+(,\d+)?([eE][+-]?\d+)?\s*$"


def read_table(path: Path) -> Any:
    """The table as pyarrow reads it; column names must differ."""
    arrow = optional("pyarrow", "tables")
    try:
        if path.name.lower().endswith(".parquet"):
            parquet = optional("pyarrow.parquet", "tables")
            _check_names(path, parquet.read_schema(path).names)
            return parquet.read_table(path)
        table = _read_lines(path) if path.name.lower().endswith(LINES) else _read_text(path)
        _check_names(path, table.column_names)
        return table
    except (OSError, EOFError, zlib.error, arrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read as {path.name.partition('.')[2]} ({error})") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> InputError:
    return InputError(f"{path}: the names of its columns are not UTF-8 ({error}); save it as UTF-8")


def _read_lines(path: Path) -> Any:
    """JSON lines; a key that a line lacks is missing in its row."""
    with optional("pyarrow", "tables").input_stream(str(path), compression="detect") as stream:
        return optional("pyarrow.json", "tables").read_json(stream)


def _read_text(path: Path) -> Any:
    """A CSV. If its delimiter is no comma, numbers may have a decimal comma."""
    csv, delimiter = optional("pyarrow.csv", "tables"), _delimiter(path)
    parse = csv.ParseOptions(delimiter=delimiter)
    table = csv.read_csv(path, parse_options=parse)
    if delimiter != "," and any(_has_decimal_commas(table.column(i)) for i in range(table.num_columns)):
        return csv.read_csv(path, parse_options=parse, convert_options=csv.ConvertOptions(decimal_point=","))
    return table


def csv_reader(path: Path) -> Callable[[Sequence[str] | None, Sequence[str]], Any]:
    """A function that opens a CSV to be read some rows at a time: these columns (None: all), some of which are numbers.

    The first megabyte says what each other column is.
    """
    arrow, csv = optional("pyarrow", "tables"), optional("pyarrow.csv", "tables")

    def opened(columns: Sequence[str] | None, numbers: Sequence[str]) -> Any:
        kinds = dict.fromkeys(numbers, arrow.float64())
        convert = csv.ConvertOptions(decimal_point=mark, column_types=kinds, include_columns=columns)
        return csv.open_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter), convert_options=convert)

    try:
        delimiter, mark = _delimiter(path), "."
        with opened(None, ()) as reader:
            _check_names(path, reader.schema.names)
            first = arrow.Table.from_batches([reader.read_next_batch()]) if delimiter != "," else None
    except (OSError, EOFError, zlib.error, StopIteration, arrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read as CSV ({error})") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    if first is not None and any(map(_has_decimal_commas, first.columns)):
        mark = ","
    return opened


def _delimiter(path: Path) -> str:
    """The tab of a .tsv; of any other file, what its header has most of outside quotes."""
    name = path.name.lower()
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as stream:
        header = stream.readline(1 << 24).decode(errors="replace")
    if ".tsv" in name[-7:]:
        return "\t"
    return max(DELIMITERS, key=re.sub(r'"[^"]*"', "", header).count)


def _has_decimal_commas(column: Any) -> bool:
    """Whether strings are numbers such as 0,5: all of them, and at least one."""
    types, compute = optional("pyarrow.types", "tables"), optional("pyarrow.compute", "tables")
    known = column.drop_null()
    if not types.is_string(known.type) or not len(known):
        return False
    return bool(compute.all(compute.match_substring_regex(known, DECIMAL_COMMA)).as_py())


def _check_names(path: Path, names: list[str]) -> None:
    twice = [repr(name) for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InputError(f"{path} has several columns of the name {listed(twice)}; give each a name of its own")


def listed(names: list[str], most: int = 12) -> str:
    """The names; of more than ``most`` the first twelve, and how many there are.

    >>> listed([]), listed(["a", ""])
    ('none', "a, ''")
    """
    shown = [name or "''" for name in (names[:12] if len(names) > most else names)]
    return "none" if not names else ", ".join(shown) + (f", ... ({len(names)})" if len(names) > most else "")
