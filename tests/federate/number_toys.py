"""Small federations with numbers or labels as targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.federate import Coordinator, Terms
from apfl.federate.numbers.site import NumberSite

TARGETS = ("price", "rent")
SIZES = (30, 70, 20, 55)


def draw_targets(
    n: int, seed: int, target: Target = "regression", *, n_features: int = 5, copies: int = 0, groups: bool = False
) -> Shard:
    """Columns of very different scales, a curve in one of them, and a level of its own for each site."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(n, n_features))
    weights = np.random.default_rng(0).normal(size=(n_features, 2))
    values = drawn @ weights + np.sin(2 * drawn[:, :1]) + rng.normal(size=2) + 0.3 * rng.normal(size=(n, 2))
    values = (values > 0.5).astype(float) if target == "multilabel" else values * [1.0, 50.0] + [0.0, 1000.0]
    rows = drawn * np.resize([1.0, 10.0, 0.1], n_features) + np.resize([0.0, 100.0, 5.0], n_features)
    if copies:
        rows[-copies:], values[-copies:] = rows[:copies], values[:copies]
    codes = torch.from_numpy(rng.integers(n // 3, size=n)) if groups else None
    none = torch.zeros(n, dtype=torch.int64)
    return Shard(torch.from_numpy(rows), none, codes, targets=torch.from_numpy(values), target=target)


def number_terms(target: Target = "regression", **given: object) -> Terms:
    """Three of the sites are enough."""
    terms = {"target": target, "class_names": TARGETS, "quorum": 3, "min_cohort": 2, **given}
    return Terms("f", **terms)  # type: ignore[arg-type]


def number_sites(folder: Path, shards: list[Shard], names: tuple[str, ...] = TARGETS) -> list[NumberSite]:
    """Sites with these rows."""
    return [NumberSite(folder / "sites", f"site-{k}", shard, names) for k, shard in enumerate(shards)]


def settled(server: Coordinator, sites: list[NumberSite]) -> bytes:
    """Describe, spread, settle, contribute; the agreement."""
    for site in sites:
        receipt = server.describe(site.describe(server.invitation()), site.name)
        assert receipt.ok, receipt
    outline = server.outline()
    for site in sites:
        receipt = server.spread(site.spread(outline), site.name)
        assert receipt.ok, receipt
    agreement = server.settle()
    for site in sites:
        site.keep_landmarks(agreement, server.landmarks())
        receipt = server.accept(site.statistics(agreement), site.name)
        assert receipt.ok, receipt
    return agreement


def chosen(server: Coordinator, sites: list[NumberSite], agreement: bytes) -> bytes:
    """Every member's table of every stage; the choice."""
    while server.stage:
        so_far = server.chosen_so_far()
        for site in sites:
            receipt = server.table(site.table(agreement, server.deliver(site.name), so_far), site.name)
            assert receipt.ok, receipt
        server.choose_stage()
    return server.choose()


def probe(n_features: int = 5) -> torch.Tensor:
    """Rows that nobody has."""
    return draw_targets(40, 999, n_features=n_features).features
