"""Moments of rows of any size as integers: one range for each column, and one step for everyone.

A column's range is the power of four at or above its largest entry over all clients. `largest_buckets` says which a
client's rows take; clients agree on the largest without telling whose it is (`apfl.federate.secure.digits`).

    integer = floor(2^47 sum / (n R) + u),   2^47 sum of squares / (n R^2) likewise,   u uniform on [0, 1)

n is the most rows of one client, so nothing is outside unless a client has entries beyond the agreed range: those are
cut back, and counted. The error of a sum over K clients has the size of sqrt(K) steps, 2^-47 of n R. A variance that is
no larger than its error is none: the column counts as constant, as one does whose standard deviation is a millionth of
its mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.bits import Layout, Part
from apfl.maths.dither import Uniform
from apfl.maths.integers import Rounding
from apfl.maths.normalise import Moments

__all__ = ["BUCKETS", "MOMENT_BITS", "MomentsEncoding", "largest_buckets"]

MOMENT_BITS = 48  # a column far from zero has few digits beyond its mean; a sum over 30,000 clients fits int64
BUCKETS = 64  # of a column's largest entry, each four times the one before
LOWEST = -64  # the exponent of the lowest
LARGEST_LOG = 768.0  # of |entry|, in double precision
ERRORS = 6.0  # standard deviations of rounding that a variance must pass


def largest_buckets(features: Tensor) -> Tensor:
    """Of each column (n, l) the bucket of its largest entry, int64 (l,); -1 for a column of zeros, or without rows.

    >>> largest_buckets(torch.tensor([[1.0, 0.0, 3.0], [0.5, 0.0, -5.0]])).tolist()
    [33, -1, 34]
    """
    if not len(features):
        return torch.full((features.shape[1],), -1)
    largest = features.abs().amax(0).double()
    _, exponent = torch.frexp(largest)  # largest < 2^exponent
    bucket = torch.div(exponent - LOWEST + 1, 2, rounding_mode="floor").clamp(0, BUCKETS - 1).long()
    return torch.where(largest == 0, -1, bucket)


def _range_of(bucket: Tensor) -> Tensor:
    """What the entries of a column do not pass."""
    return torch.ldexp(torch.ones(len(bucket), dtype=torch.float64), 2 * bucket.clamp_min(0) + LOWEST)


@dataclass(frozen=True, eq=False)
class MomentsEncoding:
    """The moments of one client, of rows as they are or at one length, as one vector of integers, and back."""

    n_rows: int  # the most of one client
    buckets: Tensor  # of each column, (l,)
    sets: tuple[str, ...]  # of ``none``, ``root`` and ``row``: the rows that there are moments of
    n_flags: int = 0  # questions that a client answers with yes (1) or no (0)

    @cached_property
    def layout(self) -> Layout:
        parts = []
        for of in self.sets:
            parts += [Part(f"{of} {what}", len(self.buckets), MOMENT_BITS) for what in ("sums", "squares")]
        parts += [Part("sized", 1, 32, signed=False), Part("logs", 2, MOMENT_BITS)]
        parts += [Part(name, 1, 32, signed=False) for name in ("n_samples", "saturated")]
        return Layout((*parts, Part("flags", self.n_flags, 1, signed=False)))

    @property
    def _rounding(self) -> Rounding:
        return Rounding(MOMENT_BITS, 1.0)

    def _most(self, of: str) -> Tensor:
        """What no entry of a column passes: rows of one length have at most that."""
        width = len(self.buckets)
        return _range_of(self.buckets) if of == "none" else torch.full((width,), math.sqrt(width) * (1 + 1e-3)).double()

    def encode(self, own: Mapping[str, Moments], flags: Tensor, draw: Uniform) -> Tensor:
        """The vector (int64) of the moments of each set."""
        (first, *_), values = own.values(), []
        for of in self.sets:
            most = self.n_rows * self._most(of)
            values += [own[of].sums.cpu() / most, own[of].squares.cpu() / (most * self._most(of))]
        sizes = own["none"].sizes.cpu() if "none" in own else torch.zeros(3, dtype=torch.float64)
        logs = sizes[1:] / (self.n_rows * torch.tensor([LARGEST_LOG, LARGEST_LOG**2], dtype=torch.float64))
        scaled = torch.cat([*values, logs])
        rounded, saturated = self._rounding.integers(scaled, draw(1, len(scaled))[0].double())
        whole = rounded.long()
        told = torch.tensor([first.n_samples, saturated])
        return torch.cat([whole[:-2], sizes[:1].long(), whole[-2:], told, flags.long()])

    def decode(self, vector: Tensor, n_clients: int) -> dict[str, Moments]:
        """What a sum of vectors of so many clients says of each set; refused if no rows have it."""
        places, step = self.layout.places, self._rounding.step
        n = int(vector[places["n_samples"]][0])
        scale = self.n_rows * torch.tensor([LARGEST_LOG, LARGEST_LOG**2], dtype=torch.float64)
        logs = vector[places["logs"]].double() * step * scale
        sizes = torch.cat([vector[places["sized"]].double(), logs])
        error, found = ERRORS * math.sqrt(n_clients) * step, {}
        for of in self.sets:
            most = self._most(of)
            sums, squares = (vector[places[f"{of} {what}"]].double() * step * self.n_rows for what in _WHAT)
            squares = _squares(n, sums, squares, error * self.n_rows)
            if of != "none" and float(squares.sum()) > n * (1 + 1e-2):  # in units of the most, l (1 + 1e-3)^2
                raise InputError(f"moments that {n} rows of one length do not have")
            own = sizes if of == "none" else torch.zeros(3, dtype=torch.float64)
            found[of] = Moments(n, sums * most, squares * most.square(), own, of)
        return found


_WHAT = ("sums", "squares")


def _squares(n: int, sums: Tensor, squares: Tensor, error: float) -> Tensor:
    """The sums of squares, at least those of n equal entries: and no more, if rounding explains the difference."""
    equal = sums.square() / n
    allowed = error * (1 + 2 * sums.abs() / n) + 1e-12 * equal
    if n < 1 or bool((squares < equal - allowed).any()) or bool((sums.abs() > n + error).any()):
        raise InputError("moments that no rows have: squares below those of the sums, or sums beyond the agreed range")
    return torch.where(squares - equal <= allowed, equal, squares)
