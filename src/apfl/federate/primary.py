"""The published primary as a model."""

from __future__ import annotations

from pathlib import Path

import torch

from apfl.errors import InputError
from apfl.federate import publishing
from apfl.federate.fitting import one_stream
from apfl.federate.landmarks import agreed_maps, load_landmarks
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_publication
from apfl.federate.status import nothing_published, status
from apfl.federate.terms import Terms
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel

__all__ = ["primary_model"]


def primary_model(folder: str | Path, path: str | Path) -> DualStream | LandmarkModel:
    """The current primary as a model, written to ``path``: what a new site has before it refines."""
    ledger = Ledger(folder, writer=False)
    try:
        row = ledger.current()
        if row is None:
            raise InputError(nothing_published(status(ledger), folder))
        terms = Terms.from_json(ledger.get("terms") or "")
        published = open_publication(publishing.read(ledger, row), terms)
        landmarks = load_landmarks(ledger, terms)
    finally:
        ledger.close()
    feature_map = agreed_maps(terms, torch.zeros(1, 1), landmarks)[0]
    model = one_stream(feature_map, published.weights, terms.normaliser(), terms.class_names)
    model.save(path)
    return model
