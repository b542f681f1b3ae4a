"""The paper's theorems, checked on given data and reported as measured differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.dither import uniform
from apfl.maths.integers import FAILS, Rounding, round_statistics, spectral_bound
from apfl.maths.landmarks import LandmarkMap, Spread, draw_points, landmark_map, spread
from apfl.maths.leaveout import fit_refinement
from apfl.maths.maps import FeatureMap, random_map
from apfl.maths.normalise import Normaliser
from apfl.maths.personalise import Choice, Rows, personalise, solve_primary
from apfl.maths.recursion import fold, upload
from apfl.maths.ridge import Statistics, one_hot, solve, statistics, total

__all__ = ["Check", "primary_bound", "verify"]

Map = FeatureMap | LandmarkMap
NORMALISE = Normaliser("row")


@dataclass(frozen=True)
class Check:
    """One statement, how far it is from holding exactly, and how far rounding may take it."""

    statement: str
    difference: float  # relative
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within rounding; NaN is not."""
        return self.difference <= self.tolerance


def verify(
    clients: Sequence[Shard],
    n_classes: int,
    *,
    width: int = 256,
    gamma: float = 1.0,
    beta: float = 1.0,
    seed: int = 0,
    map: str = "random",
    bits: int = 0,
) -> Iterator[Check]:
    """Check Theorems 1 to 3, the recursion and leaving, in float64, with two random maps or one of landmarks.

    With ``bits`` it goes on to statistics as integers: how far these take the primary, and whether choices move.
    """
    if bits and map != "landmarks":
        raise InputError(f"bits={bits} with map='{map}': only rows of the landmark map have a bounded length")
    clients = [Shard(shard.features.to("cpu", torch.float64), shard.labels.cpu()) for shard in clients]
    maps = _maps(clients, map, width, seed)
    streams = _Streams(maps, n_classes, gamma, beta)
    parts = [streams.statistics(shard) for shard in clients]
    primary = solve(total(parts), gamma)

    pooled = Shard(torch.cat([s.features for s in clients]), torch.cat([s.labels for s in clients]))
    yield Check(
        "Theorem 1: sum of the clients' statistics = least squares on the pooled rows",
        _difference(primary, streams.central(pooled)),
        1e-9,
    )

    gradients = [streams.gradient(shard, primary) for shard in clients]
    yield Check("Theorem 2: every client's refinement has gradient zero", max(gradients), 1e-9)

    moved = _reshuffle_others(clients, np.random.default_rng(seed))
    primary_moved = solve(total(streams.statistics(shard) for shard in moved), gamma)
    own, own_moved = streams.refinement(clients[0], primary), streams.refinement(moved[0], primary_moved)
    yield Check(
        "Theorem 3: a client's model stays the same while all other rows change hands",
        max(_difference(primary_moved, primary), _difference(own_moved, own)),
        1e-9,
    )

    # The recursion solves K systems in a row and each multiplies the error by a condition number: hence 1e-6.
    yield Check(
        "Equations 5 to 8: the paper's recursion = the sum",
        _difference(fold([upload(part, gamma) for part in parts], gamma), primary),
        1e-6,
    )

    if len(clients) > 1:
        left = solve(total(parts) - parts[-1], gamma)
        yield Check(
            "A client that left = a client that never joined", _difference(left, solve(total(parts[:-1]), gamma)), 1e-9
        )
    if bits:
        yield from _with_integers(clients, moved, streams, bits, seed)


def _maps(clients: Sequence[Shard], kind: str, width: int, seed: int) -> tuple[Map, Map]:
    """Two random maps; or one of landmarks, drawn once from everyone's moments, for both streams."""
    if kind == "random":
        n_in = clients[0].features.shape[1]
        primary, refinement = (random_map(n_in, width, "relu", 2 * seed + stream) for stream in (0, 1))
        return primary, refinement
    drawn = landmark_map(draw_points(width, 2 * seed, _spread(clients)))
    return drawn, drawn


def _spread(clients: Sequence[Shard]) -> Spread:
    return reduce(add, (spread(NORMALISE(shard.features), full=True) for shard in clients))


def _with_integers(
    clients: Sequence[Shard], moved: Sequence[Shard], streams: _Streams, bits: int, seed: int
) -> Iterator[Check]:
    """What holds exactly for integers, what holds to a bound, and whether choices moved."""
    drawn = streams.maps[0]
    assert isinstance(drawn, LandmarkMap)
    columns = drawn.mean_squares(draw_points(2048, 2 * seed + 1, _spread(clients)))
    rounding = Rounding.for_rows(bits, max(len(shard) for shard in (*clients, *moved)))

    outside = 0

    def rounded(shards: Sequence[Shard], first: int) -> list[Statistics]:
        nonlocal outside
        parts = []
        for k, shard in enumerate(shards):
            draw = uniform(seed * 1_000_003 + first + k, columns.device)
            part, saturated = round_statistics(streams.statistics(shard), columns, rounding, draw, drawn.basis)
            parts.append(part)
            outside += saturated
        return parts

    exact, parts = total(streams.statistics(shard) for shard in clients), rounded(clients, 0)
    others = total(rounded(moved, len(clients)))
    summed, gamma, scale = total(parts), streams.gamma, drawn.basis.dense * columns.sqrt()
    bound = primary_bound(exact, scale, rounding, max(len(clients), len(moved)), gamma)
    primary = scale.T @ solve(exact, gamma)
    why = f"; {outside} entries saturated, for which it does not hold" if outside else ""
    why = "; none for so small a gamma, use more bits" if math.isinf(bound) else why
    yield Check(
        f"Integers of {bits} bits: the primary is that of exact sums, to the bound{why}",
        _spectral(scale.T @ solve(summed, gamma), primary),
        bound,
    )
    yield Check(
        "Integers, Theorem 3: the primary stays while rows change hands, to twice the bound",
        _spectral(scale.T @ solve(others, gamma), primary),
        2 * bound,
    )
    if len(clients) > 1:
        left = solve(summed - parts[-1], gamma)
        yield Check(
            "Integers: a client that left = a client that never joined",
            _difference(left, solve(total(parts[:-1]), gamma)),
            1e-9,
        )
    yield _choices(clients, streams, exact, summed, seed)


def _choices(clients: Sequence[Shard], streams: _Streams, exact: Statistics, summed: Statistics, seed: int) -> Check:
    """Whether gamma and the settings of the refinement, chosen from integers, are those of exact sums."""
    rows = [Rows(streams.rows(shard, 0), streams.rows(shard, 1), shard.labels) for shard in clients]
    choice = Choice("auto", "auto", "auto", "federation", 0.03)

    def chosen(stats: Statistics) -> list[float]:
        primary = solve_primary(stats, "auto")
        made = personalise(rows.__getitem__, [len(own.labels) for own in rows], primary, choice, 0, seed)
        # gamma and beta in units that rounding itself moves in its last digits
        return [float(f"{value:.2g}") for value in (primary.gamma, *made.clients[0].setting)]

    before, after = chosen(exact), chosen(summed)
    names = ("gamma", "beta", "balance", "tau")
    moves = [f"{n} {a:g} -> {b:g}" for n, a, b in zip(names, before, after, strict=True) if a != b]
    told = "moved: " + ", ".join(moves) if moves else "are those of exact sums"
    return Check(f"Integers: choices {told}", float(len(moves)), math.inf)


class _Streams:
    """Both streams with fixed settings, as plain formulas."""

    def __init__(self, maps: tuple[Map, Map], n_classes: int, gamma: float, beta: float) -> None:
        self.maps, self.n_classes, self.gamma, self.beta = maps, n_classes, gamma, beta

    def rows(self, shard: Shard, stream: int) -> Tensor:
        return self.maps[stream](NORMALISE(shard.features))

    def statistics(self, shard: Shard) -> Statistics:
        return statistics(self.rows(shard, 0), one_hot(shard.labels, self.n_classes))

    def residual(self, shard: Shard, primary: Tensor) -> Tensor:
        return one_hot(shard.labels, self.n_classes) - self.rows(shard, 0) @ primary

    def refinement(self, shard: Shard, primary: Tensor) -> Tensor:
        return fit_refinement(self.rows(shard, 1), self.residual(shard, primary), self.beta)

    def gradient(self, shard: Shard, primary: Tensor) -> float:
        """|Psi'(E - Psi P) - beta P| / |Psi'E|."""
        psi, residual = self.rows(shard, 1), self.residual(shard, primary)
        refinement = fit_refinement(psi, residual, self.beta)
        gradient = psi.T @ (residual - psi @ refinement) - self.beta * refinement
        return float(gradient.norm() / (psi.T @ residual).norm().clamp_min(1e-300))

    def central(self, pooled: Shard) -> Tensor:
        """Another route to the same minimum: QR of the rows with sqrt(gamma) I below them, no normal equations."""
        phi = self.rows(pooled, 0)
        ridge_rows = self.gamma**0.5 * torch.eye(phi.shape[1], dtype=phi.dtype)
        targets = torch.cat([one_hot(pooled.labels, self.n_classes), phi.new_zeros(phi.shape[1], self.n_classes)])
        solution: Tensor = torch.linalg.lstsq(torch.cat([phi, ridge_rows]), targets, driver="gels").solution
        return solution


def _reshuffle_others(clients: Sequence[Shard], rng: np.random.Generator) -> list[Shard]:
    """The first client as it is; all other rows dealt out anew, in other numbers."""
    if len(clients) < 2:
        return list(clients)
    features = torch.cat([shard.features for shard in clients[1:]])
    labels = torch.cat([shard.labels for shard in clients[1:]])
    n_parts = min(len(clients), len(labels))
    cuts = np.sort(rng.permutation(np.arange(1, len(labels)))[: n_parts - 1])
    return [
        clients[0],
        *(
            Shard(features[torch.from_numpy(rows)], labels[torch.from_numpy(rows)])
            for rows in np.split(rng.permutation(len(labels)), cuts)
        ),
    ]


def primary_bound(exact: Statistics, basis: Tensor, rounding: Rounding, n_clients: int, gamma: float) -> float:
    """What the relative spectral error of the primary does not pass, but for `FAILS`.

    In the coordinates that travel: ``basis`` is R sqrt(D) (`apfl.maths.integers`), (d, d) and lower triangular.

        |G~ - G| / |G| <= (|H| / |G| + |F|) / (smallest eigenvalue of A - |F|),     (A + F) G~ = B + H

    |F| by `spectral_bound`; |H| by the same inequality for a d x c matrix. Infinite if gamma is too small to tell.
    """
    d, c = exact.width, exact.n_classes
    system = exact.autocorrelation.clone()
    system.diagonal().add_(gamma)
    turned = torch.linalg.solve_triangular(basis, system, upper=False)
    lowest = float(torch.linalg.eigvalsh(torch.linalg.solve_triangular(basis, turned.T, upper=False))[0])
    chance = math.log((d + c) / FAILS)
    right = rounding.cross.step * (math.sqrt(2 * chance * n_clients * max(d, c) / 4) + 2 / 3 * chance)
    left = spectral_bound(rounding, n_clients, d)
    size = float(torch.linalg.matrix_norm(basis.T @ solve(exact, gamma), 2))
    return (right / size + left) / (lowest - left) if lowest > left else math.inf


def _spectral(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.matrix_norm(a - b, 2) / torch.linalg.matrix_norm(b, 2).clamp_min(1e-300))


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
