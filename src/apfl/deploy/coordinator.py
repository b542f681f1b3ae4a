"""The server's side of a federation: it takes bytes, checks them, adds them, and publishes.

Everything it knows is in its ledger, so it can be killed at any moment and made again from the folder alone; nobody
who has answered is asked again. It needs no network: a transport hands it what arrived.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from apfl.deploy import leaving
from apfl.deploy.contribution import check, decode
from apfl.deploy.ledger import Ledger
from apfl.deploy.messages import open_description, open_metrics, open_table, seal_choice, seal_publication
from apfl.deploy.pool import Pool
from apfl.deploy.status import status
from apfl.deploy.terms import Terms, settle
from apfl.deploy.wire import sha256
from apfl.errors import InputError, unknown
from apfl.gcv import feature_energy
from apfl.leaveout import leverage_sketch
from apfl.personal import solve_primary

__all__ = ["Coordinator", "Publication", "Receipt"]

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


@dataclass(frozen=True, eq=False)
class Publication:
    """A published primary stream; ``data`` is what clients are sent."""

    number: int
    data: bytes
    members: tuple[str, ...]
    n_samples: int
    gamma: float


class Coordinator:
    """One federation in one folder; ``terms`` are needed the first time, and must agree with the folder after that."""

    def __init__(self, folder: str | Path, terms: Terms | None = None, *, wait: float = 0.0) -> None:
        self.ledger = Ledger(folder, wait=wait)
        try:
            self.draft = self._draft(terms)
        except BaseException:
            self.close()
            raise
        settled = self.ledger.get("terms")
        self._terms = None if settled is None else Terms.from_json(settled)
        self._pool = None if self._terms is None else Pool(self.ledger, self._terms)

    def close(self) -> None:
        """Let go of the folder."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- agreeing

    def invitation(self) -> bytes:
        """The draft, for clients to describe themselves under."""
        return self.draft.to_json().encode()

    def describe(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's description. ``sender`` is the name that the transport vouches for, here and below."""

        def take(digest: str) -> Receipt:
            description = open_description(data, self.draft)
            client = _same(description.client, sender)
            before = self.ledger.row("SELECT sha256 FROM descriptions WHERE client = ?", client)
            if before is not None and before["sha256"] == digest:
                return Receipt("duplicate", client, "described already", digest, len(data))
            with self.ledger.transaction():
                self.ledger.know(client)
                self.ledger.db.execute("DELETE FROM descriptions WHERE client = ?", (client,))
                self.ledger.insert(
                    "descriptions", client=client, sha256=digest, n=description.n_samples, bytes=len(data), data=data,
                    received=time.time(),
                )  # fmt: skip
                self.ledger.event("described", client, n=description.n_samples, classes=len(description.class_names))
            return Receipt("accepted", client, "", digest, len(data))

        return self._taken("description", data, sender, take)

    def settle(self) -> bytes:
        """Fix the terms from the descriptions at hand, once; afterwards, the terms that were fixed."""
        if self._terms is None:
            found = self.ledger.rows("SELECT data FROM descriptions ORDER BY client")
            if len(found) < self.draft.quorum:
                raise InputError(f"{len(found)} clients have described themselves; the quorum is {self.draft.quorum}")
            terms = settle(self.draft, [open_description(row["data"], self.draft) for row in found])
            with self.ledger.transaction():
                self.ledger.put("terms", terms.to_json())
                self.ledger.event("settled", width=terms.width, classes=terms.n_classes, digest=terms.digest)
            self._terms, self._pool = terms, Pool(self.ledger, terms)
        return self._terms.to_json().encode()

    @property
    def terms(self) -> Terms:
        """The settled terms."""
        if self._terms is None:
            raise InputError("the terms are not settled yet: clients must describe themselves first")
        return self._terms

    @property
    def pool(self) -> Pool:
        """Contributions and their sum."""
        if self._pool is None:
            raise InputError("the terms are not settled yet: clients must describe themselves first")
        return self._pool

    # --------------------------------------------------------------------------------------- contributing

    def accept(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a contribution: checked, written down, counted once."""

        def take(digest: str) -> Receipt:
            known = self.ledger.row("SELECT client FROM contributions WHERE sha256 = ?", digest)
            if known is not None:
                client = _same(known["client"], sender)
                return Receipt("duplicate", client, "this contribution counts already", digest, len(data))
            if self.ledger.row("SELECT 1 FROM departed WHERE sha256 = ?", digest):
                raise InputError("this contribution was taken out when its client left; to come back, join again anew")
            contribution = decode(data, self.terms)
            client = _same(contribution.client, sender)
            self._check_new(client, contribution.n_samples)
            check(contribution, self.terms)
            self.pool.add(contribution, data)
            if not self._held_back():
                if not self.terms.keep_contributions:
                    self.pool.fold()
                return Receipt("accepted", client, "", digest, len(data))
            waiting = f"{len(self.pool.pending())} of {self.terms.min_cohort} late clients are here"
            return Receipt("withheld", client, f"counts once the cohort is complete: {waiting}", digest, len(data))

        return self._taken("statistics", data, sender, take)

    def ready(self) -> bool:
        """Whether there is something to publish: the quorum, a complete cohort, or someone left."""
        if self._pool is None:
            return False
        n_members, n_pending = len(self._pool.members()), len(self._pool.pending())
        if self.current() is None:
            return n_members + n_pending >= self.terms.quorum
        if self.ledger.get("stale") == "1":
            return n_members >= 1
        return n_pending > 0 and not self._held_back()

    def _held_back(self) -> bool:
        """Whether pending contributions wait for a cohort: after the first publication, while they are too few."""
        published = self.ledger.row("SELECT 1 FROM sqlite_sequence WHERE name = 'publications'")
        return published is not None and len(self.pool.pending()) < self.terms.min_cohort

    def _check_new(self, client: str, n: int) -> None:
        if self.ledger.row("SELECT 1 FROM contributions WHERE client = ?", client):
            raise InputError(f"{client} has contributed something else already; it must leave before it can send anew")
        described = self.ledger.row("SELECT n FROM descriptions WHERE client = ?", client)
        if described is not None and n > described["n"]:
            raise InputError(f"n contradicts the description: {n} rows, {described['n']} described; describe again")

    # ----------------------------------------------------------------------------------------- publishing

    def publish(self) -> Publication:
        """Fold in what may be folded and publish the primary; the present one if nothing has changed."""
        terms, pool = self.terms, self.pool
        if not self._held_back():
            pool.fold()
        members = pool.members()
        if len(members) < (1 if self.current() else terms.quorum):
            raise InputError(f"{len(members)} clients have contributed; the quorum is {terms.quorum}")
        latest = self._latest()
        if latest is not None and self.ledger.get("stale") != "1" and self._membership(latest["number"]) == members:
            return self._publication(latest)
        stats = pool.running().statistics()
        primary = solve_primary(stats, terms.method.gamma)
        leverage = None
        if terms.wants_leverage:
            m = terms.method.sketch
            leverage = leverage_sketch(primary.factor, m, terms.seed) if m else primary.factor
        unit = feature_energy(stats) * terms.refinement_width / terms.width
        last = self.ledger.row("SELECT seq FROM sqlite_sequence WHERE name = 'publications'")
        number = 1 + (0 if last is None else int(last["seq"]))
        data = seal_publication(
            terms, number, primary.weights, primary.gamma, unit, stats.class_counts, leverage, list(members.values())
        )
        blob = f"publication-{number}.safetensors"
        self.ledger.blobs.put(blob, data)
        with self.ledger.transaction():
            self.ledger.insert(
                "publications", number=number, blob=blob, sha256=sha256(data), bytes=len(data), gamma=primary.gamma,
                unit=unit, n=stats.n_samples, created=time.time(),
            )  # fmt: skip
            for client, digest in members.items():
                self.ledger.insert("members", publication=number, client=client, sha256=digest)
            self.ledger.put("stale", "0")
            self.ledger.event("published", number=number, members=len(members), n=stats.n_samples, gamma=primary.gamma)
        return Publication(number, data, tuple(members), stats.n_samples, primary.gamma)

    def current(self) -> Publication | None:
        """The latest publication; None before the first, and while one has to be made anew."""
        latest = self._latest()
        return None if latest is None or self.ledger.get("stale") == "1" else self._publication(latest)

    def deliver(self, client: str) -> bytes:
        """The current publication, and a note that this client now holds it."""
        publication = self.current()
        if publication is None:
            raise InputError("nothing is published yet")
        with self.ledger.transaction():
            self.ledger.know(client)
            self.ledger.db.execute(
                "INSERT OR IGNORE INTO holders VALUES (?, ?, ?, NULL)", (client, publication.number, time.time())
            )
        return publication.data

    def confirm(self, client: str, number: int) -> None:
        """A client has refitted to this publication, and no longer holds an earlier one."""
        with self.ledger.transaction():
            self.ledger.db.execute("DELETE FROM holders WHERE client = ? AND publication < ?", (client, number))
            self.ledger.db.execute(
                "UPDATE holders SET confirmed = ? WHERE client = ? AND publication = ?", (time.time(), client, number)
            )

    # ------------------------------------------------------------------------------------------- choosing

    def table(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's table of left-out hits under the current publication."""

        def take(digest: str) -> Receipt:
            if not self.terms.wants_tables:
                raise InputError("these terms leave nothing to be chosen by tables")
            table = open_table(data, self.terms)
            client = _same(table.client, sender)
            current = self._latest()
            if current is None or self.ledger.get("stale") == "1" or table.number != current["number"]:
                raise InputError(f"a table for publication {table.number}; fetch the current one and send its table")
            before = self.ledger.row(
                "SELECT sha256 FROM tables WHERE publication = ? AND client = ?", table.number, client
            )
            if before is not None and before["sha256"] == digest:
                return Receipt("duplicate", client, "this table counts already", digest, len(data))
            if before is not None:
                raise InputError(f"{client} has sent another table for publication {table.number} already")
            found = self.ledger.row(
                "SELECT c.n FROM contributions c JOIN members m ON m.sha256 = c.sha256 "
                "WHERE m.publication = ? AND c.client = ?", table.number, client,
            )  # fmt: skip
            if found is None:
                raise InputError(f"{client} is not in publication {table.number}; only members' tables count")
            if int(table.hits.min()) < 0 or int(table.hits.max()) > found["n"]:
                raise InputError(f"a table with entries outside 0 to {found['n']}, the client's rows")
            with self.ledger.transaction():
                self.ledger.insert(
                    "tables", publication=table.number, client=client, sha256=digest, n=found["n"], bytes=len(data),
                    data=data, received=time.time(),
                )  # fmt: skip
                self.ledger.event("table", client, number=table.number, bytes=len(data))
            return Receipt("accepted", client, "", digest, len(data))

        return self._taken("table", data, sender, take)

    def choose(self) -> bytes:
        """The settings that the tables at hand choose, for everyone."""
        current = self._latest()
        if current is None or self.ledger.get("stale") == "1":
            raise InputError("nothing is published yet, so there is nothing to choose settings for")
        rows = self.ledger.rows("SELECT data, n FROM tables WHERE publication = ?", current["number"])
        if self.terms.wants_tables and not rows:
            raise InputError("no client has sent a table of left-out hits yet")
        tables = [open_table(row["data"], self.terms) for row in rows]
        hits = {table.sha256: table.hits for table in tables}
        return seal_choice(self.terms, current["number"], current["unit"], hits, sum(row["n"] for row in rows))

    def metrics(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take what a client chose to report about its model."""

        def take(digest: str) -> Receipt:
            told = open_metrics(data, self.terms)
            client = _same(told["client"], sender)
            with self.ledger.transaction():
                self.ledger.know(client)
                self.ledger.db.execute("DELETE FROM metrics WHERE client = ?", (client,))
                self.ledger.insert(
                    "metrics", client=client, publication=told["number"], accuracy=told["accuracy"],
                    n_test=told["n_test"], received=time.time(),
                )  # fmt: skip
            return Receipt("accepted", client, "", digest, len(data))

        return self._taken("metrics", data, sender, take)

    # -------------------------------------------------------------------------------------------- leaving

    def leave(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """Take a client out: from here on everything is as if it had never joined. See `apfl.deploy.leaving`."""
        return leaving.leave(self, client, data, forget=False)

    def forget(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """`leave`, and erase the client's name from the ledger too."""
        return leaving.leave(self, client, data, forget=True)

    def status(self) -> dict[str, Any]:
        """Where the federation stands, as plain values; `apfl.deploy.status.status_of` reads it from the folder."""
        return status(self.ledger)

    # --------------------------------------------------------------------------------------------- within

    def _draft(self, terms: Terms | None) -> Terms:
        stored = self.ledger.get("draft")
        if stored is None:
            if terms is None:
                raise InputError(f"{self.ledger.folder} holds no federation yet; give its terms")
            with self.ledger.transaction():
                self.ledger.put("draft", terms.to_json())
                self.ledger.event("opened", federation=terms.federation)
            return terms
        draft = Terms.from_json(stored)
        if terms is not None and terms != draft:
            raise InputError(
                f"{self.ledger.folder} holds federation {draft.federation!r} under other terms; "
                "start it with those, or choose another folder"
            )
        return draft

    def _taken(self, what: str, data: bytes, sender: str | None, take: Callable[[str], Receipt]) -> Receipt:
        """What ``take`` makes of the message; a refusal is written down with its reason."""
        digest = sha256(data)
        try:
            return take(digest)
        except InputError as error:
            reason = str(error)
            with self.ledger.transaction():
                self.ledger.insert(
                    "refusals", client=sender, what=what, sha256=digest, bytes=len(data), reason=reason,
                    received=time.time(),
                )  # fmt: skip
            return Receipt("refused", sender, reason, digest, len(data))

    def _latest(self) -> dict[str, Any] | None:
        return self.ledger.row("SELECT * FROM publications ORDER BY number DESC LIMIT 1")

    def _membership(self, number: int) -> dict[str, str]:
        found = self.ledger.rows("SELECT client, sha256 FROM members WHERE publication = ? ORDER BY client", number)
        return {row["client"]: row["sha256"] for row in found}

    def _publication(self, row: dict[str, Any]) -> Publication:
        data = self.ledger.blobs.read(row["blob"])
        return Publication(row["number"], data, tuple(self._membership(row["number"])), row["n"], row["gamma"])

    def known(self, client: str) -> str:
        """The client's name, if it is one of those here."""
        names = [row["name"] for row in self.ledger.rows("SELECT name FROM clients")]
        if client not in names:
            raise unknown("client", client, names)
        return client


def _same(claimed: str, sender: str | None) -> str:
    """The client's name: the one in the message must be the one that the transport vouches for."""
    if sender is not None and claimed != sender:
        raise InputError(f"a message of client {claimed!r} sent by {sender!r}")
    return claimed
