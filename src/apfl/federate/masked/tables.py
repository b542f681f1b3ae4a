"""What the ledger keeps of masked sums: the rosters, and for a publication tables of left-out hits and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apfl.errors import InputError
from apfl.federate.ledger import Ledger, Row
from apfl.federate.messages import seal_choice
from apfl.federate.secure.roster import Roster
from apfl.federate.terms import Terms

__all__ = ["choice_of_sums", "cohorts", "summed", "write_rosters", "write_summed"]


def cohorts(ledger: Ledger) -> dict[str, Roster]:
    """The rosters of a folder, in the order in which they came, by fingerprint."""
    told = json.loads(ledger.get("rosters") or "[]")
    rosters = [Roster({name: bytes.fromhex(key) for name, key in each.items()}) for each in told]
    return {roster.fingerprint: roster for roster in rosters}


def write_rosters(ledger: Ledger, rosters: Iterable[Roster]) -> None:
    """Keep these rosters and no others."""
    told = [{name: key.hex() for name, key in roster.keys.items()} for roster in rosters]
    ledger.put("rosters", json.dumps(told))


def summed(ledger: Ledger, what: str, number: int) -> dict[str, list[int]]:
    """Roster's fingerprint -> the sum of its members' vectors under this publication."""
    kept: dict[str, Any] = json.loads(ledger.get(f"sums of {what}") or "{}")
    return dict(kept["sums"]) if kept.get("publication") == number else {}


def write_summed(ledger: Ledger, what: str, number: int, roster: str, vector: Sequence[int]) -> None:
    """Keep a sum under a publication; those under earlier ones are of no use any more."""
    sums = summed(ledger, what, number) | {roster: list(vector)}
    ledger.put(f"sums of {what}", json.dumps({"publication": number, "sums": sums}))


def choice_of_sums(ledger: Ledger, terms: Terms, current: Row) -> bytes:
    """The settings that the summed tables choose; nobody's table can be bounded, because nobody's is seen."""
    tables = summed(ledger, "table", current["number"])
    if terms.wants_tables and not tables:
        raise InputError("there is no sum of tables of left-out hits yet")
    hits = sum((torch.tensor(vector[:-1]) for vector in tables.values()), torch.zeros((), dtype=torch.int64))
    n_rows = sum(vector[-1] for vector in tables.values())
    return seal_choice(
        terms,
        current["number"],
        current["unit"],
        hits.reshape(terms.table_shape) if tables else hits,
        list(tables),
        n_rows,
    )
