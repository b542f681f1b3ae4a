"""What a sum may reveal: bounds that follow from how many rows the members of a cohort have together.

The first masked sum counts rows and holders of each class. The server sends that sum to every site, and everyone
applies the same rules to it before anything else is sent:

    a class is in the sums only if at least 2 members hold it, with at least 20 rows together;
    a map has at most N / 4 columns, N the rows of those classes: a sum with fewer rows than columns gives rows away;
    products of all features are summed only if N >= 4 l, otherwise their squares alone.

A site cannot check the sum itself: a server that claims more rows than there are gets a wider map.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from apfl.errors import InputError
from apfl.federate.terms import Terms, check_weights
from apfl.federate.wire import sha256
from apfl.maths.bits import Layout, Part
from apfl.maths.bounds import widest
from apfl.maths.integers import bits_for
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN

__all__ = ["FEWEST_HOLDERS", "FEWEST_ROWS", "Counts", "counts_layout", "outline_of"]

FEWEST_HOLDERS = 2  # members that have rows of a class
FEWEST_ROWS = 20  # of a class, over the cohort
LARGEST = 2**20  # bytes of the message: ten thousand classes take a tenth


def counts_layout(n_classes: int) -> Layout:
    """Rows of each class at a member, and whether it has any."""
    return Layout((Part("rows", n_classes, 32, signed=False), Part("holders", n_classes, 1, signed=False)))


@dataclass(frozen=True)
class Counts:
    """The first sum over a cohort: of each class, how many rows there are and how many members hold it."""

    federation: str
    roster: str  # its fingerprint
    rows: tuple[int, ...]
    holders: tuple[int, ...]

    @staticmethod
    def of(summed: np.ndarray, federation: str, roster: str) -> Counts:
        """From the sum of vectors of `counts_layout`."""
        rows, holders = (tuple(part.tolist()) for part in np.split(summed, 2))
        return Counts(federation, roster, rows, holders)

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
            counts = Counts(told["federation"], told["roster"], tuple(told["rows"]), tuple(told["holders"]))
            counts._check_numbers()
            if counts.to_bytes() != data:
                raise ValueError("not as apfl writes it")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("counts that cannot be read; server and sites need the same version of apfl") from error
        return counts

    def _check_numbers(self) -> None:
        numbers = (*self.rows, *self.holders)
        if not all(type(each) is int and 0 <= each < 2**62 for each in numbers) or len(self.rows) != len(self.holders):
            raise ValueError("not whole numbers")
        if not isinstance(self.federation, str) or not isinstance(self.roster, str):
            raise ValueError("no names")


def outline_of(draft: Terms, counts: Counts) -> Terms:
    """The draft with all fixed but the landmarks; a width that was left open is within the bounds."""
    method = draft.method
    counts.check(draft)
    n, n_features = counts.n_samples, draft.n_features or 0
    d_primary, d_refinement = method.widths(n, n_features)
    if method.d_primary == "auto":
        d_primary = min(d_primary, widest(n))
        d_refinement = d_primary if method.d_refinement == "auto" else d_refinement
    check_weights(d_primary, draft.n_classes)
    bits = method.bits if method.bits != "auto" else bits_for(n, max(counts.holders), draft.max_rows or n, d_primary)
    method = replace(method, d_primary=d_primary, d_refinement=d_refinement, bits=bits)
    terms = replace(draft, method=method, most_rows=draft.max_rows)
    if method.landmarks == "federation":
        terms = replace(terms, spread="full" if n >= ROWS_FOR_EACH_COLUMN * terms.n_in else "diagonal")
    counts.check(terms)
    return terms
