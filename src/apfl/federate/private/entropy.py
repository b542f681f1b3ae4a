"""Noise from the system's entropy: whoever could guess a generator's state could subtract the noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Entropy"]


@dataclass(frozen=True)
class Entropy:
    """The two kinds of numbers that `apfl.maths.noise` draws, with 53 random bits each."""

    read: Callable[[int], bytes] = os.urandom

    def random(self, size: int) -> np.ndarray:
        """Uniform in [0, 1)."""
        words = np.frombuffer(self.read(8 * size), "<u8")
        return (words >> np.uint64(11)) * 2.0**-53

    def geometric(self, p: float, size: int) -> np.ndarray:
        """By inversion: the first trial k with 1 - (1 - p)^k > u."""
        trials: np.ndarray = np.floor(np.log1p(-self.random(size)) / np.log1p(-p)).astype(np.int64)
        return trials + 1
