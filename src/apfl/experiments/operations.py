"""How many operations each part of a federation of `apfl` takes, by kind (`apfl.experiments.rates`).

Products, factorisations and decompositions are counted as in the code they stand for. What goes through rows or
matrices once or several times counts as so many entries of a kernel; how many is from measured settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from apfl.errors import InputError
from apfl.experiments.rates import Operations
from apfl.maths.gcv import EIGEN_WIDTH
from apfl.maths.hat import CLEAR
from apfl.maths.landmarks import SYNTHETIC
from apfl.maths.personalise import width_for
from apfl.maths.pilot import CANDIDATES, n_points, rows_of_pilot
from apfl.maths.turning import leading
from apfl.methods.apfl import APFL

__all__ = [
    "Size",
    "check",
    "one_map",
    "publication",
    "server_landmarks",
    "server_pilot",
    "site_model",
    "site_moments",
    "site_pilot",
    "site_statistics",
    "whole_run",
]

LEAST = 0.01  # the least beta that is tried, over the mean squared length of a row
# From measured settings (docs/benchmarks.md). As long as so many entries of a kernel take the fingerprint of a row, a
# normal variate, the hits of a row, class and beta, an entry of a matrix that is rounded and packed, a number of a
# normalised row, one of U in all that is done with it, one of d x d in a message that is read, and one in a pilot's
# statistics that are kept. An entry of a band form takes so many operations for its factors of all gamma.
ROW, DRAWN, HITS, PACKED, NORMALISED, PASSES, READ, KEPT = 4000, 6, 4, 5, 4, 5, 1.5, 6
BAND = 4500


@dataclass(frozen=True)
class Size:
    """How large a federation is; ``width`` None: what the method takes."""

    rows: int
    features: int
    classes: int
    clients: int
    width: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("rows", self.rows, self.clients), ("features", self.features, 1),
                                   ("classes", self.classes, 2), ("clients", self.clients, 1)):  # fmt: skip
            if value < least:
                raise InputError(f"{name}={value} given; it must be {least} or more")

    @property
    def own(self) -> int:
        """Rows of one site."""
        return math.ceil(self.rows / self.clients)


def _all(*each: tuple[float, Operations]) -> Operations:
    """So many times each of these."""
    kinds = {kind for _, operations in each for kind in operations}
    return {kind: sum(times * operations.get(kind, 0.0) for times, operations in each) for kind in kinds}


def whole_run(size: Size, d: int, method: APFL, full: bool, pilots: bool) -> Operations:
    """`apfl run`: what sites and the server do but check each other, with each row mapped and decomposed once."""
    n, c, k, landmarks = size.own, size.classes, size.clients, method.map == "landmarks"
    weights = len(method.choice.weights)
    each = [(1, _own_sums(n, size.features, d, c, landmarks)), (1, _own_table(n, d, c, method, weights))]
    once = [(1, publication(d, c, 0, method))]
    if not landmarks:  # two maps
        each.append((1, {"single": _mapped(n, size.features, d, False)}))
    else:
        once.append((1, server_landmarks(size.features, d, 0, full)))
        each += (1, site_moments(size, full)), (1, {"kernel": n * ROW, "double": d**2 * c})
    if pilots:
        w, some = n_points(size.rows), rows_of_pilot(n, size.rows)
        times = len(CANDIDATES)
        each += (times, _own_sums(some, size.features, w, c, True)), (times, _own_table(some, w, c, method, 1))
        once += (times, _pilot_map(size)), (1, _noise(size)), (times, publication(w, c, 0, method))
    return _all((k, _all(*each)), *once)


def _own_sums(n: int, features: int, d: int, c: int, landmarks: bool) -> Operations:
    """Of one client: its rows are mapped, and their statistics made."""
    if not landmarks:
        return {"single": 2 * n * features * d, "double": n * d**2 + 2 * n * d * c, "kernel": n * d / 4}
    r = leading(d)
    turned = n * r**2 + 2 * n * r * (d - r)
    return {
        "single": _mapped(n, features, d, True) + turned + n * d**2 + 2 * n * d * c,
        "kernel": n * (features + d) + PACKED * d**2,
    }


def _own_table(n: int, d: int, c: int, method: APFL, weights: int) -> Operations:
    """Of one client: its rows are decomposed and left out, hits are counted, its refinement is solved."""
    m, betas = min(n, d), len(method.choice.grid(1.0).betas)
    hits = PASSES * (m + d * (n >= d)) + HITS * c * weights * betas
    scores = {
        "single": _left_out(n, d, c, weights * betas, method.sketch), "double": 2 * m**2 * c, "kernel": n * hits,
    }  # fmt: skip
    return _all((1, scores), (1, _decomposed(n, d, LEAST)))


def site_pilot(size: Size, method: APFL) -> Operations:
    """The maps of the candidates, twice; their statistics; their tables."""
    n, d, c = rows_of_pilot(size.own, size.rows), n_points(size.rows), size.classes
    betas = len(method.choice.grid(1.0).betas)
    table = {
        "single": _mapped(n, size.features, d, True) + _left_out(n, d, c, betas, method.sketch),
        "kernel": n * (size.features + d + PASSES * min(n, d)) + HITS * n * c * betas,
    }
    sums = _own_sums(n, size.features, d, c, True)
    tried = (2, _pilot_map(size)), (1, sums), (1, table), (1, _decomposed(n, d, LEAST))
    return _all(*((len(CANDIDATES) * times, operations) for times, operations in tried), (1, _noise(size)))


def server_pilot(size: Size, method: APFL) -> Operations:
    """The maps of the candidates, the check of all statistics, the primaries."""
    d = n_points(size.rows)
    kept = {"kernel": KEPT * d**2}
    tried = (
        (1, _pilot_map(size)), (size.clients, check(d, size.classes)), (size.clients, kept),
        (1, publication(d, size.classes, size.clients, method)),
    )  # fmt: skip
    return _all(*((len(CANDIDATES) * times, operations) for times, operations in tried), (1, _noise(size)))


def _noise(size: Size) -> Operations:
    """Normal variates, the same for all candidates."""
    return {"kernel": DRAWN * (n_points(size.rows) + SYNTHETIC) * size.features}


def _pilot_map(size: Size) -> Operations:
    """That of one candidate, and what tells mean squares."""
    d, features = n_points(size.rows), size.features
    return _all((1, _units(d, features)), (1, {"kernel": (d + SYNTHETIC) * features}), (1, one_map(d, features)))


def site_moments(size: Size, full: bool) -> Operations:
    """What landmarks are drawn from: products of columns, or with few rows (not ``full``) squares alone."""
    n, features = size.own, size.features
    return {"single": n * features**2 * full, "kernel": NORMALISED * n * features + PACKED * features**2 * full}


def server_landmarks(features: int, d: int, clients: int, full: bool) -> Operations:
    """Points in orthogonal blocks; those that tell mean squares, too. Their kernel, its factor and its coordinates.

    Each site's moments are looked at before, by a factorisation.
    """
    n, m, each = d + SYNTHETIC, min(d, features), (1 + clients) * full
    drawn = {
        "double": 3 * n * features * m + 2 * n * features**2 * full,
        "cholesky": n * m**2 / 3 + features**3 / 3 * each,
        "kernel": DRAWN * n * features + PACKED * features**2 / 2 * each,
    }
    return _all((1, drawn), (1, one_map(d, features)), (1, _units(d, features)))


def _units(d: int, features: int) -> Operations:
    """Synthetic points under a map, which tell the mean square of each column."""
    return {"single": SYNTHETIC * (2 * features * d + d**2 + 2 * leading(d) * d), "kernel": (SYNTHETIC + d) * d}


def one_map(d: int, features: int) -> Operations:
    """Landmarks become a map: their kernel, its factor, the coordinates in which statistics travel."""
    r = leading(d)
    return {"double": 2 * d**2 * features + 2 * d**2 * r + (d - r) * r**2, "cholesky": d**3 / 3 + r**3 / 3}


def site_statistics(size: Size, d: int, landmarks: bool) -> Operations:
    """Of a site: its sums; on landmarks the map, the fingerprints of its rows, and the check before it sends."""
    n, features, c = size.own, size.features, size.classes
    sums = (1, _own_sums(n, features, d, c, landmarks))
    if not landmarks:
        return _all(sums)
    return _all(sums, (1, one_map(d, features)), (1, check(d, c)), (1, {"kernel": n * ROW}))


def check(d: int, c: int) -> Operations:
    """A contribution is looked at by two factorisations."""
    return {"double": 2 * d**2 * c, "cholesky": 2 * d**3 / 3, "kernel": 12 * d**2}


def site_model(size: Size, d: int, method: APFL) -> Operations:
    """The table of left-out hits; the comparison with going alone, on a map of the site's own; the refinement."""
    n, features, c = size.own, size.features, size.classes
    m, betas, weights = min(n, d), len(method.choice.grid(1.0).betas), len(method.choice.weights)
    landmarks = method.map == "landmarks"
    alone = min(d, width_for(n, features))
    each = [_decomposed(n, d, LEAST), _decomposed(n, d, 1.0), _decomposed(n, alone, LEAST)]
    decomposed = {
        kind: sum(own.get(kind, 0.0) for own in each) for kind in ("single", "double", "eigen", "eigen_single")
    }
    left_out = _left_out(n, d, c, weights * betas, method.sketch) + _left_out(n, d, c, weights, method.sketch)
    mapped = 2 * _mapped(n, features, d, landmarks) + _mapped(n, features, alone, landmarks)
    drawn = alone**2 + DRAWN * alone * features  # the site's own landmarks
    return {
        "single": decomposed["single"] + mapped + left_out + _left_out(n, alone, c, betas, 0),
        "double": decomposed["double"] + 2 * m**2 * c + d**2 * c + 2 * alone**2 * features * landmarks,
        "cholesky": (m**3 + min(n, alone) ** 3 + (d**3 + alone**3) * landmarks) / 3,
        "kernel": n * (PASSES * m + min(n, alone)) + PASSES * n * d * (n >= d) + HITS * n * c * (weights + 1) * betas
        + landmarks * (2 * n * d + n * alone + drawn),
        "eigen": decomposed["eigen"], "eigen_single": decomposed["eigen_single"],
    }  # fmt: skip


def _mapped(n: int, features: int, d: int, landmarks: bool) -> float:
    return 2 * n * features * d + (n * d**2 if landmarks else 0)


def _decomposed(n: int, d: int, least: float) -> Operations:
    """The smaller product of rows with itself, its eigenvectors, and U, if it comes from the d x d product.

    In single precision if the least beta, over the mean squared length of a row, stands clear of its rounding.
    """
    m, gram, basis = min(n, d), n * d * min(n, d), 2 * n * d**2 if n >= d else 0
    if CLEAR * torch.finfo(torch.float32).eps * n <= least:
        return {"single": gram + basis, "eigen_single": _eigen(m)}
    return {"single": gram, "double": basis, "eigen": _eigen(m)}


def _eigen(m: int) -> float:
    """Rows and columns of a power of two share places in the cache, which costs a quarter."""
    return 9 * m**3 * (1.25 if m & (m - 1) == 0 else 1)


def _left_out(n: int, d: int, c: int, settings: int, sketch: int) -> float:
    """Left-out scores with so many betas, over all weights on the primary."""
    m = min(n, d)
    return 2 * n * d * (c + sketch) + 2 * n * m * c + settings * 2 * n * m * c + 4 * n * m * sketch


def publication(d: int, c: int, clients: int, method: APFL) -> Operations:
    """All contributions are read once more and added. gamma from a decomposition, or a band form and its factors."""
    by_band, chosen = d > EIGEN_WIDTH, method.gamma == "auto"
    r = leading(d)
    turned = 4 * r**3 + 4 * (d - r) * r**2 + 2 * (d - r) ** 2 * r if method.map == "landmarks" else 0
    return {
        "double": turned + 2 * d**2 * (c + method.sketch) + (d + BAND) * d**2 * (chosen and by_band),
        "cholesky": d**3 / 3, "eigen": _eigen(d) * (chosen and not by_band),
        "kernel": (8 + READ * clients) * d**2,
    }  # fmt: skip
