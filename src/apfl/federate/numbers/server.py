"""The server's side: it draws landmarks, publishes everyone's sum, and chooses stage by stage.

What a stage chose is in the ledger, once: tables of the next stage are made under it. It goes with its publication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import add

import torch

from apfl.errors import InputError
from apfl.federate.intake import Receipt, same_client
from apfl.federate.landmarks import Landmarks, settled_with
from apfl.federate.ledger import Ledger, Row
from apfl.federate.names import check_name
from apfl.federate.numbers.messages import (
    Errors,
    Likelihoods,
    Published,
    Table,
    open_chosen,
    open_spread,
    open_sum,
    open_table,
    seal_chosen,
    seal_sum,
)
from apfl.federate.numbers.shared import Chosen, gammas_of, stages_of
from apfl.federate.pool import Pool
from apfl.federate.publishing import read
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256
from apfl.maths.landmarks import draw_points, landmark_map
from apfl.maths.regression import NumberStatistics, Primary, likeliest_beta, primary_of, shares_of
from apfl.maths.ridge_cv import RIDGES
from apfl.methods._numbers import MAPS, Labelled, clean, prior_of, thresholds_of

__all__ = ["NumberChoice", "draw", "primary_on_widest", "published", "seal"]


def draw(outline: Terms, spreads: Iterable[bytes]) -> tuple[Terms, bytes]:
    """The settled terms and the message with the landmarks, from the sum of the clients' moments."""
    summed = reduce(add, (open_spread(data, outline).spread for data in spreads))
    drawn = landmark_map(draw_points(int(outline.method.d_primary), outline.seed, summed))
    return settled_with(outline, Landmarks(drawn, torch.zeros(0)))


def seal(terms: Terms, number: int, pool: Pool, members: list[str]) -> tuple[bytes, float, float, int]:
    """A publication of the sum as it is now, with the widest map's gamma and unit, and the rows behind it."""
    stats = pool.running().statistics()
    assert isinstance(stats, NumberStatistics)
    gammas = gammas_of(stats, terms)
    unit = primary_of(stats, gammas[-1]).unit
    return seal_sum(terms, number, stats, gammas, members), gammas[-1], unit, stats.n_samples


def primary_on_widest(stats: NumberStatistics, terms: Terms) -> Primary:
    """The primary of a sum on the widest map."""
    return primary_of(stats, gammas_of(stats, terms)[-1])


def published(ledger: Ledger, row: Row, terms: Terms, landmarks: Landmarks) -> Published:
    """A publication as sites read it."""
    return open_sum(read(ledger, row), terms, landmarks)


class NumberChoice:
    """What is chosen for the current publication."""

    def __init__(self, ledger: Ledger, pool: Pool, terms: Terms) -> None:
        self.ledger, self.pool, self.terms = ledger, pool, terms

    def stage(self, number: int) -> str:
        """The stage whose tables are waited for; empty if all is chosen."""
        return next((each for each in stages_of(self.terms) if self.ledger.chosen_in(number, each) is None), "")

    def so_far(self, number: int) -> bytes:
        """The last choice that was made; empty before the first."""
        made = [self.ledger.chosen_in(number, stage) for stage in stages_of(self.terms)]
        return next((bytes(row["data"]) for row in reversed(made) if row is not None), b"")

    def chosen(self, number: int) -> bytes:
        """The whole choice, for everyone."""
        if stage := self.stage(number):
            raise InputError(f"the tables of {stage} for publication {number} are still to be added up")
        return self.so_far(number)

    def take(self, data: bytes, sender: str | None) -> Receipt:
        """A member's table of the stage that is waited for, once."""
        sent, current = open_table(data, self.terms), self.ledger.current()
        client = same_client(sent.client, sender)
        if current is None or sent.number != current["number"]:
            raise InputError(f"a table for publication {sent.number}; fetch the current one and send its table")
        before = self.ledger.stage_of(sent.number, sent.stage, check_name("client", client))
        if before is not None and before["sha256"] == sent.sha256:
            return Receipt("duplicate", client, "this table counts already", sent.sha256, len(data))
        if before is not None:
            raise InputError(f"{client} has sent another table of {sent.stage} for publication {sent.number} already")
        waiting = self.stage(sent.number)
        if sent.stage != waiting:
            raise InputError(f"a table of {sent.stage}; tables of {waiting or 'nothing'} are added up now")
        so_far = self.so_far(sent.number)
        if sent.after != (sha256(so_far) if so_far else ""):
            raise InputError("a table that was made after another choice; fetch the present one and send its table")
        contribution = self.ledger.contribution_of(client)
        if contribution is None or contribution["sha256"] != self.ledger.member(sent.number, client):
            raise InputError(f"{client} is not in publication {sent.number}; only members' tables count")
        n = contribution["n"]
        if _rows(sent.table) > n:
            raise InputError(f"a table of {_rows(sent.table)} rows; {client} has contributed {n}")
        with self.ledger.transaction():
            self.ledger.write_stage(client, sent.number, sent.stage, sent.sha256, n, data)
            self.ledger.event("table", client, number=sent.number, stage=sent.stage, bytes=len(data))
        return Receipt("accepted", client, "", sent.sha256, len(data))

    def choose(self, current: Row) -> str:
        """What the tables at hand choose in the stage that is waited for, kept; that stage."""
        number = current["number"]
        stage = self.stage(number)
        summed: Table | None = None
        hashes = []
        for row in self.ledger.stage_tables(number, stage):  # one at a time
            own = open_table(row["data"], self.terms).table
            summed = own if summed is None else summed + own  # type: ignore[operator]  # both are of this stage
            hashes.append(row["sha256"])
        if summed is None:
            raise InputError(f"no client has sent a table of {stage} yet")
        data = seal_chosen(self.terms, number, stage, self._chosen(current, summed), hashes)
        with self.ledger.transaction():
            self.ledger.write_chosen(number, stage, sha256(data), data)
            self.ledger.event("chosen", number=number, stage=stage, tables=len(hashes))
        return stage

    def _chosen(self, current: Row, summed: Table) -> Chosen:
        before = self.so_far(current["number"])
        made = open_chosen(before, self.terms)[2] if before else Chosen(({},) * len(MAPS))
        assert self.pool.landmarks is not None
        shared = published(self.ledger, current, self.terms, self.pool.landmarks).shared
        if isinstance(summed, Likelihoods):
            pairs = zip(shared.primaries, summed.evidence, strict=True)
            betas = [{w: likeliest_beta(primary, told) for w, told in own.items()} for primary, own in pairs]
            return replace(made, betas=tuple(betas), ridge=_plain_ridge(summed))
        if isinstance(summed, Errors):
            prior = prior_of(shared.settings(made), shared.asked.plain)
            found = (shares_of(summed.models, prior), shares_of(summed.shared))
            mixed, anybody = (tuple(clean(each).tolist()) for each in found)
            return replace(made, shares=mixed, anybody=anybody)
        return replace(made, thresholds=tuple(thresholds_of(summed).tolist()))


def _plain_ridge(summed: Likelihoods) -> float | None:
    """The plain ridge of the least left-out error, if there is one; of equals the smallest."""
    if summed.plain is None:
        return None
    errors, judged = summed.plain.tolist()
    tried = [(error if n else math.inf, ridge) for error, n, ridge in zip(errors, judged, RIDGES, strict=True)]
    return float(min(tried)[1])


def _rows(table: Table) -> int:
    """The most rows that a table speaks of."""
    if isinstance(table, Likelihoods):
        return max((told.n for own in table.evidence for told in own.values()), default=0)
    if isinstance(table, Errors):
        return max(table.models.n, table.shared.n)
    assert isinstance(table, Labelled)
    return max(int(table.given.max()), int(table.held.max()))
