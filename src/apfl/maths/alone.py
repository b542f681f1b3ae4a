"""Going alone: what a client would have without the published primary, and whether that is better.

A client cannot see who is behind a primary. It can see how the primary serves its own rows: it compares, row by row and
each row left out, the model that the federation offers with a ridge regression on its own rows. In the terms of the
dual stream that is a primary of weight 0: E = Y, so that the refinement is the whole model.

A site decides in two steps (`own_way`). It takes the weight on the primary that everyone's tables chose, unless its own
rows clearly object (`personalise.own_weights`): with weight 0 it has no primary, on the map and with the settings of
the federation. Then it compares that model with one that owes nothing to anybody: its own landmarks, its own scaling,
its own beta. This is the last guard, whatever others sent (`Comparison.goes_alone`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apfl.maths.hits import Grid, best_of, grid
from apfl.maths.leaveout import fit_refinement
from apfl.maths.personalise import FEW_ROWS, Plan, Rows, Setting, Shared, leave_out, own_weight
from apfl.maths.ridge import one_hot

__all__ = ["Alone", "Comparison", "compare", "go_alone", "own_way"]

# Standard errors of the paired difference by which the primary must gain, if rows are enough to see a gain. Without it,
# one of ten lies cost honest clients a point; it costs honest federations 0.1 points (docs/threat-model.md).
GAIN = 0.75
BY_CHANCE = 2  # left-out rows that a client of few rows may lose: of a dozen rows, two say nothing


@dataclass(frozen=True, eq=False)
class Alone:
    """A client's ridge regression on its own rows."""

    weights: Tensor  # (d_R, c)
    beta: float
    right: Tensor  # bool (n,): rows that it gets right once they are left out


@dataclass(frozen=True)
class Comparison:
    """A client's left-out rows under the federation's model and alone."""

    n_rows: int  # that could be judged
    n_unjudged: int  # whose leverage in the primary is too high, or not known well enough
    together: int  # right under the federation's model
    alone: int
    discordant: int  # right under one of the two only

    @property
    def goes_alone(self) -> bool:
        """Whether the client's rows show no gain by the primary; if they are too few to show one, whether they lose.

        A lie that leaves both models level on a client's rows makes chance decide, and half of all chances are losses.
        """
        gained, enough = self.together - self.alone, self.n_rows + self.n_unjudged >= FEW_ROWS
        return gained < (GAIN * math.sqrt(self.discordant) if enough else -BY_CHANCE)

    @property
    def blind(self) -> bool:
        """Whether the primary fits most rows so closely that leaving them out says nothing.

        A gamma chosen by `gcv` does not let it: the mean leverage of honest clients' rows is at most a half.
        """
        return self.n_unjudged > self.n_rows


def go_alone(psi: Tensor, labels: Tensor, n_classes: int, together: tuple[Tensor | None, Tensor | None]) -> Alone:
    """Fit a client's own rows, with the beta that gets most of them right once they are left out.

    ``together`` are groups and copies, as `leaveout.leaving` gives them.
    """
    unit = float(psi.to(torch.float64).square().sum(1).mean()) or 1.0  # rows of zeros: any beta will do
    tried = grid(unit, beta=None, balance=1.0, tau=0.0)
    rows = Rows(psi[:, :0], psi, labels, *together)
    targets = one_hot(labels, n_classes)
    nothing = Shared(targets.new_zeros(0, n_classes), targets.sum(0), _no_leverage(0))
    left_out = leave_out(rows, nothing, 1.0, tried, keep_scores=True)
    assert left_out.scores is not None
    beta = tried.betas[best_of(left_out.table)[0][0]]
    right = left_out.scores.at((beta, 1.0, 0.0)).argmax(1) == labels
    return Alone(fit_refinement(psi, targets, beta), beta, right)


def own_way(rows: Rows, shared: Shared, plan: Plan, smoothing: float, alone: Alone) -> tuple[float, Comparison]:
    """The weight on the primary that a client takes, and how the model with it compares with going alone."""
    weight = own_weight(rows, shared, plan, smoothing) if len(plan.settings) > 1 else plan.weight
    return weight, compare(rows, shared, plan.settings[weight], smoothing, alone, weight)


def compare(
    rows: Rows, shared: Shared, setting: Setting, smoothing: float, alone: Alone, weight: float = 1.0
) -> Comparison:
    """The federation's model with this setting and weight against going alone, on rows that can be judged.

    Without leverages (the settings were agreed, so nobody needed them) rows are left out of the refinement only. That
    flatters the primary by as much as the client's own rows shape it, which is little if another's rows outweigh them.
    """
    if shared.sketch is None and shared.factor is None:
        shared = replace(shared, sketch=_no_leverage(len(shared.weights)))
    beta, balance, tau = setting
    tried = Grid([beta], [balance], [tau])
    left_out = leave_out(rows, shared, smoothing, tried, weights=(weight,), keep_scores=True)
    assert left_out.scores is not None
    judged = left_out.scores.judged
    right = (left_out.scores.at(setting, weight).argmax(1) == rows.labels)[judged]
    own = alone.right[judged]
    return Comparison(
        len(right), left_out.n_unjudged, int(right.sum()), int(own.sum()), int((right != own).sum())
    )  # fmt: skip


def _no_leverage(width: int) -> Tensor:
    """The sketch of a primary that owes nothing to the client's rows."""
    return torch.zeros(width, 1, dtype=torch.float64)
