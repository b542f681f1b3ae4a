"""Who has answered what: the ledger as a run needs to see it."""

from __future__ import annotations

from typing import Any

from apfl.federate import Coordinator

__all__ = ["Answers"]


class Answers:
    """Who has answered what, as the ledger has it now."""

    def __init__(self, coordinator: Coordinator) -> None:
        ledger = coordinator.ledger

        def names(query: str, *values: Any) -> frozenset[str]:
            return frozenset(row["client"] for row in ledger.rows(query, *values))

        settled = ledger.get("terms")
        self.settled = settled is not None
        self.terms = (settled or coordinator.draft.to_json()).encode()
        self.wants_tables = self.settled and coordinator.terms.wants_tables
        self.gone = frozenset(row["name"] for row in ledger.rows("SELECT name FROM clients WHERE gone IS NOT NULL"))
        self.described = names("SELECT client FROM descriptions")
        self.contributed = names("SELECT client FROM contributions")
        latest = ledger.row("SELECT MAX(number) AS number FROM publications")
        self.current: int | None = None if latest is None or ledger.get("stale") == "1" else latest["number"]
        self.members = names("SELECT client FROM members WHERE publication = ?", self.current)
        self.tabled = names("SELECT client FROM tables WHERE publication = ?", self.current)
        self.confirmed = names(
            "SELECT client FROM holders WHERE publication = ? AND confirmed IS NOT NULL", self.current
        )
        self.measured = names("SELECT client FROM metrics WHERE publication = ?", self.current)
        # Those whose contribution the next publication will hold need not refine by this one first.
        self.next_members = self.contributed - self.members if coordinator.ready() else frozenset()
