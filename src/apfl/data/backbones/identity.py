"""No network: vectors are the features."""

from __future__ import annotations

from torch import nn

from apfl.data.backbones import Backbone
from apfl.errors import InputError


def load(*, pooling: str | None = None) -> Backbone:
    """Hand vectors on as they are."""
    if pooling is not None:
        raise InputError(f"--pooling {pooling} given, but 'identity' pools nothing: leave it out")
    return Backbone(
        name="identity",
        takes="vectors",
        weights="none",
        preprocessing={},
        pooling="none",
        module=nn.Identity(),
        prepare=lambda vector: vector,
        forward=lambda batch: batch,
    )
