"""Data in memory as a `Dataset`: arrays, tables and federations. Records know them by the hash of what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset, Federation, Shard
from apfl.data.missing import as_array, missing, refuse_missing
from apfl.data.sources.features import checked_features, coded_labels, plain_column
from apfl.data.targets import read_targets
from apfl.errors import InputError, optional
from apfl.models.predict import array_of

__all__ = ["from_arrays", "from_federation", "is_table", "with_columns", "with_identity", "write_table"]


def from_arrays(
    name: str, features: Any, labels: Any, columns: Mapping[str, Any], target: str | None = None
) -> Dataset:
    """Features (n, l) and labels (n,), or targets (n,) or (n, c) as `read_targets` tells them apart.

    ``columns`` have n entries each, to name clients, groups and test rows.
    """
    where, values = Path(name), _labels(name, labels)
    rows = checked_features(where, array_of(features))
    if len(values) != len(rows):
        raise InputError(f"{len(rows)} rows of features and {len(values)} labels given; there must be one for each row")
    called = [str(each) for each in labels.columns] if hasattr(labels, "columns") else None
    targets = read_targets(name, values, target, called)
    if targets is None:
        coded, class_names = coded_labels(where, values.reshape(-1))
        made = Dataset(name, rows, torch.from_numpy(coded), class_names)
    else:
        made = Dataset(name, rows, targets.codes, targets.names, targets=targets.values, target=targets.kind)
    return with_identity(with_columns(made, columns))


def _labels(name: str, given: Any) -> np.ndarray:
    values = _column(given)
    refuse_missing(f"labels of {name}", values)
    return np.array(values.tolist()) if values.dtype.kind == "O" else values  # strings of pandas, or a mixture


def with_columns(dataset: Dataset, columns: Mapping[str, Any]) -> Dataset:
    """The dataset with more columns, one entry for each row."""
    added: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        array = _column(values)
        column = plain_column(_entries(array)) if array.shape == dataset.labels.shape else None
        if column is None:
            raise InputError(
                f"column '{name}' is {array.dtype} with shape {array.shape}; it must have a number or a text for "
                f"each of the {len(dataset.labels)} rows"
            )
        added[name] = column
    return replace(dataset, columns={**dataset.columns, **added}) if added else dataset


def _column(given: Any) -> np.ndarray:
    return as_array(given if isinstance(given, (list, tuple)) else array_of(given))


def _entries(column: np.ndarray) -> list[Any]:
    """None for what is missing; a date as ISO writes it, because numpy's list of dates may be one of nanoseconds."""
    values = (column.astype(str) if column.dtype.kind in "mM" else column).tolist()
    return [None if gone else value for value, gone in zip(values, missing(column), strict=True)]


def with_identity(dataset: Dataset) -> Dataset:
    """The dataset with the hash of all it holds, by which records tell it from others."""
    digest = hashlib.sha256(dataset.features.contiguous().numpy().tobytes())
    digest.update((dataset.labels if dataset.targets is None else dataset.targets.contiguous()).numpy().tobytes())
    columns = {name: column.tolist() for name, column in sorted(dataset.columns.items())}
    what = [tuple(dataset.features.shape), dataset.class_names, columns]
    digest.update(json.dumps(what if dataset.targets is None else [*what, dataset.target]).encode())
    return replace(dataset, sha256=digest.hexdigest())


def from_federation(name: str, federation: Federation) -> Dataset:
    """All rows of a federation, with the columns ``client``, ``test`` and, if its rows have groups, ``group``."""
    shards = [each[k] for k in range(len(federation.names)) for each in (federation.train, federation.test)]
    features, labels = (torch.cat([getattr(shard, each) for shard in shards]).cpu() for each in ("features", "labels"))
    columns = _origins(federation.names, shards)
    made = Dataset(name, features.float(), labels, federation.class_names, columns)
    parts = [shard.targets for shard in shards if shard.targets is not None]
    if not parts:
        return with_identity(made)
    values = torch.cat(parts).cpu()
    values = values if federation.scale is None else federation.scale.undo(values)
    return with_identity(replace(made, targets=values, target=federation.target))


def _origins(clients: Sequence[str], shards: Sequence[Shard]) -> dict[str, np.ndarray]:
    """Of each row its client, side and group; ``shards`` are each client's training rows, then its test rows."""
    sizes = [len(shard) for shard in shards]
    # As numbers if they are numbers: the clients then keep their order (2 before 10).
    numbers = list(range(len(clients)))
    names: list[Any] = numbers if list(clients) == [*map(str, numbers)] else list(clients)
    columns = {"client": np.repeat(np.repeat(names, 2), sizes), "test": np.repeat([False, True] * len(names), sizes)}
    groups = [shard.groups for shard in shards if shard.groups is not None]
    if len(groups) == len(shards):
        columns["group"] = torch.cat(groups).cpu().numpy()
    return columns


def is_table(data: Any) -> bool:
    """Whether it is a DataFrame of pandas, a `Dataset` of Hugging Face, or a table of pyarrow."""
    return any(hasattr(data, each) for each in ("iloc", "column_names")) and not isinstance(data, Dataset)


def write_table(data: Any, path: Path) -> None:
    """The table as a Parquet file, to be read as any other."""
    arrow, parquet = optional("pyarrow", "tables"), optional("pyarrow.parquet", "tables")
    try:
        parquet.write_table(_arrow(arrow, data), path)
    except InputError:
        raise
    except (arrow.ArrowException, NotImplementedError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(data).__name__} given, of which a column cannot be read ({error}); give columns of numbers, texts "
            "or vectors"
        ) from error


def _arrow(arrow: Any, data: Any) -> Any:
    if hasattr(data, "iloc"):
        return arrow.Table.from_pandas(data.rename(columns=str), preserve_index=False)
    if not hasattr(data, "with_format"):
        return data
    if isinstance(data, dict):
        raise InputError(
            f"{len(data)} splits given ({', '.join(data)}); give one of them, or "
            "datasets.concatenate_datasets of several"
        )
    table = data.with_format("arrow")[:]
    for place, (name, feature) in enumerate(data.features.items()):
        if names := getattr(feature, "names", None):  # a ClassLabel: its numbers are places in this list
            words = [None if code is None else names[code] for code in table.column(name).to_pylist()]
            table = table.set_column(place, name, arrow.array(words))
    return table
