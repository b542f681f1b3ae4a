"""A client that leaves: afterwards everything is as if it had never joined, and this is shown.

Its statistics are subtracted from the exact sum, every stored publication that includes it is deleted with the tables
made under it, and the primary is published anew: gamma is chosen again, and clients send new tables. What cannot be
undone from here is listed: copies of earlier primaries at other clients, and what the settled terms took from it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.ledger import Row
from apfl.federate.numbers.server import primary_on_widest
from apfl.federate.sums import RunningSum
from apfl.federate.terms import Terms
from apfl.maths.personalise import solve_primary
from apfl.maths.regression import NumberStatistics
from apfl.maths.ridge import Statistics

if TYPE_CHECKING:
    from apfl.federate.coordinator import Coordinator

__all__ = ["Evidence", "leave"]


@dataclass(frozen=True)
class Evidence:
    """What was done when a client left, and how that is known."""

    client: str
    sha256: str | None  # of what it had contributed
    n_samples: int
    members: int  # clients that remain
    deleted: tuple[int, ...]  # publications that included it
    holders: tuple[str, ...]  # clients that still hold one of those
    publication: int | None  # the new one
    difference: float | None  # of the primary to one recomputed from the others' contributions, where they are kept
    residual: float | None  # |(S + gamma I) G - B| / |B| of the new primary
    remains: tuple[str, ...]  # what the terms still owe to it

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """In words."""
        what = "had not contributed" if self.sha256 is None else f"{self.n_samples} rows, {self.sha256[:12]}"
        lines = [f"{self.client} left ({what}); {self.members} clients remain"]
        if self.deleted:
            lines.append(f"deleted publications that included it: {', '.join(map(str, self.deleted))}")
        if self.publication is not None:
            lines.append(f"published anew as {self.publication}")
        if self.difference is not None:
            lines.append(f"difference to recomputing from the remaining contributions: {self.difference:.1e}")
        elif self.residual is not None:
            lines.append(f"residual of the normal equations without it: {self.residual:.1e}")
        if self.holders:
            lines.append(f"still hold a primary that includes it, until they refit: {', '.join(self.holders)}")
        return lines + [f"not undone: {each}" for each in self.remains]


def leave(coordinator: Coordinator, client: str, data: bytes | None, *, forget: bool) -> Evidence:
    """Take a client out; with ``forget`` erase its name as well."""
    ledger = coordinator.ledger
    coordinator.known(client)
    row = ledger.contribution_of(client)
    if row is None and not forget and ledger.is_gone(client):
        raise InputError(f"{client} has left already")
    remains = _remains_of(coordinator, client)
    publications = ledger.publications_with(client)
    deleted = tuple(publication["number"] for publication in publications)
    holders = tuple(holder for holder in ledger.holders(deleted) if holder != client)
    difference, sha256, n = None, None, 0
    if row is None:
        _erase(coordinator, client, forget)
    else:
        sha256, n = row["sha256"], row["n"]
        files = [each["blob"] for each in (*publications, row) if each["blob"]]
        difference = _take_out(coordinator, row, data, files, forget)
    ledger.scrub()
    publication, residual = _publish_without(coordinator) if deleted else (None, None)
    n_members = len(coordinator.pool.members()) if ledger.get("terms") else 0
    return Evidence(
        client, sha256, n, n_members, deleted, holders, publication, difference, residual, remains
    )  # fmt: skip


def _erase(coordinator: Coordinator, client: str, forget: bool) -> None:
    """Remove a client that has contributed nothing."""
    ledger = coordinator.ledger
    described = ledger.description_of(client) is not None
    with ledger.transaction():
        ledger.erase(client, forget=forget)
        files = ledger.restart_pilot() if described else []  # what is tried comes from its moments too
    coordinator.restart_pilot(files)


def _publish_without(coordinator: Coordinator) -> tuple[int | None, float | None]:
    """The number of the publication that replaces those with the client, and how well its primary is solved."""
    if not coordinator.ready():
        return None, None
    number = coordinator.publish().number
    if coordinator.terms.private:  # the equations without noise are nobody's to see
        return number, None
    return number, _residual(coordinator.pool.running(), coordinator.terms)


def _take_out(coordinator: Coordinator, row: Row, data: bytes | None, files: list[str], forget: bool) -> float | None:
    """Remove a contribution; the difference to a recomputation, where that can be had."""
    ledger, pool, client = coordinator.ledger, coordinator.pool, row["client"]
    if not row["folded"]:
        with ledger.transaction():
            ledger.take_out(client)
            ledger.erase(client, forget=forget)
        ledger.blobs.remove(files)
        return None
    running, fresh = pool.without(client, data), pool.recomputed(client)
    difference = None if fresh is None else _difference(running, fresh, coordinator.terms)
    with pool.replaced(running, files):
        ledger.take_out(client)
        ledger.erase(client, forget=forget)
    return difference


def _remains_of(coordinator: Coordinator, client: str) -> tuple[str, ...]:
    """What the terms keep of a client that described itself before they were fixed."""
    fixed = coordinator.agreed.settled or coordinator.agreed.outlined
    if not fixed or coordinator.ledger.description_of(client) is None:
        return ()
    return _remains(coordinator.draft, coordinator.agreed)


def _remains(draft: Terms, agreed: Terms) -> tuple[str, ...]:
    """What the terms took from the descriptions, and landmarks from moments, unless they are still to be drawn.

    It stays, or every model would change its shape.
    """
    open_terms = {
        "the list of classes": draft.class_names is None,
        "the width of the map, which followed the number of rows described": draft.method.d_primary == "auto"
        and not draft.private,
        "the normalisation, which followed the moments described": draft.method.normalise == "auto"
        and not draft.numeric
        and agreed.pilot is None,
        "the normalisation, which followed the moments described and the left-out hits of the pilot": agreed.pilot
        is not None,
        "the most rows of one client, which followed the numbers of rows described": draft.max_rows is None
        and draft.max_share < 1,
        "mean and std of the features": agreed.mean is not None,
        "the landmarks, drawn from sums of everyone's normalised rows": draft.landmarked
        and draft.method.landmarks == "federation"
        and agreed.settled,
        "the step of the integers, which followed the numbers of rows described": draft.landmarked
        and not (draft.private or draft.numeric),
        "mean and std of the targets": agreed.target_mean is not None,
        "its part in everyone's sum, for members that keep the former one beside the new one": draft.numeric
        and agreed.settled,
    }
    return tuple(what for what, was_open in open_terms.items() if was_open)


def _difference(a: RunningSum, b: RunningSum, terms: Terms) -> float | None:
    """Between the primaries of two sums, relative; none if the sums are the same to the last bit."""
    if a == b:
        return 0.0
    if not b.n_samples:
        return None
    one, other = (_primary(each.statistics(), terms)[0] for each in (a, b))
    return float((one - other).norm() / other.norm())


def _primary(stats: Statistics, terms: Terms) -> tuple[Tensor, float]:
    """The primary of a sum and its ridge; with columns as targets, that on the widest map."""
    if isinstance(stats, NumberStatistics):
        on_widest = primary_on_widest(stats, terms)
        return on_widest.weights, on_widest.gamma
    primary = solve_primary(stats, terms.method.gamma)
    return primary.weights, primary.gamma


def _residual(running: RunningSum, terms: Terms) -> float:
    """|(S + gamma I) G - B| / |B|: how well the primary solves the equations without the client."""
    stats = running.statistics()
    weights, gamma = _primary(stats, terms)
    left = torch.addmm(stats.crosscorrelation, stats.autocorrelation, weights, beta=-1)
    left += gamma * weights
    return float(left.norm() / stats.crosscorrelation.norm())
