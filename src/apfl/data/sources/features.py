"""A ``.npz`` file of features.

``features`` (n, l), any number type; ``labels`` (n,), numbers or strings; optional ``scale`` (l,), by which stored
features are multiplied; optional ``class_names``; any other array of n entries is a column that options can name.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Collection
from dataclasses import replace
from datetime import date
from datetime import time as dtime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset
from apfl.data.missing import missing, refuse_missing
from apfl.data.sources import Match, by_ending, existing
from apfl.data.targets import Targets, read_targets
from apfl.errors import InputError

RESERVED = ("features", "images", "labels", "scale", "class_names", "provenance")  # arrays that are not columns


READS = "a file .npz of features"


def accepts(source: str) -> Match:
    """Any .npz; `arrays` knows better if it holds images."""
    return by_ending(source, ".npz")


def load(source: str | Path, *, target: str | None = None, labels_optional: bool = False) -> Dataset:
    """Read and check the file."""
    path = Path(source)
    return from_arrays(path, read_arrays(path), labels_optional=labels_optional, target=target)


def from_arrays(
    path: Path,
    arrays: dict[str, np.ndarray],
    *beside: Path,
    labels_optional: bool = False,
    target: str | None = None,
) -> Dataset:
    """The dataset that the arrays of ``path``, and of files beside it, make up, once they are checked."""
    arrays = dict(arrays)
    needed = ("features",) if labels_optional else ("features", "labels")
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise InputError(f"{path} has no array '{missing[0]}' (it has: {', '.join(sorted(arrays))})")
    features = checked_features(path, arrays.pop("features"), arrays.pop("scale", None))
    targets = _targets(path, arrays, target)
    labels, names = (
        labels_of(path, arrays, len(features)) if targets is None else (targets.codes.numpy(), targets.names)
    )
    provenance = read_provenance(path, arrays)
    if len(labels) != len(features):
        raise InputError(f"{path} has {len(features)} features but {len(labels)} labels; there must be one for each")
    columns = {name: column for name, column in arrays.items() if column.shape == labels.shape}
    whole = file_sha256(path, *beside)
    made = Dataset(path.name, features, torch.from_numpy(labels), names, columns, whole, provenance)
    return made if targets is None else with_targets(made, targets)


def _targets(path: Path, arrays: dict[str, np.ndarray], asked: str | None) -> Targets | None:
    """Numbers or several labels in ``labels``, taken out of ``arrays``; None if they are classes, or not there."""
    labels, names = arrays.get("labels"), arrays.get("class_names")
    named_classes = names is not None and labels is not None and labels.ndim == 1 and asked is None
    if labels is None or labels.ndim not in (1, 2) or named_classes:
        return None
    targets = read_targets(str(path), labels, asked, None if names is None or labels.ndim == 1 else list(names))
    if targets is not None:
        arrays.pop("labels")
        arrays.pop("class_names", None)
    return targets


def with_targets(dataset: Dataset, targets: Targets) -> Dataset:
    """The dataset with numbers or labels to predict, which are part of its identity."""
    told = json.dumps([dataset.sha256, targets.kind, list(targets.names)])
    return replace(
        dataset, labels=targets.codes, class_names=targets.names, targets=targets.values, target=targets.kind,
        sha256=hashlib.sha256(told.encode()).hexdigest(),
    )  # fmt: skip


def labels_of(path: Path, arrays: dict[str, np.ndarray], n: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels and class names, taken out of ``arrays``; n rows without labels have zeros, and no class."""
    labels, names = arrays.pop("labels", None), arrays.pop("class_names", None)
    return unlabelled(n) if labels is None else coded_labels(path, labels, names)


def unlabelled(n: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels and class names of n rows without labels."""
    return np.zeros(n, np.int64), ()


def read_arrays(path: Path, without: Collection[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz``, but for those named."""
    existing(path)
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name not in without}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, EOFError) as error:
        raise InputError(
            f"{path} cannot be read as .npz ({error}): truncated, not from numpy.savez, or with Python objects"
        ) from error


def checked_features(path: Path, features: np.ndarray, scale: np.ndarray | None = None) -> torch.Tensor:
    """Features as float32, once they are checked."""
    if features.ndim != 2 or features.dtype.kind not in "fiub" or 0 in features.shape:
        raise InputError(
            f"{path}: 'features' is {features.dtype} of shape {features.shape}; expected numbers of shape (n, l)"
        )
    if scale is not None and (scale.shape not in ((features.shape[1],), ()) or scale.dtype.kind not in "fiu"):
        raise InputError(
            f"{path}: 'scale' has shape {scale.shape}; expected ({features.shape[1]},), one for each column"
        )
    with np.errstate(over="ignore"):  # what is too large is infinite below, and refused
        scaled = features.astype(np.float32)
        if scale is not None:
            scaled *= scale.astype(np.float32)
    finite = np.isfinite(scaled).all(1)
    if not finite.all():
        raise InputError(
            f"{path}: {int((~finite).sum())} rows of 'features' contain NaN or infinity, or numbers too large for "
            f"float32; the first is row {int(np.argmin(finite))} (counted from 0); remove or repair them"
        )
    return torch.from_numpy(scaled)


def array_names(path: Path) -> list[str]:
    """The names of the arrays in an ``.npz``, without reading them."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} cannot be read as .npz ({error}): truncated, not from numpy.savez, or with Python objects"
        ) from error


def read_provenance(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Where features came from, as ``apfl features`` wrote it down; nothing for files from elsewhere."""
    try:
        return dict(json.loads(str(arrays.get("provenance", "{}"))))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: 'provenance' is not the JSON that apfl writes ({error}); remove or repair it"
        ) from error


def coded_labels(
    path: Path, labels: np.ndarray, class_names: np.ndarray | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as 0 to c - 1, and what these are called."""
    refuse_missing(f"labels of {path}", labels)
    labels = whole_labels(f"{path}: 'labels'", labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iubUS":
        raise InputError(
            f"{path}: 'labels' is {labels.dtype} of shape {labels.shape}; expected integers or strings of shape (n,)"
        )
    if class_names is None:
        found, index = np.unique(labels, return_inverse=True)
        return index.astype(np.int64), tuple(str(name) for name in found)
    names = tuple(str(name) for name in np.atleast_1d(class_names))
    if labels.dtype.kind in "US":
        unknown = sorted(set(labels.tolist()) - set(names))
        if unknown:
            raise InputError(f"{path}: label '{unknown[0]}' is not among the {len(names)} class names")
        return np.array([names.index(str(label)) for label in labels], dtype=np.int64), names
    if labels.min() < 0 or labels.max() >= len(names):
        raise InputError(
            f"{path}: labels from {labels.min()} to {labels.max()}, but {len(names)} class names: "
            f"allowed are 0 to {len(names) - 1}"
        )
    if missing(list(names)).any():
        refuse_missing(f"labels of {path} (by their class names)", np.array(names)[labels])
    return labels.astype(np.int64), names


def whole_labels(what: str, labels: np.ndarray) -> np.ndarray:
    """Whole numbers stored as floats are the same labels; others are measurements.

    >>> whole_labels("labels", np.array([1.0, 2.0])).tolist()
    [1, 2]
    """
    if labels.dtype.kind != "f":
        return labels
    whole = np.isfinite(labels) & (labels == np.round(labels)) & (np.abs(labels) < 2**53)
    if not whole.all():
        raise InputError(
            f"{what} are {labels.dtype}, for example {labels[~whole][0]}; expected integers or strings: name another "
            "column, divide the values into classes, or give --target regression"
        )
    return labels.astype(np.int64)


def plain_column(values: list[Any]) -> np.ndarray | None:
    """A column of numbers, strings, dates (as strings) or true and false as an array; other kinds give none.

    A missing string becomes '' and a missing number NaN: a column with gaps is kept, and refused only if it is used.

    >>> plain_column(["north", None]).tolist(), plain_column([1, None]).tolist()
    (['north', ''], [1.0, nan])
    """
    values = [_plain(value) for value in values]
    known = [value for value in values if value is not None]
    if not all(isinstance(value, (bool, int, float, str)) for value in known):
        return None
    if len(known) < len(values):
        empty = "" if known and isinstance(known[0], str) else math.nan
        values = [empty if value is None else value for value in values]
    column = np.array(values)
    return column if column.dtype.kind in "biufU" else None


def _plain(value: Any) -> Any:
    """A date or a time as ISO writes it, a decimal number as a float."""
    if isinstance(value, date | dtime):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


def file_sha256(path: Path, *more: Path) -> str:
    """The hash of a file; where data lie in several files, the hash of their hashes."""
    digests = []
    for each in (path, *more):
        with each.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256"))
    return (hashlib.sha256(b"".join(digest.digest() for digest in digests)) if more else digests[0]).hexdigest()
