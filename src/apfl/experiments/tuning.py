"""Settings chosen on a part of each client's training rows, never on test rows.

A fifth of every client's training rows is held out; each point of the method's ``grid`` is trained on the rest for at
most 50 rounds and judged by the mean over clients of the accuracy on the held-out rows, after the last round. The
points of a gradient method are trained side by side as further heads of the same clients. Beside its own settings every
method with a ``grid`` chooses between the two normalisations that need nothing from other clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Shard
from apfl.data.partition import split
from apfl.errors import InputError
from apfl.experiments.checkpoint import Unfinished
from apfl.experiments.headline import HEADLINES
from apfl.experiments.metrics import headline_scores
from apfl.experiments.record import as_read
from apfl.files import replacing
from apfl.methods import Method, Round
from apfl.methods._grid import alike
from apfl.methods._training import Training, stacked_rounds
from apfl.models.file import Model

__all__ = ["ROUNDS", "Tuned", "combinations", "grid", "hold_out", "own_axes", "trained", "tune", "tune_once"]

ROUNDS = 50
HELD_OUT = 0.2
DIVERGED = 1e300  # the error of models that have diverged; a record cannot hold infinity
NORMALISE = ("root", "row")


@dataclass(frozen=True)
class Tuned:
    """The chosen method, and how every point of the grid did."""

    method: Method
    results: Sequence[dict[str, Any]]  # the settings of each point with its headline's mean over clients


def grid(method: Method, axes: Mapping[str, Sequence[Any]] | None = None) -> list[dict[str, Any]]:
    """The points to try: of ``axes``, or of the method's own grid; none for a method that has nothing to tune."""
    axes = own_axes(method) if axes is None else axes
    return list(combinations(axes)) if axes else []


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of a value for each setting."""
    return (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))


def own_axes(method: Method) -> Mapping[str, Sequence[Any]]:
    """The method's own grid, and the normalisations if it has that setting."""
    if method.grid is None:
        return {}
    settings = {field.name for field in fields(method)}
    return ({"normalise": NORMALISE} if "normalise" in settings else {}) | dict(method.grid)


def hold_out(clients: Sequence[Shard], seed: int) -> tuple[list[Shard], list[Shard]]:
    """Each client's rows as (training, validation); rows of one group stay together."""
    rng = np.random.default_rng((seed, 5))
    fit: list[Shard] = []
    validation: list[Shard] = []
    for shard in clients:
        groups = None if shard.groups is None else shard.groups.numpy()
        halves = split(np.arange(len(shard)), rng, test_fraction=HELD_OUT, groups=groups)
        for shards, half in zip((fit, validation), halves, strict=True):
            rows = torch.from_numpy(half)
            own = None if shard.groups is None else shard.groups[rows]
            on_device = rows.to(shard.features.device)
            targets = None if shard.targets is None else shard.targets[on_device]
            shards.append(
                Shard(shard.features[on_device], shard.labels[on_device], own, targets=targets, target=shard.target)
            )
    return fit, validation


def tune(
    method: Method,
    clients: Sequence[Shard],
    n_classes: int,
    seed: int,
    axes: Mapping[str, Sequence[Any]] | None = None,
    on_round: Callable[[float], None] | None = None,
    unfinished: Unfinished | None = None,
) -> Tuned:
    """Try a grid on a held-out part of the clients' training rows; ties go to the first point.

    ``on_round`` hears which share of the training is done, from 0 to 1; ``unfinished`` is where the grid was left.
    """
    points = grid(method, axes)
    if not points:
        return Tuned(method, [])
    fit, validation = hold_out(clients, seed)
    headline = HEADLINES[clients[0].target]
    worst = 0.0 if headline.higher_is_better else DIVERGED
    candidates = [replace(method, **point) for point in points]
    unfinished = unfinished or Unfinished()
    with unfinished.kept():
        for place, models in trained(candidates, fit, n_classes, seed, on_round, unfinished):
            scores = [each for each in headline_scores(models, validation, None) if each is not None]
            unfinished.judge(place, float(np.nan_to_num(np.mean(scores), nan=worst)) if scores else 0.0)
    results = [point | {headline.metric: unfinished.judged[place]} for place, point in enumerate(points)]
    best = max(range(len(points)), key=lambda i: headline.sign * float(results[i][headline.metric]))
    return Tuned(candidates[best], results)


def tune_once(
    path: Path,
    name: str,
    method: Method,
    clients: Sequence[Shard],
    n_classes: int,
    seed: int,
    run: Any = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    on_round: Callable[[float], None] | None = None,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60,
) -> Tuned:
    """`tune`, unless ``path`` (JSON lines) has the result already; ``run`` says on what data. New results are added.

    With ``checkpoint`` a grid that is stopped leaves that file, and the next call goes on from it.
    """
    axes = own_axes(method) if axes is None else axes
    what = as_read([name, asdict(method), seed, run, axes])
    if known := _known(path, what):
        return Tuned(replace(method, **known[0]), known[1])
    unfinished = Unfinished(checkpoint, what, checkpoint_seconds)
    tuned = tune(method, clients, n_classes, seed, axes, on_round, unfinished)
    chosen = {key: getattr(tuned.method, key) for key in axes}
    if chosen:
        _keep(path, {"method": name, "chosen": chosen, "results": tuned.results, "run": what})
    unfinished.over()
    return tuned


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _known(path: Path, what: Any) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The chosen settings and the results of this tuning, if the file has them."""
    for line in _lines(path):
        try:
            known = json.loads(line)
            run, chosen, results = known["run"], known["chosen"], known["results"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read as results of tuning ({error!r}); remove it to tune again"
            ) from error
        if run == what:
            return chosen, results
    return None


def _keep(path: Path, result: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in [*_lines(path), json.dumps(result)]))


def trained(
    candidates: Sequence[Any],
    clients: Sequence[Shard],
    n_classes: int,
    seed: int,
    on_round: Callable[[float], None] | None = None,
    unfinished: Unfinished | None = None,
) -> Iterator[tuple[int, Sequence[Model]]]:
    """The place and the final models of every candidate that is not judged yet, as they are done.

    Gradient methods are trained side by side where they differ in nothing but settings that each head has for itself;
    all others ``together``, as the method has it.
    """
    tell, kept = on_round or (lambda share: None), unfinished or Unfinished()
    if isinstance(candidates[0], Training):
        yield from _side_by_side(candidates, clients, n_classes, seed, tell, kept)
    elif left := [place for place in range(len(candidates)) if place not in kept.judged]:
        points, before = [candidates[place] for place in left], len(candidates) - len(left)
        for n, (place, final) in enumerate(points[0].together(points, clients, n_classes, seed), before + 1):
            tell(n / len(candidates))
            yield left[place], final.models


def _side_by_side(
    candidates: Sequence[Any],
    clients: Sequence[Shard],
    n_classes: int,
    seed: int,
    tell: Callable[[float], None],
    kept: Unfinished,
) -> Iterator[tuple[int, Sequence[Model]]]:
    """`trained` of gradient methods: one stack for all candidates that agree in what a stack has in common."""
    short = [replace(each, n_rounds=min(each.n_rounds, ROUNDS)) for each in candidates]
    groups = alike(short, without=short[0].stacked)
    for n, places in enumerate(groups):
        if all(place in kept.judged for place in places):
            continue
        points = [short[place] for place in places]
        last: list[Round] = []  # and none before it: each has the models of every point
        for last in stacked_rounds(points, clients, n_classes, seed, kept.state_of(places)):
            state = last[0].state or {}
            kept.reached(places, state)
            tell((n + int(state["progress"][0]) / points[0].n_rounds) / len(groups))
        yield from zip(places, (each.models for each in last), strict=True)
