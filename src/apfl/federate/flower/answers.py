"""Who has answered what: the ledger as a run needs to see it."""

from __future__ import annotations

from apfl.federate.coordinator import Coordinator

__all__ = ["Answers"]


class Answers:
    """Who has answered what, as the ledger has it now; ``chosen`` is the publication whose settings were chosen.

    ``earlier`` are the sites that had contributed before this run: their rows may have changed since.
    """

    def __init__(self, coordinator: Coordinator, chosen: int = 0, earlier: frozenset[str] = frozenset()) -> None:
        ledger = coordinator.ledger
        self.settled = coordinator.settled
        self.spreading = coordinator.spreading
        self.piloting = coordinator.piloting
        self.describing = not (self.settled or self.spreading or self.piloting)
        self.tried = ledger.piloted("statistics")
        self.judged = ledger.piloted("table")
        self.terms = coordinator.agreed.to_json().encode()
        self.gone = ledger.gone()
        self.described = ledger.answered("descriptions")
        self.spread = ledger.answered("spreads")
        self.contributed = ledger.answered("contributions")
        # The sites that lack the landmarks get them with the next question that needs them.
        self.has_landmarks = ledger.answered("landmarks")
        self.landmarked = coordinator.draft.landmarked
        self.earlier = earlier & self.contributed
        self.first = not ledger.last_number()  # nothing has been published yet
        current = ledger.current()
        self.current: int | None = None if current is None else current["number"]
        self.members = ledger.answered("members", self.current)
        # With columns as targets settings are chosen in stages, and a site's first table brings the publication.
        self.stage = coordinator.stage
        self.staged = ledger.staged(self.current, self.stage) if self.stage else frozenset()
        numeric = self.settled and coordinator.terms.numeric
        in_stages = frozenset(ledger.stage_bytes(self.current)) if numeric else frozenset()
        self.tabled = in_stages if numeric else ledger.answered("tables", self.current)
        self.confirmed = ledger.confirmed(self.current)
        self.measured = ledger.answered("metrics", self.current)
        # Those whose contribution the next publication will hold need not refine by this one first.
        self.next_members = self.contributed - self.members if coordinator.ready() else frozenset()
        # Tables are collected for the current publication until settings are chosen, or anyone has refined by a choice.
        wants_tables = self.settled and coordinator.terms.wants_tables
        self.choosing = wants_tables and self.current not in (None, chosen) and not self.confirmed
        self.waits_for = "table" if self.choosing else self.stage  # the phase before models are fitted
