"""What a client computes from a publication: its table of left-out hits, and its personal model.

As `apfl.maths.personalise`, for one client and from what was sent to it. Rows that the primary has not seen (withheld
classes; all rows of a client that only receives) have no leverage in it, and leaving them out changes nothing about it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apfl.federate.disclosure import Rows
from apfl.federate.messages import Broadcast
from apfl.federate.terms import Terms
from apfl.maths.hits import hits, local_prior
from apfl.maths.leaveout import HatBasis, LeftOut, fit_refinement, hat_basis, leaving, whiten
from apfl.maths.ridge import one_hot
from apfl.maths.wire import unpack
from apfl.models.dual_stream import DualStream

__all__ = ["left_out_hits", "personal_model"]


def left_out_hits(rows: Rows, terms: Terms, broadcast: Broadcast, member: bool) -> Tensor:
    """How many of the rows behind the statistics each setting gets right once they are left out, int64."""
    rows = rows.only_shared()
    z = terms.normaliser()(rows.features)
    phi, psi = (each(z) for each in terms.maps(rows.features))
    targets = one_hot(rows.labels, terms.n_classes)
    seen = torch.full_like(rows.shared, member)
    residual = targets - phi.to(torch.float64) @ broadcast.weights
    left = _left_out(hat_basis(psi), phi, residual, rows, terms, broadcast, seen)
    everyone = broadcast.class_counts + targets[~seen].sum(0)
    return hits(left, rows.labels, targets.sum(0), everyone, terms.method.smoothing, terms.grid(broadcast.unit))


def personal_model(
    rows: Rows, terms: Terms, broadcast: Broadcast, member: bool, setting: tuple[float, float, float]
) -> DualStream:
    """The client's model with this beta, balance and tau, from all its rows."""
    beta, balance, tau = setting
    normalise, maps = terms.normaliser(), terms.maps(rows.features)
    phi, psi = (each(normalise(rows.features)) for each in maps)
    targets = one_hot(rows.labels, terms.n_classes)
    seen = rows.shared & member
    residual = targets - phi.to(torch.float64) @ broadcast.weights
    if terms.wants_leverage:
        none = HatBasis(residual[:, :0], residual[0, :0])  # what is fitted to does not depend on what is fitted
        residual = _left_out(none, phi, residual, rows, terms, broadcast, seen).target
    prior = None
    if tau:
        everyone = broadcast.class_counts + targets[~seen].sum(0)
        prior = tau * local_prior(targets.sum(0), everyone, terms.method.smoothing)
    refinement = fit_refinement(psi, residual, beta)
    return DualStream(
        maps[0], broadcast.weights, maps[1], refinement, balance, normalise, terms.class_names, prior=prior
    )


def _left_out(
    hat: HatBasis,
    phi: Tensor,
    residual: Tensor,
    rows: Rows,
    terms: Terms,
    broadcast: Broadcast,
    seen: Tensor,
) -> LeftOut:
    """Left-out scores, with V (n, any) such that V V' is the primary's hat matrix: zero for rows it has not seen."""
    assert broadcast.leverage is not None
    sketched = terms.method.sketch > 0
    if sketched:
        whitened = phi.to(torch.float64) @ broadcast.leverage
    else:
        whitened = whiten(phi, torch.tril(unpack(broadcast.leverage)))
    groups, copies = leaving(rows.features, rows.labels, rows.groups)
    return LeftOut(hat, whitened * seen[:, None], residual, terms.method.refinement, groups, sketched, copies)
