"""The whole protocol in one process, through the bytes that would travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.site import Site
from apfl.federate.terms import Terms

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """What came of it: the clients' model files, and the bytes that went either way."""

    models: list[Path]
    bytes_up: int
    bytes_down: int


def simulate(sites: Sequence[Site], terms: Terms, folder: str | Path) -> Simulated:
    """Describe, contribute, publish, choose, refine: every client answers every message."""
    up = down = 0
    with Coordinator(folder, terms) as server:
        for site in sites:
            sent = site.describe(server.invitation())
            up, down = up + len(sent), down + len(server.invitation())
            _taken(server.describe(sent, site.name))
        agreement = server.settle()
        for site in sites:
            sent = site.statistics(agreement)
            up, down = up + len(sent), down + len(agreement)
            _taken(server.accept(sent, site.name))
        server.publish()
        published = {site.name: server.deliver(site.name) for site in sites}
        down += sum(map(len, published.values()))
        if server.terms.wants_tables:
            for site in sites:
                sent = site.table(agreement, published[site.name])
                up += len(sent)
                _taken(server.table(sent, site.name))
        choice = server.choose()
        models = [site.refine(agreement, published[site.name], choice) for site in sites]
        for site in sites:
            server.confirm(site.name, 1)
    return Simulated(models, up, down + len(choice) * len(sites))


def _taken(receipt: object) -> None:
    if getattr(receipt, "outcome", None) == "refused":
        raise InputError(str(getattr(receipt, "reason", "")))
