"""Extract once, cache on disk: samples -> backbone -> one ``.npz`` with its provenance inside.

The file is keyed by dataset revision, backbone, weights, preprocessing and pooling: while they stay the same it is
read, and when one of them changes it is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data.backbones import Backbone
from apfl.data.device import device_of
from apfl.data.extract.partial import Partial
from apfl.data.extract.pipeline import through
from apfl.data.hub_access import cache_folder
from apfl.data.samples import Samples
from apfl.data.sources.features import RESERVED, array_names, read_arrays, read_provenance
from apfl.errors import InputError

__all__ = ["Extraction", "cached_file", "extract"]


@dataclass(frozen=True)
class Extraction:
    """What came of asking for features."""

    path: Path
    n_rows: int
    n_computed: int  # rows that went through the backbone now; 0 if the file was there already
    skipped: Mapping[str, str]  # where an unreadable image is: why


def cached_file(samples: Samples, backbone: Backbone, *, mixed_precision: bool = False) -> Path:
    """Where features are kept when nobody says where."""
    digest = hashlib.sha256(json.dumps(_key(samples, backbone, mixed_precision), sort_keys=True).encode()).hexdigest()
    names = (name.replace("/", "--") for name in (samples.name, backbone.name, backbone.pooling))
    return cache_folder() / "features" / f"{'-'.join(names)}-{digest[:16]}.npz"


def extract(
    samples: Samples,
    backbone: Backbone,
    path: Path,
    *,
    batch_size: int | None = None,
    device: str = "auto",
    mixed_precision: bool = False,
    on_corrupt: str = "refuse",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    seconds_between_saves: float = 1.0,
) -> Extraction:
    """Make sure that ``path`` holds the features of ``samples``; compute what is missing."""
    if on_corrupt not in ("refuse", "skip"):
        raise InputError(f"--on-corrupt {on_corrupt} given; allowed are refuse and skip")
    if samples.kind != backbone.takes:
        hint = "use identity, or no backbone" if samples.kind == "vectors" else "choose a backbone for images"
        raise InputError(f"{samples.name} holds {samples.kind}, but {backbone.name} takes {backbone.takes}; {hint}")
    where = device_of(device)
    size = (16 if where.type == "cpu" else 128) if batch_size is None else batch_size
    if size < 1:
        raise InputError(f"--batch-size {batch_size} given; it must be at least 1")
    key = _key(samples, backbone, mixed_precision)
    held = _held(path)
    if held.get("key") == key:
        _refuse_or_not(held["skipped"], on_corrupt)
        return Extraction(path, held["n_rows"], 0, held["skipped"])
    # Another batch size, device or version moves the last digits: what is continued must have been begun alike.
    plan = {"key": key, "backbone_revision": backbone.revision, "batch_size": size, "device": where.type}
    plan |= {"versions": _versions()}
    with Partial(path, plan, seconds_between_saves=seconds_between_saves) as partial:
        begun = partial.rows
        _refuse_or_not({samples.where(row): why for row, why in partial.skipped.items()}, on_corrupt)
        on_progress(begun, len(samples))
        passed = through(samples, backbone, where, start=begun, size=size, mixed_precision=mixed_precision)
        for rows, bad, features in passed:
            _refuse_or_not({samples.where(row): why for row, why in bad.items()}, on_corrupt)
            partial.add(features, len(rows), bad)
            on_progress(partial.rows, len(samples))
        if partial.rows == len(partial.skipped):
            raise InputError(f"not one of the {partial.rows} images of {samples.name} can be read")
        skipped = {samples.where(row): why for row, why in partial.skipped.items()}
        n_rows = partial.rows - len(skipped)
        partial.finish(_arrays(samples, list(partial.skipped), {**plan, "n_rows": n_rows, "skipped": skipped}))
    return Extraction(path, n_rows, n_rows + len(skipped) - begun, skipped)


def _key(samples: Samples, backbone: Backbone, mixed_precision: bool) -> dict[str, Any]:
    """Everything that makes features other features."""
    key = {
        "format": 1,
        "dataset": {"name": samples.name, "revision": samples.revision, **samples.settings},
        "backbone": {"name": backbone.name, "weights_sha256": backbone.weights},
        "preprocessing": dict(backbone.preprocessing),
        "pooling": backbone.pooling,
        "mixed_precision": mixed_precision,
    }
    return dict(json.loads(json.dumps(key, default=str)))  # as it reads back from a file


def _held(path: Path) -> dict[str, Any]:
    """The provenance of the file that is there; a file that apfl did not write is not overwritten."""
    if not path.exists():
        return {}
    names = array_names(path)
    found = read_provenance(path, read_arrays(path, without=[name for name in names if name != "provenance"]))
    if "key" not in found:
        raise InputError(f"{path} exists and was not written by `apfl features`; choose another --out or remove it")
    return found


def _refuse_or_not(bad: Mapping[str, str], on_corrupt: str) -> None:
    if bad and on_corrupt == "refuse":
        place, why = next(iter(bad.items()))
        raise InputError(
            f"cannot read {place}: {why}; repair or remove it, or leave such images out with --on-corrupt skip"
        )


def _arrays(samples: Samples, skipped: list[int], provenance: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What stands beside the features in the file."""
    arrays = {name: np.delete(column, skipped) for name, column in samples.columns.items() if name not in RESERVED}
    arrays |= {"labels": np.delete(samples.labels, skipped), "class_names": np.array(samples.class_names)}
    return arrays | {"provenance": np.array(json.dumps(provenance, sort_keys=True))}


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "numpy", "pillow", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
