"""Where samples come from: one file for each source, here or in another distribution.

A source is a module with ``load``, which returns a `Dataset` (vectors) or `Samples` (images). By itself it is called by
its name: ``load()`` in ``digits.py`` is ``--data digits``. A source of many files or folders has two things more:
``accepts(source) -> Match`` says how well what is given fits, and ``READS`` says the same in words; its ``load`` takes
what was given and, as keyword-only arguments, the options that it understands.
Another distribution adds one by an entry point of the group ``apfl.sources``; ``--data ./mine.py`` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from apfl.data.registry import Registry, is_path
from apfl.errors import InputError

__all__ = ["SOURCES", "Match", "by_ending", "existing", "loader"]

SOURCES = Registry("source", "apfl.data.sources", "apfl.sources", pick=lambda module: module)


class Match(IntEnum):
    """How well a source fits what is given; of several the best one reads it."""

    NO = 0
    GUESS = 1  # any folder, any owner/name: if no other source knows better
    ENDING = 2  # a file with its ending
    CONTENT = 3  # it looked inside
    NAME = 4  # a name of its own; files and folders that lie around do not change what a name means


def by_ending(source: str, *endings: str) -> Match:
    """`Match.ENDING` for files of these endings, also for one that does not exist: ``load`` says so.

    >>> by_ending("iris.CSV", ".csv", ".parquet").name
    'ENDING'
    """
    path = Path(source)
    return Match.ENDING if path.name.lower().endswith(endings) and not path.is_dir() else Match.NO


def existing(source: str | Path) -> Path:
    """The path of a file that must exist."""
    if not Path(source).is_file():
        raise InputError(f"there is no file {source}")
    return Path(source)


def loader(source: str) -> Callable[..., Any]:
    """The ``load`` of the source that reads this: by its name or path, or the best match."""
    if is_path(source):
        return _load_of(SOURCES.load(source))
    names = SOURCES.names()
    if source in names and not _matches_by_itself(named := SOURCES.load(source)):
        return _load_of(named)
    return _load_of(_best_reader(source, names))


def _best_reader(source: str, names: Sequence[str]) -> Any:
    """Of the sources that read many files or folders, the one that fits best."""
    readers = {name: thing for name in names if _matches_by_itself(thing := SOURCES.load(name))}
    matches = {name: reader.accepts(source) for name, reader in readers.items()}
    best = max(matches.values())
    fitting = [name for name, match in matches.items() if match == best]
    if not best:
        own_names = [repr(name) for name in names if name not in readers]
        allowed = [*own_names, *(reader.READS for reader in readers.values()), "or ./FILE.py with a load"]
        raise InputError(f"no data '{source}': give {', '.join(allowed)}")
    if len(fitting) > 1:
        raise InputError(f"'{source}' could be read as {' or as '.join(fitting)}; uninstall or rename one of these")
    return readers[fitting[0]]


def _matches_by_itself(thing: Any) -> bool:
    return hasattr(thing, "accepts")


def _load_of(thing: Any) -> Callable[..., Any]:
    """The thing is a module, or its ``load`` alone (``./mine.py:load``)."""
    load: Callable[..., Any] = thing if callable(thing) else thing.load
    return load
