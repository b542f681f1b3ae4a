"""What else could be chosen or changed, judged on training rows alone: the list of what won and what lost in the docs.

    python benchmarks/further.py --data ../shared/data --settings pacs --seeds 0 1

A fifth of every client's *training* rows is held out. On the rest `apfl` is fitted as it is and with one thing changed,
and both are judged by the mean over clients of the accuracy on the held-out rows. Test rows are not touched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import settings
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.experiments.run import federate
from apfl.experiments.tuning import hold_out
from apfl.maths.hits import Grid, choose, grid, hits, local_prior
from apfl.maths.leaveout import LeftOut, fit_refinement, hat_basis, leverage_sketch
from apfl.maths.maps import FeatureMap
from apfl.maths.personalise import solve_primary
from apfl.maths.ridge import Statistics, one_hot
from apfl.methods import load_method
from apfl.methods._analytic import shared_normaliser, stream_maps
from apfl.methods.apfl import APFL

Criterion = Callable[[Tensor, Tensor], Tensor]  # scores (balances, n, c), labels -> (balances,), the more the better


def squared_error(scores: Tensor, labels: Tensor) -> Tensor:
    return -(scores - one_hot(labels, scores.shape[2]).float()).square().sum((1, 2))


def margin(scores: Tensor, labels: Tensor) -> Tensor:
    """Hits with a soft edge: a row counts fully from a lead of 0.1 on."""
    own = scores.gather(2, labels[None, :, None].expand(len(scores), -1, 1))[:, :, 0]
    others = scores.scatter(2, labels[None, :, None].expand(len(scores), -1, 1), -torch.inf).amax(2)
    return ((own - others) / 0.1).clamp(-1, 1).sum(1)


def log_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Of a softmax at temperature 0.1."""
    return (scores * 10).log_softmax(2).gather(2, labels[None, :, None].expand(len(scores), -1, 1)).sum((1, 2))


@dataclass(frozen=True)
class Change:
    """One thing that is done otherwise."""

    method: dict[str, object]
    centred: bool = False
    class_weight: float = 0.0  # rows weigh n_class ** -class_weight
    smoothing: float = 0.0  # of the targets
    criterion: Criterion | None = None  # instead of hits
    by_client: bool = False  # each client's table counts the same, however many rows it has
    gammas: Sequence[float] = (1.0,)  # times the chosen one; of several the one with most left-out hits


CHANGES = {
    "as it is": Change({}),
    "relu": Change({"activation_primary": "relu", "activation_refinement": "relu"}),
    "gelu": Change({"activation_primary": "gelu", "activation_refinement": "gelu"}),
    "cosine": Change({"activation_primary": "cosine", "activation_refinement": "cosine"}),
    "row": Change({"normalise": "row"}),
    "row and relu": Change({"normalise": "row", "activation_primary": "relu", "activation_refinement": "relu"}),
    "standardised": Change({"normalise": "standardise"}),
    "centred": Change({}, centred=True),
    "class weights n^-1/2": Change({}, class_weight=0.5),
    "class weights n^-1": Change({}, class_weight=1.0),
    "label smoothing 0.1": Change({}, smoothing=0.1),
    "squared error": Change({}, criterion=squared_error),
    "margin": Change({}, criterion=margin),
    "log loss": Change({}, criterion=log_loss),
    "hits, clients alike": Change({}, by_client=True),
    "gamma by left-out hits": Change({}, gammas=(0.1, 0.316, 1.0, 3.16)),
    "d_refinement 2048": Change({"d_refinement": 2048}),
    "d_refinement 16384": Change({"d_refinement": 16384}),
    "d 16384": Change({"d_primary": 16384}),
}


def table_of(
    left: LeftOut, labels: Tensor, counts: Tensor, totals: Tensor, smoothing: float, tried: Grid, criterion: Criterion
) -> Tensor:
    """As `apfl.maths.hits.hits`, with another criterion."""
    own = one_hot(labels, len(counts))
    prior = local_prior(counts - own, totals - own, smoothing)
    balances = torch.tensor(tried.balances, dtype=torch.float32, device=labels.device)[:, None, None]
    table = torch.zeros(tried.shape, dtype=torch.float64, device=labels.device)
    for b, beta in enumerate(tried.betas):
        refined = balances * left.refinement(beta).float()
        for t, tau in enumerate(tried.taus):
            table[b, :, t] = criterion((own - left.primary + tau * prior).float() + refined, labels).double()
    return table


def accuracy(change: Change, clients: Sequence[Shard], judged: Sequence[Shard], c: int, seed: int) -> float:
    """Mean client accuracy on the held-out rows."""
    method: APFL = load_method("apfl", **change.method)  # type: ignore[assignment]
    features = clients[0].features
    widths = method.widths(sum(map(len, clients)), features.shape[1])
    plain = shared_normaliser(method.normalise, clients)
    middle = torch.cat([plain(s.features) for s in clients]).mean(0) if change.centred else 0.0
    activations = (method.activation_primary, method.activation_refinement)
    maps = stream_maps(features, plain, widths, activations, seed, False)

    def seen(shard: Shard, stream: FeatureMap) -> Tensor:
        z = plain(shard.features)
        return stream(shared_normaliser("row", clients)(z - middle) if change.centred else z).double()

    totals = torch.stack([torch.bincount(s.labels, minlength=c) for s in clients]).sum(0).double()
    weight = totals.clamp_min(1) ** -change.class_weight
    weight = weight / weight.mean()
    target = [(1 - change.smoothing) * one_hot(s.labels, c) + change.smoothing / c for s in clients]
    phis = [seen(s, maps[0]) for s in clients]
    roots = [weight[s.labels].sqrt()[:, None] for s in clients]
    rows = torch.cat([phi * w for phi, w in zip(phis, roots, strict=True)])
    weighted = torch.cat([y * w for y, w in zip(target, roots, strict=True)])
    energy = float(weighted.square().sum())
    summed = Statistics(rows.T @ rows, rows.T @ weighted, totals, len(rows), energy)
    del rows
    first = solve_primary(summed, "auto")
    best: tuple[float, float] | None = None
    for factor in change.gammas:
        primary = first if factor == 1 else solve_primary(summed, first.gamma * factor)
        sketch = leverage_sketch(primary.factor, method.sketch, seed)
        unit = (
            float(summed.autocorrelation.diagonal().sum()) / len(summed.autocorrelation) / summed.n_samples * widths[1]
        )
        tried = grid(unit, beta=None, balance=None, tau=None)
        residuals, tables = [], []
        for k, shard in enumerate(clients):
            counts = one_hot(shard.labels, c).sum(0)
            residual = target[k] - phis[k] @ primary.weights
            psi = seen(shard, maps[1])
            left = LeftOut(hat_basis(psi), roots[k] * (phis[k] @ sketch), residual, sketched=True)
            if change.criterion is None:
                table = hits(left, shard.labels, counts, totals, method.smoothing, tried).double()
            else:
                table = table_of(left, shard.labels, counts, totals, method.smoothing, tried, change.criterion)
            tables.append(table / len(shard) if change.by_client else table)
            residuals.append(residual)
        summed_table = torch.stack(tables).sum(0)
        beta, balance, tau = choose(summed_table, tried)
        right = []
        for k, (shard, judge) in enumerate(zip(clients, judged, strict=True)):
            if len(judge):
                refinement = fit_refinement(seen(shard, maps[1]), residuals[k], beta)
                prior = local_prior(one_hot(shard.labels, c).sum(0), totals, method.smoothing)
                scores = (
                    seen(judge, maps[0]) @ primary.weights + balance * seen(judge, maps[1]) @ refinement + tau * prior
                )
                right.append(float((scores.argmax(1) == judge.labels).double().mean()))
        if best is None or float(summed_table.max()) > best[0]:
            best = float(summed_table.max()), float(np.mean(right))
    assert best is not None
    return best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=settings.DATA)
    parser.add_argument("--settings", nargs="+", default=["cifar100", "tiny", "pacs"], help="beginnings of their names")
    parser.add_argument("--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES), metavar="CHANGE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for data, protocol in settings.chosen(arguments.settings):
        dataset = settings.load(arguments.data, data)
        for seed in arguments.seeds:
            federation = federate(dataset, protocol, seed).to(arguments.device)
            fitted, judged = hold_out(federation.train, seed)
            for name in arguments.changes:
                found = accuracy(CHANGES[name], fitted, judged, federation.n_classes, seed)
                row = {"setting": settings.name_of(data, protocol), "seed": seed, "change": name, "held_out": found}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
