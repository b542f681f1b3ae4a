"""Statistics as integers: one step and one range for everyone, so that sums are exact by nature.

    integer = floor(entry / (step sqrt(D_i D_j)) + u),   u uniform on [0, 1): unbiased, whatever the entry

Entries are those of T'T and T'Y for T = Phi R'^-1. R comes from the map alone (`apfl.maths.turning`) and makes
the columns of T nearly uncorrelated: an error of the same size everywhere is then small beside Phi'Phi in every
direction, also in those in which rows hardly differ, and entries off the diagonal are small. With Phi itself the same
accuracy takes six bits more. D_i is the mean square of column i of T, known to everyone and not from anybody's rows.

The diagonal, whose entries are the largest and few, has 32 bits, T'Y four more than T'T; so the range of the
others can be that of a correlation. If a client's entries are outside the range, those of its *rows* saturate (and are
counted): then they fit, and are still the products of some rows of length 1 at most (`Encoding.encode_rows`). Most
entries are far below the range, and travel in fewer bits (`bits.Squeezed`).

**What this does to the primary.** Each of K clients adds an error of mean 0, variance at most step^2 / 4 and size below
step to each scaled entry. So the scaled error of T'T is a symmetric matrix of independent entries, whose spectral
norm is at most `spectral_bound` but for a probability of `FAILS`, and A G = B becomes (A + F) G~ = B + H:

    |G~ - G| <= (|H| + |F| |G|) / (smallest eigenvalue of A - |F|)          in the coordinates of T over sqrt D
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from apfl.errors import not_finite
from apfl.maths.bits import Layout, Part, Squeezed, squeeze
from apfl.maths.dither import Dither, Uniform
from apfl.maths.leaveout import ECHO
from apfl.maths.machine import multiplies_halves
from apfl.maths.ridge import Statistics
from apfl.maths.turning import Turning

__all__ = [
    "CROSS_BITS",
    "DIAGONAL_BITS",
    "FAILS",
    "HIDDEN",
    "OF_ONE_LENGTH",
    "ROOM",
    "Encoding",
    "Repeats",
    "Rounding",
    "add_integers",
    "bits_for",
    "products_in",
    "round_statistics",
    "spectral_bound",
    "statistics_layout",
]

Repeats = tuple[int, Tensor | None]  # rows that repeat another of the client, and the echo
ROOM = 4.0  # correlations of a client's columns, in units of the mean squares that are expected of them
DIAGONAL_BITS = 32
CROSS_BITS = 4  # more than those of T'T: the primary is linear in T'Y, and its entries are few
FAILS = 1e-9  # the probability that an error passes its bound
HIDDEN = 0.15  # of the smallest eigenvalue that rows are expected to have may be lost to rounding
LEAST = 0.02  # of N, what is taken for that eigenvalue at least: the ridge hides smaller ones anyway
FEWEST, MOST = 8, 20  # bits that are chosen
DIAGONAL_ROOM = 64.0  # a client's column may have so many times the mean square that is expected of it
OF_ONE_LENGTH = ("root", "row", "columns", "centred")  # normalisations whose rows bound their moments
_MOST_ECHO = 2**15 - 1
_BLOCK = 512
_ENTRIES = 2**17  # rounded at a time on a CPU: they stay in the cache
_ROWS = 8192  # whose products are added in single precision
IN_SINGLE = 12  # bits of an integer that single precision leaves as many bits of dither for
HALF_ERROR = 2**-7  # three roundings to 2^-9: of both factors, and of their product
IN_HALF = 12  # bits beside which the errors of products in bfloat16 are small (`_Halves`)


@dataclass(frozen=True)
class Rounding:
    """One step for everyone: signed integers of so many bits for entries of at most ``limit``."""

    bits: int
    limit: float

    @staticmethod
    def for_rows(bits: int, n_rows: int) -> Rounding:
        """For clients of at most so many rows."""
        return Rounding(bits, ROOM * n_rows)

    @property
    def diagonal(self) -> Rounding:
        """That of the diagonal of Phi'Phi."""
        return Rounding(DIAGONAL_BITS, DIAGONAL_ROOM * self.limit)

    @property
    def cross(self) -> Rounding:
        """That of T'Y."""
        return Rounding(self.bits + CROSS_BITS, self.limit)

    @property
    def largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def step(self) -> float:
        return self.limit / self.largest

    def integers(self, values: Tensor, dither: Tensor) -> tuple[Tensor, Tensor]:
        """Integers (as floats, exact) for ``values`` (..., rows, columns), and how many of them saturated (...)."""
        if self.bits > IN_SINGLE:
            values = values.double()
        raw = (values * (1 / self.step)).add_(dither).floor_()
        if raw.device.type == "cpu" and raw.numel() and max(map(abs, _ends(raw))) <= self.largest:
            return raw, torch.zeros(raw.shape[:-2], dtype=torch.int64)
        outside = (raw.abs() > self.largest).flatten(-2).sum(-1)
        return raw.clamp_(-self.largest, self.largest), outside


def _ends(values: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(values)
    return float(low), float(high)


@dataclass(frozen=True)
class LengthErrors:
    """Of the sum of |phi|^2 over a client's rows, and of the length of a sum of phi."""

    squares: float
    sums: float


@dataclass(frozen=True, eq=False)
class Encoding:
    """Statistics as one vector of integers, and back; ``columns`` is D (d,). The vectors of several clients add."""

    rounding: Rounding
    columns: Tensor
    n_classes: int
    basis: Turning | None = None  # R; none: T = Phi

    @property
    def count_unit(self) -> int:
        """Integers for one row among the class counts."""
        return 1

    @cached_property
    def layout(self) -> Layout:
        """What stands where: the entries of T'T below its diagonal (`_blocks`), the diagonal, T'Y row by row."""
        return statistics_layout(len(self.columns), self.n_classes, self.rounding.bits)

    def packing(self, vector: Tensor) -> Squeezed:
        """How this vector takes the fewest bytes."""
        return squeeze(self.layout, vector)

    def encode_rows(self, phi: Tensor, targets: Tensor, draw: Uniform, repeats: Repeats) -> tuple[Tensor, int]:
        """The vector (int64) of a client's rows phi (n, d), and how many entries of phi saturated.

        With |t_i| <= sqrt(limit / n) sqrt(D_i) no entry of T'T passes the limit. That is twice the root of the
        expected mean square or more; if all sums fit as they are, nothing saturates.
        """
        vector, saturated = self._encode_rows(phi, targets, draw, repeats)
        return vector.long(), saturated

    def _encode_rows(self, phi: Tensor, targets: Tensor, draw: Uniform, repeats: Repeats) -> tuple[Tensor, int]:
        turned = phi if self.basis is None else self.basis.turn(phi)
        vector, outside = self._encode(self._sums(turned, targets), [repeats], draw)
        if not int(outside):
            return vector, 0
        most = (math.sqrt(self.rounding.limit / len(turned)) * self._scale).to(turned)
        within = turned.clamp(-most, most)
        length = torch.linalg.vector_norm(self.back(within.T), dim=0).clamp_min(1)[:, None]
        vector, _ = self._encode(self._sums(within / length, targets), [repeats], draw)
        return vector, int((within != turned).sum())

    def encode_each(
        self, phis: Sequence[Tensor], targets: Sequence[Tensor], draws: Sequence[Dither], repeats: Sequence[Repeats]
    ) -> tuple[Tensor, list[int]]:
        """`encode_rows` of several clients at once, (b, size): rows of zeros fill them up, which change no sum.

        int32 if that is enough.
        """
        sizes = [len(phi) for phi in phis]
        if len(phis) > 1 and max(sizes) <= _ROWS:
            phi, target = (torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in (phis, targets))
            turned = phi if self.basis is None else self.basis.turn(phi.flatten(0, 1)).view_as(phi)
            vectors, found = self._encode(self._sums(turned, target, sizes), repeats, Dither.together(draws))
            outside = found.tolist()
            if not any(outside):
                return vectors, outside
        own = [*map(self._encode_rows, phis, targets, draws, repeats)]
        made = [vector for vector, _ in own]
        return made[0][None] if len(own) == 1 else torch.stack(made), [saturated for _, saturated in own]

    def encode(self, stats: Statistics, draw: Uniform) -> tuple[Tensor, int]:
        """The vector (int64) of sums over rows of Phi, and how many entries of the sums of T saturated."""
        matrix, cross = stats.autocorrelation, stats.crosscorrelation
        if self.basis is not None:
            matrix, cross = self.basis.turn_sums(matrix), self.basis.turn(cross.T).T
        products = _Known(matrix / torch.outer(self._scale, self._scale))
        sums = _Sums(products, cross / self._scale[:, None], stats.class_counts, torch.tensor(stats.n_samples))
        vector, outside = self._encode(sums, [(stats.n_copies, stats.echo)], draw)
        return vector.long(), int(outside)

    def _sums(self, turned: Tensor, targets: Tensor, sizes: Sequence[int] | None = None) -> _Sums:
        """Of rows of T (n, d) over sqrt D, or of several clients' (b, n, d), which have these sizes.

        Products of rows in single precision are in single precision, or in bfloat16 (`_Halves`), and added in double:
        rounding to integers of 24 bits or fewer is far coarser.
        """
        scaled, counts = turned / self._scale.to(turned), targets.sum(-2)
        n_samples = torch.tensor(len(turned) if sizes is None else sizes)
        rows = torch.split(scaled, _ROWS, -2)
        cross = _added(each.mT @ own.to(each) for each, own in zip(rows, torch.split(targets, _ROWS, -2), strict=True))
        halves = products_in(scaled, self.rounding.bits) == torch.bfloat16
        products = _Halves.of(rows) if halves else _Products(rows)
        if not bool(torch.isfinite(products.diagonal).all()):
            raise not_finite("the features")
        return _Sums(products, cross, counts, n_samples)

    def _encode(self, sums: _Sums, repeats: Sequence[Repeats], draw: Uniform) -> tuple[Tensor, Tensor]:
        """The vectors (..., size), int32 if that is enough, and how many entries of each saturated (...)."""
        device, lead = sums.cross.device, sums.cross.shape[:-2]
        dtype = torch.int32 if max(part.bits for part in self.layout.parts) <= 32 else torch.int64
        vector = torch.zeros(*lead, self.layout.size, dtype=dtype, device=device)
        places, saturated = self.layout.places, torch.zeros(lead, dtype=torch.int64, device=device)

        def put(where: slice, rounding: Rounding, values: Tensor) -> None:
            nonlocal saturated
            rounded, outside = rounding.integers(values, draw(*values.shape[-2:]))
            vector[..., where] = rounded.flatten(-2)
            saturated = saturated + outside

        for where, values in self._below(sums.products):
            put(where, self.rounding, values)
        put(places["diagonal"], self.rounding.diagonal, sums.products.diagonal[..., None, :])
        put(places["cross"], self.rounding.cross, sums.cross)
        vector[..., places["class_counts"]] = sums.counts.round().to(vector)
        vector[..., places["n_samples"]] = sums.n_samples[..., None].to(vector)
        n_copies = torch.tensor([own for own, _ in repeats], dtype=torch.int32).view(*lead, 1)
        vector[..., places["n_copies"]] = n_copies.to(vector)
        if any(echo is not None for _, echo in repeats):
            none = torch.zeros(ECHO, dtype=torch.int64)
            echoes = torch.stack([none if echo is None else echo.cpu() for _, echo in repeats]).clamp_max(_MOST_ECHO)
            vector[..., places["echo"]] = echoes.view(*lead, ECHO).to(vector)
        return vector, saturated

    def _below(self, products: _Known | _Products) -> Iterator[tuple[slice, Tensor]]:
        """The entries of T'T below its diagonal (..., rows, columns) in the order of the layout, and their places.

        On a CPU in pieces that stay in the cache, on a GPU in one.
        """
        device = products.diagonal.device
        if device.type != "cpu":
            tiles = ((rows, products.tile(rows)) for rows, _, _ in self._blocks)
            yield self.layout.places["below"], _in_order(tiles)
            return
        for rows, square, corner in self._blocks:
            tile = products.tile(rows)
            step = max(1, _ENTRIES // max(1, rows.start))
            for start in range(rows.start, rows.stop if rows.start else 0, step):
                stop = min(start + step, rows.stop)
                first, last = (square.start + (each - rows.start) * rows.start for each in (start, stop))
                yield slice(first, last), tile[..., start - rows.start : stop - rows.start, : rows.start]
            yield corner, tile[..., rows.start :][(..., None, *_triangle(rows, device))]

    def decode(self, vector: Tensor) -> Statistics:
        """What a vector says of Phi, or a sum of vectors."""
        told = self.told(vector)
        if self.basis is None:
            return told
        matrix = self.basis.sums_back(told.autocorrelation)
        return replace(told, autocorrelation=matrix, crosscorrelation=self.back(told.crosscorrelation))

    def told(self, vector: Tensor) -> Statistics:
        """What a vector says of T, as it stands there."""
        places, d = self.layout.places, len(self.columns)
        matrix = torch.empty(d, d, dtype=torch.float64, device=vector.device)
        diagonal = vector[places["diagonal"]].double() * self.rounding.diagonal.step
        for rows, square, corner in self._blocks:
            made = vector.new_zeros(rows.stop - rows.start, rows.stop, dtype=torch.float64)
            made[:, : rows.start] = vector[square].view(-1, rows.start) if rows.start else 0
            own = made[:, rows]
            own[_triangle(rows, vector.device)] = vector[corner].double()
            own += own.T.clone()
            made *= self.rounding.step
            own.diagonal().copy_(diagonal[rows])
            made *= torch.outer(self._scale[rows], self._scale[: rows.stop])
            matrix[rows, : rows.stop], matrix[: rows.start, rows] = made, made[:, : rows.start].T
        cross = vector[places["cross"]].double().reshape(d, self.n_classes) * self.rounding.cross.step
        n_samples = int(vector[places["n_samples"]])
        return Statistics(
            matrix, cross * self._scale[:, None], vector[places["class_counts"]].double(), n_samples, float(n_samples),
            int(vector[places["n_copies"]]), vector[places["echo"]],
        )  # fmt: skip

    def bounds(self, squares: float, most_of_a_class: int, n_clients: int) -> dict[str, int]:
        """What entries of a sum do not pass in size if those of T'T on its diagonal, over D, do not pass ``squares``.

        By the inequality of Cauchy and Schwarz, |(T'T)_ij|^2 <= (T'T)_ii (T'T)_jj, and of the rows of one class, which
        are at most so many, |(T'Y)_ic|^2 <= n_c (T'T)_ii. Each client's rounding moves an entry by less than a step,
        and products in bfloat16 by `HALF_ERROR` of its bound.
        """
        squares *= 1 + HALF_ERROR
        cross = math.sqrt(squares * most_of_a_class) / self.rounding.cross.step
        return {name: math.ceil(most) + n_clients for name, most in (
            ("below", squares / self.rounding.step), ("cross", cross),
        )}  # fmt: skip

    def bounds_told(self, vector: Tensor, n_clients: int) -> dict[str, int]:
        """`bounds` by the diagonal and the class counts of the sum itself, which say what the other entries can be."""
        places = self.layout.places
        squares = (int(vector[places["diagonal"]].max()) + n_clients) * self.rounding.diagonal.step
        return self.bounds(max(squares, 0.0), int(vector[places["class_counts"]].max()), n_clients)

    def squares(self, matrix: Tensor) -> float:
        """The sum of |phi|^2 over the rows behind T'T: tr R T'T R'."""
        return float((self._gram * matrix).sum())

    @cached_property
    def length_errors(self) -> LengthErrors:
        """What rounding one client's sums can do to lengths of phi, but for `FAILS` each.

        By Hoeffding's inequality for the squares, whose entries below the diagonal count twice, and by that of Pinelis
        (1994) for sums of independent vectors.
        """
        chance, scaled = math.log(2 / FAILS), self._gram * torch.outer(self._scale, self._scale)
        own = scaled.diagonal()
        below = float(scaled.square().sum() - own.square().sum()) / 2
        squares = 2 * self.rounding.step * math.sqrt(chance / 2 * max(0.0, below))
        squares += self.rounding.diagonal.step * float(own.sum())
        return LengthErrors(squares, self.rounding.cross.step * math.sqrt(2 * chance * float(own.sum())))

    @cached_property
    def _gram(self) -> Tensor:
        """R'R."""
        if self.basis is None:
            return torch.eye(len(self.columns), dtype=torch.float64, device=self.columns.device)
        return self.basis.gram

    def back(self, columns: Tensor) -> Tensor:
        """R X."""
        return columns if self.basis is None else self.basis.back(columns)

    @cached_property
    def _scale(self) -> Tensor:
        return self.columns.to(torch.float64).sqrt()

    @cached_property
    def _blocks(self) -> list[tuple[slice, slice, slice]]:
        """Some rows of T'T; where their entries left of their own block stand, and those below its diagonal."""
        blocks, at, d = [], 0, len(self.columns)
        for start in range(0, d, _BLOCK):
            n = min(_BLOCK, d - start)
            middle, end = at + n * start, at + n * start + n * (n - 1) // 2
            blocks.append((slice(start, start + n), slice(at, middle), slice(middle, end)))
            at = end
        return blocks


def products_in(rows: Tensor, bits: int) -> torch.dtype:
    """The precision of products of such rows behind integers of so many bits."""
    coarse = rows.dtype == torch.float32 and bits <= IN_HALF
    return torch.bfloat16 if coarse and multiplies_halves(rows.device) else rows.dtype


def _triangle(rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """The places below the diagonal of a block of so many rows."""
    return _below_diagonal(rows.stop - rows.start, device)


@lru_cache(4)
def _below_diagonal(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(n, n, -1, device=device)
    return row, column


def _in_order(tiles: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """The entries below the diagonal (..., 1, entries), from tiles (..., rows, columns): their blocks, then corners."""
    pieces: list[Tensor] = []
    for rows, tile in tiles:
        pieces += tile[..., : rows.start].flatten(-2), tile[..., rows.start :][(..., *_triangle(rows, tile.device))]
    return torch.cat(pieces, -1)[..., None, :]


@dataclass(frozen=True, eq=False)
class _Known:
    """T'T (d, d) over sqrt D from both sides; of several clients with a dimension in front."""

    matrix: Tensor

    @property
    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def tile(self, rows: slice) -> Tensor:
        """These rows of the matrix, up to their own entries on the diagonal (..., rows, columns)."""
        return self.matrix[..., rows, : rows.stop]


@dataclass(frozen=True, eq=False)
class _Products:
    """T'T of rows by tiles: the upper half is never computed, and on a CPU a tile stays in the cache."""

    rows: Sequence[Tensor]  # (n, d) each; of several clients with a dimension in front

    @cached_property
    def diagonal(self) -> Tensor:
        return _added(each.square().sum(-2) for each in self.rows)

    def tile(self, rows: slice) -> Tensor:
        """As that of `_Known`."""
        return _added(each[..., rows].mT @ each[..., : rows.stop] for each in self.rows)


@dataclass(frozen=True, eq=False)
class _Halves(_Products):
    """The same with rows and entries in bfloat16, where these are multiplied at least twice as fast.

    An entry is then off by 2^-9 of itself, and by about sqrt(n) 2^-9 from its rows. Off the diagonal few entries reach
    n / 4 and most are below n / 40, while a step is 4 n / 2^(b - 1) or more: the error is 0.15 steps at most with 12
    bits, 0.04 with 10, and mostly a tenth of that. Rounding itself adds 0.4. The diagonal is in single precision.
    """

    columns: Sequence[Tensor]  # the same (..., d, n) each, bfloat16

    @staticmethod
    def of(rows: Sequence[Tensor]) -> _Halves:
        return _Halves(rows, [each.bfloat16().mT.contiguous() for each in rows])

    def tile(self, rows: slice) -> Tensor:
        """As that of `_Known`."""
        return _added((each[..., rows, :] @ each[..., : rows.stop, :].mT).float() for each in self.columns)


def _added(terms: Iterable[Tensor]) -> Tensor:
    """A single term as it is; the sum of several in double precision."""
    first, *others = terms
    for other in others:
        first = first.double().add_(other)
    return first


@dataclass(frozen=True, eq=False)
class _Sums:
    """Statistics of T over sqrt D, in single or in double precision; of several clients with a dimension in front."""

    products: _Known | _Products
    cross: Tensor  # (d, c)
    counts: Tensor  # (c,)
    n_samples: Tensor  # ()


def add_integers(total: Tensor, vector: Tensor) -> None:
    """total += vector, of int64 and int32: on a CPU numpy converts by pieces that stay in the cache, torch does not."""
    if total.device.type == "cpu":
        held = total.numpy()
        np.add(held, vector.numpy(), out=held)
    else:
        total.add_(vector)


def statistics_layout(width: int, n_classes: int, bits: int) -> Layout:
    """The vector of a client's statistics; the numbers of rows are exact."""
    return Layout(
        (
            Part("below", width * (width - 1) // 2, bits),
            Part("diagonal", width, DIAGONAL_BITS),
            Part("cross", width * n_classes, bits + CROSS_BITS),
            Part("class_counts", n_classes, 32, signed=False),
            Part("n_samples", 1, 32, signed=False),
            Part("n_copies", 1, 32, signed=False),
            Part("echo", ECHO, 16, signed=False),
        )
    )


def round_statistics(
    stats: Statistics, columns: Tensor, rounding: Rounding, draw: Uniform, basis: Turning | None = None
) -> tuple[Statistics, int]:
    """The statistics as their integers tell them, and how many of the sums saturated; ``columns`` is D (d,)."""
    encoding = Encoding(rounding, columns, stats.n_classes, basis)
    vector, outside = encoding.encode(stats, draw)
    return replace(encoding.decode(vector), n_copies=stats.n_copies, echo=stats.echo), outside


def bits_for(n_samples: int, n_clients: int, most_rows: int, width: int) -> int:
    """The fewest bits whose rounding stays small beside the statistics, of so many rows at so many clients.

    In the coordinates of T over sqrt D rows like the expected ones give N I, and drawn rows eigenvalues down to
    N (1 - sqrt(d / N))^2 (Marchenko and Pastur, 1967). The spectral norm of the rounding error is about
    2 sqrt(K d / 6) step, and is kept below `HIDDEN` of that, or of `LEAST` of N if there are hardly more rows than
    columns.

    >>> bits_for(45_000, 50, 2_000, 6144), bits_for(7_500, 20, 1_000, 4096), bits_for(1_350, 10, 300, 256)
    (12, 15, 11)
    """
    smallest = max(LEAST, max(0.0, 1 - math.sqrt(width / max(n_samples, 1))) ** 2) * n_samples
    error = 2 * math.sqrt(n_clients * width / 6) * ROOM * most_rows  # with a step of 1 / 2^(bits - 1) of the range
    bits = 1 + math.ceil(math.log2(max(error, 1.0) / (HIDDEN * max(smallest, 1.0))))
    return min(max(bits, FEWEST), MOST)


def spectral_bound(rounding: Rounding, n_clients: int, width: int) -> float:
    """What the spectral norm of the scaled rounding error of T'T does not pass, but for `FAILS`.

    By the matrix Bernstein inequality (Tropp, 2012, Theorem 1.4): the error is a sum of independent symmetric matrices
    of mean zero and norm at most step, one for each client and entry, whose squares add up to at most K d step^2 / 4.
    """
    chance = math.log(2 * width / FAILS)
    return rounding.step * (math.sqrt(2 * chance * n_clients * width / 4) + 2 / 3 * chance)
