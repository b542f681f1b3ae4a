"""Checks for a method of your own: `check_method` runs what every built-in method is tested for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.errors import InputError
from apfl.methods import Method, Round
from apfl.models.file import Container, Model

__all__ = ["check_method"]

N_CLASSES = 3


def check_method(method: Method | type[Method]) -> None:
    """Raise an AssertionError with a sentence if the method breaks a promise that `apfl run` and `bench` rely on.

    Give a class to check its default settings, or an instance with settings that keep it quick. The federation is a
    small one of clusters that any classifier can tell apart. What it ``predicts`` beside classes is checked too.

    >>> from apfl import load_method
    >>> check_method(load_method("local_ridge", d=32))
    """
    if isinstance(method, type):
        _require(issubclass(method, Method), f"{method.__name__} does not inherit apfl.Method")
        method = method()
    name = type(method).__name__
    _check_settings(name, method)
    _check_rounds(name, method)
    _check_learning(name, method)
    _check_personal(name, method)
    for target in method.predicts:
        if target != "classification":
            _check_targets(name, method, target)
    try:
        list(method.rounds([], N_CLASSES, 0))
    except InputError:
        return
    raise AssertionError(f"{name} accepts a federation of no clients; raise apfl.InputError")


def _check_settings(name: str, method: Method) -> None:
    _require(isinstance(method, Method), f"{name} does not inherit apfl.Method")
    _require(is_dataclass(method), f"{name} is not a dataclass; decorate it with @dataclass(frozen=True)")
    _require(bool((type(method).__doc__ or "").strip()), f"{name} has no docstring, which `apfl methods` shows")
    settings = asdict(method)
    try:
        json.dumps(settings)
    except TypeError as error:
        raise AssertionError(f"the settings of {name} cannot be written to a record ({error})") from error
    for key, values in (method.grid or {}).items():
        _require(key in settings, f"the grid of {name} has '{key}', which is not a setting")
        for value in values:
            replace(method, **{key: value})


def _check_rounds(name: str, method: Method) -> None:
    """One model for each client, bytes that only grow, the same again from the same seed, and inputs left alone."""
    clients, untouched = _clusters([40, 13, 25]), _clusters([40, 13, 25])
    rounds, again = (list(method.rounds(clients, N_CLASSES, 5)) for _ in range(2))
    _require(len(rounds) == method.n_rounds, f"{name} yields {len(rounds)} rounds, and n_rounds is {method.n_rounds}")
    for former, later in pairwise(rounds):
        for what in ("index", "bytes_up", "bytes_down"):
            _require(vars(later)[what] >= vars(former)[what], f"{what} of {name} falls from one round to the next")
    last = rounds[-1]
    _require(
        (last.index == 0) == (last.bytes_up == 0),
        f"{name} states {last.index} exchanges and {last.bytes_up} bytes up; both are 0 or neither",
    )
    _check_models(name, last, clients)
    for former, later in zip(rounds, again, strict=True):  # an earlier round must outlive the later ones
        for one, two in zip(former.models, later.models, strict=True):
            same = torch.equal(one.scores(clients[0].features), two.scores(clients[0].features))
            _require(same, f"{name} gives other models when it is run again with the same seed")
    for shard, before in zip(clients, untouched, strict=True):
        same = torch.equal(shard.features, before.features) and torch.equal(shard.labels, before.labels)
        _require(same, f"{name} changes the rows that it is given")


def _check_models(name: str, last: Round, clients: Sequence[Shard], n_columns: int = N_CLASSES) -> None:
    _require(len(last.models) == len(clients), f"{name} gives {len(last.models)} models to {len(clients)} clients")
    for model, shard in zip(last.models, clients, strict=True):
        _require(isinstance(model, Model), f"{name} gives a {type(model).__name__}, which is not an apfl.Model")
        shape, expected = tuple(model.scores(shard.features).shape), (len(shard), n_columns)
        _require(shape == expected, f"a model of {name} gives scores {shape}; expected {expected}")
        _require(isinstance(model.container(), Container), f"a model of {name} has no Container to be written as")


def _check_learning(name: str, method: Method) -> None:
    """Clusters far apart are told apart on fresh rows."""
    models = _last(method, _clusters([30] * 4)).models
    for model, fresh in zip(models, _clusters([30] * 4, seed=1), strict=True):
        right = float((model.scores(fresh.features).argmax(1) == fresh.labels).double().mean())
        _require(right > 0.95, f"{name} gets {right:.0%} of rows right that any linear classifier can tell apart")


def _check_personal(name: str, method: Method) -> None:
    """Clients have two classes each and name them differently: personalising is worth it even to a method that asks."""
    shards = _clusters([40, 13, 25], skew=True)
    clients = [Shard(shard.features, (shard.labels + k) % N_CLASSES) for k, shard in enumerate(shards)]
    last, rows = _last(method, clients), torch.cat([shard.features for shard in clients])
    alike = all(torch.equal(model.scores(rows), last.models[0].scores(rows)) for model in last.models)
    _require(
        method.personal is not alike,
        f"{name}.personal is {method.personal}, but its clients' models are {'the same' if alike else 'different'}",
    )
    if method.admits:
        _require(last.admit is not None, f"{name}.admits is True, but its last round has no `admit`")
    if last.admit is not None:
        n_late = len(last.admit(clients[1:]))
        _require(n_late == 2, f"`admit` of {name} gives {n_late} models to 2 late clients")


def _check_targets(name: str, method: Method, target: Target) -> None:
    """Numbers or several labels are learnt on fresh rows, the same again from the same seed, and by late clients."""
    clients, fresh = _targets([30] * 4, target), _targets([30] * 4, target, seed=1)
    last, again = _last(method, clients, 2), _last(method, clients, 2)
    _check_models(name, last, clients, 2)
    for model, other, shard in zip(last.models, again.models, fresh, strict=True):
        scores = model.scores(shard.features).double()
        same = torch.equal(scores, other.scores(shard.features).double())
        _require(same, f"{name} gives other models for {target} when it is run again with the same seed")
        truth = shard.responses(2)
        if target == "regression":
            left = float((scores - truth).square().mean() / (truth - truth.mean(0)).square().mean())
            _require(left < 0.5, f"{name} leaves {left:.0%} of the variance of numbers that clusters decide")
        else:
            right = float(((scores > 0.5) == (truth > 0.5)).double().mean())
            _require(right > 0.9, f"{name} gets {right:.0%} of labels right that any linear model can tell apart")
    if last.admit is not None:
        _check_models(name, replace(last, models=last.admit(fresh)), fresh, 2)


def _targets(sizes: Sequence[int], target: Target, seed: int = 0) -> list[Shard]:
    """The clusters with numbers, or with labels that two of three clusters have, in place of classes."""
    numbers = torch.tensor([[1.0, -1.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    of_class = numbers if target == "regression" else labels
    return [replace(each, targets=of_class[each.labels], target=target) for each in _clusters(sizes, seed)]


def _clusters(sizes: Sequence[int], seed: int = 0, *, skew: bool = False) -> list[Shard]:
    """Clients whose classes are clusters around the same centres, far apart; with ``skew`` each has two classes."""
    rng, centres = np.random.default_rng(seed), 4 * np.eye(N_CLASSES, 8)
    drawn = [(k + rng.integers(2 if skew else N_CLASSES, size=n)) % N_CLASSES for k, n in enumerate(sizes)]
    rows = [centres[labels] + 0.3 * rng.normal(size=(len(labels), 8)) for labels in drawn]
    return [Shard(torch.from_numpy(x).float(), torch.from_numpy(y)) for x, y in zip(rows, drawn, strict=True)]


def _last(method: Method, clients: Sequence[Shard], n_columns: int = N_CLASSES) -> Round:
    (*_, last) = method.rounds(clients, n_columns, 0)
    return last


def _require(holds: Any, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
