"""The whole protocol in one process, through the bytes that would travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.numbers.site import NumberSite
from apfl.federate.roll import detached
from apfl.federate.site import Site
from apfl.federate.terms import Terms

__all__ = ["Simulated", "payload_bytes", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """What came of it: the clients' model files, and the bytes that went either way.

    ``bytes_up`` and ``bytes_down`` are whole messages and terms. The payload is what `apfl.maths.wire` counts, and what
    a method reports for the same clients: the arrays, without headers.
    """

    models: list[Path]
    bytes_up: int
    bytes_down: int
    payload_up: int
    payload_down: int


@dataclass
class _Traffic:
    """What has gone one way."""

    n_bytes: int = 0
    payload: int = 0

    def message(self, data: bytes) -> bytes:
        self.n_bytes += len(data)
        self.payload += payload_bytes(data)
        return data

    def outline(self, agreement: bytes) -> bytes:
        self.n_bytes += len(agreement)
        return agreement

    def terms(self, agreement: bytes) -> bytes:
        self.n_bytes += len(agreement)
        terms = Terms.from_json(agreement)
        scales = (terms.mean, terms.std, terms.column_std, terms.target_mean, terms.target_std)
        self.payload += 8 * sum(len(each or ()) for each in scales)
        return agreement


def payload_bytes(data: bytes) -> int:
    """Bytes of a message's tensors: all that follows its header, whose length the first eight bytes give."""
    _, data = detached(data)
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def simulate(sites: Sequence[Site], terms: Terms, folder: str | Path) -> Simulated:
    """Describe, spread, contribute, publish, choose, refine: every client answers every message."""
    if terms.masked:
        return _simulate_masked(sites, terms, folder)
    up, down = _Traffic(), _Traffic()
    with Coordinator(folder, terms) as server:
        for site in sites:
            sent = up.message(site.describe(down.terms(server.invitation())))
            _taken(server.describe(sent, site.name))
        if terms.pilots:
            _pilot(server, sites, up, down)
        if terms.landmarked:
            _spread(server, sites, up, down)
        agreement = server.settle()
        for site in sites:
            if terms.landmarked:
                site.keep_landmarks(agreement, down.message(server.landmarks()))
                server.kept_landmarks(site.name)
            sent = up.message(site.statistics(down.terms(agreement)))
            _taken(server.accept(sent, site.name))
        server.publish()
        while server.stage:
            _stage(server, sites, agreement, up, down)
        if server.terms.wants_tables:
            for site in sites:
                sent = up.message(site.table(agreement, server.deliver(site.name)))
                _taken(server.table(sent, site.name))
        choice = server.choose()
        models = []
        for site in sites:  # a site that was sent the publication for its table keeps it; here it is read again
            published = server.deliver(site.name)
            if not server.terms.numeric:
                down.message(published)
            models.append(site.refine(agreement, published, down.message(choice)))
        for site in sites:
            server.confirm(site.name, 1)
    return Simulated(models, up.n_bytes, down.n_bytes, up.payload, down.payload)


def _simulate_masked(sites: Sequence[Site], terms: Terms, folder: str | Path) -> Simulated:
    """The same through masked sums. The payload up is the masked vectors."""
    from apfl.federate.masked.inprocess import MaskedFederation  # needs the flower extra

    with Coordinator(folder, terms) as server:
        federation = MaskedFederation(server, sites)
        models = federation.run()
    return Simulated(models, federation.bytes_up, federation.bytes_down, federation.payload_up, federation.bytes_down)


def _pilot(server: Coordinator, sites: Sequence[Site], up: _Traffic, down: _Traffic) -> None:
    """Everyone's statistics and left-out hits under every normalisation."""
    trial = server.trial()
    for site in sites:
        sent = up.message(site.pilot(down.outline(trial), down.message(server.pilot_question())))
        _taken(server.pilot_statistics(sent, site.name))
    server.pilot_primaries()
    for site in sites:
        sent = up.message(site.pilot_table(trial, down.message(server.pilot_primaries(site.name))))
        _taken(server.pilot_table(sent, site.name))


def _stage(server: Coordinator, sites: Sequence[Site], agreement: bytes, up: _Traffic, down: _Traffic) -> None:
    """Everyone's tables of one stage of the choice; the publication goes along with the first."""
    chosen = server.chosen_so_far()
    for site in sites:
        assert isinstance(site, NumberSite)
        published = server.deliver(site.name)
        down.message(chosen or published)
        sent = up.message(site.table(agreement, published, chosen))
        _taken(server.table(sent, site.name))
    server.choose_stage()


def _spread(server: Coordinator, sites: Sequence[Site], up: _Traffic, down: _Traffic) -> None:
    """Everyone's moments, if landmarks are drawn from them."""
    outline = server.outline()
    for site in sites if server.spreading else ():
        _taken(server.spread(up.message(site.spread(down.outline(outline))), site.name))


def _taken(receipt: object) -> None:
    if getattr(receipt, "outcome", None) == "refused":
        raise InputError(str(getattr(receipt, "reason", "")))
