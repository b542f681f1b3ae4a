"""Extract once, cache on disk: samples -> backbone -> one ``.npz`` with its provenance inside.

The file is keyed by dataset revision, backbone, weights, preprocessing and pooling: while they stay the same it is
read, and when one of them changes it is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data.backbones import Backbone
from apfl.data.device import device_of
from apfl.data.extract.partial import Partial
from apfl.data.extract.pipeline import HALF, Batching, Passed, through
from apfl.data.hub_access import cache_folder
from apfl.data.samples import Samples
from apfl.data.source import ON_CORRUPT
from apfl.data.sources.features import RESERVED, array_names, read_arrays, read_provenance
from apfl.errors import InputError

__all__ = ["Extraction", "cached_file", "extract"]

BATCH = {False: (16, 128), True: (256, 1024)}  # of images, of texts: on a CPU, on a GPU


@dataclass(frozen=True)
class Extraction:
    """What came of asking for features."""

    path: Path
    n_rows: int
    n_computed: int  # rows that went through the backbone now; 0 if the file was there already
    skipped: Mapping[str, str]  # where an unreadable sample is: why
    n_cut: int = 0  # texts that were longer than the network reads


def cached_file(samples: Samples, backbone: Backbone, *, mixed_precision: bool = False, device: str = "auto") -> Path:
    """Where features are kept when nobody says where."""
    key = _key(samples, backbone, mixed_precision and device_of(device).type)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
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
    workers: int | None = None,
    on_corrupt: str = "refuse",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    seconds_between_saves: float = 1.0,
    passing: Callable[[Samples, Backbone, Batching], Generator[Passed, None, None]] = through,
) -> Extraction:
    """Make sure that ``path`` holds the features of ``samples``; compute what is missing.

    ``workers`` processes decode images (default: on a GPU one for each core but one; on a CPU none, but threads).
    ``passing`` takes the samples through the backbone, as `through` does.
    """
    _check(samples, backbone, on_corrupt)
    where = device_of(device)
    size = _batch_size(batch_size, samples, where.type)
    key = _key(samples, backbone, mixed_precision and where.type)
    extracted = _held(path)
    if extracted.get("key") == key:
        _refuse_or_not(extracted["skipped"], on_corrupt)
        return Extraction(path, extracted["n_rows"], 0, extracted["skipped"], extracted.get("n_cut", 0))
    # Another batch size, device or version moves the last digits: what is continued must have been begun alike.
    plan = {"key": key, "backbone_revision": backbone.revision, "batch_size": size, "device": where.type}
    plan |= {"versions": _versions()}
    with Partial(path, plan, seconds_between_saves=seconds_between_saves) as partial:
        begun = partial.rows
        _refuse_or_not({samples.where(row): why for row, why in partial.skipped.items()}, on_corrupt)
        on_progress(begun, len(samples))
        passed = passing(samples, backbone, Batching(where, begun, size, mixed_precision, workers))
        with closing(passed):  # ends its processes now, not when Python gets round to it
            for rows, bad, features, n_cut in passed:
                _refuse_or_not({samples.where(row): why for row, why in bad.items()}, on_corrupt)
                partial.add(features, len(rows), bad, n_cut)
                on_progress(partial.rows, len(samples))
        if partial.rows == len(partial.skipped):
            raise InputError(f"not one of the {partial.rows} {samples.kind} of {samples.name} can be read")
        skipped = {samples.where(row): why for row, why in partial.skipped.items()}
        n_rows = partial.rows - len(skipped)
        result: dict[str, Any] = {"n_rows": n_rows, "skipped": skipped}
        result |= {"skipped_rows": list(partial.skipped)} if skipped else {}
        result |= {"n_cut": partial.n_cut} if partial.n_cut else {}
        partial.finish(_arrays(samples, list(partial.skipped), plan | result))
    return Extraction(path, n_rows, n_rows + len(skipped) - begun, skipped, partial.n_cut)


def _check(samples: Samples, backbone: Backbone, on_corrupt: str) -> None:
    if on_corrupt not in ON_CORRUPT:
        raise InputError(f"--on-corrupt {on_corrupt} given; allowed are {' and '.join(ON_CORRUPT)}")
    if samples.kind != backbone.takes:
        vectors = samples.kind == "vectors"
        hint = "use identity, or no backbone" if vectors else f"choose a backbone for {samples.kind}"
        raise InputError(f"{samples.name} holds {samples.kind}, but {backbone.name} takes {backbone.takes}; {hint}")


def _batch_size(given: int | None, samples: Samples, device: str) -> int:
    if given is not None and given < 1:
        raise InputError(f"--batch-size {given} given; it must be at least 1")
    return given or BATCH[samples.kind == "texts"][device != "cpu"]


def _key(samples: Samples, backbone: Backbone, mixed_on: str | bool) -> dict[str, Any]:
    """Everything that makes features other features; ``mixed_on`` is the device of mixed precision, or false."""
    key = {
        "format": 1,
        "dataset": {"name": samples.name, "revision": samples.revision, **samples.settings},
        "backbone": {"name": backbone.name, "weights_sha256": backbone.weights},
        "preprocessing": dict(backbone.preprocessing),
        "pooling": backbone.pooling,
        "mixed_precision": mixed_on and str(HALF[str(mixed_on)]).removeprefix("torch."),
    }
    return dict(json.loads(json.dumps(key, default=str)))  # as it reads back from a file


def _held(path: Path) -> dict[str, Any]:
    """The provenance of the file that is there; a file that apfl did not write is not overwritten."""
    if not path.exists():
        return {}
    names = array_names(path)
    stored = read_provenance(path, read_arrays(path, without=[name for name in names if name != "provenance"]))
    if "key" not in stored:
        raise InputError(f"{path} exists and was not written by `apfl features`; choose another --out or remove it")
    return stored


def _refuse_or_not(bad: Mapping[str, str], on_corrupt: str) -> None:
    if bad and on_corrupt == "refuse":
        place, why = next(iter(bad.items()))
        raise InputError(
            f"cannot read {place}: {why}; repair or remove it, or leave such samples out with --on-corrupt skip"
        )


def _arrays(samples: Samples, skipped: list[int], provenance: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What stands beside the features in the file."""
    arrays = {name: np.delete(column, skipped) for name, column in samples.columns.items() if name not in RESERVED}
    if samples.class_names:
        arrays |= {"labels": np.delete(samples.labels, skipped), "class_names": np.array(samples.class_names)}
    return arrays | {"provenance": np.array(json.dumps(provenance, sort_keys=True))}


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "numpy", "pillow", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
