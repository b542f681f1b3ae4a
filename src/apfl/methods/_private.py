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
from apfl.maths.landmarks import SYNTHETIC, draw_points, landmark_map
from apfl.maths.machine import check_width, over_clients
from apfl.maths.noise import FEWEST_BITS, SENSITIVITY, IntegerRows, accounted, gamma_for, positive
from apfl.maths.normalise import Normaliser, check_features, described, needs_moments, normaliser
from apfl.maths.privacy import epsilon_spent, noise_multiplier
from apfl.maths.wire import Traffic, landmarks_bytes
from apfl.methods._streams import Streams, public_origin

__all__ = ["PRIVATE_BITS", "WIDTH", "Noise", "Privacy", "check_private", "private_streams"]

Noise = Literal["central", "shares"]
PRIVATE_BITS = 24  # of bits="auto"
WIDTH = 1024  # of d_primary="auto": the number of rows must not decide it


@dataclass(frozen=True)
class Privacy:
    """What is asked for: the unit is one row, added or taken away."""

    epsilon: float
    delta: float
    noise: Noise = "central"
    colluders: int = 0

    @property
    def sigma(self) -> float:
        """Of an entry of the sum."""
        return SENSITIVITY * noise_multiplier(self.epsilon, self.delta)

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
    if landmarks == "federation":
        raise InputError(
            "epsilon with landmarks='federation' given: moments of all rows would be released without noise. Give a "
            "file of public features, or landmarks='free'"
        )
    if landmarks == "free" and needs_moments(normalise):
        raise InputError(
            f"epsilon with normalise='{normalise}' and landmarks='free' given: moments of all rows would decide it. "
            "Give normalise='root' (features that are never negative) or 'row', or public features as landmarks"
        )


def private_streams(
    clients: Sequence[Shard], n_classes: int, how: str, d: int, source: str, bits: int, seed: int, asked: Privacy
) -> Streams:
    """One centred landmark map for both streams, and the sum of the statistics with noise."""
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = clients[0].features
    normalise = _public_normaliser(how, clients, source)
    origin = public_origin(normalise, source, features)
    drawn = landmark_map(draw_points(d, 2 * seed, origin.spread)).like(features)
    mapped = centred(drawn, draw_points(SYNTHETIC, 2 * seed + 1, origin.spread).to(features.device))
    check_width(drawn.width, 2 * sum(map(len, clients)), 1, features.device)
    # In double precision: a row must not be longer than 1 by rounding.
    phis = over_clients(lambda shard: mapped(normalise(shard.features.double())), clients, features.device)
    encoding = IntegerRows(drawn.width, n_classes, bits)
    vector, sigma, account = _noisy_sum(encoding, phis, clients, asked, seed)
    down = landmarks_bytes(drawn.width, drawn.n_in, mean_squares=False) + 8 * (drawn.width + 1)
    traffic = Traffic({"statistics": [encoding.layout.n_bytes] * len(clients)}, {"landmarks": down})
    return Streams(
        normalise, mapped, mapped, phis, positive(encoding.decode(vector.to(features.device))), traffic,
        account | origin.account, bits, gamma_for(sigma, drawn.width),
    )  # fmt: skip


def _public_normaliser(how: str, clients: Sequence[Shard], source: str) -> Normaliser:
    """As the public features decide, if any do."""
    shared = None
    if needs_moments(how):
        shared = described(how, load_dataset(source, labels_optional=True).features.to(clients[0].features))
    made = normaliser(how, shared)
    check_features(made.how, [shard.features for shard in clients])
    return made


def _noisy_sum(
    encoding: IntegerRows, phis: Sequence[Tensor], clients: Sequence[Shard], asked: Privacy, seed: int
) -> tuple[Tensor, float, dict[str, Any]]:
    """The sum with its noise, the size of that, and the account."""
    shares, honest = (len(clients), asked.honest(len(clients))) if asked.noise == "shares" else (1, 1)
    share = asked.sigma / math.sqrt(honest)
    summed, cut = torch.zeros(encoding.layout.size, dtype=torch.int64), 0
    for phi, shard in zip(phis, clients, strict=True):
        own, outside = encoding.encode(within(phi), shard.labels)
        summed += own.cpu()
        cut += outside
    for k in range(shares):
        summed += encoding.noise(share, _generator(seed, k))
    spent = epsilon_spent(accounted(encoding, asked.sigma, honest), asked.delta)
    account = {
        "epsilon_spent": spent, "delta": asked.delta, "noise_sigma": share * math.sqrt(shares),
        "noise_mechanism": _mechanism(shares, honest), "released": "Phi'Phi, Phi'Y and class counts, once",
        "rounding": {"bits": encoding.bits, "digits": encoding.f, "cut": cut},
    }  # fmt: skip
    return summed, share * math.sqrt(shares), account


def _mechanism(shares: int, honest: int) -> str:
    if shares == 1:
        return "discrete Gaussian, once at the server"
    return f"discrete Gaussian, a share from each of {shares} clients; {honest} suffice"


def _generator(seed: int, share: int) -> np.random.Generator:
    """Of one share. In a simulation it follows from the seed; between machines nobody may know it."""
    digest = hashlib.sha256(f"{seed} noise {share}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
