"""The server's side of a federation: it takes bytes, checks them, adds them, and publishes.

Everything it knows is in its ledger, so it can be killed at any moment and made again from the folder alone; nobody
who has answered is asked again. It needs no network: a transport hands it what arrived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from apfl.errors import InputError, unknown
from apfl.federate import intake, leaving, publishing
from apfl.federate.intake import Receipt
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_description, open_table, seal_choice
from apfl.federate.pool import Pool
from apfl.federate.publishing import Publication
from apfl.federate.status import status
from apfl.federate.terms import Terms, check_name, settle

__all__ = ["Coordinator", "Publication", "Receipt"]


class Coordinator:
    """One federation in one folder; ``terms`` are needed the first time, and must agree with the folder after that.

    ``wait`` is how many seconds to wait for another process that works in the folder. Wherever a message is taken,
    ``sender`` is the name that the transport vouches for.
    """

    def __init__(self, folder: str | Path, terms: Terms | None = None, *, wait: float = 0.0) -> None:
        self.ledger = Ledger(folder, wait=wait)
        try:
            self.draft = self._draft(terms)
            settled = self.ledger.get("terms")
            self._terms = None if settled is None else Terms.from_json(settled)
        except BaseException:
            self.close()
            raise
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
        """The draft of the terms, for clients to describe themselves under."""
        return self.draft.to_json().encode()

    def describe(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's description."""
        return intake.written_down(
            self.ledger, "description", data, sender,
            lambda: intake.take_description(self.ledger, self.draft, self._terms, data, sender),
        )  # fmt: skip

    def settle(self) -> bytes:
        """Fix the terms from the descriptions at hand, once; afterwards, the terms that were fixed."""
        if self._terms is None:
            rows = self.ledger.descriptions()
            if len(rows) < self.draft.quorum:
                raise InputError(f"{len(rows)} clients have described themselves; the quorum is {self.draft.quorum}")
            terms = settle(self.draft, [open_description(row["data"], self.draft) for row in rows])
            with self.ledger.transaction():
                self.ledger.put("terms", terms.to_json())
                self.ledger.event("settled", width=terms.width, classes=terms.n_classes, digest=terms.digest)
            self._terms, self._pool = terms, Pool(self.ledger, terms)
        return self._terms.to_json().encode()

    @property
    def settled(self) -> bool:
        """Whether the terms are fixed."""
        return self._terms is not None

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
        return intake.written_down(self.ledger, "statistics", data, sender, lambda: self._accept(data, sender))

    def _accept(self, data: bytes, sender: str | None) -> Receipt:
        receipt = intake.take_contribution(self.ledger, self.pool, self.terms, data, sender)
        if receipt.outcome != "accepted":
            return receipt
        if self._held_back():
            waiting = f"{len(self.pool.pending())} of {self.terms.min_cohort} late clients are here"
            reason = f"counts once the cohort is complete: {waiting}"
            return Receipt("withheld", receipt.client, reason, receipt.sha256, receipt.n_bytes)
        if not self.terms.keep_contributions:
            self.pool.fold()
        return receipt

    def ready(self) -> bool:
        """Whether there is something to publish: the quorum for the first time, a complete cohort, or someone left."""
        if self._pool is None:
            return False
        n_pending = 0 if self._held_back() else len(self._pool.pending())
        enough = len(self._pool.members()) + n_pending >= self.terms.quorum
        return enough and (n_pending > 0 or not self._is_published())

    def _is_published(self) -> bool:
        """Whether the current publication is of the members there are now."""
        current = self.ledger.current()
        return current is not None and self.ledger.members(current["number"]) == self.pool.members()

    def _held_back(self) -> bool:
        """Whether pending contributions wait for a cohort: after the first publication, while they are too few."""
        return self.ledger.last_number() > 0 and len(self.pool.pending()) < self.terms.min_cohort

    # ----------------------------------------------------------------------------------------- publishing

    def publish(self) -> Publication:
        """Fold in what may be folded and publish the primary; the current one if nothing has changed."""
        if not self._held_back():
            self.pool.fold()
        n_members = len(self.pool.members())
        if n_members < self.terms.quorum:
            raise InputError(f"{n_members} clients have contributed; the quorum is {self.terms.quorum}")
        return publishing.publish(self.ledger, self.pool, self.terms)

    def current(self) -> Publication | None:
        """The current publication; None before the first, and while one has to be made anew."""
        row = self.ledger.current()
        return None if row is None else publishing.load(self.ledger, row)

    def deliver(self, client: str) -> bytes:
        """The current publication, and a note that this client now holds it."""
        publication = self.current()
        if publication is None:
            raise InputError("nothing is published yet")
        with self.ledger.transaction():
            self.ledger.write_holder(check_name("client", client), publication.number)
        return publication.data

    def confirm(self, client: str, number: int) -> None:
        """A client has refitted to this publication, and no longer holds an earlier one."""
        with self.ledger.transaction():
            self.ledger.write_confirmed(client, number)

    # ------------------------------------------------------------------------------------------- choosing

    def table(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's table of left-out hits under the current publication."""
        return intake.written_down(
            self.ledger, "table", data, sender, lambda: intake.take_table(self.ledger, self.terms, data, sender)
        )

    def choose(self) -> bytes:
        """The settings that the tables at hand choose, for everyone."""
        current = self.ledger.current()
        if current is None:
            raise InputError("nothing is published yet, so there is nothing to choose settings for")
        rows = self.ledger.tables(current["number"])
        if self.terms.wants_tables and not rows:
            raise InputError("no client has sent a table of left-out hits yet")
        tables = [open_table(row["data"], self.terms) for row in rows]
        hits = {table.sha256: table.hits for table in tables}
        return seal_choice(self.terms, current["number"], current["unit"], hits, sum(row["n"] for row in rows))

    def metrics(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take what a client chose to report about its model."""
        return intake.written_down(
            self.ledger, "metrics", data, sender, lambda: intake.take_metrics(self.ledger, self.terms, data, sender)
        )

    # -------------------------------------------------------------------------------------------- leaving

    def leave(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """Take a client out: from here on everything is as if it had never joined. See `apfl.federate.leaving`."""
        return leaving.leave(self, client, data, forget=False)

    def forget(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """`leave`, and erase the client's name from the ledger too."""
        return leaving.leave(self, client, data, forget=True)

    def contribution_of(self, client: str) -> str | None:
        """The hash of what a client contributed: with ``keep_contributions`` off it must bring those bytes to leave."""
        row = self.ledger.contribution_of(self.known(client))
        return None if row is None else str(row["sha256"])

    def known(self, client: str) -> str:
        """The client's name, if it is one of those here."""
        names = self.ledger.names()
        if client not in names:
            raise unknown("client", client, names)
        return client

    def status(self) -> dict[str, Any]:
        """Where the federation stands, as plain values; `apfl.federate.status.status_of` reads it from the folder."""
        return status(self.ledger)

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
                f"{self.ledger.folder} holds federation {draft.federation!r} under other terms "
                f"({terms.departs_from(draft) or 'some left open'}); start it with those, or choose another folder"
            )
        return draft
