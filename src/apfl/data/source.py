"""Where data are and how they are read, in words: nothing here reads any, and nothing needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apfl.data.federation import Dataset
    from apfl.data.samples import Samples

__all__ = ["ON_CORRUPT", "Source"]

TARGET_NAMES = ("classification", "regression", "multilabel")
ON_CORRUPT = ("refuse", "skip")  # what to do with an unreadable image or an empty text


def _option(help: str, default: Any = None, *, unset: str = "", allowed: tuple[str, ...] = ()) -> Any:
    """A field with its help on the command line; ``unset`` says what None means, ``allowed`` lists its values."""
    return field(default=default, metadata={"help": help, "unset": unset, "allowed": allowed})


@dataclass(frozen=True)
class Source:
    """Where data are and how they are read: the data options of every command, with their help and defaults.

    >>> Source("scans.csv", label_column="diagnosis").changed()
    {'data': 'scans.csv', 'label_column': 'diagnosis'}
    """

    data: str = _option(
        "Data: 'digits' (built in); a features file (.npz, .npy, .csv, .tsv, .jsonl, .csv.gz, .parquet); ./mine.py "
        "with a load of your own; or, with --backbone, images: 'cifar100', 'imagenet-r', owner/name on the Hub, a "
        "folder of images or of a saved dataset, an .npz; or texts: a table, owner/name on the Hub, a saved dataset.",
        "digits",
    )
    backbone: str | None = _option(
        "Network that makes features of images: vit-mae-base, dinov2-small, clip-vit-b32, efficientnet-lite0; of "
        "texts: all-minilm-l6-v2, paraphrase-multilingual-minilm-l12-v2; identity (for vectors), owner/name on the "
        "Hub, a folder with a model, or your own, ./mine.py:load."
    )
    pooling: str | None = _option(
        "Pooling: cls or mean. Presets and sentence encoders have a default; other models need one."
    )
    revision: str | None = _option("Branch, tag or commit of a Hub dataset.")
    backbone_revision: str | None = _option("Branch, tag or commit of a Hub model.")
    splits: str | None = _option("Official splits of a Hub dataset to pool, separated by commas.", unset="all")
    image_column: str | None = _option("Image column of a Hub dataset.")
    text_column: str | None = _option(
        "Text column of a Hub dataset or a table.", unset="text, or the only one of words"
    )
    label_column: str | None = _option(
        "Label column of a Hub dataset, CSV or Parquet file; several targets or labels: A,B,C."
    )
    target: str | None = _option(
        "What is predicted: classification, regression (numbers) or multilabel (columns of 0 and 1).",
        unset="regression for numbers that are not whole, multilabel for several columns of 0 and 1",
        allowed=TARGET_NAMES,
    )
    feature_column: str | None = _option("Vector column of a CSV or Parquet file, or prefix of its numbered columns.")
    features: str | None = _option(
        "Feature columns of a table, separated by commas; 'mean*' names all that begin so.",
        unset="all columns of numbers but label, client, group, test and id",
    )
    drop: str | None = _option("Columns of a table that are no features, separated by commas.")
    encode: str | None = _option(
        "Encode columns of words and dates and fill gaps of a table: 'auto', from the sums of the clients' training "
        "rows; or the file of an encoding (`apfl encoding settle`).",
        unset="numbers alone, without gaps",
    )
    categories: str | None = _option("With --encode auto, columns whose numbers are names, separated by commas.")
    on_corrupt: str = _option(
        "Action on unreadable images and empty texts: refuse or skip.", "refuse", allowed=ON_CORRUPT
    )

    def changed(self) -> dict[str, Any]:
        """``data``, and what is not the default, as a record keeps it: `Source` of these is the same source."""
        kept = [each.name for each in fields(self) if each.name == "data" or getattr(self, each.name) != each.default]
        return {name: getattr(self, name) for name in kept}

    def open(self, **reading: Any) -> Dataset | Samples:
        """Vectors as a dataset, images and texts as samples still to go through the backbone.

        ``reading``: see `open_source`.
        """
        from apfl.data.load import open_source

        splits = None if self.splits is None else [name.strip() for name in self.splits.split(",")]
        options: dict[str, Any] = {"revision": self.revision, "splits": splits, "image_column": self.image_column}
        options |= {"label_column": self.label_column, "feature_column": self.feature_column}
        options |= {"features": self.features, "drop": self.drop, "text_column": self.text_column}
        options |= {"encode": self.encode, "categories": self.categories, "target": self.target}
        options |= {"for_backbone": self.backbone not in (None, "identity") or None}
        return open_source(self.data, **options | reading)
