"""Which sums there are: what each is of, under which terms, and the layout of a member's vector.

A round's purpose names the sum, the publication that it is for (0 for none), and a hash of the terms and of the
cohort's counts. The purpose is part of every key and signature of the round (`apfl.federate.secure`): if a server tells
one site other terms than another, their masks do not cancel.

**How many bits a sum of statistics has.** Its entries off the diagonal of T'T are bounded by those on it, and these are
about N for rows like the expected ones (`Encoding.bounds`). The modulus has room for `ROOM` times that instead of for K
times the range of one site. The diagonal and the counts of the sum travel with room for everything. They tell whether
all else fitted, and if not, the same sum is made once more, over the same members, with room for everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from apfl.errors import InputError, printable
from apfl.federate.landmarks import Landmarks, spread_encoding
from apfl.federate.masked.counts import Counts, counts_layout
from apfl.federate.masked.pilot import Trial, moments_encoding
from apfl.federate.private.shares import noisy_layout
from apfl.federate.secure import Roster, Round
from apfl.federate.secure.digits import Digits
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256
from apfl.maths.bits import Layout, Part
from apfl.maths.integers import Encoding

__all__ = ["ROOM", "SUMS", "WIDE", "Purpose", "round_of"]

SUMS = ("count", "moments", "pilot", "hits", "spread", "statistics", "table", "metrics")
# Mean squares of a column, in those expected of it: landmarks of everyone's moments expect what rows are like. With
# other landmarks up to 5.6 were seen, with these 1.8 (docs/benchmarks.md).
ROOM = {"federation": 2.0}
ROOM_OF_OTHERS = 8.0
WIDE = 1  # the number of a sum of statistics with room for everything


@dataclass(frozen=True)
class Purpose:
    """One sum: of what, and for which publication; of statistics `WIDE`, if those with less room did not fit."""

    what: str
    number: int = 0

    @staticmethod
    def of(round_: Round) -> Purpose:
        """What a round is for."""
        what, _, rest = round_.purpose.partition(" ")
        number = rest.partition(" ")[0]
        if what not in SUMS or not number.isdecimal() or not number.isascii() or len(number) > 18:
            raise InputError(f"a round for '{printable(round_.purpose, 40)}', which is none of: {', '.join(SUMS)}")
        return Purpose(what, int(number))

    def text(self, terms: Terms, counts: Counts | None, trial: Trial | None = None) -> str:
        """As a round names it."""
        under = terms.digest if self.what == "count" or counts is None else terms.digest + counts.digest
        under += "" if trial is None else trial.digest
        return f"{self.what} {self.number} {sha256(under.encode())}"

    def layout(
        self, terms: Terms, landmarks: Landmarks | None, counts: Counts | None = None, trial: Trial | None = None
    ) -> Layout:
        """Of a member's vector."""
        if self.what == "count":
            return counts_layout(terms)
        if self.what == "moments":
            if counts is None:
                raise InputError("moments asked for without the counts of the cohort; nothing was sent")
            return moments_encoding(terms, counts).layout
        if self.what in ("pilot", "hits"):
            if trial is None:
                raise InputError("no pilot is under way under these terms; nothing was sent")
            return trial.statistics_layout if self.what == "pilot" else trial.hits_layout
        if self.what == "spread":
            if not terms.outlined or terms.spread is None:
                raise InputError("these terms draw no landmarks from moments; nothing was sent")
            return spread_encoding(terms).layout
        if self.what == "statistics":
            if landmarks is None:
                raise InputError("the terms are not settled yet, so there are no statistics to sum")
            return landmarks.encoding(terms).layout
        if self.what == "table":
            hits = Part("hits", math.prod(terms.table_shape), 32, signed=False)
            return Layout((hits, Part("n_rows", 1, 32, signed=False)))
        return Layout(tuple(Part(name, 1, 32, signed=False) for name in ("right", "n_test", "reports")))


def round_of(
    purpose: Purpose, number: int, roster: Roster, terms: Terms, counts: Counts | None, landmarks: Landmarks | None,
    trial: Trial | None = None,
) -> tuple[Round, Digits]:  # fmt: skip
    """The round with this number, and how vectors are digits in it; sites and server make it in the same way."""
    noisy = terms.private and purpose.what == "statistics" and landmarks is not None
    layout = noisy_layout(terms, roster) if noisy else purpose.layout(terms, landmarks, counts, trial)
    digits = Digits(layout, len(roster))
    if purpose == Purpose("statistics") and not noisy and landmarks is not None and counts is not None:
        digits = _narrow(landmarks, terms, counts, layout, len(roster))
    text = purpose.text(terms, counts, trial)
    return Round(terms.federation, roster.fingerprint, number, text, digits.length, digits.sum_bits), digits


def _narrow(landmarks: Landmarks, terms: Terms, counts: Counts, layout: Layout, n_members: int) -> Digits:
    """Digits with room for statistics like the expected ones. One place of the echo has no more rows than a site."""
    encoding = landmarks.encoding(terms)
    assert isinstance(encoding, Encoding)
    assert terms.most_rows is not None
    squares = ROOM.get(terms.method.landmarks, ROOM_OF_OTHERS) * counts.n_samples
    most = encoding.bounds(squares, max(counts.rows), n_members)
    echo = min(terms.most_rows.bit_length(), 16)
    parts = (replace(part, bits=echo) if part.name == "echo" else part for part in layout.parts)
    return Digits(Layout(tuple(parts)), n_members, most)
