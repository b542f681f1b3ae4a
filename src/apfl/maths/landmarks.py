"""The landmark map: Nystrom features of the arc-cosine kernel, with landmarks that nobody owns.

    u      = z / |z|                                   of a normalised row
    k(u,v) = (sin t + (pi - t) cos t) / pi             t the angle between u and v (Cho and Saul, 2009); k(u, u) = 1
    V      = v_1 .. v_d                                landmarks
    phi(z) = L^-1 k(V, z),   K_VV + jitter I = L L'    so |phi(z)| <= 1 for every row

phi(z)'phi(z') is the best approximation of k(z, z') from the values at the landmarks. These are drawn from a normal
distribution with the mean and the covariance of all clients' normalised rows, which are sums, and are rounded to 4 bits
a number, or to 8 in few columns (`landmark_bits`): they are drawn once and travel as they are, because no two machines
agree on the last digit of a factorisation.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.bits import Layout, Part
from apfl.maths.maps import normals
from apfl.maths.ridge import squared
from apfl.maths.triangular import Lower
from apfl.maths.turning import Turning, turning

__all__ = [
    "JITTER",
    "ROWS_FOR_EACH_COLUMN",
    "SYNTHETIC",
    "LandmarkMap",
    "Spread",
    "draw_points",
    "independent",
    "kernel",
    "landmark_bits",
    "landmark_map",
    "no_spread",
    "rounded_landmarks",
    "spread",
]

JITTER = 1e-6  # of k(v, v) = 1; L^-1 then amplifies rounding a thousandfold at most
_ROWS = 8192  # whose products are added in their own precision
_ENTRIES = 2**16  # of the kernel at a time, so that they stay in the cache
_BLOCK = 512  # landmarks at a time
FEW_COLUMNS = 32  # below, 4 bits leave too few places for landmarks to differ, and 8 weigh little
SYNTHETIC = 1024  # points that tell the mean square of each column of phi
ROWS_FOR_EACH_COLUMN = 4  # a covariance of fewer rows is mostly noise: its diagonal serves better


def kernel(rows: Tensor, landmarks: Tensor) -> Tensor:
    """The arc-cosine kernel of degree one of rows of length one, (n, d); zero for a row of zeros."""
    values = rows @ landmarks.T
    step = max(1, _ENTRIES // len(landmarks)) if values.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), step):
        _arc_cosine(values[start : start + step])
    return values.masked_fill_(~(rows != 0).any(1, keepdim=True), 0.0)


def _lower_kernel(landmarks: Tensor) -> Tensor:
    """K_VV up to its diagonal, which is all that a Cholesky factorisation reads; zero, or anything, above."""
    made = torch.zeros(len(landmarks), len(landmarks)).to(landmarks)
    for start in range(0, len(landmarks), _BLOCK):
        rows = slice(start, start + _BLOCK)
        made[rows, : rows.stop] = kernel(landmarks[rows], landmarks[: rows.stop])
    return made


def _arc_cosine(cosine: Tensor) -> None:
    """The kernel from the cosine, in its place."""
    cosine.clamp_(-1, 1)
    angle = torch.arccos(cosine)
    # (1 - c)(1 + c) keeps the digits of sin t that 1 - c^2 loses at small angles.
    sine = (1 - cosine).mul_(1 + cosine).sqrt_()
    cosine.mul_(angle.neg_().add_(math.pi)).add_(sine).div_(math.pi)


def landmark_bits(n_in: int) -> int:
    """Of one number of a landmark with so many columns."""
    return 8 if n_in < FEW_COLUMNS else 4


def _unit(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length == 0, 1, length)


@dataclass(frozen=True, eq=False)
class LandmarkMap:
    """Z (n, n_in) -> phi (n, d). Make one with `landmark_map`.

    Rows in single precision are mapped in single precision. L^-1 amplifies its rounding, up to a thousandfold, exactly
    as it amplifies that of the rows themselves; on CIFAR-100 features phi then has an error of 2e-5 of its length
    (d = 1024), 4e-5 (3072). Rows in double precision are mapped in double precision, and theorems hold to its digits.
    """

    points: Tensor  # (d, n_in), int8: the landmarks over `scale`, of `landmark_bits`
    scale: Tensor  # (n_in,), float32: of each column

    @property
    def n_in(self) -> int:
        return self.points.shape[1]

    @property
    def width(self) -> int:
        """d."""
        return len(self.points)

    def __call__(self, features: Tensor) -> Tensor:
        """phi of each row. A row longer than 1, by rounding alone, is brought back to 1; zeros stay zeros."""
        phi = self._lower.undo(self.kernel(features))
        length: Tensor = torch.linalg.vector_norm(phi, dim=1, keepdim=True)
        return phi.div_(length.clamp_min(1)) if bool((length > 1).any()) else phi

    def kernel(self, features: Tensor) -> Tensor:
        """k(z, V) of each row, (n, d)."""
        if features.ndim != 2 or features.shape[1] != self.n_in:
            raise InputError(
                f"features of shape {tuple(features.shape)} given; this model was made for (n, {self.n_in})"
            )
        single = features.dtype == torch.float32
        return kernel(_unit(features), self._in_single) if single else kernel(_unit(features.double()), self.landmarks)

    @cached_property
    def landmarks(self) -> Tensor:
        """V (d, n_in), float64, rows of length one."""
        return _unit(self.points.to(torch.float64) * self.scale.to(torch.float64))

    @cached_property
    def _in_single(self) -> Tensor:
        return self.landmarks.float()

    @cached_property
    def _lower(self) -> Lower:
        return Lower(self._factor)

    @cached_property
    def _factor(self) -> Tensor:
        """L (d, d)."""
        factor, failed = self._factorised
        assert not failed, "the landmarks of `landmark_map` do not determine each other"
        return factor

    @cached_property
    def _factorised(self) -> tuple[Tensor, bool]:
        system = _lower_kernel(self.landmarks)
        system.diagonal().add_(JITTER)
        factor, failed = torch.linalg.cholesky_ex(system)
        return factor, bool(failed)

    @cached_property
    def basis(self) -> Turning:
        """R: the coordinates in which statistics travel (`apfl.maths.turning`)."""
        return turning(self._factor)

    def fold(self, weights: Tensor) -> Tensor:
        """A = L'^-1 W: phi(z)'W = k(z, V) A, one product less for every row."""
        folded: Tensor = torch.linalg.solve_triangular(self._factor.T, weights, upper=True)
        return folded.contiguous()  # as it comes back from disk: the memory order decides the last bit of a product

    def unfold(self, folded: Tensor) -> Tensor:
        """W = L'A, back from `fold`."""
        return self._factor.T @ folded

    def packed(self) -> Tensor:
        """The points without gaps, uint8: as they travel and stand in files, the same for all models on this map."""
        return self._packed

    @cached_property
    def _packed(self) -> Tensor:
        points = self.points.cpu().reshape(-1).numpy().astype(np.int64)
        return torch.from_numpy(_layout(*self.points.shape).pack(points).copy())

    @staticmethod
    def unpacked(packed: Tensor, scale: Tensor, d: int) -> LandmarkMap:
        """The map of d landmarks back from `packed` and its scale."""
        points = _layout(d, len(scale)).unpack(packed.numpy()).astype(np.int8)
        return LandmarkMap(torch.from_numpy(points).reshape(d, len(scale)), scale)

    def like(self, features: Tensor) -> LandmarkMap:
        """The same map on the device of ``features``."""
        if self.points.device == features.device:
            return self
        return replace(self, points=self.points.to(features.device), scale=self.scale.to(features.device))

    def subset(self, kept: Tensor) -> LandmarkMap:
        """The map of the landmarks at these places, in their order."""
        return self if len(kept) == self.width else replace(self, points=self.points[kept])

    def mean_squares(self, points: Tensor) -> Tensor:
        """D (d,), the mean square of each column of R^-1 phi over synthetic points: the unit of what travels."""
        return self.basis.turn(self(points)).double().square().mean(0).clamp_min(JITTER**2)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides what the map computes."""
        digest = hashlib.sha256(f"landmarks {tuple(self.points.shape)} {JITTER}".encode())
        digest.update(self.points.cpu().contiguous().numpy().tobytes())
        digest.update(self.scale.cpu().contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()


def _layout(d: int, n_in: int) -> Layout:
    return Layout((Part("landmarks", d * n_in, landmark_bits(n_in)),))


@dataclass(frozen=True, eq=False)
class Spread:
    """First and second moments of normalised rows; additive over clients. Landmarks are drawn from their sum."""

    n_samples: int
    sums: Tensor  # (l,), float64
    products: Tensor  # (l, l), or (l,) for the squares alone; float64

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.n_samples + other.n_samples, self.sums + other.sums, self.products + other.products)


def spread(rows: Tensor, *, full: bool, weights: Tensor | None = None) -> Spread:
    """The moments of one client's normalised rows (n, l).

    ``weights`` (n,) weigh sums and products. Their mean over all clients' rows must be one.
    """
    if weights is not None:
        return _weighted_spread(rows.double(), weights.double()[:, None], full=full)
    sums, squares = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    products = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device) if full else squares
    for part in torch.split(rows, _ROWS):  # products in the rows' precision, added in double
        sums += part.sum(0, dtype=torch.float64)
        products += squared(part) if full else part.double().square().sum(0)
    return Spread(len(rows), sums, products)


def _weighted_spread(rows: Tensor, weights: Tensor, *, full: bool) -> Spread:
    products = (weights * rows).T @ rows if full else (weights * rows.square()).sum(0)
    return Spread(len(rows), (weights * rows).sum(0), products)


def no_spread(n_in: int) -> Spread:
    """Mean 0 and variance 1, for landmarks that are free of anybody's rows."""
    return Spread(1, torch.zeros(n_in, dtype=torch.float64), torch.ones(n_in, dtype=torch.float64))


def draw_points(n: int, seed: int, shared: Spread) -> Tensor:
    """n points from N(mu, Sigma) of the federation's normalised rows, (n, l), float64; nobody's rows.

    l at a time they are orthogonal before they get mean and covariance, as in orthogonal random features (Yu et al.,
    2016): each is distributed as if drawn alone, and together they leave no direction out. Fewer bits then tell the
    statistics (docs/results/landmarks.md).
    """
    mean, second = (each / shared.n_samples for each in (shared.sums, shared.products))
    normal = _orthogonal(normals(seed, n, len(mean), device=mean.device))
    if second.ndim == 1:
        return mean + normal * (second - mean.square()).clamp_min(0).sqrt()
    return torch.addmm(mean, normal, _root(second - torch.outer(mean, mean)).T)


def _orthogonal(normal: Tensor) -> Tensor:
    """The same rows (n, l), turned so that each l of them are orthogonal, at the lengths they have."""
    n, n_in = normal.shape
    whole = n // n_in * n_in
    blocks = [normal[:whole].view(-1, n_in, n_in), normal[None, whole:]]
    made = torch.cat([_directions(each).flatten(0, 1) for each in blocks if each.numel()])
    return made.mul_(torch.linalg.vector_norm(normal, dim=1, keepdim=True))


def _directions(rows: Tensor) -> Tensor:
    """Orthonormal rows (b, m, l) by Gram and Schmidt: with X X' = L L' they are L^-1 X."""
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.mT)
    assert not bool(failed.any()), "normal rows depend on each other with probability zero"
    made: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False)
    return made


def _root(covariance: Tensor) -> Tensor:
    """S with S S' = the covariance, but for a billionth of the mean variance: columns may depend on each other."""
    shifted = covariance.clone()
    shifted.diagonal().add_(1e-9 * float(covariance.diagonal().mean()))
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(shifted)
    if int(failed):  # rounding of sums made it indefinite
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt()
    return root


def landmark_map(points: Tensor) -> LandmarkMap:
    """A map with these landmarks (d, l), rounded; those that the others nearly determine are left out.

    >>> rows = draw_points(64, 0, spread(torch.eye(3).repeat(5, 1), full=True))
    >>> float(landmark_map(rows)(torch.randn(10, 3)).norm(dim=1).max()) <= 1
    True
    """
    made = rounded_landmarks(points)
    return made.subset(independent(made))


def rounded_landmarks(points: Tensor) -> LandmarkMap:
    """These landmarks (d, l), rounded, all of them: the same to the last bit on every machine."""
    points = points.to(torch.float64)
    most = 2 ** (landmark_bits(points.shape[1]) - 1) - 1
    scale = (points.abs().amax(0) / most).float()
    scale = torch.where(scale == 0, 1, scale)
    return LandmarkMap((points / scale.double()).round().clamp(-most, most).to(torch.int8), scale)


def independent(made: LandmarkMap) -> Tensor:
    """The places of landmarks that stand clear of the span of the others, by a pivoted Cholesky factorisation."""
    landmarks, (factor, failed) = made.landmarks, made._factorised
    if not failed and float(factor.diagonal().square().min()) > 2 * JITTER:  # one of them is there in any case
        return torch.arange(len(landmarks), device=landmarks.device)
    system = _lower_kernel(landmarks)
    _, pivots, rank, _ = dpstrf(np.asfortranarray(system.cpu().numpy()), tol=JITTER, lower=1)
    return torch.from_numpy(np.sort(pivots[:rank] - 1)).long().to(landmarks.device)
