"""The maps of the two streams, every client's rows through them, and the sum of the statistics: random or landmarks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.load import load_dataset
from apfl.errors import InputError
from apfl.maths.bits import Layout, sizes_of, squeezed
from apfl.maths.centred import CentredMap
from apfl.maths.dither import Dither, dither
from apfl.maths.integers import (
    OF_ONE_LENGTH,
    Encoding,
    Repeats,
    Rounding,
    add_integers,
    products_in,
    spectral_bound,
)  # fmt: skip
from apfl.maths.landmarks import (
    ROWS_FOR_EACH_COLUMN,
    SYNTHETIC,
    LandmarkMap,
    Spread,
    draw_points,
    landmark_map,
    no_spread,
    spread,
)  # fmt: skip
from apfl.maths.machine import alike, check_width, over_clients
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser
from apfl.maths.personalise import Primary, Shared
from apfl.maths.ridge import Statistics, one_hot
from apfl.maths.spread_encoding import SpreadEncoding
from apfl.maths.wire import Traffic, from_columns, landmarks_bytes, spread_bytes, to_columns
from apfl.methods._analytic import mapped, mapped_and_summed, upload_bytes
from apfl.models.landmark import LandmarkModel

__all__ = [
    "PUBLIC",
    "Map",
    "Published",
    "Streams",
    "Summed",
    "draw_landmarks",
    "folded",
    "landmark_origin",
    "landmark_streams",
    "public_origin",
    "summed_landmarks",
]

Map = FeatureMap | LandmarkMap
PUBLIC = "public"  # a file of public features, in the terms of a federation: its server alone has it
NUMBERS_ON_A_GPU = 2**27  # integers that are rounded at once: half a gigabyte
COLUMNS = 2**11  # of models that are folded at once


@dataclass(frozen=True, eq=False)
class Streams:
    """What a federation agreed on, and what its clients' rows gave under it."""

    normalise: Normaliser
    primary_map: Map | CentredMap
    refinement_map: Map | CentredMap
    phis: Sequence[Tensor]  # Phi_k of each client
    stats: Statistics  # summed
    traffic: Traffic  # so far: of the statistics, the landmarks and a pilot
    account: dict[str, Any] = field(default_factory=dict)  # for the record
    bits: int = 0  # of an entry of the statistics; 0: float64
    gamma: float | None = None  # under noise, what that asks for; then nothing but these statistics is known of rows

    @property
    def precision(self) -> dict[str, str]:
        """Of rows, of the products behind the sums, and of compared hits; all else is in double precision."""
        products = products_in(self.phis[0], self.bits) if self.bits else torch.float64
        used = {"rows": self.phis[0].dtype, "products": products, "hits": torch.float32}
        return {what: str(dtype).removeprefix("torch.") for what, dtype in used.items()}

    def psi_of(self, clients: Sequence[Shard]) -> Callable[[int], Tensor]:
        """Psi of each client behind Phi_k, by its place."""
        if self.refinement_map is self.primary_map:
            return self.phis.__getitem__
        return mapped(clients, self.normalise, self.refinement_map)

    def psi(self, features: Tensor, phi: Tensor) -> Tensor:
        """Psi of a client's features; with one map for both streams it is Phi."""
        if self.refinement_map is self.primary_map:
            return phi
        return self.refinement_map(self.normalise(features))


class Published(Primary):
    """A primary as clients are told it beside integers: in 16 bits with a scale for each column, as is the sketch."""

    @staticmethod
    def of(primary: Primary) -> Published:
        told = {each.name: getattr(primary, each.name) for each in fields(primary)}
        return Published(**{**told, "weights": _told(primary.weights)})

    def with_leverage(self, sketch_width: int, seed: int) -> Shared:
        exact = super().with_leverage(sketch_width, seed)
        return exact if exact.sketch is None else replace(exact, sketch=_told(exact.sketch))


def _told(values: Tensor) -> Tensor:
    return from_columns(*to_columns(values))


def folded(made_of: Streams, weights: Iterable[Tensor], priors: Sequence[Tensor | None]) -> Iterator[LandmarkModel]:
    """Models of one matrix: phi(z)'W = k(z, V) A. Many are folded at once, which is one solve with many columns."""
    ahead, left = iter(weights), iter(priors)
    while some := [*islice(ahead, max(1, COLUMNS // made_of.stats.n_classes))]:
        found, offsets = _folded(made_of, torch.cat(some, 1))
        parts = torch.chunk(found, len(some), 1)
        more = [None] * len(some) if offsets is None else torch.chunk(offsets, len(some))
        for own, offset, prior in zip(parts, more, islice(left, len(some)), strict=True):
            told = offset if prior is None else prior if offset is None else offset + prior
            yield LandmarkModel(_landmarks(made_of), own.contiguous(), made_of.normalise, prior=told)


def _folded(made_of: Streams, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(made_of.primary_map, CentredMap):
        return made_of.primary_map.fold(weights)
    return _landmarks(made_of).fold(weights), None


def _landmarks(made_of: Streams) -> LandmarkMap:
    found = made_of.primary_map
    found = found.landmarks if isinstance(found, CentredMap) else found
    assert isinstance(found, LandmarkMap)
    return found


def landmark_streams(
    clients: Sequence[Shard],
    n_classes: int,
    normalise: Normaliser,
    d: int,
    source: str,
    bits: int,
    seed: int,
    repeats: Sequence[Repeats] | None = None,
) -> Streams:
    """One landmark map for both streams; statistics as integers of so many bits, or with 0 as they are.

    Integers tell the clients' ``repeats`` too.
    """
    check_width(d, 2 * sum(map(len, clients)), 1, clients[0].features.device)  # rows are float64
    origin = landmark_origin(clients, normalise, source, bits, seed)
    drawn, columns = draw_landmarks(d, seed, origin.spread, clients[0].features)
    summed = summed_landmarks(clients, n_classes, normalise, drawn, columns if bits else None, bits, seed, repeats)
    landmarks = {"landmarks": landmarks_bytes(drawn.width, drawn.n_in, mean_squares=bits > 0)}
    traffic = origin.traffic + Traffic({"statistics": summed.sizes}, landmarks)
    return Streams(normalise, drawn, drawn, summed.phis, summed.stats, traffic, summed.account | origin.account, bits)


@dataclass(frozen=True, eq=False)
class Summed:
    """Every client's Phi_k, the sum of the statistics, what each client's weigh, and what rounding did."""

    phis: Sequence[Tensor]
    stats: Statistics
    sizes: Sequence[int]
    account: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Origin:
    """Where landmarks are drawn from, and what each client sends for it."""

    spread: Spread
    traffic: Traffic = field(default_factory=Traffic)
    account: dict[str, Any] = field(default_factory=dict)


def landmark_origin(clients: Sequence[Shard], normalise: Normaliser, source: str, bits: int, seed: int) -> _Origin:
    """Where the landmarks of these clients come from, and what that costs."""
    features = clients[0].features
    if source != "federation":
        return public_origin(normalise, source, features)
    n_in = normalise.width(features.shape[1])
    full = sum(map(len, clients)) >= ROWS_FOR_EACH_COLUMN * n_in
    rounded = bits > 0 and normalise.how in OF_ONE_LENGTH
    summed, sizes = _summed_spread(clients, normalise, full, rounded, seed)
    return _Origin(summed, Traffic({"moments": sizes}, rounds=1))


def public_origin(normalise: Normaliser, source: str, like: Tensor) -> _Origin:
    """Of landmarks that no client's rows decide: free ones, or those of a file of public features."""
    n_features = like.shape[1]
    n_in = normalise.width(n_features)
    if source == "free":
        return _Origin(no_spread(n_in))
    if source == PUBLIC:
        raise InputError(
            "landmarks='public' given: so the terms of a federation call a file of the server. Name the file"
        )
    public = load_dataset(source, labels_optional=True)
    if public.features.shape[1] != n_features:
        raise InputError(
            f"landmarks={source} has {public.features.shape[1]} features, the clients have {n_features}: "
            "give features of the same backbone"
        )
    rows = normalise(public.features.to(like.device, torch.float64))  # whatever the clients' rows are
    told = {"file": Path(source).name, "rows": len(rows), "sha256": public.sha256}
    return _Origin(spread(rows, full=len(rows) >= ROWS_FOR_EACH_COLUMN * n_in), account={"landmarks": told})


def summed_landmarks(
    clients: Sequence[Shard],
    n_classes: int,
    normalise: Normaliser,
    drawn: LandmarkMap,
    columns: Tensor | None,
    bits: int,
    seed: int,
    repeats: Sequence[Repeats] | None = None,
    purpose: str = "statistics",
) -> Summed:
    """One map for all clients' rows; without ``columns`` nothing is rounded.

    No two messages of a client are rounded by the same random numbers: ``purpose`` tells them apart.
    """
    if columns is None:
        phis, stats = mapped_and_summed(clients, n_classes, normalise, drawn)
        return Summed(phis, stats, upload_bytes(clients, stats))
    phis = _mapped(clients, normalise, drawn)
    rounding = Rounding.for_rows(bits, max(map(len, clients)))
    encoding = Encoding(rounding, columns, n_classes, drawn.basis)
    return _rounded(clients, phis, encoding, seed, repeats or [(0, None)] * len(clients), purpose)


def draw_landmarks(d: int, seed: int, shared: Spread, like: Tensor) -> tuple[LandmarkMap, Tensor]:
    """The map, and D of its columns over fresh synthetic points, float32 (d,), as both travel."""
    drawn = landmark_map(draw_points(d, 2 * seed, shared).to(like.device))
    return drawn, drawn.mean_squares(draw_points(SYNTHETIC, 2 * seed + 1, shared).to(like.device).float()).float()


def _summed_spread(
    clients: Sequence[Shard], normalise: Normaliser, full: bool, rounded: bool, seed: int
) -> tuple[Spread, list[int]]:
    """The sum of the clients' moments, and what each client's weigh."""
    device, n_in = clients[0].features.device, normalise.width(clients[0].features.shape[1])

    rows_of = mapped(clients, normalise, lambda rows: rows)

    def own(k: int) -> Spread:
        return spread(rows_of(k), full=full)

    if not rounded:
        return reduce(operator.add, map(own, range(len(clients)))), [spread_bytes(n_in, full=full)] * len(clients)
    encoding = SpreadEncoding(max(map(len, clients)), n_in, full)
    summed, turn = torch.zeros(encoding.layout.size, dtype=torch.int64, device=device), Lock()

    def add(bucket: Sequence[int]) -> Tensor:
        draw = Dither.together([dither(own_seed(seed, k), "spread", device) for k in bucket])
        vectors, _ = encoding.encode_each([own(k) for k in bucket], draw)
        with turn:  # sums of integers do not depend on their order
            summed.add_(vectors.sum(0))
        return sizes_of(encoding.layout, vectors)

    buckets = _together(clients, encoding.layout.size)
    sizes = _bytes_of(encoding.layout, buckets, over_clients(add, buckets, device))
    return encoding.decode(summed), sizes


def _together(clients: Sequence[Shard], n_numbers: int) -> list[list[int]]:
    """Clients whose vectors of so many numbers are made at once; on a CPU one after another."""
    device, sizes = clients[0].features.device, [*map(len, clients)]
    most = 1 if device.type == "cpu" else max(1, NUMBERS_ON_A_GPU // n_numbers)
    return alike(sizes, most * max(sizes), most)


def _bytes_of(layout: Layout, buckets: Sequence[Sequence[int]], sizes: Sequence[Tensor]) -> list[int]:
    """What each client's vector weighs, by `sizes_of` those of each bucket: a GPU is asked once for all."""
    found = [each.n_bytes for each in squeezed(layout, torch.cat([*sizes]))]
    return [n_bytes for _, n_bytes in sorted(zip((k for bucket in buckets for k in bucket), found, strict=True))]


def _mapped(clients: Sequence[Shard], normalise: Normaliser, drawn: LandmarkMap) -> list[Tensor]:
    device, rows_of, places = clients[0].features.device, mapped(clients, normalise, drawn), range(len(clients))
    return over_clients(rows_of, places, device) if device.type == "cpu" else [*map(rows_of, places)]


def _rounded(
    clients: Sequence[Shard],
    phis: Sequence[Tensor],
    encoding: Encoding,
    seed: int,
    repeats: Sequence[Repeats],
    purpose: str,
) -> Summed:
    """The sum of the statistics as their integers tell them."""
    device, rounding = clients[0].features.device, encoding.rounding
    outside: list[int] = []
    summed = torch.zeros(encoding.layout.size, dtype=torch.int64, device=device)
    targets = one_hot(torch.cat([shard.labels for shard in clients]), encoding.n_classes)
    own_targets, turn = torch.split(targets, [*map(len, clients)]), Lock()

    def add(bucket: Sequence[int]) -> Tensor:
        phi, target = ([each[k] for k in bucket] for each in (phis, own_targets))
        draws = [dither(own_seed(seed, k), purpose, device) for k in bucket]
        vectors, saturated = encoding.encode_each(phi, target, draws, [repeats[k] for k in bucket])
        with turn:  # sums of integers do not depend on their order
            for vector in vectors if device.type == "cpu" else [vectors.sum(0)]:
                add_integers(summed, vector)
            outside.extend(saturated)
        return sizes_of(encoding.layout, vectors)

    buckets = _together(clients, encoding.layout.size)
    sizes = _bytes_of(encoding.layout, buckets, over_clients(add, buckets, device))
    bound = spectral_bound(rounding, len(clients), len(encoding.columns))
    told = {"bits": rounding.bits, "step": rounding.step, "saturated": sum(outside), "spectral_bound": bound}
    return Summed(phis, encoding.decode(summed), sizes, {"rounding": told})


def own_seed(seed: int, client: int) -> int:
    """Of a client's rounding; between machines a site draws it and keeps it to itself."""
    return (seed * 1_000_003 + client) % 2**63
