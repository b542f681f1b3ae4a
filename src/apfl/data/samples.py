"""Labelled samples that are still to go through a backbone: read one at a time, never all in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apfl.data.federation import Dataset
from apfl.data.sources.features import RESERVED
from apfl.errors import InputError, optional

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Samples", "decode", "vectors"]


@dataclass(frozen=True, eq=False)
class Samples:
    """What a backbone is fed with. ``fetch`` is called in row order, ``decode`` on many threads."""

    name: str
    kind: str  # "images" or "vectors"
    revision: str  # changes when the data do
    labels: np.ndarray  # (n,), int64, 0 to c - 1
    class_names: tuple[str, ...]
    fetch: Callable[[int], Any]  # the stored form of a row: a path, bytes, an array
    decode: Callable[[Any], Any]  # the sample itself: an RGB image or a vector
    where: Callable[[int], str]  # how a person finds the row
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # splits and columns that were chosen

    def __len__(self) -> int:
        return len(self.labels)


def vectors(dataset: Dataset) -> Samples:
    """A dataset that holds features already, to be written to a file of features."""
    if dataset.targets is not None:
        raise InputError(
            f"{dataset.name} has {dataset.target} targets, and a file of features has classes; use it as it is"
        )
    # A column that is a feature too would name the clients in the file, and stay among their features.
    columns = {name: column for name, column in dataset.columns.items() if name not in dataset.feature_names}
    for name in RESERVED:
        if name in columns:
            raise InputError(
                f"{dataset.name} has a column '{name}', which means something else in a file of features; "
                "rename it, or remove it"
            )
    return Samples(
        name=dataset.name,
        kind="vectors",
        revision=dataset.sha256 or "unknown",
        labels=dataset.labels.numpy(),
        class_names=dataset.class_names,
        fetch=lambda row: dataset.features[row],
        decode=lambda vector: vector,
        where=lambda row: f"{dataset.name}, row {row}",
        columns=columns,
    )


def decode(stored: Path | bytes | np.ndarray) -> Image:
    """An upright RGB image of 8 bits from a file, its bytes or its pixels; raises whatever Pillow raises."""
    pil = optional("PIL.Image", "hub")
    if isinstance(stored, np.ndarray):
        image: Image = pil.fromarray(stored)
        return image.convert("RGB")
    with pil.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored) as opened:
        opened.load()
        image = optional("PIL.ImageOps", "hub").exif_transpose(opened)
    if image.mode.startswith("I;16"):
        # Pillow would clip 16 bits at 255 and leave a white image: keep the upper byte instead.
        image = pil.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise InputError(f"its pixels are 32-bit numbers (mode {image.mode}) of unknown range; save it with 8 bits")
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparency in a form that RGB alone cannot take
    return image.convert("RGB")
