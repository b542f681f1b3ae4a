"""What the coordinator does with a message that arrives: check it, write it down once, or refuse it with the reason."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from apfl.errors import InputError, printable
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import Contribution, check, decode
from apfl.federate.landmarks import open_spread
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_description, open_metrics, open_table
from apfl.federate.numbers.messages import open_spread as open_number_spread
from apfl.federate.pool import Pool
from apfl.federate.terms import FEWEST_SHARING, Description, Terms
from apfl.federate.wire import sha256

__all__ = [
    "Receipt",
    "leave_out",
    "same_client",
    "take_contribution",
    "take_description",
    "take_metrics",
    "take_rejoin",
    "take_spread",
    "take_table",
    "written_down",
]

log = logging.getLogger(__name__)

# What reading a message may raise; anything else (the disk, the memory, the ledger) is nobody's message to blame for.
UNREADABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

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
    """What ``take`` makes of the message; if it refuses, the refusal is kept with its reason.

    If a check stumbles over numbers that nobody thought of, that is a refusal as well: it costs the sender only.
    """
    try:
        return take()
    except FolderError:
        raise
    except UNREADABLE as error:
        digest, reason = sha256(data), _why(error)
        with ledger.transaction(decisive=False):
            ledger.write_refusal(sender, what, digest, len(data), reason)
        event = {"event": "refused", "client": sender, "what": what, "reason": reason}
        log.warning(json.dumps(event, sort_keys=True))
        return Receipt("refused", sender, reason, digest, len(data))


def _why(error: Exception) -> str:
    """Why a message is refused, in a line."""
    if isinstance(error, InputError):
        return printable(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"it cannot be read ({type(error).__name__} in {Path(where.filename).name}, line {where.lineno})"


def take_description(ledger: Ledger, draft: Terms, terms: Terms | None, data: bytes, sender: str | None) -> Receipt:
    """A client's description; until the terms are settled a new one takes the place of the former."""
    description, digest = open_description(data, draft), sha256(data)
    client = same_client(description.client, sender)
    _check_described(description, draft, terms)
    before = ledger.description_of(client)
    if before is not None and before["sha256"] == digest:
        return Receipt("duplicate", client, "described already", digest, len(data))
    with ledger.transaction():
        ledger.write_description(client, digest, description.n_samples, data)
        ledger.event("described", client, n=description.n_samples, classes=len(description.class_names))
    return Receipt("accepted", client, "", digest, len(data))


def leave_out(ledger: Ledger, odd: Sequence[tuple[Description, str]]) -> None:
    """Refuse descriptions that cannot be settled with the others', each for its reason; inside a transaction."""
    for each, reason in odd:
        row = ledger.description_of(each.client)
        assert row is not None
        ledger.write_refusal(each.client, "description", row["sha256"], row["bytes"], reason)
        ledger.drop_description(each.client)
        log.warning(json.dumps({"event": "left out", "client": each.client, "reason": reason}, sort_keys=True))


def take_spread(ledger: Ledger, outline: Terms | None, terms: Terms | None, data: bytes, sender: str | None) -> Receipt:
    """The moments of a client that described itself; until landmarks are drawn new ones replace the former."""
    if outline is None or outline.spread is None:
        raise InputError("these terms draw no landmarks from moments, or not yet")
    if terms is not None:
        raise InputError("the landmarks are drawn already; these moments come too late, and are not needed")
    opened = open_number_spread if outline.numeric else open_spread
    spread, digest = opened(data, outline), sha256(data)
    client = same_client(spread.client, sender)
    described = ledger.description_of(client)
    if described is None or spread.n_samples > described["n"]:
        told = "none" if described is None else str(described["n"])
        raise InputError(f"n contradicts the description: moments of {spread.n_samples} rows, {told} described")
    before = ledger.spread_of(client)
    if before is not None and before["sha256"] == digest:
        return Receipt("duplicate", client, "these moments count already", digest, len(data))
    with ledger.transaction():
        ledger.write_spread(client, digest, spread.n_samples, data)
        ledger.event("spread", client, n=spread.n_samples, bytes=len(data))
    return Receipt("accepted", client, "", digest, len(data))


def take_contribution(
    ledger: Ledger, pool: Pool, draft: Terms, terms: Terms, data: bytes, sender: str | None
) -> Receipt:
    """A contribution: it becomes pending, once."""
    known = _counts_already(ledger, data, sender)
    if known is not None:
        return known
    contribution = decode(data, terms)
    client = same_client(contribution.client, sender)
    if ledger.contribution_of(client) is not None:
        raise InputError(f"{client} has contributed something else already; it must leave before it can send anew")
    if not contribution.nonce and ledger.is_gone(client):
        raise InputError(f"{client} has left; to come back, it must make a new contribution")
    described = ledger.description_of(client)
    n = contribution.n_samples
    if described is not None and n > described["n"]:
        raise InputError(f"n contradicts the description: {n} rows, {described['n']} described; describe again")
    check(contribution, terms, pool.landmarks)
    if ledger.is_gone(client):
        _check_growth(ledger, draft, contribution)
    pool.add(contribution, data)
    return Receipt("accepted", client, "", contribution.sha256, len(data))


def take_rejoin(
    ledger: Ledger, pool: Pool, draft: Terms, terms: Terms, data: bytes, sender: str | None, former: bytes | None
) -> Receipt:
    """A contribution in place of the client's former one, which is taken out in the same transaction."""
    known = _counts_already(ledger, data, sender)
    if known is not None:
        return known
    contribution = decode(data, terms)
    client = same_client(contribution.client, sender)
    if ledger.contribution_of(client) is None:
        raise InputError(f"{client} has no contribution here that another could replace")
    check(contribution, terms, pool.landmarks)
    _check_growth(ledger, draft, contribution)
    _check_others_suffice(pool, terms, client)
    pool.exchange(contribution, data, former)
    return Receipt("accepted", client, "", contribution.sha256, len(data))


def _check_growth(ledger: Ledger, draft: Terms, contribution: Contribution) -> None:
    """A client that rejoins or returns has no more rows than it has here, or than its share of all rows there are now.

    The settled cap is that of one who comes later: it would be more than the share of one who was among those counted.
    """
    rows = {row["client"]: row["n"] for folded in (True, False) for row in ledger.contributions(folded=folded)}
    former, share, n = rows.pop(contribution.client, 0), draft.max_share, contribution.n_samples
    if draft.max_rows is not None or share == 1 or len(rows) + 1 < FEWEST_SHARING:  # as at the first contribution
        return
    most = max(former, int(share / (1 - share) * sum(rows.values())))
    if n > most:
        raise InputError(
            f"{n} rows in place of {former}; with the {sum(rows.values())} rows of the others at most {most} may be of "
            f"one client (max_share {share:g}): rejoin with that many rows or fewer, or when the others have more"
        )


def _check_others_suffice(pool: Pool, terms: Terms, client: str) -> None:
    """Refuse to take a member out if nothing could be published until its cohort is complete."""
    members, waiting = pool.members(), {*pool.pending(), client}
    n_others = len(members) - 1
    if client in members and n_others < terms.quorum and pool.holds_back(len(waiting)):
        raise InputError(
            f"nobody would have a primary: {client} would wait for a cohort of {terms.min_cohort} "
            f"({len(waiting)} with it), and only {n_others} of the {terms.quorum} clients that a publication needs "
            f"would remain. Its former rows stay; rejoin after late sites ({terms.min_cohort - len(waiting)} or more)"
        )


def _counts_already(ledger: Ledger, data: bytes, sender: str | None) -> Receipt | None:
    """The receipt of a contribution that is here; one that was taken out is refused."""
    digest = sha256(data)
    known = ledger.contribution(digest)
    if known is not None:
        client = same_client(known["client"], sender)
        return Receipt("duplicate", client, "this contribution counts already", digest, len(data))
    if ledger.departed(digest):
        raise InputError("this contribution was taken out when its client left; to come back, make a new one")
    return None


def take_table(ledger: Ledger, terms: Terms, data: bytes, sender: str | None) -> Receipt:
    """A member's table of left-out hits under the current publication."""
    if not terms.wants_tables:
        raise InputError("these terms leave nothing to be chosen by tables")
    table, current = open_table(data, terms), ledger.current()
    client = same_client(table.client, sender)
    if current is None or table.number != current["number"]:
        raise InputError(f"a table for publication {table.number}; fetch the current one and send its table")
    before = ledger.table_of(client, table.number)
    if before is not None and before["sha256"] == table.sha256:
        return Receipt("duplicate", client, "this table counts already", table.sha256, len(data))
    if before is not None:
        raise InputError(f"{client} has sent another table for publication {table.number} already")
    contribution = ledger.contribution_of(client)
    if contribution is None or contribution["sha256"] != ledger.member(table.number, client):
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
    client = same_client(metrics["client"], sender)
    with ledger.transaction():
        ledger.write_metrics(client, metrics["number"], metrics["accuracy"], metrics["n_test"])
        ledger.event("metrics", client, accuracy=metrics["accuracy"], n_test=metrics["n_test"])
    return Receipt("accepted", client, "", sha256(data), len(data))


def _check_described(description: Description, draft: Terms, terms: Terms | None) -> None:
    """A description that contradicts what is agreed is refused; what is still open the clients settle together."""
    agreed = (terms or draft).n_features
    if agreed not in (None, description.n_features):
        raise InputError(f"features of width {description.n_features}; the others have {agreed}: use the same backbone")
    if draft.max_rows is not None and description.n_samples > draft.max_rows:
        raise InputError(f"{description.n_samples} rows described; one client contributes at most {draft.max_rows}")
    if draft.numeric:
        _check_columns(description, draft)
        return
    strange = set(description.class_names) - set(draft.class_names or description.class_names)
    if strange:
        raise InputError(
            f"class {min(strange)!r} is not among those agreed: {', '.join((draft.class_names or ())[:8])}"
        )


def _check_columns(description: Description, draft: Terms) -> None:
    """The columns of Y must be those of the terms."""
    given, agreed = set(description.class_names), set(draft.class_names or ())
    if given != agreed:
        raise InputError(
            f"target columns {printable(', '.join(sorted(given)[:8]))} described; the terms have "
            f"{', '.join((draft.class_names or ())[:8])}: all sites need the same"
        )


def same_client(claimed: str, sender: str | None) -> str:
    """The client's name: the one in the message must be the one that the transport vouches for."""
    if sender is not None and claimed != sender:
        raise InputError(f"a message of client {claimed!r} sent by {sender!r}")
    return claimed
