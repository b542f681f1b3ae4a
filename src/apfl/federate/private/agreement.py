"""What terms with epsilon must state: nothing that sites are told may follow from anyone's rows but noisy sums.

A class list, a cap of rows or a width that followed the sites' descriptions would each tell something without noise. A
rule that withholds small classes, or that draws some of a site's rows, would let one row more bring or exchange others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from apfl.errors import InputError
from apfl.maths.noise import SENSITIVITY, IntegerRows, accounted
from apfl.maths.normalise import needs_moments
from apfl.maths.privacy import noise_multiplier

if TYPE_CHECKING:
    from apfl.federate.terms import Terms

__all__ = ["check_terms", "encoding_of", "epsilon_of_terms", "multiplier_of", "outlined", "share_of", "sigma_of"]

ROUNDING = 1e-6  # relative: versions of dp-accounting may end their search for the multiplier so far apart


def check_terms(terms: Terms) -> None:
    """Refuse terms with epsilon under which more would be released than noisy sums."""
    method = terms.method
    if needs_moments(method.normalise):
        raise InputError(
            f"terms with epsilon={method.epsilon} and normalise={method.normalise!r} given: between machines nothing "
            "under noise follows from moments. Give normalise='root' (features that are never negative) or 'row'"
        )
    if method.landmarks == "federation":
        raise InputError(
            f"terms with epsilon={method.epsilon} and landmarks='federation' given: between machines no moments are "
            "released. Give a file of public features, or landmarks='free'"
        )
    if method.noise == "shares" and not terms.masked:
        raise InputError(
            f"terms with epsilon={method.epsilon} and noise='shares' given, but without masks: a share of the noise is "
            "too little for one site's sums, which the server would see. Give masked terms, or noise='central' for a "
            "server that all sites trust"
        )
    stated = {"class_names": terms.class_names, "n_features": terms.n_features, "max_rows": terms.max_rows}
    lacking = [name for name, value in stated.items() if value is None]
    if lacking:
        raise InputError(
            f"terms with epsilon={method.epsilon} but without {', '.join(lacking)} given: under noise these must not "
            "follow from anyone's rows. State the classes, the number of features and the most rows of one site"
        )


def outlined(draft: Terms) -> Terms:
    """The draft with all fixed but the landmarks, from itself alone."""
    method = draft.method
    d_primary, d_refinement = method.widths(1, draft.n_features or 0)
    settled = replace(method, d_primary=d_primary, d_refinement=d_refinement, bits=method.integers([1], d_primary))
    return replace(draft, method=settled, most_rows=draft.max_rows, sigma=_calibrated(draft))


def epsilon_of_terms(terms: Terms) -> float:
    """The budget, beside delta."""
    epsilon = terms.method.epsilon
    assert epsilon != "none"
    return float(epsilon)


def _calibrated(terms: Terms) -> float:
    multiplier = noise_multiplier(epsilon_of_terms(terms), terms.method.delta, terms.releases)
    return float(SENSITIVITY * multiplier)


def sigma_of(terms: Terms) -> float:
    """The noise of an entry of a sum, as a standard deviation that the terms state; refused if it is too little."""
    needed = _calibrated(terms)
    if terms.sigma is None or terms.sigma < needed * (1 - ROUNDING):
        raise InputError(
            f"terms with noise of size {terms.sigma} given; epsilon={terms.method.epsilon} with "
            f"delta={terms.method.delta:g} over {terms.releases} releases needs {needed:.6g}. Nothing was sent"
        )
    return terms.sigma


def share_of(terms: Terms, threshold: int) -> float:
    """The size of one site's share: those of the threshold less the colluders suffice, variance sigma^2 / (t - c)."""
    return sigma_of(terms) / math.sqrt(honest(terms, threshold))


def honest(terms: Terms, threshold: int) -> int:
    """Shares that must suffice."""
    left = threshold - terms.method.colluders
    if left < 1:
        raise InputError(
            f"colluders={terms.method.colluders} given, and a roster whose sums are opened with {threshold} sites: at "
            "least one of these must be honest. Make a roster of more sites"
        )
    return left


def encoding_of(terms: Terms) -> IntegerRows:
    """How rows under these terms are integers."""
    return IntegerRows(terms.width, terms.n_classes, terms.bits)


def multiplier_of(terms: Terms, threshold: int | None = None) -> float:
    """The noise multiplier of one release that is accounted for; ``threshold`` is that of a roster, for shares."""
    shares = 1 if threshold is None else honest(terms, threshold)
    return accounted(encoding_of(terms), sigma_of(terms), shares)
