"""How far one client moves the published primary, seen on the rows of the others.

    |Phi (G - G_without)|_F / |Phi G_without|_F        Phi: the others' rows, of which the server has Phi'Phi

0 if the client changes nothing. Rows like the others' move the scores by a few per cent, wrong labels or a large weight
by many. One solve for each member, from contributions that the server keeps.
"""

from __future__ import annotations

import json
import math

from torch import Tensor

from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_publication
from apfl.federate.pool import Pool
from apfl.federate.terms import Terms
from apfl.maths.ridge import Statistics, solve

__all__ = ["influence_of_members"]


def influence_of_members(ledger: Ledger, pool: Pool, terms: Terms) -> dict[str, float]:
    """Each member's influence on the current publication by its contribution's hash, computed once and kept.

    Empty before the first publication, if single contributions are not kept, and if there is one member only.
    """
    current = ledger.current()
    if current is None or not terms.keep_contributions or len(members := ledger.members(current["number"])) < 2:
        return {}
    known = ledger.influence(current)
    if not known:
        weights = open_publication(ledger.blobs.read(current["blob"], current["sha256"]), terms).weights
        known = {
            digest: influence(weights, pool.without(client, None).statistics(), current["gamma"])
            for client, digest in members.items()
        }
        with ledger.transaction():
            ledger.put("influence", json.dumps({"publication": current["number"], "members": known}))
    return known


def influence(weights: Tensor, others: Statistics, gamma: float) -> float:
    """How far a primary is from that of the others' rows, on those rows, relative to the latter."""
    without = solve(others, gamma)

    def energy(primary: Tensor) -> float:
        """|Phi G|_F^2 = trace G' Phi'Phi G."""
        return max(float((primary * (others.autocorrelation @ primary)).sum()), 0.0)

    return math.sqrt(energy(weights - without) / (energy(without) or 1.0))  # others whose primary says nothing
