"""Sums of statistics that are exact: what is added in any order and taken away again leaves no trace.

Floating-point addition rounds, so that (a + b) - b is not a. Here every entry x of a contribution becomes two integers,

    x = hi 2^-20 + lo 2^-72        rounded once, to 2^-72: below the last bit of any entry of ordinary size

and integers are added. The sum does not depend on the order, on grouping, or on who came and went. `Statistics` whose
entries pass 2^42, or whose mean square is far from 1, do not fit and are refused (`apfl.federate.contribution`).

Under landmark terms contributions are integers to begin with (`IntegerSum`); with numbers as targets no count is a
whole number (`NumberSum`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.integers import Encoding
from apfl.maths.leaveout import ECHO
from apfl.maths.noise import IntegerRows
from apfl.maths.regression import NumberStatistics
from apfl.maths.ridge import Statistics
from apfl.maths.wire import pack, unpack

__all__ = ["LARGEST", "ExactSum", "ExactVector", "IntegerSum", "NumberSum", "RunningSum"]

HI, LO = 20, 72  # binary digits after the point
CARRY = LO - HI
LARGEST = 2.0**42  # of an entry of the sum: hi then has a bit to spare
CHUNK = 2**20


@dataclass(eq=False)
class ExactVector:
    """Numbers of two words each, added to in place: whatever the order and the grouping, the words are the same.

    >>> one, other = ExactVector.zero(1), ExactVector.zero(1)
    >>> for x in (0.1, 0.2, 0.3): one.add(np.array([x]))
    >>> for x in (0.3, 0.1, 0.2): other.add(np.array([x]))
    >>> bool(one.hi == other.hi and one.lo == other.lo), one.values().tolist()
    (True, [0.6])
    """

    hi: np.ndarray  # (n,), int64
    lo: np.ndarray  # (n,), int64

    @staticmethod
    def zero(size: int) -> ExactVector:
        """The sum of nothing."""
        return ExactVector(np.zeros(size, np.int64), np.zeros(size, np.int64))

    def add(self, values: np.ndarray, sign: int = 1) -> None:
        """Add float64 numbers, each rounded once."""
        for start in range(0, len(values), CHUNK):
            some = slice(start, start + CHUNK)
            x = values[some]
            hi = np.rint(np.ldexp(x, HI))
            lo = np.rint(np.ldexp(x - np.ldexp(hi, -HI), LO))  # the difference is exact
            self.hi[some] += sign * hi.astype(np.int64)
            self.lo[some] += sign * lo.astype(np.int64)
            self._carry(some)

    def merge(self, other: ExactVector) -> None:
        """Add another sum."""
        for start in range(0, len(self.hi), CHUNK):
            some = slice(start, start + CHUNK)
            self.hi[some] += other.hi[some]
            self.lo[some] += other.lo[some]
            self._carry(some)

    def _carry(self, some: slice) -> None:
        """lo stays within half a unit of hi: one form each."""
        carry = (self.lo[some] + (1 << (CARRY - 1))) >> CARRY
        self.hi[some] += carry
        self.lo[some] -= carry << CARRY

    def values(self) -> np.ndarray:
        """The sums, rounded once to float64."""
        values: np.ndarray = np.ldexp(self.hi.astype(np.float64), -HI)
        values += np.ldexp(self.lo.astype(np.float64), -LO)
        return values

    def largest(self) -> float:
        """Size of the largest number."""
        return max(int(self.hi.max(initial=0)), -int(self.hi.min(initial=0))) * 2.0**-HI


@dataclass(eq=False)
class ExactSum:
    """The running sum, added to in place.

    >>> part = Statistics(torch.eye(2).double() / 3, torch.ones(2, 1).double() / 7, torch.ones(1).double(), 1, 1.0)
    >>> running = ExactSum.zero(2, 1)
    >>> running.add(part)
    >>> before = running.copy()
    >>> running.add(part); running.add(part, -1); running == before
    True
    """

    width: int
    n_classes: int
    hi: np.ndarray  # (d (d + 1) / 2 + d c,), int64: the packed triangle, then Phi'Y row by row
    lo: np.ndarray  # the same
    counts: np.ndarray  # (c,), int64
    n_copies: int = 0
    echo: np.ndarray = field(default_factory=lambda: np.zeros(ECHO, np.int64))

    @staticmethod
    def zero(width: int, n_classes: int) -> ExactSum:
        """The sum of nothing."""
        size = width * (width + 1) // 2 + width * n_classes
        return ExactSum(
            width, n_classes, np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(n_classes, np.int64)
        )

    @property
    def n_samples(self) -> int:
        return int(self.counts.sum())

    def add(self, stats: Statistics, sign: int = 1) -> None:
        """Add a client's statistics, or with ``sign`` -1 take them away again."""
        if (stats.width, stats.n_classes) != (self.width, self.n_classes):
            raise InputError(
                f"statistics of width {stats.width} with {stats.n_classes} classes do not fit a sum of width "
                f"{self.width} with {self.n_classes}"
            )
        start = 0
        for part in (pack(stats.autocorrelation), stats.crosscorrelation.reshape(-1)):
            self._add(part.numpy(), start, sign)
            start += len(part)
        self.counts += sign * np.rint(stats.class_counts.numpy()).astype(np.int64)
        self.n_copies += sign * stats.n_copies
        self.echo = self.echo + (0 if stats.echo is None else sign * stats.echo.numpy())

    def _add(self, values: np.ndarray, offset: int, sign: int) -> None:
        own = slice(offset, offset + len(values))
        ExactVector(self.hi[own], self.lo[own]).add(values, sign)

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        ExactVector(self.hi, self.lo).merge(ExactVector(other.hi, other.lo))
        self.counts += other.counts
        self.n_copies += other.n_copies
        self.echo = self.echo + other.echo

    def statistics(self) -> Statistics:
        """The sum, rounded once to float64."""
        values = torch.from_numpy(ExactVector(self.hi, self.lo).values())
        triangle = self.width * (self.width + 1) // 2
        n = self.n_samples
        return Statistics(
            unpack(values[:triangle]),
            values[triangle:].reshape(self.width, self.n_classes).clone(),
            torch.from_numpy(self.counts.astype(np.float64)),
            n,
            float(n),
            self.n_copies,
            torch.from_numpy(self.echo),
        )

    def largest(self) -> float:
        """Size of the largest entry."""
        return ExactVector(self.hi, self.lo).largest()

    def copy(self) -> ExactSum:
        """The same sum, to be changed on its own."""
        return ExactSum(
            self.width, self.n_classes, self.hi.copy(), self.lo.copy(), self.counts.copy(), self.n_copies, self.echo
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExactSum):
            return NotImplemented
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in ("hi", "lo", "counts", "echo"))
        return all(same) and self.n_copies == other.n_copies

    def tensors(self) -> dict[str, Tensor]:
        """The sum as data."""
        arrays = {name: torch.from_numpy(getattr(self, name)) for name in ("hi", "lo", "counts", "echo")}
        return arrays | {"n_copies": torch.tensor(self.n_copies)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], width: int) -> ExactSum:
        """The sum back from data."""
        hi, lo, counts = (tensors[name].numpy() for name in ("hi", "lo", "counts"))
        if "echo" not in tensors:  # kept by an earlier version
            return ExactSum(width, len(counts), hi, lo, counts)
        return ExactSum(width, len(counts), hi, lo, counts, int(tensors["n_copies"]), tensors["echo"].numpy())


@dataclass(eq=False)
class IntegerSum:
    """The running sum of contributions that are vectors of integers; the same face as `ExactSum`.

    An entry has 32 bits at most, so a billion of them fit.
    """

    encoding: Encoding | IntegerRows
    vector: np.ndarray  # (size of the layout,), int64

    @staticmethod
    def zero(encoding: Encoding | IntegerRows) -> IntegerSum:
        """The sum of nothing."""
        return IntegerSum(encoding, np.zeros(encoding.layout.size, np.int64))

    @property
    def n_samples(self) -> int:
        return int(self.vector[self.encoding.layout.places["class_counts"]].sum()) // self.encoding.count_unit

    def add(self, integers: np.ndarray, sign: int = 1) -> None:
        """Add a client's integers, or with ``sign`` -1 take them away again."""
        if integers.shape != self.vector.shape:
            raise InputError(f"{integers.shape} integers do not fit a sum of {self.vector.shape}")
        self.vector += sign * integers

    def statistics(self) -> Statistics:
        """What the sum says, in float64."""
        return self.encoding.decode(torch.from_numpy(self.vector))

    def largest(self) -> float:
        """Size of the largest entry, in units of the step."""
        return float(np.abs(self.vector).max(initial=0))

    def copy(self) -> IntegerSum:
        """The same sum, to be changed on its own."""
        return IntegerSum(self.encoding, self.vector.copy())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntegerSum):
            return NotImplemented
        return np.array_equal(self.vector, other.vector)

    def tensors(self) -> dict[str, Tensor]:
        """The sum as data."""
        return {"integers": torch.from_numpy(self.vector)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], encoding: Encoding | IntegerRows) -> IntegerSum:
        """The sum back from data."""
        return IntegerSum(encoding, tensors["integers"].numpy())


@dataclass(eq=False)
class NumberSum:
    """The running sum of statistics whose targets are numbers; the same face as `ExactSum`."""

    width: int
    n_targets: int
    vector: ExactVector  # the packed triangle, then Phi'Y row by row, the sums of the targets, and their energy
    n_samples: int = 0
    n_copies: int = 0

    @staticmethod
    def zero(width: int, n_targets: int) -> NumberSum:
        """The sum of nothing."""
        size = width * (width + 1) // 2 + width * n_targets + n_targets + 1
        return NumberSum(width, n_targets, ExactVector.zero(size))

    def add(self, stats: Statistics, sign: int = 1) -> None:
        """Add a client's statistics, or with ``sign`` -1 take them away again."""
        if (stats.width, stats.n_classes) != (self.width, self.n_targets):
            raise InputError(
                f"statistics of width {stats.width} with {stats.n_classes} targets do not fit a sum of width "
                f"{self.width} with {self.n_targets}"
            )
        energy = stats.class_counts.new_tensor([stats.target_energy])
        parts = (pack(stats.autocorrelation), stats.crosscorrelation.reshape(-1), stats.class_counts, energy)
        self.vector.add(torch.cat(parts).numpy(), sign)
        self.n_samples += sign * stats.n_samples
        self.n_copies += sign * stats.n_copies

    def statistics(self) -> NumberStatistics:
        """The sum, rounded once to float64."""
        values = torch.from_numpy(self.vector.values())
        triangle, crossed = self.width * (self.width + 1) // 2, self.width * self.n_targets
        return NumberStatistics(
            unpack(values[:triangle]), values[triangle : triangle + crossed].reshape(self.width, -1).clone(),
            values[triangle + crossed : -1].clone(), self.n_samples, float(values[-1]), self.n_copies,
        )  # fmt: skip

    def largest(self) -> float:
        """Size of the largest entry."""
        return self.vector.largest()

    def copy(self) -> NumberSum:
        """The same sum, to be changed on its own."""
        vector = ExactVector(self.vector.hi.copy(), self.vector.lo.copy())
        return NumberSum(self.width, self.n_targets, vector, self.n_samples, self.n_copies)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumberSum):
            return NotImplemented
        words = ((self.vector.hi, other.vector.hi), (self.vector.lo, other.vector.lo))
        counts = (self.n_samples, self.n_copies) == (other.n_samples, other.n_copies)
        return counts and all(np.array_equal(*pair) for pair in words)

    def tensors(self) -> dict[str, Tensor]:
        """The sum as data."""
        counts = torch.tensor([self.n_samples, self.n_copies])
        return {"hi": torch.from_numpy(self.vector.hi), "lo": torch.from_numpy(self.vector.lo), "counts": counts}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], width: int, n_targets: int) -> NumberSum:
        """The sum back from data."""
        vector = ExactVector(tensors["hi"].numpy(), tensors["lo"].numpy())
        return NumberSum(width, n_targets, vector, *tensors["counts"].tolist())


RunningSum = ExactSum | IntegerSum | NumberSum
