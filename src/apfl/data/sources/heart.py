"""Heart disease (UCI): the files ``processed.CENTER.data`` of four hospitals, as FLamby prepares them.

Columns 10 to 12 (slope, ca, thal), which most hospitals lack, are left out, and then rows with a missing value ('?').
The kinds of chest pain and of electrocardiogram become columns of 0 and 1, without that of their lowest value, so
there are 16 features with the four public files. The label says whether there is a disease (1 to 4) or not (0). The
column ``client`` is the hospital.

FLamby draws its own fixed test rows, which depend on scikit-learn's shuffling; here they are drawn as everywhere.
The columns of 0 and 1 need the list of values that occur anywhere: a federation agrees on it first.

https://archive.ics.uci.edu/dataset/45, https://github.com/owkin/FLamby
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from apfl.data.federation import Dataset
from apfl.data.sources import Match
from apfl.data.sources.features import checked_features, file_sha256
from apfl.errors import InputError

READS = "a folder of UCI's heart disease, with the files processed.CENTER.data"
NAMES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
CATEGORIES = ("cp", "restecg")
WIDTH = 14  # of a row: the ten above, slope, ca, thal, and the label
LABELS = range(5)
REPAIR = "repair the file, fetch it again, or take it out of the folder"


def accepts(source: str) -> Match:
    """A folder with a hospital's file."""
    return Match.CONTENT if source and any(Path(source).glob("processed.*.data")) else Match.NO


def load(source: str | Path) -> Dataset:
    """The patients of all hospitals without missing values, with the column ``client``."""
    path = Path(source)
    files = sorted(path.glob("processed.*.data"))
    rows = [_patients(file) for file in files]
    every = np.concatenate(rows)
    names, columns = zip(*_features(every), strict=True)
    return Dataset(
        name=path.name,
        features=checked_features(path, np.stack(columns, 1)),
        labels=torch.from_numpy((every[:, -1] > 0).astype(np.int64)),
        class_names=("no disease", "disease"),
        columns={"client": np.repeat([_hospital(file) for file in files], list(map(len, rows)))},
        sha256=file_sha256(*files),
        feature_names=names,
    )


def _hospital(file: Path) -> str:
    return file.name.removeprefix("processed.").removesuffix(".data")


def _patients(file: Path) -> np.ndarray:
    """The rows of one hospital that have all of the first ten columns and the label, (n, 11)."""
    try:
        lines = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as rows of numbers and '?' ({error}); {REPAIR}") from error
    rows = [row for i, line in enumerate(lines) if (row := _patient(f"{file}: row {i}, counted from 0,", line))]
    if not rows:
        raise InputError(
            f"{file}: none of {len(lines)} rows has all of its first ten columns and the label, so this hospital would "
            f"have no patients; {REPAIR}"
        )
    return np.array(rows)


def _patient(what: str, line: list[str]) -> list[float] | None:
    """The first ten columns and the label; None if one of them is missing."""
    if len(line) != WIDTH:
        raise InputError(f"{what} has {len(line)} columns; expected {WIDTH}, with commas between them; {REPAIR}")
    kept = [entry.strip() for entry in (*line[: len(NAMES)], line[-1])]
    if "?" in kept:
        return None
    try:
        row = [float(entry) for entry in kept]
    except ValueError as error:
        raise InputError(f"{what} cannot be read as numbers and '?' ({error}); {REPAIR}") from error
    if not np.isfinite(row).all():
        raise InputError(f"{what} has '{kept[int(np.argmin(np.isfinite(row)))]}'; expected numbers and '?'; {REPAIR}")
    if row[-1] not in LABELS:
        raise InputError(f"{what} has the label '{kept[-1]}'; expected 0 (no disease), 1 to 4, or '?'; {REPAIR}")
    return row


def _features(rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Names and columns: numbers as they are, then a column for each value of a category but the lowest."""
    plain = [(name, rows[:, i]) for i, name in enumerate(NAMES) if name not in CATEGORIES]
    coded = [
        (f"{name}={value:g}", (rows[:, i] == value).astype(np.float64))
        for i, name in enumerate(NAMES)
        if name in CATEGORIES
        for value in np.unique(rows[:, i])[1:]
    ]
    return [*plain, *coded]
