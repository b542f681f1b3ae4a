"""The one door to data: from what a user gives to a `Dataset`; images go through a backbone, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from apfl.data.backbones import load_backbone
from apfl.data.extract.features import Extraction, cached_file
from apfl.data.extract.features import extract as extract_quietly
from apfl.data.federation import Dataset
from apfl.data.samples import Samples, vectors
from apfl.data.sources import loader
from apfl.data.sources.features import load as load_features
from apfl.errors import InputError

__all__ = ["Source", "extract_source", "load_data", "load_dataset", "open_source"]


def _option(help: str, default: Any = None, *, unset: str = "") -> Any:
    """A field with its help on the command line; ``unset`` says what None stands for."""
    return field(default=default, metadata={"help": help, "unset": unset})


@dataclass(frozen=True)
class Source:
    """Where data are and how they are read: the data options of every command, with their help and defaults."""

    data: str = _option(
        "Data: 'digits' (built in); a features file (.npz, .npy, .csv, .parquet); ./mine.py with a load of your own; "
        "or, with --backbone, images: 'cifar100', 'imagenet-r', owner/name on the Hub, a folder of images or of a "
        "saved dataset, an .npz.",
        "digits",
    )
    backbone: str | None = _option(
        "Network that makes features of images: vit-mae-base, dinov2-small, clip-vit-b32, efficientnet-lite0, "
        "identity (for vectors), owner/name on the Hub, a folder with a model, or your own, ./mine.py:load."
    )
    pooling: str | None = _option("Pooling: cls or mean. Presets have a default; other models need one.")
    revision: str | None = _option("Branch, tag or commit of a Hub dataset.")
    backbone_revision: str | None = _option("Branch, tag or commit of a Hub model.")
    splits: str | None = _option("Official splits of a Hub dataset to pool, separated by commas.", unset="all")
    image_column: str | None = _option("Image column of a Hub dataset.")
    label_column: str | None = _option("Label column of a Hub dataset, CSV or Parquet file.")
    feature_column: str | None = _option("Vector column of a CSV or Parquet file, or prefix of its numbered columns.")
    on_corrupt: str = _option("Action on unreadable images: refuse or skip.", "refuse")

    def changed(self) -> dict[str, Any]:
        """``data``, and what is not the default, as a record keeps it: `Source` of these is the same source."""
        kept = [each.name for each in fields(self) if each.name == "data" or getattr(self, each.name) != each.default]
        return {name: getattr(self, name) for name in kept}

    def open(self) -> Dataset | Samples:
        """Vectors as a dataset, images as samples still to go through the backbone."""
        splits = None if self.splits is None else [name.strip() for name in self.splits.split(",")]
        return open_source(
            self.data, revision=self.revision, splits=splits, image_column=self.image_column,
            label_column=self.label_column, feature_column=self.feature_column,
        )  # fmt: skip


def load_data(source: Source, *, device: str = "auto", extract: Callable[..., Extraction] = extract_quietly) -> Dataset:
    """Vectors as they are; images through the backbone, or from the cache.

    ``extract`` is called as `apfl.data.extract.features.extract` is, by which a caller can show how far it has got.
    """
    opened, backbone = source.open(), source.backbone
    if isinstance(opened, Dataset):
        if backbone not in (None, "identity"):
            raise InputError(f"'{source.data}' holds features already; leave --backbone {backbone} out")
        if source.pooling or source.backbone_revision:
            raise InputError(f"'{source.data}' holds features already; leave --pooling and --backbone-revision out")
        return opened
    result = extract_source(source, opened, extract=extract, device=device)
    assert backbone is not None  # extract_source refuses images without one
    name = f"{opened.name}-{backbone if not Path(backbone).is_dir() else Path(backbone).resolve().name}"
    return replace(load_features(result.path), name=name)


def extract_source(
    source: Source,
    opened: Dataset | Samples,
    path: Path | None = None,
    *,
    extract: Callable[..., Extraction] = extract_quietly,
    **options: Any,
) -> Extraction:
    """What the source holds through its backbone, into ``path`` or the cache."""
    if source.backbone is None:
        raise _needs_backbone(source.data)
    samples = vectors(opened) if isinstance(opened, Dataset) else opened
    network = load_backbone(source.backbone, pooling=source.pooling, revision=source.backbone_revision)
    path = path or cached_file(samples, network, mixed_precision=options.get("mixed_precision", False))
    return extract(samples, network, path, on_corrupt=source.on_corrupt, **options)


def load_dataset(source: str, **options: Any) -> Dataset:
    """Features and labels by name or path: ``digits``, or a file of vectors.

    >>> load_dataset("digits").features.shape
    torch.Size([1797, 64])
    """
    opened = open_source(source, **options)
    if isinstance(opened, Samples):
        raise _needs_backbone(source)
    return opened


def open_source(source: str, **options: Any) -> Dataset | Samples:
    """Vectors as a dataset, images as samples still to go through a backbone.

    Options are ``revision``, ``splits``, ``image_column``, ``label_column`` and ``feature_column``; one that the
    source cannot use is an error.
    """
    load = loader(source)
    parameters = inspect.signature(load).parameters
    given = {name: value for name, value in options.items() if value is not None}
    useless = given.keys() - parameters.keys()
    if useless:
        option = min(useless).replace("_", "-")
        raise InputError(f"--{option} given, which is of no use for '{source}': leave it out")
    takes_source = any(each.default is each.empty for each in parameters.values())  # 'digits' is told by its name alone
    opened = load(source, **given) if takes_source else load(**given)
    if not isinstance(opened, Dataset | Samples):
        raise InputError(f"'{source}' loads as {type(opened).__name__}; its load must return a Dataset or Samples")
    return opened


def _needs_backbone(data: str) -> InputError:
    return InputError(f"'{data}' holds images; name the backbone that makes features of them with --backbone")
