"""Where samples come from: one file for each source, each with a ``load``."""

from __future__ import annotations

from pathlib import Path

from apfl.data import digits, features
from apfl.errors import InputError
from apfl.federation import Dataset

__all__ = ["load_dataset"]


def load_dataset(source: str) -> Dataset:
    """``digits``, or the path of an ``.npz`` file of features.

    >>> load_dataset("digits").features.shape
    torch.Size([1797, 64])
    """
    if source == "digits":
        return digits.load()
    if Path(source).suffix == ".npz":
        return features.load(source)
    raise InputError(f"no data '{source}': give 'digits' or the path of an .npz file with 'features' and 'labels'")
