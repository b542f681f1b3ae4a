"""What a client whose targets are columns sends, in words."""

from __future__ import annotations

from dataclasses import dataclass

from apfl.data.federation import Shard
from apfl.federate.disclosure import NEVER, PLAIN, WhatLeaves
from apfl.federate.numbers.messages import n_models
from apfl.federate.numbers.shared import asked_of, stages_of
from apfl.federate.terms import Terms
from apfl.maths.regression import DECADES, DRAWS, open_weights
from apfl.maths.ridge_cv import RIDGES
from apfl.maths.wire import spread_bytes, statistics_bytes
from apfl.methods._numbers import MAPS, THRESHOLDS

__all__ = ["NumbersLeave", "what_leaves"]


@dataclass(frozen=True)
class NumbersLeave(WhatLeaves):
    """The same with columns as targets: no classes, and everyone's sum for every member."""

    targets: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()  # a line for each

    def lines(self) -> list[str]:
        """In words, one statement a line."""
        targets = ", ".join(self.targets)
        size = "" if self.numbers is None else f": {self.numbers:,} numbers, {(self.n_bytes or 0) / 1e6:.1f} MB"
        landmarks = "" if self.spread_bytes is None else f": {self.spread_bytes / 1e6:.1f} MB"
        lines = [
            PLAIN.split(" from them;")[0] + " from them",
            f"first: the number of rows ({self.n_samples:,}), the feature width ({self.n_features}), the names of "
            f"{len(self.targets)} target columns: {targets}",
            f"also first: sum and sum of squares of each of the {self.n_features} features and of each target column, "
            "and of the rows' sizes",
            f"then, once: the sums of the features of rows at one length, and of their {self.spread}, from which the "
            f"server draws landmarks{landmarks}",
            "then, once: sums of products of the features and of the similarities to the landmarks, with each other "
            f"and with the targets; sums and energy of the targets; how many rows repeat another one{size}",
            "every other member is sent the sum of these over all members (three or more), and may subtract its own; "
            "if one site leaves later, members that keep the former sum learn its part from the difference",
            *self.stages,
            "the server keeps this contribution by itself" if self.keeps else "the server keeps only everyone's sum",
        ]
        if self.beyond:
            lines.append(f"not sent: {self.beyond:,} rows beyond what the terms let one site contribute")
        return [*lines, NEVER.replace("labels of single rows", "targets of single rows").split(";")[0]]


def what_leaves(rows: Shard, terms: Terms) -> NumbersLeave:
    """What a client with these rows would send."""
    n, n_features, names = len(rows.only_shared()), rows.features.shape[1], terms.class_names or ()
    numbers = n_bytes = None
    if terms.settled:
        n_bytes = statistics_bytes(n, terms.width, terms.n_classes)
        numbers = n_bytes // 8
    full = terms.spread == "full"
    return NumbersLeave(
        n_samples=n, counts={}, withheld={}, unknown={}, n_features=n_features,
        width=terms.width if terms.settled else None, numbers=numbers, n_bytes=n_bytes, table=0, moments=True,
        keeps=terms.keep_contributions, beyond=len(rows) - n, targets=names, stages=_stages(terms),
        spread="products (squares alone, if all sites have fewer rows than four for each feature)"
        if terms.spread is None else "products" if full else "squares",
        spread_bytes=None if terms.spread is None else spread_bytes(terms.n_in, full=full),
    )  # fmt: skip


def _stages(terms: Terms) -> tuple[str, ...]:
    """A line for each table."""
    asked = asked_of(terms)
    n_open = len(MAPS) * len(open_weights(asked.fixed))
    first = 3 * n_open * len(DECADES) + 2 * len(RIDGES) * asked.plain
    words = {
        "likelihoods": f"later: {first:,} sums over the rows, of which the likeliest ridges are chosen",
        "errors": f"later: {DRAWS} sums of squared errors of left-out rows for each of {n_models(terms)} models, with "
        "weights that are drawn here from the rows themselves",
        "thresholds": f"later, for each label: how many left-out rows are above each of {len(THRESHOLDS)} thresholds, "
        "and how many of these have it",
    }
    return tuple(words[stage] for stage in stages_of(terms))
