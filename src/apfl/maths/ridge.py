"""Ridge regression from additive statistics.

    statistics   S = Phi'Phi,  B = Phi'Y          per client, or per batch of rows; they add
    solve        G = (S + gamma I)^-1 B           = argmin |Y - Phi G|^2 + gamma |G|^2

Solving on the sum of the clients' statistics is solving on the union of their rows (the paper's Theorem 1), so
the server needs no recursion: it adds, and factorises once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.blas import dsyrk
from torch import Tensor

from apfl.errors import InputError, not_finite

__all__ = [
    "Statistics",
    "accumulate",
    "factorise",
    "gram",
    "one_hot",
    "solve",
    "squared",
    "statistics",
    "total",
    "weighted_statistics",
]


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a ridge regression needs to know about a set of rows, and all that a client sends.

    Additive: ``a + b`` describes the union of two sets of rows, ``a - b`` what is left after ``b`` has gone.

    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    >>> y = one_hot(torch.tensor([0, 1, 1]), 2)
    >>> both = statistics(rows[:1], y[:1]) + statistics(rows[1:], y[1:])
    >>> torch.equal(both.autocorrelation, statistics(rows, y).autocorrelation)
    True
    >>> (both - statistics(rows[:1], y[:1])).n_samples
    2
    """

    autocorrelation: Tensor  # Phi'Phi (d, d), float64
    crosscorrelation: Tensor  # Phi'Y (d, c), float64
    class_counts: Tensor  # (c,), float64: column sums of Y
    n_samples: int
    target_energy: float  # tr(Y'Y); equals n_samples for one-hot targets
    n_copies: int = 0  # rows that repeat another row of the same client: they add no degrees of freedom
    echo: Tensor | None = None  # what shows rows that repeat those of another client (`leaveout.echo`)
    surplus: float = 0.0  # weight of the rows beyond one for each: of a row of weight 2 it is 1

    def __post_init__(self) -> None:
        d, c = self.crosscorrelation.shape
        if self.autocorrelation.shape != (d, d) or self.class_counts.shape != (c,):
            raise InputError(
                f"statistics do not fit together: autocorrelation {tuple(self.autocorrelation.shape)}, "
                f"crosscorrelation {(d, c)}, class_counts {tuple(self.class_counts.shape)}; "
                "expected (d, d), (d, c), (c,)"
            )
        n, counted = self.weight, float(self.class_counts.sum())
        # Each row of one-hot (or smoothed) targets sums to one, so counts and rows, as they weigh, are the same number.
        if (
            self.n_samples < 0
            or n < -1e-6
            or float(self.class_counts.min()) < -1e-6
            or not abs(counted - n) <= 1e-6 * max(n, 1)
        ):
            raise InputError(
                f"statistics contradict themselves: {n:g} samples, but class counts that sum to {counted:g} "
                f"(smallest {float(self.class_counts.min()):g}); was something subtracted that had not been added?"
            )
        if not 0 <= self.n_copies <= self.n_samples:
            raise InputError(f"statistics contradict themselves: {self.n_copies} copies among {self.n_samples} samples")
        if not -1e-6 * max(n, 1) <= self.target_energy <= n * (1 + 1e-6) + 1e-6 * (self.surplus != 0):
            raise InputError(
                f"statistics contradict themselves: target energy {self.target_energy:g} for {n:g} samples"
            )

    def __repr__(self) -> str:
        return f"Statistics({self.n_samples} rows, width {self.width}, {self.n_classes} classes)"

    @property
    def weight(self) -> float:
        """The number of rows, each as it weighs."""
        return self.n_samples + self.surplus

    @property
    def width(self) -> int:
        """d, the number of columns of Phi."""
        return self.crosscorrelation.shape[0]

    @property
    def n_classes(self) -> int:
        """c, the number of columns of Y."""
        return self.crosscorrelation.shape[1]

    def __add__(self, other: Statistics) -> Statistics:
        return self._combine(other, +1)

    def __sub__(self, other: Statistics) -> Statistics:
        return self._combine(other, -1)

    def _combine(self, other: Statistics, sign: int) -> Statistics:
        _check_same_size(self, other)
        return type(self)(
            torch.add(self.autocorrelation, other.autocorrelation, alpha=sign),
            torch.add(self.crosscorrelation, other.crosscorrelation, alpha=sign),
            torch.add(self.class_counts, other.class_counts, alpha=sign),
            self.n_samples + sign * other.n_samples,
            self.target_energy + sign * other.target_energy,
            self.n_copies + sign * other.n_copies,
            None if self.echo is None or other.echo is None else self.echo + sign * other.echo,
            self.surplus + sign * other.surplus,
        )


def one_hot(labels: Tensor, n_classes: int) -> Tensor:
    """Labels (n,) as indicator targets Y (n, c) in float64.

    >>> one_hot(torch.tensor([2, 0]), 3).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    low, high = torch.stack(torch.aminmax(labels)).tolist() if labels.numel() else (0, 0)
    if labels.numel() and not 0 <= low <= high < n_classes:
        raise InputError(
            f"labels from {low} to {high} given, but there are {n_classes} classes: allowed are 0 to {n_classes - 1}"
        )
    return torch.nn.functional.one_hot(labels.long(), n_classes).to(torch.float64)


def statistics(phi: Tensor, targets: Tensor) -> Statistics:
    """Statistics of one batch of rows: phi (n, d), targets (n, c) with rows that sum to one.

    Computed in float64 whatever the dtype of ``phi``.

    >>> statistics(torch.ones(3, 2), one_hot(torch.tensor([0, 1, 1]), 2)).class_counts
    tensor([1., 2.], dtype=torch.float64)
    """
    return accumulate([(phi, targets)])


def weighted_statistics(phi: Tensor, targets: Tensor, weights: Tensor) -> Statistics:
    """Statistics of rows with weights (n,), above 0: Phi'WPhi, Phi'WY, W1'Y; those of weight 2 as if given twice.

    >>> phi, y = torch.tensor([[1.0], [2.0]]), one_hot(torch.tensor([0, 1]), 2)
    >>> weighted_statistics(phi, y, torch.tensor([1.0, 2.0])).autocorrelation.tolist()  # 1 + 2 * 4
    [[9.0]]
    """
    _check_rows(phi, targets)
    if weights.shape != phi.shape[:1] or not bool(((weights > 0) & torch.isfinite(weights)).all()):
        raise InputError(f"weights of shape {tuple(weights.shape)} for {len(phi)} rows; give each row one above 0")
    weights, targets = weights.to(phi.device, torch.float64), targets.to(torch.float64)
    rows = phi.to(torch.float64)
    scaled = weights[:, None] * targets
    gram = rows.T @ (weights[:, None] * rows)
    if not bool(torch.isfinite(gram.diagonal()).all()):
        raise not_finite("the features")
    energy, surplus = float((scaled * targets).sum()), float(weights.sum()) - len(rows)
    return Statistics((gram + gram.T) / 2, rows.T @ scaled, scaled.sum(0), len(rows), energy, surplus=surplus)


def accumulate(batches: Iterable[tuple[Tensor, Tensor]], kind: type[Statistics] | None = None) -> Statistics:
    """Statistics of a stream of batches ``(phi, targets)``, added in place: memory does not grow with the rows.

    ``kind`` is another class of statistics, for targets whose rows do not sum to one.
    """
    sums: Statistics | None = None
    n_samples, energy = 0, 0.0
    for phi, targets in batches:
        _check_rows(phi, targets)
        if sums is None:
            sums = _empty(phi.shape[1], targets.shape[1], phi.device)
        elif (phi.shape[1], targets.shape[1]) != (sums.width, sums.n_classes):
            raise InputError(
                f"a batch of width {phi.shape[1]} with {targets.shape[1]} classes follows one of "
                f"width {sums.width} with {sums.n_classes}; all must agree"
            )
        step = len(phi) if phi.dtype == torch.float64 else _ROWS
        for start in range(0, len(phi), step):
            block = slice(start, start + step)
            energy += _add_products(sums, phi[block].to(torch.float64), targets[block].to(torch.float64))
        n_samples += len(phi)
    if sums is None:
        raise InputError("no rows: statistics need at least one batch")
    _mirror(sums.autocorrelation)
    made = kind or Statistics
    result = made(sums.autocorrelation, sums.crosscorrelation, sums.class_counts, n_samples, energy)
    # A NaN or an infinity anywhere in phi reaches its column's sum of squares, so d numbers tell.
    if not bool(torch.isfinite(result.autocorrelation.diagonal()).all()):
        raise not_finite("the features")
    return result


def total(parts: Iterable[Statistics]) -> Statistics:
    """The sum of many statistics, added in place into one copy: memory does not grow with their number."""
    iterator = iter(parts)
    first = next(iterator, None)
    if first is None:
        raise InputError("no statistics to add: at least one client is needed")
    matrix, cross = first.autocorrelation.clone(), first.crosscorrelation.clone()
    counts, n_samples, energy = first.class_counts.clone(), first.n_samples, first.target_energy
    n_copies, echo, surplus = first.n_copies, first.echo, first.surplus
    for part in iterator:
        _check_same_size(first, part)
        matrix += part.autocorrelation
        cross += part.crosscorrelation
        counts += part.class_counts
        n_samples += part.n_samples
        energy += part.target_energy
        n_copies += part.n_copies
        surplus += part.surplus
        echo = None if echo is None or part.echo is None else echo + part.echo
    return type(first)(matrix, cross, counts, n_samples, energy, n_copies, echo, surplus)


def factorise(stats: Statistics, ridge: float) -> Tensor:
    """The lower Cholesky factor L of Phi'Phi + ridge I (d, d): factor once, solve many."""
    if not ridge >= 0:
        raise InputError(f"ridge {ridge} given; it must be 0 or more")
    system = stats.autocorrelation.clone()
    system.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(system)
    # LAPACK may run through a NaN without noticing, so the factor's diagonal is looked at as well.
    if int(failed) or not bool(torch.isfinite(factor.diagonal()).all()):
        if not bool(torch.isfinite(stats.autocorrelation).all()):
            raise InputError("the statistics contain NaN or infinity; find the client that sent them and leave it out")
        raise InputError(
            f"Phi'Phi + {ridge:g} I is not positive definite (width {stats.width}, {stats.n_samples} samples, "
            f"largest diagonal {float(stats.autocorrelation.diagonal().max()):g}): use a larger ridge, "
            "or scale the features down"
        )
    return cast(Tensor, factor)


def solve(stats: Statistics, ridge: float) -> Tensor:
    """G = (Phi'Phi + ridge I)^-1 Phi'Y, (d, c), by Cholesky.

    >>> rows = torch.eye(2, dtype=torch.float64)
    >>> solve(statistics(rows, rows), ridge=3.0).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    if not bool(torch.isfinite(stats.crosscorrelation).all()):
        raise InputError("the statistics contain NaN or infinity; find the client that sent them and leave it out")
    # Row-major, as it comes back from disk: the memory order decides the last bit of a product.
    return torch.cholesky_solve(stats.crosscorrelation, factorise(stats, ridge)).contiguous()  # (d, c)


def gram(rows: Tensor) -> Tensor:
    """rows' rows (d, d), or rows rows' (n, n) where that is smaller: computed in the rows' precision, float64."""
    n, d = rows.shape
    return squared(rows.T if n < d else rows).double()


def squared(rows: Tensor) -> Tensor:
    """rows' rows (d, d) of rows (n, d), in their precision.

    numpy sees that the product is symmetric and computes half of it. scipy's wrapper would hold up other threads.
    """
    if rows.device.type != "cpu":
        return rows.T @ rows
    x = rows.numpy()
    return torch.from_numpy(_product(x.T, x))


def _product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):  # what is not finite is refused later, in words
        product: NDArray[Any] = a @ b
    return product


def _empty(width: int, n_classes: int, device: torch.device) -> Statistics:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.float64, device=device)

    return Statistics(zeros(width, width), zeros(width, n_classes), zeros(n_classes), 0, 0.0)


_ROWS = 16384  # rows converted to float64 at a time
_WIDE = 2048  # above this width one worker adds, and a second d x d matrix is too much memory
_BLOCK = 1024  # columns per block of the triangle on CUDA


def _add_products(sums: Statistics, phi: Tensor, targets: Tensor) -> float:
    """Add the products of some rows in place, and return the energy of their targets.

    Only the lower triangle of Phi'Phi is computed: half the work of a full product.
    """
    gram, cross, counts = sums.autocorrelation, sums.crosscorrelation, sums.class_counts
    if gram.device.type == "cpu":
        # The small sums are numpy's too: torch's threads, once woken, would spin while BLAS works.
        x, y = phi.numpy(), targets.contiguous().numpy()
        counts.numpy()[:] += y.sum(0)
        cross.numpy()[:] += _product(x.T, y)
        if len(gram) > _WIDE:
            # BLAS is column-major: it reads our rows as Phi', our lower triangle as its upper one. Nothing is copied.
            as_is = x.flags.f_contiguous
            dsyrk(1.0, x if as_is else x.T, trans=int(as_is), beta=1.0, c=gram.numpy().T, lower=0, overwrite_c=1)
        else:  # scipy's wrapper would hold up other threads; numpy's product of a matrix with itself is half a product
            gram.numpy()[:] += _product(x.T, x)
        return float(np.vdot(y, y))
    counts.add_(targets.sum(0))
    cross.addmm_(phi.T, targets)
    for start in range(0, gram.shape[0], _BLOCK):
        stop = start + _BLOCK
        gram[start:, start:stop].addmm_(phi[:, start:].T, phi[:, start:stop])
    return float(targets.square().sum())


def _mirror(lower: Tensor) -> None:
    """Copy the lower triangle onto the upper one, in blocks so that no second matrix is held."""
    d = lower.shape[0]
    for start in range(0, d, _BLOCK):
        stop = min(start + _BLOCK, d)
        corner = lower[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        lower[start:stop, stop:] = lower[stop:, start:stop].T


def _check_rows(phi: Tensor, targets: Tensor) -> None:
    if phi.ndim != 2 or targets.ndim != 2 or len(phi) != len(targets) or not len(phi):
        raise InputError(
            f"features {tuple(phi.shape)} and targets {tuple(targets.shape)} given; "
            "expected (n, d) and (n, c) with the same n, at least 1"
        )


def _check_same_size(a: Statistics, b: Statistics) -> None:
    if a.crosscorrelation.shape != b.crosscorrelation.shape:
        raise InputError(
            f"statistics of width {a.width} with {a.n_classes} classes and of width {b.width} with "
            f"{b.n_classes} cannot be combined: every client must use the same feature map and class list"
        )
