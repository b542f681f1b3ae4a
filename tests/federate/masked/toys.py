"""Small masked federations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from apfl.federate import Site, Terms
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import LANDMARKS, NAMES, draw_shard

METHOD = replace(LANDMARKS, normalise="row")
SIZES = (40, 70, 60, 55, 50)  # the largest has as many rows as the terms allow: then the plain step is the same


def masked_terms(method: APFL = METHOD, **others: Any) -> Terms:
    given = {"class_names": NAMES, "n_features": 8, "max_rows": 70, "masked": True, **others}
    return Terms("f", method=method, **given)


def masked_sites(folder: Path, sizes: tuple[int, ...] = SIZES, start: int = 0) -> list[Site]:
    """Sites whose rounding follows from their number."""
    return [
        Site(folder / "sites", f"site-{k}", draw_shard(n, 10 + k), NAMES, draw_shard(40, 90 + k), rounding_seed=k)
        for k, n in enumerate(sizes, start)
    ]
