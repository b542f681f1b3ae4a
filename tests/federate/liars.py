"""Digits at five members, one of whom sends what it likes, as far as the checks let it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.contribution import Repeats, _seal, _seal_integers
from apfl.federate.fitting import _own_landmarks
from apfl.federate.landmarks import agreed_maps, seal_spread
from apfl.federate.messages import open_description, seal_description, seal_table
from apfl.maths.dither import uniform
from apfl.maths.landmarks import spread
from apfl.maths.leaveout import echo
from apfl.maths.normalise import Moments
from apfl.maths.ridge import Statistics, one_hot, statistics
from apfl.maths.wire import message

NAMES = tuple(map(str, range(10)))
LIAR = "site-4"
Lie = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # features and labels, as they are told


def digits_sites(folder: Path, *, skewed: bool = False, seed: int = 0) -> list[Site]:
    """Five sites of about 270 rows, and 90 to test on; the last is the liar. Skewed: half the rows go by class."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    features, labels = torch.from_numpy(digits.data).float(), torch.from_numpy(digits.target).long()
    order = rng.permutation(len(labels))
    where = np.empty(len(labels), np.int64)
    where[order] = np.arange(len(labels)) % 5
    if skewed:
        where = np.where(rng.random(len(labels)) < 0.5, digits.target // 2, where)
    sites = []
    for k in range(5):
        rows = order[where[order] == k]
        train, test = (Shard(features[some], labels[some]) for some in np.split(rows, [3 * len(rows) // 4]))
        sites.append(Site(folder / "sites", f"site-{k}", train, NAMES, test))
    return sites


def truth(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its rows as they are."""
    return features, labels


def flipped(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every label wrong."""
    return features, (labels + 1) % 10


def noise(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No rows at all."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(16 * rng.random(features.shape)).float(), torch.from_numpy(
        rng.integers(10, size=len(labels))
    )


def ten_rows(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of each class again and again: each is fitted at no cost, which talks `gcv` into a gamma near zero."""
    first = torch.tensor([int((labels == c).nonzero()[0]) for c in range(10)])[torch.arange(len(labels)) % 10]
    return features[first], labels[first]


def next_means(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a class are the mean of the next class: no rows with these class sums have less scatter."""
    means = torch.stack([features[labels == c].mean(0) for c in range(10)])
    return means[(labels + 1) % 10], labels


def two_swapped(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two classes only, each called the other: all weight goes against two classes that are alike."""
    own = ((labels == 3) | (labels == 8)).nonzero()[:, 0]
    rows = own[torch.arange(len(labels)) % len(own)]
    return features[rows], 11 - labels[rows]


def sink(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Four of five rows are called by one class."""
    return features, torch.where(torch.arange(len(labels)) % 5 < 4, torch.zeros_like(labels), labels)


@dataclass(frozen=True)
class Attack:
    """What the liar sends."""

    lie: Lie = flipped
    weight: int = 1  # that it claims for each of its rows
    times: int = 1  # as many rows as it has, of its lie
    hits: tuple[int, int, int] | None = None  # where its table has all rows right; elsewhere none
    of_weight: int = 0  # the place of the weight on the primary where that is so
    far: float = 0.0  # from the origin, of the features that it describes
    heavy: float = 1.0  # what it multiplies activated features with
    copied: bool = False  # whether it says that all its rows are copies of one
    nonce: str = ""  # of one who has left and comes back
    echoed: bool = False  # whether its echo says that all its rows are the same one


def attacked(sites: list[Site], folder: Path, draft: Terms, attack: Attack | None) -> tuple[Coordinator, bytes, bytes]:
    """The federation up to its choice of settings, with a liar or (None) without: server, agreement, choice."""
    server = Coordinator(folder / "server", draft)
    for site in sites:
        data = site.describe(server.invitation())
        if attack and site.name == LIAR:
            data = _described(data, server.draft, attack)
        receipt = server.describe(data, site.name)
        assert receipt.ok, receipt
    if server.draft.landmarked:
        _spread(server, sites, attack)
    agreement = server.settle()
    for site in sites:
        if server.draft.landmarked:
            site.keep_landmarks(agreement, server.landmarks())
        lies = attack if site.name == LIAR else None
        receipt = server.accept(lie_of(site, server.terms, lies) if lies else site.statistics(agreement), site.name)
        assert receipt.ok, receipt
    server.publish()
    for site in sites:
        data = site.table(agreement, server.deliver(site.name))
        if attack and attack.hits and site.name == LIAR:
            data = _table(server, attack.hits, attack.of_weight)
        receipt = server.table(data, site.name)
        assert receipt.ok, receipt
    return server, agreement, server.choose()


def _spread(server: Coordinator, sites: list[Site], attack: Attack | None) -> None:
    """Everyone's moments, the liar's as those of its lie, each row as often as it claims."""
    outline = server.outline()
    for site in sites:
        data = site.spread(outline)
        if attack and site.name == LIAR:
            terms = Terms.from_json(outline)
            rows = terms.normaliser()(attack.lie(site.train.features, site.train.labels)[0])
            own, w = spread(rows, full=terms.spread == "full"), attack.weight
            told = replace(own, n_samples=own.n_samples * w, sums=own.sums * w, products=own.products * w)
            data = seal_spread(told, terms, LIAR, uniform(0, torch.device("cpu")))
        receipt = server.spread(data, site.name)
        assert receipt.ok, receipt


def lie_of(site: Site, terms: Terms, attack: Attack) -> bytes:
    """The statistics of the liar: consistent in themselves, and of no rows that it has."""
    features, labels = attack.lie(site.train.features, site.train.labels)
    landmarks = site.agreed_landmarks(terms)
    phi = agreed_maps(terms, features, landmarks)[0](terms.normaliser()(features)) * attack.heavy
    true, w = statistics(phi, one_hot(labels, 10)), attack.weight
    matrix = true.autocorrelation * w
    matrix.diagonal().add_(1e-9 * float(matrix.diagonal().mean()))  # few distinct rows would round to an indefinite one
    told = Statistics(
        matrix, true.crosscorrelation * w, true.class_counts * w, true.n_samples * w, true.target_energy * w
    )
    heard = echo(site.train.features)
    if attack.echoed:
        heard = torch.zeros_like(heard)
        heard[0] = told.n_samples
    repeats = Repeats(told.n_samples - 1 if attack.copied else 0, heard)
    if landmarks is not None:
        encoding = landmarks.encoding(terms)
        told = replace(told, n_copies=repeats.n_copies, echo=repeats.echo)
        vector, saturated = encoding.encode(told, uniform(0, torch.device("cpu")))
        return _seal_integers(encoding, vector, saturated, terms, site.name, attack.nonce)
    return _seal("triangle", message(told, terms.dtype), terms, site.name, attack.nonce, repeats)


def _described(data: bytes, draft: Terms, attack: Attack) -> bytes:
    told = open_description(data, draft)
    more = attack.weight * attack.times
    n, own = told.n_samples * more, told.moments
    if own is not None:
        mean = own.sums / own.n_samples + attack.far
        own = Moments(n, n * mean, n * (mean.square() + 1 + attack.far**2), own.sizes * more)
    return seal_description(replace(told, n_samples=n, moments=own), draft)


def _table(server: Coordinator, best: tuple[int, int, int], of_weight: int) -> bytes:
    row = server.ledger.contribution_of(LIAR)
    assert row is not None
    hits = torch.zeros(len(server.terms.choice.weights), *server.terms.grid(1.0).shape, dtype=torch.int64)
    hits[of_weight][tuple(slice(max(at - 1, 0), at + 2) for at in best)] = row["n"]  # settings count with neighbours
    return seal_table(server.terms, LIAR, 1, hits.view(server.terms.table_shape))


def alone_accuracy(site: Site, terms: Terms) -> float:
    """Of the same client without anyone: ridge with the same map, its penalty chosen by its own left-out rows.

    On landmarks the client draws its own. Another route than apfl's: the hat matrix itself, for each penalty.
    """
    assert site.test is not None
    scale = terms.normaliser()
    own_map = (
        terms.maps(site.train.features)[1]
        if not terms.landmarked
        else _own_landmarks(terms, scale, site.train.features)
    )
    psi, psi_test = (own_map(scale(rows)).double() for rows in (site.train.features, site.test.features))
    targets, best = one_hot(site.train.labels, 10), (-1, torch.empty(0))
    for beta in float(psi.square().sum(1).mean()) * 10 ** torch.arange(-2, 1.01, 0.5):
        inverse = torch.linalg.inv(psi @ psi.T + beta * torch.eye(len(psi)))
        hat = psi @ psi.T @ inverse
        left_out = (hat @ targets - hat.diagonal()[:, None] * targets) / (1 - hat.diagonal())[:, None]
        right = int((left_out.argmax(1) == site.train.labels).sum())
        best = max(best, (right, psi.T @ inverse @ targets), key=lambda each: each[0])
    return float(((psi_test @ best[1]).argmax(1) == site.test.labels).double().mean())
