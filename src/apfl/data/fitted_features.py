"""What a model file says about the features it was fitted to, and whether rows to predict have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apfl.data.backbones import backbone_names
from apfl.data.federation import Dataset
from apfl.data.load import Source
from apfl.data.protocol import Protocol, deal, encoded, feature_names
from apfl.errors import InputError, printable

__all__ = ["about_features", "check_backbone", "named_backbone", "other_backbone"]

DECIDES = ("backbone", "preprocessing", "pooling")  # parts of an extraction's key that make features other features


def about_features(dataset: Dataset, protocol: Protocol, seed: int = 0) -> dict[str, Any]:
    """The names of a table's features, and the encoding or the backbone that made them, if these are known.

    Columns that are still to be encoded are encoded as for the federation of this ``seed``.
    """
    if dataset.raw is not None:
        dataset = encoded(dataset, protocol, deal(dataset, protocol, seed))
    if dataset.encoding is not None:
        return {"feature_names": list(dataset.feature_names), "encoding": dataset.encoding.to_dict()}
    names, key = feature_names(dataset, protocol), dataset.provenance.get("key", {})
    known: dict[str, Any] = {"feature_names": names} if names else {}
    return known | ({"backbone": {part: key[part] for part in DECIDES}} if all(part in key for part in DECIDES) else {})


def named_backbone(about: Mapping[str, Any]) -> Source | None:
    """The backbone that a model file names, if apfl has one of that name: a file must not choose what code is run."""
    try:
        name, pooling = about["backbone"]["backbone"]["name"], about["backbone"]["pooling"]
    except (KeyError, TypeError):
        return None
    if name not in backbone_names():
        return None
    return Source(backbone=name, pooling=pooling if pooling in ("cls", "mean") else None)


def other_backbone(about: Mapping[str, Any], source: Source) -> str:
    """What to say if rows cannot be read, and the file names a backbone that the user must give."""
    if source.backbone is not None or named_backbone(about) is not None:
        return ""
    try:
        name = printable(about["backbone"]["backbone"]["name"], 120)
    except (KeyError, TypeError):
        return ""
    return f"; the model was fitted to features of the backbone '{name}': give it with --backbone"


def check_backbone(about: Mapping[str, Any], dataset: Dataset) -> None:
    """Refuse features of another network than the model was fitted to; what does not say is taken as it is."""
    expected, given = about.get("backbone"), dataset.provenance.get("key")
    if not isinstance(expected, dict) or not isinstance(given, dict):
        return
    for part in DECIDES:
        if expected.get(part) != given.get(part):
            raise InputError(
                f"the model was fitted to features of another network than these: {part} was "
                f"{printable(expected.get(part), 120)}, here it is {printable(given.get(part), 120)}; use the backbone "
                "of the model's features"
            )
