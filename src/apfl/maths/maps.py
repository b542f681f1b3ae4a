"""The fixed random maps that turn backbone features into activated features: Phi = act(Z R).

Every party draws the map from a seed; nobody sends it. So the draw must be the same on every machine, library
version, device and thread count, which neither torch's nor numpy's normal variates promise. Here: raw Philox words,
(u + 1/2) / 2^53 through the inverse normal cdf, divided by sqrt(n_in), rounded to float32. A SHA-256
fingerprint of the result stands in every model file and message, and a mismatch is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor
from torch.nn import functional

from apfl.errors import InputError, unknown
from apfl.maths.machine import available, n_workers
from apfl.maths.philox import uniform_from_philox

__all__ = ["ACTIVATIONS", "Activation", "FeatureMap", "normals", "random_map", "raw_map"]

CPU = torch.device("cpu")
INSIDE = 0.5**54  # half a step of uniform numbers, which keeps them off 0
_DRAWN = 2**16  # numbers at a time; smaller blocks have threads wait for each other
Activation = Literal["relu", "leaky_relu", "gelu", "tanh", "sigmoid", "hardswish", "softshrink", "identity", "cosine"]
# The paper's eight, in the paper's order; and cosine; each may overwrite its argument.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "leaky_relu": functional.leaky_relu_,
    "gelu": functional.gelu,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "hardswish": functional.hardswish,
    "softshrink": functional.softshrink,
    "identity": lambda x: x,
    "cosine": torch.cos_,
}


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Z (n, n_in) -> act(Z R) (n, d), with a column of ones appended if ``intercept``.

    Make one with `random_map` or `raw_map`. Computes in the dtype of its argument.

    >>> random_map(4, 8, intercept=True)
    FeatureMap(4 -> 9, relu, seed 0)
    """

    n_in: int
    matrix: Tensor | None  # R (n_in, d); None passes Z on as it is
    activation: str = "relu"
    seed: int | None = None
    offset: Tensor | None = None  # b (d,), only with cosine
    scale: float = 1.0  # only with cosine
    intercept: bool = False

    def __repr__(self) -> str:
        drawn = "the features as they are" if self.matrix is None else f"{self.activation}, seed {self.seed}"
        return f"FeatureMap({self.n_in} -> {self.width}, {drawn})"

    @property
    def width(self) -> int:
        """d, plus one with an intercept."""
        return (self.n_in if self.matrix is None else self.matrix.shape[1]) + self.intercept

    def __call__(self, features: Tensor) -> Tensor:
        if features.ndim != 2 or features.shape[1] != self.n_in:
            raise InputError(
                f"features of shape {tuple(features.shape)} given; this model was made for (n, {self.n_in})"
            )
        if self.matrix is None:
            phi = features
        else:
            phi = features @ self.matrix.to(features)
            if self.offset is not None:
                phi.mul_(self.scale).add_(self.offset.to(features))
            phi = ACTIVATIONS[self.activation](phi)
        return torch.cat([phi, phi.new_ones(len(phi), 1)], dim=1) if self.intercept else phi

    def like(self, features: Tensor) -> FeatureMap:
        """The same map with its matrix in the dtype and on the device of ``features``, converted once."""
        return self if self.matrix is None else replace(self, matrix=self.matrix.to(features))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides what the map computes."""
        digest = hashlib.sha256(f"{self.n_in} {self.width} {self.activation} {self.scale} {self.intercept}".encode())
        for tensor in (self.matrix, self.offset):
            if tensor is not None:
                digest.update(tensor.to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def spec(self) -> dict[str, Any]:
        """What another party needs to draw the same map, with the fingerprint to check that it did."""
        return {
            "n_in": self.n_in,
            "d": None if self.matrix is None else self.matrix.shape[1],
            "activation": self.activation,
            "seed": self.seed,
            "scale": self.scale,
            "intercept": self.intercept,
            "fingerprint": self.fingerprint,
        }

    @staticmethod
    def from_spec(spec: dict[str, Any]) -> FeatureMap:
        """Draw the map that `spec` describes; refuse it if it does not come out the same here."""
        n_in, intercept = int(spec["n_in"]), bool(spec["intercept"])
        if spec["d"] is None:
            drawn = raw_map(n_in, intercept=intercept)
        else:
            drawn = random_map(
                n_in, spec["d"], spec["activation"], spec["seed"], scale=spec["scale"], intercept=intercept
            )
        if drawn.fingerprint != spec["fingerprint"]:
            raise InputError(
                f"the random map of seed {spec['seed']} comes out differently here (fingerprint "
                f"{drawn.fingerprint[:12]}, expected {str(spec['fingerprint'])[:12]}): "
                "compare the versions of numpy and scipy with those of the sender"
            )
        return drawn


def raw_map(n_in: int, *, intercept: bool = False) -> FeatureMap:
    """No projection and no activation: the backbone's features themselves."""
    return FeatureMap(n_in, None, "identity", intercept=intercept)


def random_map(
    n_in: int, d: int, activation: str = "relu", seed: int = 0, *, scale: float = 0.2, intercept: bool = False
) -> FeatureMap:
    """Draw R ~ N(0, 1) / sqrt(n_in), (n_in, d), from ``seed``: the same everywhere.

    ``activation`` is one of the paper's eight or ``cosine``, which gives cos(scale * Z R + b) with b uniform on
    [0, 2 pi): random Fourier features of a Gaussian kernel. ``scale`` is used by ``cosine`` alone.

    >>> random_map(64, 8, "relu", seed=0)(torch.ones(3, 64)).shape
    torch.Size([3, 8])
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if n_in < 1 or d < 1:
        raise InputError(f"a map from {n_in} to {d} features asked for; both must be at least 1")
    if not 0 <= seed < 2**64:
        raise InputError(f"seed {seed} given; it must be a whole number from 0 to 2^64 - 1")
    have = available(CPU)
    if have is not None and 4 * n_in * d > have:
        raise InputError(f"a map from {n_in} to {d} features takes {4 * n_in * d / 1e9:.0f} GB; use a smaller width")
    matrix = torch.empty(n_in, d)
    _draw_normals(seed, matrix, math.sqrt(n_in))
    if activation != "cosine":
        return FeatureMap(n_in, matrix, activation, seed, intercept=intercept)
    offset = torch.from_numpy((2 * math.pi * _uniform(seed, n_in * d, d)).astype(np.float32))
    return FeatureMap(n_in, matrix, activation, seed, offset, scale, intercept)


def normals(seed: int, *shape: int, device: torch.device = CPU) -> Tensor:
    """Standard normal variates, float64, that are the same everywhere but for the last digits of `ndtri`."""
    if device.type == "cuda":
        made: Tensor = torch.special.ndtri(uniform_from_philox(seed, math.prod(shape), device).add_(INSIDE))
        return made.view(shape)
    drawn = torch.empty(shape, dtype=torch.float64)
    _draw_normals(seed, drawn)
    return drawn.to(device)


def _draw_normals(seed: int, into: Tensor, over: float = 1.0) -> None:
    """Fill a tensor, by blocks that stay in the cache, on all cores."""
    flat = into.view(-1).numpy()

    def fill(start: int) -> None:
        drawn = _uniform(seed, start, min(_DRAWN, len(flat) - start))
        ndtri(drawn, out=drawn)
        drawn /= over
        flat[start : start + _DRAWN] = drawn

    starts = range(0, len(flat), _DRAWN)
    workers = n_workers(len(starts), CPU)
    if workers == 1:
        for start in starts:
            fill(start)
        return
    with ThreadPoolExecutor(workers) as pool:  # no BLAS here: no need to look for its threads, which takes milliseconds
        list(pool.map(fill, starts))


def _uniform(seed: int, start: int, n: int) -> np.ndarray:
    """n numbers strictly inside (0, 1), each from the upper 53 bits of a raw word of Philox, from one place on.

    Key and counter are given outright: no seed expansion that a numpy release could change. A counter has four words.
    """
    counter, skipped = divmod(start, 4)
    # `random` is the upper 53 bits of a word over 2^53. Unlike `random_raw` it lets other threads draw meanwhile.
    words = np.random.Generator(np.random.Philox(key=seed, counter=counter)).random(skipped + n)[skipped:]
    words += INSIDE
    return words
