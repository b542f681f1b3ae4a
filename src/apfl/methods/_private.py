"""`apfl` under differential privacy: what is released is one sum of integers with noise, and what follows from it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.load import load_dataset
from apfl.errors import InputError
from apfl.maths.centred import centred, within
from apfl.maths.landmarks import SYNTHETIC, Spread, draw_points, landmark_map
from apfl.maths.machine import check_width, over_clients
from apfl.maths.noise import FEWEST_BITS, SENSITIVITY, IntegerRows, accounted, gamma_for, moments, shrunk
from apfl.maths.normalise import Normaliser, check_features, described, needs_moments, normaliser
from apfl.maths.privacy import epsilon_of, noise_multiplier
from apfl.maths.wire import Traffic, landmarks_bytes
from apfl.methods._streams import Streams, public_origin

__all__ = ["MOMENTS", "PRIVATE_BITS", "WIDTH", "Noise", "Privacy", "check_private", "private_streams"]

Noise = Literal["central", "shares"]
PRIVATE_BITS = 24  # of bits="auto"
WIDTH = 1024  # of d_primary="auto": the number of rows must not decide it
MOMENTS = 0.1  # of the budget, as the inverse square of noise, for landmarks of everyone's moments (docs/privacy.md)
OF_STATISTICS = "Phi'Phi, Phi'Y and class counts, once"
OF_MOMENTS = "moments of the normalised rows, once"


@dataclass(frozen=True)
class Privacy:
    """What is asked for: the unit is one row, added or taken away."""

    epsilon: float
    delta: float
    noise: Noise = "central"
    colluders: int = 0

    def sigma(self, share: float = 1.0) -> float:
        """Of an entry of a sum that has this share of the budget: inverse squares of noise add up to the whole."""
        return SENSITIVITY * noise_multiplier(self.epsilon, self.delta) / math.sqrt(share)

    def honest(self, n_clients: int) -> int:
        """Shares that must suffice: of the fewest clients with whom a masked sum is opened, less the colluders."""
        left = 2 * n_clients // 3 + 1 - self.colluders
        if left < 1:
            raise InputError(
                f"colluders={self.colluders} of {n_clients} clients given: a sum is opened with "
                f"{2 * n_clients // 3 + 1}, and at least one of these must be honest"
            )
        return left


def check_private(map: str, landmarks: str, bits: int, normalise: str) -> None:
    """Refuse settings under which more than the noisy sum would depend on clients' rows."""
    if map != "landmarks":
        raise InputError(
            f"epsilon with map='{map}' given: only rows of the landmark map have a bounded length. Give map='landmarks'"
        )
    if bits < FEWEST_BITS:
        raise InputError(
            f"epsilon with bits={bits} given: noise is added to integers fine enough for single rows. Give bits="
            f"{FEWEST_BITS} to 32"
        )
    if landmarks in ("free", "federation") and needs_moments(normalise):
        raise InputError(
            f"epsilon with normalise='{normalise}' and landmarks='{landmarks}' given: moments of all rows would decide "
            "it, and have no noise. Give normalise='root' (features that are never negative) or 'row', or public "
            "features as landmarks"
        )


def private_streams(
    clients: Sequence[Shard], n_classes: int, how: str, d: int, source: str, bits: int, seed: int, asked: Privacy
) -> Streams:
    """One centred landmark map for both streams, and the sum of the statistics with noise."""
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = clients[0].features
    normalise = _public_normaliser(how, clients, source)
    first = _noisy_moments(clients, normalise, bits, asked, seed) if source == "federation" else None
    origin = public_origin(normalise, "free" if first else source, features)
    shared = first.spread if first else origin.spread
    drawn = landmark_map(draw_points(d, 2 * seed, shared)).like(features)
    mapped = centred(drawn, draw_points(SYNTHETIC, 2 * seed + 1, shared).to(features.device))
    check_width(drawn.width, 2 * sum(map(len, clients)), 1, features.device)
    # In double precision: a row must not be longer than 1 by rounding.
    phis = over_clients(lambda shard: mapped(normalise(shard.features.double())), clients, features.device)
    encoding, labels = IntegerRows(drawn.width, n_classes, bits), [shard.labels for shard in clients]
    released = _noisy_sum(encoding, phis, labels, asked, 1 - MOMENTS if first else 1.0, "noise", seed)
    down = landmarks_bytes(drawn.width, drawn.n_in, mean_squares=False) + 8 * (drawn.width + 1)
    traffic = Traffic({"statistics": [encoding.layout.n_bytes] * len(clients)}, {"landmarks": down})
    account = _account(asked, released, encoding, first.released if first else None)
    return Streams(
        normalise, mapped, mapped, phis, shrunk(encoding.decode(released.vector.to(features.device)), released.sigma),
        first.traffic + traffic if first else traffic, account | origin.account, bits,
        gamma_for(released.sigma, drawn.width),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Released:
    """A sum with its noise."""

    vector: Tensor
    sigma: float  # of the noise of an entry, of all shares together
    multiplier: float  # that is accounted for
    shares: int
    honest: int
    cut: int


@dataclass(frozen=True, eq=False)
class _Moments:
    spread: Spread
    released: _Released
    traffic: Traffic


def _noisy_moments(clients: Sequence[Shard], normalise: Normaliser, bits: int, asked: Privacy, seed: int) -> _Moments:
    """Moments of everyone's normalised rows, each at length one, from a sum with its own share of the budget.

    As statistics they are those of one class: the law of what a row changes is the same.
    """
    rows = over_clients(lambda shard: _unit(normalise(shard.features.double())), clients, clients[0].features.device)
    encoding = IntegerRows(rows[0].shape[1], 1, bits)
    none = [torch.zeros_like(shard.labels) for shard in clients]
    released = _noisy_sum(encoding, rows, none, asked, MOMENTS, "noise of moments", seed)
    shared = moments(encoding.decode(released.vector), released.sigma)
    return _Moments(shared, released, Traffic({"moments": [encoding.layout.n_bytes] * len(clients)}, rounds=1))


def _unit(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length == 0, 1, length)


def _public_normaliser(how: str, clients: Sequence[Shard], source: str) -> Normaliser:
    """As the public features decide, if any do."""
    shared = None
    if needs_moments(how):
        shared = described(how, load_dataset(source, labels_optional=True).features.to(clients[0].features))
    made = normaliser(how, shared)
    check_features(made.how, [shard.features for shard in clients])
    return made


def _noisy_sum(
    encoding: IntegerRows, phis: Sequence[Tensor], labels: Sequence[Tensor], asked: Privacy, share: float, purpose: str,
    seed: int,
) -> _Released:  # fmt: skip
    """The sum with noise for this share of the budget; no two purposes have the same noise."""
    shares, honest = (len(phis), asked.honest(len(phis))) if asked.noise == "shares" else (1, 1)
    sigma = asked.sigma(share)
    each = sigma / math.sqrt(honest)
    summed, cut = torch.zeros(encoding.layout.size, dtype=torch.int64), 0
    for phi, of in zip(phis, labels, strict=True):
        own, outside = encoding.encode(within(phi), of)
        summed += own.cpu()
        cut += outside
    for k in range(shares):
        summed += encoding.noise(each, _generator(seed, purpose, k))
    multiplier = accounted(encoding, sigma, honest)
    return _Released(summed, each * math.sqrt(shares), multiplier, shares, honest, cut)


def _account(asked: Privacy, released: _Released, encoding: IntegerRows, moments: _Released | None) -> dict[str, Any]:
    """What was released, and what that spends of the budget."""
    both = [each for each in (moments, released) if each is not None]
    told = {"noise_sigma_of_moments": moments.sigma} if moments else {}
    return {
        "epsilon_spent": epsilon_of([each.multiplier for each in both], asked.delta), "delta": asked.delta,
        "noise_sigma": released.sigma, **told, "noise_mechanism": _mechanism(released.shares, released.honest),
        "released": f"{OF_MOMENTS}; {OF_STATISTICS}" if moments else OF_STATISTICS,
        "rounding": {"bits": encoding.bits, "digits": encoding.f, "cut": sum(each.cut for each in both)},
    }  # fmt: skip


def _mechanism(shares: int, honest: int) -> str:
    if shares == 1:
        return "discrete Gaussian, once at the server"
    return f"discrete Gaussian, a share from each of {shares} clients; {honest} suffice"


def _generator(seed: int, purpose: str, share: int) -> np.random.Generator:
    """Of one share of one sum. In a simulation it follows from the seed; between machines nobody may know it."""
    digest = hashlib.sha256(f"{seed} {purpose} {share}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
