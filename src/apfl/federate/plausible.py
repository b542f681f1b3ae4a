"""What n rows can have: numbers of rows that fit together, and a matrix that is positive semidefinite up to rounding.

Rows of the landmark map have |phi| <= 1. The server knows T = Phi R'^-1 (`integers`) as integers of one step: entry
i, j of T'T is wrong by less than step sqrt(D_i D_j), and on average by nothing. So with probability `FAILS` at most

    A = T'T over sqrt(D_i D_j)       has no eigenvalue below -`spectral_bound`
    A - B N^-1 B',  B = T'Y over sqrt(D_i)     has none below -`scatter_error`   (the within-class scatter)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.terms import Terms
from apfl.maths.integers import Encoding, spectral_bound
from apfl.maths.ridge import Statistics

__all__ = ["check_counts", "check_integers", "positive", "scatter_error", "smallest_eigenvalue"]

FLOATS = 1e-9  # of n: what float64 leaves of the sums, far above its rounding and far below a step


def check_integers(integers: np.ndarray, encoding: Encoding, terms: Terms, n_clients: int = 1) -> None:
    """Refuse integers that cannot be the statistics of n rows of the landmark map, with the reason.

    They may be a sum over several clients, whose errors of rounding add up.
    """
    places = encoding.layout.places
    counts, diagonal = integers[places["class_counts"]], integers[places["diagonal"]]
    n = int(integers[places["n_samples"]][0])
    if n < 1:
        raise InputError("statistics of no rows")
    check_counts(torch.from_numpy(counts).double(), n, terms, n_clients)
    if int(diagonal.min()) < 0:
        raise InputError("the autocorrelation is indefinite: a negative sum of squares on its diagonal")
    empty = np.flatnonzero(counts == 0)
    if integers[places["cross"]].reshape(-1, terms.n_classes)[:, empty].any():  # 0 is rounded to 0
        raise InputError("class counts contradict the matrix: feature sums of a class without rows")
    stats = encoding.told(torch.from_numpy(integers))
    _check_lengths(stats, encoding, n_clients)
    _check_definite(stats, encoding, n_clients)


def _check_lengths(stats: Statistics, encoding: Encoding, n_clients: int) -> None:
    """|phi| <= 1 bounds the sum of their squares by n, and the sum of a class by its rows."""
    n, error = stats.n_samples, encoding.length_errors
    most, found = n * (1 + FLOATS) + n_clients * error.squares, encoding.squares(stats.autocorrelation)
    if found > most:
        raise InputError(f"n contradicts the matrix: trace {found:.6g}; {n} rows give at most {most:.6g}")
    lengths = encoding.back(stats.crosscorrelation).norm(dim=0)
    if bool((lengths > stats.class_counts * (1 + FLOATS) + n_clients * error.sums).any()):
        raise InputError("class counts contradict the matrix: the class sums are too long for the class counts")


def _check_definite(stats: Statistics, encoding: Encoding, n_clients: int) -> None:
    scale = encoding.columns.double().sqrt()
    matrix = stats.autocorrelation / (scale[:, None] * scale)
    floats = FLOATS * float(matrix.diagonal().sum())
    if not positive(matrix.clone(), _matrix_error(stats, encoding, n_clients) + floats):
        raise InputError("the autocorrelation is indefinite beyond rounding: no rows have these sums of products")
    scaled = _means(stats, encoding)
    scatter = torch.addmm(matrix, scaled, scaled.T, alpha=-1)
    if not positive(scatter, scatter_error(stats, encoding, n_clients) + floats):
        raise InputError("n contradicts the matrix: the class sums are too long for the class counts")


def _means(stats: Statistics, encoding: Encoding) -> Tensor:
    """B N^-1/2, of the classes that are there."""
    present = stats.class_counts > 0
    return (
        stats.crosscorrelation[:, present] / (encoding.columns.double()[:, None] * stats.class_counts[present]).sqrt()
    )


def _matrix_error(stats: Statistics, encoding: Encoding, n_clients: int) -> float:
    return spectral_bound(encoding.rounding, n_clients, stats.width) + n_clients * encoding.rounding.diagonal.step


def scatter_error(stats: Statistics, encoding: Encoding, n_clients: int = 1) -> float:
    """What the spectral norm of the rounding error of A - B N^-1 B' does not pass, but for `FAILS`.

    Of A as before. Each entry of B is wrong by less than its step, so B N^-1/2 by E of a known size, and its square by
    2 |B N^-1/2| |E| + |E|^2.
    """
    present = stats.class_counts[stats.class_counts > 0]
    sums = n_clients * encoding.rounding.cross.step * math.sqrt(stats.width * float((1 / present).sum()))
    means = _means(stats, encoding)
    length = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(means.T @ means)[-1])))
    return _matrix_error(stats, encoding, n_clients) + 2 * length * sums + sums**2


def check_counts(counts: Tensor, n: int, terms: Terms, n_clients: int = 1) -> None:
    """Refuse numbers of rows that contradict each other or the terms."""
    if not torch.equal(counts, counts.round()) or float(counts.min()) < 0 or float(counts.max()) > 2**40:
        raise InputError("class counts must be whole numbers, 0 or more")
    if float(counts.sum()) != n:
        raise InputError(f"n contradicts the class counts: {n} rows, counts that sum to {float(counts.sum()):.0f}")
    if terms.row_limit is not None and n > n_clients * terms.row_limit:
        why = "max_rows" if terms.row_limit == terms.max_rows else "the range of its integers"
        raise InputError(
            f"{n} rows; the terms let one client contribute at most {terms.row_limit} ({why}), so that none outweighs "
            "the others: send a part of them"
        )
    few = (counts > 0) & (counts < terms.min_per_class)
    if bool(few.any()):
        name = (terms.class_names or ())[int(few.nonzero()[0])]
        raise InputError(
            f"class {name!r} has {int(counts[few][0])} rows; with fewer than {terms.min_per_class} it must be withheld"
        )


def positive(matrix: Tensor, allowed: float) -> bool:
    """Whether no eigenvalue is below -allowed; overwrites the matrix.

    A Cholesky factorisation says yes for a small part of the price; its no is looked at again.
    """
    matrix.diagonal().add_(allowed)
    if not int(torch.linalg.cholesky_ex(matrix).info):
        return True
    return smallest_eigenvalue(matrix) >= 0


def smallest_eigenvalue(matrix: Tensor) -> float:
    """Of a symmetric matrix; minus infinity if it cannot be found."""
    try:
        return float(torch.linalg.eigvalsh(matrix)[0])
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return -math.inf  # entries so far apart that it does not converge: of no real rows
