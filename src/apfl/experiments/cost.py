"""What a federation of `apfl` costs before there is one: bytes, memory and seconds for a site, the server, the network.

Bytes come from the one byte counter (`apfl.maths.wire`). Memory is that of the matrices that are held at once. Seconds
are floating-point operations over the rates of one core, which a second of measuring tells (`measured_rates`).
All sites are taken to have equally many rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from apfl.errors import InputError
from apfl.maths.gcv import EIGEN_WIDTH
from apfl.maths.hat import CLEAR, eigh
from apfl.maths.integers import statistics_layout
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN, SYNTHETIC, kernel
from apfl.maths.machine import threads
from apfl.maths.memory import INTERPRETER, of_pilot, of_run, of_server, of_site
from apfl.maths.normalise import needs_moments
from apfl.maths.personalise import width_for
from apfl.maths.pilot import BITS, CANDIDATES, PilotBytes, n_points, pilot_bytes, rows_of_pilot
from apfl.maths.ridge import squared
from apfl.maths.spread_encoding import SpreadEncoding
from apfl.maths.turning import leading
from apfl.maths.wire import (
    ECHO_BYTES,
    Traffic,
    description_bytes,
    landmarks_bytes,
    publication_bytes,
    statistics_bytes,
    table_bytes,
)
from apfl.methods.apfl import APFL

__all__ = ["RUN", "Cost", "Rates", "Size", "cost", "measured_rates", "traffic"]

WIDEST, DECOMPOSED, ODD = 2048, 1536, 24  # whose rates are measured
LEAST = 0.01  # the least beta that is tried, over the mean squared length of a row
# From measured settings (docs/benchmarks.md). As long as so many entries of a kernel take the fingerprint of a row, a
# normal variate, the hits of a row, class and beta, an entry of a matrix that is rounded and packed, a number of a
# normalised row, one of U in all that is done with it, one of d x d in a message that is read, and one in a pilot's
# statistics that are kept. An entry of a band form takes so many operations for its factors of all gamma. Copies,
# packing and hashes are beside what is counted; files and messages take so many seconds.
ROW, DRAWN, HITS, PACKED, NORMALISED, PASSES, READ, KEPT = 4000, 6, 4, 5, 4, 5, 1.5, 6
BAND = 4500
BESIDE = {
    "pilot": 0.84, "pilot of all": 1.0, "moments": 1.0, "landmarks": 1.2, "statistics": 1.12, "model": 1.16,
    "contributions": 1.05, "publication": 1.15, "run": 0.9,
}  # fmt: skip
HANDLED = {
    "pilot": 0.02, "pilot of all": 0.02, "moments": 0.006, "a site's": 0.002, "landmarks": 0.015, "statistics": 0.003,
    "model": 0.02, "contributions": 0.003, "publication": 0.006, "run": 0.1,
}  # fmt: skip
RUN = "`apfl run`, all sites in one process"
Operations = Mapping[str, float]  # kind -> how many


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


@dataclass(frozen=True)
class Rates:
    """Operations a second on this machine: products, factorisations, decompositions, kernel entries.

    Those of rows are in single precision, those of sums in double.
    """

    single: float
    double: float
    cholesky: float
    eigen: float
    eigen_single: float
    kernel: float

    def seconds(self, operations: Operations) -> float:
        """What so many of each kind take."""
        return float(sum(n / vars(self)[kind] for kind, n in operations.items()))


@dataclass(frozen=True)
class Cost:
    """Of one federation: bytes of one site, memory at its peak, operations."""

    size: Size
    width: int
    traffic: Traffic  # of one site; integers at most, and about half of that once they are squeezed
    site_memory: int
    server_memory: int
    run_memory: int  # of all clients in one process, as `apfl run` has them; the width check goes by it, too
    pilot: Operations  # of a site: statistics and tables of every normalisation, if one is to be chosen
    pilot_server: Operations  # of the server: the maps, all sites' statistics, the primaries
    moments: Operations  # of a site: what landmarks are drawn from, if that is its rows' moments
    landmarks: Operations  # of the server: drawing them
    statistics: Operations  # of a site: map, products, the check before sending
    model: Operations  # of a site: left-out rows and refinement
    agreed_map: Operations  # of the server: the map by which it reads contributions, once
    contribution: Operations  # of the server: the check of one contribution
    publication: Operations  # of the server: gamma, primary, sketch
    run: Operations  # of all clients in one process

    @property
    def up(self) -> int:
        """Bytes of one site up."""
        return self.traffic.total_up

    @property
    def down(self) -> int:
        """Bytes to one site."""
        return self.traffic.total_down(1)

    def seconds(self, rates: Rates, megabits: float) -> dict[str, float]:
        """Of one core of a site and of the server, and of the server's line if all sites use it one after the other."""
        clients = self.size.clients

        def taken(what: str, operations: Operations) -> float:
            return HANDLED[what] + BESIDE[what] * rates.seconds(operations) if operations else 0.0

        return {
            "site: pilot": taken("pilot", self.pilot),
            "server: pilot": taken("pilot of all", self.pilot_server)
            + clients * HANDLED["contributions"] * bool(self.pilot),
            "site: moments": taken("moments", self.moments),
            "server: landmarks": taken("landmarks", self.landmarks)
            + clients * HANDLED["a site's"] * bool(self.moments),
            "site: statistics": taken("statistics", self.statistics),
            "site: personal model": taken("model", self.model),
            "server: contributions": rates.seconds(self.agreed_map)
            + clients * taken("contributions", self.contribution),
            "server: publication": taken("publication", self.publication),
            RUN: taken("run", self.run),
            "network, one site": 8e-6 * (self.up + self.down) / megabits,
            "network, server": 8e-6 * clients * (self.up + self.down) / megabits,
        }


def cost(size: Size, method: APFL | None = None) -> Cost:
    """What a federation of this size costs with this method.

    >>> made = cost(Size(rows=50_000, features=512, classes=10, clients=20, width=1024))
    >>> made.width, made.down >= made.traffic.down["publication"] > 0
    (1024, True)
    """
    method = method or APFL()
    d = size.width or method.widths(size.rows, size.features)[0]
    n, c = size.own, size.classes
    one_map = method.map == "landmarks"
    theirs = one_map and method.landmarks == "federation"
    full = theirs and size.rows >= ROWS_FOR_EACH_COLUMN * size.features
    pilots = one_map and method.normalise == "auto"
    first = of_pilot(n_points(size.rows), rows_of_pilot(n, size.rows), size.features) if pilots else (0, 0)
    server = of_server(d, size.features if one_map else 0, c, moments=full)
    return Cost(
        size, d, traffic(size, method, d),
        site_memory=INTERPRETER + max(first[0], of_site(d, n, size.features, c)),
        server_memory=INTERPRETER + max(first[1], server), run_memory=INTERPRETER + of_run(d, size.rows, 1),
        pilot=_site_pilot(size, method) if pilots else {}, pilot_server=_server_pilot(size, method) if pilots else {},
        moments=_moments(size, full) if theirs else {},
        landmarks=_landmarks(size.features, d, size.clients, full) if one_map else {},
        statistics=_statistics(size, d, one_map), model=_model(size, d, method),
        agreed_map=_one_map(d, size.features) if one_map else {}, contribution=_check(d, c),
        publication=_publication(d, c, size.clients, method), run=_run(size, d, method, full, pilots),
    )  # fmt: skip


def traffic(size: Size, method: APFL, d: int) -> Traffic:
    """The bytes of one site, by what they are. Integers weigh so much at most.

    ``normalise="auto"`` is taken to choose rows or roots, which need no scaling; with landmarks after a pilot that
    tries every candidate.
    """
    moments = needs_moments(method.normalise)
    n_in = size.features + (method.normalise in ("columns", "centred"))
    bits = method.integers([size.own] * size.clients, d)
    up = {"description": description_bytes(size.features, moments=moments)}
    down: dict[str, int] = {}
    if method.map == "landmarks":
        down["landmarks"] = landmarks_bytes(d, n_in, mean_squares=bool(bits))
        if method.landmarks == "federation":
            full = size.rows >= ROWS_FOR_EACH_COLUMN * n_in
            up["moments"] = SpreadEncoding(size.own, n_in, full).layout.n_bytes
    if bits:
        up["statistics"] = statistics_layout(d, size.classes, bits).n_bytes
    else:
        up["statistics"] = statistics_bytes(size.own, d + method.intercept, size.classes)
        up["echo"] = ECHO_BYTES
    if method.choice.open and method.scope != "client":
        up["table"] = len(method.choice.weights) * table_bytes(method.choice.grid(1.0).shape)
    width = d if method.map == "landmarks" else d + method.intercept
    sketch = method.sketch if method.choice.open else None
    dtype = torch.int16 if bits else torch.float64
    down["publication"] = publication_bytes(width, size.classes, sketch=sketch, dtype=dtype)
    if method.map == "landmarks" and method.normalise == "auto":
        fixed, own = _pilot(size, method, dtype)
        up["pilot"], down["pilot"] = fixed.up + own, fixed.down
    if method.normalise in ("standardise", "columns", "centred"):
        down["scaling"] = 16 * size.features
    return Traffic({name: [n] for name, n in up.items()}, down)


def _pilot(size: Size, method: APFL, dtype: torch.dtype) -> tuple[PilotBytes, int]:
    """What a pilot of all candidates adds, and the statistics of one site in it at most."""
    width = n_points(size.rows)
    shape = method.choice.grid(1.0).shape
    fixed = pilot_bytes(
        [width] * len(CANDIDATES), size.features, size.classes, size.rows, shape, method.sketch, dtype
    )  # fmt: skip
    return fixed, len(CANDIDATES) * statistics_layout(width, size.classes, BITS).n_bytes


# --------------------------------------------------------------------------------------------------- operations


def _all(*each: tuple[float, Operations]) -> Operations:
    """So many times each of these."""
    kinds = {kind for _, operations in each for kind in operations}
    return {kind: sum(times * operations.get(kind, 0.0) for times, operations in each) for kind in kinds}


def _run(size: Size, d: int, method: APFL, full: bool, pilots: bool) -> Operations:
    """`apfl run`: what sites and the server do but check each other, with each row mapped and decomposed once."""
    n, c, k, one_map = size.own, size.classes, size.clients, method.map == "landmarks"
    each = [(1, _own_sums(n, size.features, d, c, one_map)), (1, _own_table(n, d, c, method, one_map))]
    once = [(1, _publication(d, c, 0, method))]
    if one_map:
        once.append((1, _landmarks(size.features, d, 0, full)))
        each += (1, _moments(size, full)), (1, {"kernel": n * ROW, "double": d**2 * c})
    if pilots:
        w, some = n_points(size.rows), rows_of_pilot(n, size.rows)
        times = len(CANDIDATES)
        each += (times, _own_sums(some, size.features, w, c, True)), (times, _own_table(some, w, c, method, True, 1))
        once += (times, _pilot_map(size)), (1, _noise(size)), (times, _publication(w, c, 0, method))
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


def _own_table(n: int, d: int, c: int, method: APFL, landmarks: bool, weights: int | None = None) -> Operations:
    """Of one client: its rows are decomposed and left out, hits are counted, its refinement is solved."""
    m, betas = min(n, d), len(method.choice.grid(1.0).betas)
    weights = weights or len(method.choice.weights)
    hits = PASSES * (m + d * (n >= d)) + HITS * c * weights * betas
    scores = {
        "single": _left_out(n, d, c, weights * betas, method.sketch) + (0 if landmarks else 2 * n * d**2),
        "double": 2 * m**2 * c, "kernel": n * hits,
    }  # fmt: skip
    return _all((1, scores), (1, _decomposed(n, d, LEAST)))


def _site_pilot(size: Size, method: APFL) -> Operations:
    """The maps of the candidates, twice; their statistics; their tables."""
    n, d, c = rows_of_pilot(size.own, size.rows), n_points(size.rows), size.classes
    betas = len(method.choice.grid(1.0).betas)
    statistics = {
        "single": _mapped(n, size.features, d, True) + 2 * n * d**2 + 2 * n * d * c,
        "kernel": n * (size.features + d) + PACKED * d**2,
    }
    table = {
        "single": _mapped(n, size.features, d, True) + _left_out(n, d, c, betas, method.sketch),
        "kernel": n * (size.features + d + PASSES * min(n, d)) + HITS * n * c * betas,
    }
    tried = (2, _pilot_map(size)), (1, statistics), (1, table), (1, _decomposed(n, d, LEAST))
    return _all(*((len(CANDIDATES) * times, operations) for times, operations in tried), (1, _noise(size)))


def _server_pilot(size: Size, method: APFL) -> Operations:
    """The maps of the candidates, the check of all statistics, the primaries."""
    d = n_points(size.rows)
    kept = {"kernel": KEPT * d**2}
    tried = (
        (1, _pilot_map(size)), (size.clients, _check(d, size.classes)), (size.clients, kept),
        (1, _publication(d, size.classes, size.clients, method)),
    )  # fmt: skip
    return _all(*((len(CANDIDATES) * times, operations) for times, operations in tried), (1, _noise(size)))


def _noise(size: Size) -> Operations:
    """Normal variates, the same for all candidates."""
    return {"kernel": DRAWN * (n_points(size.rows) + SYNTHETIC) * size.features}


def _pilot_map(size: Size) -> Operations:
    """That of one candidate, and what tells mean squares."""
    d, features = n_points(size.rows), size.features
    points = {
        "single": SYNTHETIC * (2 * features * d + d**2 + 2 * leading(d) * d),
        "kernel": (d + SYNTHETIC) * (features + d),
    }
    return _all((1, points), (1, _one_map(d, features)))


def _moments(size: Size, full: bool) -> Operations:
    n, features = size.own, size.features
    return {"single": n * features**2 * full, "kernel": NORMALISED * n * features + PACKED * features**2 * full}


def _landmarks(features: int, d: int, clients: int, full: bool) -> Operations:
    """Points in orthogonal blocks; those that tell mean squares, too. Their kernel, its factor and its coordinates.

    Each site's moments are looked at before, by a factorisation.
    """
    n, m, each = d + SYNTHETIC, min(d, features), (1 + clients) * full
    one = _one_map(d, features)
    return {
        "single": SYNTHETIC * (2 * features * d + d**2 + 2 * leading(d) * d),
        "double": one["double"] + 3 * n * features * m + 2 * n * features**2 * full,
        "cholesky": one["cholesky"] + n * m**2 / 3 + features**3 / 3 * each,
        "kernel": DRAWN * n * features + (SYNTHETIC + d) * d + PACKED * features**2 / 2 * each,
    }


def _one_map(d: int, features: int) -> Operations:
    """Landmarks become a map: their kernel, its factor, the coordinates in which statistics travel."""
    r = leading(d)
    return {"double": 2 * d**2 * features + 2 * d**2 * r + (d - r) * r**2, "cholesky": d**3 / 3 + r**3 / 3}


def _statistics(size: Size, d: int, landmarks: bool) -> Operations:
    n, features, c, r = size.own, size.features, size.classes, leading(d)
    products = 2 * n * features * d + n * d**2 + 2 * n * d * c
    if not landmarks:
        return {"single": 2 * n * features * d, "double": products - 2 * n * features * d, "kernel": n * d / 4}
    turned = n * r**2 + 2 * n * r * (d - r)
    check, one = _check(d, c), _one_map(d, features)
    return {
        "single": products + n * d**2 + turned,
        "kernel": n * (features + d + ROW) + PACKED * d**2 + check["kernel"],  # hashes, packing
        "double": check["double"] + one["double"],
        "cholesky": check["cholesky"] + one["cholesky"],
    }


def _check(d: int, c: int) -> Operations:
    """A contribution is looked at by two factorisations."""
    return {"double": 2 * d**2 * c, "cholesky": 2 * d**3 / 3, "kernel": 12 * d**2}


def _model(size: Size, d: int, method: APFL) -> Operations:
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


def _publication(d: int, c: int, clients: int, method: APFL) -> Operations:
    """All contributions are read once more and added. gamma from a decomposition, or a band form and its factors."""
    by_band, chosen = d > EIGEN_WIDTH, method.gamma == "auto"
    r = leading(d)
    turned = 4 * r**3 + 4 * (d - r) * r**2 + 2 * (d - r) ** 2 * r if method.map == "landmarks" else 0
    return {
        "double": turned + 2 * d**2 * (c + method.sketch) + (d + BAND) * d**2 * (chosen and by_band),
        "cholesky": d**3 / 3, "eigen": _eigen(d) * (chosen and not by_band),
        "kernel": (8 + READ * clients) * d**2,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- rates


def measured_rates(size: int = 1024) -> Rates:
    """This machine's rates on one core, from operations of this width: about a second up to 1024, then four.

    Small matrices are factorised at a fraction of the rate of large ones; beyond `WIDEST` they are alike. Processor
    seconds of one thread are told: of several on a busy machine, each waits for the last, and rates come out ten times
    too low.
    """
    size = max(64, min(size, WIDEST))
    with threads(1):
        rows = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        single, system = rows.float(), rows.T @ rows + size * torch.eye(size, dtype=torch.float64)
        unit = rows / rows.norm(dim=1, keepdim=True)
        odd = size - ODD  # as many rows as sites have: no power of two
        small, wide = system[: min(odd, DECOMPOSED), : min(odd, DECOMPOSED)].contiguous(), system[:odd, :odd].float()
        return Rates(
            single=_rate(size**3, lambda: squared(single)),
            double=_rate(size**3, lambda: squared(rows)),
            cholesky=_rate(size**3 / 3, lambda: torch.linalg.cholesky(system)),
            eigen=_rate(9 * len(small) ** 3, lambda: eigh(small)),
            eigen_single=_rate(9 * odd**3, lambda: torch.linalg.eigh(wide)),
            kernel=_rate(size**2, lambda: kernel(unit[:, :1].float(), unit[:, :1].float())),
        )


def _rate(operations: float, work: Callable[[], Any]) -> float:
    def taken() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    first = taken()
    return operations / min(taken() for _ in range(5 if first < 0.1 else 2 if first < 0.5 else 1))
