"""A client's statistics as they travel, and everything that is checked before they reach the sum.

[Phi Y]'[Phi Y] of real rows is positive semidefinite. With D the class counts that is the case exactly when the
within-class scatter Phi'Phi - Phi'Y D^-1 Y'Phi is, so one Cholesky factorisation refuses an indefinite matrix, class
sums that are too long for their counts, and an n too small for the matrix. Rows that were scaled and mapped as agreed
bound the trace as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.terms import Terms, check_name
from apfl.federate.wire import Expected, count, seal, sha256, text, unseal
from apfl.maths.leaveout import ECHO
from apfl.maths.ridge import Statistics, one_hot, statistics
from apfl.maths.wire import Form, factor_message, form_for, from_message, message, statistics_shapes

__all__ = ["Contribution", "Repeats", "check", "decode", "encode"]

KIND = "statistics"
# Eigenvalues may fall below zero by so much of the mean diagonal entry before rounding no longer explains it.
ROUNDING = {"float64": 1e-12, "float32": 1e-6}
LARGEST = 2.0**36  # of one client's sum of squares: a sum of a great many of them still fits `apfl.federate.sums`
ORDINARY = 2.0**20  # the mean square of an activated feature lies between 1 / ORDINARY and ORDINARY


class Repeats(NamedTuple):
    """What a client says about its repeated rows (`apfl.maths.leaveout`)."""

    n_copies: int
    echo: Tensor


@dataclass(frozen=True, eq=False)
class Contribution:
    """A decoded upload; `check` says whether it may be added."""

    client: str
    form: str  # triangle, or factor
    n_samples: int
    nonce: str  # not empty if it was made anew by a client that had left
    n_copies: int  # rows that repeat another row of the client
    tensors: Mapping[str, Tensor]
    sha256: str
    n_bytes: int

    @cached_property
    def statistics(self) -> Statistics:
        """What is added to the sum, in float64."""
        sent = self.tensors.get("echo")
        return replace(from_message(self.tensors), n_copies=self.n_copies, echo=None if sent is None else sent.long())


def encode(
    phi: Tensor, labels: Tensor, terms: Terms, client: str, nonce: str = "", repeats: Repeats | None = None
) -> bytes:
    """A client's rows as the bytes it sends; the same bytes for the same rows.

    The triangle of Phi'Phi, or with fewer rows than columns the smaller QR factor. The triangle of an ill-conditioned
    matrix may round to an indefinite one, most of all in float32; the factor, then of the same size, cannot. What the
    server would refuse is refused here, before it leaves.
    """
    targets = one_hot(labels, terms.n_classes)
    if form_for(len(phi), terms.width) == "triangle":
        sealed = _seal("triangle", message(statistics(phi, targets), terms.dtype), terms, client, nonce, repeats)
        with suppress(InputError):
            check(decode(sealed, terms), terms)
            return sealed
    sealed = _seal("factor", factor_message(phi, targets, terms.dtype), terms, client, nonce, repeats)
    check(decode(sealed, terms), terms)
    return sealed


def decode(data: bytes, terms: Terms) -> Contribution:
    """The message as tensors of the sizes agreed; nothing is allocated for any other."""

    def expected(header: dict[str, Any]) -> Expected:
        _check_header(header, terms)
        d, c, n = terms.width, terms.n_classes, count(header, "n")
        wide = ("F64",) if terms.wire == "float64" else ("F32",)
        small: Expected = {
            "class_counts": (("F64",), (c,)),
            "n_samples": (("I64",), ()),
            "target_energy": (("F64",), ()),
        }
        if "n_copies" in header:  # messages kept by earlier versions have none
            small = {**small, "echo": (("I16",), (ECHO,))}
        form = text(header, "form")
        if form not in get_args(Form):
            raise InputError(f"statistics in the form {form[:40]!r}; allowed are {' and '.join(get_args(Form))}")
        if form == "triangle" and form_for(n, d) == "factor":
            raise InputError(f"n contradicts the matrix: {n} rows given as a triangle of width {d}; send the factor")
        shapes = statistics_shapes(cast(Form, form), n, d, c)
        return {**{name: (wide, shape) for name, shape in shapes.items()}, **small}

    header, tensors = unseal(KIND, data, expected)
    client = check_name("client", text(header, "client"))
    form, nonce, n = text(header, "form"), text(header, "nonce"), count(header, "n")
    n_copies = count(header, "n_copies") if "n_copies" in header else 0
    if n_copies >= max(n, 1) or ("echo" in tensors and not _echoes(tensors["echo"], n)):
        raise InputError(
            f"n contradicts itself: {n_copies} copies among {n} rows, or an echo that {n} rows do not have"
        )
    return Contribution(client, form, n, nonce, n_copies, tensors, sha256(data), len(data))


def _echoes(echo: Tensor, n: int) -> bool:
    return int(echo.min()) >= 0 and 1 <= int(echo.long().sum()) <= n


def check(contribution: Contribution, terms: Terms) -> None:
    """Refuse what cannot be the statistics of n rows under these terms, with the reason."""
    tensors, n = contribution.tensors, contribution.n_samples
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} contains NaN or infinity")
    _check_counts(tensors["class_counts"], tensors, n, terms)
    stats = contribution.statistics
    check_statistics(stats, terms)
    definite = _factor_fits(contribution, terms) if contribution.form == "factor" else _definite(stats, terms)
    if not definite:
        raise InputError(_why_indefinite(stats, terms))


def check_statistics(stats: Statistics, terms: Terms) -> None:
    """What can be seen without a factorisation: symmetry, scale, the trace that n rows can have, empty classes."""
    matrix, n = stats.autocorrelation, stats.n_samples
    if not torch.equal(matrix, matrix.T):
        raise InputError("the autocorrelation is asymmetric")
    diagonal = matrix.diagonal()
    if float(diagonal.min()) < 0:
        raise InputError("the autocorrelation is indefinite: a negative sum of squares on its diagonal")
    mean_square, largest = float(diagonal.mean()) / n, float(diagonal.max())
    if not 1 / ORDINARY <= mean_square <= ORDINARY or largest >= LARGEST:
        raise InputError(
            f"absurd scale: the mean square of an activated feature is {mean_square:.3g}, allowed are "
            f"{1 / ORDINARY:.1g} to {ORDINARY:.1g} (largest sum {largest:.3g}, allowed {LARGEST:.1g}); "
            "rescale the features, or agree on normalise='row'"
        )
    row, entry = (bound * (1 + 1e-3) for bound in _bounds(terms))  # rows are mapped in single precision
    trace = float(diagonal.sum())
    if trace > n * row or largest > n * entry:
        raise InputError(
            f"n contradicts the matrix: trace {trace:.4g}, largest sum of squares {largest:.4g}; "
            f"{n} rows give at most {n * row:.4g} and {n * entry:.4g}"
        )
    empty = stats.class_counts == 0
    # Only a factor is multiplied out here, and rounds; relative to what the class sums of n such rows could be.
    if float(stats.crosscorrelation[:, empty].abs().sum()) > 1e-4 * math.sqrt(n * trace):
        raise InputError("class counts contradict the matrix: feature sums of a class without rows")
    if terms.method.intercept:
        _check_intercept(stats, terms)


def _check_header(header: Mapping[str, Any], terms: Terms) -> None:
    if text(header, "federation") != terms.federation:
        raise InputError(
            f"a contribution to federation {text(header, 'federation')[:64]!r}; this is {terms.federation!r}"
        )
    assert terms.fingerprints is not None
    if text(header, "map") != terms.fingerprints[0]:
        raise InputError(
            f"another feature map: fingerprint {text(header, 'map')[:12]}, agreed is {terms.fingerprints[0][:12]}; "
            "compare seed, width, activation, and the versions of numpy and scipy"
        )
    if text(header, "terms") != terms.digest:
        raise InputError(
            f"made under other terms (digest {text(header, 'terms')[:12]}, in force {terms.digest[:12]}): "
            "a replay of another run; join again"
        )


def _check_counts(counts: Tensor, tensors: Mapping[str, Tensor], n: int, terms: Terms) -> None:
    if n < 1 or int(tensors["n_samples"]) != n:
        raise InputError(f"n contradicts itself: {n} in the header, {int(tensors['n_samples'])} in the message")
    if not torch.equal(counts, counts.round()) or float(counts.min()) < 0 or float(counts.max()) > 2**40:
        raise InputError("class counts must be whole numbers, 0 or more")
    if float(counts.sum()) != n:
        raise InputError(f"n contradicts the class counts: {n} rows, counts that sum to {float(counts.sum()):.0f}")
    if float(tensors["target_energy"]) != n:
        raise InputError(f"n contradicts the target energy: {n} rows, energy {float(tensors['target_energy']):g}")
    few = (counts > 0) & (counts < terms.min_per_class)
    if bool(few.any()):
        name = (terms.class_names or ())[int(few.nonzero()[0])]
        raise InputError(
            f"class {name!r} has {int(counts[few][0])} rows; with fewer than {terms.min_per_class} it must be withheld"
        )


def _check_intercept(stats: Statistics, terms: Terms) -> None:
    """The column of ones counts: all rows in its own entry, each class in its row of Phi'Y."""
    n = stats.n_samples
    slack = ROUNDING[terms.wire] * 10 * n
    off = (stats.crosscorrelation[-1] - stats.class_counts).abs().max()
    if abs(float(stats.autocorrelation[-1, -1]) - n) > slack or float(off) > slack:
        raise InputError(f"n contradicts the matrix: the column of ones counts otherwise than {n} rows")


def _bounds(terms: Terms) -> tuple[float, float]:
    """The largest |phi|^2 and the largest square of an entry of it that a row can have; infinite without a bound."""
    d, ones = int(terms.method.d_primary), float(terms.method.intercept)
    if terms.method.activation_primary in ("sigmoid", "cosine"):
        return d + ones, 1.0
    if terms.method.normalise not in ("root", "row", "columns"):
        return math.inf, math.inf
    # |act(x)| <= |x| and |z|^2 = l. sqrt(l) R is Gaussian (l, d): its largest singular value passes
    # sqrt(l) + sqrt(d) + 8, and a column's length sqrt(l) + 8, with a probability below e^-32.
    root = math.sqrt(terms.normaliser().width(terms.n_features or 0))
    return (root + math.sqrt(d) + 8) ** 2 + ones, (root + 8) ** 2


def _definite(stats: Statistics, terms: Terms) -> bool:
    """Whether the within-class scatter is positive semidefinite up to rounding."""
    present = stats.class_counts > 0
    scaled = stats.crosscorrelation[:, present] / stats.class_counts[present].sqrt()
    scatter = torch.addmm(stats.autocorrelation, scaled, scaled.T, alpha=-1)
    return _positive(scatter, _allowed(stats, terms))


def _factor_fits(contribution: Contribution, terms: Terms) -> bool:
    """Whether counts - (Q'Y)'(Q'Y) is positive semidefinite, and zero where Q is square: R'R itself always is."""
    turned, counts = contribution.tensors["turned_targets"].to(torch.float64), contribution.tensors["class_counts"]
    rest = torch.diag(counts) - turned.T @ turned
    slack = 10 * ROUNDING[terms.wire] * contribution.n_samples
    if contribution.n_samples < terms.width:
        return float(rest.abs().max()) <= slack
    return _smallest_eigenvalue(rest) >= -slack


def _allowed(stats: Statistics, terms: Terms) -> float:
    return ROUNDING[terms.wire] * float(stats.autocorrelation.diagonal().mean())


def _positive(matrix: Tensor, allowed: float) -> bool:
    """Whether no eigenvalue is below -allowed; overwrites the matrix.

    A Cholesky factorisation says yes for a small part of the price; its no is looked at again.
    """
    matrix.diagonal().add_(allowed)
    if not int(torch.linalg.cholesky_ex(matrix).info):
        return True
    return _smallest_eigenvalue(matrix) >= 0


def _smallest_eigenvalue(matrix: Tensor) -> float:
    try:
        return float(torch.linalg.eigvalsh(matrix)[0])
    except RuntimeError:  # torch's LinAlgError: entries so far apart that it does not converge: of no real rows
        return -math.inf


def _why_indefinite(stats: Statistics, terms: Terms) -> str:
    if not _positive(stats.autocorrelation.clone(), _allowed(stats, terms)):
        return "the autocorrelation is indefinite beyond rounding: no rows have these sums of products"
    return "n contradicts the matrix: the class sums are too long for the class counts"


def _seal(
    form: str, tensors: Mapping[str, Tensor], terms: Terms, client: str, nonce: str, repeats: Repeats | None
) -> bytes:
    assert terms.fingerprints is not None
    header = {
        "federation": terms.federation, "terms": terms.digest, "map": terms.fingerprints[0],
        "client": check_name("client", client), "form": form, "n": int(tensors["n_samples"]), "nonce": nonce,
    }  # fmt: skip
    if repeats is None:
        return seal(KIND, header, tensors)
    echo = repeats.echo.clamp_max(2**15 - 1).to(torch.int16)
    return seal(KIND, header | {"n_copies": repeats.n_copies}, {**tensors, "echo": echo})
