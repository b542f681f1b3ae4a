"""Small federations under epsilon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apfl.federate import Coordinator, Site, Terms
from apfl.maths.noise import IntegerRows
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import NAMES, contribute, draw_shard

NEEDS = "needs the privacy extra: pip install 'apfl[privacy]'"
METHOD = APFL(map="landmarks", landmarks="free", normalise="row", d_primary=24, epsilon=4.0, sketch=16)
FIXED = replace(METHOD, beta=1.0, balance=0.5, tau=0.0, weight=1.0)
SIZES = (30, 70, 20, 55)


def private_terms(method: APFL = FIXED, **others: Any) -> Terms:
    given = {"class_names": NAMES, "n_features": 8, "max_rows": 70, **others}
    return Terms("f", method=method, **given)


def private_sites(folder: Path, sizes: tuple[int, ...] = SIZES, start: int = 0) -> list[Site]:
    return [
        Site(folder / "sites", f"site-{k}", draw_shard(n, 10 + k), NAMES, draw_shard(40, 90 + k))
        for k, n in enumerate(sizes, start)
    ]


def begun(folder: Path, sites: list[Site], method: APFL = FIXED, **others: Any) -> Coordinator:
    """A server with the contributions of these sites, and nothing published yet."""
    server = Coordinator(folder / "server", private_terms(method, **others))
    contribute(server, sites)
    return server


def join(server: Coordinator, site: Site) -> Any:
    agreement = server.settle()
    site.keep_landmarks(agreement, server.landmarks())
    return server.accept(site.statistics(agreement), site.name)


def standardised(noise: np.ndarray, encoding: IntegerRows, sigma: float) -> np.ndarray:
    """Noise over the size that each part should have."""
    sizes = encoding.sizes(sigma)
    return np.concatenate([noise[where] / sizes[name] for name, where in encoding.layout.places.items()])


def need_accounting() -> None:
    pytest.importorskip("dp_accounting", reason=NEEDS)
