"""What a pass over a site's rows sums up. The terms say which pass it is:

    draft     description   rows of each class; sums and squares of the features, if the normalisation needs them
    outline   moments       sums and products of normalised rows, from which landmarks are drawn
    settled   statistics    Phi'Phi and Phi'Y

Rows are mapped in double precision. A block of rows is summed in double precision as well; blocks are added exactly
(`apfl.federate.sums`), so that the order of shards and how they were grouped leave no trace.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.landmarks import Landmarks, agreed_maps, open_landmarks
from apfl.federate.sums import LARGEST, ExactSum, ExactVector
from apfl.federate.terms import Terms
from apfl.maths.centred import CentredMap
from apfl.maths.landmarks import Spread, spread
from apfl.maths.normalise import Moments, moments, needs_moments
from apfl.maths.ridge import Statistics, accumulate, one_hot
from apfl.maths.wire import pack, unpack
from apfl.methods._streams import Map

__all__ = ["Contributed", "Described", "Spreads", "Stage", "Sums", "stage_of"]

Batches = Iterable[tuple[Tensor, Tensor]]  # rows (n, w) in float64 and their labels (n,)
Shapes = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
WORDS = 272  # bytes that hold any sum of 2^64 float64 numbers exactly, in units of the smallest
UNIT = 1074  # binary digits after the point of the smallest float64


class Sums(ABC):
    """Sums over rows, which are exact once a block of rows has been rounded to float64."""

    @abstractmethod
    def add(self, batches: Batches) -> None:
        """Add a block of rows; there is at least one."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add other sums of the same kind."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The sums as data."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The sums back from data, in place of these."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass: what a row becomes, how wide that is, and what is summed."""

    kind: str
    terms: Terms
    mapped: Callable[[Tensor], Tensor]  # features (n, l), float64 -> rows (n, width), float64
    width: int | None  # None: that of the features, which a draft may leave open
    empty: Callable[[int], Sums]  # of rows of this width
    shapes: Callable[[int], Shapes]  # of the tensors of such sums


def stage_of(terms: Terms, landmarks: bytes | Landmarks | None = None) -> Stage:
    """The pass that these terms ask for; to map rows, landmark terms need the landmarks that they name."""
    if terms.private:
        raise InputError(
            "terms with epsilon given: under noise a site's rows are summed up as integers, which `apfl stats` does "
            "not do. Join with the rows themselves (--data)"
        )
    if terms.settled:
        return _statistics(terms, landmarks)
    if not terms.outlined:
        return _description(terms)
    if terms.spread is None:
        raise InputError("these terms draw no landmarks from moments: wait for the settled ones")
    return _moments(terms)


# -------------------------------------------------------------------------------------------------- description


class Described(Sums):
    """First and second moments of features of any size, and of the sizes of rows, or of none.

    Each sum is one integer in units of the smallest float64, so that nothing overflows and nothing is lost.
    """

    def __init__(self, n_features: int, wanted: bool) -> None:
        self.n_features = n_features
        self.sums = [0] * (2 * n_features + 3 if wanted else 0)

    def add(self, batches: Batches) -> None:
        parts = [moments(rows) for rows, _ in batches if self.sums]
        for own in parts:
            values = torch.cat([own.sums, own.squares, own.sizes]).tolist()
            if not all(map(math.isfinite, values)):
                raise InputError("features so large that their squares are infinite; rescale them")
            self.sums = [a + _integer(b) for a, b in zip(self.sums, values, strict=True)]

    def merge(self, other: Described) -> None:
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def moments(self, n_samples: int) -> Moments | None:
        """Of so many rows; None if the normalisation needs none."""
        if not self.sums:
            return None
        values = torch.tensor([each / 2**UNIT for each in self.sums], dtype=torch.float64)
        sums, squares, sizes = torch.split(values, [self.n_features, self.n_features, 3])
        return Moments(n_samples, sums, squares, sizes)

    def tensors(self) -> dict[str, Tensor]:
        data = b"".join(each.to_bytes(WORDS, "little", signed=True) for each in self.sums)
        return {"sums": torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, WORDS)} if data else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.sums:
            self.sums = [int.from_bytes(row.tobytes(), "little", signed=True) for row in tensors["sums"].numpy()]


def _integer(x: float) -> int:
    """x 2^1074, which is whole.

    >>> _integer(5e-324), _integer(-1.0) == -(2**1074)
    (1, True)
    """
    above, below = x.as_integer_ratio()
    return above * ((1 << UNIT) // below)


def _description(draft: Terms) -> Stage:
    wanted = needs_moments(draft.method.normalise)

    def shapes(width: int) -> Shapes:
        return {"sums": (("U8",), (2 * width + 3, WORDS))} if wanted else {}

    return Stage("description", draft, lambda rows: rows, None, lambda width: Described(width, wanted), shapes)


# ------------------------------------------------------------------------------------------------------ moments


class Spreads(Sums):
    """Sums and products of rows of one length."""

    def __init__(self, width: int, full: bool) -> None:
        self.width, self.full, self.n_samples = width, full, 0
        self.vector = ExactVector.zero(width + (width * (width + 1) // 2 if full else width))

    def add(self, batches: Batches) -> None:
        summed = None
        for rows, _ in batches:
            own = spread(rows, full=self.full)
            summed = own if summed is None else summed + own
        assert summed is not None
        products = pack(summed.products) if self.full else summed.products
        self.vector.add(torch.cat([summed.sums, products]).numpy())
        self.n_samples += summed.n_samples
        _check_largest(self.vector.largest())

    def merge(self, other: Spreads) -> None:
        self.vector.merge(other.vector)
        self.n_samples += other.n_samples
        _check_largest(self.vector.largest())

    def spread(self) -> Spread:
        values = torch.from_numpy(self.vector.values())
        products = values[self.width :]
        return Spread(self.n_samples, values[: self.width].clone(), unpack(products) if self.full else products.clone())

    def tensors(self) -> dict[str, Tensor]:
        words = {name: torch.from_numpy(word) for name, word in (("hi", self.vector.hi), ("lo", self.vector.lo))}
        return {**words, "n_samples": torch.tensor(self.n_samples)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.vector = ExactVector(tensors["hi"].numpy(), tensors["lo"].numpy())
        self.n_samples = int(tensors["n_samples"])


def _moments(outline: Terms) -> Stage:
    full, scaling = outline.spread == "full", outline.normaliser()

    def shapes(width: int) -> Shapes:
        size = (width + (width * (width + 1) // 2 if full else width),)
        return {"hi": (("I64",), size), "lo": (("I64",), size), "n_samples": (("I64",), ())}

    return Stage("moments", outline, scaling, outline.n_in, lambda width: Spreads(width, full), shapes)


# --------------------------------------------------------------------------------------------------- statistics


class Contributed(Sums):
    """Phi'Phi and Phi'Y."""

    def __init__(self, width: int, n_classes: int) -> None:
        self.width, self.n_classes = width, n_classes
        self.sum = ExactSum.zero(width, n_classes)

    def add(self, batches: Batches) -> None:
        self.sum.add(accumulate((rows, one_hot(labels, self.n_classes)) for rows, labels in batches))
        _check_largest(self.sum.largest())

    def merge(self, other: Contributed) -> None:
        self.sum.merge(other.sum)
        _check_largest(self.sum.largest())

    def statistics(self) -> Statistics:
        return self.sum.statistics()

    def tensors(self) -> dict[str, Tensor]:
        """All but what a part says itself of repeated rows."""
        kept = self.sum.tensors()
        return {name: kept[name] for name in ("hi", "lo", "counts")}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        hi, lo, counts = (tensors[name].numpy() for name in ("hi", "lo", "counts"))
        self.sum = ExactSum(self.width, self.n_classes, hi, lo, counts)


def _statistics(terms: Terms, landmarks: bytes | Landmarks | None) -> Stage:
    scaling, n_classes = terms.normaliser(), terms.n_classes

    @lru_cache(maxsize=1)
    def primary() -> Map:
        """Drawn or opened for the first rows: whoever only adds parts needs none."""
        if terms.landmarked and landmarks is None:
            raise InputError("these terms name landmarks; give the file with them (--landmarks), as the server sent it")
        found = open_landmarks(landmarks, terms) if isinstance(landmarks, bytes) else landmarks
        drawn = agreed_maps(terms, torch.zeros(1, 1, dtype=torch.float64), found)[0]
        assert not isinstance(drawn, CentredMap), "terms with epsilon are refused"
        return drawn

    def shapes(width: int) -> Shapes:
        size = (width * (width + 1) // 2 + width * n_classes,)
        return {"hi": (("I64",), size), "lo": (("I64",), size), "counts": (("I64",), (n_classes,))}

    def mapped(rows: Tensor) -> Tensor:
        return primary()(scaling(rows))

    return Stage("statistics", terms, mapped, terms.width, lambda width: Contributed(width, n_classes), shapes)


def _check_largest(largest: float) -> None:
    if largest >= LARGEST:
        raise InputError(
            f"sums of {largest:.3g}; the largest that a part holds is {LARGEST:.3g}. Make several sites of the rows, "
            "or contribute a share of them (--share)"
        )
