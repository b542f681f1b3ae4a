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


def accepts(source: str) -> Match:
    """A folder with the subjects of the training rows."""
    return Match.CONTENT if source and (Path(source) / "train" / "subject_train.txt").is_file() else Match.NO


def load(source: str | Path) -> Dataset:
    """Rows of both parts, with the columns ``client`` and ``official``."""
    path = Path(source)
    x, y, subjects = (
        [_numbers(path / side / f"{what}_{side}.txt") for side in SIDES] for what in ("X", "y", "subject")
    )
    for side, *parts in zip(SIDES, x, y, subjects, strict=True):
        if len({len(part) for part in parts}) > 1:
            raise InputError(f"{path / side}: X, y and subject have {', '.join(str(len(p)) for p in parts)} rows")
    if x[0].shape[1] != x[1].shape[1]:
        raise InputError(f"{path}: rows of {x[0].shape[1]} and of {x[1].shape[1]} numbers; they must be equal")
    codes, names = coded_labels(path, np.concatenate(y)[:, 0].astype(np.int64))
    columns = {
        "client": np.concatenate(subjects)[:, 0].astype(np.int64),
        "official": np.repeat(SIDES, [len(part) for part in x]),
    }
    files = [path / side / f"{what}_{side}.txt" for side in SIDES for what in ("X", "y", "subject")]
    features = checked_features(path, np.concatenate(x))
    named = _activities(path, names)
    return Dataset(path.name, features, torch.from_numpy(codes), named, columns, file_sha256(*files))


def _numbers(file: Path) -> np.ndarray:
    try:
        return np.loadtxt(file, ndmin=2)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as rows of numbers ({error})") from error


def _activities(path: Path, codes: tuple[str, ...]) -> tuple[str, ...]:
    """What the labels are called, if the folder says so."""
    file = path / "activity_labels.txt"
    pairs = (line.split(maxsplit=1) for line in file.read_text().splitlines()) if file.is_file() else ()
    named = {code: name.strip() for code, *rest in pairs for name in rest}
    return tuple(named.get(code, code) for code in codes)
