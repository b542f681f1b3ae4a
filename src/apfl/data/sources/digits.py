"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, 10 classes, shipped with the library."""

from __future__ import annotations

import hashlib

import torch

from apfl.data.federation import Dataset


def load() -> Dataset:
    """The pixels, divided by 16, are the features."""
    from sklearn.datasets import load_digits  # here, because scikit-learn takes a second to import

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.data / 16).to(torch.float32)
    digest = hashlib.sha256(bunch.data.tobytes() + bunch.target.tobytes()).hexdigest()
    names = tuple(str(name) for name in bunch.target_names)
    return Dataset("digits", pixels, torch.from_numpy(bunch.target).long(), names, sha256=digest)
