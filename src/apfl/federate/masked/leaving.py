"""A site that leaves a masked federation: the sum of its cohort goes, and the others send once more, from disk.

The server does not know the site's part, so it cannot subtract it. It takes out the whole sum of the roster, exactly,
with every publication that includes it. The others confirm a roster without the site and sum up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apfl.errors import InputError
from apfl.federate.leaving import Evidence
from apfl.federate.masked.tables import cohorts, write_rosters

if TYPE_CHECKING:
    from apfl.federate.coordinator import Coordinator
    from apfl.federate.secure.roster import Roster

__all__ = ["leave"]


def leave(coordinator: Coordinator, client: str, *, forget: bool) -> Evidence:
    """Take a client's cohort out; with ``forget`` erase the client's name as well."""
    ledger = coordinator.ledger
    coordinator.known(client)
    rosters = cohorts(ledger)
    own = {fingerprint: roster for fingerprint, roster in rosters.items() if client in roster.names}
    if not own:
        raise InputError(f"{client} is on no roster any more; it has left already")
    inside = coordinator.pool.members() if coordinator.settled else {}
    beside = {name for roster in own.values() for name in roster.names}
    members, token = [name for name in inside if name in beside], inside.get(client)
    deleted = _publications_of(coordinator, members)
    holders = tuple(holder for holder in ledger.holders(deleted) if holder != client)
    for fingerprint, roster in own.items():
        _take_out(coordinator, fingerprint, roster, members, client, forget)
    _erase(coordinator, client, [roster for key, roster in rosters.items() if key not in own], forget)
    n_left = len(coordinator.pool.members()) if coordinator.settled else 0
    return Evidence(client, token, 0, n_left, deleted, holders, None, None, None, _remains(coordinator, token))


def _publications_of(coordinator: Coordinator, members: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the publications with any of these clients."""
    return tuple(sorted({row["number"] for name in members for row in coordinator.ledger.publications_with(name)}))


def _erase(coordinator: Coordinator, client: str, left: Sequence[Roster], forget: bool) -> None:
    """Keep the rosters without the client, and nothing of it."""
    ledger = coordinator.ledger
    with ledger.transaction():
        write_rosters(ledger, left)
        if client in ledger.names() and client not in ledger.gone():
            ledger.erase(client, forget=forget)
        files = ledger.restart_pilot()  # what is tried comes from its moments too
    coordinator.restart_pilot(files)
    ledger.scrub()


def _take_out(
    coordinator: Coordinator, fingerprint: str, roster: Roster, members: Sequence[str], client: str, forget: bool
) -> None:
    """Take out the sum of a roster, if there is one."""
    if fingerprint in coordinator.ledger.cohort_sums():
        names = [name for name in members if name in roster.names]
        coordinator.pool.take_out_sum(fingerprint, names, client, forget=forget)


def _remains(coordinator: Coordinator, token: str | None) -> tuple[str, ...]:
    """What stays of the client."""
    remains = []
    if coordinator.agreed.most_rows is not None and not coordinator.draft.private:
        remains.append("the width of the map and the step of the integers, if they followed the rows counted")
    if coordinator.agreed.mean is not None or coordinator.agreed.pilot is not None:
        remains.append("the normalisation, which followed sums of everyone's moments")
    if coordinator.settled and coordinator.draft.method.landmarks == "federation":
        remains.append("the landmarks, drawn from sums of everyone's normalised rows")
    if token is not None and not coordinator.draft.private:  # fresh noise hides the difference
        remains.append(
            "whoever kept the former sum learns this site's part from the difference, if all others send the same again"
        )
    return tuple(remains)
