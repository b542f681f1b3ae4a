"""A site that leaves a masked federation: the sum of its cohort goes, and the others send once more, from disk.

The server does not know the site's part, so it cannot subtract it. It takes out the whole sum of the roster, exactly,
with every publication that includes it. The others confirm a roster without the site and sum up again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apfl.errors import InputError
from apfl.federate.leaving import Evidence
from apfl.federate.masked.tables import cohorts, write_rosters

if TYPE_CHECKING:
    from apfl.federate.coordinator import Coordinator

__all__ = ["leave"]


def leave(coordinator: Coordinator, client: str, *, forget: bool) -> Evidence:
    """Take a client's cohort out; with ``forget`` erase the client's name as well."""
    ledger = coordinator.ledger
    coordinator.known(client)
    rosters = cohorts(ledger)
    inside = coordinator.pool.members() if coordinator.settled else {}
    own = [fingerprint for fingerprint, roster in rosters.items() if client in roster.names]
    if not own:
        raise InputError(f"{client} is on no roster any more; it has left already")
    members = [name for name in inside if any(name in rosters[each].names for each in own)]
    deleted = tuple(sorted({row["number"] for name in members for row in ledger.publications_with(name)}))
    holders = tuple(holder for holder in ledger.holders(deleted) if holder != client)
    token = inside.get(client)
    for fingerprint in own:
        if fingerprint in ledger.cohort_sums():
            names = [name for name in members if name in rosters[fingerprint].names]
            coordinator.pool.take_out_sum(fingerprint, names, client, forget=forget)
    with ledger.transaction():
        write_rosters(ledger, [roster for key, roster in rosters.items() if key not in own])
        if client in ledger.names() and client not in ledger.gone():
            ledger.erase(client, forget=forget)
    ledger.scrub()
    n_left = len(coordinator.pool.members()) if coordinator.settled else 0
    return Evidence(client, token, 0, n_left, deleted, holders, None, None, None, _remains(coordinator, token))


def _remains(coordinator: Coordinator, token: str | None) -> tuple[str, ...]:
    """What stays of the client."""
    remains = []
    if coordinator.agreed.most_rows is not None:
        remains.append("the width of the map, if it followed the number of rows counted")
    if coordinator.settled and coordinator.draft.method.landmarks == "federation":
        remains.append("the landmarks, drawn from sums of everyone's normalised rows")
    if token is not None:
        remains.append(
            "whoever kept the former sum learns this site's part from the difference, if all others send the same again"
        )
    return tuple(remains)
