"""The running sum and the contributions behind it.

A contribution arrives as *pending*: its bytes are in a file. Folding adds the pending ones to the sum, in one
transaction, and drops their bytes if single contributions are not to be kept. Whatever is killed in between is done
again from the bytes, and added once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from apfl.errors import InputError
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import Contribution, decode
from apfl.federate.ledger import Ledger
from apfl.federate.sums import LARGEST, ExactSum
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256

__all__ = ["Pool"]


class Pool:
    """Contributions, pending and folded, of one federation."""

    def __init__(self, ledger: Ledger, terms: Terms) -> None:
        self.ledger, self.terms = ledger, terms
        self._running: ExactSum | None = None

    def add(self, contribution: Contribution, data: bytes) -> None:
        """Keep a checked contribution as pending."""
        blob = f"contribution-{contribution.sha256}.safetensors"
        self.ledger.blobs.put(blob, data)
        with self.ledger.transaction():
            client, n, n_bytes = contribution.client, contribution.n_samples, contribution.n_bytes
            self.ledger.write_contribution(client, contribution.sha256, n, contribution.form, n_bytes, blob)
            self.ledger.event("contributed", client, n=n, bytes=n_bytes)

    def pending(self) -> list[str]:
        """Clients whose contribution is here but not in the sum."""
        return [row["client"] for row in self.ledger.contributions(folded=False)]

    def members(self) -> dict[str, str]:
        """Clients in the sum, with the hash of what they contributed."""
        return {row["client"]: row["sha256"] for row in self.ledger.contributions(folded=True)}

    def fold(self) -> None:
        """Add every pending contribution to the sum, once."""
        pending = self.ledger.contributions(folded=False)
        if not pending:
            return
        running = self.running().copy()
        for row in pending:
            running.add(self._decoded(row["blob"], row["sha256"]).statistics)
        if running.largest() >= LARGEST:
            raise FolderError(f"the sum passes {LARGEST:.0e}; rescale the features, or agree on normalise='row'")
        dropped = [] if self.terms.keep_contributions else [row["blob"] for row in pending]
        with self.replaced(running, dropped):
            for row in pending:
                self.ledger.write_folded(row["client"], row["blob"] if self.terms.keep_contributions else None)

    def running(self) -> ExactSum:
        """The sum over members."""
        if self._running is None:
            name = self.ledger.get("sum")
            if name is None:
                self._running = ExactSum.zero(self.terms.width, self.terms.n_classes)
            else:
                self._running = ExactSum.from_tensors(self.ledger.blobs.tensors(name), self.terms.width)
            n_members = sum(row["n"] for row in self.ledger.contributions(folded=True))
            if n_members != self._running.n_samples:
                raise FolderError(
                    f"{self.ledger.folder} is damaged: the sum is of {self._running.n_samples} rows, its members "
                    f"have {n_members}; restore the folder from a backup"
                )
        return self._running

    def without(self, client: str, data: bytes | None) -> ExactSum:
        """The sum less one member, from the bytes kept here or from those it brings."""
        row = self.ledger.contribution_of(client)
        assert row is not None
        assert row["folded"]
        if row["blob"] is None:
            if data is None:
                raise InputError(
                    f"single contributions are not kept here: to leave, {client} must send once more the "
                    "bytes it sent (its folder keeps them)"
                )
            if sha256(data) != row["sha256"]:
                raise InputError(
                    f"the bytes given for {client} have hash {sha256(data)[:12]}, what it contributed had "
                    f"{row['sha256'][:12]}: only exactly those can be subtracted"
                )
            gone = decode(data, self.terms)
        else:
            gone = self._decoded(row["blob"], row["sha256"])
        running = self.running().copy()
        running.add(gone.statistics, -1)
        return running

    def recomputed(self, without: str) -> ExactSum | None:
        """The sum of all members but one, added up anew; None where contributions are not kept."""
        rows = [row for row in self.ledger.contributions(folded=True) if row["client"] != without]
        if any(row["blob"] is None for row in rows):
            return None
        fresh = ExactSum.zero(self.terms.width, self.terms.n_classes)
        for row in rows:
            fresh.add(self._decoded(row["blob"], row["sha256"]).statistics)
        return fresh

    def _decoded(self, blob: str, digest: str) -> Contribution:
        data = self.ledger.blobs.read(blob)
        if sha256(data) != digest:
            raise FolderError(
                f"{self.ledger.blobs.folder / blob} has changed on disk; restore the folder from a backup"
            )
        return decode(data, self.terms)

    @contextmanager
    def replaced(self, running: ExactSum, dropped: Collection[str]) -> Iterator[None]:
        """A transaction that puts a new sum in place; then the former one and ``dropped`` are deleted."""
        former = self.ledger.get("sum")
        serial = 1 + (int(former.split("-")[1].split(".")[0]) if former else 0)
        name = f"sum-{serial}.safetensors"
        self.ledger.blobs.put(name, running.tensors())
        with self.ledger.transaction():
            self.ledger.put("sum", name)
            yield
        self._running = running
        self.ledger.blobs.remove([*dropped, *([former] if former else [])])
