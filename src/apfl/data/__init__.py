"""Where samples come from: one file for each source, each with a ``load``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apfl.data.federation import Dataset
from apfl.data.samples import Samples
from apfl.data.sources import arrays, digits, features, folder, hub, pfllib, vectors
from apfl.errors import InputError

__all__ = ["Samples", "load_dataset", "open_source"]

ALLOWED = (
    f"'digits', {', '.join(map(repr, hub.PRESETS))}, owner/name on the Hub, a folder of images, of a saved dataset or "
    "of PFLlib, or a file .npz, .npy, .csv or .parquet"
)


def load_dataset(source: str, **options: Any) -> Dataset:
    """Features and labels by name or path: ``digits``, or a file of vectors.

    >>> load_dataset("digits").features.shape
    torch.Size([1797, 64])
    """
    opened = open_source(source, **options)
    if isinstance(opened, Samples):
        raise InputError(f"'{source}' holds images; name the backbone that makes features of them with --backbone")
    return opened


def open_source(source: str, **options: Any) -> Dataset | Samples:
    """Vectors as a dataset, images as samples still to go through a backbone.

    Options are ``revision``, ``splits``, ``image_column``, ``label_column`` and ``feature_column``; one that the
    source cannot use is an error.
    """
    load = _loader(source)
    given = {name: value for name, value in options.items() if value is not None}
    useless = given.keys() - inspect.signature(load).parameters.keys()
    if useless:
        option = min(useless).replace("_", "-")
        raise InputError(f"--{option} given, which is of no use for '{source}': leave it out")
    return load(source, **given) if inspect.signature(load).parameters else load()


def _loader(source: str) -> Callable[..., Dataset | Samples]:
    path = Path(source)
    if source == "digits":
        return digits.load
    if source in hub.PRESETS:  # a folder of that name is ./cifar100: what lies around must not change what a name means
        return hub.load
    if source and path.is_dir():  # an empty name would be the folder one is in
        if pfllib.is_pfllib(path):
            return pfllib.load
        return hub.load_saved if hub.is_saved(path) else folder.load
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy", ".csv", ".parquet"):
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        if suffix == ".npz":
            return arrays.load if "images" in features.array_names(path) else features.load
        return vectors.load_npy if suffix == ".npy" else vectors.load
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not path.exists() and not source.startswith("."):
        return hub.load
    raise InputError(f"no data '{source}': give {ALLOWED}")
