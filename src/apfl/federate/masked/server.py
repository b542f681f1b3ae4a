"""The server's side of masked sums: which sum is lacking, its rounds, and what becomes of it.

The coordinator gets sums and never a site's vector. A cohort is one roster; sites that come later are a cohort of
their own, which counts its own rows first, because the server sees its sum by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.masked.counts import Counts, outline_of, tells_ranges
from apfl.federate.masked.pilot import Trial, asked_of, scaling_of
from apfl.federate.masked.purposes import WIDE, Purpose, round_of
from apfl.federate.masked.site import token
from apfl.federate.masked.tables import cohorts, summed, write_rosters, write_summed
from apfl.federate.plausible import check_integers
from apfl.federate.private.agreement import outlined
from apfl.federate.private.publishing import charge_roster
from apfl.federate.secure import Aggregator, Roster
from apfl.federate.secure.digits import Digits
from apfl.maths.integers import Encoding

__all__ = ["Cohort", "MaskedRound"]


@dataclass(frozen=True)
class MaskedRound:
    """A round under way: what it is for, how vectors are digits in it, and the aggregator."""

    purpose: Purpose
    digits: Digits
    aggregator: Aggregator


class Cohort:
    """Masked sums over one roster; all that is known of it is in the coordinator's ledger."""

    def __init__(self, coordinator: Coordinator, roster: Roster) -> None:
        self.coordinator, self.roster = coordinator, roster
        draft = coordinator.draft
        if not draft.masked:
            raise InputError("a roster given for terms without masks; start a new folder with masked terms")
        if len(roster) < draft.smallest_sum:
            raise InputError(
                f"a roster of {len(roster)} sites given; a sum under these terms has {draft.smallest_sum} or more. "
                "Wait for more sites, and make one roster of them"
            )
        self._enrol()

    def _enrol(self) -> None:
        ledger, kept = self.coordinator.ledger, cohorts(self.coordinator.ledger)
        if self.roster.fingerprint in kept:
            return
        members = set(self.coordinator.pool.members()) if self.coordinator.settled else set()
        others = {name for other in kept.values() for name in other.names} & members
        if again := sorted(others & set(self.roster.names)):
            raise InputError(
                f"{again[0]} is in a sum already: of two sums the difference would tell a single site. Make a roster "
                "of the new sites alone"
            )
        with ledger.transaction():
            for name in self.roster.names:
                ledger.know(name)
            write_rosters(ledger, [*kept.values(), self.roster])
            ledger.event("enrolled", members=len(self.roster), roster=self.roster.fingerprint)

    @property
    def counts(self) -> Counts | None:
        """What the members have together, once it is summed."""
        kept = self.coordinator.ledger.get(f"counts {self.roster.fingerprint}")
        return None if kept is None else Counts.from_bytes(kept.encode())

    @property
    def members(self) -> tuple[str, ...]:
        """Who of the roster is in the sum of statistics."""
        inside = self.coordinator.pool.members() if self.coordinator.settled else {}
        return tuple(name for name in self.roster.names if name in inside)

    def owed(self) -> Purpose | None:
        """The next sum that the ledger lacks; None if the publication is next, or nothing."""
        coordinator = self.coordinator
        if coordinator.draft.private:
            return self._owed_under_noise()
        if self.counts is None:
            return Purpose("count")
        self._go_on(self.counts)
        if coordinator.agreed == coordinator.draft:
            return Purpose("moments")
        if coordinator.piloting:
            return Purpose("pilot" if coordinator.piloting == "statistics" else "hits")
        if coordinator.spreading:
            return Purpose("spread")
        if not self.members:
            return Purpose("statistics", int(coordinator.ledger.get(f"wide {self.roster.fingerprint}") or 0))
        current = coordinator.ledger.current()
        if current is None or not coordinator.terms.wants_tables:
            return None
        inside = set(coordinator.ledger.members(current["number"])) & set(self.roster.names)
        tables = summed(coordinator.ledger, "table", current["number"])
        done = self.roster.fingerprint in tables
        return Purpose("table", current["number"]) if inside and not done else None

    def _owed_under_noise(self) -> Purpose | None:
        """No sum but that of the statistics: nothing is counted, and terms follow from no one's rows."""
        coordinator = self.coordinator
        if coordinator.agreed == coordinator.draft:
            coordinator.outline_from(outlined(coordinator.draft))
        if coordinator.agreed.outlined:
            coordinator.settle_from([])
        return None if self.members else Purpose("statistics")

    def _go_on(self, counts: Counts) -> None:
        """Fix what follows from sums that are here."""
        coordinator = self.coordinator
        if coordinator.agreed == coordinator.draft and not tells_ranges(coordinator.draft):
            coordinator.outline_from(outline_of(coordinator.draft, counts))
        if coordinator.agreed.outlined and not coordinator.spreading:
            coordinator.settle_from([])
        counts.check(coordinator.agreed)

    # -------------------------------------------------------------------------------------------------- rounds

    def begin(self, purpose: Purpose) -> MaskedRound:
        """A new round for this sum."""
        coordinator, counts = self.coordinator, None if purpose.what == "count" else self.counts
        landmarks = coordinator.pool.landmarks if purpose.what == "statistics" else None
        terms, trial = coordinator.agreed, self.trial(purpose)
        round_, digits = round_of(purpose, self._next_number(), self.roster, terms, counts, landmarks, trial)
        return MaskedRound(purpose, digits, Aggregator(self.roster, round_, terms.smallest_sum))

    def enter(self, phase: str, done: MaskedRound) -> None:
        """Before anyone is asked in a phase: under epsilon the sum is charged before it is unmasked.

        A roster that could only be refused then is refused at once.
        """
        terms = self.coordinator.agreed
        if terms.private and phase in ("advertise", "unmask"):
            n_shares = len(done.aggregator.survivors) or self.roster.threshold
            charge_roster(self.coordinator.ledger, terms, self.roster, n_shares, write=phase == "unmask")

    def trial(self, purpose: Purpose) -> Trial | None:
        """The pilot that a sum is of."""
        pilot = self.coordinator.pilot
        if purpose.what not in ("pilot", "hits"):
            return None
        return Trial(pilot.question, pilot.primaries() if purpose.what == "hits" else None)

    def along(self, purpose: Purpose, phase: str, name: str) -> dict[str, bytes]:
        """What a member is sent with a question of a sum, beside the question and the terms."""
        counts, told = self.counts, {}
        if purpose.what != "count" and counts is not None:
            told["counts"] = counts.to_bytes()
        if phase != "advertise":
            return told
        if purpose.what == "table":
            told["publication"] = self.coordinator.deliver(name)
        if purpose.what == "pilot":
            told["pilot"] = self.coordinator.pilot_question()
        if purpose.what == "hits":
            told |= {"pilot": self.coordinator.pilot_question(), "primaries": self.coordinator.pilot_primaries()}
        return told

    def _next_number(self) -> int:
        """Higher than every one before: also after the clock was set back, or the folder restored from a backup."""
        ledger = self.coordinator.ledger
        number = max(int(ledger.get("round") or 0) + 1, time.time_ns() // 1000)
        with ledger.transaction():
            ledger.put("round", str(number))
        return number

    def take(self, done: MaskedRound) -> None:
        """What a finished round's sum becomes."""
        survivors = done.aggregator.survivors
        vector = done.digits.join(done.aggregator.total, len(survivors))
        {
            "count": self._counted, "moments": self._moments, "pilot": self._tried, "hits": self._chosen,
            "spread": self._spread, "statistics": self._statistics, "table": self._kept, "metrics": self._kept,
        }[done.purpose.what](done, vector)  # fmt: skip

    def _counted(self, done: MaskedRound, vector: np.ndarray) -> None:
        ledger, fingerprint = self.coordinator.ledger, self.roster.fingerprint
        counts = Counts.of(vector, self.coordinator.agreed, fingerprint)
        with ledger.transaction():
            ledger.put(f"counts {fingerprint}", counts.to_bytes().decode())
            ledger.event("counted", members=len(done.aggregator.survivors), n=counts.n_samples)
        self._go_on(counts)

    def _moments(self, done: MaskedRound, vector: np.ndarray) -> None:
        """The pilot's question, or the outline."""
        draft, counts, n_members = self.coordinator.draft, self.counts, len(done.aggregator.survivors)
        assert counts is not None
        self._note_cut(int(vector[done.digits.layout.places["saturated"]][0]))
        if draft.pilots:
            self.coordinator.pilot_from(*asked_of(draft, counts, vector, n_members))
        else:
            self.coordinator.outline_from(outline_of(draft, counts, scaling_of(draft, counts, vector, n_members)))

    def _note_cut(self, n: int) -> None:
        """Write down that sums of some columns were cut back to the agreed range."""
        if n:
            with self.coordinator.ledger.transaction():
                self.coordinator.ledger.event("cut back", columns=n)

    def _tried(self, done: MaskedRound, vector: np.ndarray) -> None:
        """The primaries of a pilot."""
        pilot, survivors = self.coordinator.pilot, done.aggregator.survivors
        sums, terms = pilot.question.apart(vector), self.coordinator.agreed
        for how, summed_up in sums.items():
            check_integers(summed_up, pilot.question.encoding(how), terms, len(survivors))
        pilot.publish(sums, [token(done.aggregator.round_, name) for name in survivors])

    def _chosen(self, done: MaskedRound, vector: np.ndarray) -> None:
        """The normalisation that the hits choose, and the outline with it."""
        coordinator, question, counts = self.coordinator, self.coordinator.pilot.question, self.counts
        assert counts is not None
        hits, n_rows = torch.from_numpy(vector[:-1]).reshape(question.shape), int(vector[-1])
        if n_rows < 1 or int(hits.max()) > n_rows:
            raise InputError(f"left-out hits of up to {int(hits.max())} of {n_rows} rows: one of the sites sent others")
        choice = coordinator.pilot.judged(hits, n_rows)
        outline = outline_of(coordinator.draft, counts, question.shared.normalisers[choice.normalise])
        coordinator.outline_from(replace(outline, pilot=choice.hits), choice)

    def _spread(self, done: MaskedRound, vector: np.ndarray) -> None:
        n = int(vector[done.digits.layout.places["n_samples"]][0])
        most = len(done.aggregator.survivors) * (self.coordinator.agreed.most_rows or 0)
        if not 1 <= n <= most:
            raise InputError(f"moments of {n} rows; the terms allow their sites 1 to {most}: one of them sent others")
        self.coordinator.settle_from([vector])

    def _statistics(self, done: MaskedRound, vector: np.ndarray) -> None:
        coordinator, survivors = self.coordinator, done.aggregator.survivors
        landmarks = coordinator.pool.landmarks
        assert landmarks is not None
        encoding = landmarks.encoding(coordinator.terms)
        if isinstance(encoding, Encoding):  # noise leaves nothing to check
            if not self._fits(done, vector, encoding):
                return
            check_integers(vector, encoding, coordinator.terms, len(survivors))
        tokens = {name: token(done.aggregator.round_, name) for name in survivors}
        coordinator.pool.add_sum(self.roster.fingerprint, vector, tokens, done.aggregator.round_.n_bytes)

    def _fits(self, done: MaskedRound, vector: np.ndarray, encoding: Encoding) -> bool:
        """Whether no entry can have passed the modulus; if one can, the sum is owed once more, with more room."""
        told = encoding.bounds_told(torch.from_numpy(vector), len(done.aggregator.survivors))
        if all(told[name] < 2 ** (done.digits.sum_bits - 1) for name in done.digits.whole):
            return True
        ledger = self.coordinator.ledger
        with ledger.transaction():
            ledger.put(f"wide {self.roster.fingerprint}", str(WIDE))
            ledger.event("repeats statistics", members=len(done.aggregator.survivors))
        return False

    def _kept(self, done: MaskedRound, vector: np.ndarray) -> None:
        ledger, purpose = self.coordinator.ledger, done.purpose
        with ledger.transaction():
            write_summed(ledger, purpose.what, purpose.number, self.roster.fingerprint, vector.tolist())
            ledger.event(f"summed {purpose.what}", number=purpose.number, members=len(done.aggregator.survivors))
