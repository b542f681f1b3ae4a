"""What a federation of `apfl` costs before there is one: bytes, memory and seconds for a site, the server, the network.

Bytes come from the one byte counter (`apfl.maths.wire`). Memory is that of the matrices that are held at once. Seconds
are operations (`apfl.experiments.operations`) over the rates of one core (`apfl.experiments.rates`), which a second of
measuring tells. All sites are taken to have equally many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apfl.experiments.operations import (
    Size,
    check,
    one_map,
    publication,
    server_landmarks,
    server_pilot,
    site_model,
    site_moments,
    site_pilot,
    site_statistics,
    whole_run,
)
from apfl.experiments.rates import Operations, Rates
from apfl.maths.integers import statistics_layout
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN
from apfl.maths.memory import INTERPRETER, of_pilot, of_run, of_server, of_site
from apfl.maths.normalise import needs_moments
from apfl.maths.pilot import BITS, CANDIDATES, PilotBytes, n_points, pilot_bytes, rows_of_pilot
from apfl.maths.spread_encoding import SpreadEncoding
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

__all__ = ["RUN", "Cost", "cost", "traffic"]

RUN = "`apfl run`, all sites in one process"
# From measured settings (docs/benchmarks.md). Copies, packing and hashes are beside what is counted; files and messages
# take so many seconds.
BESIDE = {
    "pilot": 0.84, "pilot of all": 1.0, "moments": 1.0, "landmarks": 1.2, "statistics": 1.12, "model": 1.16,
    "contributions": 1.05, "publication": 1.15, "run": 0.9,
}  # fmt: skip
HANDLED = {
    "pilot": 0.02, "pilot of all": 0.02, "moments": 0.006, "moments of a site": 0.002, "landmarks": 0.015,
    "statistics": 0.003,    "model": 0.02, "contributions": 0.003, "publication": 0.006, "run": 0.1,
}  # fmt: skip


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
            + clients * HANDLED["moments of a site"] * bool(self.moments),
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
    landmarks = method.map == "landmarks"
    theirs = landmarks and method.landmarks == "federation"
    full = theirs and size.rows >= ROWS_FOR_EACH_COLUMN * size.features
    pilots = landmarks and method.normalise == "auto"
    first = of_pilot(n_points(size.rows), rows_of_pilot(n, size.rows), size.features) if pilots else (0, 0)
    server = of_server(d, size.features if landmarks else 0, c, moments=full)
    return Cost(
        size, d, traffic(size, method, d),
        site_memory=INTERPRETER + max(first[0], of_site(d, n, size.features, c)),
        server_memory=INTERPRETER + max(first[1], server), run_memory=INTERPRETER + of_run(d, size.rows, 1),
        pilot=site_pilot(size, method) if pilots else {}, pilot_server=server_pilot(size, method) if pilots else {},
        moments=site_moments(size, full) if theirs else {},
        landmarks=server_landmarks(size.features, d, size.clients, full) if landmarks else {},
        statistics=site_statistics(size, d, landmarks), model=site_model(size, d, method),
        agreed_map=one_map(d, size.features) if landmarks else {}, contribution=check(d, c),
        publication=publication(d, c, size.clients, method), run=whole_run(size, d, method, full, pilots),
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
