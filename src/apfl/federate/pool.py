"""The running sum and the contributions behind it.

A contribution arrives as *pending*: its bytes are in a file. Folding adds the pending ones to the sum, in one
transaction, and drops their bytes if single contributions are not to be kept. Whatever is killed in between is done
again from the bytes, and added once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import Contribution, decode
from apfl.federate.landmarks import Landmarks
from apfl.federate.ledger import Ledger
from apfl.federate.sums import LARGEST, ExactSum, IntegerSum, NumberSum, RunningSum
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256

__all__ = ["MASKED", "UNKNOWN", "Pool"]

MASKED = "masked"  # the form of a contribution of which only the sum with others is known
UNKNOWN = 0  # its number of rows


class Pool:
    """Contributions, pending and folded, of one federation."""

    def __init__(self, ledger: Ledger, terms: Terms, landmarks: Landmarks | None = None) -> None:
        self.ledger, self.terms, self.landmarks = ledger, terms, landmarks
        self._running: RunningSum | None = None

    def add(self, contribution: Contribution, data: bytes) -> None:
        """Keep a checked contribution as pending."""
        blob = self._put(contribution, data)
        with self.ledger.transaction():
            self._write(contribution, blob, "contributed")

    def exchange(self, contribution: Contribution, data: bytes, former: bytes | None) -> None:
        """Take out what its client contributed before and keep this one as pending, in one transaction.

        ``former`` are the bytes of the former one, if only sums are kept.
        """
        client = contribution.client
        row = self.ledger.contribution_of(client)
        assert row is not None
        running = self.without(client, former) if row["folded"] else self.running()
        rows = (*self.ledger.publications_with(client), row)
        blob = self._put(contribution, data)
        with self.replaced(running, [each["blob"] for each in rows if each["blob"]]):
            self.ledger.take_out(client)
            self.ledger.erase(client, forget=False)
            self._write(contribution, blob, "rejoined")
        self.ledger.scrub()

    def _put(self, contribution: Contribution, data: bytes) -> str:
        blob = f"contribution-{contribution.sha256}.safetensors"
        self.ledger.blobs.put(blob, data)
        return blob

    def _write(self, contribution: Contribution, blob: str, event: str) -> None:
        client, n, n_bytes = contribution.client, contribution.n_samples, contribution.n_bytes
        self.ledger.write_contribution(client, contribution.sha256, n, contribution.form, n_bytes, blob)
        self.ledger.event(event, client, n=n, bytes=n_bytes)

    def pending(self) -> list[str]:
        """Clients whose contribution is here but not in the sum."""
        return [row["client"] for row in self.ledger.contributions(folded=False)]

    def n_pending(self) -> int:
        """How many contributions are here but not in the sum."""
        return self.ledger.n_contributions(folded=False)

    def holds_back(self, n_pending: int) -> bool:
        """Whether so many pending contributions wait for a cohort: after the first publication, while too few."""
        reopened = int(self.ledger.get("reopened") or 0)
        return self.ledger.last_number() > reopened and n_pending < self.terms.min_cohort

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
            _add(running, self._decoded(row["blob"], row["sha256"]))
        if running.largest() >= LARGEST:
            raise FolderError(f"the sum passes {LARGEST:.0e}; rescale the features, or agree on normalise='row'")
        dropped = [] if self.terms.keep_contributions else [row["blob"] for row in pending]
        with self.replaced(running, dropped):
            for row in pending:
                self.ledger.write_folded(row["client"], row["blob"] if self.terms.keep_contributions else None)

    def add_sum(self, cohort: str, integers: np.ndarray, members: Mapping[str, str], n_bytes: int) -> None:
        """Add the masked sum of several clients, each with the token that stands for its part, all at once.

        It is kept by itself too: if one of them leaves, all of it goes.
        """
        running, name = self.running().copy(), f"cohort-{cohort}-{self.ledger.last_number()}.safetensors"
        assert isinstance(running, IntegerSum)
        running.add(integers)
        digest = self.ledger.blobs.put(name, {"integers": torch.from_numpy(integers)})
        with self.replaced(running, []):
            self.ledger.write_cohort_sum(cohort, name, digest)
            for client, token in members.items():
                self.ledger.write_contribution(client, token, UNKNOWN, MASKED, n_bytes, None)
                self.ledger.write_folded(client, None)
            self.ledger.event("summed", members=len(members), n=running.n_samples)

    def take_out_sum(self, cohort: str, clients: Collection[str], leaver: str, *, forget: bool) -> None:
        """Take the masked sum of a cohort out again, with every publication that includes it."""
        name, digest = self.ledger.cohort_sums()[cohort]
        running = self.running().copy()
        assert isinstance(running, IntegerSum)
        running.add(self.ledger.blobs.tensors(name, digest)["integers"].numpy(), -1)
        publications = [row["blob"] for client in clients for row in self.ledger.publications_with(client)]
        with self.replaced(running, [name, *dict.fromkeys(publications)]):
            for client in clients:
                self.ledger.take_out(client)
            self.ledger.drop_cohort_sum(cohort)
            self.ledger.erase(leaver, forget=forget)

    def running(self) -> RunningSum:
        """The sum over members."""
        if self._running is None:
            self._running = self._loaded()
            n_members = sum(row["n"] for row in self.ledger.contributions(folded=True))
            if not self.terms.masked and n_members != self._running.n_samples:
                raise FolderError(
                    f"{self.ledger.folder} is damaged: the sum is of {self._running.n_samples} rows, its members "
                    f"have {n_members}; restore the folder from a backup"
                )
        return self._running

    def _loaded(self) -> RunningSum:
        """The sum from its file; if that has changed on disk, added up anew from the contributions."""
        name = self.ledger.get("sum")
        if name is None:
            return self._zero()
        try:
            return self._of(self.ledger.blobs.tensors(name, self.ledger.get("sum_sha256")))
        except FolderError as error:
            fresh = self.recomputed()
            if fresh is None:
                raise FolderError(
                    f"{error}: single contributions are not kept, so the sum cannot be rebuilt"
                ) from error
        with self.replaced(fresh, []):
            self.ledger.event("rebuilt", file=name)
        return fresh

    def without(self, client: str, data: bytes | None) -> RunningSum:
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
        _add(running, gone, -1)
        return running

    def recomputed(self, without: str = "") -> RunningSum | None:
        """The sum of all members, or all but one, added up anew; None if contributions are not kept."""
        rows = [row for row in self.ledger.contributions(folded=True) if row["client"] != without]
        if any(row["blob"] is None for row in rows):
            return None
        fresh = self._zero()
        for row in rows:
            _add(fresh, self._decoded(row["blob"], row["sha256"]))
        return fresh

    def _zero(self) -> RunningSum:
        if self.terms.numeric:
            return NumberSum.zero(self.terms.width, self.terms.n_classes)
        if self.landmarks is not None:
            return IntegerSum.zero(self.landmarks.encoding(self.terms))
        return ExactSum.zero(self.terms.width, self.terms.n_classes)

    def _of(self, tensors: Mapping[str, Tensor]) -> RunningSum:
        if self.terms.numeric:
            return NumberSum.from_tensors(tensors, self.terms.width, self.terms.n_classes)
        if self.landmarks is not None:
            return IntegerSum.from_tensors(tensors, self.landmarks.encoding(self.terms))
        return ExactSum.from_tensors(tensors, self.terms.width)

    def _decoded(self, blob: str, digest: str) -> Contribution:
        return decode(self.ledger.blobs.read(blob, digest), self.terms)

    @contextmanager
    def replaced(self, running: RunningSum, dropped: Collection[str]) -> Iterator[None]:
        """A transaction that puts a new sum in place; then the former one and ``dropped`` are deleted."""
        former = self.ledger.get("sum")
        serial = 1 + (int(former.split("-")[1].split(".")[0]) if former else 0)
        name = f"sum-{serial}.safetensors"
        digest = self.ledger.blobs.put(name, running.tensors())
        with self.ledger.transaction():
            self.ledger.put("sum", name)
            self.ledger.put("sum_sha256", digest)
            yield
        self._running = running
        self.ledger.blobs.remove([*dropped, *([former] if former else [])])


def _add(running: RunningSum, contribution: Contribution, sign: int = 1) -> None:
    """Add a contribution to the sum, or take it away again."""
    if isinstance(running, IntegerSum):
        assert contribution.integers is not None
        running.add(contribution.integers, sign)
    else:
        running.add(contribution.statistics, sign)
