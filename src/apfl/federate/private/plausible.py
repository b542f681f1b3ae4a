"""Whether integers can be the sums of a site's integer rows, which are exact: nothing in them is rounded any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from apfl.errors import InputError
from apfl.federate.private.agreement import encoding_of
from apfl.maths.noise import IntegerRows

if TYPE_CHECKING:
    from apfl.federate.terms import Terms

__all__ = ["check_rows", "n_rows"]

FLOATS = 1e-9  # of the trace: what a factorisation in float64 leaves, far below one row


def n_rows(integers: np.ndarray, terms: Terms) -> int:
    """How many rows these integers are of; refused if that is no whole number, or one that the terms do not allow."""
    encoding = encoding_of(terms)
    counts = integers[encoding.layout.places["class_counts"]]
    n, left = divmod(int(counts.sum()), encoding.count_unit)
    if int(counts.min()) < 0 or bool((counts % encoding.count_unit).any()) or left:
        raise InputError("class counts must be whole numbers, 0 or more")
    if not 1 <= n <= (terms.max_rows or 0):
        raise InputError(f"{n} rows; the terms let one client contribute 1 to {terms.max_rows} (max_rows)")
    return n


def check_rows(integers: np.ndarray, terms: Terms) -> None:
    """Refuse integers that no rows of length 1 at most have, with the reason."""
    encoding, n = encoding_of(terms), n_rows(integers, terms)
    places = encoding.layout.places
    diagonal, counts = integers[places["diagonal"]], integers[places["class_counts"]] // encoding.count_unit
    if int(diagonal.min()) < 0 or int(diagonal.sum()) > n * encoding.units["diagonal"]:
        raise InputError(f"n contradicts the matrix: {n} rows have squares that sum to at most {n} rows of length 1")
    cross = integers[places["cross"]].reshape(encoding.width, encoding.n_classes)
    if cross[:, counts == 0].any():
        raise InputError("class counts contradict the matrix: feature sums of a class without rows")
    if not _definite(integers, encoding, counts):
        raise InputError("the sums are those of no rows: their within-class scatter is indefinite")


def _definite(integers: np.ndarray, encoding: IntegerRows, counts: np.ndarray) -> bool:
    """Whether Phi'Phi - Phi'Y N^-1 Y'Phi is positive semidefinite; with it Phi'Phi is."""
    stats = encoding.decode(torch.from_numpy(integers))
    present = torch.from_numpy(counts > 0)
    means = stats.crosscorrelation[:, present] / torch.from_numpy(counts[counts > 0]).double().sqrt()
    scatter = torch.addmm(stats.autocorrelation, means, means.T, alpha=-1)
    scatter.diagonal().add_(FLOATS * float(stats.autocorrelation.diagonal().sum()))
    if not int(torch.linalg.cholesky_ex(scatter).info):
        return True
    return bool(torch.linalg.eigvalsh(scatter)[0] >= 0)
