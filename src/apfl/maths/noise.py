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
    "of_length_one",
    "positive",
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


def positive(stats: Statistics) -> Statistics:
    """The statistics with the negative eigenvalues of Phi'Phi, which noise alone made, cut to zero."""
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    if float(values.min()) >= 0:
        return stats
    factor = vectors * values.clamp_min(0).sqrt()
    return replace(stats, autocorrelation=factor @ factor.T)


def of_length_one(stats: Statistics) -> Statistics:
    """The statistics in a unit in which rows have the mean squared length 1, as the map gives them without noise."""
    size = float(stats.autocorrelation.diagonal().sum()) / stats.n_samples
    return replace(stats, autocorrelation=stats.autocorrelation / size) if size > 0 else stats


def accounted(encoding: IntegerRows, sigma: float, honest: int = 1) -> float:
    """The noise multiplier of a sum with noise of this size, which comes in the shares of so many honest clients."""
    share = sigma / math.sqrt(honest)
    excess = sums_excess(min(encoding.sizes(share).values()), honest) * math.sqrt(encoding.layout.size)
    return 1 / (SENSITIVITY / sigma + excess)


def gamma_for(sigma: float, width: int) -> float:
    """A quarter of the spectral norm of the noise of Phi'Phi, 2 sigma sqrt d."""
    return sigma * math.sqrt(width) / 2


def moments(stats: Statistics, sigma: float) -> Spread:
    """Mean and covariance behind the noisy sums of rows of length one, as those of one row; labels are all alike.

    Noise of size s = sigma sqrt(l) / n in every direction moves an eigenvalue v of the covariance to v + s^2 / v, and
    all that are below s to 2 s at most (Baik, Ben Arous and Peche, 2005). So those above are moved back, and what is
    left of the trace, which is known because rows have length one, is spread evenly over the other directions.
    """
    n, width = stats.n_samples, stats.width
    mean = stats.crosscorrelation[:, 0] / n
    mean = mean / torch.linalg.vector_norm(mean).clamp_min(1)
    values, vectors = torch.linalg.eigh(stats.autocorrelation / n - torch.outer(mean, mean))
    noise, trace = sigma * math.sqrt(width) / n, 1 - float(mean.square().sum())
    clear = values > 2 * noise
    kept = torch.where(clear, (values + (values.square() - 4 * noise**2).clamp_min(0).sqrt()) / 2, 0)
    kept *= min(1.0, trace / max(float(kept.sum()), 1e-12))
    rest = max(0.0, trace - float(kept.sum())) / max(1, width - int(clear.sum()))
    covariance = (vectors * torch.where(clear, kept, rest)) @ vectors.T
    return Spread(1, mean, covariance + torch.outer(mean, mean))
