"""What is to be predicted: a class, numbers, or several labels at once.

Numbers and labels are columns of Y (n, c); the names of the columns stand where class names stand otherwise. What needs
a label for each row (a partition by labels) gets a code: of numbers, in which tenth of all rows the first one is; of
several labels, the rarest that the row has, or one more code if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from apfl.data.missing import refuse_missing
from apfl.errors import InputError, unknown

__all__ = ["TARGETS", "Scale", "Target", "Targets", "about_targets", "alike", "codes_of", "read_targets"]

Target = Literal["classification", "regression", "multilabel"]
TARGETS: tuple[Target, ...] = ("classification", "regression", "multilabel")
BINS = 10
CONSTANT = 1e-12  # of a mean: a standard deviation that is rounding


@dataclass(frozen=True, eq=False)
class Targets:
    """Columns of Y with their names."""

    kind: Target
    values: Tensor  # (n, c), float64
    names: tuple[str, ...]

    @property
    def codes(self) -> Tensor:
        """One label for each row, (n,), for what needs labels."""
        return torch.from_numpy(codes_of(self.kind, self.values.numpy()))


@dataclass(frozen=True, eq=False)
class Scale:
    """Numbers are trained on as (y - mean) / std, over the training rows of all clients."""

    mean: Tensor  # (c,), float64
    std: Tensor  # (c,), float64; 1 for a constant

    @staticmethod
    def of(values: Tensor, weights: Tensor | None = None) -> Scale:
        """That of some rows (n, c), which may have weights (n,).

        >>> Scale.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]])).std.tolist()
        [1.0, 1.0]
        >>> Scale.of(torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, 1.0])).mean.tolist()
        [2.0]
        """
        rows = values.double()
        if weights is not None:
            parts = weights.double() / weights.double().sum()
            mean = parts @ rows
            std = (parts @ (rows - mean).square()).sqrt()
            return Scale(mean, torch.where(std > CONSTANT * mean.abs(), std, torch.ones_like(std)))
        std = rows.std(0, correction=0)
        return Scale(rows.mean(0), torch.where(std > 0, std, torch.ones_like(std)))

    @staticmethod
    def of_sums(n: int, sums: Tensor, squares: Tensor) -> Scale:
        """That of n rows with these sums and sums of squares (c,). A spread that is lost to rounding is none.

        >>> Scale.of_sums(2, torch.tensor([4.0, 10.0]), torch.tensor([10.0, 50.0])).std.tolist()
        [1.0, 1.0]
        """
        mean = sums.double() / n
        variance = squares.double() / n - mean.square()
        constant = variance <= 1e-12 * mean.square()
        return Scale(mean, torch.where(constant, 1.0, variance.clamp_min(0).sqrt()))

    def apply(self, values: Tensor) -> Tensor:
        """Values in standard deviations from the mean."""
        return (values - self.mean.to(values.device)) / self.std.to(values.device)

    def undo(self, values: Tensor) -> Tensor:
        """Values in their own units again."""
        return values.double() * self.std.to(values.device) + self.mean.to(values.device)


def read_targets(
    what: str, values: np.ndarray, asked: str | None = None, names: Sequence[str] | None = None
) -> Targets | None:
    """Y of the columns ``values``, (n,) or (n, c), or None if they are classes. ``asked`` says which; None: see them.

    Several columns are labels if they hold 0 and 1 alone, numbers otherwise. One column is classes unless it has a
    number that is no whole one.

    >>> read_targets("y", np.array([0.5, 1.0])).kind, read_targets("y", np.array([[0, 1], [1, 1]])).kind
    ('regression', 'multilabel')
    >>> read_targets("y", np.array([0.0, 1.0])) is None
    True
    """
    if asked is not None and asked not in TARGETS:
        raise unknown("target", asked, TARGETS)
    columns = values.reshape(len(values), -1) if values.ndim < 3 else values
    kind = asked or _seen(columns)
    if kind == "classification":
        if columns.ndim != 2 or columns.shape[1] != 1:
            raise InputError(f"{what}: {columns.shape[1]} label columns given; a class needs one column")
        return None
    numbers = _numbers(what, columns, kind)
    called = tuple(map(str, names)) if names is not None else _default_names(kind, columns.shape[1])
    if len(called) != columns.shape[1]:
        raise InputError(f"{what}: {columns.shape[1]} columns and {len(called)} names given; name each column once")
    return Targets(kind, torch.from_numpy(numbers), called)  # type: ignore[arg-type]


def _default_names(kind: str, n: int) -> tuple[str, ...]:
    noun = "label" if kind == "multilabel" else "target"
    return (noun,) if n == 1 else tuple(f"{noun} {i}" for i in range(n))


def _seen(columns: np.ndarray) -> str:
    numeric = columns.dtype.kind in "fiub"
    if columns.ndim == 2 and columns.shape[1] > 1:
        return "multilabel" if numeric and bool(np.isin(columns, (0, 1)).all()) else "regression"
    if columns.dtype.kind != "f":
        return "classification"
    finite = columns[np.isfinite(columns)]
    return "classification" if bool((finite == np.round(finite)).all()) else "regression"


def _numbers(what: str, columns: np.ndarray, kind: str) -> np.ndarray:
    if columns.ndim != 2 or columns.dtype.kind not in "fiub" or 0 in columns.shape:
        raise InputError(
            f"{what}: targets are {columns.dtype} of shape {columns.shape}; for {kind} give numbers of shape (n,) or "
            "(n, c), or name columns of numbers with --label-column A,B"
        )
    refuse_missing(f"targets of {what}", columns)
    values = columns.astype(np.float64)
    if not np.isfinite(values).all():
        raise InputError(f"{what}: targets contain infinity; remove or repair these rows")
    if kind == "multilabel" and not np.isin(values, (0, 1)).all():
        wrong = values[~np.isin(values, (0, 1))][0]
        raise InputError(f"{what}: a label column holds {wrong:g}; for multilabel give 0 or 1 in every row")
    return values


def codes_of(kind: str, values: np.ndarray) -> np.ndarray:
    """A label for each row of Y, (n,), int64: tenths of the first number, or the rarest label of the row.

    >>> codes_of("multilabel", np.array([[1, 0], [1, 1], [0, 0]])).tolist()
    [0, 1, 2]
    """
    if kind == "regression":
        edges = np.quantile(values[:, 0], np.arange(1, BINS) / BINS)
        return np.asarray(np.searchsorted(np.unique(edges), values[:, 0], side="right"), dtype=np.int64)
    counts = values.sum(0)
    rank = np.where(values > 0, counts, np.inf)
    return np.asarray(np.where(values.any(1), rank.argmin(1), values.shape[1]), dtype=np.int64)


def alike(values: Tensor) -> Tensor:
    """Equal codes for equal rows of Y, (n,)."""
    _, codes = np.unique(values.cpu().numpy(), axis=0, return_inverse=True)
    return torch.from_numpy(codes.reshape(-1).astype(np.int64)).to(values.device)


def about_targets(kind: Target, scale: Scale | None) -> dict[str, Any]:
    """What a model file says of its targets: nothing for classes."""
    if kind == "classification":
        return {}
    told: dict[str, Any] = {"target": kind}
    if scale is not None:
        told |= {"target_mean": scale.mean.tolist(), "target_std": scale.std.tolist()}
    return told
