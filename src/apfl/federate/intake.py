"""What the coordinator does with a message that arrives: check it, write it down once, or refuse it with the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from apfl.errors import InputError
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import check, decode
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_description, open_metrics, open_table
from apfl.federate.pool import Pool
from apfl.federate.terms import Description, Terms
from apfl.federate.wire import sha256

__all__ = ["Receipt", "take_contribution", "take_description", "take_metrics", "take_table", "written_down"]

log = logging.getLogger(__name__)

Outcome = Literal["accepted", "duplicate", "withheld", "refused"]


@dataclass(frozen=True)
class Receipt:
    """What became of a message. ``withheld``: accepted, and in the sum once the cohort is complete."""

    outcome: Outcome
    client: str | None
    reason: str = ""
    sha256: str = ""
    n_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether it need not be sent again."""
        return self.outcome != "refused"

    def to_json(self) -> str:
        """The receipt as it travels back."""
        return json.dumps(asdict(self), sort_keys=True)


def written_down(ledger: Ledger, what: str, data: bytes, sender: str | None, take: Callable[[], Receipt]) -> Receipt:
    """What ``take`` makes of the message; if it refuses, the refusal is kept with its reason."""
    try:
        return take()
    except FolderError:
        raise
    except InputError as error:
        digest, reason = sha256(data), str(error)
        with ledger.transaction():
            ledger.write_refusal(sender, what, digest, len(data), reason)
        event = {"event": "refused", "client": sender, "what": what, "reason": reason}
        log.warning(json.dumps(event, sort_keys=True))
        return Receipt("refused", sender, reason, digest, len(data))


def take_description(ledger: Ledger, draft: Terms, terms: Terms | None, data: bytes, sender: str | None) -> Receipt:
    """A client's description; until the terms are settled a new one takes the place of the former."""
    description, digest = open_description(data, draft), sha256(data)
    client = _same(description.client, sender)
    _check_described(ledger, description, draft, terms)
    before = ledger.description_of(client)
    if before is not None and before["sha256"] == digest:
        return Receipt("duplicate", client, "described already", digest, len(data))
    with ledger.transaction():
        ledger.write_description(client, digest, description.n_samples, data)
        ledger.event("described", client, n=description.n_samples, classes=len(description.class_names))
    return Receipt("accepted", client, "", digest, len(data))


def take_contribution(ledger: Ledger, pool: Pool, terms: Terms, data: bytes, sender: str | None) -> Receipt:
    """A contribution: it becomes pending, once."""
    digest = sha256(data)
    known = ledger.contribution(digest)
    if known is not None:
        client = _same(known["client"], sender)
        return Receipt("duplicate", client, "this contribution counts already", digest, len(data))
    if ledger.departed(digest):
        raise InputError("this contribution was taken out when its client left; to come back, make a new one")
    contribution = decode(data, terms)
    client = _same(contribution.client, sender)
    if ledger.contribution_of(client) is not None:
        raise InputError(f"{client} has contributed something else already; it must leave before it can send anew")
    if not contribution.nonce and client in ledger.gone():
        raise InputError(f"{client} has left; to come back, it must make a new contribution")
    described = ledger.description_of(client)
    n = contribution.n_samples
    if described is not None and n > described["n"]:
        raise InputError(f"n contradicts the description: {n} rows, {described['n']} described; describe again")
    check(contribution, terms)
    pool.add(contribution, data)
    return Receipt("accepted", client, "", digest, len(data))


def take_table(ledger: Ledger, terms: Terms, data: bytes, sender: str | None) -> Receipt:
    """A member's table of left-out hits under the current publication."""
    if not terms.wants_tables:
        raise InputError("these terms leave nothing to be chosen by tables")
    table, current = open_table(data, terms), ledger.current()
    client = _same(table.client, sender)
    if current is None or table.number != current["number"]:
        raise InputError(f"a table for publication {table.number}; fetch the current one and send its table")
    before = ledger.table_of(client, table.number)
    if before is not None and before["sha256"] == table.sha256:
        return Receipt("duplicate", client, "this table counts already", table.sha256, len(data))
    if before is not None:
        raise InputError(f"{client} has sent another table for publication {table.number} already")
    contribution = ledger.contribution_of(client)
    if contribution is None or contribution["sha256"] != ledger.members(table.number).get(client):
        raise InputError(f"{client} is not in publication {table.number}; only members' tables count")
    n = contribution["n"]
    if int(table.hits.min()) < 0 or int(table.hits.max()) > n:
        raise InputError(f"a table with entries outside 0 to {n}, the client's rows")
    with ledger.transaction():
        ledger.write_table(client, table.number, table.sha256, n, data)
        ledger.event("table", client, number=table.number, bytes=len(data))
    return Receipt("accepted", client, "", table.sha256, len(data))


def take_metrics(ledger: Ledger, terms: Terms, data: bytes, sender: str | None) -> Receipt:
    """What a client chose to report about its model; the latest counts."""
    metrics = open_metrics(data, terms)
    client = _same(metrics["client"], sender)
    with ledger.transaction():
        ledger.write_metrics(client, metrics["number"], metrics["accuracy"], metrics["n_test"])
        ledger.event("metrics", client, accuracy=metrics["accuracy"], n_test=metrics["n_test"])
    return Receipt("accepted", client, "", sha256(data), len(data))


def _check_described(ledger: Ledger, description: Description, draft: Terms, terms: Terms | None) -> None:
    """A description that would not fit the others' is refused, rather than all of them later."""
    agreed = (terms or draft).n_features
    if agreed is None:
        first = ledger.other_description(description.client)
        agreed = None if first is None else open_description(first["data"], draft).n_features
    if agreed not in (None, description.n_features):
        raise InputError(f"features of width {description.n_features}; the others have {agreed}: use the same backbone")
    strange = set(description.class_names) - set(draft.class_names or description.class_names)
    if strange:
        raise InputError(
            f"class {min(strange)!r} is not among those agreed: {', '.join((draft.class_names or ())[:8])}"
        )


def _same(claimed: str, sender: str | None) -> str:
    """The client's name: the one in the message must be the one that the transport vouches for."""
    if sender is not None and claimed != sender:
        raise InputError(f"a message of client {claimed!r} sent by {sender!r}")
    return claimed
