"""A client's statistics as they travel, and everything that is checked before they reach the sum.

[Phi Y]'[Phi Y] of real rows is positive semidefinite. With D the class counts that is the case exactly when the
within-class scatter Phi'Phi - Phi'Y D^-1 Y'Phi is, so one Cholesky factorisation refuses an indefinite matrix, class
sums that are too long for their counts, and an n too small for the matrix. Rows that were scaled and mapped as agreed
bound the trace as well.

Under landmark terms statistics are one vector of integers (`apfl.maths.integers`), and `plausible` checks it. With
numbers or labels as targets they are floating-point numbers on the widest map; no target can be bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.landmarks import VECTOR, Landmarks, packed, packing, spread_encoding, unpacked
from apfl.federate.names import check_name
from apfl.federate.pilot import largest_statistics
from apfl.federate.plausible import check_counts, check_integers, positive, smallest_eigenvalue
from apfl.federate.private.agreement import encoding_of
from apfl.federate.private.plausible import check_rows, n_rows
from apfl.federate.terms import Terms
from apfl.federate.wire import LARGEST_HEADER, Expected, count, seal, sha256, text, unseal
from apfl.maths.bits import squeeze
from apfl.maths.dither import Uniform
from apfl.maths.integers import OF_ONE_LENGTH, Encoding, statistics_layout
from apfl.maths.leaveout import ECHO
from apfl.maths.regression import NumberStatistics, number_statistics
from apfl.maths.ridge import Statistics, gram, one_hot, statistics
from apfl.maths.wire import (
    Form,
    factor_message,
    form_for,
    from_message,
    message,
    rounded_bytes,
    spread_bytes,
    statistics_bytes,
    statistics_shapes,
)

__all__ = [
    "Contribution",
    "Repeats",
    "check",
    "decode",
    "encode",
    "encode_integers",
    "encode_numbers",
    "encode_private",
    "encode_sums",
    "largest_answer",
    "upload_bytes",
]

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
    integers: np.ndarray | None = None  # of landmark terms: what is added to the sum
    numeric: bool = False  # whether targets are columns

    @cached_property
    def statistics(self) -> Statistics:
        """What is added to the sum under a random map, in float64."""
        if self.numeric:
            return replace(from_message(self.tensors, NumberStatistics), n_copies=self.n_copies)
        sent = self.tensors.get("echo")
        return replace(from_message(self.tensors), n_copies=self.n_copies, echo=None if sent is None else sent.long())


def encode_integers(
    phi: Tensor, labels: Tensor, terms: Terms, landmarks: Landmarks, client: str, nonce: str, repeats: Repeats,
    draw: Uniform,
) -> tuple[bytes, int]:  # fmt: skip
    """A client's rows on the landmark map as the bytes it sends, and how many entries of phi saturated.

    The same bytes for the same rows and the same ``draw``. What the server would refuse is refused here.
    """
    encoding = _rounded(landmarks, terms)
    with _enough_memory(terms):
        vector, saturated = encoding.encode_rows(phi, one_hot(labels, terms.n_classes), draw, repeats)
        sealed = _seal_integers(encoding, vector, saturated, terms, client, nonce)
    check(decode(sealed, terms), terms, landmarks)
    return sealed, saturated


def encode_private(vector: Tensor, terms: Terms, client: str, nonce: str) -> bytes:
    """The sums of a client's integer rows as the bytes that it sends to a server that adds the noise.

    Publications name a contribution by its hash, so the nonce is random: nobody can try rows until the hash fits.
    """
    if not nonce:
        raise InputError("a contribution under noise without a nonce: its hash would tell its rows")
    told, tensors = packed(squeeze(encoding_of(terms).layout, vector), vector)
    n = n_rows(vector.numpy(), terms)
    sealed = seal(KIND, {**_header("integers", n, terms, client, nonce), "saturated": 0, **told}, tensors)
    check(decode(sealed, terms), terms)
    return sealed


def encode_sums(
    stats: Statistics, terms: Terms, landmarks: Landmarks | None, client: str, nonce: str, draw: Uniform
) -> bytes:
    """Sums of rows that are no longer at hand as the bytes that a client sends, rounded here."""
    with _enough_memory(terms):
        if landmarks is None:
            sealed = _seal_triangle(stats, terms, client, nonce)
        else:
            encoding = _rounded(landmarks, terms)
            vector, saturated = encoding.encode(stats, draw)
            if saturated:
                raise InputError(
                    f"{saturated} of the sums of {client} are beyond the agreed range of the integers: its rows are "
                    "unlike those that the landmarks were drawn from. Contribute a share of them, or agree on "
                    "landmarks from moments that include them, in a new federation"
                )
            sealed = _seal_integers(encoding, vector, 0, terms, client, nonce)
    check(decode(sealed, terms), terms, landmarks)
    return sealed


def _rounded(landmarks: Landmarks, terms: Terms) -> Encoding:
    """How sums without noise are integers."""
    encoding = landmarks.encoding(terms)
    assert isinstance(encoding, Encoding)
    return encoding


def _seal_integers(encoding: Encoding, vector: Tensor, saturated: int, terms: Terms, client: str, nonce: str) -> bytes:
    told, tensors = packed(encoding.packing(vector), vector)
    n = int(vector[encoding.layout.places["n_samples"]])
    return seal(KIND, {**_header("integers", n, terms, client, nonce), "saturated": saturated, **told}, tensors)


def _seal_triangle(stats: Statistics, terms: Terms, client: str, nonce: str) -> bytes:
    if form_for(stats.n_samples, terms.width) != "triangle":
        raise InputError(
            f"sums of {stats.n_samples} rows for {terms.width} columns given; with fewer rows than columns a site "
            "sends the factor of its rows: join with the rows themselves (--data)"
        )
    assert stats.echo is not None
    return _seal("triangle", message(stats, terms.dtype), terms, client, nonce, Repeats(stats.n_copies, stats.echo))


def encode(
    phi: Tensor, labels: Tensor, terms: Terms, client: str, nonce: str = "", repeats: Repeats | None = None
) -> bytes:
    """A client's rows as the bytes it sends; the same bytes for the same rows.

    The triangle of Phi'Phi, or with fewer rows than columns the smaller QR factor. The triangle of an ill-conditioned
    matrix may round to an indefinite one, most of all in float32; the factor, then of the same size, cannot. What the
    server would refuse is refused here, before it leaves.
    """
    with _enough_memory(terms):
        targets = one_hot(labels, terms.n_classes)
        if form_for(len(phi), terms.width) == "triangle":
            sealed = _seal("triangle", message(statistics(phi, targets), terms.dtype), terms, client, nonce, repeats)
            with suppress(InputError):
                check(decode(sealed, terms), terms)
                return sealed
        sealed = _seal("factor", factor_message(phi, targets, terms.dtype), terms, client, nonce, repeats)
        check(decode(sealed, terms), terms)
        return sealed


def encode_numbers(phi: Tensor, targets: Tensor, terms: Terms, client: str, nonce: str, n_copies: int) -> bytes:
    """A client's rows on the widest map, with columns as targets, as the bytes it sends; the same for the same rows."""
    header = {**_header("triangle", len(phi), terms, client, nonce), "n_copies": n_copies}
    with _enough_memory(terms):
        if form_for(len(phi), terms.width) == "triangle":
            sealed = seal(KIND, header, message(number_statistics(phi, targets, n_copies)))
            with suppress(InputError):
                check(decode(sealed, terms), terms)
                return sealed
        sealed = seal(KIND, {**header, "form": "factor"}, factor_message(phi, targets))
        check(decode(sealed, terms), terms)
        return sealed


@contextmanager
def _enough_memory(terms: Terms) -> Iterator[None]:
    """An error in words if statistics of this size do not fit into memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("can't allocate|not enough memory", str(error)):
            raise
        raise InputError(
            f"statistics of {terms.width} columns and {terms.n_classes} classes do not fit into this machine's memory; "
            "use a larger machine, or agree on a smaller d_primary or fewer classes in a new federation"
        ) from error


def decode(data: bytes, terms: Terms) -> Contribution:
    """The message as tensors of the sizes agreed; nothing is allocated for any other."""
    if terms.landmarked and not terms.numeric:
        return _decode_integers(data, terms)

    def expected(header: dict[str, Any]) -> Expected:
        _check_header(header, terms)
        d, c, n = terms.width, terms.n_classes, count(header, "n")
        wide = ("F64",) if terms.wire == "float64" else ("F32",)
        small: Expected = {
            "class_counts": (("F64",), (c,)),
            "n_samples": (("I64",), ()),
            "target_energy": (("F64",), ()),
        }
        if "n_copies" in header and not terms.numeric:  # messages kept by earlier versions have none
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
    return Contribution(client, form, n, nonce, n_copies, tensors, sha256(data), len(data), numeric=terms.numeric)


def _decode_integers(data: bytes, terms: Terms) -> Contribution:
    """The vector of integers, each within its range, and the numbers of rows that it says."""
    private = terms.private
    layout = encoding_of(terms).layout if private else statistics_layout(terms.width, terms.n_classes, terms.bits)

    def expected(header: dict[str, Any]) -> Expected:
        _check_header(header, terms)
        if text(header, "form") != "integers":
            raise InputError(f"statistics in the form {text(header, 'form')[:40]!r}; these terms need integers")
        return {VECTOR: (("U8",), (packing(layout, header).n_bytes,))}

    header, tensors = unseal(KIND, data, expected)
    integers = unpacked(packing(layout, header), tensors)
    if private:  # of repeated rows nothing is told
        n, n_copies, n_echoed = n_rows(integers, terms), 0, 1
    else:
        n, n_copies = (int(integers[layout.places[name]][0]) for name in ("n_samples", "n_copies"))
        n_echoed = int(integers[layout.places["echo"]].sum())
    if n != count(header, "n"):
        raise InputError(f"n contradicts itself: {count(header, 'n')} in the header, {n} in the message")
    if n_copies >= max(n, 1) or not 1 <= n_echoed <= n:
        raise InputError(
            f"n contradicts itself: {n_copies} copies among {n} rows, or an echo that {n} rows do not have"
        )
    client, nonce = check_name("client", text(header, "client")), text(header, "nonce")
    count(header, "saturated")
    return Contribution(client, "integers", n, nonce, n_copies, tensors, sha256(data), len(data), integers)


def _echoes(echo: Tensor, n: int) -> bool:
    return int(echo.min()) >= 0 and 1 <= int(echo.long().sum()) <= n


def upload_bytes(terms: Terms, n_samples: int) -> int:
    """What the statistics of so many rows weigh at most, without the echo."""
    if terms.landmarked and not terms.numeric:  # most integers travel in fewer bits
        return rounded_bytes(terms.width, terms.n_classes, terms.bits)
    return statistics_bytes(n_samples, terms.width, terms.n_classes, terms.dtype)


def largest_answer(terms: Terms) -> int:
    """The most bytes that a client can have to send: before the terms are settled a description, then statistics.

    A client that rejoins brings its former statistics too, if the server keeps only their sum.
    """
    if terms.masked:  # a sum over many sites has more bits than one site's numbers: at most three times as many
        return 3 * _largest(terms, once=True)
    return _largest(terms, once=terms.keep_contributions)


def _largest(terms: Terms, *, once: bool) -> int:
    beside = 2 * LARGEST_HEADER  # a header; the echo, or a description's moments
    if terms.numeric and terms.outlined:
        return beside + spread_bytes(terms.n_in, full=terms.spread == "full")
    if terms.trying:
        return beside + largest_statistics(terms)
    if terms.outlined and terms.spread is not None:
        return beside + spread_encoding(terms).layout.n_bytes
    if not terms.settled:
        return beside
    statistics_once = beside + upload_bytes(terms, terms.width)
    return statistics_once if once else 2 * statistics_once


def check(contribution: Contribution, terms: Terms, landmarks: Landmarks | None = None) -> None:
    """Refuse what cannot be the statistics of n rows under these terms, with the reason."""
    if terms.numeric:
        with _enough_memory(terms):
            _check_numbers(contribution, terms)
        return
    if contribution.integers is not None and terms.private:
        with _enough_memory(terms):
            check_rows(contribution.integers, terms)
        return
    if contribution.integers is not None:
        assert landmarks is not None
        with _enough_memory(terms):
            check_integers(contribution.integers, _rounded(landmarks, terms), terms)
        return
    tensors, n = contribution.tensors, contribution.n_samples
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} contains NaN or infinity")
    _check_counts(tensors["class_counts"], tensors, n, terms)
    stats = contribution.statistics
    check_statistics(stats, terms)
    with _enough_memory(terms):
        definite = _factor_fits(contribution, terms) if contribution.form == "factor" else _definite(stats, terms)
    if not definite:
        raise InputError(_why_indefinite(stats, terms))


def _check_numbers(contribution: Contribution, terms: Terms) -> None:
    """Refuse sums that no n rows have: phi begins with a one, and the landmarks' part is at most one long."""
    tensors, n, stats = contribution.tensors, contribution.n_samples, contribution.statistics
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} contains NaN or infinity")
    if n < 1 or int(tensors["n_samples"]) != n:
        raise InputError(f"n contradicts itself: {n} in the header, {int(tensors['n_samples'])} in the message")
    if terms.row_limit is not None and n > terms.row_limit:
        raise InputError(
            f"{n} rows; the terms let one client contribute at most {terms.row_limit}: send a part of them"
        )
    matrix, crossed, energy = stats.autocorrelation, stats.crosscorrelation, stats.target_energy
    diagonal, landmarks = matrix.diagonal(), matrix.diagonal()[-(terms.n_landmarks or 0) :]
    if float(diagonal.max()) >= LARGEST or energy >= LARGEST:
        raise InputError(f"absurd scale: a sum of squares of {max(float(diagonal.max()), energy):.3g}; repair the rows")
    slack = ROUNDING[terms.wire] * 10 * (n + float(diagonal.max()) + energy)
    if abs(float(matrix[0, 0]) - n) > slack or float(diagonal.min()) < 0 or float(landmarks.sum()) > n * (1 + 1e-3):
        raise InputError(f"n contradicts the matrix: other sums of squares than {n} rows have")
    if float((crossed[0] - stats.class_counts).abs().max()) > slack:
        raise InputError("the sums of the targets contradict the matrix: the column of ones says otherwise")
    if float((crossed.square().sum(1) - diagonal * energy).max()) > slack * (1 + float(diagonal.max())):
        raise InputError("n contradicts the matrix: sums of products with the targets that are too long")
    if contribution.form == "triangle" and not positive(matrix.clone(), _allowed(stats, terms)):
        raise InputError("the autocorrelation is indefinite beyond rounding: no rows have these sums of products")


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
    row, entries = _bounds(terms)
    most = n * (1 + 1e-3)  # rows are mapped in single precision
    trace, worst = float(diagonal.sum()), int((diagonal / entries).argmax())
    if trace > most * row or float(diagonal[worst]) > most * float(entries[worst]):
        raise InputError(
            f"n contradicts the matrix: trace {trace:.4g}, sum of squares {float(diagonal[worst]):.4g} in column "
            f"{worst}; {n} rows give at most {most * row:.4g} and {most * float(entries[worst]):.4g}"
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
    if float(tensors["target_energy"]) != n:
        raise InputError(f"n contradicts the target energy: {n} rows, energy {float(tensors['target_energy']):g}")
    check_counts(counts, n, terms)


def _check_intercept(stats: Statistics, terms: Terms) -> None:
    """The column of ones counts: all rows in its own entry, each class in its row of Phi'Y."""
    n = stats.n_samples
    slack = ROUNDING[terms.wire] * 10 * n
    off = (stats.crosscorrelation[-1] - stats.class_counts).abs().max()
    if abs(float(stats.autocorrelation[-1, -1]) - n) > slack or float(off) > slack:
        raise InputError(f"n contradicts the matrix: the column of ones counts otherwise than {n} rows")


@lru_cache(maxsize=4)  # nearly always the same terms
def _bounds(terms: Terms) -> tuple[float, Tensor]:
    """The largest |phi|^2 that a row can have, and the largest square of each entry (d,); infinite without a bound.

    phi = act(R'z). If |act(x)| <= |x| and rows have the length |z|^2 = l, then |phi|^2 <= l |R|_2^2, and the square of
    an entry is at most l |r_j|^2. An activation that never passes 1 bounds the entries in any case.
    """
    method = terms.method
    row, entries = math.inf, torch.full((terms.width,), math.inf, dtype=torch.float64)
    if method.activation_primary in ("sigmoid", "cosine", "tanh"):
        entries.fill_(1.0)
    elif method.normalise in OF_ONE_LENGTH:
        matrix = terms.maps(torch.zeros(1, 1))[0].matrix
        assert matrix is not None, "terms have a random map"
        matrix = matrix.to(torch.float64)  # (l, d)
        row = len(matrix) * float(torch.linalg.eigvalsh(gram(matrix))[-1]) + method.intercept
        entries[: matrix.shape[1]] = len(matrix) * matrix.square().sum(0)
    if method.intercept:
        entries[-1] = 1.0
    return min(row, float(entries.sum())), entries


def _definite(stats: Statistics, terms: Terms) -> bool:
    """Whether the within-class scatter is positive semidefinite up to rounding."""
    present = stats.class_counts > 0
    scaled = stats.crosscorrelation[:, present] / stats.class_counts[present].sqrt()
    scatter = torch.addmm(stats.autocorrelation, scaled, scaled.T, alpha=-1)
    return positive(scatter, _allowed(stats, terms))


def _factor_fits(contribution: Contribution, terms: Terms) -> bool:
    """Whether counts - (Q'Y)'(Q'Y) is positive semidefinite, and zero where Q is square: R'R itself always is.

    A class without rows has a zero column of Y, and exactly so of Q'Y: no matrix is made for all classes there are.
    """
    turned, counts = contribution.tensors["turned_targets"].to(torch.float64), contribution.tensors["class_counts"]
    present = counts > 0
    if bool(turned[:, ~present].any()):
        return False
    turned, counts = turned[:, present], counts[present]
    rest = torch.diag(counts) - turned.T @ turned
    slack = 10 * ROUNDING[terms.wire] * contribution.n_samples
    if contribution.n_samples < terms.width:
        return float(rest.abs().max()) <= slack
    return smallest_eigenvalue(rest) >= -slack


def _allowed(stats: Statistics, terms: Terms) -> float:
    return ROUNDING[terms.wire] * float(stats.autocorrelation.diagonal().mean())


def _why_indefinite(stats: Statistics, terms: Terms) -> str:
    if not positive(stats.autocorrelation.clone(), _allowed(stats, terms)):
        return "the autocorrelation is indefinite beyond rounding: no rows have these sums of products"
    return "n contradicts the matrix: the class sums are too long for the class counts"


def _seal(
    form: str, tensors: Mapping[str, Tensor], terms: Terms, client: str, nonce: str, repeats: Repeats | None
) -> bytes:
    header = _header(form, int(tensors["n_samples"]), terms, client, nonce)
    if repeats is None:
        return seal(KIND, header, tensors)
    echo = repeats.echo.clamp_max(2**15 - 1).to(torch.int16)
    return seal(KIND, header | {"n_copies": repeats.n_copies}, {**tensors, "echo": echo})


def _header(form: str, n: int, terms: Terms, client: str, nonce: str) -> dict[str, Any]:
    assert terms.fingerprints is not None
    return {
        "federation": terms.federation, "terms": terms.digest, "map": terms.fingerprints[0],
        "client": check_name("client", client), "form": form, "n": n, "nonce": nonce,
    }  # fmt: skip
