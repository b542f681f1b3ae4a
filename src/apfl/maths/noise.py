"""Integer noise on summed statistics, so that what is released hardly depends on any one row.

Neighbours are two federations of which one has one row more. A client's rows become integers first, and one row's
products are integers then: no rounding of sums blurs what one row can change.

    r      = 2^f phi, rounded so that |r| <= 2^f             a row; f follows from the bits of an entry
    vector = r_i r_j (i > j) | r_i r_i | r_i y_c | 2^f y_c   summed over rows; y the one-hot label
    noise  = 4^f sigma | 4^f sqrt(2) sigma | 2^f sigma | 2^f 4 sigma       standard deviations, part by part

With u = r / 2^f, at most 1 long, one row changes the vector, each entry over the size of its noise, by

    sum of squares = (|u|^4 / 2 + |u|^2 + 1/16) / sigma^2 <= (25/16) / sigma^2

so sigma is 5/4 times the noise multiplier (`privacy.noise_multiplier`). Entries that pass the range of a client's
vector are cut to it; that brings two vectors closer together, never apart.

What floating point leaves open: phi of a row is computed in one product with others of its client, whose presence may
move the last of its 52 bits, and with it one integer at a tie; and the probabilities of the sampler are rounded to 53
bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from apfl.maths.bits import Layout, Part
from apfl.maths.landmarks import Spread
from apfl.maths.ridge import Statistics, one_hot

__all__ = [
    "FEWEST_BITS",
    "SENSITIVITY",
    "IntegerRows",
    "Source",
    "accounted",
    "discrete_gaussian",
    "gamma_for",
    "moments",
    "shrunk",
    "sums_excess",
]

SENSITIVITY = 1.25  # sigma over the noise multiplier
OF_COUNTS = 4.0  # noise of a class count over that of an entry: counts are large, and need to be known less well
FEWEST_BITS = 24  # with fewer, most entries of a row would round to zero
RANGE_BITS = 12  # an entry of a client's vector may be that of 2^11 rows which have all their length in one column
_BLOCK = 2**20


class Source(Protocol):
    """Where noise comes from: a generator of numpy, or the system's entropy between machines."""

    def random(self, size: int) -> Any:
        """Uniform numbers in [0, 1)."""

    def geometric(self, p: float, size: int) -> Any:
        """How many trials the first success takes, each succeeding with probability p."""


def discrete_gaussian(sigma: float, size: int, rng: Source) -> np.ndarray:
    """Independent integers x with P(x) proportional to exp(-x^2 / (2 sigma^2)), int64.

    Canonne, Kamath and Steinke (2020), Algorithm 3: a discrete Laplace variable, the difference of two geometric ones,
    is kept with a probability that turns its tails into a Gaussian's.

    >>> discrete_gaussian(2.0, 5, np.random.default_rng(0)).dtype
    dtype('int64')
    """
    scale, drawn, n = math.floor(sigma) + 1, np.empty(size, np.int64), 0
    stops = -math.expm1(-1 / scale)
    while n < size:
        tries = min(_BLOCK, 2 * (size - n) + 64)
        laplace = rng.geometric(stops, tries) - rng.geometric(stops, tries)
        off = (np.abs(laplace) - sigma**2 / scale) / sigma
        kept = laplace[rng.random(tries) < np.exp(-(off**2) / 2)][: size - n]
        drawn[n : n + len(kept)] = kept
        n += len(kept)
    return drawn


def sums_excess(sigma: float, n_shares: int) -> float:
    """By how much a sum of discrete Gaussians of this size differs from one, for each entry.

    Kairouz, Liu and Steinke (2021), Theorem 1: tau, which is added to the sensitivity over the noise once for the
    square root of the number of entries. Below 1e-38 for sizes of 3 and more.
    """
    return 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, n_shares))


@dataclass(frozen=True)
class IntegerRows:
    """The sums of a client's integer rows as one vector, and back. The vectors of several clients add."""

    width: int
    n_classes: int
    bits: int

    @property
    def f(self) -> int:
        """Binary digits of an entry of phi."""
        return (self.bits - RANGE_BITS) // 2

    @cached_property
    def layout(self) -> Layout:
        """What stands where: Phi'Phi below its diagonal row by row, the diagonal, Phi'Y row by row, the counts."""
        sizes = {
            "below": self.width * (self.width - 1) // 2,
            "diagonal": self.width,
            "cross": self.width * self.n_classes,
            "class_counts": self.n_classes,
        }
        return Layout(tuple(Part(name, size, self.bits) for name, size in sizes.items()))

    @property
    def units(self) -> Mapping[str, int]:
        """Integers for one unit of each part: a product of phi, an entry of phi, a row."""
        return {"below": 4**self.f, "diagonal": 4**self.f, "cross": 2**self.f, "class_counts": 2**self.f}

    def sizes(self, sigma: float) -> Mapping[str, float]:
        """The standard deviation of the noise of each part, in integers."""
        weights = {"below": 1.0, "diagonal": math.sqrt(2), "cross": 1.0, "class_counts": OF_COUNTS}
        return {name: sigma * weights[name] * unit for name, unit in self.units.items()}

    def rows(self, phi: Tensor) -> Tensor:
        """phi (n, d) in integers (as float64, exact): none is longer than 2^f."""
        # Rounding adds 1/12 to the square of each entry, on average: rows near 1 make room for twice as much.
        most = math.sqrt(max(4**self.f - self.width / 6, 4**self.f / 4))
        scaled = phi.to(torch.float64) * 2**self.f
        scaled = scaled * (most / _lengths(scaled)).clamp_max(1)
        nearest = scaled.round()
        return torch.where(_lengths(nearest) > 2**self.f, scaled.trunc(), nearest)

    def encode(self, phi: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """The vector (int64) of a client's rows phi (n, d), and how many entries were cut to the range."""
        rows, targets = self.rows(phi), one_hot(labels, self.n_classes)
        products = rows.T @ rows  # whole numbers below 2^53: exact in any order
        at = torch.tril_indices(self.width, self.width, -1, device=rows.device)
        exact = torch.cat(
            [
                products[at[0], at[1]], products.diagonal(), (rows.T @ targets).reshape(-1),
                targets.sum(0) * self.units["class_counts"],
            ]
        ).long()  # fmt: skip
        most = 2 ** (self.bits - 1) - 1
        within = exact.clamp(-most, most)
        return within, int((within != exact).sum())

    @property
    def count_unit(self) -> int:
        """Integers for one row among the class counts."""
        return int(2**self.f)

    def noise(self, sigma: float, rng: Source) -> Tensor:
        """A vector of noise, int64."""
        sizes = self.sizes(sigma)
        parts = [discrete_gaussian(sizes[part.name], part.size, rng) for part in self.layout.parts]
        return torch.from_numpy(np.concatenate(parts))

    def decode(self, vector: Tensor) -> Statistics:
        """What a sum of vectors says; counts are rounded to whole rows, none below zero, and there is one at least."""
        parts = {name: vector[where].double() / self.units[name] for name, where in self.layout.places.items()}
        matrix = vector.new_zeros(self.width, self.width, dtype=torch.float64)
        at = torch.tril_indices(self.width, self.width, -1, device=vector.device)
        matrix[at[0], at[1]] = parts["below"]
        matrix += matrix.T.clone()
        matrix.diagonal().copy_(parts["diagonal"])
        counts = parts["class_counts"].round().clamp_min(0)
        if not bool(counts.any()):
            counts[0] = 1
        n = int(counts.sum())
        return Statistics(matrix, parts["cross"].reshape(self.width, self.n_classes), counts, n, float(n))


def _lengths(rows: Tensor) -> Tensor:
    """(n, 1). Of integers up to 2^53, and the square root is correctly rounded: a comparison with 2^f is exact."""
    return rows.square().sum(1, keepdim=True).sqrt()


def shrunk(stats: Statistics, sigma: float) -> Statistics:
    """The statistics with Phi'Phi as its noise lets expect it: the same eigenvectors, and rows of length one."""
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    factor = vectors * _expected(values, sigma, stats.n_samples).sqrt()
    return replace(stats, autocorrelation=factor @ factor.T)


def _expected(values: Tensor, sigma: float, trace: float) -> Tensor:
    """What a matrix has along each eigenvector of its sum with noise, given the eigenvalues of the sum.

    Bun, Allez, Bouchaud and Potters (2016), for noise of variance sigma^2 in every entry: an eigenvalue v goes to
    v - 2 sigma^2 sum 1 / (v - w) over the others, w, which push it outwards. Gaps are smoothed over some twenty usual
    ones, so that no near neighbour decides. What is negative then is cut, and the sum is the one that is known.
    """
    smooth = sigma**2 * len(values) ** 0.2 + 1e-300  # without noise nothing moves
    pushed = [
        (gaps / (gaps.square() + smooth)).sum(1)
        for gaps in (some[:, None] - values for some in torch.split(values, 1024))
    ]
    expected = (values - 2 * sigma**2 * torch.cat(pushed)).clamp_min(0)
    return expected * (trace / expected.sum().clamp_min(1e-12))


def accounted(encoding: IntegerRows, sigma: float, honest: int = 1) -> float:
    """The noise multiplier of a sum with noise of this size, which comes in the shares of so many honest clients."""
    share = sigma / math.sqrt(honest)
    excess = sums_excess(min(encoding.sizes(share).values()), honest) * math.sqrt(encoding.layout.size)
    return 1 / (SENSITIVITY / sigma + excess)


def gamma_for(sigma: float, width: int) -> float:
    """Three eighths of the spectral norm of the noise of Phi'Phi, 2 sigma sqrt d."""
    return 0.75 * sigma * math.sqrt(width)


def moments(stats: Statistics, sigma: float) -> Spread:
    """Mean and covariance behind the noisy sums of rows of length one, as those of one row; labels are all alike."""
    n = stats.n_samples
    mean = stats.crosscorrelation[:, 0] / n
    mean = mean / torch.linalg.vector_norm(mean).clamp_min(1)
    values, vectors = torch.linalg.eigh(stats.autocorrelation / n - torch.outer(mean, mean))
    values = _expected(values, sigma / n, 1 - float(mean.square().sum()))
    return Spread(1, mean, (vectors * values) @ vectors.T + torch.outer(mean, mean))
