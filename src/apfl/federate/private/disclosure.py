"""What leaves a site under epsilon, in words: who sees it, with which noise, and what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from apfl.federate.private.agreement import encoding_of

if TYPE_CHECKING:
    from apfl.federate.terms import Terms

__all__ = ["lines_of"]

NEVER = (
    "never: rows, images, labels of single rows, the personal model, tables of left-out hits, accuracies, repeated rows"
)
NOT_COVERED = "not covered by the promise: that this site takes part, and its personal model, which stays here"


def lines_of(terms: Terms, counts: Mapping[str, int], n_features: int) -> tuple[str, ...]:
    """One statement a line; none without epsilon."""
    if not terms.private:
        return ()
    sums = "sums of products of the activated features, their sums by class, and how many rows each class has"
    if terms.settled:
        sums += f": {encoding_of(terms).layout.size:,} integers"
    leaves = _into_a_sum(terms, sums) if terms.masked else _to_the_server(counts, n_features, sums)
    return (*leaves, _promise(terms), NOT_COVERED, NEVER)


def _to_the_server(counts: Mapping[str, int], n_features: int, sums: str) -> tuple[str, ...]:
    return (
        f"first, to the server alone: the number of rows ({sum(counts.values()):,}), the feature width ({n_features}) "
        f"and the names of {len(counts)} classes; it passes none of them on",
        f"then, once, to the server alone: {sums}. You trust the server with these sums: they have no noise yet",
        "all sites then see what the server makes of everyone's sum with noise: the primary, a sketch, rows of each "
        "class over all sites",
    )


def _into_a_sum(terms: Terms, sums: str) -> tuple[str, ...]:
    method = terms.method
    share = f"of variance sigma^2 / (t - {method.colluders}), t the sites with whom a sum is opened"
    if terms.sigma is not None:
        share += f" and sigma {terms.sigma:.3g} where one row counts 1"
    return (
        "everything below leaves under a mask and with noise: nobody, not even the server, sees this site's numbers, "
        f"or a sum of sites without noise. A sum has {terms.smallest_sum} sites or more",
        f"into a sum, once for each roster: {sums}, with this site's share of the noise, {share}",
        "the server and all sites see that sum, and what follows from it: the primary, a sketch, rows of each class",
    )


def _promise(terms: Terms) -> str:
    method, releases = terms.method, "one sum" if terms.releases == 1 else f"at most {terms.releases} sums"
    colluding = f"also if {method.colluders} other sites tell the server their noise"
    whom = colluding if terms.masked else "against everyone but the server"
    return (
        f"promised for one row of this site, there or not: epsilon {method.epsilon:g} with delta {method.delta:g} over "
        f"{releases}, each with fresh noise, {whom}"
    )
