"""What a federation has come to: the published primary, and who it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from apfl.errors import InputError
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_publication
from apfl.federate.status import status_of
from apfl.federate.terms import Terms
from apfl.models.dual_stream import DualStream

__all__ = ["primary_model", "summary"]


def summary(folder: str | Path) -> dict[str, Any]:
    """Members, rows, settings and reported accuracies of the current publication."""
    status = status_of(folder)
    latest = next((each for each in status["publications"] if each["number"] == status["current"]), None)
    if latest is None:
        raise InputError(f"nothing is published yet ({status['phase']}); first: apfl federate run {folder}")
    reported = {row["name"]: row["accuracy"] for row in status["clients"] if row["measured"] == latest["number"]}
    told = {
        "federation": status["federation"], "publication": latest["number"], "members": latest["members"],
        "rows": latest["n"], "gamma": latest["gamma"], "width": status["terms"]["method"]["d_primary"],
        "classes": status["terms"]["class_names"], "sha256": latest["sha256"],
    }  # fmt: skip
    if reported:
        told["accuracy"] = [f"{name} {value:.4f}" for name, value in sorted(reported.items())]
        told["accuracy_client_mean"] = sum(reported.values()) / len(reported)
    return told


def primary_model(folder: str | Path, path: str | Path) -> DualStream:
    """The current primary as a model, written to ``path``: what a new site has before it refines."""
    number = summary(folder)["publication"]
    ledger = Ledger(folder, writer=False)
    try:
        row = ledger.row("SELECT blob FROM publications WHERE number = ?", number)
        assert row is not None
        terms = Terms.from_json(ledger.get("terms") or "")
        published = open_publication(ledger.blobs.read(row["blob"]), terms)
    finally:
        ledger.close()
    model = DualStream(
        terms.maps(torch.zeros(1, 1))[0], published.weights, normaliser=terms.normaliser(),
        class_names=terms.class_names,
    )  # fmt: skip
    model.save(path)
    return model
