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


def load(source: str | Path, *, labels_optional: bool = False) -> Dataset | Samples:
    """Vectors (n, l), or images."""
    path = existing(source)
    beside = [path.with_suffix(".labels.npy"), path.with_name("labels.npy")]
    labels = next((file for file in beside if file.is_file()), None)
    values = _read_npy(path)
    if labels is None and not labels_optional:
        raise InputError(f"{path} holds no labels; put them beside it, as {beside[0].name} or {beside[1].name}")
    found, more = ({}, []) if labels is None else ({"labels": _read_npy(labels)}, [labels])
    if values.ndim > 2:
        return arrays.from_mapped(path, values, found, *more)
    return from_arrays(path, {"features": values, **found}, *more, labels_optional=labels_optional)


def _read_npy(path: Path) -> np.ndarray:
    try:
        return np.asanyarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as .npy ({error})") from error
