"""A bare array: ``NAME.npy`` of vectors or images, with its labels in ``NAME.labels.npy`` or ``labels.npy``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from apfl.data.federation import Dataset
from apfl.data.samples import Samples
from apfl.data.sources import Match, arrays, by_ending, existing
from apfl.data.sources.features import from_arrays
from apfl.errors import InputError

READS = "a file .npy"


def accepts(source: str) -> Match:
    """Any .npy."""
    return by_ending(source, ".npy")


def load(source: str | Path, *, target: str | None = None, labels_optional: bool = False) -> Dataset | Samples:
    """Vectors (n, l), or images."""
    path = existing(source)
    values = read_npy(path)
    labels = labels_beside(path)
    if labels is None and not labels_optional:
        raise no_labels(path)
    found, more = ({}, []) if labels is None else ({"labels": read_npy(labels)}, [labels])
    if values.ndim > 2 and target not in (None, "classification"):
        raise InputError(f"{path} holds images, which have classes; leave --target {target} out")
    if values.ndim > 2:
        return arrays.from_mapped(path, values, found, *more)
    return from_arrays(path, {"features": values, **found}, *more, labels_optional=labels_optional, target=target)


def labels_beside(path: Path) -> Path | None:
    """The file with the labels of an array, if there is one."""
    return next((file for file in _beside(path) if file.is_file()), None)


def no_labels(path: Path) -> InputError:
    """The error that an array has no labels."""
    first, second = _beside(path)
    return InputError(f"{path} holds no labels; put them beside it, as {first.name} or {second.name}")


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".labels.npy"), path.with_name("labels.npy")


def read_npy(path: Path) -> np.ndarray:
    """The array, mapped and not read."""
    try:
        return np.asanyarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as .npy ({error})") from error
