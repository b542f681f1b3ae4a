"""Landmarks from a file of public features: the server reads it, the terms name it, sites only see the landmarks.

The server keeps the features in its folder, since landmarks are drawn once the normalisation is known.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from apfl.data.load import load_dataset
from apfl.errors import InputError
from apfl.federate.ledger import Ledger
from apfl.federate.terms import Terms
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN, Spread, spread
from apfl.methods._streams import PUBLIC
from apfl.methods.apfl import LANDMARKS

__all__ = ["keep_public", "named", "public_spread"]

FILE = "public.safetensors"


def named(terms: Terms) -> tuple[Terms, Tensor | None]:
    """The terms with the hash and the rows of the file that they draw landmarks from, and its features.

    Terms that name no file on this machine stay as they are.
    """
    source = terms.method.landmarks
    if source in (*LANDMARKS, PUBLIC):
        return terms, None
    public = load_dataset(source, labels_optional=True)
    n, width = public.features.shape
    if terms.n_features not in (None, width):
        raise InputError(
            f"landmarks={source} has {width} features, the terms state {terms.n_features}: give features of the same "
            "backbone"
        )
    method = replace(terms.method, landmarks=PUBLIC)
    told = replace(terms, method=method, n_features=width, public_sha256=public.sha256, public_rows=n)
    return told, public.features.contiguous()


def keep_public(ledger: Ledger, features: Tensor) -> None:
    """Keep the features in the server's folder; inside a transaction that keeps the draft, too."""
    ledger.put("public_digest", ledger.blobs.put(FILE, {"features": features}))
    ledger.put("public", FILE)


def public_spread(ledger: Ledger, outline: Terms) -> Spread | None:
    """The moments of the public rows, under the agreed normalisation; None if landmarks come from elsewhere."""
    if outline.method.landmarks != PUBLIC:
        return None
    name = ledger.get("public") or FILE
    features = ledger.blobs.tensors(name, ledger.get("public_digest"))["features"]
    rows = outline.normaliser()(features.double())
    return spread(rows, full=len(rows) >= ROWS_FOR_EACH_COLUMN * outline.n_in)
