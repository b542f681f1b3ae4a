"""How backbone features are scaled before the random maps.

root         sign(z) sqrt|z|, then as row; needs nothing from anyone else. Evens out features of which a few are large,
             as pooled activations are: the power normalisation of retrieval and few-shot learning
row          z * sqrt(l) / |z|     needs nothing from anyone else
standardise  (z - mean) / std      needs the federation's moments, which add like statistics do
columns      standardised (by one std for all if there are many columns of like scales), a constant sqrt(l) appended,
             then as row: for tables, whose columns have units of their own and whose rows' lengths carry information
centred      rows of root, centred and over one std for all columns, a constant sqrt(l) appended, then as row
none         z
auto         one of the first three kinds, from the federation's moments alone (default of `apfl`): see `resolve`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError, not_finite, unknown

__all__ = [
    "Moments",
    "Normalise",
    "Normaliser",
    "check_features",
    "described",
    "moments",
    "needs_moments",
    "normaliser",
    "one_sided",
    "resolve",
]

Normalise = Literal["root", "row", "standardise", "columns", "centred", "none"]
WITH_CONSTANT = ("columns", "centred")  # a constant column is appended
_ROWS = 1024  # at a time, so that they stay in the cache
FEW_COLUMNS = 32  # a table: the direction of so short a row says too little without its length
UNLIKE_SCALES = 30.0  # largest over median standard deviation of columns; a network's pooled features have 4 to 6
FAR_FROM_ZERO = 10.0  # median over columns of |mean| / std; pooled activations have 0.5
LEAST_SIZE = torch.finfo(torch.float64).eps ** 0.5  # of a row beside another, so that a sum of squares shows it
ONE_SIDED = 0.2  # mean over columns of mean / rms: 0.45 for pooled activations, 0 for signed embeddings
# Variance over rows of the mean log |entry|: rows that differ in size by orders of magnitude, in all columns at once.
# Independent columns have at most 1.3 over their number; a row in other units than the next tells by its direction.
UNLIKE_SIZES = 1.0


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of feature columns, and of the sizes of rows; additive over clients."""

    n_samples: int
    sums: Tensor  # (l,), float64
    squares: Tensor  # (l,), float64
    sizes: Tensor  # (3,), float64: how many rows are not zero; sum and squares of their mean log |entry|
    of: str = "none"  # the normalisation of the rows that they are moments of

    def __add__(self, other: Moments) -> Moments:
        return self._combine(other, +1)

    def __sub__(self, other: Moments) -> Moments:
        return self._combine(other, -1)

    def _combine(self, other: Moments, sign: int) -> Moments:
        return Moments(
            self.n_samples + sign * other.n_samples, self.sums + sign * other.sums,
            self.squares + sign * other.squares, self.sizes + sign * other.sizes, self.of,
        )  # fmt: skip

    @property
    def mean(self) -> Tensor:
        """Of each column, (l,)."""
        return self.sums / self.n_samples

    @property
    def variance(self) -> Tensor:
        """Of each column, (l,)."""
        return (self.squares / self.n_samples - self.mean.square()).clamp_min(0)

    @property
    def variance_of_sizes(self) -> float:
        """Over rows, of their mean log |entry|."""
        n, total, squares = self.sizes.tolist()
        mean = total / (n or 1.0)
        return squares / n - mean * mean if n else 0.0  # not ** 2, which raises if it overflows: clients send these


def moments(features: Tensor, of: Normalise = "none", weights: Tensor | None = None) -> Moments:
    """The moments of one client's features (n, l), as they are or at ``row`` or ``root``, where all have one size.

    ``weights`` (n,) weigh sums and squares of columns. Their mean over all clients' rows must be one.
    """
    rows = Normaliser(of)(features)
    sizes = _sizes(rows) if of == "none" else torch.zeros(3, dtype=torch.float64, device=rows.device)
    parts = torch.split(rows, _ROWS)  # in double precision: a column far from zero has few digits beyond its mean
    if weights is None:
        sums = sum(part.sum(0, dtype=torch.float64) for part in parts)
        squares = sum(part.double().square().sum(0) for part in parts)
    else:
        pairs = list(zip(torch.split(weights.double(), _ROWS), parts, strict=True))
        sums = sum(own @ part.double() for own, part in pairs)
        squares = sum(own @ part.double().square() for own, part in pairs)
    zeros = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    return Moments(len(rows), zeros + sums, zeros + squares, sizes, of)


def described(how: str, features: Tensor) -> Moments:
    """The moments that the normalisation ``how`` is made from."""
    return moments(features, "root" if how == "centred" else "none")


def _sizes(rows: Tensor) -> Tensor:
    """How many rows are not zero, and the sum and the squares of their mean log |entry| over entries that are not."""
    entries = (rows != 0).sum(1)
    logs = torch.where(rows == 0, 1.0, rows).abs().log().sum(1, dtype=torch.float64)[entries > 0] / entries[entries > 0]
    return torch.stack([logs.new_tensor(float(len(logs))), logs.sum(), logs.square().sum()])


@dataclass(frozen=True, eq=False)
class Normaliser:
    """The scaling in force. With ``standardise`` its mean and std are fixed when first published.

    >>> z = normaliser("row")(torch.tensor([[3.0, 4.0]]))
    >>> round(z.square().sum().item(), 3)  # |z|^2 = l
    2.0
    """

    how: Normalise = "row"
    mean: Tensor | None = None  # (l,), float64, only with standardise, columns and centred
    std: Tensor | None = None  # (l,), float64, only with standardise, columns and centred

    def __call__(self, features: Tensor) -> Tensor:
        if self.how == "none":
            return features
        if self.how == "row":
            return _to_length(features)
        if self.how == "root":
            return _rooted(features)
        if self.mean is None or self.std is None:
            raise InputError(f"this normaliser has no mean and std: make it with normaliser('{self.how}', moments)")
        if features.shape[1:] != self.mean.shape:
            raise InputError(
                f"features of shape {tuple(features.shape)} given; this model was made for (n, {len(self.mean)})"
            )
        if self.how == "centred":
            features = _rooted(features)
        # In float64: a column far from zero has few digits left once its mean is gone, and a std may be below float32.
        mean, std = self.mean.to(features.device), self.std.to(features.device)
        scaled = ((features.to(torch.float64) - mean) / std).to(features)
        if self.how == "standardise":
            return scaled
        constant = scaled.new_full((len(scaled), 1), math.sqrt(scaled.shape[1]))
        return _to_length(torch.cat([scaled, constant], 1))

    def width(self, n_features: int) -> int:
        """How many columns come out of ``n_features``."""
        return n_features + (self.how in WITH_CONSTANT)


def _rooted(features: Tensor) -> Tensor:
    return _to_length(features.sign() * _root(features.abs()))


def _root(sizes: Tensor) -> Tensor:
    """Square roots; on a CPU numpy's: torch's are twelve times slower on some processors if many entries are zero."""
    if sizes.device.type != "cpu":
        return sizes.sqrt()
    return torch.from_numpy(np.sqrt(sizes.numpy()))


def _to_length(features: Tensor) -> Tensor:
    """Every row at length sqrt(l); a row of zeros stays a row of zeros, and NaN or infinity does not vanish."""
    length = math.sqrt(features.shape[1])
    norm: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    limits = torch.finfo(norm.dtype)
    scaled = features * (length / norm.clamp_min(limits.tiny))
    # Squares of very small entries lose their digits, and those of very large ones overflow.
    extreme = ~((norm >= math.sqrt(limits.tiny / limits.eps)) & norm.isfinite()).squeeze(1)
    if bool(extreme.any()):
        scaled[extreme] = _from_the_largest(features[extreme]) * length
    return scaled


def _from_the_largest(features: Tensor) -> Tensor:
    """Rows at length one, divided by their largest magnitude before anything is squared."""
    largest = features.abs().amax(1, keepdim=True)
    rows = features / torch.where(largest == 0, 1, largest)
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / norm.masked_fill(largest == 0, 1)


def needs_moments(how: str) -> bool:
    """Whether clients have to add up their moments first."""
    return how in ("auto", "standardise", *WITH_CONSTANT)


def resolve(how: str, shared: Moments | None) -> str:
    """The normalisation that ``auto`` stands for; any other as it is.

    ``columns`` for a table (few columns, columns of very different scales, or far from zero), unless whole rows differ
    in size by orders of magnitude, which leaves nothing of most rows beside the largest; ``root`` for features on one
    side of zero, as a network's pooled activations are, and ``row`` for signed ones.

    >>> resolve("auto", moments(torch.rand(50, 64))), resolve("auto", moments(torch.randn(50, 64)))
    ('root', 'row')
    >>> table, sizes = torch.rand(50, 4), torch.logspace(-3, 3, 50)[:, None]
    >>> resolve("auto", moments(table)), resolve("auto", moments((table - 0.5) * sizes))
    ('columns', 'row')
    """
    if how != "auto":
        return how
    if shared is None or shared.n_samples < 1:
        raise InputError("normalise='auto' needs the moments of at least one sample")
    mean, std, constant = _mean_and_std(shared)
    far = float((mean.abs() / std)[~constant].median()) if not bool(constant.all()) else 0.0
    table = _of_their_own(std[~constant], len(std)) or far > FAR_FROM_ZERO
    if table and shared.variance_of_sizes <= UNLIKE_SIZES:
        return "columns"
    return "root" if one_sided(shared) else "row"


def one_sided(shared: Moments) -> bool:
    """Whether the features stand on one side of zero, as a network's pooled activations do."""
    rms = (shared.squares / shared.n_samples).sqrt()
    return bool((rms > 0).any()) and float((shared.mean / rms)[rms > 0].mean()) > ONE_SIDED


def normaliser(how: str, shared: Moments | None = None) -> Normaliser:
    """The normaliser named ``how``; `needs_moments` says which take the summed moments of the federation."""
    if how not in (*get_args(Normalise), "auto"):
        raise unknown("normalisation", how, (*get_args(Normalise), "auto"))
    how = resolve(how, shared)
    if not needs_moments(how):
        return Normaliser(how)  # type: ignore[arg-type]
    if shared is None or shared.n_samples < 1:
        raise InputError(f"normalise='{how}' needs the moments of at least one sample")
    if (how == "centred") != (shared.of == "root"):
        raise InputError(f"normalise='{how}' with moments of rows at '{shared.of}' given; make them with `described`")
    mean, std, constant = _mean_and_std(shared)
    if how == "centred" or (how == "columns" and not _of_their_own(std[~constant], len(std))):
        std = std.square().mean().sqrt().expand(len(std))  # columns alike: how much one varies may be what matters
    return Normaliser(how, mean, torch.where(constant, 1.0, std))  # type: ignore[arg-type]


def _of_their_own(std: Tensor, n_features: int) -> bool:
    """Whether columns have scales of their own, as those of a table do."""
    return n_features < FEW_COLUMNS or (len(std) > 0 and float(std.max() / std.median()) > UNLIKE_SCALES)


def _mean_and_std(shared: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Of each column, and whether it is constant: then it is centred and left unscaled."""
    mean = shared.mean
    variance = shared.squares / shared.n_samples - mean.square()
    if not bool(torch.isfinite(variance).all()):
        raise not_finite("the moments of the features")
    constant = variance <= 1e-12 * mean.square() + torch.finfo(torch.float64).tiny  # below rounding of the subtraction
    return mean, variance.clamp_min(0).sqrt(), constant


def check_features(how: str, features: Sequence[Tensor]) -> None:
    """Refuse clients' features (n, l) with NaN or infinity and, if rows keep their lengths, a row that drowns the rest.

    >>> check_features("row", [torch.ones(3, 2), torch.tensor([[1.0, 1e9]])])
    >>> check_features("none", [torch.ones(3, 2), torch.tensor([[1.0, 1e9]])])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    apfl.errors.InputError: row 0 of client 1 (counted from 0) has entries of 1e+09, the median row of 1: ...
    """
    if len(features) > 1 and features[0].device.type != "cpu":  # a GPU is asked once, and for each client if need be
        try:
            return check_features(how, [torch.cat([*features])])
        except InputError:
            pass
    ends = [torch.stack(torch.aminmax(rows)) if rows.numel() else rows.new_zeros(2) for rows in features]
    whole = torch.isfinite(torch.stack(ends)).all(1).tolist() if ends else []
    for k, rows in enumerate(features):
        if not whole[k]:
            row = int((~torch.isfinite(rows).all(1)).nonzero()[0])
            raise not_finite(f"the features{_whose(k, features)} (first in row {row}, counted from 0)")
    if how == "none":
        _check_sizes([rows.abs().amax(1) for rows in features if rows.numel()])
    elif how in ("standardise", "columns") and not _surely_alike(features):
        # Medians: made for one large column, not for a row that is large in most.
        _check_sizes([rows.abs().median(1).values for rows in features if rows.numel()])


def _whose(k: int, clients: Sequence[Tensor]) -> str:
    return f" of client {k}" if len(clients) > 1 else ""


def _surely_alike(features: Sequence[Tensor]) -> bool:
    """Whether `_check_sizes` finds nothing in the rows' medians, without computing these.

    None exceeds the largest entry. If under a quarter of all entries is below a bound, under half of the rows have a
    median below it.
    """
    parts = [rows.abs() for rows in features if rows.numel()]
    most = max((float(part.max()) for part in parts), default=0.0)
    below = sum(int((part < most * LEAST_SIZE).sum()) for part in parts)
    return 4 * below < sum(part.numel() for part in parts)


def _check_sizes(sizes: Sequence[Tensor]) -> None:
    """Of the rows of each client: a sum of squares in float64 loses a row smaller than another by sqrt(eps)."""
    known = torch.cat([each[each > 0] for each in sizes])
    for k, each in enumerate(sizes):
        if len(known) and float(each.max()) * LEAST_SIZE > float(known.median()):
            raise InputError(
                f"row {int(each.argmax())}{_whose(k, sizes)} (counted from 0) has entries of {float(each.max()):g}, "
                f"the median row of {float(known.median()):g}: beside it the others are lost to rounding; remove or "
                "repair it, or use normalise='row'"
            )
