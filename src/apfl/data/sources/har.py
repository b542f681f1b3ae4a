"""Human Activity Recognition Using Smartphones (UCI): 561 features of each window, 30 people, 6 activities.

The folder that the archive unpacks to, with ``train/X_train.txt``, ``y_train.txt``, ``subject_train.txt`` and the same
for ``test``. The archive tests on other *people*; here its two parts are one table with the column ``client``, the
person, because a client is tested on rows of its own. The column ``official`` says which part a row is from.

https://archive.ics.uci.edu/dataset/240
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from apfl.data.federation import Dataset
from apfl.data.sources import Match
from apfl.data.sources.features import checked_features, coded_labels, file_sha256
from apfl.errors import InputError

READS = "the folder of UCI's HAR"
SIDES = ("train", "test")
PARTS = ("X", "y", "subject")
REPAIR = "unpack UCI's archive again and give the folder that it makes"


def accepts(source: str) -> Match:
    """A folder with the subjects or the features of either part: if a file is missing, ``load`` says which."""
    files = (Path(source) / side / f"{what}_{side}.txt" for side in SIDES for what in ("subject", "X"))
    return Match.CONTENT if source and any(file.is_file() for file in files) else Match.NO


def load(source: str | Path) -> Dataset:
    """Rows of both parts, with the columns ``client`` and ``official``."""
    path = Path(source)
    x, y, subjects = ([_numbers(path / side / f"{what}_{side}.txt") for side in SIDES] for what in PARTS)
    for side, *parts in zip(SIDES, x, y, subjects, strict=True):
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(str(len(part)) for part in parts)
            raise InputError(f"{path / side}: X, y and subject have {counts} rows; they must have as many; {REPAIR}")
    widths = [part.shape[1] for part in x]
    if widths[0] != widths[1]:
        raise InputError(f"{path}: rows of {widths[0]} and of {widths[1]} numbers; they must be equal; {REPAIR}")
    codes, names = coded_labels(path, _whole_numbers(path, "y", y))
    columns = {
        "client": _whole_numbers(path, "subject", subjects),
        "official": np.repeat(SIDES, [len(part) for part in x]),
    }
    files = [path / side / f"{what}_{side}.txt" for side in SIDES for what in PARTS]
    features = checked_features(path, np.concatenate(x))
    named = _activities(path, names)
    return Dataset(path.name, features, torch.from_numpy(codes), named, columns, file_sha256(*files))


def _numbers(file: Path) -> np.ndarray:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = np.loadtxt(lines, ndmin=2) if lines else np.zeros((0, 0))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as rows of numbers ({error}); {REPAIR}") from error
    if not len(rows):
        raise InputError(f"{file} has no rows; {REPAIR}")
    return rows


def _whole_numbers(path: Path, what: str, parts: list[np.ndarray]) -> np.ndarray:
    """The activities or people of both parts, (n,): one whole number in each row."""
    for side, part in zip(SIDES, parts, strict=True):
        wrong = (part != np.round(part)).any(1) | ~np.isfinite(part).all(1) | (part.shape[1] != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            given = " ".join(f"{value:g}" for value in part[row])
            raise InputError(
                f"{path / side / f'{what}_{side}.txt'}: row {row}, counted from 0, is '{given}'; expected one whole "
                f"number in each row; {REPAIR}"
            )
    return np.concatenate(parts)[:, 0].astype(np.int64)


def _activities(path: Path, codes: tuple[str, ...]) -> tuple[str, ...]:
    """What the labels are called, if the folder says so."""
    file = path / "activity_labels.txt"
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as lines of a number and a name ({error}); {REPAIR}") from error
    pairs = (line.strip().split(maxsplit=1) for line in lines)
    named = {pair[0]: pair[1] for pair in pairs if len(pair) > 1}
    names = tuple(named.get(code, code) for code in codes)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{file} calls two activities '{twice}'; names must differ; {REPAIR}")
    return names
