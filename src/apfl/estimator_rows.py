"""The rows that `APFLClassifier` was given, by client."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.streams import DualStream
from apfl.undecided import undecided

__all__ = ["ClientRows", "group_code", "rows_by_name", "scores_and_reasons", "tensor"]


@dataclass(frozen=True, eq=False)
class ClientRows:
    """One client's."""

    features: Tensor  # (n, l), float64, as given
    labels: Tensor  # (n,), indices into classes_
    groups: Tensor | None  # (n,)

    def __add__(self, other: ClientRows) -> ClientRows:
        if (self.groups is None) != (other.groups is None):
            raise InputError("groups given for some rows of a client and not for others; give them for all or none")
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = torch.cat([self.groups, other.groups])
        return ClientRows(torch.cat([self.features, other.features]), torch.cat([self.labels, other.labels]), groups)

    def digest(self) -> str:
        """The same for the same rows in any order."""
        rows = torch.cat([self.features, self.labels[:, None].to(torch.float64)], 1).numpy()
        return hashlib.sha256(b"".join(sorted(row.tobytes() for row in rows))).hexdigest()


def rows_by_name(names: list[Hashable]) -> dict[Hashable, list[int]]:
    """Which rows each client has, in one pass."""
    found: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return found


def tensor(rows: np.ndarray) -> Tensor:
    """The rows as a tensor; copied where torch could not share them (read-only, or with negative strides)."""
    return torch.from_numpy(np.require(rows, requirements=["C", "W"]))


def group_code(group: Hashable) -> int:
    """A number for a group's name, the same in every call."""
    return int.from_bytes(hashlib.sha256(repr(group).encode()).digest()[:7])


def scores_and_reasons(model: DualStream, features: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (n, c), always finite, and why a row has no decision (n,): such a row scores the local prior, or zeros."""
    scores = model.scores(features)
    reasons = undecided(model, features, scores)
    scores[reasons > 0] = scores.new_zeros(scores.shape[1]) if model.prior is None else model.prior
    return scores, reasons
