"""What a client computes from a publication: its table of left-out hits, and its personal model.

Rows that the primary has not seen (withheld classes; all rows of a client that only receives) have no leverage in it,
and leaving them out changes nothing about it.
"""

from __future__ import annotations

from torch import Tensor

from apfl.federate.disclosure import Usable
from apfl.federate.messages import Broadcast
from apfl.federate.terms import Terms
from apfl.maths.leaveout import leaving
from apfl.maths.personalise import Rows, Shared, leave_out, refine
from apfl.models.dual_stream import DualStream

__all__ = ["left_out_hits", "personal_model"]


def left_out_hits(usable: Usable, terms: Terms, broadcast: Broadcast, member: bool) -> Tensor:
    """How many of the rows behind the statistics each setting gets right once they are left out, int64."""
    rows = _mapped(usable.only_shared(), terms, member)
    return leave_out(rows, _shared(broadcast), terms.method.smoothing, terms.grid(broadcast.unit)).table


def personal_model(
    usable: Usable, terms: Terms, broadcast: Broadcast, member: bool, setting: tuple[float, float, float]
) -> DualStream:
    """The client's model with this beta, balance and tau, from all its rows."""
    own = refine(_mapped(usable, terms, member), _shared(broadcast), setting, terms.method.smoothing)
    primary_map, refinement_map = terms.maps(usable.rows.features)
    return DualStream(
        primary_map, broadcast.weights, refinement_map, own.refinement, own.balance, terms.normaliser(),
        terms.class_names, prior=own.prior,
    )  # fmt: skip


def _mapped(usable: Usable, terms: Terms, member: bool) -> Rows:
    rows = usable.rows
    z = terms.normaliser()(rows.features)
    phi, psi = (stream(z) for stream in terms.maps(rows.features))
    together = leaving(rows.features, rows.labels, rows.groups)
    return Rows(phi, psi, rows.labels, *together, seen=usable.shared & member)


def _shared(broadcast: Broadcast) -> Shared:
    return Shared(broadcast.weights, broadcast.class_counts, broadcast.leverage)
