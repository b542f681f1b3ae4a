"""A federation of LEAF: JSON files with ``users``, the clients, and ``user_data``, the ``x`` and ``y`` of each.

A file by itself, a folder of files (``all_data``), or a folder with ``train`` and ``test``. The columns are ``client``
(FEMNIST: the writer) and, if there is a ``test`` folder, ``test``. Rows of numbers only: texts (Shakespeare, Sent140)
are tables for a sentence encoder.

https://leaf.cmu.edu, utils/preprocess.sh
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from apfl.data.federation import Dataset
from apfl.data.sources import Match
from apfl.data.sources.features import checked_features, coded_labels, file_sha256
from apfl.errors import InputError

READS = "a JSON file or a folder of LEAF"
SIDES = ("train", "test")
EXPECTED = "expected an object with 'users' and 'user_data', as LEAF's preprocess.sh writes it"


def accepts(source: str) -> Match:
    """A .json file, a folder of them, or one with such a folder ``train``."""
    path = Path(source)
    if source and path.suffix.lower() == ".json" and not path.is_dir():
        return Match.ENDING
    return Match.CONTENT if source and path.is_dir() and _files(path) and _looks_so(_files(path)[0][0]) else Match.NO


def load(source: str | Path) -> Dataset:
    """Every user's rows, file by file, with the columns ``client`` and ``test``."""
    path = Path(source)
    files = _files(path)
    if not files:
        raise InputError(f"there is no file {path}")
    parts = [(user, test, x, y) for file, test in files for user, x, y in _users(file)]
    if not parts:
        raise InputError(f"{path} names no users; {EXPECTED}, with one user at least")
    widths = {row.shape[1] for _, _, row, _ in parts}
    if len(widths) > 1:
        raise InputError(f"{path}: rows of {' and of '.join(map(str, sorted(widths)))} numbers; all must be equal")
    sizes = [len(y) for *_, y in parts]
    columns = {"client": np.repeat(np.array([user for user, *_ in parts]), sizes)}
    if any(test for _, test in files):
        columns["test"] = np.repeat([test for _, test, *_ in parts], sizes)
    x, y = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    labels, names = coded_labels(path, y)
    sha256 = file_sha256(*[file for file, _ in files])
    return Dataset(path.name, checked_features(path, x), torch.from_numpy(labels), names, columns, sha256)


def _files(path: Path) -> list[tuple[Path, bool]]:
    """The files, and whether their rows are for testing."""
    if path.is_file():
        return [(path, False)]
    sides = [(file, side == "test") for side in SIDES for file in _json_files(path / side)]
    return sides if any(not test for _, test in sides) else [(file, False) for file in _json_files(path)]


def _json_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if file.is_file())


def _looks_so(file: Path) -> bool:
    with file.open("rb") as stream:
        return b'"users"' in stream.read(1 << 20)


def _users(file: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        users, data = content["users"], content["user_data"]
        if not isinstance(users, list):
            raise TypeError(f"'users' is {json.dumps(users)[:40]}, not a list")
        if len(set(users)) < len(users):
            twice = next(user for user in users if users.count(user) > 1)
            raise InputError(f"{file} names user {twice} twice; name each once, or write the file again")
        lost = next((user for user in users if user not in data), None)
        if lost is not None:
            raise InputError(f"{file} has no rows of user {lost} in 'user_data'; {EXPECTED}")
        return [(str(user), *_arrays(file, str(user), data[user]["x"], data[user]["y"])) for user in users]
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{file} cannot be read as a file of LEAF ({reason}); {EXPECTED}") from error


def _arrays(file: Path, user: str, x: Sequence[object], y: Sequence[object]) -> tuple[np.ndarray, np.ndarray]:
    if any(isinstance(entry, str) for row in x[:1] for entry in (row if isinstance(row, list) else [row])):
        raise InputError(
            f"{file} has texts; write them as a table with the columns text, label and client, and give --backbone"
        )
    try:
        rows, labels = np.array(x, dtype=np.float64), np.array(y)
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{file}: x and y of user {user} cannot be read as rows of equally many numbers and one label each "
            f"({error}); repair them or leave this user out"
        ) from error
    if rows.ndim != 2 or labels.ndim != 1 or len(rows) != len(labels):
        raise InputError(
            f"{file}: user {user} has x of shape {rows.shape} and y of shape {labels.shape}; expected (n, l) and (n,): "
            "repair them or leave this user out"
        )
    return rows, labels
