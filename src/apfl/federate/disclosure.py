"""Which of a client's rows the federation can use, which of them leave as sums, and that in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError, printable
from apfl.federate.landmarks import spread_encoding
from apfl.federate.private.disclosure import lines_of
from apfl.federate.terms import Terms
from apfl.maths.integers import statistics_layout
from apfl.maths.leaveout import ECHO
from apfl.maths.normalise import check_features, needs_moments
from apfl.maths.pilot import CANDIDATES, MOST_ROWS, WIDTH
from apfl.maths.wire import form_for, statistics_shapes
from apfl.methods.apfl import APFL

__all__ = [
    "NEVER",
    "PLAIN",
    "WhatLeaves",
    "default_masked",
    "leaves_of",
    "names_under",
    "of_large_classes",
    "select",
    "what_leaves",
    "without_classes",
]


PLAIN = (
    "the server sees each of these by itself, and can often recover this site's rows from them; under masks (join "
    "--roster) it sees sums over all sites only"
)
NEVER = "never: rows, images, labels of single rows, the personal model; metrics only if you say so"


def select(train: Shard, class_names: Sequence[str], terms: Terms) -> Shard:
    """A client's rows under these terms, or under a draft: labels in the federation's order, and what is shared."""
    if terms.numeric:
        raise InputError(
            f"rows with classes given; this federation's terms say {terms.target}. Give join --target {terms.target}, "
            f"with the columns {printable(', '.join(terms.class_names or ()))} as --label-column"
        )
    if terms.n_features is not None and train.features.shape[1] != terms.n_features:
        raise InputError(
            f"features of width {train.features.shape[1]} given; the federation agreed on {terms.n_features}: "
            "use the same backbone"
        )
    check_features(terms.method.normalise, [train.features])
    names = names_under(class_names, terms)
    index = torch.tensor([names.index(name) if name in names else -1 for name in class_names])
    labels = index[train.labels]
    known = labels >= 0
    if not bool(known.any()):
        raise InputError(f"no row is of a class that the federation has ({', '.join(names[:8])}); compare the names")
    rows = Shard(train.features, labels, train.groups).where(known)
    return replace(rows, shared=_shared(rows.labels, terms))


def _shared(labels: Tensor, terms: Terms) -> Tensor:
    """Which rows the federation may have, bool (n,): classes of enough rows, and no more rows than the cap."""
    if terms.private:  # all or none: if some were drawn, one row more would exchange others
        return torch.full_like(labels, terms.row_limit is None or len(labels) <= terms.row_limit, dtype=torch.bool)
    shared = of_large_classes(torch.ones_like(labels, dtype=torch.bool), labels, terms)
    if terms.row_limit is None or int(shared.sum()) <= terms.row_limit:
        return shared
    places = np.random.default_rng(terms.seed).permutation(shared.nonzero()[:, 0].numpy())  # the same at every call
    drawn = torch.zeros_like(shared)
    drawn[torch.from_numpy(places[: terms.row_limit])] = True
    return of_large_classes(drawn, labels, terms)


def of_large_classes(among: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """Those of the rows ``among`` whose class has at least ``min_per_class`` of them."""
    counts = torch.bincount(labels[among], minlength=int(labels.max()) + 1)
    return among & (counts >= terms.min_per_class)[labels]


def without_classes(rows: Shard, admitted: Sequence[bool]) -> Shard:
    """The rows, of which those of classes that are not admitted are not shared."""
    assert rows.shared is not None
    return replace(rows, shared=rows.shared & torch.tensor(admitted)[rows.labels])


def names_under(class_names: Sequence[str], terms: Terms) -> tuple[str, ...]:
    """What labels index: the agreed classes, or the client's own while none are agreed."""
    return tuple(class_names) if terms.class_names is None else terms.class_names


@dataclass(frozen=True)
class WhatLeaves:
    """What a client sends, in numbers; `lines` says it in words."""

    n_samples: int  # rows behind the statistics
    counts: dict[str, int]  # rows of each class behind them
    withheld: dict[str, int]  # classes whose rows stay out of them, because they are too few
    unknown: dict[str, int]  # classes that the federation does not have
    n_features: int
    width: int | None  # of the map; None while the terms are not settled
    numbers: int | None  # in the statistics
    n_bytes: int | None
    table: int  # integers in the table of left-out hits
    moments: bool
    keeps: bool  # whether the server keeps single contributions
    bits: int = 0  # of the integers that statistics are; 0: they are no integers
    spread: str = ""  # second moments behind landmarks: products, squares, or which of them is open; none
    spread_bytes: int | None = None
    beyond: int = 0  # rows that stay out because the terms cap a client's rows
    smallest_sum: int = 0  # sites in a masked sum; 0: the server sees what this client sends
    public: str = ""  # the file that landmarks are drawn from, if the server has one
    pilot: int = 0  # normalisations that a pilot tries; 0: the terms state one, or it is chosen already
    private: tuple[str, ...] = ()  # under epsilon: what leaves, in words

    def lines(self) -> list[str]:
        """In words, one statement a line."""
        if self.private:
            return [*self.private, *self._stays()]
        return self._masked_lines() if self.smallest_sum else self._plain_lines()

    def _masked_lines(self) -> list[str]:
        """Who sees what under masks."""
        size = "" if self.numbers is None else f": {self.numbers:,} integers of {self.bits} bits before masking"
        lines = [
            "everything below leaves under a mask: the server learns the sum over all sites that take part, at least "
            f"{self.smallest_sum}, and nothing of this site but its name, its keys and that it takes part",
            f"into the first sum: how many rows each class has ({_listed(self.counts)}), whether there are any, and "
            "between which powers of two their number lies",
            f"into a sum, once: sums of products of the activated features, and their sums by class{size}; how many "
            f"rows fall into each of {ECHO:,} buckets by a hash, and how many repeat another row of this site",
        ]
        if self.spread:
            lines.insert(2, self._spread_line().replace("then, once", "into a sum, once"))
        if self.moments:
            lines[2:2] = self._masked_moments()
        if self.public:
            lines.append(self._public_line())
        if self.table:
            lines.append(f"into a sum: {self.table:,} counts of left-out rows predicted right, one for each setting")
        lines += [
            "other sites see the roster, who is in a sum, and what is published: the primary, rows of each class over "
            "all sites, a sketch",
            "withheld from the other sums: classes with fewer than 20 rows over all sites, or at one site only",
            *self._stays(),
            "checked here before anything is sent: the roster, the fewest sites in a sum, and that maps have at most a "
            "quarter as many columns as there are rows",
            "if this site leaves later, the others sum up again, and a server that kept the former sum learns this "
            "site's part from the difference",
        ]
        return [*lines, NEVER]

    def _masked_moments(self) -> list[str]:
        """What a normalisation takes that is made from everyone's moments."""
        rows = "rows, of their roots and of rows at one length" if self.pilot else "rows"
        lines = [
            "with it: the power of four of the largest entry of each feature over all sites, without whose it is; into "
            f"a sum, once: sum and sum of squares of each of the {self.n_features} features of the {rows}, how many "
            "entries were cut back, and which ways of scaling these rows do not bear"
        ]
        if self.pilot:
            lines += [
                f"into a sum, once, for each of {self.pilot} ways of scaling the features: sums of products and sums "
                f"by class on a map of at most {WIDTH} landmarks, of at most {MOST_ROWS:,} rows; and counts of "
                "left-out rows predicted right"
            ]
        return lines

    def _stays(self) -> list[str]:
        """What stays at the site that could have been expected to leave."""
        lines = [
            f"withheld: class {name} with {_rows(n)}, which could be read off the sums"
            for name, n in self.withheld.items()
        ]
        if self.beyond:
            lines.append(f"not sent: {_rows(self.beyond)} beyond what the terms let one site contribute")
        return lines + [
            f"not used: class {name} with {_rows(n)}; the federation does not have it"
            for name, n in self.unknown.items()
        ]

    def _plain_lines(self) -> list[str]:
        what = f"integers of {self.bits} bits at most" if self.bits else "numbers"
        size = f", as {what}" if self.bits else ""
        if self.numbers is not None:
            size = f": {self.numbers:,} {what}, {(self.n_bytes or 0) / 1e6:.1f} MB"
        lines = [
            PLAIN,
            f"first: the number of rows ({self.n_samples:,}), the feature width ({self.n_features}), and the names of "
            f"{len(self.counts)} classes: {', '.join(self.counts)}",
            f"then, once: sums of products of the activated features of these rows, and their sums by class{size}",
            f"with it, how many rows each class has: {_listed(self.counts)}",
            "with it, to find rows that several sites hold: how many rows fall into each of "
            f"{ECHO:,} buckets by a hash, and how many repeat another row of this site",
        ]
        if self.spread:
            lines.insert(2, self._spread_line())
        if self.pilot:
            lines[2:2] = self._pilot_lines()
        if self.moments:
            three = ", of the same at the root and with rows at one length" if self.pilot else ""
            lines.insert(
                2,
                f"also first: sum and sum of squares of each of the {self.n_features} features, and of the rows' sizes"
                f"{three}",
            )
        if self.table:
            lines.append(f"later: {self.table:,} counts of left-out rows predicted right, one for each setting tried")
        lines.append(
            "the server keeps this contribution by itself" if self.keeps else "the server keeps only everyone's sum"
        )
        lines += self._stays()
        if self.public:
            lines.append(self._public_line())
        if self.bits:
            lines.append("all sums are rounded at random to integers, by a seed that stays at this site")
        return [*lines, NEVER]

    def _pilot_lines(self) -> list[str]:
        """What a pilot takes."""
        return [
            f"then, once, for each of {self.pilot} ways of scaling the features: sums of products and sums by class on "
            f"a map of at most {WIDTH} landmarks, of at most {MOST_ROWS:,} rows of all sites",
            "then, once, for each of them: counts of left-out rows predicted right, one for each setting. The "
            "server deletes both when it has chosen one of them",
        ]

    def _public_line(self) -> str:
        return f"nothing for the landmarks: the server draws them from {self.public}"

    def _spread_line(self) -> str:
        size = "" if self.spread_bytes is None else f": at most {self.spread_bytes / 1e6:.1f} MB"
        return (
            f"then, once: the sum of each of the {self.n_features} normalised features and the sums of their "
            f"{self.spread}, from which the server draws landmarks{size}"
        )


def default_masked(class_names: Sequence[str], n_features: int) -> dict[str, Any]:
    """Masked terms by default, with a site's own classes: what a site lists that has a roster and no terms yet."""
    return {
        "class_names": tuple(class_names),
        "n_features": n_features,
        "masked": True,
        "method": APFL(map="landmarks"),
    }


def what_leaves(train: Shard, class_names: Sequence[str], terms: Terms) -> WhatLeaves:
    """What a client with these rows would send."""
    names = names_under(class_names, terms)
    rows = select(train, class_names, terms)
    counts, sent = (
        dict(zip(names, torch.bincount(codes, minlength=len(names)).tolist(), strict=True))
        for codes in (rows.labels, rows.only_shared().labels)
    )
    own = dict(zip(class_names, torch.bincount(train.labels, minlength=len(class_names)).tolist(), strict=True))
    unknown = {name: n for name, n in own.items() if n and name not in names}
    return leaves_of(counts, sent, unknown, train.features.shape[1], terms)


def leaves_of(
    counts: Mapping[str, int], sent: Mapping[str, int], unknown: Mapping[str, int], n_features: int, terms: Terms
) -> WhatLeaves:
    """What a client sends, by the rows of each class that it has and that are behind its statistics."""
    shared = {name: n for name, n in sent.items() if n}
    withheld = {name: n for name, n in counts.items() if 0 < n < terms.min_per_class}
    n = sum(shared.values())
    numbers, n_bytes = _statistics_size(terms, n) if terms.settled else (None, None)
    return WhatLeaves(
        n_samples=n,
        counts=shared,
        withheld=withheld,
        unknown=dict(unknown),
        n_features=n_features,
        width=terms.width if terms.settled else None,
        numbers=numbers,
        n_bytes=n_bytes,
        table=int(np.prod(terms.table_shape)) if terms.wants_tables else 0,
        moments=needs_moments(terms.method.normalise),
        keeps=terms.keep_contributions,
        bits=terms.bits if terms.landmarked else 0,
        spread=_second_moments(terms),
        spread_bytes=None if terms.spread is None else spread_encoding(terms).layout.n_bytes,
        beyond=sum(counts.values()) - n - sum(withheld.values()),
        smallest_sum=terms.smallest_sum if terms.masked else 0,
        public=_public(terms),
        pilot=len(CANDIDATES) if terms.pilots else 0,
        private=lines_of(terms, shared, n_features),
    )


def _statistics_size(terms: Terms, n: int) -> tuple[int, int]:
    """Numbers and bytes of Phi'Phi and Phi'Y."""
    if terms.landmarked:
        layout = statistics_layout(terms.width, terms.n_classes, terms.bits)
        sums = [part for part in layout.parts if part.name in ("below", "diagonal", "cross")]
        return sum(part.size for part in sums), sum(part.n_bytes for part in sums)
    shapes = statistics_shapes(form_for(n, terms.width), n, terms.width, terms.n_classes)
    numbers = sum(map(math.prod, shapes.values()))
    return numbers, numbers * terms.dtype.itemsize


def _second_moments(terms: Terms) -> str:
    """Which sums the landmarks are drawn from, in words; empty if none."""
    if not terms.landmarked or terms.method.landmarks != "federation":
        return ""
    open_yet = "products (squares alone, if all sites have fewer rows than four for each feature)"
    return {"full": "products", "diagonal": "squares", None: open_yet}[terms.spread]


def _public(terms: Terms) -> str:
    """The file of public features behind the landmarks, in words; empty if there is none."""
    if terms.public_sha256 is None:
        return ""
    return f"a file of public features that it has ({terms.public_rows:,} rows, SHA-256 {terms.public_sha256[:12]})"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"
