"""Columns of a table that are encoded once it is known who has which rows (`apfl.maths.encoding`).

The encoding is settled from the sums of the clients' *training* rows, so a test row decides nothing; or it is given, as
a file that sites have agreed on, or as a model states it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from apfl.errors import InputError
from apfl.maths.encoding import Encoding, Summary, settle, summarise

__all__ = ["AUTO", "Raw", "digest", "encoding_of", "read_encoding"]

AUTO = "auto"


@dataclass(frozen=True, eq=False)
class Raw:
    """Columns as a file has them; each has one Python value a row, None if there is none."""

    columns: Mapping[str, Sequence[Any]]
    categories: tuple[str, ...] = ()  # columns whose numbers are names

    def where(self, names: Sequence[str], rows: np.ndarray) -> dict[str, list[Any]]:
        """Some rows of some columns."""
        return {name: [self.columns[name][row] for row in rows] for name in names}

    def summary(self, names: Sequence[str], rows: np.ndarray) -> Summary:
        """What one client with these rows would send."""
        return summarise(self.where(names, rows), [name for name in self.categories if name in names])

    def settled(self, names: Sequence[str], parts: Sequence[np.ndarray]) -> Encoding:
        """The encoding from the sums of clients with these rows."""
        return settle(reduce(add, (self.summary(names, rows) for rows in parts if len(rows))))


def encoding_of(given: str | Encoding) -> Encoding | None:
    """What --encode names; None if it is to be settled from the clients' sums."""
    if isinstance(given, Encoding):
        return given
    return None if given == AUTO else read_encoding(Path(given))


def read_encoding(path: Path) -> Encoding:
    """The encoding in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--encode {path} given, which cannot be read ({error}); allowed: '{AUTO}', or a file that "
            "`apfl encoding settle` wrote"
        ) from error
    try:
        return Encoding.from_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def digest(encoding: Encoding) -> str:
    """What tells an encoding from others."""
    return hashlib.sha256(json.dumps(encoding.to_dict(), sort_keys=True).encode()).hexdigest()
