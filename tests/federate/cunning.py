"""Lies of a member that knows how sites compare: each leaves the primary as good as it can look, and no better."""

from __future__ import annotations

from collections.abc import Callable

import torch

from apfl.data.federation import Shard
from apfl.federate import Site
from tests.federate.liars import LIAR, Attack, Lie, flipped, next_means, sink, truth

Cunning = Callable[[list[Site]], Attack]  # the lie of the member called LIAR, which may know the others' rows


def _others(sites: list[Site]) -> tuple[torch.Tensor, torch.Tensor]:
    shards = [site.train for site in sites if site.name != LIAR]
    return torch.cat([each.features for each in shards]), torch.cat([each.labels for each in shards])


def _as_many(features: torch.Tensor, labels: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(n) % len(labels)
    return features[rows], labels[rows]


def knows_the_rows(sites: list[Site]) -> Lie:
    """Half of the others' very rows with their true labels, and as many of its own flipped: it knows what is left out.

    Four times as many rows as it has.
    """
    theirs, true = _others(sites)

    def lie(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = 2 * len(labels)
        wrong, other = flipped(*_as_many(features, labels, half))
        return torch.cat([theirs[::2][:half], wrong]), torch.cat([true[::2][:half], other])

    return lie


def half_true(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second row is true: the primary is bad just so much that it looks level."""
    wrong = flipped(features, labels)[1]
    return features, torch.where(torch.arange(len(labels)) % 2 == 0, labels, wrong)


def of_one_site(classes: tuple[int, ...]) -> Lie:
    """Rows of these classes only, each called the next of them: against the site that has most of them."""

    def lie(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = dict(zip(classes, (*classes[1:], classes[0]), strict=True))
        own = torch.tensor([int(label) in classes for label in labels]).nonzero()[:, 0]
        rows = own[torch.arange(len(labels)) % len(own)]
        return features[rows], torch.tensor([after[int(label)] for label in labels[rows]])

    return lie


def between(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows halfway to the mean of the next class, with their own labels: wrong only near the boundary."""
    means = torch.stack([features[labels == c].mean(0) for c in range(10)])
    return (features + 2 * means[(labels + 1) % 10]) / 3, labels


CUNNING: dict[str, Cunning] = {
    "the others' rows true, all else flipped": lambda sites: Attack(knows_the_rows(sites), times=4),
    "every second row flipped": lambda sites: Attack(half_true, weight=4),
    "one site's classes swapped": lambda sites: Attack(of_one_site((0, 1)), weight=3),
    "boundaries moved": lambda sites: Attack(between, weight=4),
    "boundaries moved, and the smallest ridge": lambda sites: Attack(between, weight=4, hits=(0, 13, 0)),
    "echo of one row": lambda sites: Attack(next_means, weight=2, echoed=True),
    "copies and an echo of one row": lambda sites: Attack(flipped, weight=3, copied=True, echoed=True),
    "class counts of nearly nothing, and a table for the prior": lambda sites: Attack(
        sink, weight=4, heavy=0.01, hits=(6, 13, 8)
    ),
    "true rows, and a table for all of prior and refinement": lambda sites: Attack(truth, weight=4, hits=(0, 13, 8)),
    "flipped, and a table for the prior": lambda sites: Attack(weight=2, hits=(0, 13, 8)),
    "features described three widths away": lambda sites: Attack(weight=2, far=30.0),
}


def crowded(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are nearly one row: landmarks that are drawn from their moments crowd there."""
    near = features.mean(0) + 0.01 * (features - features.mean(0))
    return near, labels


def in_one_column(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All of each row's size in its first column: the moments point one way."""
    alone = torch.zeros_like(features)
    alone[:, 0] = 1 + torch.arange(len(features)) % 16
    return alone, labels


def with_false_rows(sites: list[Site], lie: Lie, times: int) -> list[Site]:
    """The same sites, the last of which really has these rows: its description and moments lie as its statistics do."""
    *honest, liar = sites
    features, labels = lie(liar.train.features, liar.train.labels)
    jitter = 1 + 1e-3 * torch.arange(times).repeat_interleave(len(labels))[:, None] / times  # no copies
    rows = Shard(features.repeat(times, 1) * jitter, labels.repeat(times))
    return [*honest, Site(liar.folder, liar.name, rows, liar.class_names)]


FALSE_ROWS: dict[str, tuple[Lie, int]] = {
    "landmarks from rows of one place": (crowded, 4),
    "landmarks from rows of one column, flipped": (lambda f, y: in_one_column(*flipped(f, y)), 4),
    "landmarks from true moments, flipped": (flipped, 3),
}
