"""The server's side of a pilot: it asks what to try, adds up statistics, publishes primaries and reads the tables.

All of it is in the ledger, so a server that is killed goes on where it was, and asks nobody twice. Once the
normalisation is chosen, what sites sent for it is deleted; what it weighed, and the account of the choice, stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.choosing import Sent, summed_tables
from apfl.federate.intake import Receipt, same_client
from apfl.federate.ledger import Ledger, Part
from apfl.federate.pilot import (
    Primaries,
    Question,
    open_primaries,
    open_question,
    open_statistics,
    open_table,
    seal_primaries,
    seal_question,
)
from apfl.federate.roll import Roll, attached
from apfl.federate.terms import Description, Terms, trial
from apfl.federate.wire import sha256
from apfl.maths.pilot import judge_sum

__all__ = ["Choice", "Piloting", "Stage"]

Stage = Literal["", "statistics", "tables"]  # what the pilot waits for; nothing before it begins and once it is over


@dataclass(frozen=True)
class Choice:
    """What the tables chose, for the outline and for the record."""

    normalise: str
    account: dict[str, Any]  # usual, rows, width, hits, gamma

    @property
    def hits(self) -> tuple[tuple[str, float], ...]:
        """What each normalisation scored."""
        return tuple(self.account["hits"].items())

    def write(self, ledger: Ledger) -> None:
        """Keep the account; inside a transaction."""
        ledger.put("pilot", json.dumps({"normalise": self.normalise, **self.account}, sort_keys=True))
        ledger.event("piloted", normalise=self.normalise, **self.account)


class Piloting:
    """The pilot of one federation, under way or not."""

    def __init__(self, ledger: Ledger, draft: Terms, terms: Terms | None) -> None:
        self.ledger, self.draft, self.terms = ledger, draft, terms  # `terms` are those of the trial
        self._question: Question | None = None
        self._roll: tuple[str | None, Roll] | None = None  # of the primaries with this hash

    @property
    def stage(self) -> Stage:
        """What is waited for."""
        if self.terms is None or self.ledger.get("pilot") is not None:
            return ""
        return "statistics" if self.ledger.get("pilot_primaries") is None else "tables"

    # -------------------------------------------------------------------------------------------- asking

    def begin(self, described: Sequence[Description], keep: Callable[[Terms], None]) -> None:
        """Fix what is tried, from these descriptions; ``keep`` writes the terms of the trial down."""
        terms, n_all = trial(self.draft, described)
        own = [each.described for each in sorted(described, key=lambda each: each.client) if each.described is not None]
        assert len(own) == len(described), "a description under a draft that pilots has all moments"
        unsuited = {how for each in described for how in each.unsuited}
        self.start(terms, seal_question(terms, n_all, reduce(add, own), unsuited), keep)

    def start(self, terms: Terms, data: bytes, keep: Callable[[Terms], None]) -> None:
        """Ask this question under these terms."""
        self.ledger.put_pilot("question", data, lambda: keep(terms))
        self.terms, self._question = terms, None

    def restarted(self) -> None:
        """A client left that had a part in what was tried: the others begin anew."""
        self.terms, self._question = None, None

    @property
    def asked(self) -> bytes:
        """What sites are to try."""
        return self.ledger.read_pilot("question")

    @property
    def question(self) -> Question:
        """The same with its maps."""
        if self.terms is None:
            raise InputError("no pilot is under way: clients must describe themselves first")
        if self._question is None:
            self._question = open_question(self.asked, self.terms)
        return self._question

    def primaries(self) -> bytes:
        """The primaries of the statistics at hand, once; afterwards those that were published."""
        if self.stage != "tables":
            self._publish()
        return self.ledger.read_pilot("primaries")

    def primaries_for(self, client: str) -> bytes:
        """The same with the proof that this client's statistics are behind them, if they are."""
        data = self.primaries()
        behind = self.ledger.pilot_of(client, "statistics")
        if behind is None:
            return data
        if self._roll is None or self._roll[0] != self.ledger.get("pilot_primaries"):
            self._roll = self.ledger.get("pilot_primaries"), Roll(self.ledger.pilot_hashes("statistics"))
        return attached(data, self._roll[1].proof(behind["sha256"]))

    def _publish(self) -> None:
        hashes = self.ledger.pilot_hashes("statistics")
        self._check_quorum(len(hashes), "statistics")
        question = self.question
        sums = {how: np.zeros(question.encoding(how).layout.size, np.int64) for how in question.tried}
        for row in self.ledger.pilots("statistics"):  # one at a time
            for how, integers in open_statistics(row["data"], question).integers.items():
                sums[how] += integers
        self.publish(sums, hashes)

    def publish(self, sums: Mapping[str, np.ndarray], members: Sequence[str]) -> None:
        """The primaries of these sums, whose members are known by these hashes."""
        data = seal_primaries(self.question, sums, members, listed=self.draft.masked)
        self.ledger.put_pilot("primaries", data, lambda: self.ledger.event("tried", clients=len(members)))

    def _check_quorum(self, n: int, what: str) -> None:
        if n < self.draft.quorum:
            raise InputError(
                f"{n} clients have sent the {what} of the pilot that chooses the normalisation; the quorum is "
                f"{self.draft.quorum}"
            )

    # -------------------------------------------------------------------------------------------- taking

    def take_statistics(self, data: bytes, sender: str | None) -> Receipt:
        """A client's statistics of every candidate, once."""
        if self.stage != "statistics":
            raise InputError("no pilot waits for statistics; these come too late, and are not needed")
        sent, digest = open_statistics(data, self.question), sha256(data)
        client = same_client(sent.client, sender)
        if known := self._known(client, "statistics", digest, data):
            return known
        described = self.ledger.description_of(client)
        if described is None or sent.n_samples > described["n"]:
            told = "none" if described is None else str(described["n"])
            raise InputError(f"n contradicts the description: a pilot of {sent.n_samples} rows, {told} described")
        return self._taken(client, "statistics", digest, sent.n_judged, data)

    def take_table(self, data: bytes, sender: str | None) -> Receipt:
        """A member's table of left-out hits, once."""
        if self.stage != "tables":
            raise InputError("no pilot waits for tables; this one comes too early or too late")
        sent, digest = open_table(data, self.question), sha256(data)
        client = same_client(sent.client, sender)
        if known := self._known(client, "table", digest, data):
            return known
        behind = self.ledger.pilot_of(client, "statistics")  # none are taken once primaries are there
        if behind is None or sent.primaries != self.ledger.get("pilot_primaries"):
            raise InputError(f"{client} is not behind these primaries of the pilot; only members' tables count")
        if int(sent.hits.min()) < 0 or int(sent.hits.max()) > behind["n"]:
            raise InputError(f"a table with entries outside 0 to {behind['n']}, the client's rows in the pilot")
        return self._taken(client, "table", digest, behind["n"], data)

    def _known(self, client: str, part: Part, digest: str, data: bytes) -> Receipt | None:
        before = self.ledger.pilot_of(client, part)
        if before is None:
            return None
        if before["sha256"] == digest:
            return Receipt("duplicate", client, f"this pilot's {part} count already", digest, len(data))
        raise InputError(f"{client} has sent another {part} for this pilot already")

    def _taken(self, client: str, part: Part, digest: str, n: int, data: bytes) -> Receipt:
        with self.ledger.transaction():
            self.ledger.write_pilot(client, part, digest, n, data)
            self.ledger.event(f"pilot {part}", client, n=n, bytes=len(data))
        return Receipt("accepted", client, "", digest, len(data))

    def _primaries(self) -> Primaries:
        return open_primaries(self.ledger.read_pilot("primaries"), self.question)

    # ------------------------------------------------------------------------------------------ choosing

    def choose(self) -> Choice:
        """The normalisation that the tables at hand choose, and the account of it."""
        self._check_quorum(len(self.ledger.pilot_hashes("table")), "tables")
        question = self.question

        def tables() -> Iterator[Sent]:
            for row in self.ledger.pilots("table"):
                yield row["sha256"], open_table(row["data"], question).hits, row["n"]

        summed = summed_tables(tables, 1)
        return self.judged(summed.hits, summed.n_rows)

    def judged(self, hits: Tensor, n_rows: int) -> Choice:
        """What the summed tables choose, of so many rows."""
        question, gammas = self.question, self._primaries().gammas
        judged = judge_sum(question.tried, hits, n_rows, question.usual)
        widths = {how: each.feature_map.width for how, each in question.candidates.items()}
        return Choice(judged.normalise, judged.account(widths, gammas))
