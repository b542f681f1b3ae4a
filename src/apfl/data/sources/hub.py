"""Datasets of images or texts of the Hugging Face Hub: by name, online or offline.

The official splits of a dataset are pooled, in the order given, and dealt out to clients afterwards; the column
``split`` keeps which is which, and what was pooled is recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data.federation import values_of
from apfl.data.hub_access import locate, offline, unavailable
from apfl.data.missing import refuse_missing
from apfl.data.samples import Samples, decode
from apfl.data.sources import Match
from apfl.data.sources._texts import text_of
from apfl.data.sources.features import coded_labels, plain_column
from apfl.errors import InputError, optional, unknown


@dataclass(frozen=True)
class Preset:
    """A dataset known by a short name."""

    repository: str
    image_column: str
    label_column: str
    splits: Sequence[str]


PRESETS = {
    # The paper's two. ImageNet-R has no training split of its own: all of it is one split called test.
    "cifar100": Preset("uoft-cs/cifar100", "img", "fine_label", ("train", "test")),
    "imagenet-r": Preset("axiong/imagenet-r", "image", "wnid", ("test",)),
}


READS = f"{', '.join(map(repr, PRESETS))}, owner/name on the Hub"


def accepts(source: str) -> Match:
    """A preset, or owner/name; a folder ./cifar100 is not the preset."""
    if source in PRESETS:
        return Match.NAME
    looks_so = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith(".")
    return Match.GUESS if looks_so and not Path(source).exists() else Match.NO


def load(
    source: str,
    *,
    revision: str | None = None,
    image_column: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    splits: Sequence[str] | None = None,
) -> Samples:
    """A preset or ``owner/name`` from the Hub."""
    preset = PRESETS.get(source)
    name = source if preset is None else preset.repository
    found, commit = _from_hub(name, revision)
    if preset is not None:
        image_column, label_column = image_column or preset.image_column, label_column or preset.label_column
        splits = splits or preset.splits
    return pooled(source, found, commit, image_column, text_column, label_column, splits)


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def from_folder(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The splits that ``save_to_disk`` wrote, and no commit."""
    datasets = optional("datasets", "hub")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder shows as errors of pyarrow, json and the operating system
        raise InputError(f"{folder} cannot be read as a saved dataset ({error}); save it again") from error
    return (loaded if hasattr(loaded, "keys") else {"all": loaded}), None


def _from_hub(name: str, revision: str | None) -> tuple[Mapping[str, Any], str | None]:
    datasets = optional("datasets", "hub")
    place = locate(name, "dataset", revision)
    if is_saved(Path(place.source)):
        return from_folder(Path(place.source))
    try:
        with offline(place):
            return datasets.load_dataset(place.source, revision=place.revision), place.revision
    except Exception as error:  # as above, and httpx
        if not place.reachable:
            raise unavailable(name, "dataset") from error
        raise InputError(f"dataset '{name}' cannot be loaded from {place.source}: {error}") from error


def holds_images(data: Any) -> bool:
    """Whether a `Dataset` of the library has a column of images."""
    kinds = getattr(data, "features", None)
    return isinstance(kinds, dict) and any(map(_is_image, kinds.values()))


def pooled(
    name: str,
    found: Mapping[str, Any],
    commit: str | None,
    image_column: str | None,
    text_column: str | None,
    label_column: str | None,
    splits: Sequence[str] | None,
) -> Samples:
    """The samples of several splits, one after the other."""
    splits = tuple(splits or found)
    for split in splits:
        if split not in found:
            raise unknown(f"split in {name}", split, found)
    parts, types = [found[split] for split in splits], optional("datasets", "hub")
    kind, column = _sample_column(name, parts[0].features, image_column, text_column, label_column or "label")
    label = _choose(name, parts[0].features, "label", label_column, _is_label)
    labels, names = _labels(name, parts, label)
    stored = [part.select_columns([column]) for part in parts]
    if kind == "images":
        stored = [part.cast_column(column, types.Image(decode=False)) for part in stored]
    rows = _Rows(name, splits, stored, column)
    columns = _other_columns(parts, {column, label})
    columns["split"] = np.repeat(np.array(splits), [len(part) for part in parts])
    return Samples(
        name=name,
        kind=kind,
        revision=commit or _commit(parts[0]) or "fingerprint " + " ".join(part._fingerprint for part in parts),
        labels=labels,
        class_names=names,
        fetch=rows.fetch,
        decode=decode if kind == "images" else text_of,
        where=rows.where,
        columns=columns,
        settings={"splits": list(splits), f"{kind[:-1]}_column": column, "label_column": label},
    )


def _sample_column(
    name: str, features: Mapping[str, Any], image_column: str | None, text_column: str | None, label: str
) -> tuple[str, str]:
    """What the samples are, and their column: images, if there are any, unless texts are asked for."""
    if image_column is not None and text_column is not None:
        raise InputError("--image-column and --text-column given; a backbone takes images or texts: name one of them")
    others = {column: feature for column, feature in features.items() if column != label}
    texts = text_column is not None or not (image_column or any(map(_is_image, features.values())))
    if texts and (text_column or any(map(_is_text, others.values()))):
        column = _choose(name, features if text_column else others, "text", text_column, _is_text)
        return "texts", _fitting(name, column, features, _is_text, "text")
    column = _choose(name, features, "image", image_column, _is_image)
    return "images", _fitting(name, column, features, _is_image, "image")


def _fitting(name: str, column: str, features: Mapping[str, Any], fits: Callable[[Any], bool], what: str) -> str:
    if not fits(features[column]):
        raise InputError(f"{name}: column '{column}' holds {features[column]}, not {what}s; choose --{what}-column")
    return column


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


def _is_label(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


class _Rows:
    """The stored images or texts of several splits, one after the other, by one count of rows."""

    def __init__(self, name: str, splits: Sequence[str], stored: Sequence[Any], column: str) -> None:
        self.name, self.splits, self.stored, self.column = name, splits, stored, column
        self.ends = list(accumulate(len(part) for part in stored))

    def fetch(self, row: int) -> bytes | Path | str | None:
        part, own = self._place(row)
        cell = self.stored[part][own][self.column]
        if not isinstance(cell, dict):  # a text
            return None if cell is None else str(cell)
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"])

    def where(self, row: int) -> str:
        part, own = self._place(row)
        return f"{self.name}, split {self.splits[part]}, row {own}"

    def _place(self, row: int) -> tuple[int, int]:
        part = bisect_right(self.ends, row)
        return part, row - (self.ends[part] - len(self.stored[part]))


def _choose(name: str, features: Mapping[str, Any], what: str, given: str | None, fits: Callable[[Any], bool]) -> str:
    """The column asked for, the only one of its kind, or the one of that name."""
    listing = ", ".join(f"{column} ({type(feature).__name__})" for column, feature in features.items())
    if given is not None and given in features:
        return given
    fitting = [column for column, feature in features.items() if fits(feature)]
    if given is None and len(fitting) == 1:
        return fitting[0]
    if given is None and what in (fitting or features):
        return what
    asked = f"has no column '{given}'" if given else f"has {len(fitting)} columns that could be the {what}"
    raise InputError(f"{name} {asked} (it has: {listing}); name it with --{what}-column")


def _labels(name: str, parts: Sequence[Any], label: str) -> tuple[np.ndarray, tuple[str, ...]]:
    feature = parts[0].features[label]
    given = [value for part in parts for value in part[label][:]]
    refuse_missing(values_of(label, name), given)
    values = np.array(given)
    if values.dtype.kind not in "iuU" or values.ndim != 1:
        raise InputError(f"{name}: labels in '{label}' are {feature}; expected integers or strings, one for each row")
    names = getattr(feature, "names", None)
    if names is not None and values.min() < 0:
        raise InputError(f"{name}: {int((values < 0).sum())} rows have no label in '{label}'; use splits with labels")
    return coded_labels(Path(name), values, None if names is None else np.array(names))


def _other_columns(parts: Sequence[Any], used: set[str]) -> dict[str, np.ndarray]:
    """Columns of plain numbers and strings, for options that name clients or groups."""
    columns = {}
    for name, feature in parts[0].features.items():
        if name not in used and getattr(feature, "dtype", "") in ("int8", "int16", "int32", "int64", "bool", "string"):
            values = plain_column([value for part in parts for value in part[name][:]])
            if values is not None:
                columns[name] = values
    return columns


def _commit(part: Any) -> str | None:
    """The commit that a dataset from the cache was downloaded from: it is in the addresses of its files."""
    addresses = " ".join(part.info.download_checksums or {})
    match = re.search(r"@([0-9a-f]{40})/", addresses)
    return match[1] if match else None
