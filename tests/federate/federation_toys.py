"""Small federations for the tests of the deployment's core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Publication, Site, Terms
from apfl.federate.messages import Broadcast, open_publication
from apfl.maths.alone import Comparison
from apfl.methods._streams import own_seed
from apfl.methods.apfl import APFL

NAMES = ("ant", "bee", "cat")
FIXED = APFL(map="random", d_primary=40, d_refinement=24, gamma=1.0, beta=1.0, balance=0.5, tau=0.0, normalise="root")
AUTO = APFL(map="random", d_primary=40, d_refinement=24, normalise="root")
LANDMARKS = APFL(d_primary=40, map="landmarks", bits=16, normalise="columns")
PILOT = APFL(d_primary=40, map="landmarks", bits=16, normalise="auto", sketch=16)


def draw_shard(n: int, seed: int, n_features: int = 8, dtype: torch.dtype = torch.float64) -> Shard:
    """Rows with a class structure; every class has at least two of them."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([[0, 0, 1, 1, 2, 2], rng.integers(3, size=n - 6)])
    centres = np.random.default_rng(1).normal(size=(3, n_features))
    rows = centres[labels] + rng.normal(size=(n, n_features))
    return Shard(torch.from_numpy(rows).to(dtype), torch.from_numpy(labels))


def make_sites(folder: Path, sizes: tuple[int, ...] = (30, 70, 20, 55)) -> list[Site]:
    """Sites with fewer and with more rows than columns; each with test rows."""
    return [
        Site(folder / "sites", f"site-{k}", draw_shard(n, 10 + k), NAMES, draw_shard(40, 90 + k))
        for k, n in enumerate(sizes)
    ]


def seeded(folder: Path, seed: int, sizes: tuple[int, ...] = (30, 70, 20, 55)) -> list[Site]:
    """Sites that round as the method's clients do with this seed."""
    sites = make_sites(folder, sizes)
    for k, site in enumerate(sites):
        site.rounding_seed = own_seed(seed, k)
    return sites


def keep_the_primary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No site goes alone: some of these have rows enough by themselves, and their models would be another matter."""
    monkeypatch.setattr(Comparison, "goes_alone", False)


def describe(server: Coordinator, sites: list[Site]) -> bytes:
    """Describe and settle, with landmarks from everyone's moments if there are any; the agreement."""
    for site in sites:
        assert server.describe(site.describe(server.invitation()), site.name).ok
    if server.draft.pilots:
        pilot(server, sites)
    if server.draft.landmarked:
        outline = server.outline()
        for site in sites if server.spreading else ():
            receipt = server.spread(site.spread(outline), site.name)
            assert receipt.ok, receipt
    agreement = server.settle()
    for site in sites if server.draft.landmarked else ():
        site.keep_landmarks(agreement, server.landmarks())
    return agreement


def pilot(server: Coordinator, sites: list[Site]) -> None:
    """Everyone's statistics and tables of the pilot that chooses the normalisation."""
    trial = server.trial()
    for site in sites:
        receipt = server.pilot_statistics(site.pilot(trial, server.pilot_question()), site.name)
        assert receipt.ok, receipt
    server.pilot_primaries()
    for site in sites:
        receipt = server.pilot_table(site.pilot_table(trial, server.pilot_primaries(site.name)), site.name)
        assert receipt.ok, receipt


def contribute(server: Coordinator, sites: list[Site]) -> bytes:
    """Describe, settle, send statistics; the agreement."""
    agreement = describe(server, sites)
    for site in sites:
        receipt = server.accept(site.statistics(agreement), site.name)
        assert receipt.ok, receipt
    return agreement


def tabulate(server: Coordinator, sites: list[Site]) -> bytes:
    """Everyone's table under the current publication; the choice."""
    agreement = server.settle()
    for site in sites:
        receipt = server.table(site.table(agreement, server.deliver(site.name)), site.name)
        assert receipt.ok, receipt
    return server.choose()


def seen(publication: Publication | None, terms: Terms) -> Broadcast:
    """A publication as a client reads it."""
    assert publication is not None
    return open_publication(publication.data, terms)


def same(a: Broadcast, b: Broadcast) -> bool:
    """Whether two publications say the same, to the last bit, whatever their number."""
    leverages = [each.leverage for each in (a, b) if each.leverage is not None]  # none if every setting is fixed
    assert len(leverages) in (0, 2)
    return (
        torch.equal(a.weights, b.weights)
        and (not leverages or torch.equal(*leverages))
        and torch.equal(a.class_counts, b.class_counts)
        and (a.gamma, a.unit, a.n_samples, a.members) == (b.gamma, b.unit, b.n_samples, b.members)
    )
