"""What a sum may reveal: bounds that follow from how many rows the members of a cohort have together.

The first masked sum counts rows and holders of each class, and sites by their size, in powers of two. If the
normalisation needs moments, it tells the power of four of each column's largest entry, too. The server sends that sum
to every site, and everyone applies the same rules to it before anything else is sent:

    a class is in the sums only if at least 2 members hold it, with at least 20 rows together;
    a map has at most N / 4 columns, N the rows of those classes: a sum with fewer rows than columns gives rows away;
    products of all features are summed only if N >= 4 l, otherwise their squares alone;
    a pilot's maps have at most a quarter as many columns as it has rows, and it leaves out classes that would have
    hardly 20 of them.

A site cannot check the sum itself: a server that claims more rows than there are gets a wider map.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from apfl.errors import InputError
from apfl.federate.secure.digits import PRESENCE_BITS
from apfl.federate.terms import Terms, check_weights
from apfl.federate.wire import sha256
from apfl.maths.bits import Layout, Part
from apfl.maths.bounds import widest
from apfl.maths.integers import bits_for
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN
from apfl.maths.moments_encoding import BUCKETS
from apfl.maths.normalise import Normaliser, needs_moments
from apfl.maths.pilot import rows_of_pilot

__all__ = ["FEWEST_HOLDERS", "FEWEST_ROWS", "SIZES", "Counts", "counts_layout", "outline_of", "tells_ranges"]

FEWEST_HOLDERS = 2  # members that have rows of a class
FEWEST_ROWS = 20  # of a class, over the cohort
SIZES = 32  # powers of two of a member's rows
LARGEST = 2**20  # bytes of the message: ten thousand classes take a tenth


def tells_ranges(terms: Terms) -> bool:
    """Whether the first sum tells the range of each column: before moments that a normalisation is made from."""
    return needs_moments(terms.method.normalise) and terms.mean is None and terms.most_rows is None


def counts_layout(terms: Terms) -> Layout:
    """Rows of each class at a member, whether it has any, its size, and of each column the buckets up to its range."""
    sizes = (("rows", terms.n_classes, 32), ("holders", terms.n_classes, 1), ("sizes", SIZES, 1))
    parts = [Part(name, size, bits, signed=False) for name, size, bits in sizes]
    if tells_ranges(terms):
        n = BUCKETS * (terms.n_features or 0)
        parts.append(Part("ranges", n, PRESENCE_BITS, signed=False, presence=True))
    return Layout(tuple(parts))


@dataclass(frozen=True)
class Counts:
    """The first sum over a cohort: of each class, how many rows there are and how many members hold it."""

    federation: str
    roster: str  # its fingerprint
    rows: tuple[int, ...]
    holders: tuple[int, ...]
    sizes: tuple[int, ...] = ()  # members with 2^k rows or more, and fewer than twice as many
    ranges: tuple[int, ...] = ()  # the bucket of each column's largest entry, if moments follow; -1: all are zero

    @staticmethod
    def of(summed: np.ndarray, terms: Terms, roster: str) -> Counts:
        """From the sum of vectors of `counts_layout`."""
        layout = counts_layout(terms)
        found = {part.name: summed[layout.places[part.name]] for part in layout.parts}
        if "ranges" in found:
            present = found["ranges"].reshape(-1, BUCKETS)
            highest = BUCKETS - 1 - present[:, ::-1].argmax(1)
            found["ranges"] = np.where(present.any(1), highest, -1)
        return Counts(terms.federation, roster, **{name: tuple(part.tolist()) for name, part in found.items()})

    @property
    def most_rows(self) -> int:
        """What no member's rows pass: the next power of two."""
        largest = max((k for k, members in enumerate(self.sizes) if members), default=0)
        return int(min(2 ** (largest + 1) - 1, max(1, self.n_samples)))

    def in_pilot(self, n_all: int) -> tuple[bool, ...]:
        """Which classes may be in the sum of a pilot, which takes a share of the rows at random.

        Those that are expected to have twice the fewest rows: the draw then hardly ever leaves fewer.
        """
        taken = (rows_of_pilot(n, n_all) if n else 0 for n in self.rows)
        pairs = zip(taken, self.rows, self.admitted, strict=True)
        return tuple(ok and (rows == n or rows >= 2 * FEWEST_ROWS) for rows, n, ok in pairs)

    @cached_property
    def admitted(self) -> tuple[bool, ...]:
        """Which classes may be in a sum."""
        pairs = zip(self.rows, self.holders, strict=True)
        return tuple(rows >= FEWEST_ROWS and holders >= FEWEST_HOLDERS for rows, holders in pairs)

    @property
    def n_samples(self) -> int:
        """Rows of the classes that may be in a sum."""
        return sum(n for n, admitted in zip(self.rows, self.admitted, strict=True) if admitted)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of it."""
        return sha256(self.to_bytes())

    def withheld(self, names: Sequence[str]) -> dict[str, str]:
        """Classes that stay out of the sums, with the reason."""
        reasons = {}
        for name, rows, holders, admitted in zip(names, self.rows, self.holders, self.admitted, strict=True):
            if not admitted and rows:
                reasons[name] = (
                    f"{rows} rows at {holders} of the sites; a sum needs {FEWEST_ROWS} at {FEWEST_HOLDERS} or more"
                )
        return reasons

    def check(self, terms: Terms) -> None:
        """Refuse terms under which a sum over this cohort would reveal more than the bounds allow."""
        if len(self.rows) != terms.n_classes or self.federation != terms.federation:
            raise InputError("counts of other classes or of another federation than the terms; the server must recount")
        if sum(self.admitted) < 2:
            raise InputError(
                f"{sum(self.admitted)} classes have {FEWEST_ROWS} rows at {FEWEST_HOLDERS} sites or more, and two are "
                "needed for a sum that gives no rows away. Make one roster of more sites instead"
            )
        n = self.n_samples
        if terms.method.d_primary != "auto" and terms.width > widest(n):
            raise InputError(
                f"a map of {terms.width} columns given, and {n} rows over all sites: a sum with so few rows gives them "
                f"away. Allowed are {widest(n)} columns, a quarter of the rows. Make one roster of more sites "
                "instead, or start a new folder with a smaller d_primary"
            )
        if terms.spread == "full" and n < ROWS_FOR_EACH_COLUMN * terms.n_in:
            raise InputError(
                f"sums of all products of {terms.n_in} features asked for, and {n} rows over all sites; "
                f"{ROWS_FOR_EACH_COLUMN * terms.n_in} are needed. Nothing was sent"
            )

    def to_bytes(self) -> bytes:
        """The counts as they travel."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Counts:
        """Counts as they arrived."""
        try:
            if len(data) > LARGEST:
                raise ValueError("too long")
            told = json.loads(data)
            parts = (tuple(told[name]) for name in ("rows", "holders", "sizes", "ranges"))
            counts = Counts(told["federation"], told["roster"], *parts)
            counts._check_numbers()
            if counts.to_bytes() != data:
                raise ValueError("not as apfl writes it")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("counts that cannot be read; server and sites need the same version of apfl") from error
        return counts

    def _check_numbers(self) -> None:
        numbers = (*self.rows, *self.holders, *self.sizes)
        if not all(type(each) is int and -1 <= each < BUCKETS for each in self.ranges) or len(self.sizes) > SIZES:
            raise ValueError("no buckets")
        if not all(type(each) is int and 0 <= each < 2**62 for each in numbers) or len(self.rows) != len(self.holders):
            raise ValueError("not whole numbers")
        if not isinstance(self.federation, str) or not isinstance(self.roster, str):
            raise ValueError("no names")


def outline_of(draft: Terms, counts: Counts, scaling: Normaliser | None = None) -> Terms:
    """The draft with all fixed but the landmarks; a width that was left open is within the bounds.

    ``scaling`` is the normalisation that was made from moments, or that a pilot chose.
    """
    counts.check(draft)
    if scaling is not None:
        draft = replace(draft, method=replace(draft.method, normalise=scaling.how))
        if scaling.mean is not None and scaling.std is not None:
            draft = replace(draft, mean=tuple(scaling.mean.tolist()), std=tuple(scaling.std.tolist()))
    method, most_rows = draft.method, draft.max_rows or counts.most_rows
    n, n_features = counts.n_samples, draft.n_features or 0
    d_primary, d_refinement = method.widths(n, n_features)
    if method.d_primary == "auto":
        d_primary = min(d_primary, widest(n))
        d_refinement = d_primary if method.d_refinement == "auto" else d_refinement
    check_weights(d_primary, draft.n_classes)
    bits = (
        method.bits
        if method.bits != "auto"
        else bits_for(n, sum(counts.sizes) or max(counts.holders), most_rows, d_primary)
    )
    method = replace(method, d_primary=d_primary, d_refinement=d_refinement, bits=bits)
    terms = replace(draft, method=method, most_rows=most_rows)
    if method.landmarks == "federation":
        terms = replace(terms, spread="full" if n >= ROWS_FOR_EACH_COLUMN * terms.n_in else "diagonal")
    counts.check(terms)
    return terms
