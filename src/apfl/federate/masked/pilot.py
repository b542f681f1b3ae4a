"""The pilot and the moments before it as masked sums: layouts, what a site adds, and what the server makes of the sum.

    moments   sums and squares of each column of the rows as they are, at the root and at one length; for each
              normalisation, how many sites have rows that do not bear it
    pilot     the statistics of some rows on the narrow map of every normalisation
    hits      left-out hits of these rows under every normalisation and setting, and of how many rows

A normalisation that is stated and needs mean and std takes the first of them alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from apfl.errors import InputError
from apfl.federate.masked.counts import SIZES, Counts, tells_ranges
from apfl.federate.pilot import Primaries, Question, open_primaries, open_question, seal_question
from apfl.federate.secure.digits import PRESENCE_BITS
from apfl.federate.terms import Terms
from apfl.maths.bits import Layout, Part
from apfl.maths.moments_encoding import BUCKETS, MomentsEncoding, largest_buckets
from apfl.maths.normalise import Normaliser, normaliser
from apfl.maths.pilot import CANDIDATES, Described

if TYPE_CHECKING:
    from apfl.federate.site import Site

__all__ = ["Trial", "asked_of", "counted", "moments_encoding", "own_moments", "scaling_of", "tried_under"]


# ------------------------------------------------------------------------------------------------------- the layouts


@dataclass(frozen=True, eq=False)
class Trial:
    """A pilot under way: what is tried, and for the tables the primaries."""

    question: Question
    primaries: bytes | None = None

    @property
    def digest(self) -> str:
        """By what a round names it: sites that were told other maps or primaries do not mask together."""
        return self.question.sha256 + ("" if self.primaries is None else hashlib.sha256(self.primaries).hexdigest())

    @property
    def statistics_layout(self) -> Layout:
        """Of the statistics of every candidate."""
        return self.question.layout

    @property
    def hits_layout(self) -> Layout:
        """Of the table of left-out hits, and of how many rows it is."""
        hits = Part("hits", math.prod(self.question.shape), 32, signed=False)
        return Layout((hits, Part("n_rows", 1, 32, signed=False)))

    def opened(self) -> Primaries:
        """The primaries."""
        if self.primaries is None:
            raise InputError("a table of a pilot asked for without its primaries; they must be sent again")
        return open_primaries(self.primaries, self.question)


def tried_under(terms: Terms, counts: Counts | None, question: bytes | None, primaries: bytes | None) -> Trial | None:
    """The pilot that a site is asked for, within what its cohort has together."""
    if question is None:
        return None
    asked = open_question(question, terms)
    if counts is not None and asked.n_all > counts.n_samples:
        raise InputError(
            f"a pilot of {asked.n_all} rows given, and {counts.n_samples} over all sites: its maps would be too wide. "
            "Nothing was sent"
        )
    return Trial(asked, primaries)


def moments_encoding(terms: Terms, counts: Counts) -> MomentsEncoding:
    """How moments under this draft are integers."""
    if not tells_ranges(terms) or len(counts.ranges) != terms.n_features:
        raise InputError("these terms need no moments, or the ranges of their columns are not known; nothing was sent")
    pilots = terms.pilots
    sets = ("none", "root", "row") if pilots else ("root",) if terms.method.normalise == "centred" else ("none",)
    most_rows = terms.max_rows or counts.most_rows
    return MomentsEncoding(most_rows, torch.tensor(counts.ranges), sets, len(CANDIDATES) if pilots else 0)


# -------------------------------------------------------------------------------------------------------- at a site


def counted(site: Site, terms: Terms) -> np.ndarray:
    """What a site adds to the first sum (`counts_layout`)."""
    own = site.count(terms)
    sizes = np.zeros(SIZES, np.int64)
    sizes[min(int(own[: terms.n_classes].sum()).bit_length() - 1, SIZES - 1)] = 1
    if not tells_ranges(terms):
        return np.concatenate([own, sizes])
    highest = largest_buckets(site.shared_features(terms)).numpy()
    drawn = _drawn(site.secret(terms, "ranges"), BUCKETS * len(highest)).reshape(-1, BUCKETS)
    below = np.arange(BUCKETS) <= highest[:, None]  # all up to its own: so the sum tells the highest and no other
    return np.concatenate([own, sizes, np.where(below, drawn, 0).reshape(-1)])


def _drawn(secret: bytes, n: int) -> np.ndarray:
    """n uniform numbers of `PRESENCE_BITS` bits, the same for the same secret."""
    stream = np.frombuffer(hashlib.shake_256(secret).digest(8 * n), np.uint64)
    return (stream >> np.uint64(64 - PRESENCE_BITS)).astype(np.int64)


def own_moments(site: Site, terms: Terms, counts: Counts) -> np.ndarray:
    """What a site adds to the sum of moments."""
    encoding = moments_encoding(terms, counts)
    told, unsuited, draw = site.own_moments(terms)
    own = {"none": told.features, "root": told.root, "row": told.row}
    if told.features.n_samples > encoding.n_rows:
        raise InputError(
            f"{told.features.n_samples} rows; the cohort was counted with at most {encoding.n_rows} at one site. The "
            "normalisation is agreed without them, and their statistics can still join"
        )
    flags = torch.tensor([how in unsuited for how in CANDIDATES[: encoding.n_flags]], dtype=torch.int64)
    return encoding.encode({of: own[of] for of in encoding.sets}, flags, draw).numpy()


# ---------------------------------------------------------------------------------------------------- at the server


def asked_of(draft: Terms, counts: Counts, vector: np.ndarray, n_members: int) -> tuple[Terms, bytes]:
    """The terms of the pilot, and what sites are to try, from the sum of their moments."""
    encoding = moments_encoding(draft, counts)
    moments = encoding.decode(torch.from_numpy(vector), n_members)
    shared = Described(moments["none"], moments["root"], moments["row"])
    flags = vector[encoding.layout.places["flags"]]
    unsuited = {how for how, members in zip(CANDIDATES, flags.tolist(), strict=True) if members}
    terms = replace(draft, most_rows=encoding.n_rows)
    n_all = min(counts.n_samples, shared.features.n_samples)
    return terms, seal_question(terms, n_all, shared, unsuited)


def scaling_of(draft: Terms, counts: Counts, vector: np.ndarray, n_members: int) -> Normaliser:
    """The normalisation that the terms state, from the sum of the sites' moments."""
    (shared,) = moments_encoding(draft, counts).decode(torch.from_numpy(vector), n_members).values()
    return normaliser(draft.method.normalise, shared)
