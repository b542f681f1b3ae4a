"""The published primary as a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from apfl.errors import InputError
from apfl.federate import publishing
from apfl.federate.fitting import one_stream
from apfl.federate.landmarks import agreed_maps, load_landmarks
from apfl.federate.ledger import Ledger, Row
from apfl.federate.messages import open_publication
from apfl.federate.numbers.messages import open_chosen
from apfl.federate.numbers.server import published
from apfl.federate.numbers.shared import stages_of
from apfl.federate.status import nothing_published, status
from apfl.federate.terms import Terms
from apfl.models.additive import AdditiveModel
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel

__all__ = ["primary_model"]


def primary_model(folder: str | Path, path: str | Path) -> DualStream | LandmarkModel | AdditiveModel:
    """The current primary as a model, written to ``path``: what a new site has before it refines."""
    ledger = Ledger(folder, writer=False)
    try:
        row = ledger.current()
        if row is None:
            raise InputError(nothing_published(status(ledger), folder))
        terms = Terms.from_json(ledger.get("terms") or "")
        if terms.numeric:
            return _shared_model(ledger, row, terms, path)
        published = open_publication(publishing.read(ledger, row), terms)
        landmarks = load_landmarks(ledger, terms)
    finally:
        ledger.close()
    feature_map = agreed_maps(terms, torch.zeros(1, 1), landmarks)[0]
    model = one_stream(feature_map, published.weights, terms.normaliser(), terms.class_names)
    model.save(path)
    return model


def _shared_model(ledger: Ledger, row: Row, terms: Terms, path: str | Path) -> AdditiveModel:
    """With columns as targets: the average of the shared models, once it is chosen."""
    landmarks, last = load_landmarks(ledger, terms), ledger.chosen_in(row["number"], stages_of(terms)[-1])
    assert landmarks is not None
    if last is None:
        raise InputError("the models are not chosen yet: run again when the members have sent their tables")
    shared = published(ledger, row, terms, landmarks).shared
    model = shared.blend(open_chosen(last["data"], terms)[2]).shared
    named = replace(model, class_names=list(terms.class_names or ()), about={"target": terms.target})
    named.save(path)
    return named
