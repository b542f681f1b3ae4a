"""A folder of images or texts that the library ``datasets`` wrote with ``save_to_disk``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apfl.data.samples import Samples
from apfl.data.sources import Match
from apfl.data.sources.hub import from_folder, is_saved, pooled

READS = "a folder of a saved dataset"


def accepts(source: str) -> Match:
    """A folder with the files that ``save_to_disk`` writes."""
    return Match.CONTENT if source and is_saved(Path(source)) else Match.NO


def load(
    source: str | Path,
    *,
    image_column: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    splits: Sequence[str] | None = None,
) -> Samples:
    """The splits, pooled."""
    path = Path(source)
    return pooled(path.resolve().name, *from_folder(path), image_column, text_column, label_column, splits)
