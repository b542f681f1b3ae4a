"""The one door to data: from what a user gives to a `Dataset`; images and texts go through a backbone, once."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apfl.data.backbones import load_backbone
from apfl.data.extract.features import Extraction, cached_file
from apfl.data.extract.features import extract as extract_quietly
from apfl.data.federation import Dataset, Federation
from apfl.data.in_memory import from_arrays, from_federation, is_table, with_columns, with_identity, write_table
from apfl.data.registry import file_of, is_path
from apfl.data.samples import Samples, vectors
from apfl.data.source import Source
from apfl.data.sources import SOURCES, loader
from apfl.data.sources.features import load as load_features
from apfl.data.sources.hub import holds_images, pooled
from apfl.errors import InputError, unknown
from apfl.maths.encoding import Encoding

__all__ = [
    "IN_MEMORY",
    "Source",
    "extract_source",
    "load_data",
    "load_dataset",
    "load_unlabelled_data",
    "open_source",
    "source_of",
]

IN_MEMORY = "in memory"  # what data without a file are called


def load_data(
    source: Any,
    labels: Any = None,
    *,
    columns: Mapping[str, Any] | None = None,
    name: str = IN_MEMORY,
    device: str = "auto",
    extract: Callable[..., Extraction] = extract_quietly,
    **options: Any,
) -> Dataset:
    """Features and labels, from wherever they are; images and texts go through the backbone, or come from the cache.

    ``source`` is a name or path with ``options`` (the fields of `Source`), a `Source`, an array or DataFrame of
    features with ``labels``, a DataFrame or Hugging Face `Dataset` with a label column, a `Federation`, or a `Dataset`.
    ``columns`` adds columns that name clients, groups or test rows. Records call data in memory ``name``.
    ``extract`` is called as `apfl.data.extract.features.extract` is, by which a caller can show how far it has got.

    >>> load_data([[0.5, 1.0], [1.5, 0.0]], ["cat", "dog"]).class_names
    ('cat', 'dog')
    """
    read = source_of(source, options, name)
    loaded = _as_features(read, _opened(source, read, labels), extract, device)
    return with_identity(with_columns(loaded, columns)) if columns else loaded


def load_unlabelled_data(
    source: Source,
    *,
    device: str = "auto",
    extract: Callable[..., Extraction] = extract_quietly,
    stated: Source | None = None,
    features: Sequence[str] | None = None,
    encoding: Encoding | None = None,
) -> Dataset:
    """Rows to predict: those without labels have no class names.

    ``stated`` has the backbone of images and texts if the source names none. ``features`` are the columns of a table in
    the order of the model; or ``encoding`` makes them.
    """
    through = source
    if source.backbone is None and stated is not None:
        through = replace(source, backbone=stated.backbone, pooling=source.pooling or stated.pooling)
    named = {"features": features, "encode": encoding}
    opened = through.open(labels_optional=True, **{name: given for name, given in named.items() if given is not None})
    if isinstance(opened, Samples):
        source = through
    return _as_features(source, opened, extract, device)


def _as_features(source: Source, opened: Dataset | Samples, extract: Callable[..., Extraction], device: str) -> Dataset:
    """Vectors as they are; images and texts through the backbone, or from the cache."""
    backbone = source.backbone
    if isinstance(opened, Dataset):
        if backbone not in (None, "identity"):
            raise InputError(f"'{source.data}' holds features already; leave --backbone {backbone} out")
        if source.pooling or source.backbone_revision:
            raise InputError(f"'{source.data}' holds features already; leave --pooling and --backbone-revision out")
        return opened
    result = extract_source(source, opened, extract=extract, device=device)
    assert backbone is not None  # extract_source refuses samples without one
    kind = backbone if not Path(backbone).is_dir() else Path(backbone).resolve().name
    return replace(load_features(result.path, labels_optional=not opened.class_names), name=f"{opened.name}-{kind}")


def source_of(data: Any, options: Mapping[str, Any], name: str = IN_MEMORY) -> Source:
    """Where data are and how they are read; data in memory are called ``name``."""
    known = [each.name for each in fields(Source) if each.name != "data"]
    for option in options:
        if option not in known:
            raise unknown("data option", option, known)
    if isinstance(data, Source):
        return replace(data, **options)
    return Source(str(data) if isinstance(data, str | Path) else name, **options)


def _opened(data: Any, read: Source, labels: Any) -> Dataset | Samples:
    """What was given, before a backbone."""
    if labels is None and isinstance(data, Source | str | Path):
        return read.open()
    if labels is None and is_table(data):
        return _from_images(data, read) if holds_images(data) else _from_table(data, read)
    _refuse_options(data, read)
    if labels is not None:
        return from_arrays(read.data, data, labels, {}, read.target)
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Federation):
        return from_federation(read.data, data)
    if isinstance(data, tuple) and len(data) == 2:
        return from_arrays(read.data, *data, {}, read.target)
    raise InputError(
        f"{type(data).__name__} given as data; give a name or path, features with labels, a DataFrame or Dataset with "
        "a label column, or a Federation"
    )


def _refuse_options(data: Any, read: Source) -> None:
    """Options say how to read a file or a table: of no use for rows that are there already."""
    useless = [option for option in read.changed() if option not in ("data", "target")]
    if useless:
        raise InputError(f"{useless[0]} given, which is of no use for {type(data).__name__} in memory: leave it out")


def _from_images(data: Any, read: Source) -> Samples:
    return pooled(read.data, {"all": data}, None, read.image_column, None, read.label_column, None)


def _from_table(data: Any, read: Source) -> Dataset | Samples:
    """As a Parquet file with the same columns: one rule says which columns are features."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{IN_MEMORY}.parquet"
        write_table(data, path)
        try:
            opened = replace(read, data=str(path)).open()
        except InputError as error:
            said = str(error).replace(str(path), f"the table {read.data}").replace(path.name, f"the table {read.data}")
            raise InputError(said) from error
    if isinstance(opened, Samples):
        return replace(opened, name=read.data, where=lambda row: f"the table {read.data}, row {row}")
    return with_identity(replace(opened, name=read.data))


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
        raise _needs_backbone(source.data, opened)
    samples = vectors(opened) if isinstance(opened, Dataset) else opened
    network = load_backbone(source.backbone, pooling=source.pooling, revision=source.backbone_revision)
    path = path or cached_file(
        samples, network, mixed_precision=options.get("mixed_precision", False), device=options.get("device", "auto")
    )
    return extract(samples, network, path, on_corrupt=source.on_corrupt, **options)


def load_dataset(source: str, **options: Any) -> Dataset:
    """Features and labels by name or path: ``digits``, or a file of vectors.

    >>> load_dataset("digits").features.shape
    torch.Size([1797, 64])
    """
    opened = open_source(source, **options)
    if isinstance(opened, Samples):
        raise _needs_backbone(source, opened)
    return opened


def open_source(source: str, **options: Any) -> Dataset | Samples:
    """Vectors as a dataset, images and texts as samples still to go through a backbone.

    Options are ``revision``, ``splits``, ``image_column``, ``text_column``, ``label_column``, ``feature_column``,
    ``features``, ``drop``, ``encode``, ``categories`` and ``target``; one that the source cannot use is an error. With
    ``labels_optional``, rows without labels have no class names, if the source can be without labels. With
    ``for_backbone``, a table that has texts is one of texts.
    """
    load = loader(source)
    parameters = inspect.signature(load).parameters
    given = {name: value for name, value in options.items() if value is not None}
    for way in ("labels_optional", "for_backbone"):
        if way not in parameters:
            given.pop(way, None)
    if given.get("target") == "classification" and "target" not in parameters:
        del given["target"]
    useless = given.keys() - parameters.keys()
    if useless:
        option = min(useless).replace("_", "-")
        raise InputError(f"--{option} given, which is of no use for '{source}': leave it out")
    takes_source = any(each.default is each.empty for each in parameters.values())  # 'digits' is told by its name alone
    opened = load(source, **given) if takes_source else load(**given)
    if not isinstance(opened, Dataset | Samples):
        raise InputError(f"'{source}' loads as {type(opened).__name__}; its load must return a Dataset or Samples")
    return _with_text_of(source, opened) if is_path(source) else opened


def _with_text_of(path: str, opened: Dataset | Samples) -> Dataset | Samples:
    """What a file of the user's own loads: another text of that file is other data."""
    text = file_of(SOURCES.load(path))["sha256"]
    if isinstance(opened, Samples):
        return replace(opened, revision=f"{opened.revision} of {text}")
    return replace(opened, sha256=hashlib.sha256(f"{opened.sha256} of {text}".encode()).hexdigest())


def _needs_backbone(data: str, opened: Dataset | Samples) -> InputError:
    kind = opened.kind if isinstance(opened, Samples) else "vectors"
    return InputError(f"'{data}' holds {kind}; name the backbone that makes features of them with --backbone")
